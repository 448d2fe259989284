// What torch uses of the binary interface of cuBLAS 13 and cuBLASLt 13: own declarations.
#pragma once
#include <cstddef>
#include <cstdint>

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
};

// The types of a matrix's elements; the others count as four bytes.
enum cudaDataType_t {
  CUDA_R_32F = 0,
  CUDA_R_64F = 1,
  CUDA_R_16F = 2,
  CUDA_R_8I = 3,
  CUDA_C_32F = 4,
  CUDA_C_64F = 5,
  CUDA_R_16BF = 14,
  CUDA_R_8F_E4M3 = 28,
  CUDA_R_8F_E5M2 = 29,
};

struct cublasContext;
using cublasHandle_t = cublasContext*;

constexpr size_t kCublasLtVersion = 130101;
constexpr int kLayoutBatchCount = 5;  // CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT

struct cublasLtMatmulAlgo_t {
  uint64_t data[8];
};

struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
};
static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == 96);
static_assert(offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize) == 64);
static_assert(offsetof(cublasLtMatmulHeuristicResult_t, state) == 72);
