// The CUDA runtime, part 6: kernels and variables of GPU code, which torch's libraries register
// when they are loaded.
//
// Not faithful: a kernel runs no code. It takes the time that its threads' memory traffic would
// take; its numbers, if any, come from the plug-in. Occupancy depends on the block's size alone.
#include "one_gpu.h"
#include "runtime.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace fake {

constexpr double kBytesPerThread = 48;

struct Variable {
  size_t size = 0;
  void* memory = nullptr;
};

struct LaunchShape {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

static std::unordered_map<const void*, Kernel*> kernels;  // by the address of the host's stub
static std::unordered_map<const void*, Variable> variables;
static thread_local std::vector<LaunchShape> launch_shapes;

// The runtime accepts a stub's address and a kernel's handle alike.
static Kernel* kernel_of(const void* function) {
  std::lock_guard lock(mu);
  auto found = kernels.find(function);
  if (found != kernels.end()) return found->second;
  return static_cast<Kernel*>(const_cast<void*>(function));
}

static void* memory_of(const void* symbol) {
  std::lock_guard lock(mu);
  auto found = variables.find(symbol);
  if (found == variables.end()) return nullptr;
  Variable& variable = found->second;
  if (!variable.memory) variable.memory = calloc(1, std::max<size_t>(variable.size, 16));
  return variable.memory;
}

cudaError_t launch(const Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream) {
  Op op;
  op.name = kernel->name.c_str();
  op.grid = grid;
  op.block = block;
  double blocks = static_cast<double>(grid.x) * grid.y * grid.z;
  double threads = blocks * block.x * block.y * block.z;
  op.duration = kernel_duration(0, threads * kBytesPerThread);
  Stream* on = resolve(stream);
  if (cudaError_t error = misplaced_kernel(op.name, on)) return error;
  return submit(on, std::move(op));
}

int resident_blocks(int block_size) { return std::clamp(1536 / std::max(1, block_size), 1, 16); }

}  // namespace fake

using namespace fake;

// ---- what the compiler's code calls -------------------------------------------------------------

EXPORT void** __cudaRegisterFatBinary(void* binary) { return new void*(binary); }

EXPORT void __cudaRegisterFatBinaryEnd(void**) {}

EXPORT void __cudaUnregisterFatBinary(void**) {}

EXPORT char __cudaInitModule(void**) { return 1; }

EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*,
                                   void*, void*, void*, int*) {
  std::lock_guard lock(mu);
  kernels[host] = new Kernel{name};
}

EXPORT void __cudaRegisterVar(void**, char* host, char*, const char*, int, size_t size, int, int) {
  std::lock_guard lock(mu);
  variables[host] = {size, nullptr};
}

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                            cudaStream_t stream) {
  launch_shapes.push_back({grid, block, shared_bytes, stream});
  return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                              cudaStream_t* stream) {
  if (launch_shapes.empty()) return fail(cudaErrorUnknown);
  const LaunchShape& shape = launch_shapes.back();
  *grid = shape.grid;
  *block = shape.block;
  *shared_bytes = shape.shared_bytes;
  *stream = shape.stream;
  launch_shapes.pop_back();
  return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(kernel_of(function));
  return cudaSuccess;
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t,
                                      cudaStream_t stream) {
  Call call(__func__);
  return launch(reinterpret_cast<Kernel*>(kernel), grid, block, stream);
}

// ---- launches -----------------------------------------------------------------------------------

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void**, size_t,
                                    cudaStream_t stream) {
  Call call(__func__);
  return launch(kernel_of(function), grid, block, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 grid, dim3 block, void**,
                                               size_t, cudaStream_t stream) {
  Call call(__func__);
  return launch(kernel_of(function), grid, block, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                       void**) {
  Call call(__func__);
  return launch(kernel_of(function), config->gridDim, config->blockDim, config->stream);
}

// ---- properties of kernels ----------------------------------------------------------------------

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  init();
  *found = {};
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->ptxVersion = cfg.major * 10 + cfg.minor;
  found->binaryVersion = found->ptxVersion;
  found->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

EXPORT cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }

EXPORT cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, int, int, int) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*,
                                                                          int block_size, size_t,
                                                                          unsigned) {
  *blocks = resident_blocks(block_size);
  return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*,
                                                                 int block_size, size_t) {
  *blocks = resident_blocks(block_size);
  return cudaSuccess;
}

// ---- variables and libraries of GPU code --------------------------------------------------------

EXPORT cudaError_t cudaGetSymbolAddress(void** pointer, const void* symbol) {
  *pointer = memory_of(symbol);
  return *pointer ? cudaSuccess : fail(cudaErrorInvalidSymbol);
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes,
                                      size_t offset, cudaMemcpyKind) {
  void* memory = memory_of(symbol);
  if (!memory) return fail(cudaErrorInvalidSymbol);
  memcpy(static_cast<char*>(memory) + offset, from, bytes);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, int*, void**, unsigned,
                                       int*, void**, unsigned) {
  static char any_library;
  *library = reinterpret_cast<cudaLibrary_t>(&any_library);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }

EXPORT cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  *kernel = reinterpret_cast<cudaKernel_t>(new Kernel{name});
  return cudaSuccess;
}
