"""Update: every device sums gradients, and steps all weights, or a share of them.

What it changes in `local`: the sums are written where an optimizer of each device reads them. A
shard is a tensor that one device's optimizer steps: a parameter, or a slice of a flat buffer. The
user's optimizer steps device 0's shards, so that its param_groups and schedulers take effect. The
optimizers of the other devices copy its options.

A step uses, in this order: `state.begin`, `shown.hide`, the sums (`collect`, or `exchange`),
`step`, for slices `copy` or `spread`, then `shown.show` and `state.end`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from dpbench.engine.fast.exchange import Exchange, choose
from dpbench.engine.fast.flat_storage import FlatWeights, line
from dpbench.engine.fast.optimizer_state import OptimizerState
from dpbench.engine.fast.replica_weights import ReplicaGradients, ReplicaWeights
from dpbench.engine.fast.shards import ParamShard, Segment, Sum, sums
from dpbench.engine.fast.shown_gradients import ShownGradients
from dpbench.engine.fast.stepper import Stepper, groups_of, mirror
from dpbench.hardware.device import Device
from dpbench.hardware.devices._many import copy_all, sum_all
from dpbench.records import Mark, Phase, marked

SMALL_BYTES = 2**16
"""One call sums all gradients up to this size.

It writes each sum twice, but such sums fit in the cache.
"""
FEW = 8
"""The minimum number of small gradients to sum in one call."""
ONE_BY_ONE_BYTES = 2**20
"""One thread makes the updates of all devices up to this size: waking others takes longer."""


class Update:
    """The shards of all devices, the sums of gradients there, and the optimizers that step them.

    With `flat`, a shard is a device's slice of a flat buffer; without it, every device steps all
    parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replicas: ReplicaWeights,
        flat: FlatWeights | None,
        devices: Sequence[Device],
        mark: Mark,
    ) -> None:
        self._replicas = replicas
        self._devices = devices
        self._mark = mark
        self._groups = groups_of(optimizer, replicas.originals)
        self.exchange = self._exchange(everyone=flat is None)
        self._on_host = devices[0].torch_device.type == "cpu" and self.exchange is None
        self._whole_buffers: list[torch.Tensor] = []
        if flat is not None and self._on_host:
            # logical devices share the host's memory: their slices make up the whole gradient
            self._whole_buffers = flat.layout.allocate(devices[0])
        self._shards = [
            self._whole(i) if flat is None else self._slices(flat, i) for i in range(len(devices))
        ]
        self._sums = [
            [one for shard in shards for one in sums(shard, replicas.parameters[0])]
            for shards in self._shards
        ]
        in_one_memory = len({device.torch_device for device in devices}) == 1
        self._small = [_small(each) if in_one_memory else [] for each in self._sums]
        together = {id(one) for small in self._small for one in small}
        self._large = [[one for one in each if id(one) not in together] for each in self._sums]
        stepped_bytes = sum(one.target.nbytes for each in self._sums for one in each)
        self.one_by_one = self._on_host and stepped_bytes <= ONE_BY_ONE_BYTES
        self._steppers = [
            Stepper(optimizer if i == 0 else mirror(optimizer), optimizer, shards)
            for i, shards in enumerate(self._shards)
        ]
        self.shown = ShownGradients(
            replicas.originals,
            (n for group in self._groups for n in group.parameters),
            self._complete_gradients(flat),
        )
        self.state = OptimizerState(
            optimizer,
            self._groups,
            replicas.originals,
            replicas.parameters[0],
            self._steppers,
            sharded=flat is not None,
        )

    def _exchange(self, *, everyone: bool) -> Exchange | None:
        """Return the exchange that sums gradients by collectives, or None if there are none.

        The gradients of the shards are then views of the exchange's buffers.
        """
        parameters = self._replicas.parameters
        stepped = [parameters[0][n] for group in self._groups for n in group.parameters]
        collectives = choose(self._devices, stepped)
        if collectives is None:
            return None
        return Exchange(
            collectives,
            self._devices,
            parameters,
            [group.parameters for group in self._groups],
            everyone=everyone,
            mark=self._mark,
        )

    def _whole(self, i: int) -> list[ParamShard]:
        """Return device i's shards if each is a parameter of the optimizer."""
        # the optimizer steps the module's own parameters, whose memory replica 0 shares
        weights = [self._replicas.originals, *self._replicas.parameters[1:]]
        shards = []
        for group, n in ((g.number, n) for g in self._groups for n in g.parameters):
            weight = weights[i][n]
            if self.exchange:
                gradient = self.exchange.views[i][n]
            else:
                with self._devices[i].guard():
                    gradient = torch.zeros_like(weight, requires_grad=False)
            segment = Segment(n, 0, weight.numel(), 0)
            twins = tuple(one[n].data for one in weights)
            shards.append(ParamShard(weight, gradient, group, (segment,), twins))
        return shards

    def _slices(self, flat: FlatWeights, i: int) -> list[ParamShard]:
        """Return device i's slices of the flat buffers whose parameters the optimizer steps."""
        shards = []
        group_of = {n: group.number for group in self._groups for n in group.parameters}
        for f, plan in enumerate(flat.layout.flats):
            group = group_of.get(plan.slots[0].parameter)
            if group is None:
                continue
            # no remainder: the layout was made for this number of devices
            share = plan.size // len(self._devices)
            start, stop = i * share, (i + 1) * share
            segments = tuple(
                Segment(
                    s.parameter,
                    max(s.start, start) - s.start,
                    min(s.stop, stop) - s.start,
                    max(s.start, start) - start,
                )
                for s in plan.slots
                if max(s.start, start) < min(s.stop, stop)
            )
            twins = tuple(flats[f][start:stop] for flats in self._replicas.flats)
            with self._devices[i].guard():
                weight = twins[i].detach().requires_grad_()
                if self.exchange:
                    gradient = self.exchange.buffers[i][f][start:stop]
                elif self._whole_buffers:
                    gradient = self._whole_buffers[f][start:stop]
                else:
                    gradient = torch.zeros_like(twins[i])
            shards.append(ParamShard(weight, gradient, group, segments, twins))
        return shards

    def _complete_gradients(self, flat: FlatWeights | None) -> dict[int, torch.Tensor]:
        """Return, by parameter index, the reduced gradients that are complete in one tensor.

        They are on device 0; with logical CPU devices, any device may have summed them.
        """
        if self._whole_buffers and flat is not None:
            return flat.layout.views(self._whole_buffers, self._replicas.parameters[0])
        shards = self._sums if self._on_host else self._sums[:1]
        return {one.segment.parameter: one.target for sums in shards for one in sums if one.whole}

    def collect(self, i: int, gradients: ReplicaGradients) -> None:
        """Sum the gradients of all replicas, in replica order, for device i's shards."""
        device = self._devices[i]
        marks = marked(self._mark, Phase.REDUCE, device.at_work(self._devices))
        with marks, device.guard(), torch.no_grad():
            if not self._on_host:
                for other, one in zip(self._devices, gradients, strict=False):
                    device.wait(other)
                    device.borrow([g for g in one if g is not None])
            for segment_sum in self._sum_small(i, gradients):
                n = segment_sum.segment.parameter
                self._sum(device, segment_sum, [one[n] for one in gradients])

    def _sum_small(self, i: int, gradients: ReplicaGradients) -> Sequence[Sum]:
        """Sum device i's small gradients in one call, if none is missing; return the other sums."""
        small = self._small[i]
        parts = [[given[one.segment.parameter] for one in small] for given in gradients]
        if any(part is None for one in parts for part in one):
            return self._sums[i]
        sum_all([one.target for one in small], parts)  # type: ignore[arg-type]
        return self._large[i]

    def _sum(
        self, device: Device, segment_sum: Sum, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Write the sum of one segment's gradients; None stands for an unused parameter."""
        slices = [segment_sum.of(part) for part in gradients if part is not None]
        home = device.torch_device
        parts = [p if p.device == home else p.to(home, non_blocking=True) for p in slices]
        if not parts:
            segment_sum.target.zero_()
        elif len(parts) == 1:
            segment_sum.target.copy_(parts[0])
        else:
            torch.add(parts[0], parts[1], out=segment_sum.target)
            for part in parts[2:]:
                segment_sum.target.add_(part)

    def step(self, i: int) -> None:
        """Run device i's optimizer on its shards."""
        device = self._devices[i]
        with self._mark(Phase.OPTIMIZER, device.index), device.guard():
            self._steppers[i].step()

    def copy(self, i: int) -> None:
        """Copy to device i the weights that the others have updated."""
        device = self._devices[i]
        marks = marked(self._mark, Phase.REPLICATE, device.at_work(self._devices))
        with marks, device.guard(), torch.no_grad():
            for j, shards in enumerate(self._shards):
                if j != i:
                    device.wait(self._devices[j])
                    copy_all(
                        [shard.twins[i] for shard in shards], [shard.twins[j] for shard in shards]
                    )

    def spread(self) -> None:
        """Send the weights that each device has updated to all others, by a collective."""
        assert self.exchange is not None
        self.exchange.spread(
            [
                flats[: len(one)]
                for flats, one in zip(self._replicas.flats, self.exchange.buffers, strict=True)
            ]
        )

    def gather_gradients(self) -> None:
        """Gather the reduced gradients from all devices into the module's `.grad`.

        If each device has reduced only its share of them, call this once, when training ends.
        """
        gradients: dict[int, torch.Tensor] = {}
        for shard in (shard for shards in self._shards for shard in shards):
            for segment in shard.segments:
                n = segment.parameter
                if n not in gradients:
                    gradients[n] = torch.zeros_like(
                        self._replicas.parameters[0][n], requires_grad=False
                    )
                line(gradients[n])[segment.start : segment.stop].copy_(segment.of(shard.gradient))
        for n, gradient in gradients.items():
            parameter = self._replicas.originals[n]
            dtypes = parameter.dtype, getattr(parameter, "grad_dtype", parameter.dtype)
            if parameter.shape == gradient.shape and dtypes == (gradient.dtype, gradient.dtype):
                parameter.grad = gradient


def _small(candidates: Sequence[Sum]) -> list[Sum]:
    """Return the sums of small gradients, or none if there are fewer than `FEW`."""
    small = [one for one in candidates if one.whole and one.target.nbytes <= SMALL_BYTES]
    return small if len(small) >= FEW else []
