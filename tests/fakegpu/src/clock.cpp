// The virtual clock: what runs on streams is booked on it, and the host sleeps until its end.
//
// Each GPU has one engine for kernels, one for collectives, and one for copies in each direction;
// an engine runs one operation at a time, in the order of the calls.
// Not faithful: kernels that run side by side, priorities, and contention between GPUs.
#include "faults.h"
#include "oplog.h"
#include "runtime.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <random>

namespace fake {

std::recursive_mutex mu;
Device devices[kMaxDevices];

static const bool devices_are_numbered = [] {
  constexpr uint32_t kDefaultStreamId = 7;  // as CUPTI numbers it
  for (int i = 0; i < kMaxDevices; i++) {
    devices[i].default_stream.device = i;
    devices[i].default_stream.id = kDefaultStreamId;
    devices[i].streams.insert(&devices[i].default_stream);
  }
  return true;
}();

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

void sleep_until(int64_t when) {
  [[maybe_unused]] static thread_local const int timer_is_sharp = prctl(PR_SET_TIMERSLACK, 1);
  timespec time{when / 1'000'000'000ll, when % 1'000'000'000ll};
  while (now() < when) clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr);
}

int64_t kernel_duration(double flops, double bytes) {
  double seconds = std::max(flops / cfg.flops, bytes / cfg.hbm);
  return static_cast<int64_t>(cfg.kernel_us * 1e3 + seconds * 1e9);
}

static int64_t* engine_of(Device& device, Kind kind) {
  switch (kind) {
    case Kind::Kernel:
    case Kind::Memset:
    case Kind::CopyD2D:
      return &device.compute;
    case Kind::Collective:
      return &device.collective;
    case Kind::CopyH2D:
      return &device.h2d;
    case Kind::CopyD2H:
    case Kind::CopyP2P:
      return &device.d2h;
    default:
      return nullptr;
  }
}

static void count(const Op& op, int device, int64_t begin, int64_t end) {
  switch (op.kind) {
    case Kind::Kernel:
    case Kind::Collective:
    case Kind::Memset:
    case Kind::CopyD2D:
      count_busy(device, begin, end);
      break;
    case Kind::CopyH2D:
      count_copy(device, begin, end, op.bytes, true);
      break;
    case Kind::CopyD2H:
      count_copy(device, begin, end, op.bytes, false);
      break;
    case Kind::CopyP2P:
      if (cfg.peer) {
        count_nvlink(op.peer, op.bytes);
      } else {
        count_copy(op.peer, begin, end, op.bytes, false);
        count_copy(op.target, begin, end, op.bytes, true);
      }
      break;
    default:
      break;
  }
}

// How much later an operation begins than it could (FAKECUDA_DELAY_US).
static int64_t delay() {
  static std::mt19937_64 draw(cfg.seed);
  if (cfg.delay_us <= 0) return 0;
  return std::uniform_int_distribution<int64_t>(0, static_cast<int64_t>(cfg.delay_us * 1e3))(draw);
}

int64_t occupy(Stream* stream, const Op& op, int64_t not_before) {
  std::lock_guard lock(mu);
  int64_t* engine = engine_of(devices[stream->device], op.kind);
  int64_t begin = std::max({now(), stream->ready, not_before});
  if (engine) begin = std::max(begin, *engine);
  begin += delay();
  int64_t end = begin + op.duration;
  if (engine) *engine = end;
  stream->ready = end;
  count(op, stream->device, begin, end);
  if (tracing) activity(op, stream, begin, end, correlation());
  log_operation(op, stream, begin, end);
  return end;
}

static void order(Stream* later, Stream* earlier) {
  later->ready = std::max(later->ready, earlier->ready);
  if (!earlier->queue.empty()) wait_for(later, mark(earlier));
}

