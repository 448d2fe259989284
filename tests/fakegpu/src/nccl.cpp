// Replaces NCCL: collectives that move bytes, between GPUs of one process or between processes.
//
// Faithful: groups, order and results of all-reduce, reduce, broadcast, all-gather and
// reduce-scatter; all ranks' kernels start when the last rank is ready, last as long as the bytes
// of a ring at FAKECUDA_P2P_GBPS (or _STAGED_GBPS), and run beside other kernels, one at a time on
// each GPU; split, abort and destroy. Stricter than NCCL, which hangs or computes nonsense: the
// ranks' calls must agree in kind, count, type, operation and root, a group must have a call of
// every rank of the process, and a rank between processes waits for the others no longer than they
// live and at most FAKECUDA_NCCL_TIMEOUT_S seconds (120). An error names the rank, on stderr and in
// ncclGetLastError, and breaks the communicator.
//
// Not faithful: between processes the host waits until every rank has made the call, because memory
// changes when a call is made and not when its kernel would run (so a program that needs a rank's
// host to go on before another rank's call ends at the time limit); in a captured graph over
// several GPUs of one process, the first rank's graph moves the bytes of all; an average divides
// the sum, in rank order; several ranks of one process need ncclCommInitAll. Send, receive,
// all-to-all, gather, operations of the user, windows and non-blocking communicators are missing.
#include "abi/nccl.h"

#include "faults.h"
#include "one_gpu.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <utility>

using fake::cfg;
using fake::Kind;
using fake::Op;
using fake::Stream;

extern "C" cudaError_t cudaSetDevice(int device);

namespace {

constexpr int kRanks = 16;
constexpr size_t kChunkBytes = 1 << 20;
constexpr int64_t kLatencyNs = 15000;
constexpr int64_t kMillisecondNs = 1000000;

// ---- what a call asks for -----------------------------------------------------------------------

enum class Verb { AllReduce, Reduce, Broadcast, AllGather, ReduceScatter };

struct Request {  // what the ranks of a communicator must agree on
  Verb verb;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int root = 0;

  bool operator==(const Request&) const = default;
};

size_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32:
      return 4;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64:
      return 8;
    default:
      return 1;
  }
}

size_t bytes_of(const Request& request) { return request.count * element_bytes(request.type); }

const char* name_of(Verb verb) {
  switch (verb) {
    case Verb::AllReduce:
      return "ncclAllReduce";
    case Verb::Reduce:
      return "ncclReduce";
    case Verb::Broadcast:
      return "ncclBroadcast";
    case Verb::AllGather:
      return "ncclAllGather";
    case Verb::ReduceScatter:
      return "ncclReduceScatter";
  }
  return "";
}

const char* kernel_of(Verb verb) {
  switch (verb) {
    case Verb::AllReduce:
      return "ncclDevKernel_AllReduce_Sum_RING_LL";
    case Verb::Reduce:
      return "ncclDevKernel_Reduce_Sum_RING_LL";
    case Verb::Broadcast:
      return "ncclDevKernel_Broadcast_RING_LL";
    case Verb::AllGather:
      return "ncclDevKernel_AllGather_RING_LL";
    case Verb::ReduceScatter:
      return "ncclDevKernel_ReduceScatter_Sum_RING_LL";
  }
  return "";
}

const char* name_of(ncclDataType_t type) {
  static const char* const names[] = {"int8",    "uint8",   "int32",    "uint32",
                                      "int64",   "uint64",  "float16",  "float32",
                                      "float64", "bfloat16", "float8e4m3", "float8e5m2"};
  return type <= ncclFloat8e5m2 ? names[type] : "elements of an unknown type";
}

const char* name_of(ncclRedOp_t op) {
  static const char* const names[] = {"sum", "product", "maximum", "minimum", "average"};
  return op <= ncclAvg ? names[op] : "an operation of the user";
}

bool has_root(Verb verb) { return verb == Verb::Reduce || verb == Verb::Broadcast; }

bool reduces(Verb verb) {
  return verb == Verb::AllReduce || verb == Verb::Reduce || verb == Verb::ReduceScatter;
}

