"""Forwards in turns: the choice between both kinds of runs, and what turns must not change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpbench.engine import DataParallel, TrainStep
from dpbench.engine.fast.turns import AGAIN, KEPT, LONG_S, TurnsIfFaster
from dpbench.hardware.devices.host import install
from dpbench.records import Phase
from dpbench.records.schedule import Schedule
from tests.engine import rungs
from tests.engine.law.compare import assert_same
from tests.engine.nets import OPTIMIZERS, TWO, Call, conv, cpus

FREE_AND_TURNS = pytest.mark.parametrize("taken", [False, True], ids=["free", "in turns"])


def always(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Let all runs after the first be in turns, or none."""
    monkeypatch.setattr(TurnsIfFaster, "choose", lambda self, _: setattr(self, "taken", taken))


def begun() -> TurnsIfFaster:
    """Return turns after the first run, which does not count."""
    turn = TurnsIfFaster()
    turn.choose(1.0e-3)
    return turn


def kinds(turn: TurnsIfFaster, count: int, *, free: float, in_turns: float) -> list[bool]:
    """Return the kind of each of `count` runs, which take so many seconds in each kind."""
    taken = []
    for _ in range(count):
        taken.append(turn.taken)
        turn.choose(in_turns if turn.taken else free)
    return taken


SLOW_S, FAST_S = 2e-3, 1e-3


@pytest.mark.parametrize("faster", [False, True], ids=["free", "in turns"])
def test_the_faster_kind_of_run_is_taken_once_both_were_tried(faster: bool) -> None:
    turn = begun()
    seconds = (
        {"free": SLOW_S, "in_turns": FAST_S} if faster else {"free": FAST_S, "in_turns": SLOW_S}
    )
    tried = []
    while not turn.settled:
        tried += kinds(turn, 1, **seconds)
    assert (len(tried), sum(tried)) == (2 * KEPT, KEPT)
    after = kinds(turn, 10 * AGAIN, **seconds)
    assert after.count(faster) == 10 * (AGAIN - 1)


def test_a_slow_run_in_between_changes_nothing() -> None:
    turn = begun()
    kinds(turn, 2 * KEPT, free=SLOW_S, in_turns=FAST_S)
    turn.choose(100 * SLOW_S)
    assert all(kinds(turn, KEPT, free=SLOW_S, in_turns=FAST_S))


def test_no_turns_are_tried_in_runs_that_take_long() -> None:
    turn = begun()
    for _ in range(3):
        turn.choose(2 * LONG_S)
        assert (turn.settled, turn.taken) == (True, False)


@pytest.mark.parametrize("faster", [False, True], ids=["free", "in turns"])
def test_batches_that_become_longer_or_shorter_change_the_choice(faster: bool) -> None:
    turn = begun()
    slow, fast = ("free", "in_turns") if faster else ("in_turns", "free")
    kinds(turn, 2 * KEPT, **{fast: FAST_S, slow: SLOW_S})
    for scale in (10.0, 0.1):
        kinds(turn, KEPT * AGAIN, **{fast: SLOW_S * scale, slow: FAST_S * scale})
        after = kinds(turn, AGAIN, **{fast: SLOW_S * scale, slow: FAST_S * scale})
        assert after.count(faster) == 1
        fast, slow, faster = slow, fast, not faster


@pytest.mark.parametrize("schedule", [Schedule.REFERENCE, Schedule.POOL, Schedule.SHARDED])
def test_a_step_says_when_it_tries_no_more(schedule: Schedule) -> None:
    x = torch.randn(6, 4)
    with TrainStep(nn.Linear(4, 4), F.mse_loss, OPTIMIZERS["sgd"], cpus(2), schedule) as step:
        settled = []
        for _ in range(2 * KEPT + 2):
            step(x, x)
            settled.append(step.settled)
    tries = 0 if schedule is Schedule.REFERENCE else 2 * KEPT
    assert settled == [False] * tries + [True] * (len(settled) - tries)


