// Replaces cuBLAS and cuBLASLt: handles, descriptors, and the products that torch calls.
//
// Faithful: the stream of a handle, its modes, the cost of a product from its operations and bytes.
// Not faithful: a product changes no memory (the plug-in of the numbers does); every type has the
// rate FAKECUDA_TFLOPS, so tensor cores and TF32 gain nothing; there is one algorithm, which needs
// no workspace; sizes and layouts are not checked.
//
// A function declares its parameters up to the last one that it reads: in the calling conventions
// of Linux the caller owns the others.
#include "abi/cublas.h"

#include "fake.h"
#include "one_gpu.h"

#include <algorithm>
#include <utility>

using fake::Call;
using fake::Op;

struct cublasContext {
  cudaStream_t stream = nullptr;
  int math = 0;
  int pointer_mode = 0;
};

namespace {

double element_bytes(cudaDataType_t type) {
  switch (type) {
    case CUDA_R_8I:
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2:
      return 1;
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    case CUDA_R_64F:
    case CUDA_C_32F:
      return 8;
    case CUDA_C_64F:
      return 16;
    default:
      return 4;
  }
}

double flops_per_multiply_add(cudaDataType_t type) {
  bool complex = type == CUDA_C_32F || type == CUDA_C_64F;
  return complex ? 8 : 2;
}

struct Product {  // (m, k) times (k, n), `batch` times
  double m;
  double n;
  double k;
  double batch = 1;
  cudaDataType_t input = CUDA_R_32F;
  cudaDataType_t output = CUDA_R_32F;
};

unsigned tiles(double rows) { return static_cast<unsigned>((rows + 127) / 128); }

cublasStatus_t multiply(const char* name, cudaStream_t stream, const Product& product) {
  Call call("cudaLaunchKernel");
  auto [m, n, k, batch, input, output] = product;
  double flops = flops_per_multiply_add(input) * m * n * k * batch;
  double read = element_bytes(input) * (m * k + k * n) * batch;
  double written = element_bytes(output) * m * n * batch;
  Op op;
  op.name = name;
  op.duration = fake::kernel_duration(flops, read + written);
  op.block = {256, 1, 1};
  op.grid = {tiles(m), tiles(n), static_cast<unsigned>(batch)};
  fake::Stream* on = fake::resolve(stream);
  if (fake::misplaced_kernel(name, on)) return CUBLAS_STATUS_EXECUTION_FAILED;
  cudaError_t error = fake::submit(on, std::move(op));
  return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

cublasStatus_t multiply(const char* name, cublasHandle_t handle, cudaDataType_t type, double m,
                        double n, double k, double batch = 1) {
  return multiply(name, handle->stream, {m, n, k, batch, type, type});
}

struct Layout {  // what a cublasLtMatrixLayout_t points to
  cudaDataType_t type;
  double rows;
  double columns;
  double batch = 1;
};

struct Unread {};  // what a descriptor points to whose content makes no difference here

}  // namespace

// ---- handles ------------------------------------------------------------------------------------

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t handle, int mode) {
  handle->math = mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t handle, int* mode) {
  *mode = handle->math;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t handle, int mode) {
  handle->pointer_mode = mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t handle, int* mode) {
  *mode = handle->pointer_mode;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetSmCountTarget(cublasHandle_t, int) {
  return CUBLAS_STATUS_SUCCESS;
}

// ---- products of one type -----------------------------------------------------------------------

EXPORT cublasStatus_t cublasSgemm_v2(cublasHandle_t handle, int, int, int m, int n, int k) {
  return multiply("fake_sgemm_128x128_nn", handle, CUDA_R_32F, m, n, k);
}
EXPORT cublasStatus_t cublasDgemm_v2(cublasHandle_t handle, int, int, int m, int n, int k) {
  return multiply("fake_dgemm_128x64_nn", handle, CUDA_R_64F, m, n, k);
}
EXPORT cublasStatus_t cublasCgemm_v2(cublasHandle_t handle, int, int, int m, int n, int k) {
  return multiply("fake_cgemm_64x64_nn", handle, CUDA_C_32F, m, n, k);
}
EXPORT cublasStatus_t cublasZgemm_v2(cublasHandle_t handle, int, int, int m, int n, int k) {
  return multiply("fake_zgemm_64x64_nn", handle, CUDA_C_64F, m, n, k);
}
EXPORT cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t handle, int, int, int m, int n,
                                                int k, const void*, const void*, int, long long,
                                                const void*, int, long long, const void*, void*,
                                                int, long long, int batch) {
  return multiply("fake_sgemm_batched_128x64_nn", handle, CUDA_R_32F, m, n, k, batch);
}
EXPORT cublasStatus_t cublasDgemmStridedBatched(cublasHandle_t handle, int, int, int m, int n,
                                                int k, const void*, const void*, int, long long,
                                                const void*, int, long long, const void*, void*,
                                                int, long long, int batch) {
  return multiply("fake_dgemm_batched_64x64_nn", handle, CUDA_R_64F, m, n, k, batch);
}
EXPORT cublasStatus_t cublasCgemmStridedBatched(cublasHandle_t handle, int, int, int m, int n,
                                                int k, const void*, const void*, int, long long,
                                                const void*, int, long long, const void*, void*,
                                                int, long long, int batch) {
  return multiply("fake_cgemm_batched_64x64_nn", handle, CUDA_C_32F, m, n, k, batch);
}
EXPORT cublasStatus_t cublasZgemmStridedBatched(cublasHandle_t handle, int, int, int m, int n,
                                                int k, const void*, const void*, int, long long,
                                                const void*, int, long long, const void*, void*,
                                                int, long long, int batch) {
  return multiply("fake_zgemm_batched_64x64_nn", handle, CUDA_C_64F, m, n, k, batch);
}
EXPORT cublasStatus_t cublasSgemv_v2(cublasHandle_t handle, int, int m, int n) {
  return multiply("fake_sgemv", handle, CUDA_R_32F, m, 1, n);
}
EXPORT cublasStatus_t cublasDgemv_v2(cublasHandle_t handle, int, int m, int n) {
  return multiply("fake_dgemv", handle, CUDA_R_64F, m, 1, n);
}
EXPORT cublasStatus_t cublasCgemv_v2(cublasHandle_t handle, int, int m, int n) {
  return multiply("fake_cgemv", handle, CUDA_C_32F, m, 1, n);
}
EXPORT cublasStatus_t cublasZgemv_v2(cublasHandle_t handle, int, int m, int n) {
  return multiply("fake_zgemv", handle, CUDA_C_64F, m, 1, n);
}
EXPORT cublasStatus_t cublasSdot_v2(cublasHandle_t handle, int n) {
  return multiply("fake_sdot", handle, CUDA_R_32F, 1, 1, n);
}
EXPORT cublasStatus_t cublasDdot_v2(cublasHandle_t handle, int n) {
  return multiply("fake_ddot", handle, CUDA_R_64F, 1, 1, n);
}

