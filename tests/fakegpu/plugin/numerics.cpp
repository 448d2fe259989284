// Real numbers for torch's CUDA build on fake GPUs. When torch is imported, it loads this library
// and calls `fakecuda_numerics`, which replaces the CUDA kernel of each ATen operator.
//
// A fake GPU launches kernels that change no data, but its memory is memory of the host. So an
// operator runs twice: torch's CUDA kernel does all that it does on the host for a real GPU
// (allocations, workspaces, launches, streams), and then the CPU computes the numbers in the same
// memory, in the order of the GPU's streams. An operator whose numbers cannot be computed is
// refused by name.
//
// Not faithful: the last bits of results (the order of sums is the CPU's), half precision where the
// CPU rounds differently, the values of random numbers, and the times of kernels.
//
//   kernels    what replaces a CUDA kernel: computed, on the host, refused
//   rules_*    the numbers of operators that only CUDA has
//   copies     aten::copy_ between devices
//   aliases    CPU tensors in the memory of GPU tensors
//   random     a CPU generator for a GPU's generator
//   effects    computations in the order of streams
#include <c10/util/Exception.h>

#include <unordered_set>

#include "effects.h"
#include "kernels.h"
#include "rules.h"

namespace fakegpu {

namespace {

using Names = std::unordered_set<std::string>;

// These change no numbers, or consist of operators that are computed.
const Names kAsTheyAre = {
    "aten::_cudnn_init_dropout_state",
    "aten::_cudnn_rnn_flatten_weight",
    "aten::_efficientzerotensor",
    "aten::_embedding_bag_backward",
    "aten::_pin_memory",
    "aten::_reshape_alias",
    "aten::_resize_output_",
    "aten::_to_sparse",
    "aten::as_strided",
    "aten::new_empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::view",
};

// The sizes of their results depend on numbers, or the CUDA kernel reads numbers.
const Names kOnHost = {
    "aten::_segment_reduce_backward",
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::segment_reduce",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
};

// The CUDA kernels call cuSOLVER, cuFFT and functions of cuBLAS that the fake lacks. The host
// computes them; the form that writes into a given tensor is refused.
const Names kOfMissingLibraries = {
    "aten::_cholesky_solve_helper",
    "aten::_fft_c2c",
    "aten::_fft_c2r",
    "aten::_fft_r2c",
    "aten::_linalg_det",
    "aten::_linalg_eigh",
    "aten::_linalg_eigvals",
    "aten::_linalg_slogdet",
    "aten::_linalg_solve_ex",
    "aten::_linalg_svd",
    "aten::cholesky_inverse",
    "aten::geqrf",
    "aten::linalg_cholesky_ex",
    "aten::linalg_eig",
    "aten::linalg_eigvals",
    "aten::linalg_householder_product",
    "aten::linalg_inv_ex",
    "aten::linalg_ldl_factor_ex",
    "aten::linalg_ldl_solve",
    "aten::linalg_lstsq",
    "aten::linalg_lu",
    "aten::linalg_lu_factor_ex",
    "aten::linalg_lu_solve",
    "aten::linalg_matrix_exp",
    "aten::linalg_matrix_sqrth",
    "aten::linalg_polar",
    "aten::linalg_qr",
    "aten::linalg_solve_triangular",
    "aten::ormqr",
    "aten::triangular_solve",
};

// Of the operators on sparse tensors (COO), those that take tensors apart, put them together, or
// consist of operators on indices and values. The host computes the others.
const Names kSparseAsTheyAre = {
    "aten::_coalesced_",
    "aten::_sparse_coo_tensor_with_dims",
    "aten::_sparse_coo_tensor_with_dims_and_tensors",
    "aten::_to_dense",
    "aten::add",
    "aten::add_",
    "aten::cat",
    "aten::clone",
    "aten::copy_",
    "aten::copy_sparse_to_sparse_",
    "aten::div",
    "aten::div_",
    "aten::empty_like",
    "aten::neg",
    "aten::neg_",
    "aten::resize_as_sparse_",
    "aten::sparse_mask",
    "aten::sparse_resize_",
    "aten::sparse_resize_and_clear_",
    "aten::sub",
    "aten::sub_",
    "aten::zero_",
    "aten::zeros",
};

// Kernels of these namespaces move bytes themselves (NCCL's collectives).
const Names kOtherNamespaces = {"c10d"};

std::string base_name(const std::string& name) {
  return name.substr(0, name.find('.'));
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    if (returned.alias_info() && !returned.alias_info()->isWrite()) return true;
  }
  return false;
}

bool writes_arguments(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.alias_info() && argument.alias_info()->isWrite()) return true;
  }
  return false;
}

