"""Kept: the life of persistent replicas in a TrainStep, from their gradients to the weights of the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.broadcast import buckets_of
from dpbench.engine.each import on_each
from dpbench.engine.finish import finish
from dpbench.engine.graphs import Graphs
from dpbench.engine.losses import Loss
from dpbench.engine.persistent import Overlap, Persistent
from dpbench.engine.reduce import reduce
from dpbench.engine.storage import FlatWeights
from dpbench.engine.update import Update
from dpbench.engine.workers import Workers
from dpbench.records import Mark, Phase
from dpbench.schedule import Schedule


class Kept:
    """Replicas whose weights stay on their devices, with gradients of their own that are reduced explicitly."""

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
        self._kept = Persistent(module, devices, self._flat, mark, fixed=schedule.graphs == "on")
        self._update = Update(optimizer, self._kept, self._flat, devices, schedule, mark)
        self._whole = whole_gradient
        self._total: list[torch.Tensor | None] = []
        self._used = len(devices)
        self._seen: list[int] = []
        self._root_only = schedule.update == "root"
        self._overlap: Overlap | None = None
        if schedule.reduce == "overlap" and not whole_gradient:
            self._overlap = Overlap(self._kept, self._buckets(), self._ready, self._stage)

    def modules(self, count: int, workers: Workers, on_reduce: Callable[[], None] = lambda: None) -> list[nn.Module]:
        """Return the first replicas, with current weights and buffers."""
        self._used = count
        if self._root_only or self._kept.versions() != self._seen:
            self._refresh(workers)
        if self._overlap:
            self._overlap.begin(count)
            if exchange := self._update.exchange:
                exchange.wait()  # a step that failed may have left some running
                for i in range(count, len(self._devices)):
                    exchange.stage(i, None)
        return self._kept.modules(count)

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
        """Drop the gradients, the accumulated ones included."""
        self._kept.clear()
        self._total = []

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
        if self._update.exchange and self._used > 1:
            self._update.exchange.stage(i, [p.grad for p in self._kept.parameters[i]], numbers)

    def _ready(self, numbers: Sequence[int]) -> None:
        """Reduce one bucket, from inside backward."""
        if self._update.exchange and self._used > 1:
            self._update.exchange.reduce(numbers)
            return
        sources = self._sources()
        for i in self._update.owners:
            self._update.collect(i, sources, numbers)

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
        """Where gradients are needed whole, add this call's to those of the calls before, in the order of torch."""
        if not self._whole:
            return
        root, each = self._devices[0], self._kept.gradients(self._used)
        with torch.no_grad():
            found = [n for n, column in enumerate(zip(*each, strict=True)) if any(g is not None for g in column)]
            # a replica that did not use a parameter adds zeros, as behind autograd's Broadcast
            filled = [[self._zeros(i, n) if (g := one[n]) is None else g for n in found] for i, one in enumerate(each)]
            sums = reduce(filled, self._devices[: self._used], comm_dtype=self._update.comm_dtype, mark=self._mark)
            with self._mark(Phase.REDUCE, root.index), root.guard():
                self._add(dict(zip(found, sums, strict=True)))
        self._kept.clear()

    def _zeros(self, i: int, number: int) -> torch.Tensor:
        with self._devices[i].guard():
            return torch.zeros_like(self._kept.parameters[i][number], requires_grad=False)

    def _add(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Add one call's gradients to those of the calls before; zeros for what no replica has used."""
        total = []
        for n, parameter in enumerate(self._kept.parameters[0]):
            gradient = sums.get(n)
            if gradient is None and parameter.requires_grad and len(self._devices) > 1:
                gradient = self._zeros(0, n)
            before = self._total[n] if self._total else None
            total.append(gradient if before is None else before if gradient is None else before + gradient)
        self._total = total

    def update(self, workers: Workers, clip_norm: float | None, scaler: torch.amp.GradScaler | None) -> None:
        """Bring the gradients to whoever steps, let them step, and exchange what they stepped."""
        if self._whole:
            root = self._devices[0]
            for parameter, gradient in zip(self._kept.parameters[0], self._total, strict=True):
                parameter.grad = gradient
            with self._mark(Phase.OPTIMIZER, root.index):
                finish(self._update.optimizer, self._module, clip_norm, scaler, _Everywhere(self, workers))
            return
        self._step(workers, self._sources(), self._overlap.rest() if self._overlap else None)

    def _step(self, workers: Workers, sources: Any, numbers: Sequence[int] | None) -> None:
        """Collect, step and spread, on all owners at once."""
        update, owners = self._update, [self._devices[i] for i in self._update.owners]
        self._check_used(sources)
        together = update.exchange is not None and len(sources) > 1
        if together:
            self._together(workers, sources, numbers)

        def step(i: int) -> None:
            if not together and (numbers is None or numbers):
                update.collect(i, sources, numbers)
            update.step(i)

        on_each(step, owners, workers)
        self._kept.clear()
        update.show()
        if update.shared:
            update.spread(workers)
        self._seen = self._kept.versions()

    def _check_used(self, sources: Any) -> None:
        """Refuse to step, with one device, a parameter that got no gradient: torch would leave it where it is."""
        if len(self._devices) == 1 and any(
            g is None and p.requires_grad for g, p in zip(sources[0][1], self._kept.parameters[0], strict=True)
        ):
            raise RuntimeError(
                "a parameter got no gradient, and on one device persistent replicas cannot leave it out as torch does; "
                "use schedule='reference'"
            )

    def sync(self) -> None:
        """Refresh all replicas before the next step."""
        self._seen = []

    def close(self) -> None:
        """Leave module and optimizer as an ordinary loop would."""
        if self._overlap:
            self._overlap.close()
        if self._update.shared and self._seen:
            self._update.gather_gradients()
        self._update.close()
        if self._flat:
            self._flat.release()


class _Everywhere:
    """All devices' optimizers with the face of one, for GradScaler: it decides whether `step` is called at all."""

    def __init__(self, kept: Kept, workers: Workers) -> None:
        self._kept, self._workers = kept, workers
        self.param_groups = kept._update.optimizer.param_groups

    def step(self) -> None:
        """Step everywhere from the whole gradient on the first device."""
        kept = self._kept
        root = [p.grad for p in kept._kept.parameters[0]]
        kept._step(self._workers, [(kept._devices[0], root)], None)
        for parameter, gradient in zip(kept._kept.parameters[0], root, strict=True):
            parameter.grad = gradient
