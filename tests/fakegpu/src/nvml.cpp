// Replaces NVML: facts of the machine, and counters of what its processes ran on the fake GPUs.
//
// Faithful: GPUs by index, UUID and PCI address; memory, also by process; utilization as the share
// of the last 200 ms in which anything ran, and its samples of the last ten seconds; bytes over
// PCIe and NVLink, whose links all go to one NVSwitch and together carry FAKECUDA_P2P_GBPS; a PCIe
// link and clocks that slow down when a GPU is idle. With
// FAKECUDA_CLOCK_MHZ, the SM clock falls from 1695 MHz to this many as the GPU is busy for two
// seconds, with the reason "software power cap". Not faithful: power, energy and temperature follow
// the busy time alone, and kernels that run at the same time count twice in the energy; the clock
// changes no kernel's time; the utilization of processes, events and MIG are missing.
#include "abi/nvml.h"

#include "faults.h"

#include <strings.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

using fake::cfg;
using fake::Counters;

namespace {

constexpr double kIdleWatts = 30;
constexpr double kPeakWatts = 350;
constexpr unsigned kIdleSmMhz = 210;
constexpr double kBoostSmMhz = 1695;
constexpr unsigned kMaxSmMhz = 2100;
constexpr unsigned kIdleMemoryMhz = 405;
constexpr unsigned kMemoryMhz = 9501;
constexpr unsigned kMaxMemoryMhz = 9751;
constexpr unsigned kPcieIdleGeneration = 1;
constexpr unsigned kNvlinks = 4;
constexpr int64_t kHeatWindowNs = 2'000'000'000;
constexpr int64_t kSampleNs = 100'000'000;
constexpr int kSamples = 100;

nvmlDevice_t handle_of(int physical) {
  return reinterpret_cast<nvmlDevice_t>(static_cast<uintptr_t>(0x1000 + physical));
}

int physical_of(nvmlDevice_t device) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(device) - 0x1000);
}

Counters counters_of(nvmlDevice_t device) { return fake::counters(physical_of(device)); }

bool busy(nvmlDevice_t device) { return counters_of(device).utilization > 0; }

double watts(double utilization) { return kIdleWatts + (kPeakWatts - kIdleWatts) * utilization; }

// Of the last two seconds, the share in which the GPU was busy.
double heat(nvmlDevice_t device) {
  int64_t time = fake::now();
  return fake::busy_share(physical_of(device), time - kHeatWindowNs, time);
}

// The clock of a GPU that has been busy for some time.
double hot_sm_mhz() {
  const char* text = getenv("FAKECUDA_CLOCK_MHZ");
  return text && *text ? strtod(text, nullptr) : kBoostSmMhz;
}

// What a variable plants for this GPU, such as FAKECUDA_POWER_LIMIT=1-200, or what is usual.
unsigned planted(const char* variable, nvmlDevice_t device, unsigned usual) {
  int told = fake::planted(variable, physical_of(device));
  return told < 0 ? usual : static_cast<unsigned>(told);
}

unsigned rounded(double value) { return static_cast<unsigned>(value + 0.5); }

nvmlReturn_t give_text(char* target, unsigned size, const std::string& text) {
  if (text.size() + 1 > size) return NVML_ERROR_INSUFFICIENT_SIZE;
  memcpy(target, text.c_str(), text.size() + 1);
  return NVML_SUCCESS;
}

template <class T>
nvmlReturn_t give(T* target, T value) {
  *target = value;
  return NVML_SUCCESS;
}

bool lost(nvmlDevice_t device) { return fake::incidents(physical_of(device)).lost; }

// The handle of a GPU, if it still answers.
nvmlReturn_t give_gpu(nvmlDevice_t* device, int physical) {
  if (fake::incidents(physical).lost) return NVML_ERROR_GPU_IS_LOST;
  return give(device, handle_of(physical));
}

