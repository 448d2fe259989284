"""The choices of `fastest` and of automatic chunk sizes, by the times that they measure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine.autotune import Autotuner
from dpbench.engine.train_step import TrainStep
from dpbench.hardware.devices import resolve
from dpbench.records import Phase, no_mark
from dpbench.records.schedule import FASTEST, SELECTED
from tests.test_schedules import OPTIMIZERS, problem


def test_automatic_chunk_sizes_take_rows_from_a_device_that_is_slow(ticking: list[float]) -> None:
    at_work = [0]

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        at_work[0] = device
        yield

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ticking[0] += len(x) * (3.0 if at_work[0] == 1 else 1.0)
            return super().forward(x)

    x = torch.randn(12, 4)
    devices, options = ["cpu", "cpu"], {"chunk_sizes": "auto", "mark": mark}
    with TrainStep(Slow(4, 4), F.mse_loss, OPTIMIZERS["sgd"], devices, "workers=serial", **options) as step:
        assert step.chunk_sizes is None
        for _ in range(9):
            step(x, x)
        assert step.chunk_sizes is not None
        first, second = step.chunk_sizes
    assert first / second == pytest.approx(3)


def test_automatic_chunk_sizes_stay_equal_where_a_batch_has_fewer_rows_than_devices() -> None:
    module, x = nn.Linear(4, 4), torch.randn(2, 4)
    with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], ["cpu"] * 3, "workers=serial", chunk_sizes="auto") as step:
        for _ in range(9):
            step(x, x)
        assert step.chunk_sizes is None


def test_fastest_settles_and_stays() -> None:
    module, loss, batches = problem("mlp", 8, 70)
    with TrainStep(module, loss, OPTIMIZERS["sgd"], ["cpu", "cpu"], FASTEST) as step:
        seen = []
        for batch in batches:
            step(*batch)
            seen.append(step.schedule)
        assert step._autotuner is not None
        assert step._autotuner.settled
        assert {one.workers for one in seen[:20]} == {"pool", "serial"}
        assert len(set(seen[-3:])) == 1
        assert step.schedule.exact


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of a clock that does not move."""
    now = [0.0]
    monkeypatch.setattr("dpbench.engine.autotune.time.perf_counter", lambda: now[0])
    return now


def settle(now: list[float], seconds: Callable[[str, int], float], calls: int = 1) -> Autotuner:
    """Return a settled autotuner whose updates take `calls` calls of `seconds(workers, number)` each."""
    autotuner = Autotuner(SELECTED[FASTEST], resolve(["cpu", "cpu"]))
    for number in itertools.count():
        workers = autotuner.next().workers
        if autotuner.settled:
            return autotuner
        for _ in range(calls):
            with autotuner.timed(no_mark) as mark, mark(Phase.FORWARD, 0):
                now[0] += seconds(workers, number)
    raise AssertionError


@pytest.mark.parametrize("faster", ["pool", "serial"])
def test_trials_choose_the_faster(ticking: list[float], faster: str) -> None:
    noise = itertools.cycle([0.0, 0.01, -0.01, 0.02])
    autotuner = settle(ticking, lambda workers, number: (1.0 if workers == faster else 1.2) + next(noise))
    assert autotuner.next().workers == faster


def test_trials_of_equals_keep_the_pool_whatever_the_drift(ticking: list[float]) -> None:
    autotuner = settle(ticking, lambda workers, number: 1.0 + 0.01 * number)
    assert autotuner.next().workers == "pool"


def test_a_slow_update_does_not_decide(ticking: list[float]) -> None:
    autotuner = settle(ticking, lambda workers, number: 50.0 if (workers, number) == ("pool", 4) else 1.0)
    assert autotuner.next().workers == "pool"


def test_trials_tell_when_one_device_would_be_faster(ticking: list[float]) -> None:
    autotuner = Autotuner(SELECTED[FASTEST], resolve(["cpu", "cpu"]))
    while not autotuner.settled:
        workers = autotuner.next().workers
        with autotuner.timed(no_mark) as mark:
            with mark(Phase.REPLICATE, 0):
                ticking[0] += 1.0
            with mark(Phase.FORWARD, 0):
                ticking[0] += 2.0 if workers == "serial" else 2.5
    assert autotuner.advice.startswith("one device is likely to be faster: about 2.00 s per update")


def test_calls_of_an_accumulation_are_timed_together(ticking: list[float]) -> None:
    """The call that makes the update takes longer; it must not count for one candidate alone."""
    turn = itertools.cycle([1.0, 9.0])
    autotuner = settle(ticking, lambda workers, number: next(turn) * (0.8 if workers == "serial" else 1.0), calls=2)
    assert autotuner.next().workers == "serial"
    assert all(
        seconds == pytest.approx([10.0 * (0.8 if c else 1.0)] * len(seconds)) for c, seconds in autotuner._blocks
    )
