"""TrainStep: one whole training step over several devices, under any schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, Self

import torch
from torch import nn

from dpbench.engine import legal, losses
from dpbench.engine._switches import OF
from dpbench.engine.containers import device_of, first_tensor, mapped, tensors_in
from dpbench.engine.data_parallel import check_prefix
from dpbench.engine.errors import Refused
from dpbench.engine.gather import gather
from dpbench.engine.legal import TrainingSetup
from dpbench.engine.losses import LocalLoss, Loss, Summed
from dpbench.engine.parallel_apply import in_stages, parallel_apply, run_on_devices
from dpbench.engine.persistent_step import PersistentReplicas
from dpbench.engine.replicas import replicas_of
from dpbench.engine.scatter import (
    apportion,
    checked_target,
    place_target,
    same_rows,
    scatter,
    weights_of,
)
from dpbench.engine.workers import (
    IntraOp,
    Workers,
    check_uncached,
    choose,
    keep_memory,
    without_cast_cache,
)
from dpbench.hardware.device import Device
from dpbench.hardware.devices import Devices, as_devices, holding, resolve
from dpbench.records import Mark, Phase, no_mark
from dpbench.records.schedule import COPYING, SELECTED, Schedule, parse

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TrainStep:
    """A training step over several devices: `step(inputs, target)` returns the loss of a batch.

    The phases are scatter, replicate, forward, gather, loss, backward, reduce, optimizer. `module`
    stays unwrapped and has the current weights and buffers after every call. `loss_fn(output,
    target)` returns a scalar. If it is one of torch's own losses, or a pair of functions `(sum_fn,
    weight_fn)`, each replica can compute it over its own rows. `optimizer_fn(parameters)` is called
    once; it returns the optimizer, which is then the attribute `optimizer`. `device_ids` is as for
    `DataParallel`; None means all GPUs, or one CPU device if there is no GPU. `schedule` is a
    Schedule, "copying" or "fastest". For these two,
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

    Schedules with `update=each` or `update=sharded`, and therefore "fastest", rely on noticing each
    write to the weights outside the step. Call `sync()` after writes that torch does not track:
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
        self.note = ""
        self._accumulate = accumulate
        self._clip_norm = clip_norm
        self._scaler = scaler
        self._mark = mark
        self.chunk_sizes = weights_of(chunk_sizes, self.devices)
        self._debug = debug
        self._calls = 0
        self._failed = False
        self._closed = False
        self._hired: dict[str, Workers] = {}
        self._threads = IntraOp(self.devices)
        keep_memory(self.devices)
        self._selected = str(schedule) if schedule in SELECTED else ""
        self._wanted = None if self._selected else parse(schedule)
        self._unfit = ""
        self._build()

    def _build(self) -> None:
        """Create the objects that persist between steps."""
        self._loss = Loss(self.loss_fn)
        self._checked = False
        setup = TrainingSetup(
            self.module, self._loss, self.optimizer, self.devices, powers=self._powers()
        )
        if self._wanted is not None:
            legal.check(self._wanted, setup)
            schedule, notes = self._wanted, []
        elif self._unfit:
            schedule, notes = Schedule.CACHED, [self._unfit]
        else:
            schedule, notes = legal.best_legal(setup, SELECTED[self._selected])
        whole = self._accumulate > 1 or self._clip_norm is not None or self._scaler is not None
        self._replicas = replicas_of(
            self.module,
            self.optimizer,
            self.devices,
            OF[schedule],
            whole_gradient=whole,
            mark=self._mark,
        )
        self._built = (self.module, self.loss_fn, self.optimizer, self._unfit)
        self._best, self._why = schedule, "; ".join(notes)
        self.schedule, self.note = schedule, self._why

    @property
    def _workers(self) -> Workers:
        name = OF[self._best].workers
        if name not in self._hired:
            self._hired[name] = choose(name)
        return self._hired[name]

    def _dismiss(self) -> None:
        for workers in self._hired.values():
            workers.close()
        self._hired = {}

    def _powers(self) -> bool:
        """Return whether the loss is scaled only by powers of two, or not at all."""
        return self._scaler is None and self._accumulate & (self._accumulate - 1) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; leave module and optimizer as an ordinary loop would."""
        if not self._closed:
            self._closed = True
            self._dismiss()
            self._replicas.close()

    def sync(self) -> None:
        """Make the next step copy the weights, after writes that torch does not track."""
        self._replicas.sync()

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Run one training step on a global batch.

        Return the loss, detached, on the first device.
        """
        self._prepare()
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        try:
            with self._threads, holding(self.devices):
                return self._step(arguments, target)
        except BaseException:
            self._failed = True
            self._replicas.abandon()
            raise

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
        if self._wanted is None:
            self._unfit = self._unfit or self._replicas.unusual
        if (
            self._failed
            or self._built != (self.module, self.loss_fn, self.optimizer, self._unfit)
            or self._replicas.changed()
        ):
            self._rebuild()
        if self._debug and (stale := self._replicas.stale()):
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
            self._dismiss()  # an interrupted thread may still be running
        self._replicas.close()
        self._failed = True  # until the rebuild has succeeded
        self._build()
        self._failed = False

    def _step(self, arguments: tuple[Any, ...], target: Any) -> torch.Tensor:
        mark = self._mark
        self.schedule, self.note = self._best, self._why
        summed = self._summed(arguments, target) if self._best.keeps_replicas else None
        if self._calls % self._accumulate == 0:
            with mark(Phase.OPTIMIZER, self.devices[0].index):
                self._replicas.clear()
        with (
            without_cast_cache()
            if isinstance(self._replicas, PersistentReplicas)
            else nullcontext()
        ):
            loss = (
                self._local(arguments, target, summed, mark)
                if summed
                else self._backward(arguments, target, mark)
            )
        self._calls += 1
        self._replicas.reduce(self._workers)
        if self._calls % self._accumulate == 0:
            self._replicas.update(self._workers, self._clip_norm, self._scaler)
        return loss

    def _backward(self, arguments: tuple[Any, ...], target: Any, mark: Mark) -> torch.Tensor:
        """Run the replicas, and the loss and backward over the gathered batch; return the loss.

        Persistent replicas keep their gradients. Autograd sums those of other replicas in the
        `.grad` of the module.
        """
        with ExitStack() as running:  # the `backward` phase ends when autograd starts the reduction
            pieces = self._scatter(arguments, mark)
            devices = self.devices[: len(pieces)]
            replicas = self._modules(len(pieces), on_reduce=running.close)
            outputs = parallel_apply(
                replicas, pieces, None, devices, workers=self._workers, mark=mark
            )
            return self._joint(outputs, target, devices, running, mark)

    def _joint(
        self,
        outputs: Sequence[Any],
        target: Any,
        devices: Sequence[Device],
        running: ExitStack,
        mark: Mark,
    ) -> torch.Tensor:
        """Gather the outputs, and run one loss and one backward for all replicas; return the loss.

        The backward phase ends when `running` is closed.
        """
        root = self.devices[0]
        output = gather(outputs, root, devices, mark=mark) if len(self.devices) > 1 else outputs[0]
        placed = place_target(target, device_of(output), root, self._mark)
        with mark(Phase.LOSS, root.index):
            loss = self._loss.whole(output, placed)
            scaled = self._scaled(loss)
        for device in devices:
            running.enter_context(mark(Phase.BACKWARD, device.index))
        scaled.backward()
        return loss.detach()

    def _summed(self, arguments: tuple[Any, ...], target: Any) -> Summed | None:
        """Return this step's loss as sums over the replicas' rows, or None if it must be gathered.

        Raises Refused instead of returning None if the user has named the schedule.
        """
        summed = self._loss.summed()
        if summed is None:
            reason = (
                "loss=local: loss_fn now has hooks, another forward or reduction, and thus no known"
                " divisor"
            )
        elif summed.rule is not None and not isinstance(target, torch.Tensor):
            reason = (
                f"loss=local: the target must be a tensor, but its type is {type(target).__name__}"
            )
        elif not same_rows(arguments, target):
            reason = (
                "loss=local: the target cannot be cut as the inputs are, because it has another"
                " number of rows"
            )
        elif self._has_history(arguments, target):
            reason = (
                "loss=local: an input or the target has an autograd history (detach it if you need"
                " no gradient of it); each replica would run its own backward through this history,"
                " but autograd allows only one"
            )
        elif self._wanted is None and not summed.keeps_bits(powers=self._powers()):
            reason = (
                "the loss is computed over the gathered batch, because summing the replicas' losses"
                " could change the last bit of the gradients"
            )
        else:
            return summed
        self._gather_loss(reason)
        return None

    def _has_history(self, arguments: tuple[Any, ...], target: Any) -> bool:
        """Return whether the target requires gradients, or an input is a recorded result."""
        if isinstance(target, torch.Tensor) and all(
            isinstance(value, torch.Tensor) for value in arguments
        ):
            return target.requires_grad or any(value.grad_fn is not None for value in arguments)
        return any(tensor.requires_grad for tensor in tensors_in(target)) or any(
            tensor.grad_fn is not None for tensor in tensors_in(arguments)
        )

    def _gather_loss(self, reason: str) -> None:
        """Change this step to loss=gathered; raise Refused if the user named the schedule."""
        if self._wanted is not None:
            raise Refused(
                f"schedule {self._wanted}: {reason}; use the schedule cached"
            )
        self._add_note(reason)

    def _add_note(self, reason: str) -> None:
        """Say in this step's note how it differs from the schedule, and why."""
        self.note = "; ".join(filter(None, [self.note, reason]))

    def _modules(self, count: int, on_reduce: Callable[[], None] = lambda: None) -> list[nn.Module]:
        """Return the first `count` replicas."""
        replicas = self._replicas.modules(count, self._workers, on_reduce)
        if reason := self._replicas.overlapping.postponed:
            self._add_note(reason)
        return replicas

    def _local(
        self, arguments: tuple[Any, ...], target: Any, summed: Summed, mark: Mark
    ) -> torch.Tensor:
        """Compute each replica's loss over its own rows; return the batch's loss."""
        root = self.devices[0]
        pieces = self._scatter((arguments, checked_target(target, root)), mark)
        devices = self.devices[: len(pieces)]
        replicas = self._modules(len(pieces))
        alone = self.schedule.keeps_replicas and root.torch_device.type == "cpu"
        weight = summed.weight_of(target) if alone else None
        parts = LocalLoss(
            summed, pieces, replicas, devices, mark, scale=self._scaled, weight=weight
        )
        if weight is not None:
            run_on_devices(parts.alone, devices, self._workers)
            parts.add()
            return parts.loss

        def meet() -> None:
            parts.meet()
            if parts.split and summed.rule is None and not self._checked:
                whole = gather(
                    [mapped(output, torch.Tensor.detach) for output in parts.outputs], root, devices
                )
                placed = place_target(target, device_of(whole), root, self._mark)
                self._checked = losses.check(self._loss, parts.loss, whole, placed)
            if parts.split:
                parts.outputs = []  # free their memory for backward

        if self.schedule.keeps_replicas:
            in_stages(parts.forward, meet, parts.backward, devices, self._workers)
        else:
            run_on_devices(parts.forward, devices, self._workers)
            meet()
        with ExitStack() as running:
            if not parts.split:
                self._gather_loss(
                    "loss=local: the rows of the output and of the target do not correspond one"
                    " to one"
                )
                return self._joint(parts.outputs, target, devices, running, mark)
        return parts.loss

    def _scatter(self, value: Any, mark: Mark) -> list[Any]:
        sizes: list[int] = []
        if (
            self.chunk_sizes is not None
            and (tensor := first_tensor(value)) is not None
            and tensor.dim()
        ):
            sizes = apportion(tensor.size(0), self.chunk_sizes)
        return scatter(value, self.devices, chunk_sizes=sizes or None, mark=mark)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        if self._accumulate > 1:
            loss = loss / self._accumulate
        return loss if self._scaler is None else self._scaler.scale(loss)

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
