"""Exchange: sum gradients over distinct GPUs by in-place collectives of NCCL.

NCCL is fast but chooses the order of additions. Replicas that share a GPU, and logical CPU devices,
have no collectives: their gradients are added in replica order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dpbench.engine.fast.flat_storage import is_dense, plan
from dpbench.hardware.device import Collectives, Device
from dpbench.hardware.devices._many import copy_all
from dpbench.records import Mark, Phase, marked

NEEDS_DENSE = (
    "kept replicas need dense gradients, but {}; use schedule='cached', or create the layer with"
    " sparse=False"
)
"""The reason for which sparse gradients are refused, without what is sparse."""


def choose(devices: Sequence[Device], tensors: Sequence[torch.Tensor]) -> Collectives | None:
    """Return the collectives with which `devices` can sum gradients of `tensors`.

    If there are none, return None: gradients must then be added in replica order.
    """
    if not all(is_dense(one) and one.is_floating_point() for one in tensors):
        return None
    return devices[0].collectives(devices)


class Exchange:
    """Flat buffers on all devices, for gradients that collectives sum over the devices.

    `parameters[i]` are the parameters on device i. `groups` are lists of parameter indices. With
    `everyone`, every device gets all sums; if not, device i gets part i of them.
    """

    def __init__(
        self,
        collectives: Collectives,
        devices: Sequence[Device],
        parameters: Sequence[Sequence[torch.Tensor]],
        groups: Sequence[Sequence[int]],
        *,
        everyone: bool,
        mark: Mark,
    ) -> None:
        self._collectives = collectives
        self._devices = devices
        self._indices = [device.index for device in devices]
        self._everyone = everyone
        self._mark = mark
        layout = plan(groups, parameters[0], len(devices))
        self.buffers = [layout.allocate(device) for device in devices]
        self.views = [
            layout.views(own, like) for own, like in zip(self.buffers, parameters, strict=True)
        ]

    def stage(self, i: int, gradients: Sequence[torch.Tensor | None] | None) -> None:
        """Copy device i's gradients into its buffers, and write zeros for missing gradients.

        `gradients` are in the order of the parameters; None means that all are missing.
        """
        views = self.views[i]
        device = self._devices[i]
        given = {n: None if gradients is None else gradients[n] for n in views}
        with self._mark(Phase.REDUCE, device.index), torch.no_grad():
            present = {n: dense(g) for n, g in given.items() if g is not None}
            copy_all([views[n] for n in present], list(present.values()))
            for n in given.keys() - present.keys():
                views[n].zero_()

    def reduce(self) -> None:
        """Sum the staged gradients of all parameters."""
        calls = self._collectives
        run = calls.all_reduce if self._everyone else calls.reduce_scatter
        self._together(run, self.buffers, Phase.REDUCE)

    def spread(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Gather the flat weights in place, after each device has stepped its own part.

        `weights[i][f]` is flat buffer f on device i.
        """
        self._together(self._collectives.all_gather, weights, Phase.REPLICATE)

    def broadcast(self, weights: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy device 0's flat weights to all devices, in place.

        `weights[i][f]` is flat buffer f on device i.
        """
        self._together(
            lambda tensors: self._collectives.broadcast(tensors, 0), weights, Phase.REPLICATE
        )

    def _together(
        self,
        run: Callable[[list[torch.Tensor]], None],
        buffers: Sequence[Sequence[torch.Tensor]],
        phase: Phase,
    ) -> None:
        """Call the collective `run` for each flat buffer, with the tensors of all devices.

        The collectives wait for the work already queued on the devices; later work waits for the
        collectives.
        """
        with marked(self._mark, phase, self._indices), torch.no_grad():
            for i in range(len(self._devices)):
                self._collectives.follow(i)
            for tensors in zip(*buffers, strict=True):
                run(list(tensors))
            for i in range(len(self._devices)):
                self._collectives.lead(i)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return the gradient; raise ValueError if it is sparse, which flat buffers cannot hold."""
    if gradient.layout is not torch.strided:
        raise ValueError(NEEDS_DENSE.format("a parameter has a sparse gradient"))
    return gradient
