"""Case timer: run a prepared case in blocks of steps under a clock until its series is long enough.

Pairs of further steps then show what marks cost: one has marks, the other has none.

After timing, a few steps are profiled to measure the busy time of GPUs: the length of the union of
the kernels' intervals (`records.activity`). The spans of a clock show how long a phase occupied a
device, including waiting; kernels show when the device computed. Communication is counted
separately, because a collective kernel that waits for other ranks counts as busy.

If ranks add their gradients during backward, no event on a GPU can mark the phase `reduce`. The
profiled steps show its duration: the seconds of all-reduce in which the GPU runs no compute kernel.
Their median is then entered into each timed step, as a span of `reduce` that ends with backward. On
CPUs, the strategy reports this span itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpbench.hardware import foreign_load
from dpbench.hardware.device import Device
from dpbench.hardware.devices.cuda import heat
from dpbench.hardware.samplers.host import root_pid
from dpbench.measure import clocks, verification
from dpbench.measure.merging import exposed_reductions, reductions, silent
from dpbench.measure.stopping import Stopping
from dpbench.measure.turns import Turns
from dpbench.measure.worker import profiling
from dpbench.measure.worker.facts import process_facts
from dpbench.measure.worker.feed import fed
from dpbench.measure.worker.profiling import Profile
from dpbench.models import Model, compilations, forget_sizes
from dpbench.records import (
    Case,
    Effort,
    Mark,
    Memory,
    Phase,
    Sample,
    Status,
    Trial,
    Verified,
    no_mark,
)
from dpbench.records.activity import EXPOSED_REDUCTION, Activity, busy
from dpbench.records.facts import stated
from dpbench.records.load import Load, UnknownLoad
from dpbench.records.spelling import dashed
from dpbench.strategies import Step, Strategy, begin

PROFILED_STEPS = 5
"""The number of steps that are profiled in a trial, unless they are slow (see `SLOW_S`)."""
SLOW_S = 1.5
"""The seconds of a step above which a case is slow.

