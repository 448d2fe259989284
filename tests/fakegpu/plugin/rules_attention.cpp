// Scaled dot product attention, in the kinds that torch fuses on GPUs.
//
// Not faithful: the log-sum-exp of each row, which only the backward reads, stays undefined: here
// the backward computes the forward once more. Half precision is computed in single precision.
#include <ATen/TensorOperators.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <limits>

#include "rules.h"

namespace fakegpu {

namespace {

struct Attention {
  at::Tensor query;
  at::Tensor key;
  at::Tensor value;
  at::Tensor bias;  // undefined: none
  bool causal;
  double scale;
  double dropout;
  uint64_t seed;
};

double scale_of(const c10::IValue& scale, const at::Tensor& query) {
  if (!scale.isNone()) return scale.toScalar().toDouble();
  return 1 / std::sqrt(static_cast<double>(query.size(-1)));
}

at::Tensor wide(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

// Of fewer key heads than query heads, each serves several in turn.
at::Tensor as_many_heads(const at::Tensor& tensor, const at::Tensor& query) {
  int64_t times = query.size(1) / tensor.size(1);
  return times == 1 ? tensor : tensor.repeat_interleave(times, 1);
}

at::Tensor attend(const Attention& a) {
  auto key = as_many_heads(a.key, a.query);
  auto value = as_many_heads(a.value, a.query);
  auto scores = at::matmul(a.query, key.transpose(-2, -1)) * a.scale;
  if (a.bias.defined()) scores = scores + a.bias;
  if (a.causal) {
    auto seen = at::ones({a.query.size(-2), key.size(-2)}, at::kBool).tril();
    scores = scores.masked_fill(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  auto weights = at::softmax(scores, -1);
  if (a.dropout > 0) weights = dropout(weights, a.dropout, cpu_generator(a.seed)).first;
  return at::matmul(weights, value);
}

Tensors attend_backward(Attention a, const at::Tensor& output_gradient) {
  Differentiable differentiable;
  a.query = differentiable.leaf(wide(a.query));
  a.key = differentiable.leaf(wide(a.key));
  a.value = differentiable.leaf(wide(a.value));
  a.bias = differentiable.leaf(wide(a.bias));
  return gradients({attend(a)}, {a.query, a.key, a.value, a.bias}, {wide(output_gradient)});
}

// A tensor that the forward hands to the backward, and that holds the forward's random seed.
at::Tensor keep(uint64_t seed) {
  return at::scalar_tensor(static_cast<int64_t>(seed), at::kLong);
}

uint64_t kept(const c10::IValue& seed) {
  return static_cast<uint64_t>(seed.toTensor().item<int64_t>());
}

// query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale
Tensors efficient(const Call& call) {
  const auto& given = call.arguments;
  Attention a{
      .query = wide(given[0].toTensor()),
      .key = wide(given[1].toTensor()),
      .value = wide(given[2].toTensor()),
      .bias = wide(tensor_or_undefined(given[3])),
      .causal = given[6].toBool(),
      .scale = scale_of(given[7], given[0].toTensor()),
      .dropout = given[5].toDouble(),
      .seed = call.seed,
  };
  return {attend(a), at::Tensor(), keep(call.seed), at::Tensor()};
}

// grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
// grad_input_mask, is_causal, scale
Tensors efficient_backward(const Call& call) {
  const auto& given = call.arguments;
  Attention a{
      .query = given[1].toTensor(),
      .key = given[2].toTensor(),
      .value = given[3].toTensor(),
      .bias = tensor_or_undefined(given[4]),
      .causal = given[11].toBool(),
      .scale = scale_of(given[12], given[1].toTensor()),
      .dropout = given[9].toDouble(),
      .seed = kept(given[7]),
  };
  return attend_backward(a, given[0].toTensor());
}

// query, key, value, dropout_p, is_causal, return_debug_mask, scale
Tensors flash(const Call& call) {
  const auto& given = call.arguments;
  Attention a{
      .query = wide(given[0].toTensor()),
      .key = wide(given[1].toTensor()),
      .value = wide(given[2].toTensor()),
      .bias = {},
      .causal = given[4].toBool(),
      .scale = scale_of(given[6], given[0].toTensor()),
      .dropout = given[3].toDouble(),
      .seed = call.seed,
  };
  // output, logsumexp, cum_seq_q, cum_seq_k, rng_state, ...; max_q and max_k are no tensors
  auto state = keep(call.seed).expand({2});
  return {attend(a), at::Tensor(), at::Tensor(), at::Tensor(), state};
}

// grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
// is_causal, philox_seed, philox_offset, scale
Tensors flash_backward(const Call& call) {
  const auto& given = call.arguments;
  Attention a{
      .query = given[1].toTensor(),
      .key = given[2].toTensor(),
      .value = given[3].toTensor(),
      .bias = {},
      .causal = given[11].toBool(),
      .scale = scale_of(given[14], given[1].toTensor()),
      .dropout = given[10].toDouble(),
      .seed = kept(given[12].toTensor().flatten()[0]),
  };
  auto all = attend_backward(a, given[0].toTensor());
  return {all[0], all[1], all[2]};
}

}  // namespace

Rules attention_rules() {
  const std::string sdpa = "aten::_scaled_dot_product_";
  return {
      {sdpa + "efficient_attention", {efficient, true}},
      {sdpa + "efficient_attention_backward", {efficient_backward}},
      {sdpa + "flash_attention", {flash, true}},
      {sdpa + "flash_attention_backward", {flash_backward}},
  };
}

}  // namespace fakegpu
