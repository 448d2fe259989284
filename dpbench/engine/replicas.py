"""The two lives of a TrainStep's replicas: joined to the module by autograd in every step, or kept with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.broadcast import Copier, buckets_of, copies_of
from dpbench.engine.cached import Trees
from dpbench.engine.each import on_each
from dpbench.engine.persistent import Overlap, Persistent
from dpbench.engine.replicate import check_placement, replicate, unique
from dpbench.engine.storage import FlatWeights
from dpbench.engine.update import Update, groups_of, why_not
from dpbench.engine.workers import Workers
from dpbench.records import Mark, Phase
from dpbench.schedule import Schedule


def flat_weights(
    module: nn.Module, optimizer: torch.optim.Optimizer | None, schedule: Schedule, root: Device
) -> FlatWeights | None:
    """Move the module's trainable parameters into flat buffers, one a group and dtype, if the schedule says so."""
    if schedule.storage != "flat":
        return None
    kind = root.torch_device.type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"storage=flat needs CPU or CUDA devices: parameters on {kind} cannot be views of one buffer")
    if kind == "cuda" and any(isinstance(part, nn.RNNBase) for part in module.modules()):
        raise ValueError("storage=flat needs a module without RNNs on CUDA: cuDNN packs their weights itself")
    check_placement(module, root)
    parameters = unique(module.parameters())
    groups = groups_of(optimizer, parameters) if optimizer else []
    taken = {number for group in groups for number in group}
    rest = [n for n, p in enumerate(parameters) if p.requires_grad and n not in taken]
    return FlatWeights(parameters, [*groups, rest], root)


def flat_copier(flat: FlatWeights) -> Copier:
    """Return a copier that moves the flat buffers whole, and everything else by itself."""
    number = {id(parameter): n for n, parameter in enumerate(flat.parameters)}

    def copier(tensors: Sequence[torch.Tensor], devices: Sequence[Device], mark: Mark) -> list[list[torch.Tensor]]:
        flat.adopt()
        copies = [list(tensors)]
        held = [number.get(id(tensor), -1) in flat.views for tensor in tensors]
        for device in devices[1:]:
            with mark(Phase.REPLICATE, device.index):
                views = flat.copies(device)
                others = iter(device.clone([t for t, inside in zip(tensors, held, strict=True) if not inside]))
                copies.append(
                    [
                        views[number[id(t)]].data if inside else next(others)
                        for t, inside in zip(tensors, held, strict=True)
                    ]
                )
        return copies

    return copier


