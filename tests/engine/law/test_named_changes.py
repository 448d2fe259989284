"""Changes between steps that the engine once ignored or took wrongly, each under its name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench import DataParallel
from dpbench.engine.errors import Refused
from dpbench.engine.train_step import TrainStep
from dpbench.records.schedule import FASTEST, Schedule
from tests.engine import rungs
from tests.engine.law import changes as law_changes
from tests.engine.law.compare import assert_same
from tests.engine.law.sides import EVERYWHERE, Loop, pair, refusing
from tests.engine.nets import OPTIMIZERS, Net, Table, Trapped, Writer, batch

# a parameter whose data was replaced by a transposed tensor gets gradients of another layout; torch
# warns of it once
pytestmark = pytest.mark.filterwarnings(
    "ignore:grad and param do not obey the gradient layout contract"
)

# ---------------------------------------------------------------- a, b: the criterion

EDITS: dict[str, tuple[Any, Any]] = {
    "weight": (nn.CrossEntropyLoss, torch.tensor([1.0, 3.0, 0.5])),
    "label_smoothing": (nn.CrossEntropyLoss, 0.2),
    "ignore_index": (nn.CrossEntropyLoss, 1),
    "beta": (nn.SmoothL1Loss, 0.1),
    "reduction": (nn.MSELoss, "sum"),
}


@pytest.mark.parametrize("name", list(EDITS))
@rungs.every("rung", Schedule.LOCAL)
def test_an_edit_of_the_criterion_is_seen(rung: str, name: str) -> None:
    kind, value = EDITS[name]
    with pair(rung, criterion=kind) as both:
        both.step(*batch(1, 8, kind()))
        both.do(lambda loop: setattr(loop.criterion, name, value))
        both.step(*batch(2, 8, kind()))
        both.step(*batch(4, 8, kind()))


def padded(number: int, rows: int, padding: Callable[[Tensor], Any]) -> Any:
    """Return a batch of classes in which `padding` has written zeros, and no other zeros."""
    inputs, target = batch(number, rows)
    classes = target[:, 1:].argmax(1) + 1
    padding(classes)
    return inputs, classes


PADDINGS: dict[str, list[Callable[[Tensor], Any]]] = {
    "from step 2 on": [lambda t: t, lambda t: t[:3].zero_(), lambda t: t[2:6].zero_()],
    "all in step 1": [lambda t: t.zero_(), lambda t: t, lambda t: t[:3].zero_()],
    "one replica's rows": [lambda t: t[:4].zero_(), lambda t: t[4:].zero_()],
}


@pytest.mark.parametrize("padding", list(PADDINGS))
@rungs.every("rung", Schedule.LOCAL)
def test_a_partial_that_ignores_padding_divides_by_what_is_left(rung: str, padding: str) -> None:
    with pair(rung, criterion=lambda: partial(F.cross_entropy, ignore_index=0)) as both:
        for number, pad in enumerate(PADDINGS[padding]):
            both.step(*padded(number, 8, pad))


# ---------------------------------------------------------------- c, d: parameters


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize(
    "freeze", [law_changes.freeze_layer, law_changes.freeze_all_but_one, law_changes.freeze_one]
)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_freezing_and_unfreezing_are_seen(
    rung: str, freeze: law_changes.Change, optimizer: str
) -> None:
    with pair(rung, optimizer=OPTIMIZERS[optimizer]) as both:
        both.step(*batch(1, 8))
        both.do(freeze, 0)
        both.step(*batch(2, 8))
        both.step(*batch(3, 7))
        both.do(law_changes.thaw, 0)
        both.step(*batch(4, 8))
        both.step(*batch(5, 8))


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    "change", [law_changes.assign_data, law_changes.assign_transposed, law_changes.assign_resized]
)
def test_data_that_is_assigned_is_seen_with_and_without_sync(
    rung: str, sync: bool, change: law_changes.Change
) -> None:
    with pair(rung, Table) as both:
        for number in range(3):
            both.step(*batch(number, 8))
            both.do(change, number)
            if sync:
                both.do(law_changes.sync, 0)
        both.step(*batch(3, 8))


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize("change", [law_changes.clamp_data, law_changes.write_numpy])
def test_writes_past_torch_are_seen_after_sync_or_where_the_root_steps(
    rung: str, change: law_changes.Change
) -> None:
    with pair(rung) as both:
        for number in range(3):
            both.step(*batch(number, 8))
            both.do(change, number)
        both.step(*batch(3, 8))


@pytest.mark.parametrize("rung", rungs.params(EVERYWHERE))
def test_debug_refuses_replicas_that_differ_from_the_module(rung: str) -> None:
    inputs, target = batch(1, 8)
    module = Net()
    with TrainStep(
        module, nn.MSELoss(), lambda p: OPTIMIZERS["sgd"](list(p)), ["cpu"] * 2, rung, debug=True
    ) as step:
        step(inputs, target)
        module.first.weight.data.clamp_(-0.1, 0.1)
        before = copy.deepcopy(module.state_dict())
        with pytest.raises(Refused, match=r"first\.weight") as error:
            step(inputs, target)
        assert "sync()" in str(error.value)
        assert_same(dict(module.state_dict()), dict(before), "module")
        step.sync()
        step(inputs, target)


# ---------------------------------------------------------------- e: hooks


HOOKED = [
    (1, law_changes.hook_parameter, 0),
    (1, law_changes.hook_accumulation, 1),
    (2, law_changes.hook_parameter, 1),
    (2, law_changes.hook_accumulation, 0),
]
"""Every two values meet: calls of an update, the hook, and the parameter, whose number also makes
the hook write.
"""


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize(("accumulate", "hook", "k"), HOOKED)
def test_hooks_on_parameters_see_the_reduced_gradient_once(
    rung: str, accumulate: int, hook: law_changes.Change, k: int
) -> None:
    with (
        refusing(rung, hook.__name__),
        pair(rung, accumulate=accumulate, between=False) as both,
    ):
        for number in range(2):
            both.step(*batch(number, 8))
        both.do(hook, k)
        for number in range(2, 6):
            both.step(*batch(number, 8))
        both.do(law_changes.remove_hooks, 0)
        both.step(*batch(6, 8))


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize("k", [0, 1])
def test_hooks_of_the_optimizers_step_run_once(rung: str, k: int) -> None:
    with refusing(rung, "hook_the_optimizer"), pair(rung) as both:
        both.step(*batch(1, 8))
        both.do(law_changes.hook_the_optimizer, k)
        both.step(*batch(2, 8))
        both.step(*batch(3, 8))


# ---------------------------------------------------------------- f: the optimizer


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize(
    "change",
    [
        law_changes.clear_state,
        law_changes.write_state,
        law_changes.replace_state,
        law_changes.read_state,
    ],
)
def test_the_optimizers_state_is_cleared_edited_and_read(
    rung: str, optimizer: str, change: law_changes.Change
) -> None:
    with pair(rung, optimizer=OPTIMIZERS[optimizer]) as both:
        for number in range(2):
            both.step(*batch(number, 8))
        both.do(change, 0)
        for number in range(2, 4):
            both.step(*batch(number, 8))
        both.check(state=True)


@rungs.every("rung", Schedule.LOCAL)
def test_a_group_that_is_added_is_stepped(rung: str) -> None:
    with refusing(rung, "hold"), pair(rung, hold=True) as both:
        both.step(*batch(1, 8))
        both.do(law_changes.add_group, 0)
        both.step(*batch(2, 8))
        both.step(*batch(3, 8))


@rungs.every("rung")
@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_after_close_is_refused(rung: str, devices: int) -> None:
    inputs, target = batch(1, 8)
    module = Writer()
    step = TrainStep(
        module, nn.MSELoss(), lambda p: OPTIMIZERS["sgd"](list(p)), ["cpu"] * devices, rung
    )
    step(inputs, target)
    step.close()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(RuntimeError):
        step(inputs, target)
    assert_same(dict(module.state_dict()), dict(before), "module")


# ---------------------------------------------------------------- g: interrupts and errors


@rungs.every("rung", Schedule.LOCAL)
@pytest.mark.parametrize(
    ("accumulate", "row", "error"),
    [(1, 0, KeyboardInterrupt), (1, 7, Trapped), (2, 0, Trapped), (2, 7, KeyboardInterrupt)],
)
def test_a_step_that_failed_in_one_replica_leaves_nothing_to_the_next(
    rung: str, accumulate: int, row: int, error: type[BaseException]
) -> None:
    def trap(loop: Loop) -> None:
        loop.module.trap.row, loop.module.trap.backward, loop.module.trap.error = (
            100 * number + row,
            True,
            error,
        )

    with (
        refusing(rung, f"accumulate={accumulate}"),
        pair(rung, accumulate=accumulate, between=False) as both,
    ):
        for number in (1, 2, 3):  # with two calls an update, the first and the second of them fail
            both.fail(*batch(number, 8), trap, error)
            both.step(*batch(number + 10, 8))
        for number in (20, 21, 22):
            both.step(*batch(number, 8))


@rungs.every("rung")
@pytest.mark.parametrize(
    "hook", [law_changes.hook_parameter, law_changes.hook_accumulation, law_changes.hook_node]
)
def test_hooks_are_back_after_a_step_that_failed(rung: str, hook: law_changes.Change) -> None:
    def trap(loop: Loop) -> None:
        loop.module.trap.row, loop.module.trap.error = 100, Trapped

    with (
        refusing(rung, "accumulate=2"),
        pair(rung, accumulate=2, between=False) as both,
    ):
        both.do(hook, 0)
        both.fail(*batch(1, 8), trap, Trapped)
        for side in (both.plain, both.ours):
            side.log.clear()
            parameter = law_changes.pick(side, 0)
            torch.autograd.backward([parameter], [torch.ones_like(parameter)])
            assert len(side.log) == 1
            parameter.grad = None
            side.log.clear()


@rungs.every("rung")
def test_gradients_can_be_read_between_the_calls_of_one_update(rung: str) -> None:
    with refusing(rung, "accumulate=2"), pair(rung, accumulate=2) as both:
        for number in range(4):
            both.step(*batch(number, 8))


@rungs.every("rung")
@pytest.mark.parametrize("devices", [2, 3])
def test_a_parameter_frozen_between_the_calls_of_one_update_is_stepped_once_more(
    rung: str, devices: int
) -> None:
    with (
        refusing(rung, "accumulate=2"),
        pair(rung, accumulate=2, devices=devices) as both,
    ):
        both.step(*batch(1, 8))
        # its gradient of the first call stays
        both.do(lambda loop: loop.module.first.bias.requires_grad_(False))
        for number in range(2, 8):
            both.step(*batch(number, 8))


class Counter(Net):
    """A forward whose output depends on the rows that replica 0 has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        self.rows += len(x)
        return super().forward(x, ids) * self.rows


