"""Whatever a loop does between two steps has the same effect on every schedule as in a plain loop.

DPBENCH_LAW_STEPS=100000 asks for a long run: at least that many rule steps, whose number is
printed.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import nn

from dpbench.engine.errors import Refused
from dpbench.engine.fast import update
from dpbench.records.schedule import FASTEST, SELECTED, Schedule
from tests.engine import nets
from tests.engine.law import changes as law_changes
from tests.engine.law.changes import CHANGES, Change
from tests.engine.law.sides import EVERYWHERE, KEPT, Loop, Pair

# a parameter whose data was replaced by a transposed tensor gets gradients of another layout; torch
# warns of it once
pytestmark = pytest.mark.filterwarnings(
    "ignore:grad and param do not obey the gradient layout contract"
)

SCHEDULES = [*map(str, Schedule), *SELECTED]
LONG = int(os.environ.get("DPBENCH_LAW_STEPS", "0"))
SEQUENCES = [(50, 3), (50, 6), (200, 32)]
"""(How many, of how many rules); the short ones come first."""
SMALL = st.integers(0, 5)


class Training(RuleBasedStateMachine):
    """One training on both sides."""

    rules = 0
    pair: Pair

    @initialize(
        schedule=st.sampled_from(SCHEDULES),
        devices=st.sampled_from([2, 3, 1]),
        module=st.sampled_from(list(nets.MODULES)),
        criterion=st.sampled_from(list(nets.CRITERIA)),
        optimizer=st.sampled_from([*nets.OPTIMIZERS, *nets.FUSED, "two in one object"]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
        accumulate=st.sampled_from([1, 2]),
        clip_norm=st.sampled_from([None, None, 0.5]),
        hold=st.booleans(),
        watch=st.booleans(),
        one_by_one=st.booleans(),
    )
    def begin(
        self,
        schedule: str,
        devices: int,
        module: str,
        criterion: str,
        optimizer: str,
        dtype: torch.dtype,
        one_by_one: bool,
        **more: Any,
    ) -> None:
        self.patched = pytest.MonkeyPatch()
        if not one_by_one:
            self.patched.setattr(update, "ONE_BY_ONE_BYTES", 0)
        if criterion == "regularised" and schedule in KEPT:
            criterion = "mse"  # a local loss is a sum over rows
        if optimizer in nets.OTHERS:  # they have no groups, and named schedules refuse them
            more["hold"] = False
            schedule = FASTEST if schedule in KEPT else schedule
        if schedule in EVERYWHERE and (
            more["accumulate"] > 1 or more["clip_norm"] is not None or more["hold"]
        ):
            schedule = FASTEST  # these need complete gradients
        self.number, self.failed, self.dtype, self.devices = 0, False, dtype, devices
        self.fused = optimizer == "fused"
        schedule = self.exact(schedule)
        self.pair = Pair(
            lambda: nets.MODULES[module]().to(dtype),
            nets.CRITERIA[criterion],
            (nets.OPTIMIZERS | nets.FUSED | nets.OTHERS)[optimizer],
            schedule,
            devices=devices,
            **more,
        )
        self.pair.do(law_changes.save, 0)

    def exact(self, schedule: str) -> str:
        """Return another schedule where fused kernels would step a flat buffer.

        Such a step rounds differently.
        """
        return "allreduce" if self.fused and schedule == Schedule.SHARDED else schedule

    def batch(self, size: int) -> nets.Batch:
        """Return the next batch: even, uneven, or with fewer chunks than devices."""
        self.number += 1
        rows = (4 * self.devices, 3 * self.devices - 1, 4)[size % 3]
        return nets.batch(self.number, rows, self.pair.plain.criterion, self.dtype)

    def take(self, size: int) -> None:
        """Take a step; a schedule that can no longer run refuses it and changes nothing."""
        inputs, target = self.batch(size)
        asked = self.pair.ours.asked
        try:
            self.pair.step(inputs, target)
        except Refused:
            assert not self.pair.can_have(asked), f"{asked} refused a step that it can take"
            self.pair.check(gradients=False)
            self.pair.move(FASTEST, same_optimizer=True)
            self.pair.step(inputs, target)

    @rule(size=SMALL)
    def step(self, size: int) -> None:
        Training.rules += 1
        self.take(size)

    @rule(size=SMALL, again=st.booleans())
    def step_twice(self, size: int, again: bool) -> None:
        Training.rules += 1
        self.take(size)
        self.take(size + again)

    @rule(size=SMALL)
    def step_in_a_thread(self, size: int) -> None:
        Training.rules += 1
        with ThreadPoolExecutor(1) as other:
            other.submit(self.take, size).result()

    @rule(change=st.sampled_from(CHANGES), k=SMALL)
    def change(self, change: Change, k: int) -> None:
        Training.rules += 1
        if self.pair.plain.is_bare and change in law_changes.OF_OPTIMIZERS:
            return
        if not (self.failed and change is law_changes.assign_resized):
            self.pair.do(change, k)

    @rule(
        row=SMALL,
        backward=st.booleans(),
        error=st.sampled_from([KeyboardInterrupt, nets.Trapped]),
    )
    def fail(self, row: int, backward: bool, error: type[BaseException]) -> None:
        Training.rules += 1
        inputs, target = self.batch(0)
        if not self.pair.can_have(self.pair.ours.asked):
            self.pair.move(FASTEST, same_optimizer=True)

        def trap(loop: Loop) -> None:
            loop.module.trap.row = int(inputs[1][row % len(inputs[1])])
            loop.module.trap.backward, loop.module.trap.error = backward, error

        self.pair.fail(inputs, target, trap, error)
        # torch may keep the graph of a failed backward, and with it the shapes of parameters
        self.failed = True

    @rule(place=st.integers(1, 3000), again=st.booleans())
    def interrupt(self, place: int, again: bool) -> None:
        Training.rules += 1
        if not self.pair.can_have(self.pair.ours.asked):
            self.pair.move(FASTEST, same_optimizer=True)
        for _ in range(1 + again):
            if self.pair.interrupt(*self.batch(0), place):
                self.failed = True

    @rule()
    def give_a_batch_out_of_reach(self) -> None:
        Training.rules += 1
        if self.devices > 1 and self.pair.can_have(self.pair.ours.asked):
            self.pair.refuse(*self.batch(0))

    @rule(schedule=st.sampled_from(SCHEDULES), same_optimizer=st.booleans())
    def move(self, schedule: str, same_optimizer: bool) -> None:
        Training.rules += 1
        self.pair.move(self.exact(schedule), same_optimizer=same_optimizer)

    @rule(k=SMALL)
    def restore(self, k: int) -> None:
        Training.rules += 1
        self.pair.do(law_changes.restore, k)

    @rule()
    def look(self) -> None:
        Training.rules += 1
        self.pair.check(gradients=False, state=True)

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.ours.close()
        if hasattr(self, "patched"):
            self.patched.undo()


def run(sequences: int, rules: int, number: int | None = None) -> None:
    """Run sequences of rules, the same ones in every run with the same number.

    Nothing shrinks what fails: that takes minutes, and a short sequence that fails comes before the
    long ones.
    """
    run_state_machine_as_test(
        Training if number is None else seed(number)(Training),
        settings=settings(
            max_examples=sequences,
            stateful_step_count=rules,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            deadline=None,
            database=None,
            derandomize=number is None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
@pytest.mark.timeout(0 if LONG else 300)
def test_a_loop_has_its_effect_on_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    for sequences, rules in SEQUENCES:
        run(sequences, rules)
    for number in itertools.takewhile(lambda _: Training.rules < LONG, itertools.count()):
        run(*SEQUENCES[-1], number)
    if LONG:
        with capsys.disabled():
            print(f"\n{Training.rules} steps of rules")


QUIET = [
    law_changes.transpose_gradients,
    law_changes.read_state,
    law_changes.evaluate,
    law_changes.sync,
    law_changes.save,
]
"""The changes that leave no trace in a module that evaluates without writing."""


@pytest.mark.parametrize("change", [change for change in CHANGES if change not in QUIET])
def test_a_change_that_one_side_misses_is_seen(change: Change) -> None:
    criterion = nn.CrossEntropyLoss if change is law_changes.edit_criterion else nn.MSELoss
    module = nets.Table if change is law_changes.assign_resized else nets.Net
    with Pair(module, lambda _: criterion(), schedule="reference", hold=True) as both:
        both.step(*nets.batch(1, 8, criterion()))
        both.do(law_changes.hook_module, 0)
        change(both.plain, 3 if change is law_changes.set_mode else 1)
        with pytest.raises(AssertionError):
            both.step(*nets.batch(2, 8, criterion()))
