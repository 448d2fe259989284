// The GPUs' own clocks, which disagree with the host's: see gpu_clocks.cpp.
#pragma once
#include "fake.h"

namespace fake {

// How many nanoseconds the clock of a GPU counts in an interval of the host's.
double counted_ns(int device, int64_t host_ns);
// When something on a GPU seems to happen in a profile whose recording began at `since`: in
// nanoseconds of the host's clock, as all times here.
int64_t profiled_time(int device, int64_t time, int64_t since);
// How many records of kernels at the start of a profile have times of another clock.
int early_records();

}  // namespace fake
