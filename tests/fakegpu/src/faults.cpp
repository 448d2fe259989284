// Faults by number: the n-th allocation, launch or collective on a GPU fails, or its memory, or the
// whole GPU.
//
// FAKECUDA_FAIL_ALLOC, _FAIL_LAUNCH, _FAIL_NCCL, _FAIL_ECC and _FAIL_GPU are GPU-N, such as 1-200:
// the 200th on GPU 1 of the machine. N counts what all processes of the machine do whose
// environment has the variable, so that one of them meets the fault.
//
// - An allocation fails for lack of memory, and so do all later ones of this process on this GPU:
//   torch asks again after it has freed what it keeps.
// - A launch and an error of the memory (ECC) end the process's context on the GPU: the launch
//   itself succeeds, and each later call of the process on this GPU returns the error, as with
//   errors that GPUs report late. NVML counts the error of the memory.
// - A collective fails in the call that starts it, and breaks its communicator.
// - A GPU is lost for all processes, also for NVML.
//
// Not faithful: CUDA's documentation allows any call of the process to return the error of a
// context, also one on another GPU; the kernel's log has no Xid.
#include "faults.h"

#include <array>
#include <cstdio>

namespace fake {

static std::array<std::atomic<cudaError_t>, kMaxDevices> ended;  // contexts, by the error
static std::array<std::atomic<bool>, kMaxDevices> full;

constexpr const char* kVariables[kFaults] = {"FAKECUDA_FAIL_ALLOC", "FAKECUDA_FAIL_LAUNCH",
                                             "FAKECUDA_FAIL_NCCL", "FAKECUDA_FAIL_ECC",
                                             "FAKECUDA_FAIL_GPU"};

// The number that the settings tell for a fault of a GPU; negative without one.
static int number_of(Fault fault, int physical) {
  using Numbers = std::array<std::array<int, kMaxDevices>, kFaults>;
  static const Numbers numbers = [] {
    Numbers read;
    for (int kind = 0; kind < kFaults; kind++)
      for (int gpu = 0; gpu < kMaxDevices; gpu++) read[kind][gpu] = planted(kVariables[kind], gpu);
    return read;
  }();
  return numbers[static_cast<int>(fault)][physical];
}

void read_faults() { number_of(Fault::Allocation, 0); }

// Counts one more, and says whether it is the one that meets the fault.
static bool strikes(Fault fault, int device) {
  int physical = physical_of(device);
  int kind = static_cast<int>(fault);
  int number = number_of(fault, physical);
  if (number < 0) return false;
  uint64_t count = ++incidents(physical).counted[kind];
  if (count != static_cast<uint64_t>(number)) return false;
  fprintf(stderr, "fakecuda: GPU %d fails now, as %s=%d-%d asks\n", device, kVariables[kind],
          physical, number);
  return true;
}

cudaError_t broken(int device) {
  if (incidents(physical_of(device)).lost) return fail(cudaErrorDeviceUnavailable);
  return fail(ended[device]);
}

cudaError_t count_allocation(int device) {
  if (cudaError_t error = broken(device)) return error;
  if (strikes(Fault::Allocation, device)) full[device] = true;
  return full[device] ? fail(cudaErrorMemoryAllocation) : cudaSuccess;
}

cudaError_t count_operation(int device, Kind kind) {
  Incidents& gpu = incidents(physical_of(device));
  if (kind == Kind::Host) return broken(device);
  if (strikes(Fault::Gpu, device)) gpu.lost = true;
  if (cudaError_t error = broken(device)) return error;
  if (kind != Kind::Kernel) return cudaSuccess;
  if (strikes(Fault::Launch, device)) ended[device] = cudaErrorLaunchFailure;
  if (strikes(Fault::Ecc, device)) {
    ended[device] = cudaErrorECCUncorrectable;
    gpu.ecc_errors++;
  }
  return cudaSuccess;
}

bool count_collective(int device) { return strikes(Fault::Collective, device); }

}  // namespace fake