// ---- products of mixed types --------------------------------------------------------------------

EXPORT cublasStatus_t cublasDotEx(cublasHandle_t handle, int n, const void*, cudaDataType_t type) {
  return multiply("fake_dot_ex", handle, type, 1, 1, n);
}
EXPORT cublasStatus_t cublasSgemmEx(cublasHandle_t handle, int, int, int m, int n, int k,
                                    const void*, const void*, cudaDataType_t input, int,
                                    const void*, cudaDataType_t, int, const void*, void*,
                                    cudaDataType_t output, int) {
  return multiply("fake_sgemm_ex", handle->stream, {1.0 * m, 1.0 * n, 1.0 * k, 1, input, output});
}
EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t handle, int, int, int m, int n, int k,
                                   const void*, const void*, cudaDataType_t input, int, const void*,
                                   cudaDataType_t, int, const void*, void*, cudaDataType_t output,
                                   int, int, int) {
  Product product{1.0 * m, 1.0 * n, 1.0 * k, 1, input, output};
  return multiply("fake_gemm_ex_128x128", handle->stream, product);
}
EXPORT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, int, int, int m, int n,
                                                 int k, const void*, const void*,
                                                 cudaDataType_t input, int, long long, const void*,
                                                 cudaDataType_t, int, long long, const void*, void*,
                                                 cudaDataType_t output, int, long long, int batch,
                                                 int, int) {
  Product product{1.0 * m, 1.0 * n, 1.0 * k, 1.0 * batch, input, output};
  return multiply("fake_gemm_ex_batched", handle->stream, product);
}

// ---- cuBLASLt -----------------------------------------------------------------------------------

EXPORT size_t cublasLtGetVersion() { return kCublasLtVersion; }

EXPORT cublasStatus_t cublasLtMatmulDescCreate(Unread** description, int, cudaDataType_t) {
  *description = new Unread;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(Unread* description) {
  delete description;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(Unread*, int, const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(Unread** preference) {
  *preference = new Unread;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(Unread* preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(Unread*, int, const void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(Layout** layout, cudaDataType_t type,
                                                 uint64_t rows, uint64_t columns, int64_t) {
  *layout = new Layout{type, static_cast<double>(rows), static_cast<double>(columns)};
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(Layout* layout, int attribute,
                                                       const void* value, size_t) {
  if (attribute == kLayoutBatchCount) layout->batch = *static_cast<const int32_t*>(value);
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(void*, Unread*, Layout*, Layout*, Layout*,
                                                     Layout*, Unread*, int,
                                                     cublasLtMatmulHeuristicResult_t* results,
                                                     int* count) {
  results[0] = {};
  *count = 1;
  return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmul(void*, Unread*, const void*, const void*, const Layout* a,
                                     const void*, const Layout*, const void*, const void*,
                                     const Layout*, void*, const Layout* d,
                                     const cublasLtMatmulAlgo_t*, void*, size_t,
                                     cudaStream_t stream) {
  double k = a->rows * a->columns / std::max(1.0, d->rows);  // also if the first is transposed
  Product product{d->rows, d->columns, k, d->batch, a->type, d->type};
  return multiply("fake_lt_gemm_128x128", stream, product);
}
