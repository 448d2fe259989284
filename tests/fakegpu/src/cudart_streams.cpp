// The CUDA runtime, part 2: streams and events.
//
// Not faithful: the per-thread default stream is the default stream.
#include "faults.h"
#include "gpu_clocks.h"
#include "one_gpu.h"
#include "oplog.h"
#include "runtime.h"

#include <algorithm>

namespace fake {

static std::atomic<uint32_t> next_stream_id{13};
static std::atomic<uint32_t> next_event_id{1};
constexpr int kEventSynchronize = 1;  // as CUPTI numbers it

static Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

// Joins a stream to the capture in which an event was recorded.
static cudaError_t join_capture(Stream* stream, Event* event) {
  Capture* capture = event->capture.get();
  if (capture->ended) return fail(cudaErrorCapturedEvent);
  if (capture->invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (!stream->capture) {
    stream->capture = event->capture;
    stream->ops = 0;
    stream->joined = 0;
    capture->streams.push_back(stream);
  } else if (stream->capture.get() != capture) {
    return fail(cudaErrorStreamCaptureIsolation);
  }
  Stream* from = event->capture_stream;
  if (from != stream) {
    from->joined = std::max(from->joined, event->capture_ops);
    stream->ops++;
  }
  return cudaSuccess;
}

static bool is_done(const Event* event) { return !event->done || *event->done; }

static cudaError_t add_host_function(cudaStream_t stream, std::function<void()> function) {
  Op op;
  op.kind = Kind::Host;
  op.effect = std::move(function);
  return submit(resolve(stream), std::move(op));
}

}  // namespace fake

using namespace fake;

// ---- streams ------------------------------------------------------------------------------------

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                int priority) {
  init();
  std::lock_guard lock(mu);
  int device = current_device();
  if (cudaError_t error = broken(device)) return error;
  context(device);
  auto* made = new Stream;
  made->device = device;
  made->flags = flags;
  made->priority = priority;
  made->id = next_stream_id++;
  devices[device].streams.insert(made);
  *stream = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  auto* stream = reinterpret_cast<Stream*>(handle);
  drain(stream);
  std::lock_guard lock(mu);
  devices[stream->device].streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = resolve(stream)->priority;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  init();
  Call call(__func__);
  if (cudaError_t error = forbidden_by_capture()) return error;
  return sync_stream(resolve(stream));
}

EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  init();
  if (cudaError_t error = forbidden_by_capture()) return error;
  Stream* stream = resolve(handle);
  if (cudaError_t error = broken(stream->device)) return error;
  {
    std::lock_guard lock(mu);
    if (now() < stream->ready) return cudaErrorNotReady;
  }
  if (cfg.deferred) run_one();
  std::lock_guard lock(mu);
  return stream->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  init();
  Call call(__func__);
  std::lock_guard lock(mu);
  Stream* stream = resolve(handle);
  Event* event = event_of(event_handle);
  if (cudaError_t error = broken(stream->device)) return error;
  if (event->capture) return join_capture(stream, event);
  if (!event->recorded) return cudaSuccess;
  if (stream->capture) {
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureIsolation);
  }
  stream->ready = std::max(stream->ready, event->time);
  wait_for(stream, event->done);
  log_event("wait", event, stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  return add_host_function(stream, [=] { function(data); });
}

EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                         void* data, unsigned) {
  return add_host_function(stream, [=] { function(stream, cudaSuccess, data); });
}

// ---- events -------------------------------------------------------------------------------------

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  init();
  auto* made = new Event;
  made->flags = flags;
  made->device = current_device();
  made->id = next_event_id++;
  *event = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}

EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event_of(event);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle,
                                            unsigned) {
  init();
  Call call(__func__);
  std::lock_guard lock(mu);
  Stream* stream = resolve(stream_handle);
  Event* event = event_of(handle);
  if (cudaError_t error = broken(stream->device)) return error;
  if (misplaced("cudaEventRecord", "stream", stream->device, "an event of", event->device))
    return fail(cudaErrorInvalidResourceHandle);
  event->recorded = true;
  event->capture = stream->capture;
  if (stream->capture) {
    event->capture_stream = stream;
    event->capture_ops = stream->ops;
    return cudaSuccess;
  }
  follow_default_stream(stream);
  event->time = std::max(now(), stream->ready);
  event->done = mark(stream);
  log_event("record", event, stream);
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  if (cudaError_t error = forbidden_by_capture()) return error;
  Event* event = event_of(handle);
  if (cudaError_t error = broken(event->device)) return error;
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (!event->recorded) return cudaSuccess;
  if (now() < event->time) return cudaErrorNotReady;
  if (!is_done(event)) run_one();
  return is_done(event) ? cudaSuccess : cudaErrorNotReady;
}

EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Call call(__func__);
  if (cudaError_t error = forbidden_by_capture()) return error;
  Event* event = event_of(handle);
  if (cudaError_t error = broken(event->device)) return error;
  if (event->capture) return fail(cudaErrorCapturedEvent);
  if (!event->recorded) return cudaSuccess;
  int64_t began = now();
  sleep_until(event->time);
  drain_until(event->done);
  if (tracing) activity_sync(kEventSynchronize, nullptr, event, began, now(), correlation());
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from_handle, cudaEvent_t to_handle) {
  Event* from = event_of(from_handle);
  Event* to = event_of(to_handle);
  bool timed = !((from->flags | to->flags) & cudaEventDisableTiming);
  bool recorded = from->recorded && to->recorded;
  bool apart = misplaced("cudaEventElapsedTime", "event", to->device, "one of", from->device);
  if (!timed || !recorded || apart) return fail(cudaErrorInvalidResourceHandle);
  if (cudaError_t error = broken(from->device)) return error;
  if (from->capture || to->capture) return fail(cudaErrorCapturedEvent);
  if (now() < std::max(from->time, to->time)) return fail(cudaErrorNotReady);
  *ms = static_cast<float>(counted_ns(from->device, to->time - from->time) / 1e6);
  return cudaSuccess;
}
