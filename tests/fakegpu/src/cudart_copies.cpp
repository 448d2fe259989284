// The CUDA runtime, part 4: copies and memset. What a copy is follows from its pointers.
//
// Not faithful: a copy between GPUs takes time on the source's engine alone.
#include "one_gpu.h"
#include "runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace fake {

constexpr double kHostBytesPerSecond = 10e9;
constexpr size_t kAlwaysCopied = 4096;  // bytes, also without FAKECUDA_DATA: flags, counters, sizes

static bool moves(size_t bytes) { return cfg.data || bytes <= kAlwaysCopied; }

static bool corrupts(const Op& op) {
  return op.kind == Kind::CopyP2P && planted("FAKECUDA_CORRUPT", op.peer) == op.target;
}

static Op copy_op(const void* to, const void* from, size_t bytes) {
  int target = device_of(to);
  int source = device_of(from);
  double latency_us = cfg.copy_us;
  double bytes_per_second;
  Op op;
  op.bytes = bytes;
  if (target < 0 && source < 0) {
    op.kind = Kind::CopyH2H;
    op.name = "Memcpy HtoH";
    bytes_per_second = kHostBytesPerSecond;
  } else if (target < 0) {
    op.kind = Kind::CopyD2H;
    op.name = "Memcpy DtoH";
    bytes_per_second = cfg.d2h;
  } else if (source < 0) {
    op.kind = Kind::CopyH2D;
    op.name = "Memcpy HtoD";
    bytes_per_second = cfg.h2d;
  } else if (target == source) {
    op.kind = Kind::CopyD2D;
    op.name = "Memcpy DtoD";
    bytes_per_second = cfg.hbm / 2;  // each byte is read and written
    latency_us = cfg.kernel_us;
  } else {
    op.kind = Kind::CopyP2P;
    op.name = "Memcpy PtoP";
    op.peer = source;
    op.target = target;
    bytes_per_second = cfg.peer ? cfg.p2p : cfg.staged;
    if (planted("FAKECUDA_SLOW", source) == target) bytes_per_second /= 10;
  }
  op.duration = static_cast<int64_t>(latency_us * 1e3 + bytes / bytes_per_second * 1e9);
  if (op.kind == Kind::CopyP2P && planted("FAKECUDA_HANG", source) == target)
    op.duration = kNeverEnds;
  return op;
}

// Pageable memory is read before the call returns, and is written when it returns.
static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t handle,
                        bool blocking) {
  init();
  if (bytes == 0) return cudaSuccess;
  Stream* stream = resolve(handle);
  Op op = copy_op(to, from, bytes);
  bool reads_pageable = op.kind == Kind::CopyH2D && !pinned(from);
  bool writes_pageable = op.kind == Kind::CopyD2H && !pinned(to);
  if (stream->capture && (blocking || reads_pageable || writes_pageable)) {
    stream->capture->invalid = true;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  if (moves(bytes) && reads_pageable) {
    auto* begin = static_cast<const char*>(from);
    auto staged = std::make_shared<std::vector<char>>(begin, begin + bytes);
    op.effect = [to, staged] { memcpy(to, staged->data(), staged->size()); };
  } else if (moves(bytes)) {
    bool corrupt = bytes > kAlwaysCopied && corrupts(op);
    op.effect = [to, from, bytes, corrupt] {
      memmove(to, from, bytes);
      if (corrupt) static_cast<char*>(to)[bytes / 2] ^= 1;
    };
  }
  cudaError_t error = submit(stream, std::move(op));
  if (error == cudaSuccess && (blocking || writes_pageable)) return sync_stream(stream);
  return error;
}

static cudaError_t set(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  init();
  Op op;
  op.kind = Kind::Memset;
  op.name = "Memset";
  op.bytes = bytes;
  op.duration = kernel_duration(0, static_cast<double>(bytes));
  if (moves(bytes)) op.effect = [=] { memset(pointer, value, bytes); };
  Stream* on = resolve(stream);
  int device = device_of(pointer);
  if (device >= 0 && misplaced("cudaMemset", "memory", device, "a stream of", on->device)) abort();
  return submit(on, std::move(op));
}

}  // namespace fake

using namespace fake;

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  Call call(__func__);
  if (cudaError_t error = forbidden_by_capture()) return error;
  return copy(to, from, bytes, nullptr, true);
}

EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                   cudaStream_t stream) {
  Call call(__func__);
  return copy(to, from, bytes, stream, false);
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                       cudaStream_t stream) {
  Call call(__func__);
  return copy(to, from, bytes, stream, false);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind,
                                     cudaStream_t handle) {
  Call call(__func__);
  init();
  Op op = copy_op(to, from, width * height);
  op.effect = [=] {
    for (size_t row = 0; row < height; row++) {
      auto* target = static_cast<char*>(to) + row * to_pitch;
      auto* source = static_cast<const char*>(from) + row * from_pitch;
      memmove(target, source, width);
    }
  };
  bool pageable = device_of(to) < 0 ? !pinned(to) : device_of(from) < 0 && !pinned(from);
  Stream* stream = resolve(handle);
  cudaError_t error = submit(stream, std::move(op));
  return error == cudaSuccess && pageable ? sync_stream(stream) : error;
}

EXPORT cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  Call call(__func__);
  if (cudaError_t error = forbidden_by_capture()) return error;
  return set(pointer, value, bytes, nullptr);
}

EXPORT cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  Call call(__func__);
  return set(pointer, value, bytes, stream);
}
