// CPU tensors that share the memory of GPU tensors. The fake's device memory is memory of the host.
//
// An alias owns nothing: as with a queued kernel of a real GPU, the memory may be given to another
// tensor before the alias is read, and then the result is wrong.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

#include <vector>

namespace fakegpu {

using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

// The alias of a GPU tensor, strided or sparse (COO); any other tensor is returned as it is.
at::Tensor cpu_alias(const at::Tensor& tensor);

// The value with aliases for GPU tensors, also in lists, and the CPU for a GPU.
c10::IValue cpu_alias(const c10::IValue& value);

void for_each_tensor(const c10::IValue& value, c10::function_ref<void(const at::Tensor&)> visit);

// The tensors of `values`, those of lists included.
Tensors tensors_of(c10::ArrayRef<c10::IValue> values);

// The GPU on which an operator with these arguments runs: a tensor's, or a named one, or else the
// current one.
c10::Device gpu_of(c10::ArrayRef<c10::IValue> arguments);

bool on_several_gpus(c10::ArrayRef<c10::IValue> arguments);

// Copies `from` to `to`, which must have the same sizes: a kernel's result to its place.
void put(const at::Tensor& to, const at::Tensor& from);

}  // namespace fakegpu