int64_t wall_clock_us(int64_t monotonic_ns) {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  int64_t wall_ns = time.tv_sec * 1'000'000'000ll + time.tv_nsec;
  return (wall_ns - (fake::now() - monotonic_ns)) / 1000;
}

// Fills in what a list of processes has in all versions.
template <class Process>
nvmlReturn_t give_processes(nvmlDevice_t device, unsigned* count, Process* list,
                            const Process& blank) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  Counters found = counters_of(device);
  unsigned room = *count;
  *count = static_cast<unsigned>(found.processes.size());
  if (*count == 0) return NVML_SUCCESS;
  if (room < *count || !list) return NVML_ERROR_INSUFFICIENT_SIZE;
  for (const auto& [pid, bytes] : found.processes) {
    *list = blank;
    list->pid = static_cast<unsigned>(pid);
    list->usedGpuMemory = bytes;
    list++;
  }
  return NVML_SUCCESS;
}

}  // namespace

// ---- the library and the system -----------------------------------------------------------------

EXPORT nvmlReturn_t nvmlInit_v2() {
  fake::init();
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlInit() { return nvmlInit_v2(); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
EXPORT nvmlReturn_t nvmlShutdown() { return NVML_SUCCESS; }
EXPORT const char* nvmlErrorString(nvmlReturn_t result) {
  switch (result) {
    case NVML_SUCCESS:
      return "Success";
    case NVML_ERROR_INVALID_ARGUMENT:
      return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
      return "Not Supported";
    case NVML_ERROR_NOT_FOUND:
      return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
      return "Insufficient Size";
    case NVML_ERROR_GPU_IS_LOST:
      return "GPU is lost";
  }
  return "Unknown Error";
}
// dpbench knows a fake GPU by this version.
EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char* text, unsigned size) {
  return give_text(text, size, "580.00.fake");
}
EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char* text, unsigned size) {
  return give_text(text, size, "13.580.00");
}
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int* version) { return give(version, 13000); }
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int* version) {
  return give(version, 13000);
}

// ---- devices ------------------------------------------------------------------------------------

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned* count) {
  fake::init();
  return give(count, static_cast<unsigned>(cfg.physical));
}
EXPORT nvmlReturn_t nvmlDeviceGetCount(unsigned* count) { return nvmlDeviceGetCount_v2(count); }
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t* device) {
  fake::init();
  if (index >= static_cast<unsigned>(cfg.physical)) return NVML_ERROR_INVALID_ARGUMENT;
  return give_gpu(device, static_cast<int>(index));
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t* device) {
  return nvmlDeviceGetHandleByIndex_v2(index, device);
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char* wanted, nvmlDevice_t* device) {
  fake::init();
  for (int physical = 0; physical < cfg.physical; physical++) {
    if (fake::uuid_text(physical) == wanted) return give_gpu(device, physical);
  }
  return NVML_ERROR_NOT_FOUND;
}
EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char* wanted, nvmlDevice_t* device) {
  fake::init();
  for (int physical = 0; physical < cfg.physical; physical++) {
    char address[32];
    fake::pci_bus_id(physical, address, sizeof address);
    const char* with_short_domain = address + 4;
    bool same = strcasecmp(address, wanted) == 0 || strcasecmp(with_short_domain, wanted) == 0;
    if (same) return give_gpu(device, physical);
  }
  return NVML_ERROR_NOT_FOUND;
}
EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned* index) {
  return give(index, static_cast<unsigned>(physical_of(device)));
}
EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char* text, unsigned size) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give_text(text, size, fake::uuid_text(physical_of(device)));
}
EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char* text, unsigned size) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give_text(text, size, cfg.name);
}
EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t, int* major, int* minor) {
  *major = cfg.major;
  *minor = cfg.minor;
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t, nvmlEnableState_t* mode) {
  return give(mode, NVML_FEATURE_ENABLED);
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t, nvmlComputeMode_t* mode) {
  return give(mode, NVML_COMPUTEMODE_DEFAULT);
}
EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t, nvmlEnableState_t* current,
                                         nvmlEnableState_t* pending) {
  *current = NVML_FEATURE_DISABLED;
  *pending = NVML_FEATURE_DISABLED;
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int, int,
                                                unsigned long long* errors) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  uint64_t met = fake::incidents(physical_of(device)).ecc_errors;
  return give<unsigned long long>(errors, planted("FAKECUDA_ECC_ERRORS", device, 0) + met);
}