std::string text_of(const Request& request) {
  std::string text = std::string(name_of(request.verb)) + " of " + std::to_string(request.count);
  text += std::string(" ") + name_of(request.type);
  if (reduces(request.verb)) text += std::string(", ") + name_of(request.op);
  if (has_root(request.verb)) text += ", root " + std::to_string(request.root);
  return text;
}

// ---- errors -------------------------------------------------------------------------------------

char last_error[1024] = "";

ncclResult_t failed(ncclResult_t result, const std::string& reason) {
  static std::mutex writing;
  std::lock_guard lock(writing);
  snprintf(last_error, sizeof last_error, "%s", reason.c_str());
  fprintf(stderr, "fake NCCL: %s\n", reason.c_str());
  return result;
}

// ---- communicators ------------------------------------------------------------------------------

struct Post {  // what a rank tells the others before a collective
  Request request;
  int64_t ready;  // when its stream is
};

struct World {  // in shared memory, one for each communicator of several processes; zero at first
  struct Rank {
    std::atomic<int> process;   // its id, once it has joined
    std::atomic<int> gpu;       // of the machine
    std::atomic<int> arrivals;  // how many meetings it has come to
    std::atomic<bool> left;     // it has destroyed or aborted its communicator, or met an error
    Post posts[2];              // of even and odd collectives: a rank is at most one ahead
    char bytes[kChunkBytes];
  } ranks[kRanks];
};

struct Member {  // a rank of a communicator; a call that is under way outlives the communicator
  int rank;
  int size;
  int device;
  std::shared_ptr<int> clique;   // the same for all ranks of one process; null between processes
  std::shared_ptr<World> world;  // null in one process
  std::string path = {};         // of the world
  int collectives = 0;
  int splits = 0;
  std::atomic<bool> aborted = false;
  std::atomic<ncclResult_t> error = ncclSuccess;
};
using MemberRef = std::shared_ptr<Member>;

struct Collective {  // the call of one rank
  Request request;
  const void* input;
  void* output;
  MemberRef member;
  Stream* stream;
};

// Breaks the communicator, also for the ranks that wait for this one.
ncclResult_t failed(Member& member, ncclResult_t result, const std::string& reason) {
  member.error = result;
  if (member.world) member.world->ranks[member.rank].left = true;
  return failed(result, reason);
}

std::string rank_text(int rank, int size) {
  return "rank " + std::to_string(rank) + " of " + std::to_string(size);
}

// The error that an earlier error makes of each later call.
ncclResult_t earlier_error(const Member& member) {
  if (member.error == ncclSuccess) return ncclSuccess;
  std::string self = rank_text(member.rank, member.size);
  return failed(member.error, self + ": an earlier error broke this communicator");
}

// ---- arithmetic ---------------------------------------------------------------------------------

struct Bfloat16 {
  uint16_t bits = 0;

  Bfloat16() = default;
  Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    uint32_t to_nearest_even = 0x7fff + ((wide >> 16) & 1);
    bits = std::isnan(value) ? 0x7fc0 : static_cast<uint16_t>((wide + to_nearest_even) >> 16);
  }
  operator float() const {
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
  }
};

template <class T, class Function>
void fold(T* target, const T* source, size_t count, Function function) {
  for (size_t i = 0; i < count; i++) {
    target[i] = static_cast<T>(function(target[i], source[i]));
  }
}

using Parts = std::vector<const char*>;  // the same range of every rank's input, in rank order

template <class T>
void combine(T* target, const Parts& parts, size_t count, ncclRedOp_t op) {
  memcpy(target, parts[0], count * sizeof(T));
  for (size_t rank = 1; rank < parts.size(); rank++) {
    auto* source = reinterpret_cast<const T*>(parts[rank]);
    switch (op) {
      case ncclProd:
        fold(target, source, count, [](T a, T b) { return a * b; });
        break;
      case ncclMax:
        fold(target, source, count, [](T a, T b) { return a < b ? b : a; });
        break;
      case ncclMin:
        fold(target, source, count, [](T a, T b) { return b < a ? b : a; });
        break;
      default:
        fold(target, source, count, [](T a, T b) { return a + b; });
    }
  }
  if (op != ncclAvg) return;
  T ranks = static_cast<T>(parts.size());
  for (size_t i = 0; i < count; i++) target[i] = static_cast<T>(target[i] / ranks);
}