class Autograd:
    """Replicas made of copies that a Broadcast node joins to the module: its backward leaves the sum in `.grad`."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        devices: Sequence[Device],
        schedule: Schedule,
        *,
        whole_gradient: bool,
        mark: Mark,
    ) -> None:
        self._module, self._optimizer, self._devices, self._mark = module, optimizer, devices, mark
        if reason := why_not(optimizer, schedule):
            raise ValueError(reason)
        self._flat = flat_weights(module, optimizer, schedule, devices[0])
        self._make = maker(module, schedule, self._flat)

    def modules(self, count: int, workers: Workers, on_reduce: Callable[[], None] = lambda: None) -> list[nn.Module]:
        """Return the first replicas; one device alone runs the module itself."""
        if len(self._devices) == 1:
            check_placement(self._module, self._devices[0])
            return [self._module]
        return self._make(self._devices[:count], False, self._mark, on_reduce)

    def clear(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def reduce(self, workers: Workers) -> None:
        """Do nothing: autograd has reduced."""

    def update(self, workers: Workers, clip_norm: float | None, scaler: torch.amp.GradScaler | None) -> None:
        """Step the optimizer on the first device."""
        with self._mark(Phase.OPTIMIZER, self._devices[0].index):
            finish(self._optimizer, self._module, clip_norm, scaler, self._optimizer)

    def sync(self) -> None:
        """Do nothing: every step copies the weights."""

    def close(self) -> None:
        """Give the parameters storage of their own."""
        if self._flat:
            self._flat.release()


Maker = Callable[[Sequence[Device], bool, Mark, Callable[[], None]], list[nn.Module]]


def maker(module: nn.Module, schedule: Schedule, flat: FlatWeights | None) -> Maker:
    """Return how a schedule replicates a module through autograd."""
    trees = Trees(module) if schedule.replicas == "cached" else None
    copier = flat_copier(flat) if flat else copies_of
    overlap = schedule.reduce == "overlap"
    comm_dtype = torch.bfloat16 if schedule.comm_dtype == "bf16" else None

    def make(devices: Sequence[Device], detach: bool, mark: Mark, on_reduce: Callable[[], None]) -> list[nn.Module]:
        return replicate(
            module,
            list(devices),
            detach=detach,
            copier=copier,
            trees=trees,
            overlap=overlap,
            comm_dtype=comm_dtype,
            mark=mark,
            # where buckets are reduced during backward, the first of them is not its end
            on_reduce=(lambda: None) if overlap else on_reduce,
        )

    return make


class Kept:
    """Replicas whose weights stay on their devices, with gradients of their own that are reduced explicitly."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        devices: Sequence[Device],
        schedule: Schedule,
        *,
        whole_gradient: bool,
        mark: Mark,
    ) -> None:
        if reason := why_not(optimizer, schedule):
            raise ValueError(reason)
        self._module, self._devices, self._mark = module, devices, mark
        self._flat = flat_weights(module, optimizer, schedule, devices[0])
        self._kept = Persistent(module, devices, self._flat, mark)
        self._update = Update(optimizer, self._kept, self._flat, devices, schedule, mark)
        self._whole = whole_gradient
        self._total: list[torch.Tensor | None] = []
        self._used = len(devices)
        self._seen: list[int] = []
        self._root_only = schedule.update == "root"
        self._overlap: Overlap | None = None
        if schedule.reduce == "overlap" and not whole_gradient:
            wanted = [n for n, p in enumerate(self._kept.parameters[0]) if p.requires_grad][::-1]
            runs = buckets_of([self._kept.parameters[0][n] for n in wanted])
            self._overlap = Overlap(self._kept, [[wanted[i] for i in run] for run in runs], self._bucket)

    def modules(self, count: int, workers: Workers, on_reduce: Callable[[], None] = lambda: None) -> list[nn.Module]:
        """Return the first replicas, with current weights and buffers."""
        self._used = count
        if self._root_only or self._kept.versions() != self._seen:
            on_each(lambda i: self._kept.refresh(i) if i else None, self._devices[:count], workers)
            if not self._root_only:
                for i in range(count, len(self._devices)):
                    self._kept.refresh(i)
                self._seen = self._kept.versions()
        if self._overlap:
            self._overlap.begin(count)
        return self._kept.modules(count)

    def clear(self) -> None:
        """Drop the gradients, the accumulated ones included."""
        self._kept.clear()
        self._total = []

    def _sources(self) -> list[tuple[Device, list[torch.Tensor | None]]]:
        return list(zip(self._devices, self._kept.gradients(self._used), strict=False))

    def _bucket(self, numbers: Sequence[int]) -> None:
        """Reduce one bucket on every owner, from inside backward."""
        sources = self._sources()
        for i in self._update.owners:
            self._update.collect(i, sources, numbers)

    def reduce(self, workers: Workers) -> None:
        """Where gradients are needed whole, add this call's to those of the calls before, in the order of torch."""
        if not self._whole:
            return
        root = self._devices[0]
        sources = self._sources()
        with self._mark(Phase.REDUCE, root.index), root.guard(), torch.no_grad():
            for device, gradients in sources[1:]:
                root.wait(device)
                root.borrow([g for g in gradients if g is not None])
            sums = [self._add(n, [one[n] for _, one in sources]) for n in range(len(sources[0][1]))]
            if self._total:
                sums = [a if b is None else b if a is None else a + b for a, b in zip(self._total, sums, strict=True)]
        self._kept.clear()
        self._total = sums

    def _add(self, number: int, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """Return the sum of one parameter's gradients on the first device; zeros if no replica has one."""
        parameter = self._kept.parameters[0][number]
        found = [p.to(parameter.device, non_blocking=True) for p in parts if p is not None]
        if not found:
            alone = len(self._devices) == 1 or not parameter.requires_grad
            return None if alone else torch.zeros_like(parameter, requires_grad=False)
        total = found[0]
        for n, part in enumerate(found[1:]):
            total = total + part if n == 0 else total.add_(part)
        return total

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

        def work(i: int) -> None:
            if numbers is None or numbers:
                update.collect(i, sources, numbers)

        def step(i: int) -> None:
            work(i)
            update.step(i)

        on_each(step, owners, workers)
        self._kept.clear()
        update.show()
        if update.shared:
            on_each(update.spread, self._devices, workers)
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


def finish(
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    clip_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    stepper: Any,
) -> None:
    """Unscale, clip, and step unless the gradients overflow."""
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(module.parameters(), clip_norm)
    if scaler is None:
        stepper.step()
    else:
        scaler.step(stepper)
        scaler.update()