// ---- memory and processes -----------------------------------------------------------------------

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t* memory) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  uint64_t used = counters_of(device).memory;
  memory->total = cfg.memory;
  memory->used = used;
  memory->free = cfg.memory - std::min<uint64_t>(cfg.memory, used);
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t* memory) {
  nvmlMemory_t found;
  nvmlReturn_t result = nvmlDeviceGetMemoryInfo(device, &found);
  if (result != NVML_SUCCESS) return result;
  memory->total = found.total;
  memory->reserved = 0;
  memory->free = found.free;
  memory->used = found.used;
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned* count,
                                                         nvmlProcessInfo_v1_t* list) {
  return give_processes(device, count, list, {});
}
EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned* count,
                                                            nvmlProcessInfo_t* list) {
  return give_processes(device, count, list, {0, 0, kNoInstance, kNoInstance});
}

// ---- utilization, power and clocks --------------------------------------------------------------

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device,
                                                  nvmlUtilization_t* utilization) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  double percent = counters_of(device).utilization * 100;
  return give(utilization, {rounded(percent), rounded(percent / 2)});
}
// As NVML does, tells the size of its whole buffer if no room is given.
EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                         unsigned long long after_us, nvmlValueType_t* value_type,
                                         unsigned* count, nvmlSample_t* samples) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  bool power = type == NVML_TOTAL_POWER_SAMPLES;
  if (!power && type != NVML_GPU_UTILIZATION_SAMPLES) return NVML_ERROR_NOT_SUPPORTED;
  *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
  if (!samples) return give(count, static_cast<unsigned>(kSamples));
  unsigned room = *count;
  *count = 0;
  int64_t last = fake::now() / kSampleNs * kSampleNs;
  for (int64_t end = last - (kSamples - 1) * kSampleNs; end <= last; end += kSampleNs) {
    auto time_us = static_cast<unsigned long long>(wall_clock_us(end));
    if (time_us <= after_us || *count == room) continue;
    double share = fake::busy_share(physical_of(device), end - kSampleNs, end);
    nvmlSample_t& sample = samples[(*count)++];
    sample = {};
    sample.timeStamp = time_us;
    sample.sampleValue.uiVal = rounded(power ? watts(share) * 1e3 : share * 100);
  }
  return *count ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned* milliwatts) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give(milliwatts, rounded(watts(counters_of(device).utilization) * 1e3));
}
EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device,
                                                        unsigned long long* millijoules) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  double up_s = static_cast<double>(fake::now()) / 1e9;
  double busy_s = static_cast<double>(counters_of(device).busy_ns) / 1e9;
  double joules = up_s * kIdleWatts + busy_s * (kPeakWatts - kIdleWatts);
  return give(millijoules, static_cast<unsigned long long>(joules * 1e3));
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t, unsigned* milliwatts) {
  return give(milliwatts, rounded(kPeakWatts * 1e3));
}
EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t, unsigned* milliwatts) {
  return give(milliwatts, rounded(kPeakWatts * 1e3));
}
EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned* milliwatts) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give(milliwatts, 1000 * planted("FAKECUDA_POWER_LIMIT", device, kPeakWatts));
}
EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                           unsigned* mhz) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  bool memory = type == NVML_CLOCK_MEM;
  if (!busy(device)) return give(mhz, memory ? kIdleMemoryMhz : kIdleSmMhz);
  double sm = kBoostSmMhz - (kBoostSmMhz - hot_sm_mhz()) * heat(device);
  return give(mhz, memory ? kMemoryMhz : rounded(sm));
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t, nvmlClockType_t type, unsigned* mhz) {
  return give(mhz, type == NVML_CLOCK_MEM ? kMaxMemoryMhz : kMaxSmMhz);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device,
                                                           unsigned long long* reasons) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  *reasons = 0;
  if (!busy(device)) {
    *reasons = kReasonGpuIdle;
  } else if (hot_sm_mhz() < kBoostSmMhz) {
    *reasons = kReasonSwPowerCap;
  }
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
                                                              unsigned long long* reasons) {
  return nvmlDeviceGetCurrentClocksEventReasons(device, reasons);
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int, unsigned* celsius) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give(celsius, rounded(35 + 40 * counters_of(device).utilization));
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t* found) {
  unsigned celsius = 0;
  nvmlReturn_t result = nvmlDeviceGetTemperature(device, found->sensor, &celsius);
  found->temperature = static_cast<int>(celsius);
  return result;
}