void combine(char* target, const Parts& parts, size_t count, const Request& request) {
  auto as = [&]<class T>(T) {
    combine(reinterpret_cast<T*>(target), parts, count, request.op);
  };
  switch (request.type) {
    case ncclInt8:
      return as(int8_t{});
    case ncclUint8:
      return as(uint8_t{});
    case ncclInt32:
      return as(int32_t{});
    case ncclUint32:
      return as(uint32_t{});
    case ncclInt64:
      return as(int64_t{});
    case ncclUint64:
      return as(uint64_t{});
    case ncclFloat16:
      return as(_Float16{});
    case ncclFloat32:
      return as(float{});
    case ncclFloat64:
      return as(double{});
    case ncclBfloat16:
      return as(Bfloat16{});
    default:
      return;  // `call` has refused it
  }
}

// ---- cost ---------------------------------------------------------------------------------------

// The bytes that each rank sends in a ring.
double sent_bytes(const Collective& collective) {
  double ranks = collective.member->size;
  double bytes = static_cast<double>(bytes_of(collective.request));
  switch (collective.request.verb) {
    case Verb::AllReduce:
      return bytes * 2 * (ranks - 1) / ranks;
    case Verb::AllGather:
    case Verb::ReduceScatter:
      return bytes * (ranks - 1);
    default:
      return ranks > 1 ? bytes : 0;
  }
}

Op kernel(const Collective& collective) {
  double rate = cfg.peer ? cfg.p2p : cfg.staged;
  Op op;
  op.kind = Kind::Collective;
  op.name = kernel_of(collective.request.verb);
  op.bytes = bytes_of(collective.request);
  op.peer = collective.member->device;
  op.duration = kLatencyNs + static_cast<int64_t>(sent_bytes(collective) / rate * 1e9);
  return op;
}

// Counts the bytes that this rank sends, and receives, for NVML.
void count(const Collective& collective, int64_t begin, int64_t end) {
  int device = collective.member->device;
  size_t bytes = static_cast<size_t>(sent_bytes(collective));
  if (cfg.peer) {
    fake::count_nvlink(device, bytes);
  } else {
    fake::count_copy(device, begin, end, bytes, false);
    fake::count_copy(device, begin, end, bytes, true);
  }
}

// Books the collective on the clock.
void book(const Collective& collective, int64_t not_before, int64_t at_least = 0) {
  fake::Call launch("cudaLaunchKernelExC");
  Op op = kernel(collective);
  op.duration = std::max(op.duration, at_least);
  int64_t end = fake::occupy(collective.stream, op, not_before);
  count(collective, end - op.duration, end);
}

// Adds the collective to the graph that its stream captures; `move` moves the bytes at each replay.
template <class Move>
void capture(const Collective& collective, Move move) {
  Op op = kernel(collective);
  op.effect = [collective, move, duration = op.duration] {
    count(collective, fake::now(), fake::now() + duration);
    move();
  };
  fake::submit(collective.stream, std::move(op));
}

bool moves_bytes(const Request& request) { return cfg.data || bytes_of(request) <= 4096; }

// ---- in one process -----------------------------------------------------------------------------

// Moves the bytes of all ranks, which are in rank order.
void transfer(const std::vector<Collective>& ranks) {
  const Request& request = ranks[0].request;
  if (!moves_bytes(request)) return;
  size_t bytes = bytes_of(request);
  auto sum_at = [&](size_t offset) {
    Parts parts;
    for (const Collective& rank : ranks) {
      parts.push_back(static_cast<const char*>(rank.input) + offset);
    }
    std::vector<char> sum(bytes);
    combine(sum.data(), parts, request.count, request);
    return sum;
  };
  auto give_all = [&](const std::vector<char>& data) {
    for (const Collective& rank : ranks) memcpy(rank.output, data.data(), data.size());
  };
  switch (request.verb) {
    case Verb::AllReduce:
      give_all(sum_at(0));
      break;
    case Verb::Reduce:
      memcpy(ranks[request.root].output, sum_at(0).data(), bytes);
      break;
    case Verb::Broadcast: {
      auto* input = static_cast<const char*>(ranks[request.root].input);
      give_all(std::vector<char>(input, input + bytes));
      break;
    }
    case Verb::AllGather: {
      std::vector<char> all;
      for (const Collective& rank : ranks) {
        auto* input = static_cast<const char*>(rank.input);
        all.insert(all.end(), input, input + bytes);
      }
      give_all(all);
      break;
    }
    case Verb::ReduceScatter: {
      std::vector<std::vector<char>> sums;  // all first: outputs may lie in inputs
      for (size_t rank = 0; rank < ranks.size(); rank++) sums.push_back(sum_at(rank * bytes));
      for (size_t rank = 0; rank < ranks.size(); rank++) {
        memcpy(ranks[rank].output, sums[rank].data(), bytes);
      }
      break;
    }
  }
}

