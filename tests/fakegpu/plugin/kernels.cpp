#include "kernels.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>

#include "copies.h"
#include "effects.h"
#include "random.h"

namespace fakegpu {

namespace {

// The call of an operator whose CUDA kernel this thread is inside.
struct Entered {
  const std::string& name;
  const Stack& arguments;
};

thread_local int kernels_entered = 0;
thread_local std::optional<Entered> entered;

bool inside_kernel() {
  return kernels_entered > 0;
}

c10::ArrayRef<c10::IValue> arguments_on(const Stack& stack, const c10::OperatorHandle& op) {
  size_t count = op.schema().arguments().size();
  return c10::ArrayRef<c10::IValue>(stack).slice(stack.size() - count);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// The position of the argument that the operator writes and returns as `returned`.
std::optional<size_t> written_argument(
    const c10::FunctionSchema& schema, const c10::Argument& returned) {
  if (!returned.alias_info()) return std::nullopt;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias_info = arguments[i].alias_info();
    if (alias_info && alias_info->beforeSets() == returned.alias_info()->beforeSets()) return i;
  }
  return std::nullopt;
}

bool is_sparse(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && value.toTensor().is_sparse();
}

at::Tensor copy_of_host_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu() || tensor.layout() != at::kStrided) return tensor;
  auto copy = tensor.clone();
  // a Python number, whose type does not decide the result's
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// A real kernel reads tensors of the host when it is launched.
c10::IValue as_launched(const c10::IValue& value) {
  if (value.isTensor()) return copy_of_host_tensor(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const auto& tensor : value.toTensorVector()) list.push_back(copy_of_host_tensor(tensor));
  return list;
}

Stack arguments_as_launched(
    const c10::FunctionSchema& schema, c10::ArrayRef<c10::IValue> arguments) {
  Stack launched;
  for (size_t i = 0; i < arguments.size(); i++) {
    bool written = is_written(schema.arguments()[i]);
    launched.push_back(written ? arguments[i] : as_launched(arguments[i]));
  }
  return launched;
}

Stack cpu_aliases(c10::ArrayRef<c10::IValue> arguments) {
  Stack aliases;
  for (const auto& argument : arguments) aliases.push_back(cpu_alias(argument));
  return aliases;
}

// What the operator returned, without the arguments that it wrote and returned.
Tensors fresh_tensors(const c10::FunctionSchema& schema, const Stack& stack) {
  Stack fresh;
  size_t begin = stack.size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); i++) {
    if (!schema.returns()[i].alias_info()) fresh.push_back(stack[begin + i]);
  }
  return tensors_of(fresh);
}

std::optional<size_t> generator_position(const c10::FunctionSchema& schema) {
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    if (schema.arguments()[i].type()->str().find("Generator") != std::string::npos) return i;
  }
  return std::nullopt;
}

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

at::Tensor to_gpu(const at::Tensor& tensor, c10::Device gpu) {
  if (!tensor.defined()) return tensor;
  if (tensor.layout() == at::kSparse) {
    return at::_sparse_coo_tensor_unsafe(
        to_gpu(tensor._indices(), gpu),
        to_gpu(tensor._values(), gpu),
        tensor.sizes(),
        tensor.options().device(gpu),
        tensor.is_coalesced());
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == at::kStrided, "a fake GPU does not compute tensors of ", tensor.layout());
  auto moved = at::empty(tensor.sizes(), tensor.options().device(gpu));
  cpu_alias(moved).copy_(tensor);
  return moved;
}

}  // namespace

InsideKernel::InsideKernel() {
  kernels_entered++;
}

InsideKernel::~InsideKernel() {
  kernels_entered--;
}

Computed::Computed(
    const c10::OperatorHandle& op, c10::SafeKernelFunction original, const Rule* rule)
    : name_(toString(op.operator_name())),
      original_(std::move(original)),
      rule_(rule),
      generator_(generator_position(op.schema())) {}

std::optional<Draw> Computed::draw(c10::ArrayRef<c10::IValue> arguments, c10::Device gpu) const {
  if (!generator_ && !(rule_ && rule_->draws)) return std::nullopt;
  bool given = generator_ && arguments[*generator_].isGenerator();
  auto generator = given ? arguments[*generator_].toGenerator() : default_generator(gpu);
  return Draw(generator, capturing(gpu));
}

