"""TrainStep: training steps over several devices, under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from dpbench.engine.checkpoints import check_prefix
from dpbench.engine.data_parallel import wrapper_runner
from dpbench.engine.errors import Refused
from dpbench.engine.fast.allreduce import AllReduce
from dpbench.engine.fast.local import Local
from dpbench.engine.fast.select import check, highest
from dpbench.engine.fast.sharded import Sharded
from dpbench.engine.runner import Runner
from dpbench.engine.settings import IntraOp, check_uncached, keep_memory, kept
from dpbench.engine.step import step
from dpbench.engine.training import Training, check_optimizer, checked_row_weights
from dpbench.engine.writes import Watch, note_of
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices, resolve
from dpbench.records import Mark, no_mark
from dpbench.records.arguments import arguments_of, check_names
from dpbench.records.errors import UsageError
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

    A tuple of inputs has the positional arguments of forward, and a plain dict its keyword
    arguments; any other value is its only argument. Inputs may be on any device. A target on the
    host is copied to the output's device; a target on another accelerator raises RuntimeError.

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
        self.optimizer = _function(optimizer_fn)(module.parameters())
        devices = (
            as_devices(device_ids or (), own_streams=True) or resolve(None) or resolve(["cpu"])
        )
        self._said: dict[str, None] = {}  # each sentence once, in order
        self._training = Training(
            module=module,
            loss_fn=loss_fn,
            optimizer=self.optimizer,
            devices=devices,
            accumulate=accumulate,
            clip_norm=clip_norm,
            scaler=scaler,
            row_weights=checked_row_weights(chunk_sizes, devices),
            say=self._said.setdefault,
            watch=Watch(module),
            mark=mark,
        )
        self._debug = debug
        self._calls = 0
        self._failed = False
        self._closed = False
        self._threads = IntraOp(devices)
        keep_memory(devices)
        self._selects = schedule in SELECTED
        self._wanted = SELECTED[schedule] if self._selects else parse(schedule)
        self._unfit = ""
        self._runner = self._start()

    def _start(self) -> Runner:
        """Return the runner of the next steps; raise Refused if the named schedule cannot run."""
        training = self._training
        check_optimizer(training.optimizer)
        if self._selects:
            schedule, note = highest(self._wanted, training, self._unfit)
        else:
            schedule, note = self._wanted, ""
            check(schedule, training)
        if len(training.devices) == 1:
            return Runner(schedule, note)
        match schedule:
            case Schedule.SHARDED:
                return Sharded(training, schedule, note, selected=self._selects)
            case Schedule.ALLREDUCE:
                return AllReduce(training, schedule, note, selected=self._selects)
            case Schedule.LOCAL:
                return Local(training, schedule, note, selected=self._selects)
            case _:
                return wrapper_runner(schedule, note)

    @property
    def devices(self) -> Sequence[Device]:
        """Return the devices; the first one has the module and the optimizer."""
        return self._training.devices

    @property
    def schedule(self) -> Schedule:
        """Return the schedule that runs."""
        return self._runner.schedule

    @property
    def note(self) -> str:
        """Return why the last step differed from the preferred schedule; empty if it did not.

        From the step on that finds it, it also says once what the engine has done that may not be
        meant, and names the first thing that forwards write and replicas share or lose.
        """
        return "; ".join(filter(None, [self._runner.note, *self._said, note_of(self.module)]))

    @property
    def settled(self) -> bool:
        """Return whether the next steps run alike; the first ones may try alternatives."""
        return self._runner.settled and self._training.watch.settled

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; leave module and optimizer as an ordinary loop would."""
        if not self._closed:
            self._runner.close()
            self._closed = True  # at the end: after an interrupt, another call closes the rest

    def sync(self) -> None:
        """Make the next step copy the weights, after writes that torch does not track."""
        self._runner.sync()

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Run one training step on a global batch.

        Return the loss, detached, on the first device.
        """
        accumulate = self._training.accumulate
        first = self._calls % accumulate == 0
        last = (self._calls + 1) % accumulate == 0
        restore = kept()
        try:
            self._prepare()
            runner, arguments = self._runner, arguments_of(inputs)
            try:
                with self._threads:
                    if isinstance(runner, Local):
                        loss = runner.run(arguments, target, first=first, last=last)
                    else:
                        loss = step(
                            self._training,
                            arguments,
                            target,
                            first=first,
                            last=last,
                            workers=runner.workers,
                            replicate=runner.replicate,
                        )
            except BaseException as error:
                self._failed = True
                runner.abandon()
                if isinstance(error, TypeError):
                    check_names(self.module, inputs)
                raise
        except BaseException:
            restore()
            raise
        self._calls += 1
        return loss

    def _prepare(self) -> None:
        """Start the runner again if the last step failed, or something has changed.

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
        training = self._training
        if len(training.devices) > 1:
            check_uncached(self.module)
        begun = (training.module, training.loss_fn, training.optimizer)
        if (
            self._failed
            or begun != (self.module, self.loss_fn, self.optimizer)
            or self._runner.changed()
        ):
            self._restart()
        if self._debug and (stale := self._runner.stale()):
            names = [name for name, _ in self.module.named_parameters()]
            raise Refused(
                f"weights differ from their copies on other devices ({len(stale)} of {len(names)}"
                f" parameters, starting with {names[stale[0]]}), because they were written in ways"
                " that torch does not track; call sync() after such writes"
            )

    def _restart(self) -> None:
        """Start the runner again; if that raises an error, the next step tries again."""
        # a failed backward leaves its nodes and graph queued in this thread until the next backward
        if self._failed:
            torch.zeros((), requires_grad=True).clone().backward()
        self._unfit = self._unfit or self._runner.unfit
        self._runner.close()
        self._failed = True  # until the new runner stands
        self._training = replace(
            self._training,
            module=self.module,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            watch=Watch(self.module),
        )
        self._runner = self._start()
        self._failed = False

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of "module", "optimizer" and, if there is a grad scaler, "scaler".

        The form is the same under every schedule; the names of weights and buffers have no prefix.
        """
        state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self._training.scaler is not None:
            state["scaler"] = self._training.scaler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`; gradient accumulation starts again."""
        self._calls = 0
        check_prefix(list(self.module.state_dict()), list(state["module"]), strict=True)
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self._training.scaler is not None and "scaler" in state:
            self._training.scaler.load_state_dict(state["scaler"])
        self.sync()


def _function(optimizer_fn: Any) -> OptimizerFactory:
    """Raise UsageError if `optimizer_fn` is no function, but for example an optimizer."""
    if not callable(optimizer_fn):
        kind = type(optimizer_fn).__name__
        raise UsageError(
            f"optimizer_fn must be a function that creates the optimizer, not an object of the type"
            f" {kind}: give, for example, lambda parameters: SGD(parameters, lr=0.1)"
        )
    function: OptimizerFactory = optimizer_fn
    return function
