#include "aliases.h"

#include <ATen/core/List.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace fakegpu {

namespace {

at::Tensor strided_alias(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  at::DataPtr borrowed(storage->_mutable_data_ptr_no_checks().get(), at::Device(at::kCPU));
  c10::Storage shared(
      c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(borrowed), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  return alias;
}

}  // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  if (tensor.layout() == at::kStrided) return strided_alias(tensor);
  if (tensor.layout() != at::kSparse) return tensor;
  return at::_sparse_coo_tensor_unsafe(
      strided_alias(tensor._indices()),
      strided_alias(tensor._values()),
      tensor.sizes(),
      tensor.options().device(at::kCPU),
      tensor.is_coalesced());
}

c10::IValue cpu_alias(const c10::IValue& value) {
  if (value.isTensor()) return cpu_alias(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> aliases;
    for (const auto& tensor : value.toTensorVector()) aliases.push_back(cpu_alias(tensor));
    return aliases;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> aliases;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      aliases.push_back(tensor ? std::optional(cpu_alias(*tensor)) : tensor);
    }
    return aliases;
  }
  if (value.isDevice()) return at::Device(at::kCPU);
  return value;
}

void for_each_tensor(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const auto& tensor : value.toTensorVector()) visit(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      if (tensor) visit(*tensor);
    }
  }
}

Tensors tensors_of(c10::ArrayRef<c10::IValue> values) {
  Tensors tensors;
  for (const auto& value : values) {
    for_each_tensor(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

c10::Device gpu_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> found;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
    });
    if (!found && argument.isDevice() && argument.toDevice().is_cuda()) {
      found = argument.toDevice();
    }
  }
  if (found && found->has_index()) return *found;
  return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
}

bool on_several_gpus(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> first;
  bool several = false;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.is_cuda()) return;
      if (!first) first = tensor.device();
      several |= tensor.device() != *first;
    });
  }
  return several;
}

void put(const at::Tensor& to, const at::Tensor& from) {
  if (!to.defined() || !from.defined()) return;
  TORCH_CHECK(
      to.sizes() == from.sizes(),
      "the GPU's kernel returned sizes ",
      to.sizes(),
      ", the computation on the host ",
      from.sizes());
  TORCH_CHECK(to.layout() == at::kStrided, "it returned a tensor of ", to.layout());
  to.copy_(from);
}

}  // namespace fakegpu
