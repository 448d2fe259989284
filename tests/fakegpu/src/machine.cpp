// The machine: its configuration from FAKECUDA_* variables, the identity of its GPUs, and the
// counters that its processes share, from which NVML answers.
//
// Not faithful: MIG, and GPUs that differ.
#include "fake.h"
#include "faults.h"
#include "oplog.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace fake {

Config cfg;

// ---- configuration ------------------------------------------------------------------------------

void refuse(const char* variable, const char* text, const char* reason) {
  fprintf(stderr, "fakecuda: %s=%s: %s\n", variable, text, reason);
  _exit(64);
}

// A number with an optional K, M or G, which are powers of 1024.
static double number(const char* name, const char* text) {
  char* end;
  double value = strtod(text, &end);
  std::string suffix = end;
  if (end != text && suffix.empty()) return value;
  if (end != text && suffix == "K") return value * (1ull << 10);
  if (end != text && suffix == "M") return value * (1ull << 20);
  if (end != text && suffix == "G") return value * (1ull << 30);
  refuse(name, getenv(name), "not a number, with K, M or G at most");
}

static double setting(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? number(name, text) : otherwise;
}

// The part of "GPU-N" after the hyphen if the variable tells it of this GPU, otherwise null.
static const char* told_of(const char* variable, int gpu) {
  const char* text = getenv(variable);
  if (!text || !*text) return nullptr;
  char* end;
  int64_t told = strtol(text, &end, 10);
  if (end == text || *end != '-') refuse(variable, text, "not a GPU, a hyphen and a number");
  return told == gpu ? end + 1 : nullptr;
}

int planted(const char* variable, int gpu) {
  const char* text = told_of(variable, gpu);
  return text ? static_cast<int>(number(variable, text)) : -1;
}

static void rate(double& bytes_per_second, const char* name) {
  bytes_per_second = setting(name, bytes_per_second / 1e9) * 1e9;
}

// The GPU that an entry of CUDA_VISIBLE_DEVICES names by number or UUID, or -1.
static int named_gpu(const std::string& entry) {
  if (entry.rfind("GPU-", 0) == 0) {
    for (int i = 0; i < cfg.physical; i++)
      if (uuid_text(i).rfind(entry, 0) == 0) return i;
    return -1;
  }
  if (entry.empty() || !isdigit(static_cast<unsigned char>(entry[0]))) return -1;
  int index = atoi(entry.c_str());
  return index < cfg.physical ? index : -1;
}

// As the driver reads it: the first entry that names no GPU ends the list, a repeated one voids it.
static std::vector<int> read_visible(const char* list) {
  std::vector<int> visible;
  std::stringstream entries(list);
  std::string entry;
  while (std::getline(entries, entry, ',')) {
    entry.erase(0, entry.find_first_not_of(' '));
    int found = named_gpu(entry);
    if (found < 0) break;
    if (std::find(visible.begin(), visible.end(), found) != visible.end()) return {};
    visible.push_back(found);
  }
  return visible;
}

