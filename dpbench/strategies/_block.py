"""A block of a module that runs on several devices: dpbench.DataParallel with marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dpbench.engine import DataParallel
from dpbench.engine.data_parallel import run_pieces, scatter_arguments
from dpbench.engine.workers import IntraOp
from dpbench.hardware.device import Device
from dpbench.records import Mark, Phase
from dpbench.strategies._layers import Flow


class Block(DataParallel):
    """dpbench.DataParallel around a block; it switches the marks of `flow` where a pass enters and leaves the block.

    Backward runs through the layers after the block, then through the replicas of the block, and then through the
    layers before it.
    """

    def __init__(self, module: nn.Module, devices: Sequence[Device], flow: Flow, mark: Mark) -> None:
        super().__init__(module, list(devices), mark=mark)
        self._flow = flow

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the block with its arguments split over the devices; return the gathered output."""
        flow, root = self._flow, self.devices[0]
        flow.leave()
        _on_gradient((inputs, kwargs), lambda: flow.enter(Phase.BACKWARD, root))
        pieces = scatter_arguments(inputs, kwargs, self.devices, mark=self._mark)
        with IntraOp(self.devices):
            output = run_pieces(self.module, pieces, self.devices, root, mark=self._mark, on_reduce=flow.leave)
        used = self.devices[: len(pieces)]
        _on_gradient(output, lambda: flow.enter(Phase.BACKWARD, *used))
        flow.enter(Phase.FORWARD, root)
        return output


def _on_gradient(values: Any, call: Any) -> None:
    """Make backward call `call` each time that it has computed the gradient of a tensor in `values`."""
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value.register_hook(lambda gradient: call())
