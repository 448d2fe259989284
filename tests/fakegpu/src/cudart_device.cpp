// The CUDA runtime, part 1: devices, their properties and contexts, errors.
//
// Not faithful: properties that no test reads are zero; peer access is one setting for all pairs.
#include "faults.h"
#include "runtime.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

constexpr int kCudaVersion = 13000;

static thread_local int current = 0;
static thread_local cudaError_t last_error = cudaSuccess;

int current_device() { return current; }

int set_device(int device) { return std::exchange(current, device); }

bool valid_device(int device) {
  init();
  return device >= 0 && device < static_cast<int>(cfg.visible.size());
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

Stream* resolve(cudaStream_t stream) {
  bool is_default = !stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? &devices[current].default_stream : reinterpret_cast<Stream*>(stream);
}

// With FAKECUDA_TRACE_CONTEXT=FILE: which line of Python makes a context.
static void trace_context(int device) {
  const char* path = getenv("FAKECUDA_TRACE_CONTEXT");
  if (!path) return;
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  int pid = static_cast<int>(getpid());
  dprintf(file, "process %d makes a context on GPU %d\n", pid, physical_of(device));
  void* frames[24];
  backtrace_symbols_fd(frames, backtrace(frames, 24), file);
  using ThreadState = void* (*)();
  using Dump = void (*)(int file, void* thread_state);
  auto state = reinterpret_cast<ThreadState>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
  auto dump = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTraceback"));
  if (state && dump && state()) dump(file, state());
  close(file);
}

void context(int device) {
  std::lock_guard lock(mu);
  if (devices[device].context) return;
  devices[device].context = true;
  trace_context(device);
  sleep_until(now() + static_cast<int64_t>(cfg.context_s * 1e9));
  count_memory(device, static_cast<int64_t>(cfg.context));
}

bool has_context(int device) {
  std::lock_guard lock(mu);
  return devices[device].context;
}

static cudaDeviceProp properties(int device) {
  cudaDeviceProp p{};
  snprintf(p.name, sizeof p.name, "%s", cfg.name.c_str());
  uuid_of(physical_of(device), p.uuid);
  p.totalGlobalMem = cfg.memory;
  p.sharedMemPerBlock = 48 << 10;
  p.sharedMemPerBlockOptin = 99 << 10;
  p.sharedMemPerMultiprocessor = 100 << 10;
  p.reservedSharedMemPerBlock = 1 << 10;
  p.regsPerBlock = 65536;
  p.regsPerMultiprocessor = 65536;
  p.warpSize = 32;
  p.memPitch = INT_MAX;
  p.maxThreadsPerBlock = 1024;
  p.maxThreadsDim[0] = 1024;
  p.maxThreadsDim[1] = 1024;
  p.maxThreadsDim[2] = 64;
  p.maxGridSize[0] = INT_MAX;
  p.maxGridSize[1] = 65535;
  p.maxGridSize[2] = 65535;
  p.totalConstMem = 64 << 10;
  p.major = cfg.major;
  p.minor = cfg.minor;
  p.textureAlignment = 512;
  p.multiProcessorCount = cfg.sms;
  p.canMapHostMemory = 1;
  p.concurrentKernels = 1;
  p.unifiedAddressing = 1;
  p.managedMemory = 1;
  p.asyncEngineCount = 2;
  p.memoryBusWidth = 384;
  p.l2CacheSize = 6 << 20;
  p.maxThreadsPerMultiProcessor = 1536;
  p.maxBlocksPerMultiProcessor = 16;
  p.streamPrioritiesSupported = 1;
  p.globalL1CacheSupported = 1;
  p.localL1CacheSupported = 1;
  p.cooperativeLaunch = 1;
  p.computePreemptionSupported = 1;
  p.hostRegisterSupported = 1;
  p.memoryPoolsSupported = 1;
  p.pciBusID = physical_of(device) + 1;
  return p;
}

static int attribute_of(const cudaDeviceProp& p, cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      return p.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimX:
      return p.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY:
      return p.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ:
      return p.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX:
      return p.maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
      return p.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ:
      return p.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return static_cast<int>(p.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(p.sharedMemPerBlockOptin);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(p.sharedMemPerMultiprocessor);
    case cudaDevAttrMaxRegistersPerBlock:
      return p.regsPerBlock;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return p.regsPerMultiprocessor;
    case cudaDevAttrWarpSize:
      return p.warpSize;
    case cudaDevAttrMultiProcessorCount:
      return p.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return p.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return p.maxBlocksPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor:
      return p.major;
    case cudaDevAttrComputeCapabilityMinor:
      return p.minor;
    case cudaDevAttrClockRate:
      return 1'700'000;  // kHz
    case cudaDevAttrMemoryClockRate:
      return 9'751'000;  // kHz
    case cudaDevAttrGlobalMemoryBusWidth:
      return p.memoryBusWidth;
    case cudaDevAttrL2CacheSize:
      return p.l2CacheSize;
    case cudaDevAttrAsyncEngineCount:
      return p.asyncEngineCount;
    case cudaDevAttrPciBusId:
      return p.pciBusID;
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    default:
      return 0;
  }
}

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

static const ErrorText& text_of(cudaError_t error) {
  static const ErrorText texts[] = {
      {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
      {cudaSuccess, "cudaSuccess", "no error"},
      {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
      {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
      {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
      {cudaErrorDeviceUnavailable, "cudaErrorDeviceUnavailable",
       "CUDA-capable device(s) is/are busy or unavailable"},
      {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
      {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
      {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable",
       "uncorrectable ECC error encountered"},
      {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported",
       "peer access is not supported between these two devices"},
      {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
      {cudaErrorIllegalState, "cudaErrorIllegalState",
       "the operation cannot be performed in the present state"},
      {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
      {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
       "peer access is already enabled"},
      {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
       "part or all of the requested memory range is already mapped"},
      {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
       "pointer does not correspond to a registered memory region"},
      {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
      {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
      {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
       "operation not permitted when stream is capturing"},
      {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
       "operation failed due to a previous error during capture"},
      {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
       "capturing stream has unjoined work"},
      {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
       "dependency created on uncaptured work in another stream"},
      {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
       "operation not permitted on an event last recorded in a capturing stream"},
      {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
       "attempt to terminate a thread-local capture sequence from another thread"},
  };
  for (const ErrorText& known : texts)
    if (known.error == error) return known;
  return texts[0];
}

}  // namespace fake

using namespace fake;

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  init();
  *count = static_cast<int>(cfg.visible.size());
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  init();
  *device = current_device();
  return cfg.visible.empty() ? fail(cudaErrorNoDevice) : cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (!valid_device(device)) return fail(cudaErrorInvalidDevice);
  set_device(device);
  if (cudaError_t error = broken(device)) return error;
  context(device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = kCudaVersion;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (!valid_device(device)) return fail(cudaErrorInvalidDevice);
  *found = properties(device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!valid_device(device)) return fail(cudaErrorInvalidDevice);
  *value = attribute_of(properties(device), attribute);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  if (!valid_device(device)) return fail(cudaErrorInvalidDevice);
  char full[32];
  pci_bus_id(physical_of(device), full, sizeof full);
  snprintf(text, length, "%s", full + 4);  // the runtime writes four digits of the domain
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  if (!valid_device(device) || !valid_device(peer)) return fail(cudaErrorInvalidDevice);
  *can = device != peer && cfg.peer;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  static std::set<std::pair<int, int>> enabled;
  if (!valid_device(peer)) return fail(cudaErrorInvalidDevice);
  if (peer == current_device() || !cfg.peer) return fail(cudaErrorPeerAccessUnsupported);
  std::lock_guard lock(mu);
  bool is_new = enabled.insert({current_device(), peer}).second;
  return is_new ? cudaSuccess : fail(cudaErrorPeerAccessAlreadyEnabled);
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceSynchronize() {
  init();
  Call call(__func__);
  if (cudaError_t error = broken(current_device())) return error;
  if (cudaError_t error = forbidden_by_capture()) return error;
  context(current_device());
  sync_device(current_device());
  return cudaSuccess;
}

EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }

EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }

EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

EXPORT const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }

EXPORT const char* cudaGetErrorString(cudaError_t error) { return text_of(error).text; }
