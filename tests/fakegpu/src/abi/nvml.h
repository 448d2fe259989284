// What dpbench (by nvidia-ml-py) and torch use of NVML's binary interface: own declarations.
#pragma once
#include <cstddef>
#include <cstdint>

enum nvmlReturn_t {
  NVML_SUCCESS = 0,
  NVML_ERROR_INVALID_ARGUMENT = 2,
  NVML_ERROR_NOT_SUPPORTED = 3,
  NVML_ERROR_NOT_FOUND = 6,
  NVML_ERROR_INSUFFICIENT_SIZE = 7,
  NVML_ERROR_GPU_IS_LOST = 15,
};

enum nvmlClockType_t { NVML_CLOCK_GRAPHICS = 0, NVML_CLOCK_SM = 1, NVML_CLOCK_MEM = 2 };
enum nvmlPcieUtilCounter_t { NVML_PCIE_UTIL_TX_BYTES = 0, NVML_PCIE_UTIL_RX_BYTES = 1 };
enum nvmlEnableState_t { NVML_FEATURE_DISABLED = 0, NVML_FEATURE_ENABLED = 1 };
enum nvmlComputeMode_t { NVML_COMPUTEMODE_DEFAULT = 0 };
enum nvmlGpuTopologyLevel_t { NVML_TOPOLOGY_HOSTBRIDGE = 30 };
enum nvmlGpuP2PStatus_t { NVML_P2P_STATUS_OK = 0, NVML_P2P_STATUS_NOT_SUPPORTED = 5 };
enum nvmlSamplingType_t { NVML_TOTAL_POWER_SAMPLES = 0, NVML_GPU_UTILIZATION_SAMPLES = 1 };
enum nvmlValueType_t { NVML_VALUE_TYPE_UNSIGNED_INT = 1, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3 };

constexpr uint64_t kReasonGpuIdle = 0x1;
constexpr uint64_t kReasonSwPowerCap = 0x4;
constexpr unsigned kFieldNvlinkSpeedMB = 90;  // per second, of one link and direction
constexpr unsigned kFieldNvlinkLinkCount = 91;
constexpr int kNvlinkToSwitch = 2;
constexpr unsigned kFieldNvlinkSentKiB = 138;
constexpr unsigned kNoInstance = 0xffffffff;

struct nvmlDevice;
using nvmlDevice_t = nvmlDevice*;

struct nvmlMemory_t {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};
static_assert(sizeof(nvmlMemory_t) == 24);

struct nvmlMemory_v2_t {
  unsigned version;
  unsigned long long total;
  unsigned long long reserved;
  unsigned long long free;
  unsigned long long used;
};
static_assert(sizeof(nvmlMemory_v2_t) == 40);

struct nvmlUtilization_t {
  unsigned gpu;
  unsigned memory;
};
static_assert(sizeof(nvmlUtilization_t) == 8);

struct nvmlTemperature_t {
  unsigned version;
  int sensor;
  int temperature;
};
static_assert(sizeof(nvmlTemperature_t) == 12);

struct nvmlProcessInfo_v1_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
};
static_assert(sizeof(nvmlProcessInfo_v1_t) == 16);

struct nvmlProcessInfo_t {
  unsigned pid;
  unsigned long long usedGpuMemory;
  unsigned gpuInstanceId;
  unsigned computeInstanceId;
};
static_assert(sizeof(nvmlProcessInfo_t) == 24);

union nvmlValue_t {
  double dVal;
  unsigned uiVal;
  unsigned long long ullVal;
};
static_assert(sizeof(nvmlValue_t) == 8);

struct nvmlSample_t {
  unsigned long long timeStamp;  // microseconds since 1970
  nvmlValue_t sampleValue;
};
static_assert(sizeof(nvmlSample_t) == 16);

struct nvmlFieldValue_t {
  unsigned fieldId;
  unsigned scopeId;
  long long timestamp;
  long long latencyUsec;
  int valueType;
  int nvmlReturn;
  nvmlValue_t value;
};
static_assert(sizeof(nvmlFieldValue_t) == 40);
static_assert(offsetof(nvmlFieldValue_t, value) == 32);
