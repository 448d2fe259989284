"""Collectives: the sum of gradients over the replicas, and the broadcast of weights to the devices.

`reduce` sums gradients on one device. An `Exchange` sums gradients that are stored in persistent
flat buffers. On distinct GPUs, both use NCCL, which is fast but chooses the order of additions. For
replicas that share a GPU, and for logical CPU devices, gradients are added in replica order, so
that the sums are bitwise reproducible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import Function

from dpbench.engine.flat_storage import Flat, is_dense, plan
from dpbench.hardware.device import Collectives, Device
from dpbench.hardware.devices import Devices, as_devices
from dpbench.hardware.devices._many import copy_all
from dpbench.records import Mark, Phase, no_mark
from dpbench.records.work import BUCKET_BYTES, buckets


def reduce(
    gradients: Sequence[Sequence[torch.Tensor]],
    devices: Devices,
    *,
    mark: Mark = no_mark,
) -> list[torch.Tensor]:
    """Return the sums of `gradients[replica][parameter]` over the replicas, on `devices[0]`.

    The order of additions is ((g0 + g1) + g2) + ... On distinct GPUs, torch's coalesced reduction
    chooses the order, unless grad mode is enabled (as in a backward with `create_graph=True`).
    """
    devices = as_devices(devices)
    root = devices[0]
    with mark(Phase.REDUCE, root.index):
        # autograd does not record a collective, so second derivatives need plain additions
        if root.can_collect(devices) and not torch.is_grad_enabled():
            return root.reduce_add(gradients, devices)
        for device, one in zip(devices, gradients, strict=True):
            root.wait(device)
            root.borrow(one)
        with root.guard():
            return [_sum(parts, root) for parts in zip(*gradients, strict=True)]


def _sum(parts: Sequence[torch.Tensor], root: Device) -> torch.Tensor:
    """Return the sum of `parts` on `root`, added in order; it is sparse if all parts are."""
    total = parts[0]
    for number, part in enumerate(parts[1:]):
        here = arrive(part, root)
        # torch cannot add a dense tensor to a sparse one
        if total.is_sparse and not here.is_sparse:
            total = here + total
        else:
            total = total + here if number == 0 else total.add_(here)
    return total


def arrive(part: torch.Tensor, root: Device) -> torch.Tensor:
    """Return a replica's gradient as a tensor on `root`; call this inside `root.guard()`."""
    home = root.torch_device
    # the comparison is cheaper than a call of `to`
    return part if part.device == home else part.to(home, non_blocking=True)


def choose(devices: Sequence[Device], tensors: Sequence[torch.Tensor]) -> Collectives | None:
    """Return the collectives with which `devices` can sum gradients of `tensors`.

    If there are none, return None: gradients must then be added in replica order.
    """
    if not all(is_dense(one) and one.is_floating_point() for one in tensors):
        return None
    return devices[0].collectives(devices)


class Overlapping:
    """The decision, for each step, whether collectives sum gradients while backward still runs.

    They do not in a step after one in which a device got memory from its driver, and not in the
    first. For one collective, NCCL launches a kernel on each GPU in turn, and each kernel waits for
    the others. If meanwhile the backward of another GPU, in another thread, allocates memory or
    loads a kernel, the driver may make it wait for a kernel that runs already, and make NCCL's next
    launch wait for the allocation: neither would end.
    """

    def __init__(self) -> None:
        self._before: list[int] = []
        self.postponed = ""
        """The reason why the present step does not overlap; empty if it does."""

    def begin(self, devices: Sequence[Device], *, together: bool) -> bool:
        """Return whether the step that begins may overlap the two.

        It always may without collectives: if not `together`.
        """
        allocations = [device.allocations() for device in devices] if together else []
        grew = together and allocations != self._before
        self._before = allocations
        self.postponed = POSTPONED if grew else ""
        return not grew


