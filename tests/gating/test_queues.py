"""Queues: simulated processes, whose DataLoaders fetch batches ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.gating import judge, pairs
from dpbench.gating.judge import Answer, Finding, Pair
from dpbench.gating.sides import Block, Finished

LIMIT = 0.05
STEP_S = 0.05
SLOW_S, SLOWER_S = 0.25, 0.30
"""The seconds of a batch: four workers are then slower than the step."""


class Clock:
    now = 0.0


@dataclass(eq=False)
class Loop:
    """A training loop, in simulated time, a worker of whose loader needs `batch_s` a batch.

    If the workers wait for batches instead of computing them, these arrive while they are stopped.
    """

    clock: Clock
    tree: Any
    batch_s: float
    step_s: float = STEP_S
    workers: int = 4
    prefetch: int = 2
    waits: bool = False
    length: int = 10**6
    taken: list[int] = field(default_factory=list)
    files: Sequence[str] = ()

    def __post_init__(self) -> None:
        # the queue was filled while the process started
        self._free = [self.clock.now] * self.workers
        self._arrivals = [self.clock.now] * self.ahead
        self._used = 0
        self._stopped_s = self.clock.now

    @property
    def ahead(self) -> int:
        return self.workers * self.prefetch

    def _fetch(self) -> None:
        worker = len(self._arrivals) % self.workers
        self._free[worker] = max(self._free[worker], self.clock.now) + self.batch_s
        self._arrivals.append(self._free[worker])

    def take(self, steps: int) -> Block:
        began = self.clock.now
        if not self.waits:
            stopped = [began - self._stopped_s, self._stopped_s]
            self._free = [_later(one, *stopped) for one in self._free]
            self._arrivals = [_later(one, *stopped) for one in self._arrivals]
        for _ in range(steps):
            if self._used == self.length:
                raise Finished(self.tree, "ended", 0)
            if self.workers:
                self.clock.now = max(self.clock.now, self._arrivals[self._used])
                self._fetch()
            self._used += 1
            self.clock.now += self.step_s
        self.taken.append(steps)
        self._stopped_s = self.clock.now
        step_s = (self.clock.now - began) / steps
        waiting = self._arrivals[self._used :]
        ready = sum(arrival <= self.clock.now for arrival in waiting)
        batches = steps if self.workers else 0
        return Block(step_s, step_s, 1, batches=batches, ahead=self.ahead, ready=ready)

    def release(self) -> None:
        pass

    def trials(self) -> Sequence[Any]:
        return ()


def _later(moment: float, by_s: float, after: float) -> float:
    return moment + by_s if moment > after else moment


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pairs, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def taken(
    clock: Clock, base_s: float, head_s: float, *, draining_s: float = 60.0, **facts: Any
) -> tuple[list[Pair], list[tuple[Loop, Loop]]]:
    """Return pairs of loops with these seconds of a batch, and the loops."""
    loops: list[list[Loop]] = []

    @contextmanager
    def start(tree: Any, number: int) -> Iterator[Any]:
        if not loops or len(loops[-1]) == 2:
            loops.append([])
        loop = Loop(clock, tree, base_s if tree == "base" else head_s, **facts)
        loops[-1].append(loop)
        yield loop

    trees: Any = ("base", "head")
    made = [pairs.pair(start, trees, number, LIMIT, draining_s) for number in range(9)]
    each = (sorted(two, key=lambda loop: loop.tree) for two in loops)
    return made, [(base, head) for base, head in each]


def found(clock: Clock, base_s: float, head_s: float, **facts: Any) -> Finding:
    made, _ = taken(clock, base_s, head_s, **facts)
    return judge.look("step", made, limit=LIMIT, works=1)


@pytest.mark.parametrize("waits", [False, True])
def test_a_slower_loader_is_found_behind_its_queue(clock: Clock, waits: bool) -> None:
    one = found(clock, SLOW_S, SLOWER_S, waits=waits)
    assert one.answer is Answer.SLOWER
    assert one.wall.value == pytest.approx(SLOWER_S / SLOW_S, rel=0.01)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("batch_s", [0.001, 0.1, SLOW_S])
def test_an_unchanged_loader_is_not_slower(clock: Clock, batch_s: float, waits: bool) -> None:
    assert found(clock, batch_s, batch_s, waits=waits).answer is Answer.NOT_SLOWER


@pytest.mark.parametrize("more", [{"draining_s": 1.0}, {"draining_s": 0.0}, {"length": 50}])
def test_too_few_steps_never_say_not_slower(clock: Clock, more: dict[str, Any]) -> None:
    for head_s in (SLOW_S, 0.21):
        one = found(clock, 0.20, head_s, **more)
        assert one.answer is not Answer.NOT_SLOWER
        assert one.answer is Answer.SLOWER or one.reason


def test_a_loader_that_keeps_up_needs_fewer_steps(clock: Clock) -> None:
    long = {"step_s": 0.2, "workers": 8, "draining_s": 18.0}
    assert found(clock, 0.1, 0.12, **long).answer is Answer.NOT_SLOWER
    assert found(clock, 1.6, 1.6, **long).answer is Answer.UNKNOWN


@pytest.mark.parametrize("facts", [{}, {"workers": 0}, {"draining_s": 1.0}, {"length": 50}])
def test_both_sides_take_the_same_steps(clock: Clock, facts: dict[str, Any]) -> None:
    made, loops = taken(clock, SLOW_S, SLOW_S, **facts)
    assert all(base.taken == head.taken for base, head in loops[-1:])
    assert all(len(one.base.blocks) == len(one.head.blocks) for one in made)


def test_a_loop_without_workers_takes_blocks_in_turn(clock: Clock) -> None:
    made, loops = taken(clock, 0.0, 0.0, workers=0)
    assert all(len(one.head.blocks) == len(pairs.ORDER) / 2 for one in made)
    assert sum(sum(one.taken) for one in loops[0]) * STEP_S < 2.5
