// What torch's profiler uses of the binary interface of CUPTI 13: own declarations.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr uint32_t kCuptiVersion = 130000;
constexpr uint32_t kSynchronizationWithout = 0xffffffff;  // CUPTI_SYNCHRONIZATION_INVALID_VALUE
constexpr uint8_t kMemcpyAsync = 1;  // CUPTI_ACTIVITY_FLAG_MEMCPY_ASYNC

enum CUptiResult {
  CUPTI_SUCCESS = 0,
  CUPTI_ERROR_MAX_LIMIT_REACHED = 12,
  CUPTI_ERROR_QUEUE_EMPTY = 18,
};

enum CUpti_CallbackDomain { CUPTI_CB_DOMAIN_DRIVER_API = 1, CUPTI_CB_DOMAIN_RUNTIME_API = 2 };

enum CUpti_ActivityKind {
  CUPTI_ACTIVITY_KIND_MEMCPY = 1,
  CUPTI_ACTIVITY_KIND_MEMSET = 2,
  CUPTI_ACTIVITY_KIND_DRIVER = 4,
  CUPTI_ACTIVITY_KIND_RUNTIME = 5,
  CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL = 10,
  CUPTI_ACTIVITY_KIND_MEMCPY2 = 22,
  CUPTI_ACTIVITY_KIND_SYNCHRONIZATION = 38,
  CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION = 39,
};

enum CUpti_ActivityMemcpyKind : uint8_t {
  CUPTI_ACTIVITY_MEMCPY_KIND_HTOD = 1,
  CUPTI_ACTIVITY_MEMCPY_KIND_DTOH = 2,
  CUPTI_ACTIVITY_MEMCPY_KIND_DTOD = 8,
  CUPTI_ACTIVITY_MEMCPY_KIND_HTOH = 9,
  CUPTI_ACTIVITY_MEMCPY_KIND_PTOP = 10,
};

enum CUpti_ActivityMemoryKind : uint8_t {
  CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE = 1,
  CUPTI_ACTIVITY_MEMORY_KIND_DEVICE = 3,
};

struct CUpti_Activity {
  CUpti_ActivityKind kind;
};

// The fields after the last one that is set or read are one array, `rest`.
struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivityKernel10 {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
  uint8_t cacheConfig;
  uint8_t sharedMemoryConfig;
  uint16_t registersPerThread;
  uint32_t partitionedGlobalCache[2];
  uint64_t start;
  uint64_t end;
  uint64_t completed;
  uint32_t deviceId;
  uint32_t contextId;
  uint32_t streamId;
  int32_t gridX;
  int32_t gridY;
  int32_t gridZ;
  int32_t blockX;
  int32_t blockY;
  int32_t blockZ;
  int32_t staticSharedMemory;
  int32_t dynamicSharedMemory;
  uint32_t localMemoryPerThread;
  uint32_t localMemoryTotal;
  uint32_t correlationId;
  int64_t gridId;
  const char* name;
  uint64_t rest[13];
};
static_assert(sizeof(CUpti_ActivityKernel10) == 216);
static_assert(offsetof(CUpti_ActivityKernel10, start) == 16);
static_assert(offsetof(CUpti_ActivityKernel10, correlationId) == 92);
static_assert(offsetof(CUpti_ActivityKernel10, name) == 104);

struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivityMemset4 {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_MEMSET;
  uint32_t value;
  uint64_t bytes;
  uint64_t start;
  uint64_t end;
  uint32_t deviceId;
  uint32_t contextId;
  uint32_t streamId;
  uint32_t correlationId;
  uint16_t flags;
  uint16_t memoryKind;
  uint32_t pad;
  uint64_t rest[4];
};
static_assert(sizeof(CUpti_ActivityMemset4) == 88);

struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivityMemcpy6 {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_MEMCPY;
  uint8_t copyKind;
  uint8_t srcKind;
  uint8_t dstKind;
  uint8_t flags;
  uint64_t bytes;
  uint64_t start;
  uint64_t end;
  uint32_t deviceId;
  uint32_t contextId;
  uint32_t streamId;
  uint32_t correlationId;
  uint32_t runtimeCorrelationId;
  uint32_t pad;
  uint64_t rest[5];
};
static_assert(sizeof(CUpti_ActivityMemcpy6) == 96);

struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivityMemcpyPtoP4 {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_MEMCPY2;
  uint8_t copyKind;
  uint8_t srcKind;
  uint8_t dstKind;
  uint8_t flags;
  uint64_t bytes;
  uint64_t start;
  uint64_t end;
  uint32_t deviceId;
  uint32_t contextId;
  uint32_t streamId;
  uint32_t srcDeviceId;
  uint32_t srcContextId;
  uint32_t dstDeviceId;
  uint32_t dstContextId;
  uint32_t correlationId;
  uint64_t rest[4];
};
static_assert(sizeof(CUpti_ActivityMemcpyPtoP4) == 96);

struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivityAPI {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_RUNTIME;
  uint32_t cbid;
  uint64_t start;
  uint64_t end;
  uint32_t processId;
  uint32_t threadId;
  uint32_t correlationId;
  uint32_t returnValue;
};
static_assert(sizeof(CUpti_ActivityAPI) == 40);

struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivitySynchronization2 {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_SYNCHRONIZATION;
  uint32_t type;
  uint64_t start;
  uint64_t end;
  uint32_t correlationId;
  uint32_t contextId;
  uint32_t streamId;
  uint32_t cudaEventId;
  uint64_t cudaEventSyncId;
  uint32_t returnValue;
  uint32_t pad;
};
static_assert(sizeof(CUpti_ActivitySynchronization2) == 56);

struct [[gnu::packed, gnu::aligned(8)]] CUpti_ActivityExternalCorrelation {
  CUpti_ActivityKind kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
  uint32_t externalKind;
  uint64_t externalId;
  uint32_t correlationId;
  uint32_t reserved;
};
static_assert(sizeof(CUpti_ActivityExternalCorrelation) == 24);

using CUpti_BuffersCallbackRequestFunc = void (*)(uint8_t** buffer, size_t* size, size_t* most);
using CUpti_BuffersCallbackCompleteFunc = void (*)(void* context, uint32_t stream, uint8_t* buffer,
                                                   size_t size, size_t valid);
using CUpti_TimestampCallbackFunc = uint64_t (*)();