void Computed::operator()(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto arguments = arguments_on(*stack, op);
  if (inside_kernel()) return original_.callBoxed(op, keys, stack);
  if (on_several_gpus(arguments)) {
    // a loop over operators that are computed one by one
    TORCH_CHECK_NOT_IMPLEMENTED(
        name_.find("_foreach_") != std::string::npos,
        name_,
        " on several fake GPUs at once: its numbers are not computed");
    return original_.callBoxed(op, keys, stack);
  }
  const auto& schema = op.schema();
  auto gpu = gpu_of(arguments);
  auto drawn = draw(arguments, gpu);
  Stack given = runs_later(gpu) ? arguments_as_launched(schema, arguments) : arguments.vec();
  {
    InsideKernel inside;
    entered.emplace(name_, given);
    original_.callBoxed(op, keys, stack);
    entered.reset();
  }
  Stack host = cpu_aliases(given);  // now, since the kernel may have resized what it writes
  Tensors places;
  for (const auto& tensor : fresh_tensors(schema, *stack)) places.push_back(cpu_alias(tensor));
  queue(gpu, name_, [op, rule = rule_, generator = generator_, host, drawn, places] {
    uint64_t seed = drawn ? drawn->seed() : 0;
    Tensors results;
    if (rule) {
      results = rule->compute({host, places, seed});
    } else {
      Stack values = host;
      if (generator) values[*generator] = cpu_generator(seed);
      run_on_cpu(op, &values);
      results = fresh_tensors(op.schema(), values);
      TORCH_CHECK(
          results.size() == places.size(),
          "the GPU's kernel returned ",
          places.size(),
          " tensors, the computation on the host ",
          results.size());
    }
    for (size_t i = 0; i < results.size(); i++) put(places.at(i), results[i]);
  });
}

Copied::Copied(const c10::OperatorHandle& op, c10::SafeKernelFunction original)
    : original_(original), general_(op, std::move(original), nullptr) {}

void Copied::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto arguments = arguments_on(*stack, op);
  if (inside_kernel()) return original_.callBoxed(op, keys, stack);
  auto original = [&] { original_.callBoxed(op, keys, stack); };
  at::Tensor to = arguments[0].toTensor();
  at::Tensor from = arguments[1].toTensor();
  if (!copy_between_devices(to, from, original)) general_(op, keys, stack);
}

SparseAdded::SparseAdded(const c10::OperatorHandle& op, c10::SafeKernelFunction original)
    : original_(original), general_(op, std::move(original), nullptr) {}

void SparseAdded::operator()(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  bool dense = stack->back().toTensor().layout() == at::kStrided;
  if (dense) return general_(op, keys, stack);
  original_.callBoxed(op, keys, stack);
}

OnHost::OnHost(const c10::OperatorHandle& op) : name_(toString(op.operator_name())) {}

void OnHost::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  Stack arguments = arguments_on(*stack, op).vec();
  auto gpu = gpu_of(arguments);
  synchronize(gpu);
  Stack written = cpu_aliases(arguments);
  Stack results = written;
  run_effect(name_, [&] { run_on_cpu(op, &results); });
  for (size_t i = 0; i < arguments.size(); i++) {
    // a sparse tensor gets other indices and values; a dense one was written in its place
    if (is_written(schema.arguments()[i]) && is_sparse(arguments[i])) {
      arguments[i].toTensor().copy_(to_gpu(written[i].toTensor(), gpu));
    }
  }
  torch::jit::drop(*stack, arguments.size());
  for (size_t i = 0; i < results.size(); i++) {
    auto argument = written_argument(schema, schema.returns()[i]);
    if (argument) {
      stack->push_back(arguments[*argument]);
    } else if (results[i].isTensor()) {
      stack->push_back(to_gpu(results[i].toTensor(), gpu));
    } else {
      stack->push_back(results[i]);
    }
  }
}

NumberRead::NumberRead(c10::SafeKernelFunction original) : original_(std::move(original)) {}

void NumberRead::operator()(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (inside_kernel() && entered) {
    const auto& read = stack->back().toTensor();
    bool given = false;
    for (const auto& tensor : tensors_of(entered->arguments)) {
      given |= tensor.defined() && tensor.is_alias_of(read);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        given, entered->name, ": its CUDA kernel reads a number that a fake GPU has not computed");
  }
  original_.callBoxed(op, keys, stack);
}

Refused::Refused(const c10::OperatorHandle& op, c10::SafeKernelFunction original)
    : name_(toString(op.operator_name())), original_(std::move(original)) {}

void Refused::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      inside_kernel(),
      name_,
      ": a fake GPU cannot compute its numbers: the CPU has no kernel for it, and the plug-in of "
      "the fake GPUs no rule");
  original_.callBoxed(op, keys, stack);
}

}  // namespace fakegpu
