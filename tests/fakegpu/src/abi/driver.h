// The binary interface of CUDA 13's driver, as far as this stack implements it: the project's own
// declarations. Attributes of devices have the runtime's numbers, cudaDevAttr...
#pragma once

enum CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_NOT_SUPPORTED = 801,
};

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUmodule = struct CUmod_st*;
using CUfunction = struct CUfunc_st*;

enum CUpointer_attribute {
  CU_POINTER_ATTRIBUTE_CONTEXT = 1,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
};
