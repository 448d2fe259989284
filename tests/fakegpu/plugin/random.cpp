#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

#include "aliases.h"

namespace fakegpu {

namespace {

uint64_t number(const at::Tensor& tensor) {
  return *static_cast<const uint64_t*>(tensor.const_data_ptr());
}

}  // namespace

Draw::Draw(at::Generator gpu_generator, bool captured) {
  std::lock_guard<std::mutex> held(gpu_generator.mutex());
  if (!captured) {
    seed_ = gpu_generator.current_seed();
    offset_ = gpu_generator.get_offset();
    return;
  }
  auto [seed, offset, place] = gpu_generator.philox_state(0);
  replay_seed_ = cpu_alias(seed);
  replay_offset_ = cpu_alias(offset);
  offset_ = number(cpu_alias(place));
}

uint64_t Draw::seed() const {
  uint64_t seed = seed_;
  uint64_t offset = offset_;
  if (replay_seed_.defined()) {
    seed += number(replay_seed_);
    offset += number(replay_offset_);
  }
  return seed * 0x9E3779B97F4A7C15ull + offset * 0xC2B2AE3D27D4EB4Full + 1;
}

at::Generator default_generator(c10::Device gpu) {
  return at::globalContext().defaultGenerator(gpu);
}

at::Generator cpu_generator(uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

}  // namespace fakegpu