POSTPONED = (
    "gradients are reduced after backward, because the step before allocated memory of a GPU, and"
    " collectives during backward could wait for an allocation for ever"
)


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat buffer `flat`, and the indices of its parameters."""

    flat: int
    start: int
    stop: int
    numbers: tuple[int, ...]


class Exchange:
    """Flat buffers on all devices, for gradients that collectives sum over the devices.

    `parameters[i]` are the parameters on device i. `groups` are lists of parameter indices.
    `owners[g]` is the index of the device that gets the sums of `groups[g]`. If it is None, device
    i gets part i of the sums. With `everyone`, every device gets all sums, and `owners` has no
    effect.
    """

    def __init__(
        self,
        collectives: Collectives,
        devices: Sequence[Device],
        parameters: Sequence[Sequence[torch.Tensor]],
        groups: Sequence[Sequence[int]],
        owners: Sequence[int | None],
        *,
        everyone: bool,
        mark: Mark,
    ) -> None:
        self._collectives = collectives
        self._devices = devices
        self._everyone = everyone
        self._mark = mark
        layout = plan(groups, parameters[0], len(devices))
        self.buffers = [layout.allocate(device) for device in devices]
        self.views = [
            layout.views(own, like) for own, like in zip(self.buffers, parameters, strict=True)
        ]
        owner_of = {
            n: owner for numbers, owner in zip(groups, owners, strict=True) for n in numbers
        }
        self._owners = [owner_of[flat.slots[0].parameter] for flat in layout.flats]
        self._wholes = [
            Bucket(f, 0, flat.size, tuple(s.parameter for s in flat.slots))
            for f, flat in enumerate(layout.flats)
        ]
        self.buckets = [
            bucket for f, flat in enumerate(layout.flats) for bucket in _buckets(f, flat)
        ]
        self._lock = threading.Lock()  # collectives queued in different orders on two GPUs deadlock

    def stage(
        self,
        i: int,
        gradients: Sequence[torch.Tensor | None] | None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Copy device i's gradients into its buffers, and write zeros for missing gradients.

        `gradients` are in the order of the parameters; None means that all are missing. `numbers`
        are the indices of the parameters to copy; None means all parameters.
        """
        views = self.views[i]
        device = self._devices[i]
        wanted = views if numbers is None else [n for n in numbers if n in views]
        given = (
            {n: gradients[n] for n in wanted} if gradients is not None else dict.fromkeys(wanted)
        )
        with self._mark(Phase.REDUCE, device.index), torch.no_grad():
            present = {n: dense(g) for n, g in given.items() if g is not None}
            copy_all([views[n] for n in present], list(present.values()))
            for n in given.keys() - present.keys():
                views[n].zero_()
            self._collectives.follow(i)

    def reduce(self, numbers: Sequence[int] | None = None) -> None:
        """Queue the collectives that sum the gradients of the parameters `numbers`; None means all.

        A bucket is summed only if `numbers` contains all its parameters.
        """
        buckets = self._wholes
        if numbers is not None:
            wanted = set(numbers)
            buckets = [bucket for bucket in self.buckets if wanted.issuperset(bucket.numbers)]
        with self._lock, torch.no_grad():
            for bucket in buckets:
                self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        count = len(self._devices)
        owner = self._owners[bucket.flat]
        tensors = [own[bucket.flat][bucket.start : bucket.stop] for own in self.buffers]
        whole = self._wholes[bucket.flat]
        if self._everyone:
            self._collectives.all_reduce(tensors)
        elif owner is not None:
            self._collectives.reduce(tensors, owner)
        elif bucket == whole:
            self._collectives.reduce_scatter(tensors)
        else:
            for i in range(count):
                start, stop = (
                    max(bucket.start, whole.stop // count * i),
                    min(bucket.stop, whole.stop // count * (i + 1)),
                )
                if start < stop:
                    self._collectives.reduce(
                        [own[bucket.flat][start:stop] for own in self.buffers], i
                    )

    def wait(self, phase: Phase = Phase.REDUCE) -> None:
        """Make every device wait for the collectives queued so far, as a part of `phase`."""
        with self._marked(phase):
            self.lead()

    def lead(self) -> None:
        """Make every device wait for the collectives queued so far, without recording a phase."""
        for i in range(len(self._devices)):
            self._collectives.lead(i)

    def spread(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Gather the flat weights in place, after each device has stepped its own part.

        `weights[i][f]` is flat buffer f on device i.
        """
        self._together(self._collectives.all_gather, weights)

    def broadcast(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy device 0's flat weights to all devices, in place.

        `weights[i][f]` is flat buffer f on device i.
        """
        self._together(lambda tensors: self._collectives.broadcast(tensors, 0), weights)

    def _together(
        self, run: Callable[[list[torch.Tensor]], None], weights: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Call the collective `run` for each flat buffer, with the tensors of all devices.

        The collectives wait for the work already queued on the devices; later work waits for the
        collectives.
        """
        with self._marked(Phase.REPLICATE), self._lock, torch.no_grad():
            for i in range(len(self._devices)):
                self._collectives.follow(i)
            for tensors in zip(*weights, strict=True):
                run(list(tensors))
            for i in range(len(self._devices)):
                self._collectives.lead(i)

    def _marked(self, phase: Phase) -> ExitStack:
        stack = ExitStack()
        for device in self._devices:
            stack.enter_context(self._mark(phase, device.index))
        return stack


def _buckets(f: int, flat: Flat) -> list[Bucket]:
    """Cut a flat buffer into buckets of about BUCKET_BYTES, the end of the buffer first.

    Backward computes the gradients of the last parameters first.
    """
    buckets: list[Bucket] = []
    stop, numbers = flat.size, []
    for slot in reversed(flat.slots):
        numbers.append(slot.parameter)
        if (stop - slot.start) * flat.dtype.itemsize >= BUCKET_BYTES or slot.start == 0:
            buckets.append(Bucket(f, slot.start, stop, tuple(numbers)))
            stop, numbers = slot.start, []
    return buckets


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient; raise ValueError if it is sparse, which flat buffers cannot hold."""
    if gradient.layout is not torch.strided:
        raise ValueError(
            "replicas=persistent needs dense gradients, but a parameter has a sparse gradient; use"
            " schedule='cached', or create the layer with sparse=False"
        )
    return gradient


Copier = Callable[[Sequence[torch.Tensor], Sequence[Device], Mark], list[list[torch.Tensor]]]
"""A function that returns one list of tensors per device: first the originals, then copies."""

FIRST = 2**63 - 1
"""The sequence number of autograd nodes that must run first: autograd prefers the highest."""


def broadcast(
    tensors: Sequence[torch.Tensor],
    devices: Sequence[Device],
    *,
    copier: Copier,
    overlap: bool,
    mark: Mark,
    on_reduce: Callable[[], None],
) -> list[list[torch.Tensor]]:
    """Return one list of copies of `tensors` per device; the first list has the tensors themselves.

    All copies are made by a single autograd node, or with `overlap` by one node per bucket. In
    backward, each node waits until all replicas have computed the gradients of its tensors, calls
    `on_reduce`, and sums these gradients.
    """
    per_device: list[list[torch.Tensor]] = [[] for _ in devices]
    for bucket in buckets_of(tensors) if overlap else [range(len(tensors))]:
        part = [tensors[i] for i in bucket]
        flat = Broadcast.apply(devices, mark, on_reduce, copier, *part) if part else ()  # type: ignore[no-untyped-call]
        if overlap:
            node = next((tensor.grad_fn for tensor in flat if tensor.grad_fn is not None), None)
            if node is not None:
                node._set_sequence_nr(FIRST)
        for i, copies in enumerate(per_device):
            copies.extend(flat[i * len(part) : (i + 1) * len(part)])
    return per_device


def buckets_of(tensors: Sequence[torch.Tensor]) -> list[range]:
    """Return consecutive ranges of indices of `tensors`, each of about BUCKET_BYTES."""
    return buckets([tensor.nbytes for tensor in tensors], BUCKET_BYTES)


class Broadcast(Function):
    """An autograd function that copies tensors to every device; its backward sums their gradients.

    If a single node copies all parameters, its backward starts when the last replica's backward has
    ended. The call of `on_reduce` there ends the `backward` phase.
    """

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[Device],
        mark: Mark,
        on_reduce: Callable[[], None],
        copier: Copier,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the originals, then the copies of device 1, and so on, in one tuple."""
        ctx.devices = devices
        # the first device's last, so that it stays the current one
        ctx.guards = [device.guard() for device in reversed(devices)]
        ctx.mark = mark
        ctx.on_reduce = on_reduce
        ctx.count = len(tensors)
        copies = copier(tensors, devices, mark)
        frozen = [
            t
            for one in copies
            for t, wants in zip(one, ctx.needs_input_grad[4:], strict=True)
            if not wants
        ]
        ctx.mark_non_differentiable(*frozen)
        return tuple(tensor for one in copies for tensor in one)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients, summed over the replicas, and None for each other argument.

        As in torch, the gradient of a parameter that no replica used is zero. The sums are computed
        on the streams of the forward, to which the gradients' memory belongs: the thread in which
        autograd runs this has others.
        """
        ctx.on_reduce()
        each = [gradients[i : i + ctx.count] for i in range(0, len(gradients), ctx.count)]
        wanted = [i for i, wants in enumerate(ctx.needs_input_grad[4:]) if wants]
        with ExitStack() as guards:
            for guard in ctx.guards:
                guards.enter_context(guard)
            sums = reduce([[one[i] for i in wanted] for one in each], ctx.devices, mark=ctx.mark)
        whole: list[Any] = [None] * ctx.count
        for i, total in zip(wanted, sums, strict=True):
            whole[i] = total
        return None, None, None, None, *whole


def copies_of(
    tensors: Sequence[torch.Tensor], devices: Sequence[Device], mark: Mark
) -> list[list[torch.Tensor]]:
    """Return one list per device: the tensors themselves for the first, copies for all others."""
    root, *others = devices
    if tensors and root.can_collect(devices):
        with ExitStack() as stack:
            for device in devices:
                stack.enter_context(mark(Phase.REPLICATE, device.index))
            return root.broadcast(tensors, devices)
    copies = [list(tensors)]
    for device in others:
        with mark(Phase.REPLICATE, device.index):
            copies.append(device.clone(tensors))
    return copies
