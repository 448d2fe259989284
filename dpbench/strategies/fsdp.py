"""torch's FSDP2: each rank keeps a part of every weight, gradient and optimizer state.

The module's children with parameters are sharded with `fully_shard` one by one, then the module
itself. An all-gather therefore precedes the forward and the backward of each child, and a
reduce-scatter follows its backward. The phases `forward` and `backward` include these collectives,
because torch does not report which part is exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, Profile, Task
from dpbench.records.work import Move, Shapes
from dpbench.strategies import Forward, Parallelism, Reduction, Strategy, Traits
from dpbench.strategies._ranks import RankStep, forward_of_rank
from dpbench.strategies._tasks import Graph, batch, buckets

if TYPE_CHECKING:
    from torch import nn

    from dpbench.models import Model


class FullyShardedDataParallel(Strategy):
    """torch's FSDP2: each rank keeps a part of every weight, gradient and optimizer state."""

    traits = Traits(
        parallelism=Parallelism.RANKS, reduction=Reduction.IN_BACKWARD, shared_stream=True
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

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of all ranks in one step.

        Weights are gathered in forward and again in backward, and gradients are reduce-scattered.
        """
        return _tasks(case, profile, range(len(case.rows)))

    def one_rank(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of rank 0 in one step, including its part of each collective."""
        return _tasks(case, profile, [0])

    def moves(self, case: Case, shapes: Shapes) -> Iterable[Move]:
        """Yield the transfers in one step: rows, and the messages of collectives along a ring.

        The weights are gathered twice, in forward and in backward, and the gradients are reduced
        once.
        """
        yield from batch(case, shapes, local=True)
        size = len(case.rows)
        for rank in range(size if size > 1 else 0):
            ring, following = (size - 1) / size, (rank + 1) % size
            yield Move(Phase.FORWARD, rank, following, ring * shapes.parameter_bytes)
            yield Move(
                Phase.BACKWARD,
                rank,
                following,
                ring * (shapes.parameter_bytes + shapes.trainable_bytes),
            )


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


def _tasks(case: Case, profile: Profile, ranks: Iterable[int]) -> list[Task]:
    """Return the tasks of `ranks`; the collectives of a unit run during the compute of other units.

    A unit is a group of parameters that one collective gathers. Units are assumed to be as large as
    DDP's buckets, because a profile does not describe the module's children.
    """
    graph = Graph()
    members = list(ranks)
    sizes = buckets(profile) if len(case.rows) > 1 else []
    parts = max(1, len(sizes))
    numbers = count()
    rows = {i: case.rows[i] for i in members}
    done = {
        i: graph.add(Phase.SCATTER, i, f"copy:host:{i}", rows[i] * profile.input_bytes, "bytes")
        for i in members
    }

    def collective(
        phase: Phase, kind: str, size: float, after: dict[int, list[int]]
    ) -> dict[int, int]:
        name = f"{kind}:{next(numbers)}"
        return {i: graph.add(phase, i, name, size, "bytes", after[i]) for i in members}

    for phase, flop, launches, units in (
        (Phase.FORWARD, profile.forward_flop, profile.forward_launches, sizes[::-1]),
        (Phase.BACKWARD, profile.backward_flop, profile.backward_launches, sizes),
    ):
        # the units' weights are gathered one after the other, ahead of the compute that needs them
        waits = {i: [done[i]] for i in members}
        gathered: list[dict[int, int]] = []
        for size in units:
            gathered.append(collective(phase, "all_gather", size, waits))
            waits = {i: [gathered[-1][i]] for i in members}
        for part in range(parts):
            for i in members:
                needs = [done[i], *([gathered[part][i]] if gathered else [])]
                work = (rows[i] * flop / parts, "flop")
                done[i] = graph.launch(phase, i, f"host:{i}", launches / parts, work, needs)
            if phase is Phase.BACKWARD and sizes:
                last = collective(
                    phase, "reduce_scatter", units[part], {i: [done[i]] for i in members}
                )
        if phase is Phase.FORWARD:
            for i in members:
                output = rows[i] * profile.output_bytes
                done[i] = graph.add(Phase.LOSS, i, f"device:{i}", output, "bytes", [done[i]])
    for i in members:
        ends = [done[i], *([last[i]] if sizes else [])]
        graph.update(case, profile, i, f"host:{i}", ends, share=1 / len(case.rows))
    return graph.tasks


strategy = FullyShardedDataParallel()
