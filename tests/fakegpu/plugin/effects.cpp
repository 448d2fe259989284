#include "effects.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <memory>
#include <stdexcept>

#include "libfakecuda.h"

namespace fakegpu {

namespace {

std::unique_ptr<const at::ThreadLocalState> fresh_state;

c10::Stream current_stream(c10::Device gpu) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(gpu);
}

void run(void* data) {
  (*static_cast<Effect*>(data))();
}

void drop(void* data) {
  delete static_cast<Effect*>(data);
}

Effect* named(const std::string& name, Effect effect) {
  return new Effect([name, effect = std::move(effect)] { run_effect(name, effect); });
}

}  // namespace

void remember_fresh_state() {
  fresh_state = std::make_unique<const at::ThreadLocalState>();
}

void run_effect(const std::string& name, const Effect& effect) {
  at::ThreadLocalStateGuard fresh(*fresh_state);
  at::DisableRecordFunctionGuard unseen;
  at::NoGradGuard no_grad;
  try {
    effect();
  } catch (const c10::Error& error) {
    throw std::runtime_error(name + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    throw std::runtime_error(name + ": " + error.what());
  }
}

void queue(c10::Device gpu, const std::string& name, Effect effect) {
  // the default stream's handle is null, which means that of the current device
  c10::DeviceGuard guard(gpu);
  void* stream = current_stream(gpu).native_handle();
  int error = fakecuda_submit(stream, nullptr, 0, 0, run, drop, named(name, std::move(effect)));
  TORCH_CHECK(error == 0, name, ": the fake CUDA refused its effect with error ", error);
}

void with_attached(const std::string& name, Effect effect, c10::function_ref<void()> launch) {
  fakecuda_attach(run, drop, named(name, std::move(effect)));
  launch();
  if (fakecuda_attached()) fakecuda_attach(nullptr, nullptr, nullptr);
}

void synchronize(c10::Device gpu) {
  current_stream(gpu).synchronize();
}

bool capturing(c10::Device gpu) {
  return c10::impl::VirtualGuardImpl(at::kCUDA).isStreamCapturing(current_stream(gpu));
}

bool runs_later(c10::Device gpu) {
  return fakecuda_deferred() || capturing(gpu);
}

}  // namespace fakegpu