@rungs.every("rung")
def test_every_step_begins_with_replica_0s_buffers_on_every_replica(rung: str) -> None:
    """With an odd number of rows, the replicas count different shares."""
    with pair(rung, Counter) as both:
        for number in range(1, 4):
            both.step(*batch(number, 7))


# ---------------------------------------------------------------- h: attributes that forward writes


BATCHES = {
    "from step 2 on": [2, 3, 5, 7],
    "from step 3 on": [2, 4, 3, 5, 7],
    "in some steps": [2, 3, 4, 6, 5, 8, 7],
}
"""Numbers of batches: a Writer writes attributes in the odd ones."""


@rungs.every("rung", Schedule.CACHED)
@pytest.mark.parametrize("when", list(BATCHES))
def test_a_forward_that_writes_attributes_in_some_steps_is_forgotten(rung: str, when: str) -> None:
    with pair(rung, Writer) as both:
        for number in BATCHES[when]:
            both.step(*batch(number, 8))


@pytest.mark.parametrize("when", list(BATCHES))
@pytest.mark.parametrize("schedule", ["cached", FASTEST])
def test_a_wrapper_forgets_what_forward_writes_in_some_calls(schedule: str, when: str) -> None:
    torch.manual_seed(0)
    module, plain = Writer(), Writer()
    plain.load_state_dict(module.state_dict())
    wrapped = DataParallel(module, ["cpu", "cpu"], schedule=schedule)
    for number in BATCHES[when]:
        pieces = [t.chunk(2) for t in batch(number, 8)[0]]
        expected = torch.cat([copy.deepcopy(plain)(*piece) for piece in zip(*pieces, strict=True)])
        assert_same(wrapped(*batch(number, 8)[0]), expected, "output")