// Checks that the calls, in rank order, are those of all ranks, and that they agree.
ncclResult_t check(const std::vector<Collective>& calls) {
  const Collective& first = calls[0];
  std::string name = text_of(first.request);
  int size = first.member->size;
  for (int rank = 0; rank < size; rank++) {
    bool called = rank < static_cast<int>(calls.size()) && calls[rank].member->rank == rank;
    if (!called) {
      std::string caller = rank_text(first.member->rank, size);
      std::string reason = rank_text(rank, size) + " has no call in the group in which " + caller;
      return failed(ncclInvalidUsage, reason + " calls " + name);
    }
    if (calls[rank].request == first.request) continue;
    std::string reason = rank_text(0, size) + " calls " + name + ", but ";
    reason += rank_text(rank, size) + " " + text_of(calls[rank].request);
    return failed(ncclInvalidUsage, reason + ", in the same place of a group");
  }
  return ncclSuccess;
}

// The last stream that arrives moves the bytes, and the others wait for it.
void defer(const std::vector<Collective>& ranks) {
  auto left = std::make_shared<std::atomic<int>>(static_cast<int>(ranks.size()));
  auto done = std::make_shared<std::atomic<bool>>(false);
  for (const Collective& rank : ranks) {
    fake::Task arrive;
    arrive.effect = [left, done, ranks] {
      if (--*left > 0) return;
      transfer(ranks);
      *done = true;
    };
    fake::Task wait;
    wait.wait = done;
    rank.stream->queue.push_back(std::move(arrive));
    rank.stream->queue.push_back(std::move(wait));
  }
}

ncclResult_t run_in_process(std::vector<Collective> calls) {
  std::sort(calls.begin(), calls.end(), [](const Collective& a, const Collective& b) {
    return a.member->rank < b.member->rank;
  });
  ncclResult_t result = check(calls);
  if (result != ncclSuccess) return result;
  std::unique_lock lock(fake::mu);
  if (calls[0].stream->capture) {
    for (const Collective& rank : calls) {
      bool first = rank.member->rank == 0;
      capture(rank, [calls, first] {
        if (first) transfer(calls);
      });
    }
    return ncclSuccess;
  }
  int64_t start = 0;
  for (const Collective& rank : calls) start = std::max(start, rank.stream->ready);
  for (const Collective& rank : calls) book(rank, start);
  if (cfg.deferred) {
    defer(calls);
    return ncclSuccess;
  }
  lock.unlock();
  transfer(calls);
  return ncclSuccess;
}

// ---- between processes --------------------------------------------------------------------------

int64_t time_limit() {
  const char* text = getenv("FAKECUDA_NCCL_TIMEOUT_S");
  double seconds = text && *text ? strtod(text, nullptr) : 120;
  return static_cast<int64_t>(seconds * 1e9);
}

bool alive(int process) {
  if (kill(process, 0) != 0) return false;
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", process);
  FILE* file = fopen(path, "r");
  if (!file) return false;
  char state = 0;
  int found = fscanf(file, "%*d (%*[^)]) %c", &state);
  fclose(file);
  return found != 1 || state != 'Z';  // a zombie waits for its parent
}

// Why a rank will not come to a meeting; empty if all may. A rank that died is the cause of others
// that left.
std::string why_absent(const Member& member, int meeting) {
  std::string why;
  for (int rank = 0; rank < member.size; rank++) {
    const World::Rank& other = member.world->ranks[rank];
    if (other.arrivals >= meeting) continue;
    int process = other.process;
    std::string name = "rank " + std::to_string(rank);
    if (process && !alive(process)) return name + " (process " + std::to_string(process) + ") died";
    if (other.left) why = name + " left the communicator, after an error or by destroying it";
  }
  return why;
}

