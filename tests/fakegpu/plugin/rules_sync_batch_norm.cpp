// SyncBatchNorm's own operators, which only CUDA has: statistics of one rank's rows, those of all
// ranks, the normalization with them, and its gradient in the same two parts.
//
// Not faithful: a GPU adds the numbers of a channel in another order.
#include <ATen/TensorOperators.h>
#include <ATen/ops/var_mean.h>

#include "rules.h"

namespace fakegpu {

namespace {

// Half precision has its statistics in single precision.
at::Tensor wide(const c10::IValue& value) {
  auto tensor = value.toTensor();
  return tensor.scalar_type() == at::kDouble ? tensor : tensor.to(at::kFloat);
}

// All dimensions but that of the channels, which is the second.
std::vector<int64_t> rows_of(const at::Tensor& input) {
  std::vector<int64_t> dims{0};
  for (int64_t dim = 2; dim < input.dim(); ++dim) dims.push_back(dim);
  return dims;
}

// A vector with a value for each channel, in a form that is broadcast over `input`.
at::Tensor by_channel(const at::Tensor& vector, const at::Tensor& input) {
  std::vector<int64_t> shape(input.dim(), 1);
  shape[1] = vector.numel();
  return vector.view(shape);
}

at::Tensor weight_or_one(const c10::IValue& weight, const at::Tensor& like) {
  auto given = optional_tensor(weight);
  return given ? given->to(like.scalar_type()) : like.new_ones(like.sizes());
}

// input, epsilon
Tensors own_statistics(const Call& call) {
  auto input = wide(call.arguments[0]);
  auto [variance, mean] = at::var_mean(input, rows_of(input), /*unbiased=*/false);
  return {mean, (variance + call.arguments[1].toDouble()).rsqrt()};
}

// input, mean, invstd, running_mean, running_var, momentum, epsilon, counts; mean and invstd have a
// row for each rank
Tensors joint_statistics(const Call& call) {
  const auto& given = call.arguments;
  auto means = wide(given[1]);
  auto epsilon = given[6].toDouble();
  auto counts = given[7].toTensor().to(means.scalar_type()).view({-1, 1});
  auto count = counts.sum();
  auto mean = (counts * means).sum(0) / count;
  auto variances = wide(given[2]).pow(-2) - epsilon;
  auto variance = (counts * (variances + (means - mean).square())).sum(0) / count;
  auto momentum = given[5].toDouble();
  if (auto running = optional_tensor(given[3])) running->mul_(1 - momentum).add_(mean * momentum);
  if (auto running = optional_tensor(given[4])) {
    running->mul_(1 - momentum).add_(variance * (count / (count - 1)) * momentum);
  }
  return {mean, (variance + epsilon).rsqrt()};
}

// input, weight, bias, mean, invstd, epsilon
Tensors normalized(const Call& call) {
  const auto& given = call.arguments;
  auto input = wide(given[0]);
  auto invstd = wide(given[4]);
  auto scale = invstd * weight_or_one(given[1], invstd);
  auto output = (input - by_channel(wide(given[3]), input)) * by_channel(scale, input);
  if (auto bias = optional_tensor(given[2])) {
    output = output + by_channel(bias->to(output.scalar_type()), input);
  }
  return {output.to(given[0].toTensor().scalar_type())};
}

// grad_out, input, mean, invstd, weight, input_g, weight_g, bias_g
Tensors own_gradient_sums(const Call& call) {
  const auto& given = call.arguments;
  auto gradient = wide(given[0]);
  auto input = wide(given[1]);
  auto centered = input - by_channel(wide(given[2]), input);
  auto sum = gradient.sum(rows_of(input));
  auto sum_centered = (gradient * centered).sum(rows_of(input));
  Tensors sums(4);
  if (given[5].toBool()) {
    sums[0] = sum;
    sums[1] = sum_centered;
  }
  if (given[6].toBool()) sums[2] = sum_centered * wide(given[3]);
  if (given[7].toBool()) sums[3] = sum;
  return sums;
}

// grad_out, input, mean, invstd, weight, sum_dy, sum_dy_xmu, count
Tensors input_gradient(const Call& call) {
  const auto& given = call.arguments;
  auto gradient = wide(given[0]);
  auto input = wide(given[1]);
  auto invstd = wide(given[3]);
  auto count = given[7].toTensor().sum().to(invstd.scalar_type());
  auto mean_gradient = by_channel(wide(given[5]) / count, input);
  auto slope = by_channel(wide(given[6]) / count * invstd.square(), input);
  auto centered = input - by_channel(wide(given[2]), input);
  auto scale = by_channel(invstd * weight_or_one(given[4], invstd), input);
  auto result = (gradient - mean_gradient - centered * slope) * scale;
  return {result.to(given[1].toTensor().scalar_type())};
}

}  // namespace

Rules sync_batch_norm_rules() {
  return {
      {"aten::batch_norm_stats", {own_statistics}},
      {"aten::batch_norm_gather_stats_with_counts", {joint_statistics}},
      {"aten::batch_norm_elemt", {normalized}},
      {"aten::batch_norm_backward_reduce", {own_gradient_sums}},
      {"aten::batch_norm_backward_elemt", {input_gradient}},
  };
}

}  // namespace fakegpu
