#include "copies.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "effects.h"
#include "libfakecuda.h"
#include "kernels.h"

namespace fakegpu {

namespace {

const std::string kName = "aten::copy_";

// torch moves these as bytes, with a copy of CUDA's runtime, which the fake carries out.
bool moves_bytes(const at::Tensor& to, const at::Tensor& from) {
  return to.dtype() == from.dtype() && to.sizes() == from.sizes() && to.is_contiguous() &&
      from.is_contiguous() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

bool peers(const at::Tensor& to, const at::Tensor& from) {
  int can = 0;
  cudaDeviceCanAccessPeer(&can, to.device().index(), from.device().index());
  return can;
}

void copy_between_gpus(
    const at::Tensor& to, const at::Tensor& from, c10::function_ref<void()> original) {
  if (!peers(to, from)) {
    // by way of temporary tensors, whose own copies are computed
    original();
    return;
  }
  // one kernel, on the source's stream, which the destination's stream waits for
  auto effect = [to = cpu_alias(to), from = cpu_alias(from)] { to.copy_(from); };
  with_attached(kName, effect, [&] {
    InsideKernel inside;
    original();
  });
}

void copy_with_host(
    const at::Tensor& to, const at::Tensor& from, c10::function_ref<void()> original) {
  auto gpu = to.is_cuda() ? to.device() : from.device();
  // torch reads the host's tensor before the call returns
  auto source = from.is_cpu() && runs_later(gpu) ? from.clone() : cpu_alias(from);
  {
    InsideKernel inside;
    original();
  }
  queue(gpu, kName, [to = cpu_alias(to), source] { to.copy_(source); });
  // and writes it before the call returns
  if (to.is_cpu() && fakecuda_deferred()) synchronize(gpu);
}

}  // namespace

bool copy_between_devices(
    const at::Tensor& to, const at::Tensor& from, c10::function_ref<void()> original) {
  if (to.device() == from.device()) return false;
  if (moves_bytes(to, from)) {
    InsideKernel inside;
    original();
  } else if (to.is_cuda() && from.is_cuda()) {
    copy_between_gpus(to, from, original);
  } else {
    copy_with_host(to, from, original);
  }
  return true;
}

}  // namespace fakegpu
