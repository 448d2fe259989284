"""torch's FSDP2: each rank keeps a part of every weight, gradient and optimizer state.

The module's children with parameters are sharded with `fully_shard` one by one, then the module
itself. An all-gather therefore precedes the forward and the backward of each child, and a
reduce-scatter follows its backward. The phases `forward` and `backward` include these collectives,
because torch does not report which part is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark
from dpbench.strategies import Forward, Parallelism, Reduction, Strategy, Traits
from dpbench.strategies._ranks import RankStep, forward_of_rank

if TYPE_CHECKING:
    from torch import nn

    from dpbench.models import Model


class FullyShardedDataParallel(Strategy):
    """torch's FSDP2: each rank keeps a part of every weight, gradient and optimizer state."""

    traits = Traits(
        parallelism=Parallelism.RANKS,
        reduction=Reduction.IN_BACKWARD,
        shared_stream=True,
        shards_weights=True,
    )

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[RankStep]:
        """Yield this rank's training step; on exit, restore whole weights and gradients."""
        yield RankStep(case, model, devices[0], mark, _shard)
        _restore(model.module)

    @contextmanager
    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Forward]:
        """Yield a forward on this rank's rows that gathers weights; on exit, restore them."""
        yield forward_of_rank(case, model, devices[0], mark, _shard)
        _restore(model.module)


def _shard(module: nn.Module, device: Device) -> nn.Module:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module.to(device.torch_device)
    mesh = init_device_mesh(device.torch_device.type, (dist.get_world_size(),))
    for child in module.children():
        if any(True for _ in child.parameters()):
            fully_shard(child, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _restore(module: nn.Module) -> None:
    """Replace each sharded parameter by the whole parameter with its whole gradient.

    All ranks must call this function.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor

    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            value, gradient = parameter.detach(), parameter.grad
            if isinstance(value, DTensor):
                whole = nn.Parameter(value.full_tensor(), requires_grad=parameter.requires_grad)
                whole.grad = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                part._parameters[name] = whole


strategy = FullyShardedDataParallel()
