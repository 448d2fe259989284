// Rules: the numbers of operators that only CUDA has, or whose results differ in form from the
// CPU's. Each is computed by other operators of the CPU.
#pragma once

#include <ATen/core/grad_mode.h>

#include <cstdint>
#include <string>
#include <unordered_map>

#include "aliases.h"
#include "random.h"

namespace fakegpu {

// One call of an operator, as an effect sees it.
struct Call {
  const Stack& arguments;  // with aliases for GPU tensors
  const Tensors& places;   // aliases of the tensors that torch's CUDA kernel returned
  uint64_t seed;           // for a rule that draws
};

struct Rule {
  // Returns one tensor for each that the operator returns, in order. What a caller only hands on
  // from the forward to the backward may stay undefined; missing ones at the end may be left out.
  Tensors (*compute)(const Call&);
  bool draws = false;
};

using Rules = std::unordered_map<std::string, Rule>;

// The rule of an operator with its full name, or null.
const Rule* find_rule(const std::string& name);

// The parts of the table, one a file.
Rules attention_rules();
Rules layer_rules();
Rules recurrent_rules();
Rules sync_batch_norm_rules();

at::Tensor tensor_or_undefined(const c10::IValue& value);
std::optional<at::Tensor> optional_tensor(const c10::IValue& value);

// The gradients of `outputs` with respect to each leaf of `inputs`, undefined for the others.
Tensors gradients(const Tensors& outputs, const Tensors& inputs, const Tensors& output_gradients);

// While one exists, operators record what a backward needs.
class Differentiable {
 public:
  at::Tensor leaf(const at::Tensor& tensor) const;

 private:
  at::AutoGradMode recording_{true};
};

// Zeroes an element with probability p, and scales the others. Returns the mask too.
std::pair<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, at::Generator draws);

}  // namespace fakegpu
