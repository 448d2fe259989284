// Replaces cuDNN: the backend (graph) interface for convolutions and attention, batch
// normalization, dropout states and recurrent networks.
//
// Faithful: descriptors keep their attributes; the layout of the weights of recurrent networks; one
// kernel for each plan, layer or call, on the handle's stream; a convolution's cost comes from its
// operations and bytes, that of batch normalization and recurrent networks from their bytes or
// weights. Not faithful: a kernel changes no memory (the plug-in of the numbers does); one engine
// with a workspace of 1 MiB answers every heuristic, so that benchmark mode tries one algorithm;
// other operations of a graph, such as attention, cost a kernel's latency; every type has the rate
// FAKECUDA_TFLOPS.
//
// A function declares its parameters up to the last one that it reads: in the calling conventions
// of Linux the caller owns the others.
#include "abi/cudnn.h"

#include "fake.h"
#include "one_gpu.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>

using fake::Call;
using fake::Op;

struct cudnnContext {
  cudaStream_t stream = nullptr;
};
using cudnnHandle_t = cudnnContext*;

namespace {

constexpr cudnnStatus_t kSuccess = CUDNN_STATUS_SUCCESS;
constexpr int64_t kWorkspaceBytes = 1 << 20;

size_t element_bytes(int type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE:
    case CUDNN_DATA_INT64:
      return 8;
    case CUDNN_DATA_HALF:
    case CUDNN_DATA_BFLOAT16:
      return 2;
    case CUDNN_DATA_INT8:
    case CUDNN_DATA_UINT8:
    case CUDNN_DATA_BOOLEAN:
      return 1;
    default:
      return 4;
  }
}

cudnnStatus_t launch(cudnnHandle_t handle, const char* name, double flops, double bytes) {
  Call call("cudaLaunchKernel");
  Op op;
  op.name = name;
  op.grid = {64, 1, 1};
  op.block = {256, 1, 1};
  op.duration = fake::kernel_duration(flops, bytes);
  fake::Stream* on = fake::resolve(handle->stream);
  if (fake::misplaced_kernel(name, on)) return CUDNN_STATUS_EXECUTION_FAILED;
  cudaError_t error = fake::submit(on, std::move(op));
  return error == cudaSuccess ? kSuccess : CUDNN_STATUS_EXECUTION_FAILED;
}

}  // namespace

// ---- the library and its handles ----------------------------------------------------------------

EXPORT size_t cudnnGetVersion() { return kCudnnMajor * 10000 + kCudnnMinor * 100 + kCudnnPatch; }
EXPORT size_t cudnnGetCudartVersion() { return 13000; }
EXPORT cudnnStatus_t cudnnGetProperty(libraryPropertyType type, int* value) {
  switch (type) {
    case MAJOR_VERSION:
      *value = kCudnnMajor;
      break;
    case MINOR_VERSION:
      *value = kCudnnMinor;
      break;
    case PATCH_LEVEL:
      *value = kCudnnPatch;
      break;
  }
  return kSuccess;
}
EXPORT const char* cudnnGetErrorString(cudnnStatus_t status) {
  switch (status) {
    case CUDNN_STATUS_SUCCESS:
      return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM:
      return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_EXECUTION_FAILED:
      return "CUDNN_STATUS_EXECUTION_FAILED";
    default:
      return "CUDNN_STATUS_NOT_SUPPORTED";
  }
}
EXPORT void cudnnGetLastErrorString(char* text, size_t size) {
  if (size) snprintf(text, size, "an error of the fake cuDNN");
}
EXPORT cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = new cudnnContext;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  delete handle;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  *stream = handle->stream;
  return kSuccess;
}

// ---- the backend interface ----------------------------------------------------------------------