@FREE_AND_TURNS
@rungs.every("schedule", Schedule.POOL)
def test_turns_change_no_bit(schedule: str, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, taken)
    torch.manual_seed(0)
    module = conv()
    x, y = torch.randn(6, 3, 8, 8), torch.arange(6) % 5
    trained = {}
    for name in (Schedule.REFERENCE, schedule):
        mine = copy.deepcopy(module)
        with TrainStep(mine, F.cross_entropy, OPTIMIZERS["sgd"], cpus(3), name) as step:
            for _ in range(3):
                step(x, y)
        trained[name] = mine.state_dict()
    assert_same(trained[schedule], trained[Schedule.REFERENCE], schedule)


class Watched(nn.Module):
    """A module that writes down when each forward begins and ends, and is slow in between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.log: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append("begins")
        threading.Event().wait(0.02)
        y = self.layer(x)
        self.log.append("ends")
        return y


@rungs.every("schedule", Schedule.POOL)
def test_only_one_forward_runs_at_a_time(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, True)
    module = Watched()
    x = torch.randn(6, 4)
    with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], cpus(3), schedule) as step:
        step(x, x)
        module.log.clear()
        step(x, x)
    assert module.log == ["begins", "ends"] * 3


def test_in_turns_no_backward_begins_before_the_last_forward_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, True)
    log: list[Phase] = []

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        if phase is Phase.BACKWARD:
            log.append(phase)
        yield
        if phase is Phase.FORWARD:
            log.append(phase)

    x, y = torch.randn(6, 4), torch.arange(6) % 4
    with TrainStep(
        Watched(), F.cross_entropy, OPTIMIZERS["sgd"], cpus(3), "fastest", mark=mark
    ) as step:
        step(x, y)
        log.clear()
        step(x, y)
    assert log == [Phase.FORWARD] * 3 + [Phase.BACKWARD] * 3


def test_the_mark_of_a_forward_does_not_include_the_wait_for_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always(monkeypatch, True)
    log: list[Any] = []

    @contextmanager
    def mark(phase: Phase, device: int) -> Iterator[None]:
        if phase is not Phase.FORWARD or device < 0:
            yield
            return
        log.append((device, "begins"))
        yield
        log.append((device, "ends"))

    x = torch.randn(6, 4)
    with TrainStep(Watched(), F.mse_loss, OPTIMIZERS["sgd"], cpus(3), "fastest", mark=mark) as step:
        step(x, x)
        log.clear()
        step(x, x)
    assert all(one[0] == other[0] for one, other in list(pairwise(log))[::2])


@rungs.every("schedule", Schedule.POOL)
def test_replicas_that_wait_for_each_other_in_forward_are_not_kept_waiting(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpbench.engine.turn.PATIENCE_S", 0.05)
    together = threading.Barrier(2)

    def meet(module: Any, x: Tensor) -> Tensor:
        together.wait(5)
        return module.layer(x)  # type: ignore[no-any-return]

    module = Call(meet, layer=nn.Linear(4, 4))
    x = torch.randn(6, 4)
    with TrainStep(module, F.mse_loss, OPTIMIZERS["sgd"], TWO, schedule) as step:
        for _ in range(4):
            step(x, x)
        turn = step._runner.workers.turn
        assert not any(kinds(turn, 2 * AGAIN, free=2.0, in_turns=1.0))


def test_a_forward_that_fails_passes_its_turn_on(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch, True)
    monkeypatch.setattr("dpbench.engine.turn.PATIENCE_S", 60.0)
    fails = threading.Event()

    def forward(module: Any, x: Tensor) -> Tensor:
        if fails.is_set():
            raise KeyError("here")
        return module.layer(x)  # type: ignore[no-any-return]

    wrapped = DataParallel(Call(forward, layer=nn.Linear(4, 4)), TWO, schedule="pool")
    for failing in (False, True, True, False):
        fails.clear()
        if failing:
            fails.set()
            with pytest.raises(KeyError, match="in replica 0"):
                wrapped(torch.randn(4, 4))
        else:
            wrapped(torch.randn(4, 4))


def test_replicas_of_other_devices_than_the_host_take_no_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        TurnsIfFaster, "of", lambda self, i: pytest.fail("a turn on an accelerator")
    )
    install()
    x = torch.randn(4, 4, device="lazy:0")
    for schedule in ("pool", "fastest"):
        module = nn.Linear(4, 4).to("lazy:0")
        with TrainStep(
            module, F.mse_loss, OPTIMIZERS["sgd"], ["lazy:0", "lazy:1"], schedule
        ) as step:
            step(x, x)
