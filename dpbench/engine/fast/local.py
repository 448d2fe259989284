"""Persistent replicas in a TrainStep: refresh weights, reduce gradients, and update the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from dpbench.engine.collectives import Overlapping, buckets_of, reduce
from dpbench.engine.flat_storage import FlatWeights
from dpbench.engine.legal import GradientHooks, Identity, Muted
from dpbench.engine.optimizer_state import finish
from dpbench.engine.parallel_apply import in_stages, run_on_devices
from dpbench.engine.persistent import Overlap, ReplicaWeights
from dpbench.engine.update import Update
from dpbench.engine.workers import Workers
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase
from dpbench.engine._switches import Switches


class PersistentReplicas:
    """Replicas whose weights stay on their devices, and whose gradients are reduced explicitly.

    The gradients are summed into the `.grad` of the module's own parameters before the optimizer
    steps if the step uses gradient accumulation, clipping or a scaler, if a parameter or the
    optimizer has hooks, or if the optimizer does not step all trained parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        devices: Sequence[Device],
        schedule: Switches,
        flat: FlatWeights | None,
        *,
        whole_gradient: bool,
        mark: Mark,
    ) -> None:
        self._module = module
        self._devices = devices
        self._flat = flat
        self._mark = mark
        self._optimizer = optimizer
        self._weights = ReplicaWeights(module, devices, flat, mark)
        self._identity = Identity(self._weights.originals, optimizer)
        self._hooks = GradientHooks(self._weights.originals)
        self._hooked = bool(self._hooks)
        self._update = Update(optimizer, self._weights, flat, devices, schedule, mark)
        self._watched = self._identity.watched and not self._update.natural
        self._stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._whole = (
            whole_gradient or self._hooked or self._identity.watched or self._has_unstepped()
        )
        self._before: list[torch.Tensor | None] = []
        self._muted = Muted([])
        self._used = len(devices)
        self._seen: list[int] = []
        self._root_only = schedule.update == "root"
        self._begun: list[list[int]] = []
        self._written_in_forward = False
        self.unusual = ""
        self._closed = False
        self.overlapping = Overlapping()
        self._overlap: Overlap | None = None
        if schedule.reduce == "overlap" and not self._whole:
            self._overlap = Overlap(self._weights, self._buckets(), self._ready, self._stage)

    def _has_unstepped(self) -> bool:
        """Return whether some gradients accumulate, because no optimizer steps the parameter."""
        stepped = set(map(id, self._stepped))
        return any(p.requires_grad and id(p) not in stepped for p in self._weights.originals)

    def changed(self) -> bool:
        """Return whether the parameters or the optimizer have changed."""
        return (
            not self._weights.notice()
            or self._identity.changed()
            or bool(self._hooks) != self._hooked
            or self._update.regrouped
        )

    def stale(self) -> list[int]:
        """Return the indices of the parameters whose values differ between replicas and module.

        The list is empty if the next step copies the weights anyway.
        """
        return (
            []
            if self._root_only or self._weights.versions() != self._seen
            else self._weights.stale()
        )

    def modules(
        self, count: int, workers: Workers, on_reduce: Callable[[], None] = lambda: None
    ) -> list[nn.Module]:
        """Return the first `count` replicas, with current weights and buffers."""
        self._used = count
        self._update.begin()
        if self._root_only or self._weights.versions() != self._seen:
            self._refresh(workers)
        if self._whole:
            # gradients of earlier calls are added after this call's gradients have been summed
            self._before = [p.grad for p in self._weights.originals]
            _set_gradients(self._weights.originals, [None] * len(self._before))
            self._muted = Muted(self._hooks.dicts())
        if not self._root_only:
            self._begun = self._weights.all_versions(count)
        if self._overlap:
            together = self._update.exchange is not None
            beside = self.overlapping.begin(self._devices, together=together)
            # without a replica to wait for, all buckets are left to the end of the step
            self._overlap.begin(count if beside else 0)
            if exchange := self._update.exchange:
                exchange.wait()  # a failed step may have left collectives running
                for i in range(count, len(self._devices)):
                    exchange.stage(i, None)
        return self._weights.modules(count)

    def abandon(self) -> None:
        """Restore the gradients that the module's parameters had before the failed call."""
        if self._before:
            self._muted.restore()
            _set_gradients(self._weights.originals, self._before)
            self._before = []

    def _refresh(self, workers: Workers) -> None:
        """Copy replica 0's weights to the replicas in use, or to all if all have optimizers."""
        devices = self._devices[: self._used] if self._root_only else self._devices
        together = self._update.exchange is not None and self._flat is not None
        if together:
            assert self._update.exchange is not None
            self._update.exchange.broadcast(self._weights.flats)
        run_on_devices(
            lambda i: self._weights.refresh(i, flats=not together) if i else None, devices, workers
        )
        if not self._root_only:
            self._seen = self._weights.versions()

    def clear(self) -> None:
        """Drop the gradients of the parameters that the optimizer steps."""
        if self._identity.watched:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            _set_gradients(self._stepped, [None] * len(self._stepped))
        self._update.hide()

    def _sources(self) -> list[tuple[Device, list[torch.Tensor | None]]]:
        return list(zip(self._devices, self._weights.gradients(self._used), strict=False))

    def _buckets(self) -> list[Sequence[int]]:
        """Return the parameter indices of each bucket that is reduced while backward runs."""
        if self._update.exchange:
            return [bucket.numbers for bucket in self._update.exchange.buckets]
        wanted = [n for n, p in enumerate(self._weights.parameters[0]) if p.requires_grad][::-1]
        return [
            [wanted[i] for i in run]
            for run in buckets_of([self._weights.parameters[0][n] for n in wanted])
        ]

    def _stage(self, i: int, numbers: Sequence[int]) -> None:
        """Copy replica i's gradients of one bucket to the `Exchange`, if there is one.

        The replica's backward continues while the bucket is reduced.
        """
        if self._update.exchange and self._used > 1 and not self._has_sparse(numbers):
            self._update.exchange.stage(i, [p.grad for p in self._weights.parameters[i]], numbers)

    def _ready(self, numbers: Sequence[int]) -> None:
        """Reduce the bucket with the parameters `numbers` during backward.

        A bucket with sparse gradients is left to the end of the step.
        """
        if self._has_sparse(numbers):
            return
        if self._update.exchange and self._used > 1:
            self._update.exchange.reduce(numbers)
            return
        sources = self._sources()
        for i in self._update.owners:
            self._update.collect(i, sources, numbers)

    def _has_sparse(self, numbers: Sequence[int]) -> bool:
        first = self._weights.parameters[0]
        return any((g := first[n].grad) is not None and g.is_sparse for n in numbers)

    def _together(self, workers: Workers, sources: Any, numbers: Sequence[int] | None) -> None:
        """Reduce by collectives the gradients of the parameters `numbers`; None means all."""
        exchange = self._update.exchange
        assert exchange is not None
        exchange.wait()  # for this step's buckets, whose memory `stage` overwrites
        if numbers is None or numbers:
            given = [gradients for _, gradients in sources]
            idle = [None] * (len(self._devices) - len(given))
            each = [*given, *idle]
            run_on_devices(lambda i: exchange.stage(i, each[i], numbers), self._devices, workers)
            exchange.reduce(numbers)
            exchange.wait()

    def reduce(self, workers: Workers) -> None:
        """Add this call's gradients to the module's `.grad` if the optimizer needs them there.

        The order of additions is that of torch.
        """
        self._weights.undo_forward(self._used)
        if not self._root_only and self._weights.all_versions(self._used) != self._begun:
            self._written_in_forward = True
            self._seen = []
        if self._whole:
            self._muted.restore()
            self._bring()
            self._before = []

    def _bring(self) -> None:
        """Move the replicas' gradients, summed, into the `.grad` of the module's parameters."""
        root = self._devices[0]
        gradients = self._weights.gradients(self._used)
        with torch.no_grad():
            used = [
                n
                for n, column in enumerate(zip(*gradients, strict=True))
                if any(g is not None for g in column)
            ]
            # a replica that did not use a parameter adds zeros, as in the backward of Broadcast
            filled = [
                [self._zeros(i, n) if (g := one[n]) is None else g for n in used]
                for i, one in enumerate(gradients)
            ]
            sums = reduce(filled, self._devices[: self._used], mark=self._mark)
            with self._mark(Phase.REDUCE, root.index), root.guard():
                self._deliver(dict(zip(used, sums, strict=True)))
        self._weights.clear()

    def _zeros(self, i: int, number: int) -> torch.Tensor:
        with self._devices[i].guard():
            return torch.zeros_like(self._weights.parameters[i][number], requires_grad=False)

    def _deliver(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Add each sum to the gradient of its parameter, given by index, as autograd would.

        A parameter that no replica used gets zeros, unless there is only one device.
        """
        hooked: list[tuple[torch.Tensor, torch.Tensor]] = []
        for n, parameter in enumerate(self._weights.originals):
            gradient = sums.get(n)
            outside = parameter.grad
            if gradient is None and parameter.requires_grad and len(self._devices) > 1:
                gradient = self._zeros(0, n)
            if outside is not None and gradient is not None:
                gradient = outside + gradient
            parameter.grad = self._before[n] if self._before else None
            if (gradient := outside if gradient is None else gradient) is None:
                continue
            if self._hooked and parameter.requires_grad:
                hooked.append((parameter, gradient))
            else:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        if hooked:
            # in one backward: a hook on several parameters waits for all of their gradients
            torch.autograd.backward(
                [parameter for parameter, _ in hooked], [gradient for _, gradient in hooked]
            )

    def update(
        self, workers: Workers, clip_norm: float | None, scaler: torch.amp.GradScaler | None
    ) -> None:
        """Reduce the gradients, step the weights and exchange them.

        If some gradients cannot be represented in shards, the user's optimizer steps the module's
        own parameters.
        """
        if not self._whole and self._is_unusual():
            self._bring()
            self._step_plainly()
        elif self._whole:
            with self._mark(Phase.OPTIMIZER, self._devices[0].index):
                stepper = self._optimizer if self._update.natural else _Everywhere(self, workers)
                finish(self._optimizer, self._module, clip_norm, scaler, stepper)
        else:
            self._step(workers, self._sources(), self._overlap.rest() if self._overlap else None)
        self._written_in_forward = False
        self._update.end()

    def _is_unusual(self) -> bool:
        """Return whether only the user's optimizer, on the module's parameters, can step.

        It must if a forward has written weights, because each device then has weights of its own,
        and if there are gradients that shards cannot represent. These are: a sparse gradient; a
        gradient that did not come through the replicas, for example that of a penalty on
        `module.parameters()` in the loss; and, in a run with one device, a missing gradient,
        because the optimizer must leave its parameter unchanged.
        """
        (first,) = self._weights.gradients(1)
        return (
            self._written_in_forward
            or any(g is not None and g.is_sparse for g in first)
            or any(p.grad is not None for p in self._weights.originals)
            or (len(self._devices) == 1 and any(g is None for g in first))
        )

    def _step_plainly(self) -> None:
        """Run the user's optimizer on the module's own parameters and their `.grad`."""
        with self._mark(Phase.OPTIMIZER, self._devices[0].index), self._devices[0].guard():
            self._update.step_plainly()
        if not self._written_in_forward:
            self.unusual = (
                "replicas are not persistent, because some gradients are sparse, missing, or "
                "computed outside the replicas"
            )
        self._seen = []

    def _step(self, workers: Workers, sources: Any, numbers: Sequence[int] | None) -> None:
        """Reduce the gradients, run the optimizers and exchange weights, on all devices at once.

        `numbers` are the indices of the parameters whose gradients were not reduced during
        backward; None means all.
        """
        update = self._update
        owners = [self._devices[i] for i in self._update.owners]
        together = update.exchange is not None and len(sources) > 1
        if together:
            self._together(workers, sources, numbers)

        def step(i: int) -> None:
            if not together and (numbers is None or numbers):
                update.collect(i, sources, numbers)
            update.step(i)

        if update.shared and len(owners) == len(self._devices) and not update.collective:
            in_stages(step, None, update.copy, owners, workers)
        else:
            run_on_devices(step, owners, workers)
            if update.shared:
                update.spread(workers)
        if update.shared and not update.collective:
            # later writes of weights wait for device 0, so it waits here for all
            for device in self._devices[1:]:
                self._devices[0].wait(device)
        self._weights.clear()
        update.show()
        if update.joined:  # torch does not see that a step of a flat buffer writes the parameters
            increment_version(self._weights.originals)
        self._seen = self._weights.versions()

    def sync(self) -> None:
        """Make the next step copy the weights to all replicas."""
        self._seen = []

    def close(self) -> None:
        """Leave the module and the optimizer as an ordinary loop would.

        Parameters get separate storage; their `.grad` and the optimizer's state are complete.
        """
        if self._closed:
            return
        self._closed = True
        if self._overlap:
            self._overlap.close()
            self._overlap = None
        # after a failed step, queued work may still use the memory freed here
        if exchange := self._update.exchange:
            exchange.lead()
        for device in self._devices[1:]:
            self._devices[0].wait(device)
        if self._update.shared and self._seen and not self._whole:
            self._update.gather_gradients()
        self._update.close()
        self._hooks.release()
        if self._flat:
            self._flat.release()


class _Everywhere:
    """The optimizers of all devices as one optimizer, on which a GradScaler may call `step`."""

    def __init__(self, replicas: PersistentReplicas, workers: Workers) -> None:
        self._replicas = replicas
        self._workers = workers
        self.param_groups = replicas._optimizer.param_groups

    def step(self) -> None:
        """Step the weights on all devices, with the gradients of the module's own parameters."""
        replicas = self._replicas
        plainly = replicas._watched or replicas._written_in_forward
        if plainly or any(map(_needs_the_optimizer, replicas._weights.originals)):
            replicas._step_plainly()
            return
        gradients = [p.grad for p in replicas._weights.originals]
        stored = [
            _in_strides_of(p, g)
            for p, g in zip(replicas._weights.originals, gradients, strict=True)
        ]
        replicas._step(self._workers, [(replicas._devices[0], stored)], None)
        _set_gradients(replicas._weights.originals, gradients)


def _needs_the_optimizer(parameter: torch.Tensor) -> bool:
    """Return whether only the user's own optimizer can handle a parameter's gradient.

    Such a gradient is sparse, missing, or left over from before the parameter was frozen.
    """
    if not parameter.requires_grad:
        return parameter.grad is not None
    return parameter.grad is None or parameter.grad.is_sparse


def _in_strides_of(parameter: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gradient in the parameter's strides, in which shards read it."""
    if gradient is None or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def _set_gradients(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
