"""torch's FSDP2 (`fully_shard`): each rank keeps a part of every weight, gradient and optimizer
state.

The module's children with parameters are sharded one by one, then the module itself. An all-gather
therefore precedes the forward and the backward of each child, and a reduce-scatter follows its
backward. The phases `forward` and `backward` include the time of these collectives, because torch
does not report which part of it is exposed.
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
    """torch's FSDP2 (`fully_shard`): each rank keeps a part of every weight, gradient and optimizer
    state.
    """

    traits = Traits(
        parallelism=Parallelism.RANKS, reduction=Reduction.IN_BACKWARD, shared_stream=True
    )

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[RankStep]:
        """Yield this rank's training step.

        On exit, put whole weights and gradients back into the module.
        """
        yield RankStep(case, model, devices[0], mark, _shard)
        _restore(model.module)

    @contextmanager
    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Forward]:
        """Yield a forward on this rank's rows that gathers the weights.

        On exit, put whole weights into the module.
        """
        yield forward_of_rank(case, model, devices[0], mark, _shard)
        _restore(model.module)

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of all ranks in one step.

        The collectives are all-gathers of weights, in forward and again in backward, and
        reduce-scatters of gradients.
        """
        return _tasks(case, profile, range(len(case.rows)))

    def one_rank(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of rank 0 in one step, including its part of each collective."""
        return _tasks(case, profile, [0])

    def moves(self, case: Case, shapes: Shapes) -> Iterable[Move]:
        """Yield the transfers in one step: each rank's rows, and the messages of collectives along
        a ring of ranks.

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
    """Shard the module over all ranks in place, first its children and then the module itself, and
    return it.
    """
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
    """Return the tasks of `ranks` in one step.

    The collectives of a unit run during the compute of other units.

    A unit is a group of parameters that one collective gathers. The units are assumed to be as
    large as DDP's buckets, because a profile does not describe the module's children.
    """
    graph, found = Graph(), list(ranks)
    sizes = buckets(profile) if len(case.rows) > 1 else []
    parts, numbers = max(1, len(sizes)), count()
    rows = {i: case.rows[i] for i in found}
    done = {
        i: graph.add(Phase.SCATTER, i, f"copy:host:{i}", rows[i] * profile.input_bytes, "bytes")
        for i in found
    }

    def collective(
        phase: Phase, kind: str, size: float, after: dict[int, list[int]]
    ) -> dict[int, int]:
        name = f"{kind}:{next(numbers)}"
        return {i: graph.add(phase, i, name, size, "bytes", after[i]) for i in found}

    for phase, flop, launches, units in (
        (Phase.FORWARD, profile.forward_flop, profile.forward_launches, sizes[::-1]),
        (Phase.BACKWARD, profile.backward_flop, profile.backward_launches, sizes),
    ):
        # the units' weights are gathered one after the other, ahead of the compute that needs them
        waits = {i: [done[i]] for i in found}
        gathered: list[dict[int, int]] = []
        for size in units:
            gathered.append(collective(phase, "all_gather", size, waits))
            waits = {i: [gathered[-1][i]] for i in found}
        for part in range(parts):
            for i in found:
                needs = [done[i], *([gathered[part][i]] if gathered else [])]
                work = (rows[i] * flop / parts, "flop")
                done[i] = graph.launch(phase, i, f"host:{i}", launches / parts, work, needs)
            if phase is Phase.BACKWARD and sizes:
                last = collective(
                    phase, "reduce_scatter", units[part], {i: [done[i]] for i in found}
                )
        if phase is Phase.FORWARD:
            for i in found:
                output = rows[i] * profile.output_bytes
                done[i] = graph.add(Phase.LOSS, i, f"device:{i}", output, "bytes", [done[i]])
    for i in found:
        ends = [done[i], *([last[i]] if sizes else [])]
        graph.update(case, profile, i, f"host:{i}", ends, share=1 / len(case.rows))
    return graph.tasks


strategy = FullyShardedDataParallel()
