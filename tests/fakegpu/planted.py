"""Plant faults that only GPUs can show, besides calls that are left out; find them on fake GPUs.

    python -m tests.fakegpu.planted [NAME...]

`tests/faults.py` plants them and runs their tests. `tests/gpu/test_deferred_needed.py` leaves out
each call that orders streams or keeps memory: run it in deferred mode; pytest's -k chooses calls.
"""

from __future__ import annotations

import sys

from tests.faults import Fault, main

DEFERRED = ("FAKECUDA_DEFERRED=1", "FAKECUDA_SEED=1")
CLOCK_ALONE = ("FAKECUDA_NUMERICS=0", "FAKECUDA_DATA=0")
ACCOUNTS = "tests/gpu/test_accounts.py::"
OWN_GPU = "tests/gpu/test_own_gpu.py::"
CALLER = "tests/gpu/test_deferred.py::test_a_step_follows_the_callers_streams"

FAULTS = (
    Fault(
        "guard-stream",
        "a worker's thread uses the stream of the thread that started the work",
        "return torch.cuda.stream(self.stream)",
        "return torch.cuda.device(self.ordinal)",
        (f"{CALLER}[reference-mlp-[0, 0, 0]]",),
        settings=DEFERRED,
    ),
    Fault(
        "reduce-streams",
        "gradients are added on the streams to which their memory belongs",
        "[device.guard() for device in reversed(devices)]",
        "[]",
        ("tests/gpu/test_deferred_needed.py::test_a_run_is_right_in_every_order",),
        settings=DEFERRED,
    ),
    Fault(
        "event-stream",
        "a mark's event is recorded on the stream of its replica",
        "event.record(self.stream)",
        "event.record()",
        ("tests/gpu/test_deferred.py::test_a_mark_times_the_work_of_its_replica",),
        settings=DEFERRED,
    ),
    Fault(
        "background-copies",
        "inputs are copied from the host in a background stream",
        "torch.cuda.stream(self._background)",
        "torch.cuda.stream(self.stream)",
        ("tests/gpu/test_deferred.py::test_a_copy_from_the_host_is_made_in_a_background_stream",),
        settings=DEFERRED,
    ),
    Fault(
        "background-waits",
        "a copy from the host does not wait for the work of the replica",
        "self._background = self._background or torch.cuda.Stream(self.ordinal)",
        "self._background = self._background or torch.cuda.Stream(self.ordinal)\n"
        "self._background.wait_stream(self.stream)",
        (
            "tests/gpu/test_one_gpu.py::test_a_copy_from_the_host_does_not_wait_for_the_replicas_work",
        ),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "sparse-borrow",
        "a sparse tensor keeps the memory of its parts while another stream reads them",
        "_stored(tensor)",
        "(tensor,)",
        ("tests/gpu/test_engine.py::test_sparse_gradients_are_reduced",),
        where="hardware.devices.cuda.CudaDevice.borrow",
    ),
    Fault(
        "verbs-streams",
        "what a verb returns is ready for the caller's stream",
        "return resolve(given, own_streams=own_streams)",
        "return resolve(given, own_streams=True)",
        (
            "tests/gpu/test_deferred_verbs.py::test_pieces_are_ready",
            "tests/gpu/test_deferred_verbs.py::"
            "test_outputs_and_gradients_of_parallel_apply_are_ready",
        ),
        settings=DEFERRED,
    ),
    Fault(
        "launched-by-a-replica",
        "no collective of all GPUs is launched while replicas work",
        "exchange.reduce()",
        "run_on_devices(lambda i: None if i else exchange.reduce(), self._devices, self.workers)",
        ("tests/gpu/test_engine.py::test_no_collective_is_launched_while_replicas_work",),
    ),
    Fault(
        "inputs-aside",
        "the baseline copies its inputs on the stream that computes",
        "tensor.to(device.torch_device, non_blocking=True, copy=True)",
        "device.put(tensor)",
        (
            "tests/gpu/test_engine.py::"
            "test_only_data_parallel_copies_its_inputs_beside_the_stream_that_computes",
        ),
        where="strategies.__init__.put_all",
    ),
    Fault(
        "captured-events",
        "no event is recorded while a CUDA graph is captured",
        "{} if capturing() else self._clock.events(devices)",
        "self._clock.events(devices)",
        (
            "tests/observe/test_watching_gpu.py::"
            "test_a_captured_step_is_timed_by_its_replays_from_outside",
        ),
    ),
    Fault(
        "link-stream",
        "a copy between two GPUs is timed on the stream of its source",
        "copy_times(source, here, there, buffer)",
        "copy_times(target, here, there, buffer)",
        (
            "tests/measure/test_gpu_state.py::"
            "test_a_copy_between_gpus_is_timed_on_the_stream_of_its_source",
        ),
    ),
    Fault(
        "cold-gpus",
        "GPUs are heated before their steps are timed",
        "heat(self._prepared.devices, rest_s)",
        "0.0",
        (
            "tests/measure/test_gpu_state.py::"
            "test_gpus_are_heated_for_the_time_that_the_warm_up_does_not_last",
        ),
    ),
    # -- NCCL
    Fault(
        "nccl-other-gpu",
        "a collective runs on the streams of its GPUs",
        "nccl.all_reduce(tensors, streams=self._streams)",
        "nccl.all_reduce(tensors, streams=[*self._streams[1:], self._streams[0]])",
        (f"{ACCOUNTS}test_a_collective_runs_on_the_gpu_of_its_rank[dp-allreduce]",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "nccl-other-gpu-deferred",
        "a collective runs on the streams of its GPUs, also where effects are deferred",
        "nccl.all_gather(self._parts(tensors), tensors, streams=self._streams)",
        "nccl.all_gather(self._parts(tensors), tensors, streams=self._streams[::-1])",
        (f"{OWN_GPU}test_collectives_run_on_streams_of_their_gpus_after_the_work_before_them",),
        settings=DEFERRED,
    ),
    # -- spans
    Fault(
        "reduce-wait",
        "the phase reduce ends when the collectives have ended",
        "with marked(self._mark, phase, self._indices), torch.no_grad():\n"
        "    for i in range(len(self._devices)):\n"
        "        self._collectives.follow(i)\n"
        "    for tensors in zip(*buffers, strict=True):\n"
        "        run(list(tensors))\n"
        "    for i in range(len(self._devices)):\n"
        "        self._collectives.lead(i)",
        "with marked(self._mark, phase, self._indices), torch.no_grad():\n"
        "    for i in range(len(self._devices)):\n"
        "        self._collectives.follow(i)\n"
        "    for tensors in zip(*buffers, strict=True):\n"
        "        run(list(tensors))\n"
        "for i in range(len(self._devices)):\n"
        "    self._collectives.lead(i)",
        (f"{ACCOUNTS}test_a_collective_ends_within_its_phase[dp-allreduce]",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "scatter-wait",
        "the phase scatter ends when the copy has ended",
        "with marked(mark, Phase.SCATTER, device.at_work(sources)):\n"
        "    pieces.append(device.put(chunk))",
        "with marked(mark, Phase.SCATTER, device.at_work(sources)):\n"
        "    pass\n"
        "pieces.append(device.put(chunk))",
        (f"{ACCOUNTS}test_every_operation_is_launched_in_a_phase[dp-reference]",),
        settings=CLOCK_ALONE,
    ),
    # -- profiles
    Fault(
        "profile-last",
        "a kernel of the profile is credited to the replica on its GPU",
        "{device.torch_device.index: device.index for device in reversed(devices)}",
        "{device.torch_device.index: devices[-1].index for device in reversed(devices)}",
        (f"{OWN_GPU}test_a_profile_credits_every_kernel_to_the_gpu_that_ran_it",),
        settings=CLOCK_ALONE,
    ),
    # -- memory
    Fault(
        "peak-of-current",
        "a peak is that of the device's GPU",
        "torch.cuda.memory_stats(self.ordinal)",
        "torch.cuda.memory_stats()",
        (f"{OWN_GPU}test_a_peak_is_that_of_its_gpu_since_the_last_one",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "peak-not-reset",
        "a peak is that since the last one was taken",
        "torch.cuda.reset_peak_memory_stats(self.ordinal)",
        "None",
        (f"{OWN_GPU}test_a_peak_is_that_of_its_gpu_since_the_last_one",),
        where="hardware.devices.cuda.CudaDevice.take_peaks",
        settings=CLOCK_ALONE,
    ),
    Fault(
        "reset-of-current",
        "a reset forgets the peaks of the device's GPU",
        "torch.cuda.reset_peak_memory_stats(self.ordinal)",
        "torch.cuda.reset_peak_memory_stats()",
        (f"{OWN_GPU}test_a_reset_empties_the_cache_and_forgets_the_peaks_of_its_gpu",),
        where="hardware.devices.cuda.CudaDevice.reset_memory",
        settings=CLOCK_ALONE,
    ),
    # -- the current GPU
    Fault(
        "synchronize-current",
        "a device waits for its own GPU",
        "torch.cuda.synchronize(self.ordinal)",
        "torch.cuda.synchronize()",
        (f"{OWN_GPU}test_a_device_waits_until_its_gpu_is_idle",),
        where="hardware.devices.cuda.CudaDevice.synchronize",
        settings=CLOCK_ALONE,
    ),
    Fault(
        "heat-current",
        "every GPU is heated, and not the current one",
        "with device.guard():\n    torch.cuda._sleep(HEATING_CYCLES)",
        "torch.cuda._sleep(HEATING_CYCLES)",
        (f"{OWN_GPU}test_every_gpu_is_heated",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "nccl-streams-of-one-gpu",
        "each GPU has a stream for its collectives",
        "[torch.cuda.Stream(ordinal) for ordinal in self._ordinals]",
        "[torch.cuda.Stream(self._ordinals[0]) for ordinal in self._ordinals]",
        (f"{ACCOUNTS}test_a_collective_runs_on_the_gpu_of_its_rank[dp-allreduce]",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "nccl-reversed",
        "a reduce-scatter runs on the streams of its GPUs",
        "nccl.reduce_scatter(tensors, self._parts(tensors), streams=self._streams)",
        "nccl.reduce_scatter(tensors, self._parts(tensors), streams=self._streams[::-1])",
        (f"{ACCOUNTS}test_a_collective_runs_on_the_gpu_of_its_rank[dp-sharded]",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "follow-current",
        "a collective waits for the work of each of its GPUs",
        "self._streams[i].wait_stream(torch.cuda.current_stream(self._ordinals[i]))",
        "self._streams[i].wait_stream(torch.cuda.current_stream())",
        (f"{OWN_GPU}test_collectives_run_on_streams_of_their_gpus_after_the_work_before_them",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "gather-closed",
        "the phase gather lasts until the outputs are joined",
        "with marked(mark, Phase.GATHER, destination.at_work(sources)):\n"
        "    return _gather(outputs, destination, sources, dim, ())",
        "with marked(mark, Phase.GATHER, destination.at_work(sources)):\n"
        "    pass\n"
        "return _gather(outputs, destination, sources, dim, ())",
        (f"{ACCOUNTS}test_every_operation_is_launched_in_a_phase[dp-cached]",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "gather-of-the-root",
        "the phase gather is on the lane of each GPU that copies",
        "marked(mark, Phase.GATHER, destination.at_work(sources))",
        "mark(Phase.GATHER, destination.index)",
        (
            f"{ACCOUNTS}"
            "test_a_transfer_of_a_phase_that_moves_data_is_on_the_lanes_of_both_gpus[dp-reference]",
        ),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "backward-of-the-root",
        "a replica's own backward is credited to it",
        "with self._mark(Phase.BACKWARD, device.index):\n    scaled.backward()",
        "with self._mark(Phase.BACKWARD, self._devices[0].index):\n    scaled.backward()",
        (f"{ACCOUNTS}test_a_kernel_runs_on_the_gpu_of_its_phase[dp-local]",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "profile-of-another",
        "an activity of the profile has the device of its GPU",
        "device = first[one.device_index]",
        "device = [*first.values()][-1]",
        (f"{OWN_GPU}test_a_profile_credits_every_kernel_to_the_gpu_that_ran_it",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "peak-before-the-step",
        "the peaks of a step by phase do not begin before it",
        "for device in self._devices:\n    device.take_peaks()",
        "pass",
        (f"{OWN_GPU}test_peaks_by_phase_are_those_of_each_gpu",),
        where="measure.worker.memory.Peaks.step",
        settings=CLOCK_ALONE,
    ),
    Fault(
        "stream-of-current",
        "a device without a stream of its own uses the current one of its GPU",
        "self._own or self._held or current_stream(self.ordinal)",
        "self._own or self._held or current_stream(torch.cuda.current_device())",
        (f"{OWN_GPU}test_a_guard_makes_the_gpu_and_stream_of_its_device_current",),
        settings=CLOCK_ALONE,
    ),
    Fault(
        "rank-on-gpu-0",
        "the GPU of a rank is the current one of its process",
        "torch.accelerator.set_device_index(device.torch_device)",
        "pass",
        (f"{ACCOUNTS}test_the_gpu_of_a_rank_is_the_current_one[ddp]",),
        where="strategies._ranks._make_current",
        settings=CLOCK_ALONE,
    ),
)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], FAULTS))