static void read_config() {
  cfg.physical = static_cast<int>(setting("FAKECUDA_DEVICES", cfg.physical));
  if (cfg.physical > kMaxDevices)
    refuse("FAKECUDA_DEVICES", getenv("FAKECUDA_DEVICES"), "more than 16 GPUs");
  cfg.memory = static_cast<size_t>(setting("FAKECUDA_MEMORY", cfg.memory));
  cfg.context = static_cast<size_t>(setting("FAKECUDA_CONTEXT", cfg.context));
  for (int gpu = 0; gpu < kMaxDevices; gpu++)
    if (const char* text = told_of("FAKECUDA_TAKEN", gpu))
      cfg.taken[gpu] = static_cast<size_t>(number("FAKECUDA_TAKEN", text));
  read_faults();
  if (const char* name = getenv("FAKECUDA_NAME")) cfg.name = name;
  if (const char* text = getenv("FAKECUDA_CC"))
    if (sscanf(text, "%d.%d", &cfg.major, &cfg.minor) != 2) refuse("FAKECUDA_CC", text, "not N.N");
  if (const char* text = getenv("FAKECUDA_PCIE"))
    if (sscanf(text, "%ux%u", &cfg.generation, &cfg.lanes) != 2)
      refuse("FAKECUDA_PCIE", text, "not NxN");
  cfg.sms = static_cast<int>(setting("FAKECUDA_SMS", cfg.sms));
  cfg.peer = setting("FAKECUDA_PEER", cfg.peer) != 0;
  rate(cfg.h2d, "FAKECUDA_H2D_GBPS");
  rate(cfg.d2h, "FAKECUDA_D2H_GBPS");
  rate(cfg.p2p, "FAKECUDA_P2P_GBPS");
  rate(cfg.staged, "FAKECUDA_STAGED_GBPS");
  rate(cfg.hbm, "FAKECUDA_HBM_GBPS");
  cfg.flops = setting("FAKECUDA_TFLOPS", cfg.flops / 1e12) * 1e12;
  cfg.kernel_us = setting("FAKECUDA_KERNEL_US", cfg.kernel_us);
  cfg.copy_us = setting("FAKECUDA_COPY_US", cfg.copy_us);
  cfg.context_s = setting("FAKECUDA_CONTEXT_S", cfg.context_s);
  cfg.delay_us = setting("FAKECUDA_DELAY_US", cfg.delay_us);
  cfg.deferred = setting("FAKECUDA_DEFERRED", cfg.deferred) != 0;
  cfg.seed = static_cast<uint64_t>(setting("FAKECUDA_SEED", cfg.seed));
  cfg.trace = setting("FAKECUDA_TRACE", cfg.trace) != 0;
  cfg.data = setting("FAKECUDA_DATA", cfg.data) != 0;
  if (const char* list = getenv("CUDA_VISIBLE_DEVICES")) {
    cfg.visible = read_visible(list);
  } else {
    for (int i = 0; i < cfg.physical; i++) cfg.visible.push_back(i);
  }
}

void unsupported(const char* name) {
  if (cfg.trace) fprintf(stderr, "fakecuda: %s is not supported\n", name);
}

// ---- identity -----------------------------------------------------------------------------------

int physical_of(int device) { return cfg.visible.at(device); }

void uuid_of(int physical, unsigned char* bytes) {
  memset(bytes, 0, 16);
  bytes[0] = static_cast<unsigned char>(0x10 + physical);  // so that abbreviations stay unique
  bytes[1] = 0xce;
  bytes[2] = 0xcd;
  bytes[3] = 0xa0;
  bytes[6] = 0x40;
  bytes[8] = 0x80;
  bytes[15] = static_cast<unsigned char>(physical);
}

std::string uuid_text(int physical) {
  unsigned char bytes[16];
  uuid_of(physical, bytes);
  std::string text = "GPU";
  for (int i = 0; i < 16; i++) {
    char digits[4];
    bool starts_group = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    snprintf(digits, sizeof digits, "%s%02x", starts_group ? "-" : "", bytes[i]);
    text += digits;
  }
  return text;
}

void pci_bus_id(int physical, char* text, size_t size) {
  snprintf(text, size, "00000000:%02X:00.0", physical + 1);
}

// ---- counters in shared memory ------------------------------------------------------------------

constexpr int kSlots = 512;
constexpr int kBuckets = 1024;
constexpr int64_t kBucket = 10'000'000;  // 10 ms
constexpr double kCopyUnit = 64;         // bytes

using Cell = std::atomic<uint64_t>;

struct Shared {
  struct Slot {  // of a process
    std::atomic<int> pid;
    std::atomic<int64_t> used[kMaxDevices];
  } slots[kSlots];
  struct Gpu {
    // of each bucket: its number in the upper half; in the lower half busy nanoseconds, or bytes
    // in units of 64
    Cell busy[kBuckets], tx[kBuckets], rx[kBuckets];
    std::atomic<uint64_t> busy_ns, nvlink_sent;
    Incidents incidents;
  } gpus[kMaxDevices];
};

static Shared* shared = nullptr;
static Shared::Slot* slot = nullptr;
static int slot_pid = 0;

static void open_shared() {
  const char* machine = getenv("FAKECUDA_MACHINE");
  std::string path = "/fakegpu-" + std::to_string(getuid()) + "-" + (machine ? machine : "0");
  int file = shm_open(path.c_str(), O_RDWR | O_CREAT, 0600);
  void* mapped = MAP_FAILED;
  if (file >= 0 && ftruncate(file, sizeof(Shared)) == 0)
    mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) {
    perror("fakecuda: shared memory");
    _exit(71);
  }
  close(file);
  shared = static_cast<Shared*>(mapped);
}

