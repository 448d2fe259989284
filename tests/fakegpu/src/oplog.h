// The log of operations: see oplog.cpp.
#pragma once
#include "fake.h"

namespace fake {

void log_from_setting();  // FAKECUDA_LOG, read by `init`
void log_operation(const Op& op, const Stream* stream, int64_t begin, int64_t end);
// `kind` is "record" or "wait"; the time is that of the event.
void log_event(const char* kind, const Event* event, const Stream* stream);

}  // namespace fake
