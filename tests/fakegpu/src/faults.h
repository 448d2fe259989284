// Faults of GPUs that the settings ask for: see faults.cpp.
#pragma once
#include "fake.h"

namespace fake {

enum class Fault { Allocation, Launch, Collective, Ecc, Gpu };
constexpr int kFaults = 5;

struct Incidents {  // what became of a GPU
  std::atomic<uint64_t> counted[kFaults];  // what may meet each fault, in all processes so far
  std::atomic<uint64_t> ecc_errors;
  std::atomic<bool> lost;
};
Incidents& incidents(int physical);  // in the memory that processes share

void read_faults();

// What a call on this GPU returns since a fault of it; cudaSuccess without one.
cudaError_t broken(int device);
// Count what is about to happen on a GPU; an error if it cannot happen.
cudaError_t count_allocation(int device);
cudaError_t count_operation(int device, Kind kind);
bool count_collective(int device);  // whether it fails

}  // namespace fake
