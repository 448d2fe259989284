"""The bench: one verified and built case, its clock, and blocks of its steps until the series says stop."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpbench.hardware.device import Device
from dpbench.measure import clocks, profiler
from dpbench.measure.stopping import Stopping
from dpbench.models import Model
from dpbench.records import Case, Effort, Memory, Sample, Status, Trial, Verified
from dpbench.strategies import Strategy

SLOW = 10
"""A block that would take so many budgets is cut to single steps, and the warm-up to one."""
SLOW_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is measured: a case that is verified and built, with the batches that its steps take turns with."""

    case: Case
    strategy: Strategy
    devices: Sequence[Device]
    model: Model
    batches: Sequence[tuple[Any, Any]]
    verified: Verified
    setup: Mapping[str, float]
    facts: Mapping[str, Any]


@contextmanager
def on_bench(subject: Subject, effort: Effort) -> Iterator[Bench]:
    """Start a subject's strategy under the clock that tells the truth for its devices."""
    listener = clocks.choose(subject.devices)
    with subject.strategy.start(subject.case, subject.model, subject.devices, listener.mark) as step:
        yield Bench(subject, effort, step, listener)


class Bench:
    """One case on its bench: its step, the clock that listens, and the rule that ends its series."""

    def __init__(
        self, subject: Subject, effort: Effort, step: Callable[[Any, Any], Any], listener: clocks.Clock
    ) -> None:
        self._subject, self._effort = subject, effort
        self._step, self._listener = step, listener
        self._observe = getattr(step, "observe", list)
        self._block_steps, self._steps_s = effort.block_steps, 0.0
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
        at, batches = time.perf_counter(), self._subject.batches
        with self._listener.block():
            for i in range(steps):
                inputs, target = batches[i % len(batches)]
                with self._listener.step(warmup=False):
                    self._step(inputs, target)
                for span in self._observe():
                    self._listener.add(*span)
        # the clock's seconds, not the calls': on CUDA a call returns before its work is done
        for one in self._listener.steps()[-steps:]:
            self._stopping.add(one.seconds)
        self._steps_s += time.perf_counter() - at
        return self._listener.steps()[-1].seconds

    def trial(self, memory: tuple[Memory, ...] = ()) -> Trial:
        """Return all that was seen; the steps before the series was steady are flagged."""
        of, warm = self._subject, self._stopping.warmup
        steps = tuple(replace(step, warmup=i < warm) for i, step in enumerate(self._listener.steps()))
        samples = [*self._listener.samples(), *_profiled(self._step, of.batches[0], of.devices, self._listener)]
        return Trial(
            case=of.case, status=Status.OK, reason=self._stopping.reason or "agreed: another had measured enough",
            verified=of.verified, steps=steps, spans=self._listener.spans(), samples=tuple(samples), memory=memory,
            setup={**of.setup, "steps_s": self._steps_s}, provenance=of.facts,
        )  # fmt: skip

    def trace(self, path: str) -> None:
        """Write the profile of one more step, after timing."""
        _trace(self._step, self._subject.batches[0], self._subject.devices, path)


def run(benches: Sequence[Bench]) -> None:
    """Run blocks of every bench in turn, there and back again, until each has measured enough."""
    gc.collect()
    gc.freeze()  # objects that live now need not be walked again between blocks
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
        gc.unfreeze()  # a frozen object in a reference cycle would keep its tensors for good


def _agreed(finished: bool) -> bool:
    """Let all ranks stop when one of them would, so that none waits for the others."""
    if not dist.is_initialized():
        return finished
    flag = torch.tensor(int(finished))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _profiled(
    step: Callable[[Any, Any], Any], batch: tuple[Any, Any], devices: Sequence[Device], listener: clocks.Clock
) -> list[Sample]:
    """Return GPUs' busy seconds of one more step, after timing; the host's clock has told CPU's already."""
    if not isinstance(listener, clocks.CudaClock):
        return []
    try:
        return profiler.profiled(lambda: step(*batch), devices)
    except RuntimeError:  # without permission to profile, the trial is as good but for this
        return []


def _trace(step: Callable[[Any, Any], Any], batch: tuple[Any, Any], devices: Sequence[Device], path: str) -> None:
    """Leave a profile of one more step in a file; a trial is as good without, so what goes wrong is only logged."""
    try:
        profiler.trace(lambda: step(*batch), devices, Path(path))
    except (RuntimeError, OSError, TypeError) as error:  # TypeError: a torch that cannot profile all threads
        print(f"no trace: {error}", file=sys.stderr)
