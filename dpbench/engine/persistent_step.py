"""Kept: the life of persistent replicas in a TrainStep, from their gradients to the weights of the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from dpbench.engine.collectives import buckets_of
from dpbench.engine.cuda_graphs import Graphs
from dpbench.engine.flat_storage import FlatWeights
from dpbench.engine.identity import Identity, Muted, has_hooks
from dpbench.engine.losses import Loss
from dpbench.engine.optimizer_state import finish
from dpbench.engine.persistent import Overlap, Persistent
from dpbench.engine.reduce import reduce
from dpbench.engine.run_on_devices import in_stages, on_each
from dpbench.engine.update import Update
from dpbench.engine.workers import Workers
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase
from dpbench.records.schedule import Schedule


class Kept:
    """Replicas whose weights stay on their devices, with gradients of their own that are reduced explicitly.

    Gradients are brought whole to the module's parameters where something wants to see them before the optimizer
    steps: an accumulation, a clipping, a scaler, or a hook of a parameter or of the optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        devices: Sequence[Device],
        schedule: Schedule,
        flat: FlatWeights | None,
        *,
        whole_gradient: bool,
        mark: Mark,
    ) -> None:
        self._module, self._devices, self._flat, self._mark = module, devices, flat, mark
        self._optimizer = optimizer
        self._kept = Persistent(module, devices, flat, mark, fixed=schedule.graphs == "on")
        self._identity = Identity(self._kept.originals, optimizer)
        self._update = Update(optimizer, self._kept, flat, devices, schedule, mark)
        self._watched = self._identity.watched and not self._update.natural
        self._stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._whole = whole_gradient or self._identity.hooked or self._identity.watched or self._has_unstepped()
        self._before: list[torch.Tensor | None] = []
        self._muted = Muted([])
        self._used = len(devices)
        self._seen: list[int] = []
        self._root_only = schedule.update == "root"
        self.unusual, self._closed = "", False
        self._overlap: Overlap | None = None
        if schedule.reduce == "overlap" and not self._whole:
            self._overlap = Overlap(self._kept, self._buckets(), self._ready, self._stage)

    def _has_unstepped(self) -> bool:
        """Return whether gradients add up over steps, because no optimizer clears them."""
        stepped = set(map(id, self._stepped))
        return any(p.requires_grad and id(p) not in stepped for p in self._kept.originals)

    def changed(self) -> bool:
        """Return whether the module's parameters or the optimizer are not those any more that this was built for."""
        return not self._kept.notice() or self._identity.changed() or self._update.regrouped

    def stale(self) -> list[int]:
        """Return the numbers of the parameters whose replicas hold other values than the module."""
        return [] if self._root_only or self._kept.versions() != self._seen else self._kept.stale()

    def modules(self, count: int, workers: Workers, on_reduce: Callable[[], None] = lambda: None) -> list[nn.Module]:
        """Return the first replicas, with current weights and buffers."""
        self._used = count
        self._update.begin()
        if self._root_only or self._kept.versions() != self._seen:
            self._refresh(workers)
        if self._whole:  # the calls before are added when this one's gradients are whole
            self._before = [p.grad for p in self._kept.originals]
            _set_gradients(self._kept.originals, [None] * len(self._before))
            self._muted = Muted(self._kept.originals)
        if self._overlap:
            self._overlap.begin(count)
            if exchange := self._update.exchange:
                exchange.wait()  # a step that failed may have left some running
                for i in range(count, len(self._devices)):
                    exchange.stage(i, None)
        return self._kept.modules(count)

    def abandon(self) -> None:
        """Give the module's parameters the gradients of the calls before the one that failed."""
        if self._before:
            self._muted.restore()
            _set_gradients(self._kept.originals, self._before)
            self._before = []

    def _refresh(self, workers: Workers) -> None:
        """Bring replica 0's weights to those that run, and, where all step for themselves, to all."""
        devices = self._devices[: self._used] if self._root_only else self._devices
        together = self._update.exchange is not None and self._flat is not None
        if together:
            assert self._update.exchange is not None
            self._update.exchange.broadcast(self._kept.flats)
        on_each(lambda i: self._kept.refresh(i, flats=not together) if i else None, devices, workers)
        if not self._root_only:
            self._seen = self._kept.versions()

    def graphs(self, loss: Loss) -> Graphs:
        """Return what records these replicas' work."""
        return Graphs(self._module, self._devices, self._kept, loss)

    def clear(self) -> None:
        """Drop the gradients of the parameters that the optimizer steps."""
        if self._identity.watched:
            self._optimizer.zero_grad(set_to_none=True)
        else:
            _set_gradients(self._stepped, [None] * len(self._stepped))
        self._update.hide()

    def _sources(self) -> list[tuple[Device, list[torch.Tensor | None]]]:
        return list(zip(self._devices, self._kept.gradients(self._used), strict=False))

    def _buckets(self) -> list[Sequence[int]]:
        """Return the numbers of the parameters whose gradients are reduced together while backward runs."""
        if self._update.exchange:
            return [run.numbers for run in self._update.exchange.buckets]
        wanted = [n for n, p in enumerate(self._kept.parameters[0]) if p.requires_grad][::-1]
        return [[wanted[i] for i in run] for run in buckets_of([self._kept.parameters[0][n] for n in wanted])]

    def _stage(self, i: int, numbers: Sequence[int]) -> None:
        """Take one replica's part of a bucket out of the way of its backward, which may go on."""
        if self._update.exchange and self._used > 1 and not self._has_sparse(numbers):
            self._update.exchange.stage(i, [p.grad for p in self._kept.parameters[i]], numbers)

    def _ready(self, numbers: Sequence[int]) -> None:
        """Reduce one bucket, from inside backward; one with sparse gradients is left to the end of the step."""
        if self._has_sparse(numbers):
            return
        if self._update.exchange and self._used > 1:
            self._update.exchange.reduce(numbers)
            return
        sources = self._sources()
        for i in self._update.owners:
            self._update.collect(i, sources, numbers)

    def _has_sparse(self, numbers: Sequence[int]) -> bool:
        first = self._kept.parameters[0]
        return any((g := first[n].grad) is not None and g.is_sparse for n in numbers)

    def _together(self, workers: Workers, sources: Any, numbers: Sequence[int] | None) -> None:
        """Reduce by collectives what has not been reduced during backward."""
        exchange = self._update.exchange
        assert exchange is not None
        exchange.wait()  # for the buckets of this step: their memory may be written again
        if numbers is None or numbers:
            given = [gradients for _, gradients in sources]
            idle = [None] * (len(self._devices) - len(given))
            each = [*given, *idle]
            on_each(lambda i: exchange.stage(i, each[i], numbers), self._devices, workers)
            exchange.reduce(numbers)
            exchange.wait()

    def reduce(self, workers: Workers) -> None:
        """Where gradients are needed whole, add this call's to the module's, in the order of torch."""
        if self._whole:
            self._muted.restore()
            self._bring()
            self._before = []

    def _bring(self) -> None:
        """Leave the whole gradient in the module's parameters, and nothing in the replicas."""
        root, each = self._devices[0], self._kept.gradients(self._used)
        with torch.no_grad():
            found = [n for n, column in enumerate(zip(*each, strict=True)) if any(g is not None for g in column)]
            # a replica that did not use a parameter adds zeros, as behind autograd's Broadcast
            filled = [[self._zeros(i, n) if (g := one[n]) is None else g for n in found] for i, one in enumerate(each)]
            sums = reduce(filled, self._devices[: self._used], comm_dtype=self._update.comm_dtype, mark=self._mark)
            with self._mark(Phase.REDUCE, root.index), root.guard():
                self._deliver(dict(zip(found, sums, strict=True)))
        self._kept.clear()

    def _zeros(self, i: int, number: int) -> torch.Tensor:
        with self._devices[i].guard():
            return torch.zeros_like(self._kept.parameters[i][number], requires_grad=False)

    def _deliver(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Give each of the module's parameters its sum, as autograd would; zeros if no replica has used it."""
        for n, parameter in enumerate(self._kept.originals):
            gradient, outside = sums.get(n), parameter.grad
            if gradient is None and parameter.requires_grad and len(self._devices) > 1:
                gradient = self._zeros(0, n)
            if outside is not None and gradient is not None:
                gradient = outside + gradient
            parameter.grad = self._before[n] if self._before else None
            if (gradient := outside if gradient is None else gradient) is not None:
                _accumulate(parameter, gradient)

    def update(self, workers: Workers, clip_norm: float | None, scaler: torch.amp.GradScaler | None) -> None:
        """Bring the gradients to the devices that step, let them step, and exchange what they stepped."""
        if not self._whole and self._is_unusual():
            self._bring()
            self._step_plainly()
        elif self._whole:
            with self._mark(Phase.OPTIMIZER, self._devices[0].index):
                stepper = self._optimizer if self._update.natural else _Everywhere(self, workers)
                finish(self._optimizer, self._module, clip_norm, scaler, stepper)
        else:
            self._step(workers, self._sources(), self._overlap.rest() if self._overlap else None)
        self._update.end()

    def _is_unusual(self) -> bool:
        """Return whether gradients came that units cannot hold.

        Sparse ones; one from outside of the replicas (a penalty on `module.parameters()` within the loss); one that is
        missing on a single device, where the optimizer leaves the parameter as it is.
        """
        (first,) = self._kept.gradients(1)
        return (
            any(g is not None and g.is_sparse for g in first)
            or any(p.grad is not None for p in self._kept.originals)
            or (len(self._devices) == 1 and any(g is None for g in first))
        )

    def _step_plainly(self) -> None:
        """Let the user's own optimizer step the module's own parameters, from their whole gradients."""
        with self._mark(Phase.OPTIMIZER, self._devices[0].index), self._devices[0].guard():
            self._update.step_plainly()
        self.unusual = "gradients came that only the optimizer itself can step: sparse, missing, or of the loss alone"
        self._seen = []

    def _step(self, workers: Workers, sources: Any, numbers: Sequence[int] | None) -> None:
        """Collect, step and spread, on all owners at once."""
        update, owners = self._update, [self._devices[i] for i in self._update.owners]
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
            on_each(step, owners, workers)
            if update.shared:
                update.spread(workers)
        self._kept.clear()
        update.show()
        if update.joined:  # steps of flat buffers are writes to the parameters, which others may watch
            increment_version(self._kept.originals)
        self._seen = self._kept.versions()

    def sync(self) -> None:
        """Refresh all replicas before the next step."""
        self._seen = []

    def close(self) -> None:
        """Leave module and optimizer as an ordinary loop would."""
        if self._closed:
            return
        self._closed = True
        if self._overlap:
            self._overlap.close()
            self._overlap = None
        if self._update.shared and self._seen and not self._whole:
            self._update.gather_gradients()
        self._update.close()
        if self._flat:
            self._flat.release()


class _Everywhere:
    """All devices' optimizers with the face of one, for GradScaler: it decides whether `step` is called at all."""

    def __init__(self, kept: Kept, workers: Workers) -> None:
        self._kept, self._workers = kept, workers
        self.param_groups = kept._optimizer.param_groups

    def step(self) -> None:
        """Step everywhere from the whole gradient on the first device."""
        kept = self._kept
        if kept._watched or any(map(_needs_the_optimizer, kept._kept.originals)):
            kept._step_plainly()
            return
        gradients = [p.grad for p in kept._kept.originals]
        kept._step(self._workers, [(kept._devices[0], gradients)], None)
        _set_gradients(kept._kept.originals, gradients)


def _needs_the_optimizer(parameter: torch.Tensor) -> bool:
    """Return whether units cannot hold a parameter's gradient: sparse, missing, or left from before it was frozen."""
    if not parameter.requires_grad:
        return parameter.grad is not None
    return parameter.grad is None or parameter.grad.is_sparse


def _accumulate(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient to a parameter's as autograd does: through the parameter's hooks if it has any."""
    if has_hooks([parameter]):
        torch.autograd.backward([parameter], [gradient])
    else:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _set_gradients(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
