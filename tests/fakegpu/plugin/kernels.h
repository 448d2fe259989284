// The kernels that replace torch's CUDA kernels in the dispatcher. Each is boxed: it takes its
// arguments from a stack and leaves its results there, so that one class serves every operator.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>

#include "aliases.h"
#include "rules.h"

namespace fakegpu {

// While one exists, this thread is inside torch's CUDA kernel of an operator that is computed as a
// whole: the operators that this kernel calls need no numbers of their own.
class InsideKernel {
 public:
  InsideKernel();
  ~InsideKernel();
  InsideKernel(const InsideKernel&) = delete;
};

// torch's CUDA kernel - allocations, launches, generators - and then the numbers, queued as an
// effect: from a rule, or from the same operator on the CPU.
class Computed : public c10::OperatorKernel {
 public:
  Computed(const c10::OperatorHandle& op, c10::SafeKernelFunction original, const Rule* rule);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  std::optional<Draw> draw(c10::ArrayRef<c10::IValue> arguments, c10::Device gpu) const;

  std::string name_;
  c10::SafeKernelFunction original_;
  const Rule* rule_;
  std::optional<size_t> generator_;  // the position of this argument
};

// aten::copy_
class Copied : public c10::OperatorKernel {
 public:
  Copied(const c10::OperatorHandle& op, c10::SafeKernelFunction original);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  c10::SafeKernelFunction original_;
  Computed general_;
};

// aten::add.out with a sparse argument: computed if the result is dense. The sum of two sparse
// tensors consists of other operators.
class SparseAdded : public c10::OperatorKernel {
 public:
  SparseAdded(const c10::OperatorHandle& op, c10::SafeKernelFunction original);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  c10::SafeKernelFunction original_;
  Computed general_;
};

// The CPU alone, after the GPU's current stream: for operators whose sizes or control flow depend
// on numbers, and for most on sparse tensors. Not faithful: nothing is launched. A real GPU, too,
// waits for the operators whose sizes depend on numbers, but not for the others.
class OnHost : public c10::OperatorKernel {
 public:
  explicit OnHost(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  std::string name_;
};

// aten::_local_scalar_dense, which reads a number: refused inside a kernel, where it has none.
class NumberRead : public c10::OperatorKernel {
 public:
  explicit NumberRead(c10::SafeKernelFunction original);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  c10::SafeKernelFunction original_;
};

// An operator whose numbers nobody computes.
class Refused : public c10::OperatorKernel {
 public:
  Refused(const c10::OperatorHandle& op, c10::SafeKernelFunction original);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

 private:
  std::string name_;
  c10::SafeKernelFunction original_;
};

}  // namespace fakegpu