bool gives_numbers(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    if (returned.type()->str().find("Tensor") != std::string::npos) return true;
  }
  return writes_arguments(schema);
}

bool changes_no_numbers(const c10::OperatorHandle& op, const std::string& name) {
  bool allocates = name.rfind("aten::empty", 0) == 0;
  return is_view(op.schema()) || allocates || !gives_numbers(op.schema());
}

using Kernel = std::optional<c10::KernelFunction>;

template <class Functor>
Kernel boxed(std::unique_ptr<Functor> functor) {
  return c10::KernelFunction::makeFromBoxedFunctor(std::move(functor));
}

// What replaces the CUDA kernel on dense tensors; nothing if it stays.
Kernel dense_kernel(
    const c10::OperatorHandle& op, const std::string& name, c10::SafeKernelFunction original) {
  if (name == "aten::copy_") return boxed(std::make_unique<Copied>(op, original));
  if (name == "aten::_local_scalar_dense") return boxed(std::make_unique<NumberRead>(original));
  if (kOnHost.count(name)) return boxed(std::make_unique<OnHost>(op));
  if (kOfMissingLibraries.count(base_name(name))) {
    if (writes_arguments(op.schema())) return boxed(std::make_unique<Refused>(op, original));
    return boxed(std::make_unique<OnHost>(op));
  }
  if (kAsTheyAre.count(base_name(name)) || changes_no_numbers(op, name)) return std::nullopt;
  const Rule* rule = find_rule(name);
  if (rule || op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return boxed(std::make_unique<Computed>(op, original, rule));
  }
  return boxed(std::make_unique<Refused>(op, original));
}

Kernel sparse_kernel(
    const c10::OperatorHandle& op, const std::string& name, c10::SafeKernelFunction original) {
  if (name == "aten::add.out") return boxed(std::make_unique<SparseAdded>(op, original));
  if (kSparseAsTheyAre.count(base_name(name)) || changes_no_numbers(op, name)) return std::nullopt;
  return boxed(std::make_unique<OnHost>(op));
}

Kernel refused_kernel(
    const c10::OperatorHandle& op, const std::string& name, c10::SafeKernelFunction original) {
  if (changes_no_numbers(op, name)) return std::nullopt;
  return boxed(std::make_unique<Refused>(op, original));
}

using Choice = Kernel (*)(
    const c10::OperatorHandle& op, const std::string& name, c10::SafeKernelFunction original);

Choice choice(const std::string& name, c10::DispatchKey key) {
  bool of_torch = name.rfind("aten::", 0) == 0;
  if (of_torch && key == c10::DispatchKey::CUDA) return dense_kernel;
  if (of_torch && key == c10::DispatchKey::SparseCUDA) return sparse_kernel;
  return refused_kernel;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

int replace_kernels() {
  Silent silent;  // each replaced kernel is a warning
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<c10::RegistrationHandleRAII> registrations;
  for (const auto& operator_name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(operator_name);
    if (!op || kOtherNamespaces.count(std::string(*operator_name.getNamespace()))) continue;
    auto name = toString(operator_name);
    for (auto key : {
             c10::DispatchKey::CUDA,
             c10::DispatchKey::SparseCUDA,
             c10::DispatchKey::SparseCsrCUDA,
             c10::DispatchKey::NestedTensorCUDA,
             c10::DispatchKey::QuantizedCUDA,
         }) {
      // aten::copy_ is one kernel for all devices
      bool all_devices = name == "aten::copy_" && key == c10::DispatchKey::CUDA;
      if (!all_devices && !op->hasKernelForDispatchKey(key)) continue;
      auto kernel = choice(name, key)(*op, name, op->getComputedKernelForDispatchKey(key));
      if (!kernel) continue;
      registrations.push_back(dispatcher.registerImpl(
          operator_name, key, std::move(*kernel), std::nullopt, nullptr, "fake GPUs"));
    }
  }
  return static_cast<int>(registrations.size());
}

}  // namespace

}  // namespace fakegpu

// Returns how many kernels are replaced. Calls after the first change nothing.
extern "C" __attribute__((visibility("default"))) int fakecuda_numerics() {
  static const int replaced = [] {
    fakegpu::remember_fresh_state();
    return fakegpu::replace_kernels();
  }();
  return replaced;
}
