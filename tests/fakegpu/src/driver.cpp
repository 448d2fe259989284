// The CUDA driver: the functions that torch links, and those that it asks for by name.
//
// Not faithful: contexts, which stand for devices; modules, which hold no code; virtual memory
// management, multicast and green contexts, which are not supported.
#include "abi/driver.h"
#include "runtime.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

namespace fake {

// The runtime's error codes and the driver's agree where both have one.
static CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }

static CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
}

static CUresult load_module(CUmodule* module) {
  static char any_module;
  *module = reinterpret_cast<CUmodule>(&any_module);
  return CUDA_SUCCESS;
}

static CUresult launch_function(CUfunction function, dim3 grid, dim3 block, cudaStream_t stream) {
  Call call("cuLaunchKernel");
  return as_driver(launch(reinterpret_cast<Kernel*>(function), grid, block, stream));
}

}  // namespace fake

using namespace fake;

// ---- devices and contexts -----------------------------------------------------------------------

EXPORT CUresult cuInit(unsigned) {
  init();
  return cfg.visible.empty() ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int* count) {
  init();
  *count = static_cast<int>(cfg.visible.size());
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetUuid_v2(unsigned char* uuid, CUdevice device) {
  init();
  uuid_of(physical_of(device), uuid);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, cudaDeviceAttr attribute, CUdevice device) {
  return as_driver(cudaDeviceGetAttribute(value, attribute, device));
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  init();
  if (flags) *flags = 0;
  *active = has_context(device);  // torch asks, so as to make no context on GPU 0 in passing
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* found, CUdevice device) {
  *found = context_of(device);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext* found) {
  int device = current_device();
  *found = has_context(device) ? context_of(device) : nullptr;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxSetCurrent(CUcontext wanted) {
  if (wanted) cudaSetDevice(static_cast<int>(reinterpret_cast<uintptr_t>(wanted)) - 1);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                      CUdeviceptr address) {
  int device = device_of(reinterpret_cast<void*>(address));
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(value) = context_of(device);
      return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

// ---- modules and kernels ------------------------------------------------------------------------

EXPORT CUresult cuModuleLoad(CUmodule* module, const char*) { return load_module(module); }

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void*) { return load_module(module); }

EXPORT CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, int*, void**) {
  return load_module(module);
}

EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  *function = reinterpret_cast<CUfunction>(new Kernel{name});
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetAttribute(int* value, int, CUfunction) {
  *value = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, int, int) { return CUDA_SUCCESS; }

EXPORT CUresult cuFuncSetCacheConfig(CUfunction, int) { return CUDA_SUCCESS; }

EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int block_size,
                                                            size_t) {
  *blocks = resident_blocks(block_size);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned, cudaStream_t stream, void**, void**) {
  dim3 grid{grid_x, grid_y, grid_z};
  dim3 block{block_x, block_y, block_z};
  return launch_function(function, grid, block, stream);
}

EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y,
                                          unsigned grid_z, unsigned block_x, unsigned block_y,
                                          unsigned block_z, unsigned, cudaStream_t stream, void**) {
  dim3 grid{grid_x, grid_y, grid_z};
  dim3 block{block_x, block_y, block_z};
  return launch_function(function, grid, block, stream);
}

// ---- functions by name --------------------------------------------------------------------------

EXPORT CUresult fakecuda_no_driver_function() {
  unsupported("a function of the driver");
  return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long,
                                                    cudaDriverEntryPointQueryResult* status) {
  init();
  static void* const self = [] {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&fakecuda_no_driver_function), &info);
    return dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  *function = dlsym(self, (std::string(name) + "_v2").c_str());
  if (!*function) *function = dlsym(self, name);
  if (!*function) {
    unsupported(name);
    *function = reinterpret_cast<void*>(&fakecuda_no_driver_function);
  }
  if (status) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
