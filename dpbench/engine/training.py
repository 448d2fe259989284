"""Training: what a step needs besides the batch, and where its rows and its target go."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpbench.engine.containers import device_of, first_tensor, mapped
from dpbench.engine.errors import Refused, without_closure
from dpbench.engine.writes import Watch
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase
from dpbench.records.errors import UsageError
from dpbench.records.words import count

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of forward."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A module, its loss, optimizer and devices, and the settings of `TrainStep`.

    `loss_fn(output, target)` returns a scalar. It may also be a pair `(sum_fn, weight_fn)`, whose
    quotient is the loss. `optimizer` has passed `check_optimizer`. Each device gets a share of a
    batch's rows in proportion to its `row_weights`; None means equal chunks. `say` adds a sentence
    to the note that the user reads.
    """

    module: nn.Module
    loss_fn: Any
    optimizer: Any
    devices: Sequence[Device]
    accumulate: int
    clip_norm: float | None
    scaler: torch.amp.GradScaler | None
    row_weights: Sequence[float] | None
    say: Callable[[str], object]
    watch: Watch
    mark: Mark

    def rows_of(self, inputs: Any) -> list[int] | None:
        """Return each device's number of rows of a batch; None means equal chunks."""
        if self.row_weights is None:
            return None
        tensor = first_tensor(inputs)
        if tensor is None or not tensor.dim():
            return None
        return apportion(tensor.size(0), self.row_weights) or None

    @property
    def powers(self) -> bool:
        """Return whether the loss is scaled only by powers of two, or not at all."""
        return self.scaler is None and self.accumulate & (self.accumulate - 1) == 0

    def loss(self, output: Any, target: Any) -> torch.Tensor:
        """Return the loss of the whole batch."""
        if isinstance(self.loss_fn, tuple):
            sum_fn, weight_fn = self.loss_fn
            return sum_fn(output, target) / weight_fn(output, target)  # type: ignore[no-any-return]
        return self.loss_fn(output, target)  # type: ignore[no-any-return]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss from which backward starts: one call's share, scaled by the scaler."""
        if self.accumulate > 1:
            loss = loss / self.accumulate
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """Clip the gradients if `clip_norm` is given, and run the optimizer.

        A scaler first unscales the gradients; it skips the step if a gradient is infinite or NaN.
        """
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        try:
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
        except Exception as error:
            if may_need_closure(self.optimizer):
                raise without_closure(error, type(self.optimizer).__name__) from error
            raise
        if self.scaler is not None:
            self.scaler.update()


def check_optimizer(optimizer: Any) -> None:
    """Raise Refused if the optimizer's `step` has an argument that must be given, as LBFGS has.

    Raises UsageError unless there are methods `step` and `zero_grad`, which every schedule needs;
    from `local` up, it must be a torch.optim.Optimizer (see `fast.select`).
    """
    kind = type(optimizer).__name__
    if not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad")):
        raise UsageError(
            f"optimizer_fn returned an object of type {kind}, which has no methods step() and"
            " zero_grad(); return an optimizer"
        )
    given = inspect.signature(_step_of(optimizer)).parameters.values()
    if any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in given):
        raise Refused(
            f"{kind} evaluates the loss several times per step, through a closure, which TrainStep"
            " does not support; use another optimizer"
        )


def may_need_closure(optimizer: Any) -> bool:
    """Return whether `step` takes a closure that code other than torch's may rely on."""
    step = _step_of(optimizer)
    of_torch = step.__module__.startswith("torch.")
    return not of_torch and "closure" in inspect.signature(step).parameters


def _step_of(optimizer: Any) -> Any:
    """Return the bound `step` of the optimizer's class, without what wraps it in the object."""
    own = getattr(type(optimizer), "step", None)
    return optimizer.step if own is None else types.MethodType(own, optimizer)


def checked_row_weights(
    given: Sequence[float] | None, devices: Sequence[Device]
) -> tuple[float, ...] | None:
    """Return TrainStep's `chunk_sizes` as a tuple.

    Raises ValueError unless there is one finite weight above 0 per device.
    """
    if given is None:
        return None
    weights = tuple(given)
    if len(weights) != len(devices) or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"chunk_sizes needs one weight above 0 per device, for {count(len(devices), 'device')};"
            f" got {given}"
        )
    return weights


def apportion(rows: int, weights: Sequence[float]) -> list[int]:
    """Return each device's number of rows: one, and a share of the rest proportional to its weight.

    Fractions are rounded by the method of largest remainders. If there are fewer rows than devices,
    only the first devices get a row, and the list is shorter.
    """
    whole = sum(weights)
    if rows < len(weights):
        return [1] * rows
    exact = [1 + (rows - len(weights)) * weight / whole for weight in weights]
    sizes = [int(one) for one in exact]
    order = sorted(range(len(weights)), key=lambda i: sizes[i] - exact[i])
    for i in order[: rows - sum(sizes)]:
        sizes[i] += 1
    return sizes


def place_target(target: Any, output: Any, root: Device, mark: Mark) -> Any:
    """Return the target on the device of the output; without tensors there, leave it unchanged.

    A copy from the host belongs to the phase scatter. Raises RuntimeError for a target on another
    accelerator.
    """
    device = device_of(output)
    if isinstance(target, torch.Tensor) and target.device == device:
        return target

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        if device is None or tensor.device == device:
            return tensor
        if tensor.device.type != "cpu":
            raise wrong_target(tensor.device, device)
        with mark(Phase.SCATTER, root.index):
            return tensor.to(device, non_blocking=True)

    return mapped(target, placed)


def wrong_target(where: torch.device, device: torch.device) -> RuntimeError:
    """Return the error for a target on an accelerator on which the loss is not computed."""
    return RuntimeError(
        f"the target is on {where} but the output, and therefore the loss, is on {device}"
        f" (device_ids[0]); move it first: target.to('{device}')"
    )
