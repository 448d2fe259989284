"""The law of a training loop: a plain loop, the changes a loop can make, and a pair of sides.

`Plain` is the reference, which uses torch only: see tests/engine/chunked.py.
`Ours` wraps a TrainStep. A change between two steps is a function of a `Loop`, and a `Pair` applies
it to both sides.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from dpbench.engine.errors import Refused
from dpbench.engine.train_step import TrainStep
from dpbench.records.schedule import FASTEST, SELECTED, Schedule
from tests.engine.chunked import PlainStep
from tests.engine.law.compare import assert_same, sums_exactly
from tests.engine.law.interrupts import Interrupted
from tests.engine.nets import OPTIMIZERS, Net

KEPT = (Schedule.LOCAL, Schedule.ALLREDUCE, Schedule.SHARDED)
"""The schedules that keep replicas, and compute the loss as a sum over their rows."""
EVERYWHERE = (Schedule.ALLREDUCE, Schedule.SHARDED)
"""The schedules under which no device has the complete gradients of all parameters."""


class Loop:
    """One side: a module, a criterion, an optimizer, and all else that a change may touch."""

    def __init__(
        self, module: nn.Module, criterion: Any, make: Callable[[list[nn.Parameter]], Any]
    ) -> None:
        self.module, self.criterion, self._make = module, criterion, make
        self.held: nn.Parameter | None = None  # no group has it until a change adds it
        self.extra = False  # whether a group has been added for it
        self.hooked = False  # whether a parameter's gradient may have a hook
        self.wrapped: Any = None  # the optimizer whose `step` a change has replaced
        self.log: list[tuple[str, str, Tensor]] = []
        self.handles: list[Any] = []
        self.optimizer_hooks: list[Any] = []
        self.copies: dict[str, Any] = {}

    optimizer: torch.optim.Optimizer

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return a new optimizer with the present groups of the loop."""
        optimizer: torch.optim.Optimizer = self._make([p for p in parameters if p is not self.held])
        if self.extra:
            optimizer.add_param_group({"params": [self.held], "lr": 1e-3})
        return optimizer

    @property
    def is_bare(self) -> bool:
        """Return whether the optimizer has only what a plain loop needs: no groups, no state."""
        return not isinstance(self.optimizer, torch.optim.Optimizer)

    def sync(self) -> None:
        """Announce that weights were written past torch."""

    def touch(self, *_: Any) -> None:
        """Call `sync()` where the schedule cannot see such a write."""

    def names(self) -> dict[nn.Parameter, str]:
        """Return the parameters' names."""
        return {p: name for name, p in self.module.named_parameters()}


