"""Measuring loop: verify and build a case, warm up, and run blocks of steps until the series is long enough."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call

from dpbench import models
from dpbench.hardware import malloc
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.hardware.provenance import usable_cores
from dpbench.measure import verification
from dpbench.measure.failures import Unverified
from dpbench.measure.worker import memory
from dpbench.measure.worker.bench import PreparedCase, run, start_timer
from dpbench.models import Model, positional
from dpbench.records import HOST, Case, Effort, Memory, Trial, Verified
from dpbench.strategies import Strategy, precision_of

BATCHES = 4
"""The number of distinct batches that the steps use in turn, so that results do not depend on a single batch."""


def measure(case: Case, effort: Effort, strategy: Strategy, rank: int | None = None) -> Trial:
    """Verify and time one case in this process, and return its trial; with `rank`, only the part of that rank."""
    prepared = prepare(case, strategy, rank)
    with memory.bound(case):
        with start_timer(prepared, effort) as timer:
            run([timer])
            timed = timer.trial(_memory(case, prepared.devices))
            if effort.trace:
                timer.trace(effort.trace if rank is None else f"{effort.trace[:-5]}-rank{rank}.json")
        del timer  # release the step function and the clock before memory is measured
        return _with_memory(timed, prepared) if effort.memory_by_phase else timed


def measure_together(prepared_cases: Sequence[PreparedCase], effort: Effort) -> list[Trial]:
    """Time several cases in this process, which runs their blocks in turn; an error in any case ends all of them.

    All cases share the memory layout of the process, its cores and the load from other processes. Ratios between cases
    therefore vary much less than if each case had a separate process. Memory is not measured, because it cannot be
    separated by case.
    """
    with ExitStack() as stack:
        timers = [stack.enter_context(start_timer(prepared, effort)) for prepared in prepared_cases]
        run(timers)
        return [timer.trial() for timer in timers]


def _with_memory(timed: Trial, prepared: PreparedCase) -> Trial:
    """Return the trial with memory peaks by phase from two additional steps, or with the reason for their absence."""
    at = time.perf_counter()
    by_phase, absent = memory.by_phase(
        prepared.case, prepared.strategy, prepared.model, prepared.devices, prepared.batches[0]
    )
    return replace(
        timed, memory=(*timed.memory, *by_phase), setup={**timed.setup, "memory_s": time.perf_counter() - at},
        provenance={**timed.provenance, **({"no_memory_by_phase": absent} if absent else {})},
    )  # fmt: skip


def prepare(case: Case, strategy: Strategy, rank: int | None = None) -> PreparedCase:
    """Verify and build a case for timing. Raises Unverified if its gradients are wrong."""
    threads = usable_cores() if strategy.traits.all_cores else 1
    torch.set_num_threads(threads)
    devices = _devices(case, strategy, rank)
    if threads == 1:  # a device with all cores must not be pinned to one of them
        devices[0].settle()
    at = [time.perf_counter()]
    verified = _verify(case, strategy, devices, rank)
    at.append(time.perf_counter())
    _forget(devices)
    model = models.load(case.model, case.size, case.seed)
    batches = [_pinned(model.batch(case.batch_size, case.seed + i), case) for i in range(BATCHES)]
    at.append(time.perf_counter())
    facts = torch_facts(case, devices[0]) | ({"model": of_model(model, batches[0])} if rank in (None, 0) else {})
    return PreparedCase(
        case=case, strategy=strategy, devices=devices, model=model, batches=batches, verified=verified, facts=facts,
        setup={"verify_s": at[1] - at[0], "build_s": at[2] - at[1]},
    )  # fmt: skip


def _devices(case: Case, strategy: Strategy, rank: int | None) -> list[Device]:
    """Return the opened devices of the case; for a rank, only its device."""
    devices = open_devices(
        case.device_kind, case.devices, ids=case.device_ids, placement=case.placement,
        shared_stream=strategy.traits.shared_stream, own_processes=rank is not None,
    )  # fmt: skip
    return devices if rank is None else devices[rank : rank + 1]


def _verify(case: Case, strategy: Strategy, devices: Sequence[Device], rank: int | None) -> Verified:
    """Return the result of verification. Raises Unverified if the gradients differ from the reference's."""
    model = models.load(case.model, case.size, case.seed)
    verdict = verification.check(
        strategy.start,
        case,
        model,
        devices,
        precision_of,
        buffers=strategy.compares_buffers(case) and rank in (None, 0),
    )
    if verdict.verified is Verified.NO:
        raise Unverified(f"the case was not timed, because its gradients are wrong: {verdict}")
    return verdict.verified


