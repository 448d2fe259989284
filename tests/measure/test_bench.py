"""The status and the reason of an error, and the collector during a trial."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpbench import strategies
from dpbench.engine import parallel_apply
from dpbench.engine.fast.turns import KEPT
from dpbench.measure import clocks
from dpbench.measure.failures import of_error
from dpbench.measure.worker import bench, trial
from dpbench.records import Case, Effort, Phase, Status
from tests.runs import TWO_STEPS


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (
            KeyError("a"),
            Status.FAILED,
            "KeyError: 'a'; in replica 1 on device cpu:1 [test_bench.py:",
        ),
        (
            torch.OutOfMemoryError("GPU 0 has a total capacity of"),
            Status.OOM,
            (
                "out of memory on replica 1 on device cpu:1; use a smaller batch, or more devices;"
                " error: OutOfMemory"
            ),
        ),
    ],
    ids=repr,
)
def test_an_error_in_a_replica_is_told_as_it_was_raised(
    error: Exception, status: Status, told: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        parallel_apply([lambda: None, fail], [(), ()], None, ["cpu", "cpu"])
    failure = of_error(caught.value)
    assert failure.status == status
    assert failure.reason.startswith(told)
    assert "\n" not in failure.reason


@pytest.mark.parametrize("frozen", [False, True])
def test_a_trial_leaves_to_the_collector_what_it_had_and_no_more(frozen: bool) -> None:
    """A server freezes torch's half a million objects: collecting them outlasts a small trial."""
    seen: list[tuple[bool, bool]] = []

    def block() -> None:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        fake.finished = True

    fake = SimpleNamespace(
        first=block, heat=lambda: None, block=block, weigh_marks=lambda: None, finished=False
    )
    gc.unfreeze()
    if frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    bench.frozen.cache_clear()
    try:
        bench.run_timers([fake])  # type: ignore[list-item]
        # frozen objects of earlier tests may be freed during the trial, because nothing refers to
        # them any more
        assert (
            (0 < gc.get_freeze_count() <= before)
            if frozen
            else gc.get_freeze_count() == before == 0
        )
    finally:
        gc.freeze()
        bench.frozen.cache_clear()
    assert seen == [(False, True)]
    assert gc.isenabled()


@pytest.mark.parametrize(("schedule", "least"), [("reference", 2), ("pool", 1 + 2 * KEPT)])
def test_steps_in_which_the_engine_tries_alternatives_are_warm_up(
    schedule: str, least: int, tmp_path: Path
) -> None:
    """A median over forwards of two kinds would be the time of neither."""
    case = Case(model="mlp", strategy="dp", devices=2, batch_size=8, schedule=schedule)
    effort = replace(TWO_STEPS, warmup_steps=2, min_steps=4, max_steps=4)
    found = trial.run(case, effort, tmp_path)
    assert found.status is Status.OK, found.reason
    assert sum(step.warmup for step in found.steps) >= least
    assert len(found.timed) == 4


READ_S, STEP_S, MARKS = 1e-5, 1e-3, 5


class Ticking(strategies.Strategy):
    """A strategy whose steps take `STEP_S` and `MARKS` marks, on a clock that takes `READ_S`."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.steps = 0

    def now(self) -> float:
        self.at_s += READ_S
        return self.at_s

    @contextmanager
    def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        def step(inputs: Any, target: Any) -> torch.Tensor:
            self.steps += 1
            self.at_s += STEP_S * (1 + self.steps / 1000)  # a machine that becomes slower
            for _ in range(MARKS):
                with mark(Phase.FORWARD, 0):
                    pass
            return torch.tensor(1.0)

        yield step


@pytest.mark.parametrize(("marks", "budget_s"), [(True, 1.0), (False, 1.0), (True, 0.0)])
def test_steps_with_marks_are_beside_steps_without_and_outside_of_the_series(
    marks: bool, budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking = Ticking()
    clock = clocks.HostClock
    monkeypatch.setattr(clocks, "choose", lambda devices: clock(ticking.now, lambda: 0.0))
    case = Case(model="mlp", strategy="single", batch_size=4, unverified=True)
    effort = Effort(
        budget_s=budget_s, min_steps=20, max_steps=20, memory_by_phase=False, marks=marks
    )
    found = trial.measure(case, effort, ticking)
    assert found.status is Status.OK, found.reason
    pairs = found.facts.mark_pairs
    assert len(pairs) == (bench.MARK_PAIRS if marks and budget_s else 0)
    # a mark reads the clock twice
    extra_s = sum(marked - bare for marked, bare in pairs) / bench.MARK_PAIRS
    assert extra_s == pytest.approx(2 * MARKS * READ_S if pairs else 0.0)
    assert len(found.spans) == MARKS * len(found.steps)
    assert max(span.step for span in found.spans) == len(found.steps) - 1
    taken = ticking.steps - len(found.steps)
    assert taken == (4 * (1 + bench.MARK_PAIRS) if pairs else 0)


def test_a_step_that_compiles_makes_no_case_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = SimpleNamespace()
    timer = bench.CaseTimer(parts, Effort(), parts, parts, parts)
    seconds = iter([5.0, 2 * bench.SLOW_S, 0.02])

    def block(steps: int) -> float:
        timer._taken += steps
        taken_s = next(seconds)
        if taken_s == 2 * bench.SLOW_S:
            timer._compiled_at = timer._taken
        return taken_s

    monkeypatch.setattr(timer, "_block", block)
    assert not timer.first()
    timer.slow_down()
    assert timer._stopping.least_warmup == 2, "steps that compile stay warm-up"
