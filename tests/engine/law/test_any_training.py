"""Trainings over whatever hypothesis draws, held bit by bit against the chunked reference."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import dpbench
from dpbench.records.schedule import Schedule
from tests.engine.conformance import Place
from tests.engine.law.test_any_inputs import (
    NESTED,
    STEPPED,
    TARGET,
    TENSORS,
    Case,
    Leaf,
    Net,
    Pair,
    assert_same,
    at,
    build,
    every_kind,
    expect,
    leaves,
    on_kind,
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
    schedule: Schedule
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
def trainings(draw: st.DrawFn, schedules: Sequence[Schedule], *, sized: bool = False) -> Training:
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
    return Training(
        case,
        draw(st.sampled_from([TARGET, {"t": TARGET}, Pair(None, [TARGET]), (TARGET,)])),
        draw(st.sampled_from(schedules)),
        draw(st.sampled_from(list(OPTIMIZERS))),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from([None, None, 0.5])),
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


def train(training: Training, kind: str) -> Trained:
    """Step by the engine, on devices of this kind."""
    case, place = training.case, Place(kind)
    ids = place.ids(*range(case.devices))
    dpbench.engine.resolve(ids)
    module, inputs, losses = Net(idle=training.idle).to(place.device()), [], []
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
        for n in range(CALLS):

            def placed(leaf: Leaf, n: int = n) -> Tensor:
                inputs.append(at(leaf.made(case.rows, n), case, place))
                return inputs[-1]

            args = build(case.args, placed)
            target = build(
                training.target, lambda leaf, n=n: at(leaf.made(case.rows, n), case, place)
            )
            losses.append(float(step(args, target)))
        state = copy.deepcopy(step.state_dict())
    return Trained(
        state["module"],
        {name: parameter.grad for name, parameter in module.named_parameters()},
        [tensor.grad for tensor in inputs],
        {**state["optimizer"], "state": dict(sorted(state["optimizer"]["state"].items()))},
        losses,
    )


def expect_training(training: Training) -> Trained:
    """Return what steps must leave: copies for the chunks in every call, and one optimizer."""
    case = training.case
    module = Net(idle=training.idle)
    optimizer = OPTIMIZERS[training.optimizer](module.parameters())
    of_inputs: list[Tensor | None] = []
    losses = []
    for n in range(CALLS):
        if n % training.accumulate == 0:
            optimizer.zero_grad()
        (wanted,) = leaves(
            build(training.target, lambda leaf, n=n: leaf.made(case.rows, n)), Tensor
        )

        def pull(wholes: list[Tensor], wanted: Tensor = wanted) -> list[Tensor]:
            ends = [whole.requires_grad_() for whole in wholes]
            *parts, exponential = ends[1:]
            output = {"whole": ends[0], "parts": (parts, Pair(exponential, None))}
            loss = summed(output, (wanted,)) / rows_of(output, wanted)
            losses.append(float(loss.detach()))
            (loss / training.accumulate if training.accumulate > 1 else loss).backward()
            return [end.grad for end in ends]

        result = expect(case, module, training.schedule, n, pull)
        of_inputs += result.of_inputs
        for name, parameter in module.named_parameters():
            part = result.gradients[name]
            parameter.grad = (
                part
                if parameter.grad is None
                else parameter.grad
                if part is None
                else parameter.grad + part
            )
        module.load_state_dict(result.buffers, strict=False)
        if (n + 1) % training.accumulate == 0:
            if training.clip_norm is not None:
                nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)
            optimizer.step()
    return Trained(
        module.state_dict(),
        {name: parameter.grad for name, parameter in module.named_parameters()},
        of_inputs,
        optimizer.state_dict(),
        losses,
    )


def check_training(training: Training, kind: str) -> None:
    """Compare some steps with the reference."""
    expected, ours = expect_training(training), train(training, kind)
    assert ours.losses == pytest.approx(expected.losses, rel=1e-5)
    assert_same(ours.state, expected.state, "weights and buffers")
    assert_same(ours.gradients, expected.gradients, "gradients")
    assert_same(ours.of_inputs, expected.of_inputs, "gradients of inputs")
    assert_same(ours.optimizer, expected.optimizer, "state of the optimizer")


@pytest.mark.slow
@every_kind
@settings(derandomize=True, max_examples=50, deadline=None)
@given(training=trainings(STEPPED))
def test_any_training_equals_the_chunked_reference_on_any_schedule(
    kind: str, training: Training
) -> None:
    check_training(replace(training, schedule=on_kind(training.schedule, kind)), kind)


@pytest.mark.slow
@every_kind
@settings(derandomize=True, max_examples=40, deadline=None)
@given(training=trainings(STEPPED, sized=True))
def test_any_chunk_sizes_equal_the_chunked_reference_on_any_schedule(
    kind: str, training: Training
) -> None:
    check_training(replace(training, schedule=on_kind(training.schedule, kind)), kind)