def _forget(devices: Sequence[Device]) -> None:
    """Release the memory of verification and reset all peaks."""
    gc.collect()
    malloc.release()
    for device in devices:
        device.reset_memory()
    with suppress(OSError):  # on Linux, writing 5 resets the peak of the resident set
        Path("/proc/self/clear_refs").write_text("5")


def _memory(case: Case, devices: Sequence[Device]) -> tuple[Memory, ...]:
    """Return the peaks since `_forget`: of each device that reports them, and of the host's resident set."""
    source = "ledger" if case.device_kind == "emulated" else "allocator"
    peaks = [Memory(d.index, peak, source, kind=kind) for d in devices for kind, peak in d.take_peaks().items()]
    return (*peaks, Memory(HOST, _resident_peak(), "rss"))


def _resident_peak() -> int:
    """Return the peak of this process's resident set in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _pinned(batch: tuple[Any, Any], case: Case) -> tuple[Any, Any]:
    """Return the batch as an efficient DataLoader provides it: in pinned memory if its target is a GPU."""
    if case.device_kind != "cuda":
        return batch
    inputs, target = batch
    pinned = tuple(a.pin_memory() if isinstance(a, torch.Tensor) else a for a in models.positional(inputs))
    return pinned if isinstance(inputs, tuple) else pinned[0], target.pin_memory()


def of_model(model: Model, batch: tuple[Any, Any]) -> dict[str, float]:
    """Return counts and bytes of modules, parameters and buffers, and bytes of inputs, target and output per sample.

    A tensor that several modules share counts once, because replication copies it once. The output's bytes come from a
    forward pass of two samples, and are left out if this pass fails.
    """
    parameters, buffers = list(model.module.parameters()), list(model.module.buffers())
    inputs, target = positional(batch[0]), batch[1]
    samples = len(target)
    found = {
        "modules": sum(1 for _ in model.module.modules()),
        "buffer_tensors": len(buffers),
        "parameter_tensors": len(parameters),
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "trainable_bytes": sum(p.nbytes for p in parameters if p.requires_grad),
        "buffer_bytes": sum(b.nbytes for b in buffers),
        "input_bytes": sum(a.nbytes for a in inputs if isinstance(a, torch.Tensor)) / samples,
        "target_bytes": target.nbytes / samples,
    }
    few = slice(0, 2)  # BatchNorm refuses a single sample
    arguments = tuple(a[few] if isinstance(a, torch.Tensor) else a for a in inputs)
    statistics = {name: buffer.clone() for name, buffer in model.module.named_buffers()}  # forward changes buffers
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            output = functional_call(model.module, statistics, arguments)
        found["output_bytes"] = output.nbytes / len(target[few])
    except Exception:  # a model may raise any error: leave the unknown fact out
        return found
    return found


def torch_facts(case: Case, device: Device) -> dict[str, Any]:
    """Return torch's version and settings, which are needed to reproduce the numbers."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if case.device_kind == "cuda":
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts |= {"gpu": torch.cuda.get_device_name(device.torch_device), "no_peer_access": blocked_pairs(case)}
    return facts


def blocked_pairs(case: Case) -> list[list[int]] | None:
    """Return the pairs of GPUs without peer access, by CUDA ordinal; None unless several GPUs are used."""
    if case.device_kind != "cuda" or case.placement != "spread" or case.devices == 1:
        return None
    ids = case.device_ids[: case.devices] or tuple(range(case.devices))
    reaches = torch.cuda.can_device_access_peer
    return [[a, b] for i, a in enumerate(ids) for b in ids[i + 1 :] if not (reaches(a, b) and reaches(b, a))]