class Plain(Loop, PlainStep):
    """The reference: a loop in torch alone that cuts each batch as torch.nn.DataParallel does."""

    def __init__(
        self, *args: Any, devices: int, accumulate: int, clip_norm: float | None, hold: bool
    ) -> None:
        Loop.__init__(self, *args)
        self.held = self.module.get_parameter("last.bias") if hold else None
        PlainStep.__init__(
            self,
            self.module,
            self.criterion,
            self.make_optimizer(self.module.parameters()),
            devices,
            accumulate=accumulate,
            clip_norm=clip_norm,
        )

    @property
    def needs_complete_gradients(self) -> bool:
        """Return whether something reads the complete gradients, or an optimizer leaves some."""
        if self.is_bare:
            return True
        stepped = {p for group in self.optimizer.param_groups for p in group["params"]}
        return (
            self._accumulate > 1
            or self._clip_norm is not None
            or self.hooked
            or bool(self.optimizer_hooks)
            or self.wrapped is self.optimizer
            or any(p.requires_grad and p not in stepped for p in self.module.parameters())
        )

    def reload(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint; the accumulation begins again."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._calls = 0

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint."""
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def move(self, schedule: str, *, same_optimizer: bool) -> None:
        """Go on in a new loop, with the same optimizer or with a new one that loads its state."""
        if not same_optimizer:
            state = copy.deepcopy(self.optimizer.state_dict())
            self.optimizer = self.make_optimizer(self.module.parameters())
            self.optimizer.load_state_dict(state)
        self._calls = 0

    def close(self) -> None:
        """Do nothing."""


class Ours(Loop):
    """The engine's side."""

    def __init__(self, *args: Any, devices: int, schedule: str, hold: bool, **options: Any) -> None:
        super().__init__(*args)
        self._devices, self._options = devices, options
        self.held = self.module.get_parameter("last.bias") if hold else None
        self._start(schedule, self.make_optimizer)

    def _start(self, schedule: str, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.asked = schedule
        self.train = TrainStep(
            self.module, self.criterion, make, ["cpu"] * self._devices, schedule, **self._options
        )
        self.optimizer = self.train.optimizer

    def step(self, inputs: tuple[Tensor, ...], target: Any) -> Tensor:
        """Take one step; check that it ran the schedule asked for and drew no random numbers."""
        random = torch.get_rng_state()
        loss = self.train(inputs, target)
        assert torch.equal(random, torch.get_rng_state()), "the engine drew random numbers"
        assert self.asked in SELECTED or self.train.schedule == self.asked, (
            "the schedule did not run as named"
        )
        return loss

    def sync(self) -> None:
        """Announce it to the engine."""
        self.train.sync()

    def touch(self, *_: Any) -> None:
        """Call `sync()` where the replicas step for themselves."""
        if self.train.schedule in EVERYWHERE:
            self.sync()

    def reload(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint."""
        self.train.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return a checkpoint."""
        return self.train.state_dict()

    def move(self, schedule: str, *, same_optimizer: bool) -> None:
        """Close, and go on with a new TrainStep on another schedule."""
        state, old = copy.deepcopy(self.train.state_dict()), self.optimizer
        self.train.close()
        self._start(schedule, (lambda _: old) if same_optimizer else self.make_optimizer)
        if not same_optimizer:
            self.train.load_state_dict(state)

    def close(self) -> None:
        """Close the step."""
        self.train.close()


class Holder:
    """A batch that is neither a tensor nor a container."""

    def __init__(self, inputs: Any) -> None:
        self.inputs = inputs


# ---------------------------------------------------------------- comparison


def content(loop: Loop) -> dict[str, Any]:
    """Return the module's parameters, buffers and plain attributes by name."""
    attributes = {
        f"{place}.{name}": value
        for place, module in loop.module.named_modules()
        for name, value in plain_attributes(module).items()
    }
    tensors = (*loop.module.named_parameters(), *loop.module.named_buffers())
    return attributes | {name: tensor.detach() for name, tensor in tensors}


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers or texts."""
    kinds = bool | int | float | str
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds)}


def optimizer_state(loop: Loop) -> dict[str, Any]:
    """Return the entries of `optimizer.state` by the parameter's name."""
    return {
        name: dict(loop.optimizer.state[p])
        for p, name in loop.names().items()
        if loop.optimizer.state.get(p)
    }


class Pair:
    """Both sides of one training; leaving it closes the engine's."""

    def __init__(
        self,
        module: Callable[[], nn.Module],
        criterion: Callable[[nn.Module], Any],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = OPTIMIZERS["sgd"],
        schedule: str = FASTEST,
        *,
        devices: int = 2,
        accumulate: int = 1,
        clip_norm: float | None = None,
        hold: bool = False,
        watch: bool = True,
        between: bool = True,
    ) -> None:
        self._watch, self._rounds = (
            watch,
            False,
        )  # whether to compare the optimizer's state each time
        self._between = between  # whether gradients are compared after calls that make no update
        sides: list[tuple[nn.Module, Any, Any]] = []
        for _ in range(2):
            torch.default_generator.manual_seed(0)
            own = module()
            sides.append((own, criterion(own), optimizer))
        options: dict[str, Any] = {
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "devices": devices,
            "hold": hold,
        }
        self.plain = Plain(*sides[0], **options)
        self.ours = Ours(*sides[1], schedule=schedule, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.ours.close()

    def do(self, change: Callable[[Any], Any], *more: Any) -> None:
        """Make one change on both sides; compare what it returns."""
        returned = change(self.plain, *more)
        assert_same(change(self.ours, *more), returned, getattr(change, "__name__", "change"))

    def step(self, inputs: Any, target: Any) -> Tensor:
        """Take one step on both sides and compare everything."""
        loss = self.ours.step(inputs, target)
        self._compare(loss, self.plain.step(inputs, target))
        return loss

    def _compare(self, loss: Tensor, expected: Tensor) -> None:
        """Compare the sides after a step.

        Where the criterion rounds otherwise, nearly, and then as one again.
        """
        local = self.ours.train.schedule in KEPT
        before, self._rounds = self._rounds, local and self._rounds_otherwise()
        if not local:
            assert_same(loss, expected, "loss")
        else:
            torch.testing.assert_close(
                loss, expected, rtol=ulps(loss.dtype), atol=0.0, equal_nan=True
            )
        if before or self._rounds:
            self._check_nearly()
        else:
            self.check()

    def _rounds_otherwise(self) -> bool:
        """Return whether a sum divided at the end may round otherwise than the criterion's mean."""
        return self.ours.asked not in SELECTED and not sums_exactly(self.plain.criterion)

    def _check_nearly(self) -> None:
        """Compare parameters and buffers within rounding, and take over the engine's side."""
        ours, plain = self.ours.module.state_dict(), self.plain.module.state_dict()
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-6, equal_nan=True)
        self._take_over()

    def _take_over(self) -> None:
        """Give the plain side the weights, buffers, gradients and optimizer state of the engine.

        A forward on one device may have counted in an attribute before it was interrupted.
        """
        self.plain.module.load_state_dict(self.ours.module.state_dict())
        for mine, theirs in zip(
            self.ours.module.modules(), self.plain.module.modules(), strict=True
        ):
            vars(theirs).update(plain_attributes(mine))
        self.plain.optimizer.load_state_dict(copy.deepcopy(self.ours.optimizer.state_dict()))
        for mine, theirs in zip(
            self.ours.module.parameters(), self.plain.module.parameters(), strict=True
        ):
            theirs.grad = None if mine.grad is None else mine.grad.clone()

    def interrupt(self, inputs: Any, target: Any, place: int) -> bool:
        """Interrupt a step of the engine at this place; return whether it ended there.

        What an interrupted step has done cannot be compared: the next steps are.
        """
        threads, getter = torch.get_num_threads(), torch.get_rng_state
        with Interrupted(place) as interrupted:
            try:
                loss = self.ours.train(inputs, target)
            except KeyboardInterrupt:
                loss = None
            except RuntimeError as error:
                # Python's Condition releases a lock that it had not yet acquired again
                if not isinstance(error.__context__, KeyboardInterrupt):
                    raise
                loss = None
        assert torch.is_grad_enabled(), "gradients are off after an interrupt"
        assert torch.get_num_threads() == threads, "threads are missing after an interrupt"
        assert torch.get_rng_state == getter, "a function of torch is replaced after an interrupt"
        if loss is None:
            assert interrupted.raised
            self._take_over()
            self.ours.log.clear()
        else:
            self._compare(loss, self.plain.step(inputs, target))
        return loss is None

    def move(self, schedule: str, *, same_optimizer: bool) -> None:
        """Close the engine's side and go on with this schedule, or with one that can run."""
        if not same_optimizer:
            self.do(drop_optimizer_hooks)
        if not self.can_have(schedule):
            schedule = FASTEST
        for side in (self.plain, self.ours):
            side.move(schedule, same_optimizer=same_optimizer)
        self.check(gradients=False)

    def can_have(self, schedule: str) -> bool:
        """Return whether a schedule can run the loop as it is now."""
        if schedule in KEPT and (
            self.plain.is_bare or not hasattr(self.plain.criterion, "reduction")
        ):
            return False
        return not (schedule in EVERYWHERE and self.plain.needs_complete_gradients)

    def refuse(self, inputs: Any, target: Any) -> None:
        """Give the engine a batch whose rows it cannot reach; nothing changes but gradients."""
        with pytest.raises((TypeError, Refused), match="rows"):
            self.ours.train(Holder(inputs), target)
        if self.plain.updated:
            self.plain.optimizer.zero_grad()
            self.ours.optimizer.zero_grad()
        self.check()

    def fail(
        self, inputs: Any, target: Any, trap: Callable[[Any], None], kind: type[BaseException]
    ) -> None:
        """Let a step fail in one replica on both sides, where `trap` sets it up.

        Gradients are not compared.
        """
        self.do(trap)
        for side in (self.plain, self.ours):
            with contextlib.suppress(kind):
                side.step(inputs, target)
                raise AssertionError(f"{type(side).__name__} raised no {kind.__name__}")
        self.do(disarm)
        self.check(gradients=False)

    def check(self, *, gradients: bool = True, state: bool = False) -> None:
        """Compare weights, buffers, gradients, hook calls and, if watched, optimizer state."""
        assert_same(content(self.ours), content(self.plain), "module")
        if gradients and (self._between or self.plain.updated):
            self._check_gradients()
        if gradients:
            self._check_log()
        self.ours.log.clear()
        self.plain.log.clear()
        if (self._watch or state) and not self.plain.is_bare:
            assert_same(optimizer_state(self.ours), optimizer_state(self.plain), "optimizer.state")
            assert_same(ordered(self.ours), ordered(self.plain), "optimizer.state_dict()")

    def _check_gradients(self) -> None:
        sharded = self.ours.train.schedule == Schedule.SHARDED
        for (name, ours), plain in zip(
            self.ours.module.named_parameters(), self.plain.module.parameters(), strict=True
        ):
            if not (sharded and ours.grad is None):
                assert_same(ours.grad, plain.grad, f"gradient of {name}")

    def _check_log(self) -> None:
        ours, plain = (
            sorted(side.log, key=lambda entry: entry[:2]) for side in (self.ours, self.plain)
        )
        assert_same(ours, plain, "calls of hooks")


def ordered(loop: Loop) -> dict[str, Any]:
    """Return `optimizer.state_dict()`, the states in the order of their numbers."""
    state = loop.optimizer.state_dict()
    return {**state, "state": {n: state["state"][n] for n in sorted(state["state"])}}


def disarm(loop: Loop) -> None:
    """Let forward and backward run again."""
    loop.module.trap.row = -1


def drop_optimizer_hooks(loop: Loop) -> None:
    """Remove the hooks from the optimizer's step."""
    while loop.optimizer_hooks:
        loop.optimizer_hooks.pop().remove()


def ulps(dtype: torch.dtype) -> float:
    """Return the permitted error of a loss added up by parts: sum and divisor round differently."""
    return (16 if dtype in (torch.float32, torch.float64) else 2) * torch.finfo(dtype).eps


def pair(
    rung: str, module: Callable[[], nn.Module] = Net, criterion: Any = nn.MSELoss, **more: Any
) -> Pair:
    """Return both sides; the optimizer's state is compared where a test asks for it."""
    return Pair(module, lambda _: criterion(), schedule=rung, **{"watch": False, **more})


# ---------------------------------------------------------------- refusals


FLAT = (Schedule.SHARDED,)
REFUSALS: dict[str, tuple[Schedule, ...]] = {
    # the optimizer steps a tensor that is no longer a parameter of the module
    "assign_parameters": KEPT,
    "parametrize": KEPT,
    "remove_layer": KEPT,
    "replace_layer": KEPT,
    "tie": KEPT,
    # parameters that share memory, or whose memory a flat buffer cannot hold
    "share_data": EVERYWHERE,
    "an alias of a weight in the module": FLAT,
    "share_memory": FLAT,
    "test_data_that_the_loop_has_put_aside_stays_as_it_is": FLAT,
    "test_parameters_may_be_views_of_a_vector_that_the_loop_keeps": FLAT,
    "test_two_steps_may_train_one_module_in_turns": FLAT,
    "holes": FLAT,
    # losses and targets that are not sums over rows
    "Counting": KEPT,
    "couple": KEPT,
    "halve_by_a_hook": KEPT,
    "contrastive": KEPT,
    "penalty": KEPT,
    "test_a_target_that_wants_gradients_gets_them": KEPT,
    "flattened target": KEPT,
    "fewer rows": KEPT,
    "as many rows as devices": KEPT,
    "probabilities of one row": KEPT,
    "a number as target": KEPT,
    "weights of rows": KEPT,
    "weights of as many rows as devices": KEPT,
    "fp16": KEPT,
    # gradients of another dtype than the parameters
    "grad_dtype": KEPT,
    # optimizers of a class that is not torch's
    "subclass": EVERYWHERE,
}
COMPLETE = {
    "accumulate=2",
    "clip_norm",
    "scaler",
    "hooked=True",
    # hooks on gradients, and on the optimizer's step
    "hook_parameter",
    "hook_accumulation",
    "hook_node",
    "hook_nodes",
    "hook_before_nodes",
    "hook_all",
    "hook_the_optimizer",
    "step_in_backward",
    "test_a_hook_on_all_optimizers_runs_once_a_step",
    # replaced methods of the optimizer
    "skip_every_other_step",
    "keep_gradients",
    "wrap_after_scheduler",
    "method_before_scheduler",
    # a trained parameter that the optimizer does not step
    "leave_group",
    "hold",
    # several calls for an update
    "test_a_change_of_the_gradients_between_the_calls_of_one_update",
    "test_close_between_the_calls_of_one_update_leaves_the_gradients",
}
"""The situations in which gradients must be complete on one device."""
REFUSALS |= dict.fromkeys(COMPLETE, EVERYWHERE)
"""For each situation that schedules refuse, these schedules.

A situation is named by a change, a parameter or the whole name of a test. The schedules that
TrainStep selects refuse none.
"""


def must_refuse(rung: str, *situations: str) -> bool:
    """Return whether a schedule must refuse one of the situations.

    Situations without a row are refused by none.
    """
    return any(rung in REFUSALS.get(one, ()) for one in situations)


@contextlib.contextmanager
def refusing(rung: str, *situations: str) -> Iterator[None]:
    """Check that the block ends in Refused if and only if the table says so for this schedule."""
    wanted, refused = must_refuse(rung, *situations), False
    try:
        yield
    except Refused:
        refused = True
        if not wanted:
            raise
    assert refused == wanted, (
        f"{rung} refuses none of {situations}; tests.engine.law.sides.REFUSALS says that it does"
    )