namespace {

struct Content;
using ContentRef = std::shared_ptr<Content>;

struct Attribute {
  int64_t count = 0;
  std::vector<char> bytes;
  std::vector<ContentRef> contents;  // of an attribute whose values are descriptors
};

struct Content {
  int type = 0;
  std::map<int, Attribute> attributes;
  double flops = 0;  // of a plan
  double bytes = 0;
  const char* kernel = "fake_cudnn_kernel";
};

struct Descriptor {  // the caller's handle; the content lives as long as a descriptor refers to it
  ContentRef content = std::make_shared<Content>();
};

size_t value_bytes(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_BOOLEAN:
    case CUDNN_TYPE_CHAR:
      return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
    case CUDNN_TYPE_FRACTION:
      return 8;
    default:
      return 4;
  }
}

Attribute integer(int64_t value) {
  Attribute attribute{1, std::vector<char>(sizeof value), {}};
  memcpy(attribute.bytes.data(), &value, sizeof value);
  return attribute;
}

const Attribute* find(const ContentRef& content, int name) {
  if (!content) return nullptr;
  auto found = content->attributes.find(name);
  return found == content->attributes.end() ? nullptr : &found->second;
}

ContentRef first(const ContentRef& content, int name) {
  const Attribute* attribute = find(content, name);
  return attribute && !attribute->contents.empty() ? attribute->contents[0] : nullptr;
}

struct Shape {
  std::vector<int64_t> sizes;
  size_t element = 4;

  double elements() const {
    double product = 1;
    for (int64_t size : sizes) product *= static_cast<double>(size);
    return product;
  }
  double bytes() const { return elements() * static_cast<double>(element); }
};

Shape shape_of(const ContentRef& tensor) {
  Shape shape;
  if (const Attribute* sizes = find(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS)) {
    shape.sizes.resize(sizes->count);
    memcpy(shape.sizes.data(), sizes->bytes.data(), sizes->bytes.size());
  }
  if (const Attribute* type = find(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE)) {
    int value;
    memcpy(&value, type->bytes.data(), sizeof value);
    shape.element = element_bytes(value);
  }
  return shape;
}

struct Convolution {  // one direction: the names of its attributes, and of its kernel
  int filter;
  int input;
  int output;
  const char* kernel;
};

constexpr Convolution kConvolutions[] = {
    {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, "fake_cudnn_implicit_gemm_fprop"},
    {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, "fake_cudnn_implicit_gemm_dgrad"},
    {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY, "fake_cudnn_implicit_gemm_wgrad"},
};

// Adds up the convolutions of the plan's graph. Each element of the output takes a multiply-add for
// each element of one filter, whichever of the three tensors is computed.
void estimate(Content& plan) {
  auto config = plan.attributes[CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG].contents;
  ContentRef engine = config.empty() ? nullptr : first(config[0], CUDNN_ATTR_ENGINECFG_ENGINE);
  ContentRef graph = first(engine, CUDNN_ATTR_ENGINE_OPERATION_GRAPH);
  const Attribute* operations = find(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS);
  if (!operations) return;
  for (const ContentRef& operation : operations->contents) {
    for (const Convolution& direction : kConvolutions) {
      Shape filter = shape_of(first(operation, direction.filter));
      Shape input = shape_of(first(operation, direction.input));
      Shape output = shape_of(first(operation, direction.output));
      if (filter.sizes.empty() || output.sizes.empty()) continue;
      double filters = static_cast<double>(std::max<int64_t>(1, filter.sizes[0]));
      plan.flops += 2 * output.elements() * filter.elements() / filters;
      plan.bytes += filter.bytes() + input.bytes() + output.bytes();
      plan.kernel = direction.kernel;
    }
  }
}

// The configuration of the only engine, for the graph that a heuristic was asked about.
ContentRef only_configuration(Content& heuristic) {
  auto engine = std::make_shared<Content>();
  engine->type = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
  engine->attributes[CUDNN_ATTR_ENGINE_GLOBAL_INDEX] = integer(0);
  engine->attributes[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] =
      heuristic.attributes[CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH];
  auto configuration = std::make_shared<Content>();
  configuration->type = CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
  configuration->attributes[CUDNN_ATTR_ENGINECFG_ENGINE] = {1, {}, {engine}};
  return configuration;
}

}  // namespace