// Waits until every rank has arrived at this meeting.
ncclResult_t meet(Member& member, const std::string& occasion) {
  World& world = *member.world;
  int meeting = ++world.ranks[member.rank].arrivals;
  int64_t began = fake::now();
  int64_t look = began + 20 * kMillisecondNs;
  std::string self = rank_text(member.rank, member.size) + " waited in " + occasion + ": ";
  const timespec nap{0, 20000};
  for (int rank = 0; rank < member.size;) {
    if (world.ranks[rank].arrivals >= meeting) {
      rank++;
      continue;
    }
    if (member.aborted) {
      std::string reason = "its communicator was aborted before rank " + std::to_string(rank);
      return failed(member, ncclInternalError, self + reason + " came");
    }
    if (fake::now() >= look) {
      look = fake::now() + 20 * kMillisecondNs;
      std::string why = why_absent(member, meeting);
      if (!why.empty()) return failed(member, ncclRemoteError, self + why);
      if (look - began > time_limit()) {
        std::string reason = "rank " + std::to_string(rank) + " did not come in time";
        return failed(member, ncclSystemError, self + reason + " (FAKECUDA_NCCL_TIMEOUT_S)");
      }
    }
    nanosleep(&nap, nullptr);
  }
  return ncclSuccess;
}

// Shows this rank's bytes to the others, and calls `take` when all have shown theirs.
template <class Take>
ncclResult_t share(Member& member, const void* bytes, size_t size, const std::string& occasion,
                   Take take) {
  memcpy(member.world->ranks[member.rank].bytes, bytes, size);
  ncclResult_t result = meet(member, occasion);
  if (result != ncclSuccess) return result;
  take();
  return meet(member, occasion);  // nobody shows more before all have taken
}

// Calls `function` with the offset and size of each piece of `bytes` that a rank can show at once.
template <class Function>
ncclResult_t in_chunks(size_t bytes, Function function) {
  for (size_t at = 0; at < bytes; at += kChunkBytes) {
    ncclResult_t result = function(at, std::min(kChunkBytes, bytes - at));
    if (result != ncclSuccess) return result;
  }
  return ncclSuccess;
}

ncclResult_t transfer_between(const Collective& collective) {
  const Request& request = collective.request;
  Member& member = *collective.member;
  World& world = *member.world;
  std::string occasion = text_of(request);
  auto* input = static_cast<const char*>(collective.input);
  auto* output = static_cast<char*>(collective.output);
  size_t bytes = bytes_of(request);
  Parts shown;
  for (int rank = 0; rank < member.size; rank++) shown.push_back(world.ranks[rank].bytes);
  auto sum = [&](char* target, size_t size) {
    combine(target, shown, size / element_bytes(request.type), request);
  };
  switch (request.verb) {
    case Verb::AllReduce:
    case Verb::Reduce:
      return in_chunks(bytes, [&](size_t at, size_t size) {
        return share(member, input + at, size, occasion, [&] {
          bool takes = request.verb == Verb::AllReduce || member.rank == request.root;
          if (takes) sum(output + at, size);
        });
      });
    case Verb::Broadcast:
      return in_chunks(bytes, [&](size_t at, size_t size) {
        bool gives = member.rank == request.root;
        return share(member, input + at, gives ? size : 0, occasion, [&] {
          memcpy(output + at, shown[request.root], size);
        });
      });
    case Verb::AllGather:
      return in_chunks(bytes, [&](size_t at, size_t size) {
        return share(member, input + at, size, occasion, [&] {
          for (int rank = 0; rank < member.size; rank++) {
            memcpy(output + rank * bytes + at, shown[rank], size);
          }
        });
      });
    case Verb::ReduceScatter: {
      std::vector<char> result(bytes);  // the output may lie in the input
      for (int target = 0; target < member.size; target++) {
        const char* part = input + target * bytes;
        ncclResult_t status = in_chunks(bytes, [&](size_t at, size_t size) {
          return share(member, part + at, size, occasion, [&] {
            if (member.rank == target) sum(result.data() + at, size);
          });
        });
        if (status != ncclSuccess) return status;
      }
      memcpy(output, result.data(), bytes);
      return ncclSuccess;
    }
  }
  return ncclInternalError;
}

