"""An interrupt ends a step wherever it arrives, and the next steps are those of a plain loop."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys

import pytest
import torch
from torch import nn

from dpbench.engine import TrainStep
from dpbench.engine.fast.parameter_gradients import ParameterGradients
from dpbench.records.schedule import SELECTED, Schedule
from tests.engine import rungs
from tests.engine.law.interrupts import Interrupted
from tests.engine.law.sides import Pair
from tests.engine.nets import OPTIMIZERS, TWO, Net, batch

SCHEDULES = [*map(str, Schedule), *SELECTED]
STARTING = 80
"""More places than the start of two threads has."""


def interrupted(schedule: str, count: int) -> int:
    """Interrupt so many steps, each at another place; return how many ended there."""
    numbers = itertools.count(1)
    with Pair(Net, lambda _: nn.MSELoss(), OPTIMIZERS["adam"], schedule) as both:
        both.step(*batch(next(numbers), 8))
        both.step(*batch(next(numbers), 8))
        with Interrupted() as counted:
            both.ours.train(*batch(0, 8))
        both.plain.step(*batch(0, 8))
        hits = 0
        # a rebuilt step passes more places
        for place in range(1, 2 * counted.places, 2 * counted.places // count):
            hits += both.interrupt(*batch(next(numbers), 8), place)
            hits += both.interrupt(*batch(next(numbers), 8), place)  # most often in the rebuild
            both.step(*batch(next(numbers), 8))
    return hits


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_that_was_interrupted_anywhere_goes_on(schedule: str) -> None:
    assert interrupted(schedule, 10) > 8


@pytest.mark.slow
@rungs.every("schedule")
def test_steps_go_on_after_a_thousand_interrupts(schedule: str) -> None:
    # about four of ten places are passed on a slow machine
    assert interrupted(schedule, 650 // len(SCHEDULES)) > 60


@pytest.mark.parametrize("schedule", [Schedule.ALLREDUCE, Schedule.SHARDED])
def test_an_interrupt_of_the_constructor_leaves_the_module_and_the_optimizer(schedule: str) -> None:
    module = Net()
    optimizer = OPTIMIZERS["adam"](list(module.parameters()))

    def made(place: int | None) -> int:
        with contextlib.suppress(KeyboardInterrupt):
            with Interrupted(place) as interrupted:
                step = TrainStep(module, nn.MSELoss(), lambda _: optimizer, TWO, schedule)
            step.close()
        return interrupted.places

    for place in range(1, made(None), 11):
        made(place)
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())
        assert type(optimizer.state_dict()["state"]) is dict
    with TrainStep(module, nn.MSELoss(), lambda _: optimizer, TWO, schedule) as step:
        step(*batch(1, 8))


def hooks_called_after_an_interrupt(place: int) -> tuple[list[str], bool]:
    """Interrupt the removal of hooks, or their return; return those called then, and whether."""
    weight = nn.Parameter(torch.ones(2))
    called: list[str] = []
    weight.register_hook(lambda gradient: called.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    gradients = ParameterGradients([weight])
    with contextlib.suppress(KeyboardInterrupt), Interrupted(place) as interrupted:
        gradients.set_aside()
        gradients.restore()
    gradients.restore()
    gradients.set_aside()
    weight.register_hook(lambda gradient: called.append("later"))
    gradients.restore()
    weight.sum().backward()
    return called, interrupted.raised


def test_an_interrupt_of_a_step_with_kept_replicas_loses_no_hook() -> None:
    """Hooks are removed before backward: a lost one would never be called again."""
    for place in itertools.count(1):
        called, raised = hooks_called_after_an_interrupt(place)
        assert called == ["tensor", "later", "accumulated"], place
        if not raised:
            return


@pytest.mark.skipif(
    sys.version_info >= (3, 14),
    reason="an interrupt of threading.Thread.start can keep a lock that every new thread needs",
)
def test_a_process_ends_after_interrupts_while_threads_start() -> None:
    """An interrupt inside `Thread.start` keeps the lock that the new thread needs."""
    code = f"""
import contextlib
from dpbench.engine.parallel_apply import Spawn
from tests.engine.law.interrupts import Interrupted

for place in range(1, {STARTING}):
    with contextlib.suppress(KeyboardInterrupt, RuntimeError), Interrupted(place):
        Spawn().run(lambda i: None, 2)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
