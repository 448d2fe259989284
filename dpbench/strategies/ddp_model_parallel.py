"""DistributedDataParallel with model parallelism: each rank spreads its layers over two devices.

`_layers` describes how a rank's layers are divided. A case with n devices has n / 2 ranks; rank r uses the devices 2 r
and 2 r + 1. The span of the exposed reduction (see `ddp`) is recorded for the rank's first device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.strategies import Parallelism, Reduction, Strategy, Traits
from dpbench.strategies.ddp import ExposedReduction, Observed

if TYPE_CHECKING:
    import torch

    from dpbench.models import Model
    from dpbench.strategies._layers import SpreadStep

EACH = 2
"""The number of devices of a rank."""


class DdpModelParallel(Strategy):
    """The strategy that trains with DistributedDataParallel, where each rank's layers are on two devices."""

    traits = Traits(
        parallelism=Parallelism.RANKS, reduction=Reduction.OVERLAPPED, shared_stream=True, devices_per_replica=EACH
    )

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, an odd number of devices), or ""."""
        if reason := super().skip(case):
            return reason
        if case.devices % EACH:
            return (
                f"ddp_model_parallel needs {EACH} devices per rank, but the number of devices is {case.devices}: give "
                f"--devices {case.devices + 1}"
            )
        return ""

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[_Step]:
        """Place this rank's layers on its devices and yield its training step; on exit, remove the hooks.

        Raises ValueError if the module has fewer than two layers.
        """
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from dpbench.strategies._layers import SpreadStep, spread

        root = devices[0]
        if root.torch_device.type != "cpu":
            torch.accelerator.set_device_index(root.torch_device)  # otherwise all ranks open contexts on GPU 0
        with spread(case, model, devices, mark) as flow:
            wrapped = DistributedDataParallel(model.module)  # without device_ids, DDP moves no inputs
            # DDP synchronises buffers before the first layer
            wrapped.register_forward_pre_hook(lambda *_: flow.enter(Phase.FORWARD, root))
            step = SpreadStep(case, model, flow, mark, wrapped)
            yield _Step(case, step, ExposedReduction(wrapped, root), owns_loss=model.owns_loss)


class _Step:
    """The training step of one rank on its rows of the batch."""

    def __init__(self, case: Case, step: SpreadStep, reduction: ExposedReduction, *, owns_loss: bool) -> None:
        import torch.distributed as dist

        self._case, self._step, self._reduction, self._owns_loss = case, step, reduction, owns_loss
        self._rank, self._world = dist.get_rank(), dist.get_world_size()

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on this rank's chunk of the batch and return the loss, which is scaled as in `RankStep`."""
        from dpbench.models import positional
        from dpbench.strategies._ranks import rows_of

        *arguments, mine = (rows_of(a, self._case, self._rank) for a in (*positional(inputs), target))
        rows = self._case.rows[self._rank]
        # a model's own loss is a mean with an unknown divisor, so each rank has the same weight, as in `RankStep`
        return self._step(
            tuple(arguments), mine, 1.0 if self._owns_loss else rows * self._world / self._case.batch_size
        )

    def observe(self) -> list[Observed]:
        """Return a list with the span of the exposed reduction in the last step; it is empty on GPUs."""
        return self._reduction.observe(self._step.returned_s)


STRATEGY = DdpModelParallel()
