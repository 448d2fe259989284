#include "rules.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/autograd.h>

extern "C" {
int PyGILState_Check();
void* PyEval_SaveThread();
void PyEval_RestoreThread(void* state);
}

namespace fakegpu {

namespace {

// torch's autograd engine refuses to run in a thread that holds the interpreter lock.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutInterpreterLock() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  void* state_;
};

}  // namespace

const Rule* find_rule(const std::string& name) {
  static const Rules all = [] {
    Rules rules = layer_rules();
    rules.merge(attention_rules());
    rules.merge(recurrent_rules());
    rules.merge(sync_batch_norm_rules());
    return rules;
  }();
  auto found = all.find(name);
  return found == all.end() ? nullptr : &found->second;
}

at::Tensor tensor_or_undefined(const c10::IValue& value) {
  return value.isTensor() ? value.toTensor() : at::Tensor();
}

std::optional<at::Tensor> optional_tensor(const c10::IValue& value) {
  auto tensor = tensor_or_undefined(value);
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

Tensors gradients(
    const Tensors& outputs, const Tensors& inputs, const Tensors& output_gradients) {
  auto is_leaf = [](const at::Tensor& input) { return input.defined() && input.requires_grad(); };
  Tensors differentiated;
  Tensors leaves;
  Tensors seeds;
  for (size_t i = 0; i < outputs.size(); i++) {
    if (!output_gradients[i].defined() || !outputs[i].requires_grad()) continue;
    differentiated.push_back(outputs[i]);
    seeds.push_back(output_gradients[i]);
  }
  std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(leaves), is_leaf);
  WithoutInterpreterLock unlocked;
  auto found = torch::autograd::grad(
      differentiated,
      leaves,
      seeds,
      /*retain_graph=*/false,
      /*create_graph=*/false,
      /*allow_unused=*/true);
  Tensors all;
  auto next = found.begin();
  for (const auto& input : inputs) all.push_back(is_leaf(input) ? *next++ : at::Tensor());
  return all;
}

at::Tensor Differentiable::leaf(const at::Tensor& tensor) const {
  return tensor.defined() ? tensor.detach().clone().requires_grad_(true) : tensor;
}

std::pair<at::Tensor, at::Tensor> dropout(
    const at::Tensor& input, double p, at::Generator draws) {
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p, std::move(draws));
  double scale = p < 1 ? 1 / (1 - p) : 0;
  return {input * mask * scale, mask};
}

}  // namespace fakegpu
