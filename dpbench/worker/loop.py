"""The measuring loop: verify, build, warm up, run blocks of steps until the series says stop."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dpbench import busy, clock, links, models, verify
from dpbench.devices import Device
from dpbench.engine.devices import open_devices
from dpbench.records import HOST, Case, Effort, Memory, Sample, Status, Trial, Verified
from dpbench.stats import Stopping
from dpbench.strategies import precision_of
from dpbench.worker import memory

BATCHES = 4
"""Distinct batches that the steps take turns with, so that none is special."""

SLOW = 10
"""A block that would take so many budgets is cut to single steps, and the warm-up to one."""
SLOW_STEPS = 3


class Unverified(RuntimeError):
    """A strategy's gradients are not the reference's; it must not be timed."""


def measure(case: Case, effort: Effort, strategy: ModuleType, rank: int | None = None) -> Trial:
    """Verify and time one case in this process; as a rank, its own share of it."""
    threads = getattr(strategy, "threads", lambda case: 1)
    torch.set_num_threads(threads(case))
    devices = _devices(case, strategy, rank)
    setup, at = {}, time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal at
        setup[stage], at = time.perf_counter() - at, time.perf_counter()

    verdict = _verify(case, strategy, devices, rank)
    lap("verify_s")
    _forget(devices)
    model = models.load(case.model, case.size, case.seed)
    batches = [_pinned(model.batch(case.batch_size, case.seed + i), case) for i in range(BATCHES)]
    lap("build_s")
    facts = _torch_facts(case, devices[0]) | {links.FACT: memory.shapes(model, batches[0])}
    with memory.bound(case):
        timed = _timed(case, effort, strategy, model, devices, batches)
        lap("steps_s")
        by_phase, absent = memory.by_phase(case, strategy, model, devices, batches[0])
        lap("memory_s")
    return replace(
        timed, verified=verdict, memory=(*timed.memory, *by_phase), setup=setup,
        provenance=facts | ({"no_memory_by_phase": absent} if absent else {}),
    )  # fmt: skip


def _timed(
    case: Case, effort: Effort, strategy: ModuleType, model: models.Model, devices: Sequence[Device],
    batches: Sequence[tuple[Any, Any]],
) -> Trial:  # fmt: skip
    """Return the steps and all that was seen beside them; what they held is free on return."""
    listener = clock.choose(devices)
    with strategy.start(case, model, devices, listener.mark) as step:
        reason = _run(step, batches, effort, listener)
        peaks = _memory(case, devices)
        samples = [*listener.samples(), *_profiled(step, batches[0], devices, listener)]
    return Trial(
        case=case, status=Status.OK, reason=reason, steps=listener.steps(), spans=listener.spans(),
        samples=tuple(samples), memory=peaks,
    )  # fmt: skip


def _devices(case: Case, strategy: ModuleType, rank: int | None) -> list[Device]:
    """Open the case's devices; a rank has just its own."""
    shared = getattr(strategy, "SHARED_STREAM", False)
    devices = open_devices(
        case.device_kind, case.devices, ids=case.device_ids, placement=case.placement, shared_stream=shared,
        own_processes=rank is not None,
    )  # fmt: skip
    return devices if rank is None else devices[rank : rank + 1]


def _verify(case: Case, strategy: ModuleType, devices: Sequence[Device], rank: int | None) -> Verified:
    """Return how the strategy compared; raise Unverified when it does not compute the same gradients."""
    compares_buffers = getattr(strategy, "compares_buffers", lambda case: True)
    model = models.load(case.model, case.size, case.seed)
    verdict = verify.check(
        strategy.start, case, model, devices, precision_of, buffers=compares_buffers(case) and rank in (None, 0)
    )
    if verdict.verified is Verified.NO:
        raise Unverified(f"not timed, because its gradients are wrong: {verdict}")
    return verdict.verified


def _run(
    step: Callable[[Any, Any], Any], batches: Sequence[tuple[Any, Any]], effort: Effort, listener: clock.Clock
) -> str:
    """Run warm-up and timed blocks; return why they ended."""
    observe = getattr(step, "observe", list)
    stopping = Stopping(effort.budget_s, effort.min_steps, effort.max_steps)

    def block(steps: int, *, warmup: bool) -> list[float]:
        with listener.block():
            for i in range(steps):
                inputs, target = batches[i % len(batches)]
                with listener.step(warmup=warmup):
                    step(inputs, target)
                for span in observe():
                    listener.add(*span)
        # the clock's seconds, not the calls': on CUDA a call returns before its work is done
        return [one.seconds for one in listener.steps()[-steps:]]

    gc.collect()
    gc.freeze()  # what lives now need not be walked again between blocks
    gc.disable()  # a collection inside a step would be charged to whatever phase it hits
    try:
        first_s = block(1, warmup=True)[0]
        slow = _agreed(first_s * effort.block_steps > SLOW * effort.budget_s)
        block_steps, left = 1 if slow else effort.block_steps, effort.max_steps
        if slow:
            stopping.min_steps = min(effort.min_steps, SLOW_STEPS)
        else:
            block(effort.warmup_steps - 1, warmup=True)
        while not _agreed(stopping.finished()):
            for seconds in block(min(block_steps, left), warmup=False):
                stopping.add(seconds)
                left -= 1
            gc.collect()
    finally:
        gc.enable()
    return stopping.reason or "agreed: another rank had measured enough"


def _agreed(finished: bool) -> bool:
    """Let all ranks stop when one of them would, so that none waits for the others."""
    if not dist.is_initialized():
        return finished
    flag = torch.tensor(int(finished))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _forget(devices: Sequence[Device]) -> None:
    """Drop what verification left behind, and its peaks."""
    gc.collect()
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


def _profiled(
    step: Callable[[Any, Any], Any], batch: tuple[Any, Any], devices: Sequence[Device], listener: clock.Clock
) -> list[Sample]:
    """Return GPUs' busy seconds of one more step, after timing; the host's clock has told CPU's already."""
    if not isinstance(listener, clock.CudaClock):
        return []
    try:
        return busy.profiled(lambda: step(*batch), devices)
    except RuntimeError:  # without permission to profile, the trial is as good but for this
        return []


def _pinned(batch: tuple[Any, Any], case: Case) -> tuple[Any, Any]:
    """Put a batch where a good DataLoader would: in pinned memory, if it goes to a GPU."""
    if case.device_kind != "cuda":
        return batch
    inputs, target = batch
    pinned = tuple(a.pin_memory() if isinstance(a, torch.Tensor) else a for a in models.positional(inputs))
    return pinned if isinstance(inputs, tuple) else pinned[0], target.pin_memory()


def _torch_facts(case: Case, device: Device) -> dict[str, Any]:
    """Return what of torch makes the numbers repeatable."""
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if case.device_kind == "cuda":
        facts |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        facts |= {"gpu": torch.cuda.get_device_name(device.torch_device)}
    return facts
