"""The measuring loop: verify, build, warm up, run blocks of steps until the series says stop."""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dpbench import busy, clock, models, verify
from dpbench.devices import Device
from dpbench.engine.devices import open_devices
from dpbench.records import HOST, Case, Effort, Memory, Sample, Status, Trial, Verified
from dpbench.steady import Stopping
from dpbench.strategies import precision_of
from dpbench.worker.facts import blocked_pairs, of_model

BATCHES = 4
"""Distinct batches that the steps take turns with, so that none is special."""

SLOW = 10
"""A block that would take so many budgets is cut to single steps, and the warm-up to one."""
SLOW_STEPS = 3


class Unverified(RuntimeError):
    """A strategy's gradients are not the reference's; it must not be timed."""


def measure(case: Case, effort: Effort, strategy: ModuleType, rank: int | None = None) -> Trial:
    """Verify and time one case in this process; as a rank, its own share of it."""
    with _ready(case, effort, strategy, rank) as bench:
        _run([bench])
        trial = bench.trial(memory=_memory(bench.devices))
        if effort.trace:
            bench.trace(effort.trace if rank is None else f"{effort.trace[:-5]}-rank{rank}.json")
        return trial


def measure_together(cases: Sequence[Case], effort: Effort, load: Callable[[str], ModuleType]) -> list[Trial]:
    """Verify and time several cases in this process, their blocks in turn.

    What this process is (its memory layout, its place on the machine) and what goes on beside it, all share, so that
    their ratios are far steadier than those of separate processes. Their memory is not told apart. The first error of
    any case ends all.
    """
    with ExitStack() as stack:
        benches = [stack.enter_context(_ready(case, effort, load(case.strategy))) for case in cases]
        _run(benches)
        return [bench.trial() for bench in benches]


@contextmanager
def _ready(case: Case, effort: Effort, strategy: ModuleType, rank: int | None = None) -> Iterator[_Bench]:
    """Yield a case that is verified and built."""
    threads = getattr(strategy, "threads", lambda case: 1)
    torch.set_num_threads(threads(case))
    devices = _devices(case, strategy, rank)
    setup, at = {}, time.perf_counter()

    def lap(stage: str) -> None:
        nonlocal at
        setup[stage], at = time.perf_counter() - at, time.perf_counter()

    verified = _verify(case, strategy, devices, rank)
    lap("verify_s")
    about = of_model(case) if rank in (None, 0) else {}
    _forget(devices)
    model = models.load(case.model, case.size, case.seed)
    batches = [_pinned(model.batch(case.batch_size, case.seed + i), case) for i in range(BATCHES)]
    lap("build_s")
    listener = clock.choose(devices)
    with strategy.start(case, model, devices, listener.mark) as step:
        yield _Bench(case, effort, devices, step, batches, listener, verified, setup, about)


class _Bench:
    """One case on its bench: its step, the clock that listens, and the rule that ends its series."""

    def __init__(
        self, case: Case, effort: Effort, devices: Sequence[Device], step: Callable[[Any, Any], Any],
        batches: Sequence[tuple[Any, Any]], listener: clock.Clock, verified: Verified, setup: dict[str, float],
        about: dict[str, Any],
    ) -> None:  # fmt: skip
        self.case, self.devices = case, devices
        self._step, self._batches, self._listener = step, batches, listener
        self._observe = getattr(step, "observe", list)
        self._verified, self._setup, self._about = verified, setup, about
        self._effort, self._block_steps = effort, effort.block_steps
        self._stopping = Stopping(effort.budget_s, effort.min_steps, effort.max_steps, least_warmup=effort.warmup_steps)

    def first(self) -> None:
        """Take the first step; a case that is too slow for blocks gets single steps, and one of warm-up."""
        first_s = self._block(1)
        if _agreed(first_s * self._effort.block_steps > SLOW * self._effort.budget_s):
            self._block_steps, self._stopping.least_warmup = 1, 1
            self._stopping.min_steps = min(self._effort.min_steps, SLOW_STEPS)

    def block(self) -> None:
        """Take one block of steps, a shorter one if the most is near."""
        left = self._effort.max_steps + self._stopping.least_warmup - len(self._listener.steps())
        self._block(max(1, min(self._block_steps, left)))

    @property
    def finished(self) -> bool:
        """Tell whether the series, or that of another rank, is long enough."""
        return _agreed(self._stopping.finished())

    def _block(self, steps: int) -> float:
        """Take back-to-back steps; return the seconds of the last."""
        at = time.perf_counter()
        with self._listener.block():
            for i in range(steps):
                inputs, target = self._batches[i % len(self._batches)]
                with self._listener.step(warmup=False):
                    self._step(inputs, target)
                for span in self._observe():
                    self._listener.add(*span)
        # the clock's seconds, not the calls': on CUDA a call returns before its work is done
        for one in self._listener.steps()[-steps:]:
            self._stopping.add(one.seconds)
        self._setup["steps_s"] = self._setup.get("steps_s", 0.0) + time.perf_counter() - at
        return self._listener.steps()[-1].seconds

    def trial(self, memory: tuple[Memory, ...] = ()) -> Trial:
        """Return all that was seen; the steps before the series was steady are flagged."""
        warm = self._stopping.warmup
        steps = tuple(replace(step, warmup=i < warm) for i, step in enumerate(self._listener.steps()))
        samples = [*self._listener.samples(), *_profiled(self._step, self._batches[0], self.devices, self._listener)]
        return Trial(
            case=self.case, status=Status.OK, reason=self._stopping.reason or "agreed: another had measured enough",
            verified=self._verified, steps=steps, spans=self._listener.spans(), samples=tuple(samples), memory=memory,
            setup=self._setup, provenance=_torch_facts(self.case, self.devices[0]) | {"model": self._about},
        )  # fmt: skip

    def trace(self, path: str) -> None:
        """Write the profile of one more step, after timing."""
        _trace(self._step, self._batches[0], self.devices, path)


def _run(benches: Sequence[_Bench]) -> None:
    """Run blocks of every bench in turn, there and back again, until each has measured enough."""
    gc.collect()
    gc.freeze()  # what lives now need not be walked again between blocks
    gc.disable()  # a collection inside a step would be charged to whatever phase it hits
    try:
        for bench in benches:
            bench.first()
        turn = list(benches)
        while not all(bench.finished for bench in benches):
            for bench in turn:
                bench.block()
            turn.reverse()
            gc.collect()
    finally:
        gc.enable()


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


def _memory(devices: Sequence[Device]) -> tuple[Memory, ...]:
    """Return the peaks since `_forget`: per device where it can tell, and the host's resident set."""
    peaks = [Memory(d.index, peak, "allocator") for d in devices if (peak := d.memory()) is not None]
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


def _trace(step: Callable[[Any, Any], Any], batch: tuple[Any, Any], devices: Sequence[Device], path: str) -> None:
    """Leave a profile of one more step in a file; a trial is as good without, so what goes wrong is only logged."""
    try:
        busy.trace(lambda: step(*batch), devices, Path(path))
    except (RuntimeError, OSError, TypeError) as error:  # TypeError: a torch that cannot profile all threads
        print(f"no trace: {error}", file=sys.stderr)


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
        facts |= {"gpu": torch.cuda.get_device_name(device.torch_device), "no_peer_access": blocked_pairs(case)}
    return facts
