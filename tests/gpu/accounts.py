"""Recorded spans beside the fake GPUs' log of operations: which operations belong to which mark.

`steps_of` trains a few steps under a `CudaClock`, whose marks leave notes in the log. `Account`
reads from the log alone when each mark and each step began and ended, and which operations were
launched in it. dpbench's spans and ledger must agree with it.

All GPUs are kept busy until the host has launched all steps, so that no time in the log depends on
the host's speed: `Account` raises `TooSlow` if the host took longer.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from dpbench import models
from dpbench.engine.fast.replica_weights import ReplicaWeights
from dpbench.hardware.device import Device
from dpbench.hardware.devices import open_devices
from dpbench.measure import ranks
from dpbench.measure.clocks import CudaClock
from dpbench.records import HOST, Case, Phase, Span, Step, no_mark, registry
from dpbench.records.activity import Interval, difference, union
from dpbench.records.ledger import phases
from tests.fakegpu import oplog
from tests.fakegpu.oplog import NOTE, RECORD, WAIT, Line

STEPS = 3
ROWS = 8
BUSY = "busy until all steps are launched"
FLOPS_PER_S = 20e12
"""The rate of a fake GPU's arithmetic."""
COPIED_BYTES = 1 << 28
COPY_S = 0.0224
"""A fake GPU's seconds to copy them from the host."""
WARM_UP = 12
"""DistributedDataParallel's logger waits for the GPU in the first ten steps."""


class TooSlow(Exception):
    """The host was still launching steps when a GPU began to work on them."""


@dataclass(frozen=True)
class Recorded:
    """What dpbench recorded, and the log of the same steps; the first step keeps the GPUs busy."""

    log: list[Line]
    spans: list[Span]
    steps: list[Step]
    unattributed_s: list[float]
    """By step, from the ledger."""


def steps_of(case: Case, devices: Sequence[Device], file: Path, busy_s: float) -> Recorded:
    """Train on `devices`, which are distinct GPUs; they are busy for `busy_s` before."""
    clock = CudaClock(devices, now=_now)
    marks = _Marks(clock)
    model = models.load(case.model, "small", 0)
    inputs, target = (tensor.pin_memory() for tensor in model.batch(case.batch_size, 0))
    given = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    runner: Any = registry.strategy(case.strategy)
    # without numbers, torch.equal says that no two tensors are equal
    alike = mock.patch.object(ReplicaWeights, "stale", return_value=[])
    with alike, runner.start(case, model, devices, marks.mark) as step:
        for _ in range(WARM_UP):
            step(inputs, target)
        kept = {device.index: given.to(device.torch_device) for device in devices}
        aside = {device.index: torch.cuda.Stream(device.torch_device) for device in devices}
        with oplog.logging(file) as path:
            marks.noted = True
            with clock.block():
                oplog.note("block")
                with clock.step(warmup=False):
                    for device in devices:
                        with device.guard():
                            stream = torch.cuda.current_stream().cuda_stream
                            oplog.submit(stream, BUSY, flops=busy_s * FLOPS_PER_S)
                        # copies from the host wait for these, and then for nothing else
                        with torch.cuda.stream(aside[device.index]):
                            for _ in range(int(busy_s / COPY_S) + 2):
                                kept[device.index].copy_(given, non_blocking=True)
                    oplog.note("step")
                for _ in range(STEPS):
                    with clock.step(warmup=False):
                        step(inputs, target)
                        oplog.note("step")
                oplog.note("end")
            marks.noted = False
    spans, steps = list(clock.spans()), list(clock.steps())
    of_step = [[span for span in spans if span.step == n] for n in range(len(steps))]
    parts = [phases(one, own) for one, own in zip(steps, of_step, strict=True)]
    return Recorded(oplog.read(path), spans, steps, [one["unattributed"] for one in parts])


