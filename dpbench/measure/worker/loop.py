"""The measuring loop: verify, build, warm up, run blocks of steps until the series says stop."""

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

from dpbench import models
from dpbench.hardware import malloc
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.hardware.provenance import usable_cores
from dpbench.measure import verification
from dpbench.measure.failures import Unverified
from dpbench.measure.worker import memory
from dpbench.measure.worker.bench import Subject, on_bench, run
from dpbench.measure.worker.facts import of_model, torch_facts
from dpbench.records import HOST, Case, Effort, Memory, Trial, Verified
from dpbench.strategies import Strategy, precision_of

BATCHES = 4
"""Distinct batches that the steps take turns with, so that none is special."""


def measure(case: Case, effort: Effort, strategy: Strategy, rank: int | None = None) -> Trial:
    """Verify and time one case in this process; as a rank, its own share of it."""
    subject = prepare(case, strategy, rank)
    with memory.bound(case):
        with on_bench(subject, effort) as bench:
            run([bench])
            timed = bench.trial(_memory(case, subject.devices))
            if effort.trace:
                bench.trace(effort.trace if rank is None else f"{effort.trace[:-5]}-rank{rank}.json")
        del bench  # with all that it holds
        return _with_memory(timed, subject) if effort.memory_by_phase else timed


def measure_together(subjects: Sequence[Subject], effort: Effort) -> list[Trial]:
    """Time several cases in this process, their blocks in turn; the first error of any ends all.

    What this process is (its memory layout, its place on the machine) and what goes on beside it, all share, so that
    their ratios are far steadier than those of separate processes. Their memory is not told apart.
    """
    with ExitStack() as stack:
        benches = [stack.enter_context(on_bench(subject, effort)) for subject in subjects]
        run(benches)
        return [bench.trial() for bench in benches]


def _with_memory(timed: Trial, subject: Subject) -> Trial:
    """Add the memory by phase of two more steps, or why there is none."""
    at = time.perf_counter()
    by_phase, absent = memory.by_phase(
        subject.case, subject.strategy, subject.model, subject.devices, subject.batches[0]
    )
    return replace(
        timed, memory=(*timed.memory, *by_phase), setup={**timed.setup, "memory_s": time.perf_counter() - at},
        provenance={**timed.provenance, **({"no_memory_by_phase": absent} if absent else {})},
    )  # fmt: skip


def prepare(case: Case, strategy: Strategy, rank: int | None = None) -> Subject:
    """Return a case that is verified and built."""
    threads = usable_cores() if strategy.traits.all_cores else 1
    torch.set_num_threads(threads)
    devices = _devices(case, strategy, rank)
    if threads == 1:  # and not where one device is all cores
        devices[0].settle()
    at = [time.perf_counter()]
    verified = _verify(case, strategy, devices, rank)
    at.append(time.perf_counter())
    _forget(devices)
    model = models.load(case.model, case.size, case.seed)
    batches = [_pinned(model.batch(case.batch_size, case.seed + i), case) for i in range(BATCHES)]
    at.append(time.perf_counter())
    facts = torch_facts(case, devices[0]) | ({"model": of_model(model, batches[0])} if rank in (None, 0) else {})
    return Subject(
        case=case, strategy=strategy, devices=devices, model=model, batches=batches, verified=verified, facts=facts,
        setup={"verify_s": at[1] - at[0], "build_s": at[2] - at[1]},
    )  # fmt: skip


def _devices(case: Case, strategy: Strategy, rank: int | None) -> list[Device]:
    """Open the case's devices; a rank has just its own."""
    devices = open_devices(
        case.device_kind, case.devices, ids=case.device_ids, placement=case.placement,
        shared_stream=strategy.traits.shared_stream, own_processes=rank is not None,
    )  # fmt: skip
    return devices if rank is None else devices[rank : rank + 1]


def _verify(case: Case, strategy: Strategy, devices: Sequence[Device], rank: int | None) -> Verified:
    """Return how the strategy compared; raise Unverified when it does not compute the same gradients."""
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
        raise Unverified(f"not timed, because its gradients are wrong: {verdict}")
    return verdict.verified


def _forget(devices: Sequence[Device]) -> None:
    """Drop what verification left behind, and its peaks."""
    gc.collect()
    malloc.release()
    for device in devices:
        device.reset_memory()
    with suppress(OSError):  # Linux: 5 resets the peak of the resident set
        Path("/proc/self/clear_refs").write_text("5")


def _memory(case: Case, devices: Sequence[Device]) -> tuple[Memory, ...]:
    """Return the peaks since `_forget`: per device where it can tell, and the host's resident set."""
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
    """Put a batch where a good DataLoader would: in pinned memory, if it goes to a GPU."""
    if case.device_kind != "cuda":
        return batch
    inputs, target = batch
    pinned = tuple(a.pin_memory() if isinstance(a, torch.Tensor) else a for a in models.positional(inputs))
    return pinned if isinstance(inputs, tuple) else pinned[0], target.pin_memory()
