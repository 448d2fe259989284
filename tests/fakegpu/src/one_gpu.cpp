// Calls with parts of two GPUs: see one_gpu.h.
#include "one_gpu.h"

#include <cstdio>

namespace fake {

bool misplaced(const char* call, const char* part, int device, const char* rest, int of_device) {
  if (device == of_device) return false;
  fprintf(stderr, "fakecuda: %s: %s of GPU %d used with %s GPU %d\n", call, part, device, rest,
          of_device);
  return true;
}

cudaError_t misplaced_kernel(const char* call, const Stream* stream) {
  int current = current_device();
  bool wrong = misplaced(call, "stream", stream->device, "the current", current);
  return wrong ? fail(cudaErrorInvalidResourceHandle) : cudaSuccess;
}

}  // namespace fake