def of_ranks(strategy: str, folder: Path, busy_s: float) -> None:
    """Train in a process per rank, and print the path of each rank's pickled `Recorded`.

    The calling process must not have initialised CUDA.
    """
    case = Case(model="mlp", strategy=strategy, devices=2, batch_size=2 * ROWS, device_kind="cuda")

    def entry(rank: int) -> str:
        device = open_devices("cuda", case.devices)[rank]
        recorded = steps_of(case, [device], folder / f"log-{rank}", busy_s)
        kept = folder / f"recorded-{rank}"
        kept.write_bytes(pickle.dumps(recorded))
        return str(kept)

    backend = registry.strategy(case.strategy).backend(case)
    print(*ranks.run(entry, case.devices, folder, backend), sep="\n")


def _now() -> float:
    """Return the host's time, and leave a note of it."""
    seconds = time.perf_counter()
    oplog.note(f"now {seconds!r}")
    return seconds


class _Marks:
    """Marks that the clock records, with notes of them in the log; at first, they do nothing."""

    def __init__(self, clock: CudaClock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self.noted = False

    def mark(self, phase: Phase, device: int) -> AbstractContextManager[Any]:
        if not self.noted:
            return no_mark(phase, device)
        return self._noted(phase, device)

    @contextmanager
    def _noted(self, phase: Phase, device: int) -> Iterator[None]:
        number = next(self._numbers)
        with self._clock.mark(phase, device):
            oplog.note(f"open {number} {phase.value} {device}")
            try:
                yield
            finally:
                oplog.note(f"close {number}")


@dataclass(frozen=True)
class Marked:
    """One mark in the log: where it begins and ends there, and the records of its two events."""

    step: int
    phase: Phase
    device: int
    opened: int
    closed: int
    thread: int
    begin: Line
    end: Line

    def covers(self, operation: Line) -> bool:
        """Return whether an operation ran within the mark's two events."""
        return self.begin.end_ns <= operation.start_ns and operation.end_ns <= self.end.end_ns


@dataclass(frozen=True)
class Launched:
    """An operation, and the marks in which it was launched: none if outside all of them."""

    step: int
    line: Line
    marks: tuple[Marked, ...]

    @property
    def seconds(self) -> float:
        return (self.line.end_ns - self.line.start_ns) / 1e9


At = Callable[[Line], float]
"""A function from the record of an event to its time in nanoseconds."""


def in_log(record: Line) -> float:
    """Return the time of an event on the fake GPUs' clock, in nanoseconds."""
    return record.end_ns


class Account:
    """The steps, marks and operations of a log."""

    def __init__(self, log: Sequence[Line], devices: int) -> None:
        self._log = log
        self._devices = devices
        notes = [(n, line) for n, line in enumerate(log) if line.kind == NOTE]
        self._block = next(n for n, line in notes if line.name == "block")
        self._ends = [n for n, line in notes if line.name == "step"]
        self._last = next(n for n, line in notes if line.name == "end")
        self._check_host()

    def _check_host(self) -> None:
        until_ns = min(line.end_ns for line in self._log if line.name == BUSY)
        late_ns = self._log[self._last].host_ns - until_ns
        if late_ns > 0:
            raise TooSlow(f"by {late_ns / 1e9:.3f} s")

    def step_of(self, place: int) -> int:
        """Return the number of the step in which a line was written."""
        return sum(end < place for end in self._ends)

    def _beside(self, place: int, among: Sequence[int]) -> Line:
        """Return the first record of an event by the same thread, at one of the places `among`."""
        thread = self._log[place].thread
        return next(
            line for n in among if (line := self._log[n]).kind == RECORD and line.thread == thread
        )

    @cached_property
    def marks(self) -> list[Marked]:
        """All marks, in the order in which they were opened."""
        closes = {
            int(line.name.split()[1]): n
            for n, line in enumerate(self._log)
            if line.kind == NOTE and line.name.startswith("close ")
        }
        found = []
        for n, line in enumerate(self._log):
            if line.kind != NOTE or not line.name.startswith("open "):
                continue
            _, number, phase, device = line.name.split()
            if int(device) == HOST:
                continue
            closed = closes[int(number)]
            begin = self._beside(n, range(n - 1, 0, -1))
            end = self._beside(closed, range(closed + 1, len(self._log)))
            place = (n, closed, line.thread, begin, end)
            found.append(Marked(self.step_of(n), Phase(phase), int(device), *place))
        return found

    @cached_property
    def operations(self) -> list[Launched]:
        """All operations of the steps, with the marks in which they were launched.

        These are the marks that the launching thread has open. A thread of autograd has none of its
        own: those of all threads then count, on the operation's GPU.
        """
        found = []
        for n in range(self._block, self._last):
            line = self._log[n]
            if line.kind in (NOTE, RECORD, WAIT):
                continue
            still_open = [mark for mark in self.marks if mark.opened < n < mark.closed]
            own = [mark for mark in still_open if mark.thread == line.thread]
            others = [mark for mark in still_open if mark.begin.gpu == line.gpu]
            found.append(Launched(self.step_of(n), line, tuple(own or others)))
        return [one for one in found if one.step]

    @cached_property
    def _bounds(self) -> list[list[Line]]:
        """The records at the block's begin, and at each step's end, one per GPU."""
        begins = self._records(range(self._block, 0, -1))
        return [begins, *(self._records(range(end, len(self._log))) for end in self._ends)]

    def _records(self, places: range) -> list[Line]:
        """Return the first records of events at these places by the thread of the first line."""
        thread = self._log[places[0]].thread
        lines = (self._log[n] for n in places)
        records = (line for line in lines if line.kind == RECORD and line.thread == thread)
        return list(itertools.islice(records, self._devices))

    def uncovered(self, step: int, at: At) -> list[Interval]:
        """Return the parts of a step in which no mark of it was open on any GPU."""
        begin, end = (max(map(at, self._bounds[n])) for n in (step, step + 1))
        marks = (mark for mark in self.marks if mark.step == step)
        covered = union((at(mark.begin), at(mark.end)) for mark in marks)
        return difference([(begin, end)], covered)

    def outside(self, step: int) -> list[Interval]:
        """Return the parts of a step in which an operation of no mark ran, and no mark was open."""
        ran = union(
            (one.line.start_ns, one.line.end_ns)
            for one in self.operations
            if one.step == step and not one.marks
        )
        idle = self.uncovered(step, in_log)
        return difference(idle, difference(idle, ran))

    def on_host(self, record: Line) -> float:
        """Return the host's time of an event, in nanoseconds, that dpbench must give it."""
        return self._to_host[record.gpu](record.end_ns)

    @cached_property
    def _to_host(self) -> dict[int, Callable[[int], float]]:
        return {line.gpu: self._converted(line.gpu) for line in self._bounds[0]}

    def _converted(self, gpu: int) -> Callable[[int], float]:
        """Return a function from a GPU's time to the host's, both in nanoseconds.

        An anchor is an event that is recorded between two readings of the host's time, of which
        dpbench takes the mean; before the block and after it, each GPU has one. Between them, the
        error changes evenly.
        """
        (first, first_ns), (last, last_ns) = self._anchors(gpu)
        stretch = (last_ns - first_ns) / (last - first)
        return lambda ns: first_ns + (ns - first) * stretch

    def _anchors(self, gpu: int) -> Iterator[tuple[int, float]]:
        outside = [*range(self._block), *range(self._last, len(self._log))]
        readings = [n for n in outside if self._log[n].name.startswith("now ")]
        for before, after in itertools.pairwise(readings):
            between = [line for line in self._log[before:after] if line.kind == RECORD]
            if len(between) == 1 and between[0].gpu == gpu:
                seconds = [float(self._log[n].name.split()[1]) for n in (before, after)]
                yield between[0].end_ns, sum(seconds) / 2 * 1e9
