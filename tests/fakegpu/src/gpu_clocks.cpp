// The GPUs' own clocks: each runs at a rate of its own, and CUPTI aligns them with the host's only
// roughly.
//
// Events of a GPU count its clock, which FAKECUDA_DRIFT_PPM makes faster or slower than the host's.
// In a profile, a GPU's times are ahead of the host's by FAKECUDA_CUPTI_OFFSET_US, and run away from
// them by the drift until CUPTI aligns the clocks again. Each is a list with a value for each GPU of
// the machine, and begins again after its last value; 0 makes all clocks agree. The first
// FAKECUDA_CUPTI_EARLY kernels of a profile have times long before their launches: libraries that
// register their clock with CUPTI in each profile, as torch's profiler does, have seen one such
// record more in each (pytorch/pytorch 192021).
//
// Assumptions, which no source here tells: the signs; the offset, within the 100 us that readers of
// profiles allow; and how often CUPTI aligns. Public measurements of GPUs' clocks have found tens to
// hundreds of ppm.
#include "gpu_clocks.h"

#include <cstdlib>

namespace fake {

constexpr int64_t kAlignedEachNs = 1'000'000'000;
constexpr const char* kDriftPpm = "20,-30,10,-15";
constexpr const char* kOffsetUs = "30,-40,20,-25";

// The value of a GPU in a list of numbers.
static double listed(const char* variable, const char* usual, int physical) {
  const char* told = getenv(variable);
  const char* text = told && *told ? told : usual;
  std::vector<double> values;
  const char* rest = text;
  char* end;
  do {
    values.push_back(strtod(rest, &end));
    if (end == rest || (*end && *end != ',')) refuse(variable, text, "not a list of numbers");
    rest = end + 1;
  } while (*end);
  return values[physical % values.size()];
}

static double drift(int device) {
  return listed("FAKECUDA_DRIFT_PPM", kDriftPpm, physical_of(device)) / 1e6;
}

double counted_ns(int device, int64_t host_ns) {
  return static_cast<double>(host_ns) * (1 + drift(device));
}

int64_t profiled_time(int device, int64_t time, int64_t since) {
  double offset_us = listed("FAKECUDA_CUPTI_OFFSET_US", kOffsetUs, physical_of(device));
  int64_t after_alignment = time > since ? (time - since) % kAlignedEachNs : 0;
  double ahead_ns = offset_us * 1e3 + drift(device) * static_cast<double>(after_alignment);
  return time + static_cast<int64_t>(ahead_ns);
}

int early_records() {
  const char* text = getenv("FAKECUDA_CUPTI_EARLY");
  return text ? atoi(text) : 0;
}

}  // namespace fake
