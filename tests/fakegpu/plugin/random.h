// Random numbers: an operator draws on the host from a CPU generator whose seed follows from the
// state of the GPU's generator. The numbers differ from a real GPU's, but depend on the same
// things: torch.cuda.manual_seed, the saved and restored state, what was drawn before. A replayed
// graph draws anew, the numbers that eager code would draw.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace fakegpu {

// What a GPU's generator would give an operator that is called now.
class Draw {
 public:
  Draw() = default;
  Draw(at::Generator gpu_generator, bool captured);

  // For an effect: in a graph, the value of the replay that runs.
  uint64_t seed() const;

 private:
  uint64_t seed_ = 0;
  uint64_t offset_ = 0;
  at::Tensor replay_seed_;  // memory that each replay of a graph fills before its kernels
  at::Tensor replay_offset_;
};

at::Generator default_generator(c10::Device gpu);

at::Generator cpu_generator(uint64_t seed);

}  // namespace fakegpu
