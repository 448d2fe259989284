// What only the files of the runtime share: each GPU's engines and streams, captures, queues.
#pragma once
#include "fake.h"

#include <set>

namespace fake {

struct Device {
  bool context = false;
  // when each engine is free
  int64_t compute = 0, collective = 0, h2d = 0, d2h = 0;
  Stream default_stream;
  std::set<Stream*> streams;              // the default stream too
};
extern Device devices[kMaxDevices];

struct UserObject {  // what a graph keeps alive
  void* pointer;
  void (*destroy)(void*);
  int references;
};

struct Graph {
  std::vector<Op> nodes;
  std::vector<UserObject*> objects;
};

struct Capture {
  Graph* graph = nullptr;
  bool owns_graph = true;
  Stream* origin = nullptr;
  std::vector<Stream*> streams;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  unsigned long thread = 0;
  unsigned long long id = 0;
  bool invalid = false;
  bool ended = false;
};

int set_device(int device);  // returns the device that was current

// cudaErrorStreamCaptureUnsupported if a capture forbids this thread a call that could break it,
// such as cudaMalloc. The capture is then lost, as with the real runtime.
cudaError_t forbidden_by_capture();

// Deferred mode: a flag that is set once the stream has run what it holds now; null otherwise.
Flag mark(Stream* stream);
void wait_for(Stream* stream, Flag flag);
void drain_until(const Flag& flag);
bool run_one();

cudaError_t launch(const Kernel* kernel, dim3 grid, dim3 block, cudaStream_t stream);
int resident_blocks(int block_size);  // on a multiprocessor

// The default stream and the streams without cudaStreamNonBlocking wait for each other.
void follow_default_stream(Stream* stream);

}  // namespace fake
