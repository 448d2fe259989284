// Convolution, normalization, dropout and single functions.
//
// Not faithful: cuDNN's and the CPU's sums have different orders, so that a real GPU's results
// differ in the last bits.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_embedding_bag.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/conv3d.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/log_sigmoid_backward.h>
#include <ATen/ops/log_sigmoid_forward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/native_layer_norm_backward.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include "rules.h"

namespace fakegpu {

namespace {

// self, weight, padding, stride, dilation, groups
Tensors convolution(const Call& call) {
  const auto& given = call.arguments;
  auto padding = given[2].toIntVector();
  std::vector<int64_t> no_output_padding(padding.size(), 0);
  return {at::convolution(
      given[0].toTensor(),
      given[1].toTensor(),
      {},
      given[3].toIntVector(),
      padding,
      given[4].toIntVector(),
      /*transposed=*/false,
      no_output_padding,
      given[5].toInt())};
}

// self, weight, padding, output_padding, stride, dilation, groups
Tensors transposed_convolution(const Call& call) {
  const auto& given = call.arguments;
  return {at::convolution(
      given[0].toTensor(),
      given[1].toTensor(),
      {},
      given[4].toIntVector(),
      given[2].toIntVector(),
      given[5].toIntVector(),
      /*transposed=*/true,
      given[3].toIntVector(),
      given[6].toInt())};
}

// self, weight, kernel_size, bias, stride, padding, dilation
template <at::Tensor (*convolve)(
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    at::IntArrayRef,
    at::IntArrayRef,
    at::IntArrayRef,
    int64_t)>
Tensors depthwise_convolution(const Call& call) {
  const auto& given = call.arguments;
  auto input = given[0].toTensor();
  return {convolve(
      input,
      given[1].toTensor(),
      optional_tensor(given[3]),
      given[4].toIntVector(),
      given[5].toIntVector(),
      given[6].toIntVector(),
      input.size(1))};
}

// input, weight, bias, running_mean, running_var, training, momentum, epsilon
Tensors batch_norm(const Call& call) {
  const auto& given = call.arguments;
  auto [output, mean, deviation] = at::native_batch_norm(
      given[0].toTensor(),
      optional_tensor(given[1]),
      optional_tensor(given[2]),
      optional_tensor(given[3]),
      optional_tensor(given[4]),
      given[5].toBool(),
      given[6].toDouble(),
      given[7].toDouble());
  // in evaluation nobody reads them, and the CPU has none
  if (!given[5].toBool()) return {output};
  return {output, mean, deviation};
}

// input, grad_output, weight, running_mean, running_var, save_mean, save_var, epsilon, reserve
Tensors batch_norm_backward(const Call& call) {
  const auto& given = call.arguments;
  auto [input, weight, bias] = at::native_batch_norm_backward(
      given[1].toTensor(),
      given[0].toTensor(),
      optional_tensor(given[2]),
      optional_tensor(given[3]),
      optional_tensor(given[4]),
      optional_tensor(given[5]),
      optional_tensor(given[6]),
      /*train=*/true,
      given[7].toDouble(),
      {true, true, true});
  return {input, weight, bias};
}

// GPUs keep the statistics of a half precision in single precision, the CPU in that of the weights.
at::Tensor statistics(
    const c10::IValue& kept, const at::Tensor& input, const std::optional<at::Tensor>& weight) {
  auto tensor = tensor_or_undefined(kept);
  if (!tensor.defined()) return tensor;
  return tensor.to(weight ? weight->scalar_type() : input.scalar_type());
}

// grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, epsilon,
// output_mask
Tensors native_batch_norm_backward(const Call& call) {
  const auto& given = call.arguments;
  auto input = given[1].toTensor();
  auto weight = optional_tensor(given[2]);
  auto mask = given[9].toBoolList();
  auto [grad_input, grad_weight, grad_bias] = at::native_batch_norm_backward(
      given[0].toTensor(),
      input,
      weight,
      optional_tensor(given[3]),
      optional_tensor(given[4]),
      statistics(given[5], input, weight),
      statistics(given[6], input, weight),
      given[7].toBool(),
      given[8].toDouble(),
      {mask[0], mask[1], mask[2]});
  return {grad_input, grad_weight, grad_bias};
}

// grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask
Tensors layer_norm_backward(const Call& call) {
  const auto& given = call.arguments;
  auto input = given[1].toTensor();
  auto weight = optional_tensor(given[5]);
  auto mask = given[7].toBoolList();
  auto [grad_input, grad_weight, grad_bias] = at::native_layer_norm_backward(
      given[0].toTensor(),
      input,
      given[2].toIntVector(),
      statistics(given[3], input, weight),
      statistics(given[4], input, weight),
      weight,
      optional_tensor(given[6]),
      {mask[0], mask[1], mask[2]});
  return {grad_input, grad_weight, grad_bias};
}

// grad_out, input, normalized_shape, rstd, weight, output_mask
Tensors rms_norm_backward(const Call& call) {
  const auto& given = call.arguments;
  auto grad = given[0].toTensor();
  auto deviation = given[3].toTensor();
  Differentiable differentiable;
  auto input = differentiable.leaf(given[1].toTensor());
  auto weight = differentiable.leaf(tensor_or_undefined(given[4]));
  // the forward's epsilon is not an argument, but follows from what it saved
  auto shape = given[2].toIntVector();
  std::vector<int64_t> dims;
  for (int64_t i = 1; i <= static_cast<int64_t>(shape.size()); i++) dims.push_back(-i);
  auto squares = (input * input).mean(dims, /*keepdim=*/true);
  auto epsilon = (deviation.pow(-2) - squares).detach();
  auto output = input * (squares + epsilon).rsqrt();
  if (weight.defined()) output = output * weight;
  return gradients({output}, {input, weight}, {grad});
}

// self, p, generator
Tensors fused_dropout(const Call& call) {
  const auto& given = call.arguments;
  auto kept = given[1].toDouble();
  auto [output, mask] = dropout(given[0].toTensor(), 1 - kept, cpu_generator(call.seed));
  return {output, mask.to(at::kByte)};
}

// self, mask, scale
Tensors masked_scale(const Call& call) {
  const auto& given = call.arguments;
  auto self = given[0].toTensor();
  return {self * given[1].toTensor().to(self.scalar_type()) * given[2].toDouble()};
}

// input, p, train
Tensors native_dropout(const Call& call) {
  const auto& given = call.arguments;
  auto input = given[0].toTensor();
  bool train = given[2].isNone() || given[2].toBool();
  if (!train) return {input, at::ones_like(input, at::kBool)};
  auto [output, mask] = dropout(input, given[1].toDouble(), cpu_generator(call.seed));
  return {output, mask};
}

// On GPUs the buffer of the forward is empty; on CPUs it is what the backward reads.
Tensors log_sigmoid(const Call& call) {
  return {std::get<0>(at::log_sigmoid_forward(call.arguments[0].toTensor()))};
}

// grad_output, self, buffer
Tensors log_sigmoid_backward(const Call& call) {
  const auto& given = call.arguments;
  auto self = given[1].toTensor();
  auto buffer = std::get<1>(at::log_sigmoid_forward(self));
  return {at::log_sigmoid_backward(given[0].toTensor(), self, buffer)};
}

enum BagMode : int64_t { kSum = 0, kMean = 1, kMax = 2 };  // as torch numbers them

// With include_last_offset the GPU counts one more bag, which is empty.
at::Tensor with_rows(const at::Tensor& tensor, int64_t count) {
  auto shape = tensor.sizes().vec();
  shape[0] = count - shape[0];
  return shape[0] == 0 ? tensor : at::cat({tensor, at::zeros(shape, tensor.options())});
}

// weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights,
// include_last_offset, padding_idx -> output, offset2bag, bag_size, max_indices
Tensors embedding_bag(const Call& call) {
  const auto& given = call.arguments;
  auto indices = given[1].toTensor();
  auto offsets = given[2].toTensor();
  auto mode = given[4].toInt();
  bool include_last_offset = given[7].toBool();
  auto [output, bag_of_index, sizes, positions] = at::_embedding_bag(
      given[0].toTensor(),
      indices,
      offsets,
      given[3].toBool(),
      mode,
      given[5].toBool(),
      optional_tensor(given[6]),
      include_last_offset,
      given[8].toInt());
  // both sides leave out what their own backward does not read; here the CPU's follows the GPU's
  auto counted = include_last_offset ? offsets.narrow(0, 0, offsets.size(0) - 1) : offsets;
  auto starts = at::zeros({indices.size(0) + 1}, counted.options());
  starts.index_add_(0, counted, at::ones_like(counted));
  bag_of_index = call.places[1].numel() > 0
      ? starts.narrow(0, 0, indices.size(0)).cumsum(0) - 1
      : at::Tensor();
  if (mode == kSum) return {output, bag_of_index};
  sizes = with_rows(sizes, call.places[2].size(0));
  if (mode == kMean) return {output, bag_of_index, sizes};
  return {output, bag_of_index, sizes, with_rows(positions, call.places[3].size(0))};
}

}  // namespace

Rules layer_rules() {
  return {
      {"aten::cudnn_convolution", {convolution}},
      {"aten::cudnn_convolution_transpose", {transposed_convolution}},
      {"aten::_conv_depthwise2d", {depthwise_convolution<&at::conv2d>}},
      {"aten::conv_depthwise3d", {depthwise_convolution<&at::conv3d>}},
      {"aten::cudnn_batch_norm", {batch_norm}},
      {"aten::cudnn_batch_norm_backward", {batch_norm_backward}},
      {"aten::native_batch_norm", {batch_norm}},
      {"aten::_native_batch_norm_legit", {batch_norm}},
      {"aten::native_batch_norm_backward", {native_batch_norm_backward}},
      {"aten::batch_norm_backward", {native_batch_norm_backward}},
      {"aten::native_layer_norm_backward", {layer_norm_backward}},
      {"aten::_fused_rms_norm_backward", {rms_norm_backward}},
      {"aten::_fused_dropout", {fused_dropout, true}},
      {"aten::native_dropout", {native_dropout, true}},
      {"aten::_masked_scale", {masked_scale}},
      {"aten::log_sigmoid_forward", {log_sigmoid}},
      {"aten::log_sigmoid_backward", {log_sigmoid_backward}},
      {"aten::_embedding_bag", {embedding_bag}},
      {"aten::_embedding_bag_forward_only", {embedding_bag}},
  };
}

}  // namespace fakegpu
