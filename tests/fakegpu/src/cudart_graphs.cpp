// The CUDA runtime, part 5: capture of streams, and graphs.
//
// Not faithful: a graph replays its operations one after another, in the order of the capture, so
// that the deferred mode finds no race inside a graph. Nodes know no dependencies.
#include "runtime.h"

#include <pthread.h>

#include <algorithm>

namespace fake {

static std::atomic<unsigned long long> next_capture_id{1};
static std::set<Capture*> captures;  // those under way
static thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

static Graph* graph_of(cudaGraph_t handle) { return reinterpret_cast<Graph*>(handle); }

static Graph* graph_of(cudaGraphExec_t handle) { return reinterpret_cast<Graph*>(handle); }

static UserObject* object_of(cudaUserObject_t handle) {
  return reinterpret_cast<UserObject*>(handle);
}

static bool forbids(const Capture& capture) {
  if (capture.mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == pthread_self()) return true;
  return capture.mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
}

cudaError_t forbidden_by_capture() {
  if (thread_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard lock(mu);
  cudaError_t error = cudaSuccess;
  for (Capture* capture : captures) {
    if (!forbids(*capture)) continue;
    capture->invalid = true;
    error = fail(cudaErrorStreamCaptureUnsupported);
  }
  return error;
}

static void destroy(UserObject* object) {
  object->destroy(object->pointer);
  delete object;
}

static void destroy(Graph* graph) {
  std::vector<UserObject*> unused;
  {
    std::lock_guard lock(mu);
    for (UserObject* object : graph->objects)
      if (--object->references == 0) unused.push_back(object);
  }
  for (UserObject* object : unused) destroy(object);
  delete graph;
}

static cudaError_t begin_capture(cudaStream_t handle, Graph* graph, cudaStreamCaptureMode mode) {
  init();
  std::lock_guard lock(mu);
  Stream* stream = resolve(handle);
  if (stream->capture) return fail(cudaErrorIllegalState);
  if (stream == &devices[stream->device].default_stream)
    return fail(cudaErrorStreamCaptureUnsupported);
  auto capture = std::make_shared<Capture>();
  capture->owns_graph = graph == nullptr;
  capture->graph = graph ? graph : new Graph;
  capture->origin = stream;
  capture->mode = mode;
  capture->id = next_capture_id++;
  capture->thread = pthread_self();
  capture->streams.push_back(stream);
  captures.insert(capture.get());
  stream->capture = capture;
  stream->ops = 0;
  stream->joined = 0;
  return cudaSuccess;
}

// Ends a capture. An error if it was lost, or if a stream holds work that the origin waits not for.
static cudaError_t end_capture(Capture& capture) {
  bool unjoined = false;
  for (Stream* stream : capture.streams) {
    unjoined |= stream != capture.origin && stream->ops > stream->joined;
    stream->capture = nullptr;
  }
  capture.ended = true;
  captures.erase(&capture);
  if (capture.invalid) return fail(cudaErrorStreamCaptureInvalidated);
  if (unjoined) return fail(cudaErrorStreamCaptureUnjoined);
  return cudaSuccess;
}

}  // namespace fake

using namespace fake;

EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return begin_capture(stream, nullptr, mode);
}

EXPORT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                                 const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                                 size_t, cudaStreamCaptureMode mode) {
  return begin_capture(stream, graph_of(graph), mode);
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  std::lock_guard lock(mu);
  Stream* stream = resolve(handle);
  auto capture = stream->capture;
  *graph = nullptr;
  if (!capture || capture->origin != stream) return fail(cudaErrorIllegalState);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != pthread_self())
    return fail(cudaErrorStreamCaptureWrongThread);
  cudaError_t error = end_capture(*capture);
  if (error == cudaSuccess) {
    *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  } else if (capture->owns_graph) {
    destroy(capture->graph);
  }
  return error;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  init();
  std::lock_guard lock(mu);
  const auto& capture = resolve(handle)->capture;
  if (!capture) {
    *status = cudaStreamCaptureStatusNone;
  } else if (capture->invalid) {
    *status = cudaStreamCaptureStatusInvalidated;
  } else {
    *status = cudaStreamCaptureStatusActive;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                            unsigned long long* id, cudaGraph_t* graph,
                                            const cudaGraphNode_t** dependencies,
                                            const cudaGraphEdgeData** edges, size_t* count) {
  cudaStreamIsCapturing(handle, status);
  std::lock_guard lock(mu);
  const auto& capture = resolve(handle)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? reinterpret_cast<cudaGraph_t>(capture->graph) : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*,
                                                       const cudaGraphEdgeData*, size_t,
                                                       unsigned) {
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* found, size_t* count) {
  auto& nodes = graph_of(graph)->nodes;
  if (found)
    for (size_t i = 0; i < std::min(*count, nodes.size()); i++)
      found[i] = reinterpret_cast<cudaGraphNode_t>(&nodes[i]);
  *count = nodes.size();
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*,
                                                cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                                 unsigned long long) {
  std::lock_guard lock(mu);
  auto* copy = new Graph(*graph_of(graph));
  for (UserObject* object : copy->objects) object->references++;
  *made = reinterpret_cast<cudaGraphExec_t>(copy);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {  // what was launched goes on
  destroy(graph_of(graph));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  destroy(graph_of(graph));
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t handle) {
  Call call(__func__);
  Stream* stream = resolve(handle);
  for (const Op& op : graph_of(graph)->nodes)
    if (cudaError_t error = submit(stream, op)) return error;
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* made, void* pointer, cudaHostFn_t destroy,
                                        unsigned references, unsigned) {
  auto* object = new UserObject{pointer, destroy, static_cast<int>(references)};
  *made = reinterpret_cast<cudaUserObject_t>(object);
  return cudaSuccess;
}

EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
  UserObject* object = object_of(handle);
  {
    std::lock_guard lock(mu);
    object->references -= static_cast<int>(count);
    if (object->references > 0) return cudaSuccess;
  }
  destroy(object);
  return cudaSuccess;
}

EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle,
                                             unsigned count, unsigned flags) {
  std::lock_guard lock(mu);
  UserObject* object = object_of(handle);
  if (!(flags & cudaGraphUserObjectMove)) object->references += static_cast<int>(count);
  auto& kept = graph_of(graph)->objects;
  kept.insert(kept.end(), count, object);
  return cudaSuccess;
}