Each block of a slow case has one step, and so has the warm-up.
"""
SLOW_STEPS = 3
HEAT_S = 0.5
"""The seconds for which GPUs compute before their steps are timed, but no longer than those."""
MARK_PAIRS, FEW_PAIRS = 40, 6
"""The most and the least pairs of a step with marks and one without."""
COMPILING_PASSES = 10
"""The most passes over the batches, and blocks of steps, in which torch.compile may compile."""


@dataclass(frozen=True, kw_only=True)
class PreparedCase:
    """A case that is ready for timing: its strategy is verified; model and batches are built.

    `batches` are pairs (inputs, target), which the steps use in turn. If the case has a DataLoader,
    it loads `examples` instead: of the same batches, the rows on which this process trains, in the
    host's memory. `setup` maps each stage of the preparation to its seconds. `facts` is the
    provenance to store with the trial.
    """

    case: Case
    strategy: Strategy
    devices: Sequence[Device]
    model: Model
    batches: Sequence[tuple[Any, Any]]
    examples: Sequence[tuple[Any, Any]]
    verified: Verified
    setup: Mapping[str, float]
    facts: Mapping[str, Any]


@contextmanager
def start_timer(prepared: PreparedCase, effort: Effort) -> Iterator[CaseTimer]:
    """Start a prepared case's strategy with a clock for its devices, and yield the case's timer."""
    listener = clocks.choose(prepared.devices)
    marking = _Marking()
    with begin(prepared.strategy, prepared.case, prepared.model, prepared.devices, marking) as step:
        if prepared.case.compile:
            prepared = _compiled(prepared, step)
        marking.mark = listener.mark
        with fed(prepared.case, step, prepared.examples, marking) as timed:
            yield CaseTimer(prepared, effort, timed, listener, marking)


class _Marking:
    """A mark that records nothing, until it has the mark of a clock."""

    def __init__(self) -> None:
        self.mark: Mark = no_mark

    def __call__(self, phase: Phase, device: int) -> AbstractContextManager[Any]:
        return self.mark(phase, device)


def _compiled(prepared: PreparedCase, step: Step) -> PreparedCase:
    """Make passes over the batches until no rank compiles in a pass.

    The setup of the returned case has `compile_s`: the seconds of all steps that compiled,
    including those of verification. They are shorter if torch finds graphs in its cache on disk.
    Its facts say how many graphs and graph breaks torch.compile made. Raises ValueError if no step
    of these passes compiled, and RuntimeError if a step compiled in each of `COMPILING_PASSES`
    passes.
    """
    forget_sizes()  # those of other cases in this worker
    begun = compilations()
    compile_s = 0.0
    for _ in range(COMPILING_PASSES):
        found_s = sum(_compiling_s(step, batch) for batch in prepared.batches)
        compile_s += found_s
        if not _agreed(found_s > 0):
            break
    else:
        raise RuntimeError(
            f"torch.compile has compiled again in each of {COMPILING_PASSES} passes over the"
            f" batches: leave out {dashed('compile')}"
        )
    if not _agreed(compile_s > 0):
        raise ValueError(
            f"torch.compile has compiled nothing of the model {prepared.model.name}, so the case"
            f" would be timed without compilation: leave out {dashed('compile')}"
        )
    made = compilations() - begun
    facts = {**prepared.facts, "compiled": {name: made[name] for name in begun}}
    return replace(
        prepared,
        setup={**prepared.setup, "compile_s": prepared.setup["compile_s"] + compile_s},
        facts=facts,
    )


def _compiling_s(step: Step, batch: tuple[Any, Any]) -> float:
    """Take a step; return its seconds if torch.compile has made a graph in it, otherwise 0."""
    graphs = compilations()["graphs"]
    at = time.perf_counter()
    step(*batch)
    return time.perf_counter() - at if compilations()["graphs"] > graphs else 0.0


class CaseTimer:
    """The timer of one case: its step function, its clock, and the rule that ends its series."""

    def __init__(
        self,
        prepared: PreparedCase,
        effort: Effort,
        step: Step,
        listener: clocks.Clock,
        marking: _Marking,
    ) -> None:
        self._prepared = prepared
        self._effort = effort
        self._step = step
        self._listener = listener
        self._marking = marking
        self._mark_pairs: list[tuple[float, float]] = []
        self._block_steps = effort.block_steps
        self._steps_s = 0.0
        self._heat_s = self._second_s = self._marks_s = 0.0
        self._taken = self._recompiled = self._compiled_at = 0
        self._profiled_steps = PROFILED_STEPS
        self._slow = False
        self._before: foreign_load.Snapshot | UnknownLoad | None = None
        self._settled = False
        self._stopping = Stopping(
            effort.budget_s,
            effort.min_steps,
            effort.max_steps,
            least_warmup=effort.warmup_steps,
            least_s=effort.least_s,
        )

    def first(self) -> bool:
        """Take the first two steps; return whether the case is slow (see `SLOW_S`).

        The second step decides, because the first one also loads libraries and allocates memory; a
        step in which torch.compile has compiled is taken again.
        """
        self._block(1)
        self._second_s = self._block(1)
        while self._compiled_at == self._taken:
            self._second_s = self._block(1)
        if self._effort.slow is not None:
            return self._effort.slow
        return _agreed(self._second_s > SLOW_S)

    def slow_down(self) -> None:
        """Take one step per block, one warm-up step and `SLOW_STEPS` timed steps; profile one."""
        self._slow = True
        self._block_steps = 1
        self._stopping.least_warmup = max(1, self._compiled_at)
        self._profiled_steps = 1
        self._stopping.min_steps = min(self._effort.min_steps, SLOW_STEPS)

    def heat(self) -> None:
        """Raise the clocks of the GPUs for the rest of `HEAT_S` that the warm-up does not last.

        A slow case, whose warm-up is its first step, needs no heating.
        """
        on_gpus = self._prepared.devices[0].torch_device.type == "cuda"
        if not on_gpus or self._slow:
            return
        warmup_s = self._second_s * self._stopping.least_warmup
        rest_s = min(HEAT_S, self._effort.budget_s) - warmup_s
        self._heat_s = heat(self._prepared.devices, rest_s)

    def block(self) -> None:
        """Take one block of steps, shortened if it would exceed the maximum number of steps."""
        if self._before is None and self._taken >= self._stopping.least_warmup and _is_first():
            self._before = foreign_load.snapshot({root_pid()})
        left = self._effort.max_steps + self._stopping.least_warmup - self._taken
        self._block(max(1, min(self._block_steps, left)))

    def take_turns(self, turns: Turns) -> None:
        """Take blocks of steps as the gate asks for them."""
        with without_collections():
            while steps := turns.next(gc.collect):
                self._block(steps)

    @property
    def finished(self) -> bool:
        """Return whether the series of this rank, or of any other rank, is long enough."""
        return _agreed(self._stopping.finished())

    def _block(self, steps: int) -> float:
        """Take `steps` steps back to back; return the duration of the last step in seconds."""
        case = self._prepared.case
        graphs = compilations() if case.compile else None
        began_s = time.perf_counter()
        results = self._take(steps, self._listener)
        if not case.unverified:
            verification.check_results(results, self._taken, trains=case.trains)
        # seconds from the clock, not from the calls: on CUDA, a call returns before its work is
        # done
        timed = self._listener.steps()[-steps:]
        for one in timed:
            self._stopping.add(one.seconds)
        if not self._settled:
            self._settled = self._step.settled
            self._stopping.restart()
        if graphs is not None and _agreed(graphs != compilations()):
            self._compile_again()
        self._steps_s += time.perf_counter() - began_s
        return timed[-1].seconds

    def _compile_again(self) -> None:
        """Count all steps so far as warm-up, because torch.compile has compiled in the last block.

        Threads that look for their graphs at the same time rarely miss them, so that torch compiles
        again although nothing has changed. Raises RuntimeError if it has in `COMPILING_PASSES`
        blocks.
        """
        self._recompiled += 1
        self._compiled_at = self._taken
        if self._recompiled == COMPILING_PASSES:
            raise RuntimeError(
                f"torch.compile has compiled again in {COMPILING_PASSES} blocks of steps, so their"
                f" times include compilation: leave out {dashed('compile')}, or remove the model's"
                " dependence on values that change between steps"
            )
        self._stopping.restart()

    def _take(self, steps: int, clock: clocks.Clock) -> Sequence[Any]:
        """Take `steps` steps back to back under a clock, and return what they returned."""
        case = self._prepared.case
        batches = self._prepared.batches
        results = list[Any]()
        every = case.read_loss
        with clock.block():
            for i in range(steps):
                inputs, target = batches[i % len(batches)]
                with clock.step(warmup=False):
                    loss = self._step(inputs, target)
                    if every and (self._taken + i) % every == 0:
                        # the host waits for the device, as in a loop that prints the loss
                        loss.item()
                if not case.trains:
                    results.clear()  # outputs may be large
                # detached, because the graph of a loss keeps the activations
                results.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)
                for span in self._step.observe():
                    clock.add(*span)
        self._taken += steps
        return results

    def weigh_marks(self) -> None:
        """Take pairs of steps, one with marks and one without, whose order alternates.

        Each is the second step of a block, because the devices are idle before the first one. The
        blocks have a clock of their own, because they do not belong to the series; the first pair,
        which creates its events, is not kept. If the trial's budget is too short for `FEW_PAIRS`,
        there are none: such steps are so long that marks of some microseconds do not matter.
        """
        step_s = _most(self._listener.steps()[-1].seconds)
        pairs = int(self._effort.budget_s / (4 * step_s)) - 1 if step_s > 0 else 0
        if not self._effort.marks or pairs < FEW_PAIRS:
            return
        began_s = time.perf_counter()
        clock = clocks.choose(self._prepared.devices)
        marks: dict[bool, Mark] = {True: clock.mark, False: no_mark}
        for number in range(1 + min(pairs, MARK_PAIRS)):
            taken_s = dict.fromkeys(marks, 0.0)
            for marked in sorted(marks, reverse=bool(number % 2)):
                self._marking.mark = marks[marked]
                self._take(2, clock)
                taken_s[marked] = clock.steps()[-1].seconds
            if number:
                self._mark_pairs.append((taken_s[True], taken_s[False]))
            gc.collect()
        self._marking.mark = self._listener.mark
        self._marks_s = time.perf_counter() - began_s

    def trial(self, memory: tuple[Memory, ...] = ()) -> Trial:
        """Return the case's trial: all measurements and `memory`, with the warm-up's steps flagged.

        On GPUs, additional steps are profiled; their seconds are `profile_s` in the trial's setup.
        """
        prepared = self._prepared
        load, process = self._load(), process_facts()
        warm = self._stopping.warmup
        steps = tuple(
            replace(step, warmup=i < warm) for i, step in enumerate(self._listener.steps())
        )
        spans = self._listener.spans()
        began_s = time.perf_counter()
        # a slow case has one profiled step in each round, because one round's would be too few
        profiles = isinstance(self._listener, clocks.CudaClock) and (
            self._effort.profile or self._slow
        )
        profile = self._profile() if profiles else Profile()
        cost = {"profile_s": time.perf_counter() - began_s} if profiles else {}
        cost |= {"heat_s": self._heat_s} if self._heat_s else {}
        cost |= {"marks_s": self._marks_s} if self._marks_s else {}
        withheld = stated(no_profile=profile.withheld) if profile.withheld else {}
        samples = [*self._listener.samples(), *_busy_samples(profile.steps)]
        for device, each in exposed_reductions(prepared.case, profile.steps).items():
            samples += [Sample(0.0, device, EXPOSED_REDUCTION, seconds) for seconds in each]
        return Trial(
            case=prepared.case,
            status=Status.OK,
            reason=self._stopping.reason
            or "stopped with the other ranks, because one of them had enough steps",
            verified=prepared.verified,
            steps=steps,
            spans=(*spans, *reductions(prepared.case, spans, profile.steps)),
            samples=tuple(samples),
            memory=memory,
            setup={**prepared.setup, "steps_s": self._steps_s, **cost},
            provenance={
                **prepared.facts,
                **withheld,
                **load,
                **process,
                **stated(slow=self._slow, mark_pairs=tuple(self._mark_pairs)),
            },
        )

    def _load(self) -> dict[str, Any]:
        """Return the foreign load during the timed steps as a fact, if it is known."""
        if self._before is None:
            return {}
        load = foreign_load.since(self._before, {root_pid()})
        return stated(foreign_load=load) if isinstance(load, Load) else {}

    def _profile(self) -> Profile:
        case, devices = self._prepared.case, self._prepared.devices
        batch = self._prepared.batches[0]
        found = profiling.profiled(lambda: self._step(*batch), devices, self._profiled_steps)
        if not found.withheld and case.trains and silent(case, found.steps):
            return Profile(withheld="it shows no collective that dpbench recognises")
        return found

    def trace(self, path: str) -> None:
        """Write a Chrome trace of one additional step to the file `path`."""
        batch = self._prepared.batches[0]
        profiling.trace(lambda: self._step(*batch), self._prepared.devices, Path(path))


@cache
def frozen() -> bool:
    """Return whether the garbage collector held frozen objects at the first call.

    The first call is in this process or in its server. The answer is cached, because counting the
    objects of torch takes tens of milliseconds in each trial.
    """
    return gc.get_freeze_count() > 0


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector off: a collection would be charged to the phase it interrupts."""
    gc.collect()
    freezes = not frozen()  # a worker's server has frozen its large modules, which must stay frozen
    if freezes:
        gc.freeze()  # the collections between blocks then skip all objects that exist now
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if freezes:
            gc.unfreeze()  # frozen objects in reference cycles would never release their tensors


