// What the replaced libraries share: the machine, streams on a virtual clock, what runs on them.
//
// Times are nanoseconds of CLOCK_MONOTONIC. A `device` is an index into the GPUs that
// CUDA_VISIBLE_DEVICES shows, a `physical` one an index into the machine's GPUs.
#pragma once
#include "abi/cudart.h"

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace fake {

constexpr int kMaxDevices = 16;
constexpr int64_t kNeverEnds = int64_t{1} << 60;  // nanoseconds, 36 years

struct Config {
  int physical = 4;                // GPUs of the machine
  std::vector<int> visible;        // of these, what CUDA_VISIBLE_DEVICES shows
  size_t memory = 8ull << 30;      // bytes of each GPU
  size_t context = 300ull << 20;   // bytes that a process with a context takes on each GPU
  size_t taken[kMaxDevices] = {};  // of each GPU: by a process that NVML does not list
  std::string name = "Fake GPU";
  int major = 8, minor = 6;        // compute capability
  int sms = 82;
  bool peer = true;                // peer access between all pairs
  unsigned generation = 4;         // of the GPUs' PCIe links
  unsigned lanes = 16;
  double h2d = 12e9, d2h = 12e9;   // bytes per second
  double p2p = 20e9, staged = 6e9; // between GPUs, with and without peer access
  double hbm = 800e9;              // bytes per second of a GPU's own memory
  double flops = 20e12;            // per second
  double kernel_us = 3.0;          // the shortest kernel
  double copy_us = 6.0;            // the latency of a copy
  double context_s = 0;            // what a process waits for each context that it makes
  double delay_us = 0;             // operations begin up to so much later, at random
  bool deferred = false;           // effects run at synchronization: see deferred.cpp
  uint64_t seed = 1;               // of the order of deferred effects, and of delays
  bool trace = false;              // print unsupported calls
  bool data = true;                // large copies move bytes; without, only the clock moves
};
extern Config cfg;

void init();  // reads the configuration, once; every entry point may be the first
int planted(const char* variable, int gpu);  // N if the variable says "GPU-N", otherwise -1
[[noreturn]] void refuse(const char* variable, const char* text, const char* reason);
int64_t now();
void sleep_until(int64_t when);

// ---- what runs on a stream ----------------------------------------------------------------------

enum class Kind { Kernel, Collective, CopyH2D, CopyD2H, CopyD2D, CopyP2P, CopyH2H, Memset, Host };

struct Op {
  Kind kind = Kind::Kernel;
  const char* name = "";
  int64_t duration = 0;
  size_t bytes = 0;
  int peer = -1, target = -1;    // of a CopyP2P: from, to; of a collective: peer is its rank's GPU
  dim3 grid, block;
  std::function<void()> effect;  // what the operation does to memory
};

using Flag = std::shared_ptr<std::atomic<bool>>;

struct Task {  // an entry of a stream's queue in deferred mode
  std::function<void()> effect;
  Flag done;  // set after the effect
  Flag wait;  // the effect may run once this is set
};

struct Capture;

struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  uint32_t id = 0;
  int64_t ready = 0;                 // when the work queued so far ends
  std::shared_ptr<Capture> capture;
  uint64_t ops = 0;                  // of a capture: operations so far
  uint64_t joined = 0;               // and how many of them another stream waits for
  std::deque<Task> queue;
  uint64_t rank = 0;                 // in the deferred mode; 0: to be drawn
};

struct Event {
  unsigned flags = 0;
  int device = -1;
  uint32_t id = 0;
  bool recorded = false;
  int64_t time = 0;
  Flag done;
  std::shared_ptr<Capture> capture;  // the capture in which it was last recorded
  Stream* capture_stream = nullptr;
  uint64_t capture_ops = 0;          // operations of that stream before it
};

struct Kernel {
  std::string name;
};

extern std::recursive_mutex mu;  // guards everything declared here

// Null, the legacy and the per-thread stream are the current device's default stream.
Stream* resolve(cudaStream_t stream);
cudaError_t submit(Stream* stream, Op op);
int64_t kernel_duration(double flops, double bytes);
// Books the operation on the clock, no earlier than `not_before`, and returns its end.
int64_t occupy(Stream* stream, const Op& op, int64_t not_before = 0);
// Runs the effect now, or in deferred mode at a synchronization.
void enqueue(Stream* stream, std::function<void()> effect);
cudaError_t sync_stream(Stream* stream);
void sync_device(int device);
void drain(Stream* stream);  // deferred mode: runs effects until this stream's queue is empty
void drain_all();

// ---- devices and memory -------------------------------------------------------------------------

int current_device();
bool valid_device(int device);
bool has_context(int device);
void context(int device);             // makes this process's context, as a first use does
cudaError_t fail(cudaError_t error);  // remembers the error for cudaGetLastError
int device_of(const void* pointer);   // -1 for host memory
bool pinned(const void* pointer);
void unsupported(const char* name);

int physical_of(int device);
void pci_bus_id(int physical, char* text, size_t size);
void uuid_of(int physical, unsigned char* bytes);
std::string uuid_text(int physical);  // GPU-xxxxxxxx-...

// ---- counters that processes share, for NVML ---------------------------------------------------

void count_busy(int device, int64_t begin, int64_t end);
void count_copy(int device, int64_t begin, int64_t end, size_t bytes, bool to_device);
void count_memory(int device, int64_t bytes);
void count_nvlink(int device, size_t bytes);

struct Counters {
  double utilization;                              // of the last 200 ms, 0 to 1
  double tx, rx;                                   // bytes per second of the last 40 ms
  uint64_t busy_ns, memory, nvlink_sent;
  std::vector<std::pair<int, uint64_t>> processes; // process id and its bytes
};
Counters counters(int physical);
// The share of an interval, at most ten seconds ago, in which the GPU was busy: 0 to 1.
double busy_share(int physical, int64_t from, int64_t until);

// ---- records for CUPTI --------------------------------------------------------------------------

extern std::atomic<bool> tracing;
uint32_t next_correlation();
uint32_t correlation();  // of the call that this thread is in
void activity(const Op& op, Stream* stream, int64_t begin, int64_t end, uint32_t correlation);
void activity_api(const char* name, int64_t begin, int64_t end, uint32_t correlation);
// `type` is the number of CUPTI's kind of synchronization.
void activity_sync(int type, Stream* stream, Event* event, int64_t begin, int64_t end,
                   uint32_t correlation);

// One call of the runtime: what is launched while it lives has its correlation id.
struct Call {
  const char* name;
  int64_t began;
  uint32_t id, outer;
  explicit Call(const char* name);
  ~Call();
};

}  // namespace fake
