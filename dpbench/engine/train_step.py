"""TrainStep: one whole training step over several devices, as a callable, on any schedule of the ladder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine import balance, losses
from dpbench.engine.apply import parallel_apply
from dpbench.engine.containers import device_of, mapped
from dpbench.engine.data_parallel import check_prefix
from dpbench.engine.devices import Devices, as_devices, resolve
from dpbench.engine.each import on_each
from dpbench.engine.fastest import Trials, best_legal
from dpbench.engine.gather import gather
from dpbench.engine.kept import Kept
from dpbench.engine.losses import Loss
from dpbench.engine.replicas import replicas_of
from dpbench.engine.scatter import scatter
from dpbench.engine.workers import choose
from dpbench.records import Mark, Phase, no_mark
from dpbench.schedule import CUDA, FASTEST, TRAIN_STEP, Schedule, parse

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TrainStep:
    """Scatter, replicate, forward, gather, loss, backward, reduce, update: `step(inputs, target) -> loss`.

    `module` stays unwrapped and holds the current weights and buffers after every call. `loss_fn(output, target)`
    returns a scalar; one with `reduction=`, or a pair `(sum_fn, weight_fn)`, can be taken by each replica of its own
    rows. `optimizer_fn(parameters)` is called once, and `.optimizer` is what schedulers attach to. `device_ids` as for
    `DataParallel`, or Device objects; None without a GPU means one CPU device. `schedule` is a rung's name, switches,
    or "fastest", which takes the best that needs no tolerance and settles within the first steps (`step.schedule`).
    With graphs=on the first four shapes of batch are recorded; more shapes, inputs that want gradients, and inputs with
    objects other than numbers and texts run eagerly.

    Every `accumulate` calls make one update, their losses averaged; `clip_norm` bounds the gradient's total norm;
    `scaler` is a torch.amp.GradScaler; `chunk_sizes` are the devices' shares of a batch, as weights, or "auto".

    Inputs that are a tuple are positional arguments. Inputs may come from any device; a target from the host is
    copied to the output's device, one from another accelerator raises RuntimeError. A schedule that cannot run here
    raises ValueError naming what it needs. Weights written past torch (`p.data`, numpy) need `sync()`. Used as a
    context manager it leaves module and optimizer as an ordinary loop would; without, call `close()`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Any,
        optimizer_fn: OptimizerFactory,
        device_ids: Devices | None = None,
        schedule: str | Schedule = FASTEST,
        *,
        accumulate: int = 1,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        chunk_sizes: Sequence[float] | str | None = None,
        mark: Mark = no_mark,
    ) -> None:
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1 call per update, got {accumulate}")
        self.module = module
        self.loss_fn = loss_fn
        self.optimizer = optimizer_fn(module.parameters())
        self.devices = as_devices(device_ids or ()) or resolve(None) or resolve(["cpu"])
        self._loss = Loss(loss_fn)
        self._accumulate, self._clip_norm, self._scaler, self._mark = accumulate, clip_norm, scaler, mark
        self._shares = balance.Shares(chunk_sizes, self.devices)
        self._calls, self._checked = 0, False
        conditions = [TRAIN_STEP, *([CUDA] if self.devices[0].torch_device.type == "cuda" else [])]
        self._trials = None
        if schedule == FASTEST:
            self.schedule = best_legal(module, self._loss, self.optimizer, self.devices, conditions)
            self._trials = Trials(self.schedule, self.devices)
        else:
            self.schedule = parse(schedule).check(*conditions)
        if self.schedule.loss == "local" and not self._loss.has_sum:
            raise ValueError(
                "loss=local needs a loss that can sum: give it a parameter or attribute `reduction`, or give a pair "
                "(sum_fn, weight_fn)"
            )
        whole = accumulate > 1 or clip_norm is not None or scaler is not None
        self._replicas = replicas_of(
            module, self.optimizer, self.devices, self.schedule, whole_gradient=whole, mark=mark
        )
        self._graphs = None
        if self.schedule.graphs == "on" and isinstance(self._replicas, Kept):
            self._graphs = self._replicas.graphs(self._loss)
        self._workers = choose(self.schedule.workers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; give the parameters storage, gradients and optimizer state of an ordinary loop."""
        self._workers.close()
        self._replicas.close()

    def sync(self) -> None:
        """Tell that the module's weights were written past torch's own operations."""
        self._replicas.sync()

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Take one training step on a global batch; return the loss, detached, on the first device."""
        if self._trials is not None:
            self._next_trial()
        root = self.devices[0]
        if self._calls % self._accumulate == 0:
            with self._mark(Phase.OPTIMIZER, root.index):
                self._replicas.clear()
        arguments = inputs if isinstance(inputs, tuple) else (inputs,)
        with self._shares.timed(self._mark) as mark:
            loss = self._backward(arguments, target, mark)
        self._calls += 1
        self._replicas.reduce(self._workers)
        if self._calls % self._accumulate == 0:
            self._replicas.update(self._workers, self._clip_norm, self._scaler)
        return loss

    def _next_trial(self) -> None:
        """Let the trials of `fastest` say which workers to use next."""
        assert self._trials is not None
        schedule = self._trials.next()
        if schedule.workers != self.schedule.workers:
            self._workers.close()
            self._workers = choose(schedule.workers)
        self.schedule = schedule
        if self._trials.settled:
            self._trials = None

    def _backward(self, arguments: tuple[Any, ...], target: Any, mark: Mark) -> torch.Tensor:
        """Leave gradients with the replicas; return the loss."""
        if self.schedule.loss == "local":
            return self._local(arguments, target, mark)
        root = self.devices[0]
        with ExitStack() as running:  # the backward phase ends where the reduction begins, deep inside autograd
            pieces = self._scatter(arguments, mark)
            devices = self.devices[: len(pieces)]
            replicas = self._replicas.modules(len(pieces), self._workers, on_reduce=running.close)
            outputs = parallel_apply(replicas, pieces, None, devices, workers=self._workers, mark=mark)
            output = gather(outputs, root, devices, mark=mark) if len(self.devices) > 1 else outputs[0]
            placed = self._place(target, device_of(output), root)
            with mark(Phase.LOSS, root.index):
                loss = self._loss.whole(output, placed)
                scaled = self._scaled(loss)
            for device in devices:
                running.enter_context(mark(Phase.BACKWARD, device.index))
            scaled.backward()
        return loss.detach()

    def _local(self, arguments: tuple[Any, ...], target: Any, mark: Mark) -> torch.Tensor:
        """Let each replica take the loss of its own rows; gather nothing but numbers."""
        root = self.devices[0]
        pieces = self._scatter((arguments, self._on_host_or(root, target)), mark)
        devices = self.devices[: len(pieces)]
        replicas = self._replicas.modules(len(pieces), self._workers)
        recorded = self._graphs.prepare(pieces, replicas) if self._graphs else None

        def forward(i: int) -> tuple[Any, torch.Tensor, Any]:
            inputs, wanted = pieces[i]
            with mark(Phase.FORWARD, devices[i].index):
                output, total = recorded[i].forward(pieces[i]) if recorded else (replicas[i](*inputs), None)
            with mark(Phase.LOSS, devices[i].index):
                if total is None:
                    total = self._loss.total(output, wanted, devices[i])
                return output, total, self._loss.weight(output, wanted, devices[i])

        outputs, totals, weights = zip(*on_each(forward, devices, self._workers), strict=True)
        for device in devices[1:]:  # replicas that share a GPU have streams of their own
            root.wait(device)
        root.borrow([one for one in (*totals, *weights) if isinstance(one, torch.Tensor)])
        with mark(Phase.LOSS, root.index):
            weight = None if weights[0] is None else sum(_here(w, root) for w in weights)
            loss: torch.Tensor = _divided(sum(_here(total.detach(), root) for total in totals), weight)
        if not self._checked:
            whole = gather([mapped(output, torch.Tensor.detach) for output in outputs], root, devices)
            losses.check(self._loss, loss, whole, self._place(target, device_of(whole), root))
            self._checked = True
        del outputs
        if self.schedule.backward == "local":

            def backward(i: int) -> None:
                total = totals[i].detach().requires_grad_() if recorded else totals[i]
                if isinstance(weight, torch.Tensor):
                    devices[i].wait(root)
                    devices[i].borrow([weight])
                with mark(Phase.LOSS, devices[i].index):
                    scaled = self._scaled(_divided(total, _here(weight, devices[i])))
                with mark(Phase.BACKWARD, devices[i].index):
                    scaled.backward()
                    if recorded:
                        assert total.grad is not None
                        recorded[i].backward(total.grad, owned=len(pieces) == 1)

            on_each(backward, devices, self._workers)
            return loss
        with ExitStack() as running:
            with mark(Phase.LOSS, root.index):
                scaled = self._scaled(_divided(sum(_here(total, root) for total in totals), weight))
            for device in devices:
                running.enter_context(mark(Phase.BACKWARD, device.index))
            scaled.backward()
        return loss

    def _scatter(self, value: Any, mark: Mark) -> list[Any]:
        """Split over the devices, by their shares where they have unequal ones."""
        if sizes := self._shares.sizes(value):
            return scatter(value, self.devices, chunk_sizes=sizes, mark=mark)
        return scatter(value, self.devices, mark=mark)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return what backward starts from."""
        if self._accumulate > 1:
            loss = loss / self._accumulate
        return loss if self._scaler is None else self._scaler.scale(loss)

    def _on_host_or(self, root: Device, target: Any) -> Any:
        """Refuse a target from an accelerator that is not the first device."""
        where = device_of(target)
        if where is not None and where.type != "cpu" and where != root.torch_device:
            self._place(target, root.torch_device, root)
        return target

    def _place(self, target: Any, device: torch.device | None, root: Device) -> Any:
        """Copy a target from the host to where the output is; refuse one from another accelerator."""

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            if device is None or tensor.device == device:
                return tensor
            if tensor.device.type != "cpu":
                raise RuntimeError(
                    f"the target is on {tensor.device} but the output, and so the loss, is on {device} "
                    f"(device_ids[0]); move it first: target.to('{device}')"
                )
            with self._mark(Phase.SCATTER, root.index):
                return tensor.to(device, non_blocking=True)

        return mapped(target, placed)

    @property
    def chunk_sizes(self) -> tuple[float, ...] | None:
        """Return the devices' shares of a batch, or None for torch's equal chunks."""
        return self._shares.weights

    def state_dict(self) -> dict[str, Any]:
        """Return the weights, buffers and optimizer state, without any prefix, the same on every schedule."""
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
        self.sync()


def _here(value: Any, device: Device) -> Any:
    """Return a number or tensor on a device."""
    return value.to(device.torch_device, non_blocking=True) if isinstance(value, torch.Tensor) else value


def _divided(total: Any, weight: Any) -> Any:
    return total if weight is None else total / weight
