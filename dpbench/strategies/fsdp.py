"""torch's FSDP2: each rank keeps a part of every weight, gradient and optimizer state.

The module's children with parameters are sharded with `fully_shard` one by one, then the module
itself. An all-gather therefore precedes the forward and the backward of each child, and a
reduce-scatter follows its backward. The phases `forward` and `backward` include these collectives,
because torch does not report which part is exposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.records.work import StepSizes, Task
from dpbench.strategies import Forward, Parallelism, Reduction, Strategy, Traits
from dpbench.strategies._ranks import RankStep, forward_of_rank
from dpbench.strategies._steps import Graph, buckets, ring, scatter

if TYPE_CHECKING:
    from torch import nn

    from dpbench.models import Model


class FullyShardedDataParallel(Strategy):
    """torch's FSDP2: each rank keeps a part of every weight, gradient and optimizer state."""

    traits = Traits(
        parallelism=Parallelism.RANKS,
        reduction=Reduction.IN_BACKWARD,
        shared_stream=True,
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

    def describe(self, case: Case, sizes: StepSizes) -> list[Task]:
        """Return the tasks of all ranks; a unit's collectives run during the compute of others.

        A unit is a group of parameters that one collective gathers. Units are assumed to be as
        large as DDP's buckets, because the sizes do not say which child has a parameter.
        """
        graph = Graph()
        all_rows = case.rows
        ranks = range(len(all_rows))
        reduced = buckets(sizes) if len(ranks) > 1 else []
        frozen = sizes.parameter_bytes - sizes.trainable_bytes
        weights = [size + frozen / len(reduced) for size in reduced]
        parts = max(1, len(reduced))
        part = (1 / parts, "share")
        numbers = count()
        row_bytes = sizes.input_bytes + sizes.target_bytes
        done = [scatter(graph, case, i, row_bytes) for i in ranks]

        def collective(phase: Phase, kind: str, size: float, after: Sequence[int]) -> list[int]:
            name = f"{kind}:{next(numbers)}"
            return graph.each(phase, ranks, name, size, ring(len(ranks)), lambda i: [after[i]])

        for phase, launches, units in (
            (Phase.FORWARD, sizes.forward_launches, weights[::-1]),
            (Phase.BACKWARD, sizes.backward_launches, weights),
        ):
            # the units' weights are gathered one after the other, ahead of the compute that needs
            # them
            gathered: list[list[int]] = []
            for size in units:
                before = gathered[-1] if gathered else done
                gathered.append(collective(phase, "all_gather", size, before))
            for unit in range(parts):
                for i in ranks:
                    needs = [done[i], *([gathered[unit][i]] if gathered else [])]
                    done[i] = graph.launch(phase, i, f"host:{i}", launches / parts, part, needs)
                if phase is Phase.BACKWARD and reduced:
                    last = collective(phase, "reduce_scatter", reduced[unit], done)
            if phase is Phase.FORWARD:
                for i in ranks:
                    output = all_rows[i] * sizes.output_bytes
                    done[i] = graph.add(Phase.LOSS, i, f"device:{i}", output, "bytes", [done[i]])
        for i in ranks:
            ends = [done[i], *([last[i]] if reduced else [])]
            graph.update(case, sizes, i, f"host:{i}", ends, share=1 / len(ranks))
        return graph.tasks


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
