// Effects: computations on the host that take their turn on a GPU's stream, like its kernels.
//
// An effect runs at once, or in deferred mode when a synchronization needs it, or at each replay of
// the graph that captured it, and in any thread. It starts in the state of a fresh thread, without
// gradients, modes, autocast or profiler. An exception names the operator; it leaves the call of
// CUDA during which the effect runs: the launch, or in deferred mode the synchronization.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <functional>
#include <string>

namespace fakegpu {

using Effect = std::function<void()>;

// Takes the calling thread's state as that of a fresh thread.
void remember_fresh_state();

// Runs a computation as an effect runs, but now.
void run_effect(const std::string& name, const Effect& effect);

// Queues the effect of the operator `name` on the GPU's current stream.
void queue(c10::Device gpu, const std::string& name, Effect effect);

// Calls `launch`, whose first kernel of this thread has the effect. Without a kernel there is none.
void with_attached(const std::string& name, Effect effect, c10::function_ref<void()> launch);

// Waits for the GPU's current stream.
void synchronize(c10::Device gpu);

// Whether a graph is captured on the GPU's current stream.
bool capturing(c10::Device gpu);

// Whether an effect queued now may run after the call that queues it.
bool runs_later(c10::Device gpu);

}  // namespace fakegpu
