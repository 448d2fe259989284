"""TrainStep: training steps over several devices, under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from dpbench.engine.checkpoints import check_prefix
from dpbench.engine.errors import Refused
from dpbench.engine.schedules import RUNNERS
from dpbench.engine.settings import IntraOp, check_uncached, keep_memory
from dpbench.engine.training import Training, check_closure, weights_of
from dpbench.hardware.devices import Devices, as_devices, resolve
from dpbench.records import Mark, no_mark
from dpbench.records.schedule import COPYING, SELECTED, Schedule, parse

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TrainStep:
    """A training step over several devices: `step(inputs, target)` returns the loss of a batch.

    The phases are scatter, replicate, forward, gather, loss, backward, reduce, optimizer: see
    `step.step`. `module` stays unwrapped and has the current weights and buffers after every call.
    `loss_fn(output, target)` returns a scalar. If it is one of torch's own losses, or a pair of
    functions `(sum_fn, weight_fn)`, each replica can compute it over its own rows.
    `optimizer_fn(parameters)` is called once; it returns the optimizer, which is then the attribute
    `optimizer`. `device_ids` is as for `DataParallel`; None means all GPUs, or one CPU device if
    there is no GPU. `schedule` is the name of a Schedule, "copying" or "fastest". For these two,
    TrainStep selects a schedule whose results are bitwise equal to those of "reference" (on
    distinct GPUs: equal within rounding); see `step.schedule`. "copying", the default, copies the
    first device's weights to the other devices in every step. Under "fastest", each device may
    update its own weights.

    The optimizer steps once in every `accumulate` calls, with the gradient of the average of their
    losses. `clip_norm` limits the gradient's total norm. `scaler` is a torch.amp.GradScaler.
    `chunk_sizes` has one weight per device; the rows of a batch are divided in proportion to them;
    None means torch's equal chunks.

    A tuple of inputs is passed as positional arguments. Inputs may be on any device. A target on
    the host is copied to the output's device; a target on another accelerator raises RuntimeError.

    Between two steps the training loop may change anything: weights, `requires_grad`, hooks, the
    loss, the optimizer's options, groups and state. The change takes effect in the next step, under
    every schedule. If the schedule cannot run, or can no longer run, TrainStep raises `Refused` (a
    ValueError) with the reason. "copying" and "fastest" switch to another schedule instead, and
    `note` gives the reason.

    The schedules `allreduce` and `sharded`, and therefore "fastest", rely on noticing each write to
    the weights outside the step. Call `sync()` after writes that torch does not track:
    `p.data.mul_()`, numpy, and fused optimizers other than `step.optimizer`. With `debug`,
    TrainStep compares all copies of the weights before each step, and raises `Refused` if a call of
    `sync()` is missing. Call `close()` after the last step, or use TrainStep as a context manager;
    module and optimizer are then left as an ordinary loop would leave them.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Any,
        optimizer_fn: OptimizerFactory,
        device_ids: Devices | None = None,
        schedule: str = COPYING,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        chunk_sizes: Sequence[float] | None = None,
        debug: bool = False,
        mark: Mark = no_mark,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1 call per update, got {accumulate}")
        self.module = module
        self.loss_fn = loss_fn
        self.optimizer = optimizer_fn(module.parameters())
        self.devices = (
            as_devices(device_ids or (), own_streams=True) or resolve(None) or resolve(["cpu"])
        )
        self.chunk_sizes = weights_of(chunk_sizes, self.devices)
        self._accumulate = accumulate
        self._clip_norm = clip_norm
        self._scaler = scaler
        self._mark = mark
        self._debug = debug
        self._calls = 0
        self._failed = False
        self._closed = False
        self._threads = IntraOp(self.devices)
        keep_memory(self.devices)
        self._wanted = schedule if schedule in SELECTED else parse(schedule)
        self._unfit = ""
        self._build()

    def _build(self) -> None:
        """Create what runs the steps, with the state that persists between them."""
        self._built = (self.module, self.loss_fn, self.optimizer)
        training = Training(
            module=self.module,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            devices=self.devices,
            accumulate=self._accumulate,
            clip_norm=self._clip_norm,
            scaler=self._scaler,
            row_weights=self.chunk_sizes,
            mark=self._mark,
        )
        check_closure(self.optimizer)
        self._runner = RUNNERS[self._wanted](training, self._unfit)

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that runs."""
        return self._runner.schedule

    @property
    def note(self) -> str:
        """Return why the last step differed from the preferred schedule; empty if it did not."""
        return self._runner.note

    @property
    def settled(self) -> bool:
        """Return whether the next steps run alike; the first ones may try alternatives."""
        return self._runner.settled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; leave module and optimizer as an ordinary loop would."""
        if not self._closed:
            self._closed = True
            self._runner.close()

    def sync(self) -> None:
        """Make the next step copy the weights, after writes that torch does not track."""
        self._runner.sync()

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Run one training step on a global batch.

        Return the loss, detached, on the first device.
        """
        self._prepare()
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        first = self._calls % self._accumulate == 0
        last = (self._calls + 1) % self._accumulate == 0
        try:
            with self._threads:
                loss = self._runner.run(arguments, target, first=first, last=last)
        except BaseException:
            self._failed = True
            self._runner.abandon()
            raise
        self._calls += 1
        return loss

    def _prepare(self) -> None:
        """Rebuild the persistent state if the last step failed, or something has changed.

        Raises RuntimeError after `close`. Raises Refused if the schedule can no longer run, or if
        `debug` finds weights that need `sync()`.
        """
        if self._closed:
            raise RuntimeError(
                "this TrainStep is closed; create a new one with the same module to continue"
                " training"
            )
        if not torch.is_grad_enabled():
            raise Refused(
                "a training step needs gradients, but torch.no_grad() or torch.inference_mode() is"
                " active"
            )
        if len(self.devices) > 1:
            check_uncached(self.module)
        if (
            self._failed
            or self._built != (self.module, self.loss_fn, self.optimizer)
            or self._runner.changed()
        ):
            self._rebuild()
        if self._debug and (stale := self._runner.stale()):
            names = [name for name, _ in self.module.named_parameters()]
            raise Refused(
                f"weights differ from their copies on other devices ({len(stale)} of {len(names)}"
                f" parameters, starting with {names[stale[0]]}), because they were written in ways"
                " that torch does not track; call sync() after such writes"
            )

    def _rebuild(self) -> None:
        """Build the persistent state again; if that raises an error, the next step tries again."""
        # a failed backward leaves its nodes and graph queued in this thread until the next backward
        if self._failed:
            torch.zeros((), requires_grad=True).clone().backward()
        self._unfit = self._unfit or self._runner.unfit
        self._runner.close()
        self._failed = True  # until the rebuild has succeeded
        self._build()
        self._failed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of "module", "optimizer" and, if there is a grad scaler, "scaler".

        The form is the same under every schedule; the names of weights and buffers have no prefix.
        """
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._scaler is not None:
            state["scaler"] = self._scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`; gradient accumulation starts again."""
        self._calls = 0
        check_prefix(list(self.module.state_dict()), list(state["module"]), strict=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._scaler is not None and "scaler" in state:
            self._scaler.load_state_dict(state["scaler"])
        self.sync()