EXPORT cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                                  Descriptor** descriptor) {
  *descriptor = new Descriptor;
  (*descriptor)->content->type = type;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnBackendDestroyDescriptor(Descriptor* descriptor) {
  delete descriptor;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnBackendFinalize(Descriptor* descriptor) {
  Content& content = *descriptor->content;
  if (content.type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR) estimate(content);
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnBackendSetAttribute(Descriptor* descriptor,
                                              cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t count,
                                              const void* values) {
  Attribute attribute;
  attribute.count = count;
  if (values) {
    const char* bytes = static_cast<const char*>(values);
    attribute.bytes.assign(bytes, bytes + count * value_bytes(type));
  }
  if (values && type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto* descriptors = static_cast<Descriptor* const*>(values);
    for (int64_t i = 0; i < count; i++) attribute.contents.push_back(descriptors[i]->content);
  }
  descriptor->content->attributes[name] = std::move(attribute);
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnBackendGetAttribute(Descriptor* descriptor,
                                              cudnnBackendAttributeName_t name,
                                              cudnnBackendAttributeType_t type, int64_t wanted,
                                              int64_t* count, void* values) {
  Content& content = *descriptor->content;
  Attribute attribute;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS:
      attribute = {1, {}, {only_configuration(content)}};
      break;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE:
      attribute = integer(kWorkspaceBytes);
      break;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
      attribute = integer(1);
      break;
    default:
      attribute = content.attributes[name];
  }
  if (count) *count = attribute.count;
  if (!values) return kSuccess;
  int64_t given = std::min(wanted, attribute.count);
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    auto* descriptors = static_cast<Descriptor**>(values);
    for (int64_t i = 0; i < given; i++) descriptors[i]->content = attribute.contents[i];
  } else {
    memcpy(values, attribute.bytes.data(), given * value_bytes(type));
  }
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, Descriptor* plan) {
  const Content& content = *plan->content;
  return launch(handle, content.kernel, content.flops, content.bytes);
}

// ---- descriptors of the older interface ---------------------------------------------------------

namespace {

constexpr int kMostDimensions = 8;

struct Tensor {  // a tensor's or a filter's
  int type = 0;
  int format = 0;
  int dimensions = 0;
  int sizes[kMostDimensions] = {};
  int strides[kMostDimensions] = {};

  double bytes() const {
    double product = static_cast<double>(element_bytes(type));
    for (int i = 0; i < dimensions; i++) product *= sizes[i];
    return product;
  }
};

struct Unread {};  // a descriptor whose content makes no difference here

cudnnStatus_t set(Tensor* tensor, int type, int format, int dimensions, const int* sizes) {
  if (dimensions > kMostDimensions) return CUDNN_STATUS_BAD_PARAM;
  tensor->type = type;
  tensor->format = format;
  tensor->dimensions = dimensions;
  std::copy_n(sizes, dimensions, tensor->sizes);
  return kSuccess;
}

template <class T>
cudnnStatus_t create(T** descriptor) {
  *descriptor = new T;
  return kSuccess;
}

template <class T>
cudnnStatus_t destroy(T* descriptor) {
  delete descriptor;
  return kSuccess;
}

}  // namespace

EXPORT cudnnStatus_t cudnnCreateTensorDescriptor(Tensor** tensor) { return create(tensor); }
EXPORT cudnnStatus_t cudnnDestroyTensorDescriptor(Tensor* tensor) { return destroy(tensor); }
EXPORT cudnnStatus_t cudnnCreateFilterDescriptor(Tensor** filter) { return create(filter); }
EXPORT cudnnStatus_t cudnnDestroyFilterDescriptor(Tensor* filter) { return destroy(filter); }
EXPORT cudnnStatus_t cudnnSetTensorNdDescriptor(Tensor* tensor, int type, int dimensions,
                                                const int* sizes, const int* strides) {
  cudnnStatus_t status = set(tensor, type, 0, dimensions, sizes);
  if (status == kSuccess) std::copy_n(strides, dimensions, tensor->strides);
  return status;
}
EXPORT cudnnStatus_t cudnnGetTensorNdDescriptor(const Tensor* tensor, int most, int* type,
                                                int* dimensions, int* sizes, int* strides) {
  *type = tensor->type;
  *dimensions = tensor->dimensions;
  std::copy_n(tensor->sizes, std::min(most, tensor->dimensions), sizes);
  std::copy_n(tensor->strides, std::min(most, tensor->dimensions), strides);
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnSetFilterNdDescriptor(Tensor* filter, int type, int format,
                                                int dimensions, const int* sizes) {
  return set(filter, type, format, dimensions, sizes);
}
EXPORT cudnnStatus_t cudnnGetFilterNdDescriptor(const Tensor* filter, int most, int* type,
                                                int* format, int* dimensions, int* sizes) {
  *type = filter->type;
  *format = filter->format;
  *dimensions = filter->dimensions;
  std::copy_n(filter->sizes, std::min(most, filter->dimensions), sizes);
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnCreateActivationDescriptor(Unread** made) { return create(made); }
EXPORT cudnnStatus_t cudnnDestroyActivationDescriptor(Unread* made) { return destroy(made); }
EXPORT cudnnStatus_t cudnnSetActivationDescriptor() { return kSuccess; }

// ---- batch normalization ------------------------------------------------------------------------

namespace {

constexpr size_t kBatchNormWorkspaceBytes = 1024;
constexpr double kReadAndWrite = 2;

}  // namespace

EXPORT cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, int, int, Tensor*, Tensor*, Tensor*, Tensor*, Unread*, size_t* size) {
  *size = kBatchNormWorkspaceBytes;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, int, int, Tensor*, Tensor*, Tensor*, Tensor*, Tensor*, Tensor*, Unread*,
    size_t* size) {
  *size = kBatchNormWorkspaceBytes;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, int, int,
                                                                          Unread*, Tensor*,
                                                                          size_t* size) {
  *size = 0;
  return kSuccess;
}
// Training reads its input once more, for the statistics; its backward pass reads input and output
// gradient twice.
EXPORT cudnnStatus_t cudnnBatchNormalizationForwardTrainingEx(cudnnHandle_t handle, int, int,
                                                              const void*, const void*,
                                                              const Tensor* input) {
  return launch(handle, "fake_cudnn_bn_fw_tr", 0, input->bytes() * (kReadAndWrite + 1));
}
EXPORT cudnnStatus_t cudnnBatchNormalizationBackwardEx(cudnnHandle_t handle, int, int, const void*,
                                                       const void*, const void*, const void*,
                                                       const Tensor* input) {
  return launch(handle, "fake_cudnn_bn_bw", 0, input->bytes() * (2 * kReadAndWrite + 1));
}
EXPORT cudnnStatus_t cudnnBatchNormalizationForwardInference(cudnnHandle_t handle, int,
                                                             const void*, const void*,
                                                             const Tensor* input) {
  return launch(handle, "fake_cudnn_bn_fw_inf", 0, input->bytes() * kReadAndWrite);
}

// ---- dropout ------------------------------------------------------------------------------------

namespace {

constexpr size_t kDropoutStateBytes = 4096;

}  // namespace

EXPORT cudnnStatus_t cudnnCreateDropoutDescriptor(Unread** made) { return create(made); }
EXPORT cudnnStatus_t cudnnDestroyDropoutDescriptor(Unread* made) { return destroy(made); }
EXPORT cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* size) {
  *size = kDropoutStateBytes;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnSetDropoutDescriptor(Unread*, cudnnHandle_t handle) {
  return launch(handle, "fake_cudnn_dropout_states", 0, kDropoutStateBytes);
}
EXPORT cudnnStatus_t cudnnRestoreDropoutDescriptor() { return kSuccess; }

// ---- recurrent networks -------------------------------------------------------------------------
//
// A network has `layers` times `directions` pseudo layers. The weights of all come first: for each
// pseudo layer the input matrices of every gate, the recurrent matrices of every gate, and the
// projection. Two biases for each gate of each pseudo layer follow.

namespace {

struct Rnn {
  int mode = 0;
  int directions = 1;
  int input = 0;
  int hidden = 0;
  int projection = 0;
  int layers = 0;
  bool bias = false;
  int type = 0;

  int gates() const { return mode == CUDNN_LSTM ? 4 : mode == CUDNN_GRU ? 3 : 1; }
  int pseudo_layers() const { return layers * directions; }
  bool projected() const { return projection && projection != hidden; }
  int output() const { return projected() ? projection : hidden; }
  int input_of(int pseudo) const { return pseudo < directions ? input : output() * directions; }
  size_t matrix_elements(int pseudo) const {
    size_t columns = input_of(pseudo) + output();
    size_t elements = static_cast<size_t>(gates()) * hidden * columns;
    return projected() ? elements + static_cast<size_t>(projection) * hidden : elements;
  }
  size_t matrix_elements_before(int pseudo) const {
    size_t elements = 0;
    for (int i = 0; i < pseudo; i++) elements += matrix_elements(i);
    return elements;
  }
  size_t all_matrix_elements() const { return matrix_elements_before(pseudo_layers()); }
  size_t bias_elements() const {
    return bias ? static_cast<size_t>(pseudo_layers()) * 2 * gates() * hidden : 0;
  }
};

struct RnnData {
  int steps = 0;
  int batch = 0;
};

struct Matrix {
  size_t offset = 0;  // elements before it
  int rows = 0;
  int columns = 0;
};

// The matrix `id` of a pseudo layer; without rows if there is none.
Matrix matrix_of(const Rnn& rnn, int pseudo, int id) {
  Matrix matrix{rnn.matrix_elements_before(pseudo), rnn.hidden, rnn.input_of(pseudo)};
  int gates = rnn.gates();
  size_t input_matrices = static_cast<size_t>(gates) * rnn.hidden * rnn.input_of(pseudo);
  if (id < gates) {
    matrix.offset += static_cast<size_t>(id) * matrix.rows * matrix.columns;
  } else if (id < 2 * gates) {
    matrix.columns = rnn.output();
    matrix.offset += input_matrices + static_cast<size_t>(id - gates) * rnn.hidden * rnn.output();
  } else if (rnn.projected()) {
    matrix.rows = rnn.projection;
    matrix.columns = rnn.hidden;
    matrix.offset += input_matrices + static_cast<size_t>(gates) * rnn.hidden * rnn.output();
  } else {
    return {};
  }
  return matrix;
}

void describe(Tensor* tensor, int type, int rows, int columns) {
  if (!tensor) return;
  const int sizes[] = {1, rows, columns};
  const int strides[] = {rows * columns, columns, 1};
  set(tensor, type, 0, rows ? 3 : 0, sizes);
  std::copy_n(strides, 3, tensor->strides);
}

// One kernel for each layer, which reads the weights once and computes every step of every row.
cudnnStatus_t run_layers(cudnnHandle_t handle, const Rnn& rnn, const RnnData& data,
                         const char* name) {
  double weights = static_cast<double>(rnn.all_matrix_elements()) / rnn.layers;
  double flops = 2 * weights * data.steps * data.batch;
  double bytes = weights * static_cast<double>(element_bytes(rnn.type));
  for (int i = 0; i < rnn.layers; i++) {
    cudnnStatus_t status = launch(handle, name, flops, bytes);
    if (status != kSuccess) return status;
  }
  return kSuccess;
}

}  // namespace

EXPORT cudnnStatus_t cudnnCreateRNNDescriptor(Rnn** rnn) { return create(rnn); }
EXPORT cudnnStatus_t cudnnDestroyRNNDescriptor(Rnn* rnn) { return destroy(rnn); }
EXPORT cudnnStatus_t cudnnCreateRNNDataDescriptor(RnnData** data) { return create(data); }
EXPORT cudnnStatus_t cudnnDestroyRNNDataDescriptor(RnnData* data) { return destroy(data); }
EXPORT cudnnStatus_t cudnnSetRNNDescriptor_v8(Rnn* rnn, int, int mode, int bias, int direction, int,
                                              int type, int, int, int input, int hidden,
                                              int projection, int layers) {
  rnn->mode = mode;
  rnn->directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1;
  rnn->input = input;
  rnn->hidden = hidden;
  rnn->projection = projection;
  rnn->layers = layers;
  rnn->bias = bias != CUDNN_RNN_NO_BIAS;
  rnn->type = type;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnSetRNNDataDescriptor(RnnData* data, int, int, int steps, int batch) {
  data->steps = steps;
  data->batch = batch;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, const Rnn* rnn, size_t* size) {
  size_t elements = rnn->all_matrix_elements() + rnn->bias_elements();
  *size = elements * element_bytes(rnn->type);
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, const Rnn* rnn,
                                               cudnnForwardMode_t mode, const RnnData* data,
                                               size_t* workspace, size_t* reserve) {
  size_t rows = static_cast<size_t>(data->steps) * data->batch;
  size_t columns = static_cast<size_t>(rnn->hidden) * rnn->gates() * rnn->pseudo_layers();
  size_t activations = rows * columns * element_bytes(rnn->type);
  if (workspace) *workspace = activations;
  if (reserve) *reserve = mode == CUDNN_FWD_MODE_TRAINING ? 2 * activations : 0;
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, const Rnn* rnn, int pseudo, size_t,
                                             char* space, int id, Tensor* matrix_tensor,
                                             char** matrix_address, Tensor* bias_tensor,
                                             char** bias_address) {
  size_t element = element_bytes(rnn->type);
  Matrix matrix = matrix_of(*rnn, pseudo, id);
  if (matrix_address) *matrix_address = matrix.rows ? space + matrix.offset * element : nullptr;
  describe(matrix_tensor, rnn->type, matrix.rows, matrix.columns);
  int gates = rnn->gates();
  bool biased = rnn->bias && id < 2 * gates;
  size_t biases_before = (static_cast<size_t>(pseudo) * 2 * gates + id) * rnn->hidden;
  size_t offset = rnn->all_matrix_elements() + biases_before;
  if (bias_address) *bias_address = biased ? space + offset * element : nullptr;
  describe(bias_tensor, rnn->type, biased ? rnn->hidden : 0, 1);
  return kSuccess;
}
EXPORT cudnnStatus_t cudnnRNNForward(cudnnHandle_t handle, const Rnn* rnn, int, const void*,
                                     const RnnData* input) {
  return run_layers(handle, *rnn, *input, "fake_cudnn_rnn_forward");
}
EXPORT cudnnStatus_t cudnnRNNBackwardData_v8(cudnnHandle_t handle, const Rnn* rnn, const void*,
                                             const RnnData* output) {
  return run_layers(handle, *rnn, *output, "fake_cudnn_rnn_backward_data");
}
EXPORT cudnnStatus_t cudnnRNNBackwardWeights_v8(cudnnHandle_t handle, const Rnn* rnn, int,
                                                const void*, const RnnData* input) {
  return run_layers(handle, *rnn, *input, "fake_cudnn_rnn_backward_weights");
}
