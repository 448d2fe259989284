"""Trainings over whatever hypothesis draws, compared bit by bit with the plain reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dpbench
from dpbench.records.schedule import Schedule
from tests.engine.chunked import PlainStep
from tests.engine.conformance import Place
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import EVERYWHERE
from tests.engine.law.test_any_inputs import (
    NESTED,
    TARGET,
    TENSORS,
    Case,
    Leaf,
    Net,
    Pair,
    at,
    build,
    every_kind,
    leaves,
)

CALLS = 4
"""How often a drawn training is called: four updates, or two where two calls make one."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "two_groups": lambda p: torch.optim.AdamW(
        [
            {"params": (every := list(p))[::2], "lr": 1e-2},
            {"params": every[1::2], "weight_decay": 0.2},
        ]
    ),
}


@dataclass(frozen=True)
class Training:
    """Some steps of TrainStep, and the target's containers."""

    case: Case
    target: Any
    schedule: str
    optimizer: str
    accumulate: int
    clip_norm: float | None
    idle: bool  # whether the net has a layer that no input reaches

    @property
    def whole_net(self) -> bool:
        """Return whether all layers are used, so all parameters get gradients on one device."""
        kinds = {leaf.kind for leaf in leaves(self.case.args)}
        return not self.idle and "index" in kinds


@st.composite
def trainings(draw: st.DrawFn, schedules: Sequence[str], *, sized: bool = False) -> Training:
    """Draw steps over batches that can be cut.

    With `sized`, each device's number of rows is drawn too.
    """
    args = (*draw(st.lists(NESTED, max_size=2)), draw(TENSORS))
    devices = draw(st.integers(1, 4))
    sizes = (
        tuple(draw(st.lists(st.integers(1, 4), min_size=devices, max_size=devices)))
        if sized
        else None
    )
    case = Case(
        args,
        {},
        sum(sizes) if sizes else draw(st.integers(1, 9)),
        devices,
        sizes,
        draw(st.booleans()),
    )
    schedule = draw(st.sampled_from(schedules))
    complete = schedule not in EVERYWHERE  # one device has the complete gradients
    return Training(
        case,
        draw(st.sampled_from([TARGET, {"t": TARGET}, Pair(None, [TARGET]), (TARGET,)])),
        schedule,
        draw(st.sampled_from(list(OPTIMIZERS))),
        draw(st.sampled_from([1, 1, 2])) if complete else 1,
        draw(st.sampled_from([None, None, 0.5])) if complete else None,
        draw(st.booleans()),
    )


# ---------------------------------------------------------------- both sides


@dataclass(frozen=True)
class Trained:
    """The results and the state after some steps, on the host."""

    state: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    of_inputs: list[Tensor | None]
    optimizer: dict[str, Any]
    losses: list[float]


def summed(output: Any, target: Any) -> Tensor:
    """Return a loss that is a sum over rows, of all outputs."""
    (wanted,) = leaves(target, Tensor)
    whole: Tensor = sum(((tensor - wanted[:, :3]) ** 2).sum() for tensor in leaves(output, Tensor))
    return whole


def rows_of(output: Any, target: Any) -> int:
    """Return what to divide the sum by."""
    return len(output["whole"])


def after_steps(
    training: Training, module: nn.Module, take: Callable[[Any, Any], Tensor], place: Place
) -> tuple[list[float], list[Tensor | None], dict[str, Tensor | None]]:
    """Take some steps; return losses, and the gradients of inputs and parameters."""
    case = training.case
    inputs: list[Tensor] = []
    losses = []
    for n in range(CALLS):

        def placed(leaf: Leaf, n: int = n) -> Tensor:
            inputs.append(at(leaf.made(case.rows, n), case, place))
            return inputs[-1]

        def target(leaf: Leaf, n: int = n) -> Tensor:
            return at(leaf.made(case.rows, n), case, place)

        losses.append(float(take(build(case.args, placed), build(training.target, target))))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return losses, [tensor.grad for tensor in inputs], gradients


def train(training: Training, kind: str) -> Trained:
    """Step by the engine, on devices of this kind."""
    case, place = training.case, Place(kind)
    ids = place.ids(*range(case.devices))
    dpbench.engine.resolve(ids)
    module = Net(idle=training.idle).to(place.device())
    # shares are weights: each device gets one row, and its part of the others
    weights = None if case.sizes is None else [size - 1 + 1e-6 for size in case.sizes]
    with dpbench.TrainStep(
        module,
        (summed, rows_of),
        OPTIMIZERS[training.optimizer],
        ids,
        training.schedule,
        accumulate=training.accumulate,
        clip_norm=training.clip_norm,
        chunk_sizes=weights,
    ) as step:
        losses, of_inputs, gradients = after_steps(training, module, step, place)
        state = copy.deepcopy(step.state_dict())
    return Trained(state["module"], gradients, of_inputs, ordered(state["optimizer"]), losses)


def expect_training(training: Training) -> Trained:
    """Step by the plain reference."""
    case, module = training.case, Net(idle=training.idle)
    optimizer = OPTIMIZERS[training.optimizer](module.parameters())
    plain = PlainStep(
        module,
        lambda output, target: summed(output, target) / rows_of(output, target),
        optimizer,
        case.devices,
        accumulate=training.accumulate,
        clip_norm=training.clip_norm,
        sizes=case.sizes,
    )
    losses, of_inputs, gradients = after_steps(training, module, plain.step, Place("cpu"))
    return Trained(
        module.state_dict(), gradients, of_inputs, ordered(optimizer.state_dict()), losses
    )


def ordered(state: dict[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state, its entries in the order of their numbers."""
    return {**state, "state": dict(sorted(state["state"].items()))}


def check_training(training: Training, kind: str) -> None:
    """Compare some steps with the reference."""
    expected, ours = expect_training(training), train(training, kind)
    assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_same(ours.state, expected.state, "weights and buffers")
    assert_same(ours.gradients, expected.gradients, "gradients")
    assert_same(ours.of_inputs, expected.of_inputs, "gradients of inputs")
    assert_same(ours.optimizer, expected.optimizer, "state of the optimizer")


SCHEDULES = {
    "cpu": tuple(Schedule),
    "emulated": tuple(one for one in Schedule if one is not Schedule.SHARDED),
}
"""The schedules that each kind of device can have."""


@pytest.mark.slow
@every_kind
@settings(derandomize=True, max_examples=50, deadline=None)
@given(data=st.data())
def test_any_training_equals_the_chunked_reference_on_any_schedule(
    kind: str, data: st.DataObject
) -> None:
    check_training(data.draw(trainings(SCHEDULES[kind])), kind)


@pytest.mark.slow
@every_kind
@settings(derandomize=True, max_examples=40, deadline=None)
@given(data=st.data())
def test_any_chunk_sizes_equal_the_chunked_reference_on_any_schedule(
    kind: str, data: st.DataObject
) -> None:
    check_training(data.draw(trainings(SCHEDULES[kind], sized=True)), kind)