# ---------------------------------------------------------------- i: checkpoints inside a wrapped
# module


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(4, 4), nn.Linear(4, 3), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=self.use_reentrant)
        out: Tensor = self.last(h)
        return out


# as without any wrapper
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["reference", "cached", FASTEST])
def test_a_forward_without_gradients_may_come_between_forward_and_backward(
    schedule: str, use_reentrant: bool
) -> None:
    torch.manual_seed(0)
    module, x = Checkpointed(use_reentrant), torch.randn(8, 4, requires_grad=True)
    copies, pieces = (
        [copy.deepcopy(module) for _ in range(2)],
        [p.detach().requires_grad_() for p in x.chunk(2)],
    )
    torch.cat(
        [one(piece) for one, piece in zip(copies, pieces, strict=True)]
    ).square().sum().backward()
    wrapped = DataParallel(module, ["cpu", "cpu"], schedule=schedule)
    loss = wrapped(x).square().sum()
    with torch.no_grad():
        wrapped(torch.ones(8, 4))
    loss.backward()
    for p, first, second in zip(
        module.parameters(), copies[0].parameters(), copies[1].parameters(), strict=True
    ):
        assert_same(p.grad, first.grad + second.grad, "gradient")
    assert_same(x.grad, torch.cat([piece.grad for piece in pieces]), "gradient of the inputs")