// Whether copies hang from the GPU of a rank to that of the next one (FAKECUDA_HANG).
bool hangs(const Member& member) {
  const World& world = *member.world;
  for (int rank = 0; rank < member.size; rank++) {
    int next = world.ranks[(rank + 1) % member.size].gpu;
    if (fake::planted("FAKECUDA_HANG", world.ranks[rank].gpu) == next) return true;
  }
  return false;
}

// Waits for the calls of all ranks, which must agree, and moves the bytes. Returns in `start` when
// the last rank's stream is ready.
ncclResult_t exchange(const Collective& collective, int64_t* start) {
  Member& member = *collective.member;
  ncclResult_t earlier = earlier_error(member);
  if (earlier != ncclSuccess) return earlier;
  World& world = *member.world;
  int number = member.collectives++;
  auto post = [&](int rank) -> Post& { return world.ranks[rank].posts[number % 2]; };
  post(member.rank) = {collective.request, collective.stream->ready};
  ncclResult_t result = meet(member, text_of(collective.request));
  if (result != ncclSuccess) return result;
  for (int rank = 0; rank < member.size; rank++) {
    *start = std::max(*start, post(rank).ready);
    if (post(rank).request == post(0).request) continue;
    std::string reason = "call " + std::to_string(number + 1) + " of a communicator: ";
    reason += "rank 0 calls " + text_of(post(0).request) + ", but ";
    reason += "rank " + std::to_string(rank) + " " + text_of(post(rank).request);
    return failed(member, ncclInvalidUsage, reason);
  }
  return moves_bytes(collective.request) ? transfer_between(collective) : ncclSuccess;
}

ncclResult_t run_between(const Collective& collective) {
  if (collective.stream->capture) {
    capture(collective, [collective] {
      int64_t start = 0;
      exchange(collective, &start);  // an error shows in ncclCommGetAsyncError
    });
    return ncclSuccess;
  }
  fake::drain(collective.stream);
  if (hangs(*collective.member)) {  // the call returns, and its kernel never ends
    book(collective, 0, fake::kNeverEnds);
    return ncclSuccess;
  }
  int64_t start = 0;
  ncclResult_t result = exchange(collective, &start);
  if (result == ncclSuccess) book(collective, start);
  return result;
}

std::shared_ptr<World> open_world(const std::string& path) {
  int file = shm_open(path.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0) return nullptr;
  void* memory = MAP_FAILED;
  if (ftruncate(file, sizeof(World)) == 0) {
    memory = mmap(nullptr, sizeof(World), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  }
  close(file);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<World*>(memory), [](World* world) { munmap(world, sizeof(World)); }};
}

}  // namespace

struct ncclComm {
  MemberRef member;
};