static bool is_alive(int pid) { return kill(pid, 0) == 0; }

static Shared::Slot* own_slot() {
  int pid = getpid();
  if (slot && slot_pid == pid) return slot;
  for (auto& candidate : shared->slots) {
    int holder = candidate.pid.load();
    if (holder != 0 && holder != pid && is_alive(holder)) continue;
    if (!candidate.pid.compare_exchange_strong(holder, pid)) continue;
    for (auto& used : candidate.used) used = 0;
    slot = &candidate;
    slot_pid = pid;
    return slot;
  }
  fprintf(stderr, "fakecuda: more than %d processes share one machine\n", kSlots);
  _exit(71);
}

static void leave() {
  if (!slot || slot_pid != getpid()) return;
  for (auto& used : slot->used) used = 0;
  slot->pid = 0;
}

// Spreads an amount evenly over the buckets of an interval; what never ends fills all of them.
static void add(Cell* buckets, int64_t begin, int64_t end, double per_ns) {
  if (end <= begin) return;
  end = std::min(end, begin + kBucket * (kBuckets - 1));
  for (int64_t number = begin / kBucket; number <= end / kBucket; number++) {
    int64_t from = std::max(begin, number * kBucket);
    int64_t to = std::min(end, (number + 1) * kBucket);
    uint64_t amount = static_cast<uint64_t>((to - from) * per_ns);
    uint64_t upper = static_cast<uint64_t>(number & 0xffffffff);
    Cell& cell = buckets[number % kBuckets];
    uint64_t before = cell.load();
    uint64_t after;
    do {
      after = (before >> 32) == upper ? before + amount : (upper << 32 | (amount & 0xffffffff));
    } while (!cell.compare_exchange_weak(before, after));
  }
}

static double sum(const Cell* buckets, int64_t from, int64_t to) {
  double total = 0;
  for (int64_t number = from / kBucket; number < to / kBucket; number++) {
    uint64_t cell = buckets[number % kBuckets].load();
    if ((cell >> 32) == static_cast<uint64_t>(number & 0xffffffff)) total += cell & 0xffffffff;
  }
  return total;
}

void count_busy(int device, int64_t begin, int64_t end) {
  auto& gpu = shared->gpus[physical_of(device)];
  add(gpu.busy, begin, end, 1.0);
  gpu.busy_ns += end - begin;
}

void count_copy(int device, int64_t begin, int64_t end, size_t bytes, bool to_device) {
  auto& gpu = shared->gpus[physical_of(device)];
  int64_t last = std::max(end, begin + 1);
  add(to_device ? gpu.rx : gpu.tx, begin, last, bytes / kCopyUnit / (last - begin));
}

void count_nvlink(int device, size_t bytes) {
  shared->gpus[physical_of(device)].nvlink_sent += bytes;
}

void count_memory(int device, int64_t bytes) { own_slot()->used[physical_of(device)] += bytes; }

Incidents& incidents(int physical) {
  init();
  return shared->gpus[physical].incidents;
}

double busy_share(int physical, int64_t from, int64_t until) {
  init();
  return std::min(1.0, sum(shared->gpus[physical].busy, from, until) / (until - from));
}

Counters counters(int physical) {
  constexpr int64_t kUtilizationWindow = 200'000'000;
  constexpr int64_t kCopyWindow = 40'000'000;
  init();
  auto& gpu = shared->gpus[physical];
  int64_t time = now();
  Counters found{};
  found.utilization = busy_share(physical, time - kUtilizationWindow, time);
  found.tx = sum(gpu.tx, time - kCopyWindow, time) * kCopyUnit / (kCopyWindow / 1e9);
  found.rx = sum(gpu.rx, time - kCopyWindow, time) * kCopyUnit / (kCopyWindow / 1e9);
  found.busy_ns = gpu.busy_ns;
  found.nvlink_sent = gpu.nvlink_sent;
  found.memory = cfg.taken[physical];
  for (auto& process : shared->slots) {
    int pid = process.pid;
    int64_t used = process.used[physical];
    if (pid == 0 || used <= 0 || !is_alive(pid)) continue;
    found.processes.push_back({pid, static_cast<uint64_t>(used)});
    found.memory += used;
  }
  return found;
}

void init() {
  static std::once_flag once;
  std::call_once(once, [] {
    read_config();
    open_shared();
    atexit(leave);
    log_from_setting();
  });
}

}  // namespace fake