def run_timers(timers: Sequence[CaseTimer]) -> None:
    """Run blocks of steps of all timers in turn until every series is long enough.

    The order of the timers is reversed after each pass.
    """
    with without_collections():
        # in one worker, all cases are slow if one is: only then can they be compared
        slow = [timer.first() for timer in timers]
        if any(slow):
            for timer in timers:
                timer.slow_down()
        for timer in timers:
            timer.heat()
        turn = list(timers)
        while not all(timer.finished for timer in timers):
            for timer in turn:
                timer.block()
            turn.reverse()
            gc.collect()
        for timer in timers:
            timer.weigh_marks()


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agreed(finished: bool) -> bool:
    """Return whether `finished` is True in at least one rank; all ranks must call this."""
    return bool(_most(finished))


def _most(value: float) -> float:
    """Return the largest value of any rank; all ranks must call this."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def _busy_samples(profile: Iterable[Iterable[Activity]]) -> Iterator[Sample]:
    """Yield the GPUs' busy seconds: for each device and metric, one sample per profiled step.

    A metric is 0 in a step without activities of its kind. If no profiled step has such activities,
    the metric has no samples. The time of each sample is 0, because profiled steps are not part of
    the timed series.
    """
    step_seconds = [
        {(d, metric): s for d, times in busy(step).items() for metric, s in times.metrics.items()}
        for step in profile
    ]
    for device, metric in dict.fromkeys(key for seconds in step_seconds for key in seconds):
        for seconds in step_seconds:
            yield Sample(0.0, device, metric, seconds.get((device, metric), 0.0))
