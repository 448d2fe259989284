// The log of operations: a line of JSON for each one booked on the virtual clock, each record
// of an event, and each wait of a stream for an event, in the order in which they were booked.
//
// FAKECUDA_LOG or `fakecuda_log` names a file; each process writes one of its own, NAME.PID. Times
// are nanoseconds of CLOCK_MONOTONIC, like those of Python's time.perf_counter_ns. A replayed graph
// writes its operations with the thread and the time of the replay; what a capture records is not
// written. `fakecuda_note` adds a line of the caller's, such as the beginning of a phase.
#include "oplog.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace fake {

// guarded by `mu`
static bool logging = false;
static std::string name;  // without the process
static FILE* file = nullptr;
static int owner = 0;

static const char* text_of(Kind kind) {
  switch (kind) {
    case Kind::Kernel:
      return "kernel";
    case Kind::Collective:
      return "collective";
    case Kind::CopyH2D:
    case Kind::CopyD2H:
    case Kind::CopyD2D:
    case Kind::CopyP2P:
    case Kind::CopyH2H:
      return "copy";
    case Kind::Memset:
      return "memset";
    case Kind::Host:
      return "host";
  }
  return "";
}

static void open_file() {
  if (owner == getpid() && file) return;
  if (file) fclose(file);  // a fork inherits it; nothing is buffered between two lines
  owner = getpid();
  std::string path = name + "." + std::to_string(owner);
  file = fopen(path.c_str(), "a");
  if (!file) {
    fprintf(stderr, "fakecuda: %s: ", path.c_str());
    perror("");
    _exit(71);
  }
  setvbuf(file, nullptr, _IOLBF, 1 << 12);  // a rank ends without flushing
}

static void write_line(const Stream* stream, const char* kind, const char* what, int64_t begin,
                  int64_t end, size_t bytes, int from, int to, uint32_t event) {
  open_file();
  fprintf(file,
          "{\"gpu\": %d, \"stream\": %u, \"kind\": \"%s\", \"name\": \"%s\", \"start_ns\": %lld, "
          "\"end_ns\": %lld, \"thread\": %d, \"current\": %d, \"host_ns\": %lld, \"bytes\": %zu, "
          "\"source\": %d, \"target\": %d, \"event\": %u}\n",
          stream->device, stream->id, kind, what, static_cast<long long>(begin),
          static_cast<long long>(end), static_cast<int>(gettid()), current_device(),
          static_cast<long long>(now()), bytes, from, to, event);
}

void log_operation(const Op& op, const Stream* stream, int64_t begin, int64_t end) {
  std::lock_guard lock(mu);
  if (!logging) return;
  write_line(stream, text_of(op.kind), op.name, begin, end, op.bytes, op.peer, op.target, 0);
}

void log_event(const char* kind, const Event* event, const Stream* stream) {
  std::lock_guard lock(mu);
  if (!logging) return;
  write_line(stream, kind, "", event->time, event->time, 0, event->device, -1, event->id);
}

static void log_to(const char* path) {
  std::lock_guard lock(mu);
  if (file && owner == getpid()) fclose(file);
  file = nullptr;
  name = path ? path : "";
  logging = !name.empty();
}

void log_from_setting() { log_to(getenv("FAKECUDA_LOG")); }

}  // namespace fake

// From now on, this process logs to PATH.PID; to nothing if the path is null.
EXPORT void fakecuda_log(const char* path) {
  fake::init();
  fake::log_to(path);
}

EXPORT void fakecuda_note(const char* text) {
  std::lock_guard lock(fake::mu);
  if (fake::logging) fake::write_line(fake::resolve(nullptr), "note", text, 0, 0, 0, -1, -1, 0);
}