# ---------------------------------------------------------------- j: other dtypes and shapes


def widen(module: Table) -> Table:
    module.table.weight.data = torch.cat([module.table.weight.data] * 2)
    return module


CONVERSIONS: dict[str, tuple[Callable[[Any], nn.Module], torch.dtype]] = {
    "bfloat16": (nn.Module.bfloat16, torch.bfloat16),
    "double": (nn.Module.double, torch.float64),
    "resized": (widen, torch.float32),
}


def near(ours: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Compare exactly, or bf16 within rounding."""
    rtol = 2e-2 if dtype is torch.bfloat16 else 0.0
    torch.testing.assert_close(ours, plain, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", list(CONVERSIONS))
@rungs.every("rung", Schedule.LOCAL)
def test_a_module_that_is_converted_between_steps_stays_converted(rung: str, name: str) -> None:
    convert, dtype = CONVERSIONS[name]
    made = pair(rung, Table, optimizer=lambda p: torch.optim.SGD(p, lr=0.05))
    made.step(*batch(1, 8))
    for side in (made.plain, made.ours):
        convert(side.module)
        side.optimizer.zero_grad()
    (x, ids), target = batch(2, 8)
    inputs = ((x.to(dtype), ids), target.to(dtype))
    made.ours.step(*inputs)
    made.plain.step(*inputs)
    near(made.ours.module.state_dict(), made.plain.module.state_dict(), dtype)
    made.ours.close()
    assert all(p.dtype is dtype for p in made.ours.module.parameters())


@pytest.mark.parametrize("name", list(CONVERSIONS))
def test_a_wrapped_module_that_is_converted_stays_converted(name: str) -> None:
    convert, dtype = CONVERSIONS[name]
    torch.manual_seed(0)
    module = Table()
    wrapped = DataParallel(module, ["cpu", "cpu"], schedule="cached")
    (x, ids), _ = batch(1, 8)
    wrapped(x, ids)
    convert(module)
    plain = copy.deepcopy(module)
    expected = torch.cat(
        [plain(*piece) for piece in zip(x.to(dtype).chunk(2), ids.chunk(2), strict=True)]
    )
    assert_same(wrapped(x.to(dtype), ids), expected, "output")
    assert_same(dict(module.named_parameters()), dict(plain.named_parameters()), "parameters")