void follow_default_stream(Stream* stream) {
  Device& device = devices[stream->device];
  Stream* default_stream = &device.default_stream;
  auto is_blocking = [=](Stream* other) {
    return other != default_stream && !(other->flags & cudaStreamNonBlocking);
  };
  if (is_blocking(stream)) order(stream, default_stream);
  if (stream != default_stream) return;
  for (Stream* other : device.streams)
    if (is_blocking(other)) order(default_stream, other);
}

// An effect that the next kernel of this thread gets: see fakecuda_attach.
static thread_local std::function<void()> attached;

cudaError_t submit(Stream* stream, Op op) {
  init();
  if (attached && op.kind == Kind::Kernel && !op.effect)
    op.effect = std::exchange(attached, nullptr);
  {
    std::lock_guard lock(mu);
    context(stream->device);
    if (stream->capture) {
      stream->ops++;
      stream->capture->graph->nodes.push_back(std::move(op));
      return cudaSuccess;
    }
    if (cudaError_t error = count_operation(stream->device, op.kind)) return error;
    follow_default_stream(stream);
    occupy(stream, op);
  }
  enqueue(stream, std::move(op.effect));
  return cudaSuccess;
}

// The kinds of synchronization as CUPTI numbers them.
constexpr int kStreamSynchronize = 3;
constexpr int kDeviceSynchronize = 4;

cudaError_t sync_stream(Stream* stream) {
  if (cudaError_t error = broken(stream->device)) return error;
  int64_t until;
  {
    std::lock_guard lock(mu);
    if (stream->capture) {
      stream->capture->invalid = true;
      return fail(cudaErrorStreamCaptureUnsupported);
    }
    follow_default_stream(stream);
    until = stream->ready;
  }
  int64_t began = now();
  sleep_until(until);
  drain(stream);
  if (tracing) activity_sync(kStreamSynchronize, stream, nullptr, began, now(), correlation());
  return cudaSuccess;
}

void sync_device(int device) {
  std::vector<Stream*> streams;
  int64_t until = 0;
  {
    std::lock_guard lock(mu);
    streams.assign(devices[device].streams.begin(), devices[device].streams.end());
    for (Stream* stream : streams) until = std::max(until, stream->ready);
  }
  int64_t began = now();
  sleep_until(until);
  for (Stream* stream : streams) drain(stream);
  if (tracing) activity_sync(kDeviceSynchronize, nullptr, nullptr, began, now(), correlation());
}

}  // namespace fake

using namespace fake;

// ---- for libraries on this stack: an effect as an operation, or as the next kernel's ------------

static std::function<void()> effect_of(void (*run)(void*), void (*drop)(void*), void* data) {
  std::shared_ptr<void> held(data, drop);
  return [run, held] { run(held.get()); };
}

// Queues an operation of this cost. Without a name it takes no time and leaves no record.
EXPORT int fakecuda_submit(cudaStream_t stream, const char* name, double flops, double bytes,
                           void (*run)(void*), void (*drop)(void*), void* data) {
  init();
  Op op;
  if (name) {
    op.name = name;
    op.duration = kernel_duration(flops, bytes);
  } else {
    op.kind = Kind::Host;
  }
  if (run) op.effect = effect_of(run, drop, data);
  Stream* on = resolve(stream);
  if (!name && broken(on->device)) return cudaSuccess;  // the call that torch makes next fails
  return submit(on, std::move(op));
}

// Gives the next kernel of this thread an effect: a copy between GPUs runs on the source's stream.
// A null `run` takes it back.
EXPORT void fakecuda_attach(void (*run)(void*), void (*drop)(void*), void* data) {
  attached = run ? effect_of(run, drop, data) : nullptr;
}

EXPORT int fakecuda_attached() { return attached != nullptr; }

EXPORT int fakecuda_deferred() {
  init();
  return cfg.deferred;
}

EXPORT void fakecuda_drain(cudaStream_t stream) { drain(resolve(stream)); }

EXPORT int fakecuda_device_of(const void* pointer) { return device_of(pointer); }