namespace {

ncclResult_t join(ncclComm_t* communicator, int size, const std::string& path, int rank) {
  if (size > kRanks || rank < 0 || rank >= size) {
    std::string text = rank_text(rank, size) + " is not possible: a communicator has at most ";
    return failed(ncclInvalidArgument, text + std::to_string(kRanks) + " ranks here");
  }
  MemberRef member(new Member{rank, size, fake::current_device(), nullptr, nullptr, path});
  *communicator = new ncclComm{member};
  if (size == 1) {
    member->clique = std::make_shared<int>();
    return ncclSuccess;
  }
  member->world = open_world(path);
  if (!member->world) return failed(ncclSystemError, "no shared memory for a communicator");
  World::Rank& self = member->world->ranks[rank];
  self.gpu = fake::physical_of(member->device);
  self.process = getpid();
  ncclResult_t result = meet(*member, "the start of a communicator");
  shm_unlink(path.c_str());
  if (result != ncclSuccess) return result;
  for (int other = 0; other < size; other++) {
    if (other == rank || member->world->ranks[other].gpu != self.gpu) continue;
    std::string pair = std::to_string(std::min(rank, other)) + " and rank ";
    pair += std::to_string(std::max(rank, other));
    std::string reason = "Duplicate GPU detected: rank " + pair + " both on GPU ";
    return failed(*member, ncclInvalidUsage, reason + std::to_string(self.gpu));
  }
  return ncclSuccess;
}

ncclResult_t leave(ncclComm_t communicator) {
  MemberRef member = communicator->member;
  member->aborted = true;
  if (member->world) member->world->ranks[member->rank].left = true;
  delete communicator;
  return ncclSuccess;
}

// ---- groups -------------------------------------------------------------------------------------

thread_local int depth = 0;
thread_local std::vector<Collective> group;
thread_local ncclResult_t refused = ncclSuccess;  // the first error of a call in the group

// The k-th call of each rank of a process belongs to the k-th call of the others.
ncclResult_t run_group() {
  std::vector<Collective> calls = std::exchange(group, {});
  ncclResult_t error = std::exchange(refused, ncclSuccess);
  if (error != ncclSuccess) return error;
  while (!calls.empty()) {
    std::vector<Collective> together;
    std::vector<Collective> rest;
    std::set<int> ranks;
    std::shared_ptr<int> clique = calls[0].member->clique;
    for (Collective& call : calls) {
      bool first = together.empty();
      bool same = clique && call.member->clique == clique;
      bool joins = first || (same && !ranks.contains(call.member->rank));
      if (joins) ranks.insert(call.member->rank);
      (joins ? together : rest).push_back(std::move(call));
    }
    ncclResult_t result = clique ? run_in_process(together) : run_between(together[0]);
    if (result != ncclSuccess) return result;
    calls = std::move(rest);
  }
  return ncclSuccess;
}

// The null stream is the default stream of the communicator's GPU.
Stream* stream_of(const Member& member, cudaStream_t stream) {
  int before = fake::current_device();
  cudaSetDevice(member.device);
  Stream* found = fake::resolve(stream);
  cudaSetDevice(before);
  return found;
}

// Checks that stream and buffers are on the communicator's GPU, and that the GPU works.
ncclResult_t check_gpu(Member& member, const Request& request, const Stream* stream,
                       const void* input, const void* output) {
  ncclResult_t earlier = earlier_error(member);
  if (earlier != ncclSuccess) return earlier;
  const char* name = name_of(request.verb);
  int gpu = member.device;
  std::string self = rank_text(member.rank, member.size) + ": ";
  if (fake::misplaced(name, "stream", stream->device, "communicator of", gpu)) {
    return failed(ncclUnhandledCudaError, self + "its stream is on another GPU");
  }
  for (const void* buffer : {input, output}) {
    int of_buffer = fake::device_of(buffer);
    if (of_buffer >= 0 && fake::misplaced(name, "buffer", of_buffer, "communicator of", gpu)) {
      return failed(ncclInvalidArgument, self + "a buffer is on another GPU");
    }
  }
  cudaError_t error = fake::broken(gpu);
  if (error != cudaSuccess) {
    return failed(member, ncclUnhandledCudaError, self + cudaGetErrorString(error));
  }
  if (fake::count_collective(gpu)) {
    return failed(member, ncclSystemError, self + text_of(request) + " fails");
  }
  return ncclSuccess;
}

ncclResult_t call(Request request, const void* input, void* output, ncclComm_t communicator,
                  cudaStream_t stream) {
  MemberRef member = communicator->member;
  bool known = request.type <= ncclBfloat16 && request.op <= ncclAvg;
  if (reduces(request.verb) && !known) {
    return failed(ncclInvalidArgument, text_of(request) + " is not implemented here");
  }
  if (request.root < 0 || request.root >= member->size) {
    std::string reason = " in a communicator of " + std::to_string(member->size) + " ranks";
    return failed(ncclInvalidArgument, text_of(request) + reason);
  }
  Stream* on = stream_of(*member, stream);
  ncclResult_t checked = check_gpu(*member, request, on, input, output);
  if (checked != ncclSuccess && depth) refused = checked;
  // in a group, only a wrong argument shows at once, and all else at the end
  if (checked != ncclSuccess) return depth && checked != ncclInvalidArgument ? ncclSuccess : checked;
  group.push_back({request, input, output, member, on});
  return depth ? ncclSuccess : run_group();
}

}  // namespace

