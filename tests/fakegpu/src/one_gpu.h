// What a call takes must belong to one GPU, as CUDA and NCCL demand: a call with parts of two GPUs
// prints the misuse and returns the error of the real library, or aborts where that has none.
#pragma once
#include "fake.h"

namespace fake {

// Whether a part belongs to another GPU than the rest of a call; prints it.
bool misplaced(const char* call, const char* part, int device, const char* rest, int of_device);
// The error of a kernel on a stream of another GPU than the current one.
cudaError_t misplaced_kernel(const char* call, const Stream* stream);

}  // namespace fake