// ---- links --------------------------------------------------------------------------------------

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
                                                unsigned* kilobytes_per_s) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  constexpr int64_t kBlocksForNs = 20'000'000;
  fake::sleep_until(fake::now() + kBlocksForNs);
  Counters found = counters_of(device);
  double bytes = counter == NVML_PCIE_UTIL_TX_BYTES ? found.tx : found.rx;
  return give(kilobytes_per_s, rounded(bytes / 1e3));
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t, unsigned* generation) {
  return give(generation, cfg.generation);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned* generation) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give(generation, busy(device) ? cfg.generation : kPcieIdleGeneration);
}
EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t, unsigned* width) {
  return give(width, cfg.lanes);
}
EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned* width) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  return give(width, planted("FAKECUDA_PCIE_LANES", device, cfg.lanes));
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link,
                                             nvmlEnableState_t* state) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  if (!cfg.peer || link >= kNvlinks) return NVML_ERROR_NOT_SUPPORTED;
  bool down = planted("FAKECUDA_NVLINK_DOWN", device, kNvlinks) == link;
  return give(state, down ? NVML_FEATURE_DISABLED : NVML_FEATURE_ENABLED);
}
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t, unsigned link, int* type) {
  if (!cfg.peer || link >= kNvlinks) return NVML_ERROR_NOT_SUPPORTED;
  return give(type, kNvlinkToSwitch);
}
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                             nvmlFieldValue_t* values) {
  if (lost(device)) return NVML_ERROR_GPU_IS_LOST;
  for (nvmlFieldValue_t* value = values; value < values + count; value++) {
    value->nvmlReturn = NVML_SUCCESS;
    if (cfg.peer && value->fieldId == kFieldNvlinkSentKiB) {
      value->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
      value->value.ullVal = counters_of(device).nvlink_sent / 1024;
    } else if (value->fieldId == kFieldNvlinkLinkCount) {
      value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
      value->value.uiVal = cfg.peer ? kNvlinks : 0;
    } else if (cfg.peer && value->fieldId == kFieldNvlinkSpeedMB) {
      value->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
      value->value.uiVal = rounded(cfg.p2p / kNvlinks / 1e6);
    } else {
      value->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
    }
  }
  return NVML_SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t, nvmlDevice_t, int,
                                           nvmlGpuP2PStatus_t* status) {
  return give(status, cfg.peer ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED);
}
EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t, nvmlDevice_t,
                                                        nvmlGpuTopologyLevel_t* level) {
  return give(level, NVML_TOPOLOGY_HOSTBRIDGE);
}

// ---- what these GPUs do not have ----------------------------------------------------------------

EXPORT nvmlReturn_t nvmlDeviceGetMigMode() { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NVML_ERROR_NOT_SUPPORTED; }
EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV() { return NVML_ERROR_NOT_SUPPORTED; }
