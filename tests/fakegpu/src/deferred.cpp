// Deferred mode: what operations do to memory happens at a synchronization, in a random order that
// streams and events allow. A missing wait then gives wrong numbers.
//
// Each stream has a queue. A task at its front may run once the flag that it waits for is set.
// Not faithful: effects do not overlap, and a whole operation is one effect.
#include "runtime.h"

#include <time.h>

#include <algorithm>
#include <random>

namespace fake {

static std::recursive_mutex executing;  // one thread at a time runs effects

void enqueue(Stream* stream, std::function<void()> effect) {
  if (!effect) return;
  if (!cfg.deferred) return effect();
  std::lock_guard lock(mu);
  stream->queue.push_back({.effect = std::move(effect), .done = nullptr, .wait = nullptr});
}

Flag mark(Stream* stream) {
  if (!cfg.deferred) return nullptr;
  std::lock_guard lock(mu);
  auto reached = std::make_shared<std::atomic<bool>>(false);
  stream->queue.push_back({.effect = nullptr, .done = reached, .wait = nullptr});
  return reached;
}

void wait_for(Stream* stream, Flag flag) {
  if (!flag || *flag) return;
  std::lock_guard lock(mu);
  stream->queue.push_back({.effect = nullptr, .done = nullptr, .wait = std::move(flag)});
}

static bool can_go_on(const Stream* stream) {
  if (stream->queue.empty()) return false;
  const Flag& wait = stream->queue.front().wait;
  return !wait || *wait;
}

// Takes the first task of a stream that can go on; false if there is none. The stream with the
// highest rank goes on until its rank, which is random, is drawn again: a stream may then run far
// ahead of the others, or stay far behind them, which single random choices make improbable.
static bool take(Task& task) {
  constexpr int tasks_per_rank = 16;
  static std::mt19937_64 choose(cfg.seed);
  std::lock_guard lock(mu);
  std::vector<Stream*> able;
  for (auto& device : devices)
    for (Stream* stream : device.streams)
      if (can_go_on(stream)) able.push_back(stream);
  if (able.empty()) return false;
  for (Stream* stream : able)
    if (!stream->rank) stream->rank = choose() | 1;
  Stream* next = *std::ranges::max_element(able, {}, &Stream::rank);
  if (choose() % tasks_per_rank == 0) next->rank = 0;
  task = std::move(next->queue.front());
  next->queue.pop_front();
  return true;
}

bool run_one() {
  std::lock_guard one(executing);
  Task task;
  if (!take(task)) return false;
  if (task.effect) task.effect();
  if (task.done) *task.done = true;
  return true;
}

// Runs effects until `reached`. Where no stream can go on, another thread or process has to act,
// as on a GPU.
template <class Condition>
static void run_until(Condition reached) {
  while (!reached()) {
    if (run_one()) continue;
    timespec pause{0, 50'000};
    nanosleep(&pause, nullptr);
  }
}

void drain(Stream* stream) {
  if (!cfg.deferred) return;
  run_until([stream] {
    std::lock_guard one(executing);
    std::lock_guard lock(mu);
    return stream->queue.empty();
  });
}

void drain_until(const Flag& flag) {
  if (flag) run_until([&flag] { return flag->load(); });
}

void drain_all() {
  while (cfg.deferred && run_one()) {
  }
}

}  // namespace fake
