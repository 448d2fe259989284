// Recurrent networks: cuDNN's operator for whole sequences, and the fused cells.
//
// Not faithful: the backward computes the forward once more. The reserved memory between the two
// holds the seed of the dropout, and no more.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gru.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/rnn_relu.h>
#include <ATen/ops/rnn_tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros_like.h>

#include <cstring>

#include "rules.h"

namespace fakegpu {

namespace {

enum Mode : int64_t { kRelu = 0, kTanh = 1, kLstm = 2, kGru = 3 };  // as torch numbers them

struct Recurrent {
  at::Tensor input;
  at::Tensor hidden;
  at::Tensor cell;  // of an LSTM
  Tensors weights;
  int64_t weights_per_layer;
  int64_t mode;
  int64_t layers;
  bool batch_first;
  double dropout;
  bool train;
  bool bidirectional;
  std::vector<int64_t> batch_sizes;  // of packed sequences
};

// Arguments of the forward: input, weight[], weight_stride0, weight_buf, hx, cx, mode, hidden_size,
// proj_size, num_layers, batch_first, dropout, train, bidirectional, batch_sizes, dropout_state.
// In the backward three tensors stand before `mode`.
Recurrent recurrent(const Stack& given, size_t mode) {
  return {
      .input = given[0].toTensor(),
      .hidden = given[4].toTensor(),
      .cell = tensor_or_undefined(given[5]),
      .weights = given[1].toTensorVector(),
      .weights_per_layer = given[2].toInt(),
      .mode = given[mode].toInt(),
      .layers = given[mode + 3].toInt(),
      .batch_first = given[mode + 4].toBool(),
      .dropout = given[mode + 5].toDouble(),
      .train = given[mode + 6].toBool(),
      .bidirectional = given[mode + 7].toBool(),
      .batch_sizes = given[mode + 8].toIntVector(),
  };
}

using Plain = std::tuple<at::Tensor, at::Tensor> (*)(
    const at::Tensor& input,
    const at::Tensor& hidden,
    at::TensorList weights,
    bool biases,
    int64_t layers,
    double dropout,
    bool train,
    bool bidirectional,
    bool batch_first);
using Packed = std::tuple<at::Tensor, at::Tensor> (*)(
    const at::Tensor& input,
    const at::Tensor& batch_sizes,
    const at::Tensor& hidden,
    at::TensorList weights,
    bool biases,
    int64_t layers,
    double dropout,
    bool train,
    bool bidirectional);

struct Network {
  Plain plain;
  Packed packed;
};

Network network(int64_t mode) {
  if (mode == kGru) return {&at::gru, &at::gru};
  if (mode == kRelu) return {&at::rnn_relu, &at::rnn_relu};
  return {&at::rnn_tanh, &at::rnn_tanh};
}

Tensors run_lstm(const Recurrent& r, bool biases) {
  Tensors state = {r.hidden, r.cell};
  bool both = r.bidirectional;
  if (r.batch_sizes.empty()) {
    auto [output, hidden, cell] = at::lstm(
        r.input, state, r.weights, biases, r.layers, 0, r.train, both, r.batch_first);
    return {output, hidden, cell};
  }
  auto batch_sizes = at::tensor(r.batch_sizes, at::kLong);
  auto [output, hidden, cell] =
      at::lstm(r.input, batch_sizes, state, r.weights, biases, r.layers, 0, r.train, both);
  return {output, hidden, cell};
}

// Through all layers without dropout: output, hidden, cell.
Tensors run_plainly(const Recurrent& r) {
  bool biases = r.weights_per_layer >= 4;
  bool both = r.bidirectional;
  if (r.mode == kLstm) return run_lstm(r, biases);
  auto functions = network(r.mode);
  if (r.batch_sizes.empty()) {
    auto [output, hidden] = functions.plain(
        r.input, r.hidden, r.weights, biases, r.layers, 0, r.train, both, r.batch_first);
    return {output, hidden, at::Tensor()};
  }
  auto batch_sizes = at::tensor(r.batch_sizes, at::kLong);
  auto [output, hidden] = functions.packed(
      r.input, batch_sizes, r.hidden, r.weights, biases, r.layers, 0, r.train, both);
  return {output, hidden, at::Tensor()};
}

// Layer by layer, with dropout between them.
Tensors run_with_dropout(const Recurrent& r, uint64_t seed) {
  auto draws = cpu_generator(seed);
  int64_t directions = r.bidirectional ? 2 : 1;
  int64_t weights = directions * r.weights_per_layer;
  Tensors hidden;
  Tensors cell;
  auto one = r;
  one.layers = 1;
  for (int64_t layer = 0; layer < r.layers; layer++) {
    auto first = r.weights.begin() + layer * weights;
    one.weights.assign(first, first + weights);
    one.hidden = r.hidden.narrow(0, layer * directions, directions).contiguous();
    if (r.cell.defined()) {
      one.cell = r.cell.narrow(0, layer * directions, directions).contiguous();
    }
    auto results = run_plainly(one);
    one.input = results[0];
    if (layer + 1 < r.layers) one.input = dropout(one.input, r.dropout, draws).first;
    hidden.push_back(results[1]);
    if (r.cell.defined()) cell.push_back(results[2]);
  }
  auto last_cell = cell.empty() ? at::Tensor() : at::cat(cell);
  return {one.input, at::cat(hidden), last_cell};
}

bool drops(const Recurrent& r) {
  return r.train && r.dropout > 0 && r.layers > 1;
}

Tensors run(const Recurrent& r, uint64_t seed) {
  return drops(r) ? run_with_dropout(r, seed) : run_plainly(r);
}

// Returns output, hidden, cell; then the reserved memory and the weights' buffer.
Tensors forward(const Call& call) {
  auto r = recurrent(call.arguments, 6);
  if (drops(r)) {
    const auto& reserved = call.places[3];
    TORCH_CHECK(reserved.nbytes() >= sizeof call.seed, "no reserved memory for the seed");
    std::memcpy(reserved.mutable_data_ptr(), &call.seed, sizeof call.seed);
  }
  return run(r, call.seed);
}

// Arguments: input, weight[], weight_stride0, weight_buf, hx, cx, output, grad_output, grad_hy,
// grad_cy, mode, ... as in the forward, reserve, output_mask.
Tensors backward(const Call& call) {
  const auto& given = call.arguments;
  auto r = recurrent(given, 10);
  uint64_t seed = 0;
  if (drops(r)) std::memcpy(&seed, given[20].toTensor().const_data_ptr(), sizeof seed);
  Differentiable differentiable;
  r.input = differentiable.leaf(r.input);
  r.hidden = differentiable.leaf(r.hidden);
  r.cell = differentiable.leaf(r.cell);
  for (auto& weight : r.weights) weight = differentiable.leaf(weight);
  Tensors leaves = {r.input, r.hidden, r.cell};
  bool of_weights = given[21].toBoolList()[3];
  if (of_weights) leaves.insert(leaves.end(), r.weights.begin(), r.weights.end());
  Tensors output_gradients = {
      tensor_or_undefined(given[7]),
      tensor_or_undefined(given[8]),
      tensor_or_undefined(given[9]),
  };
  return gradients(run(r, seed), leaves, output_gradients);
}

// Of the gates (i, f, g, o) of an LSTM's cell, after their activations.
struct Gates {
  at::Tensor in;
  at::Tensor forget;
  at::Tensor cell;
  at::Tensor out;
};

Gates gates(const at::Tensor& together) {
  auto parts = together.chunk(4, 1);
  return {parts[0], parts[1], parts[2], parts[3]};
}

at::Tensor with_bias(const at::Tensor& gates, const c10::IValue& bias) {
  auto given = tensor_or_undefined(bias);
  return given.defined() ? gates + given : gates;
}

// input_gates, hidden_gates, cx, input_bias, hidden_bias -> hy, cy, the activated gates
Tensors lstm_cell(const Call& call) {
  const auto& given = call.arguments;
  auto together =
      with_bias(given[0].toTensor(), given[3]) + with_bias(given[1].toTensor(), given[4]);
  auto raw = gates(together);
  Gates g{raw.in.sigmoid(), raw.forget.sigmoid(), raw.cell.tanh(), raw.out.sigmoid()};
  auto cell = g.forget * given[2].toTensor() + g.in * g.cell;
  return {g.out * cell.tanh(), cell, at::cat({g.in, g.forget, g.cell, g.out}, 1)};
}

at::Tensor or_zeros(const c10::IValue& gradient, const at::Tensor& like) {
  auto given = tensor_or_undefined(gradient);
  return given.defined() ? given : at::zeros_like(like);
}

// grad_hy, grad_cy, cx, cy, the activated gates, has_bias -> grad_gates, grad_cx, grad_bias
Tensors lstm_cell_backward(const Call& call) {
  const auto& given = call.arguments;
  auto before = given[2].toTensor();
  auto after = given[3].toTensor().tanh();
  auto g = gates(given[4].toTensor());
  auto grad_hidden = or_zeros(given[0], after);
  auto grad_cell = or_zeros(given[1], after) + grad_hidden * g.out * (1 - after * after);
  auto grad_gates = at::cat(
      {grad_cell * g.cell * g.in * (1 - g.in),
       grad_cell * before * g.forget * (1 - g.forget),
       grad_cell * g.in * (1 - g.cell * g.cell),
       grad_hidden * after * g.out * (1 - g.out)},
      1);
  auto grad_bias = given[5].toBool() ? grad_gates.sum(0) : at::Tensor();
  return {grad_gates, grad_cell * g.forget, grad_bias};
}

// input_gates, hidden_gates, hx, input_bias, hidden_bias -> hy, what the backward needs
Tensors gru_cell(const Call& call) {
  const auto& given = call.arguments;
  auto input = with_bias(given[0].toTensor(), given[3]).chunk(3, 1);
  auto hidden = with_bias(given[1].toTensor(), given[4]).chunk(3, 1);
  auto before = given[2].toTensor();
  auto reset = (input[0] + hidden[0]).sigmoid();
  auto update = (input[1] + hidden[1]).sigmoid();
  auto fresh = (input[2] + reset * hidden[2]).tanh();
  return {
      (before - fresh) * update + fresh,
      at::cat({reset, update, fresh, before, hidden[2]}, 1),
  };
}

// grad_hy, what the forward kept, has_bias
// -> grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias
Tensors gru_cell_backward(const Call& call) {
  const auto& given = call.arguments;
  auto grad = given[0].toTensor();
  auto kept = given[1].toTensor().chunk(5, 1);
  const auto& reset = kept[0];
  const auto& update = kept[1];
  const auto& fresh = kept[2];
  auto grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  auto grad_reset = grad_fresh * kept[4] * reset * (1 - reset);
  auto grad_update = grad * (kept[3] - fresh) * update * (1 - update);
  auto grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  if (!given[2].toBool()) return {grad_input, grad_hidden, grad * update};
  return {grad_input, grad_hidden, grad * update, grad_input.sum(0), grad_hidden.sum(0)};
}

}  // namespace

Rules recurrent_rules() {
  return {
      {"aten::_cudnn_rnn", {forward, true}},
      {"aten::_cudnn_rnn_backward", {backward}},
      {"aten::_thnn_fused_lstm_cell", {lstm_cell}},
      {"aten::_thnn_fused_lstm_cell_backward_impl", {lstm_cell_backward}},
      {"aten::_thnn_fused_gru_cell", {gru_cell}},
      {"aten::_thnn_fused_gru_cell_backward", {gru_cell_backward}},
  };
}

}  // namespace fakegpu
