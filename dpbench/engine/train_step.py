"""TrainStep: one whole training step over several devices, as a callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.data_parallel import check_prefix, run_pieces, scatter_arguments
from dpbench.engine.devices import Devices, as_devices, resolve
from dpbench.records import Mark, Phase, no_mark
from dpbench.schedule import FASTEST, parse

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TrainStep:
    """Scatter, replicate, forward, gather, loss, backward, reduce, update: `step(inputs, target) -> loss`.

    `module` stays unwrapped and holds the current weights and buffers after every call. `loss_fn(output, target)`
    returns a scalar; `optimizer_fn(parameters)` is called once. `device_ids` as for `DataParallel`, or Device
    objects; None without a GPU means one CPU device. Every `accumulate` calls make one update, their losses
    averaged; `clip_norm` bounds the gradient's total norm; `scaler` is a torch.amp.GradScaler.

    Inputs that are a tuple are positional arguments. Inputs may come from any device; a target from the host is
    copied to the output's device, one from another accelerator raises RuntimeError.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        optimizer_fn: OptimizerFactory,
        device_ids: Devices | None = None,
        schedule: str = "fastest",
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        mark: Mark = no_mark,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1 call per update, got {accumulate}")
        self.module = module
        self.loss_fn = loss_fn
        self.optimizer = optimizer_fn(module.parameters())
        self.devices = as_devices(device_ids or ()) or resolve(None) or resolve(["cpu"])
        self.schedule = parse("reference" if schedule == FASTEST else schedule)
        self._accumulate, self._clip_norm, self._scaler, self._mark = accumulate, clip_norm, scaler, mark
        self._calls = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Release nothing: the reference starts its threads anew in every step."""

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Take one training step on a global batch; return the loss, detached, on the first device."""
        root = self.devices[0]
        if self._calls % self._accumulate == 0:
            with self._mark(Phase.OPTIMIZER, root.index):
                self.optimizer.zero_grad(set_to_none=True)
        loss = self._backward(inputs, target, root)
        self._calls += 1
        if self._calls % self._accumulate == 0:
            with self._mark(Phase.OPTIMIZER, root.index):
                self._update()
        return loss

    def _backward(self, inputs: Any, target: Any, root: Device) -> torch.Tensor:
        """Leave the reduced gradients in the module's parameters; return the loss."""
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        with ExitStack() as running:  # the backward phase ends where the reduction begins, deep inside autograd
            pieces = scatter_arguments(arguments, {}, self.devices, mark=self._mark)
            output = run_pieces(self.module, pieces, self.devices, root, mark=self._mark, on_reduce=running.close)
            placed = self._place(target, _device_of(output), root)
            with self._mark(Phase.LOSS, root.index):
                loss = self.loss_fn(output, placed)
                scaled = loss / self._accumulate
                if self._scaler is not None:
                    scaled = self._scaler.scale(scaled)
            for device in self.devices[: len(pieces)]:
                running.enter_context(self._mark(Phase.BACKWARD, device.index))
            scaled.backward()
        return loss.detach()

    def _place(self, target: Any, device: torch.device | None, root: Device) -> Any:
        """Copy a target from the host to where the output is; refuse one from another accelerator."""
        if isinstance(target, dict):
            return type(target)((key, self._place(part, device, root)) for key, part in target.items())
        if isinstance(target, tuple | list):
            parts = [self._place(part, device, root) for part in target]
            return type(target)(*parts) if hasattr(target, "_fields") else type(target)(parts)
        if not isinstance(target, torch.Tensor) or device is None or target.device == device:
            return target
        if target.device.type != "cpu":
            raise RuntimeError(
                f"the target is on {target.device} but the output, and so the loss, is on {device} (device_ids[0]); "
                f"move it first: target.to('{device}')"
            )
        with self._mark(Phase.SCATTER, root.index):
            return target.to(device, non_blocking=True)

    def _update(self) -> None:
        """Clip and apply the gradients."""
        if self._clip_norm is not None:
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip_norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, buffers and optimizer state, without any prefix."""
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; an accumulation that was under way begins anew."""
        self._calls = 0
        check_prefix(list(self.module.state_dict()), list(state["module"]), strict=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])


def _device_of(output: Any) -> torch.device | None:
    """Return where the first tensor of an output is."""
    if isinstance(output, torch.Tensor):
        return output.device
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((device for part in parts if (device := _device_of(part)) is not None), None)