// ---- NCCL's functions ---------------------------------------------------------------------------

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = kNcclVersion;
  return ncclSuccess;
}
EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclSystemError:
      return "unhandled system error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
  }
  return "unknown result code";
}
EXPORT const char* ncclGetLastError(ncclComm_t) { return last_error; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static std::atomic<int> serial{0};
  *id = {};
  snprintf(id->internal, sizeof id->internal, "/fakenccl-%d-%d-%lld", getpid(), serial++,
           static_cast<long long>(fake::now()));
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return join(made, size, id.internal, rank);
}
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank,
                                           ncclConfig_t*) {
  return join(made, size, id.internal, rank);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* made, int size, int rank, int,
                                             const ncclUniqueId* ids, ncclConfig_t*) {
  return join(made, size, ids[0].internal, rank);
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t* made, int size, const int* devices) {
  std::set<int> seen;
  auto clique = std::make_shared<int>();
  for (int rank = 0; rank < size; rank++) {
    int device = devices ? devices[rank] : rank;
    if (!seen.insert(device).second) {
      std::string reason = "Duplicate GPU detected: two ranks on GPU " + std::to_string(device);
      return failed(ncclInvalidUsage, reason);
    }
    made[rank] = new ncclComm{MemberRef(new Member{rank, size, device, clique, nullptr})};
  }
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommSplit(ncclComm_t communicator, int color, int key, ncclComm_t* made,
                                  ncclConfig_t*) {
  struct Choice {
    int color;
    int key;
    int rank;
  };
  Member& member = *communicator->member;
  Choice own{color, key, member.rank};
  std::vector<Choice> all{own};
  if (member.size > 1 && !member.world) {
    return failed(ncclInvalidUsage, "ncclCommSplit in one process is not implemented here");
  }
  if (member.world) {
    ncclResult_t result = share(member, &own, sizeof own, "ncclCommSplit", [&] {
      all.resize(member.size);
      for (int rank = 0; rank < member.size; rank++) {
        memcpy(&all[rank], member.world->ranks[rank].bytes, sizeof own);
      }
    });
    if (result != ncclSuccess) return result;
  }
  int rank = 0;
  int size = 0;
  for (const Choice& other : all) {
    if (other.color != color) continue;
    size++;
    if (std::pair(other.key, other.rank) < std::pair(key, member.rank)) rank++;
  }
  std::string name = "-" + std::to_string(member.splits++) + "-" + std::to_string(color);
  *made = nullptr;
  if (color == kNcclSplitNoColor) return ncclSuccess;
  return join(made, size, member.path + name, rank);
}
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t communicator) { return leave(communicator); }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t communicator) { return leave(communicator); }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* result) {
  *result = communicator->member->error;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(ncclComm_t communicator, int* size) {
  *size = communicator->member->size;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(ncclComm_t communicator, int* rank) {
  *rank = communicator->member->rank;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommRegister(ncclComm_t communicator, void*, size_t, void** handle) {
  *handle = communicator;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }

EXPORT ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() {
  if (depth == 0) return failed(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  return --depth ? ncclSuccess : run_group();
}

EXPORT ncclResult_t ncclAllReduce(const void* input, void* output, size_t count,
                                  ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                                  cudaStream_t stream) {
  return call({Verb::AllReduce, count, type, op}, input, output, communicator, stream);
}
EXPORT ncclResult_t ncclReduce(const void* input, void* output, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, int root, ncclComm_t communicator,
                               cudaStream_t stream) {
  return call({Verb::Reduce, count, type, op, root}, input, output, communicator, stream);
}
EXPORT ncclResult_t ncclBroadcast(const void* input, void* output, size_t count,
                                  ncclDataType_t type, int root, ncclComm_t communicator,
                                  cudaStream_t stream) {
  Request request{Verb::Broadcast, count, type, ncclSum, root};
  return call(request, input, output, communicator, stream);
}
EXPORT ncclResult_t ncclBcast(void* data, size_t count, ncclDataType_t type, int root,
                              ncclComm_t communicator, cudaStream_t stream) {
  Request request{Verb::Broadcast, count, type, ncclSum, root};
  return call(request, data, data, communicator, stream);
}
EXPORT ncclResult_t ncclAllGather(const void* input, void* output, size_t count,
                                  ncclDataType_t type, ncclComm_t communicator,
                                  cudaStream_t stream) {
  return call({Verb::AllGather, count, type}, input, output, communicator, stream);
}
EXPORT ncclResult_t ncclReduceScatter(const void* input, void* output, size_t count,
                                      ncclDataType_t type, ncclRedOp_t op, ncclComm_t communicator,
                                      cudaStream_t stream) {
  return call({Verb::ReduceScatter, count, type, op}, input, output, communicator, stream);
}
