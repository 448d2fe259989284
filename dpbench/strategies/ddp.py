"""torch's DistributedDataParallel: one process per device, with an all-reduce that overlaps with backward.

The ranks are forked processes on this machine, which connect over the loopback interface only. No communication hook is
installed, because a hook would change the measurement. The end of backward's compute comes from the private DDP logger
(`_set_ddp_runtime_logging_sample_rate`, `_get_ddp_logging_data`, `logger.set_runtime_stats_and_log`), which only this
file uses. The rest of backward is the exposed part of the reduction. DDP synchronises buffers inside its forward; the
`forward` phase therefore includes this time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, Profile, Task
from dpbench.records.work import Move, Shapes
from dpbench.strategies import Parallelism, Reduction, Role, Strategy, Traits, optimizer_of, precision_of
from dpbench.strategies._tasks import Graph, batch, buckets
from dpbench.strategies.single import put_all

if TYPE_CHECKING:
    import torch

    from dpbench.models import Model


class DistributedDataParallel(Strategy):
    """torch.nn.parallel.DistributedDataParallel with one rank per device."""

    traits = Traits(
        parallelism=Parallelism.RANKS, reduction=Reduction.OVERLAPPED, role=Role.CONTROL, shared_stream=True
    )

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[_Step]:
        """Yield this rank's step; `devices` has only the device of this rank."""
        yield _Step(case, model, devices[0], mark)

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of all ranks, with each bucket reduced as soon as backward has filled it."""
        return _tasks(case, profile, range(len(case.rows)))

    def one_rank(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of rank 0 and its part of the collectives."""
        return _tasks(case, profile, [0])

    def moves(self, case: Case, shapes: Shapes) -> Iterable[Move]:
        """Yield the moves of each rank's rows, of rank 0's buffers in forward, and of a ring all-reduce."""
        yield from batch(case, shapes, local=True)
        count = len(case.rows)
        for rank in range(1, count):
            yield Move(Phase.FORWARD, 0, rank, shapes.buffer_bytes)
        for rank in range(count if count > 1 else 0):
            ring = 2 * (count - 1) / count * shapes.trainable_bytes
            yield Move(Phase.REDUCE, rank, (rank + 1) % count, ring)


class _Step:
    """One rank's training step on its rows of the global batch."""

    def __init__(self, case: Case, model: Model, device: Device, mark: Mark) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        self._case, self._model, self._device, self._mark = case, model, device, mark
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._on_host = device.torch_device.type == "cpu"
        if not self._on_host:
            torch.accelerator.set_device_index(device.torch_device)  # otherwise all ranks open contexts on GPU 0
        module = model.module.to(device.torch_device)
        ids = None if self._on_host else [device.torch_device]
        self.ddp = DistributedDataParallel(module, device_ids=ids)
        if self._on_host:  # on CUDA the logger would wait for the device in every forward
            self.ddp._set_ddp_runtime_logging_sample_rate(1)
        self._optimizer = optimizer_of(case)(module.parameters())
        self._returned_s = 0.0

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on this rank's chunk, with the loss scaled so that DDP's mean gives the global batch's gradient."""
        from dpbench.models import positional

        device, mark, i = self._device, self._mark, self._device.index
        with mark(Phase.OPTIMIZER, i):
            self._optimizer.zero_grad(set_to_none=True)
        with mark(Phase.SCATTER, i):
            mine, total = self._chunk(target)
            arguments = put_all([self._chunk(a)[0] for a in positional(inputs)], device)
            placed = device.put(mine)
        with precision_of(self._case):
            with mark(Phase.FORWARD, i):
                output = self.ddp(*arguments)
            with mark(Phase.LOSS, i):
                loss = self._model.loss(output, placed) * (len(mine) * self._world / total)
        with mark(Phase.BACKWARD, i):
            loss.backward()
        self._returned_s = time.perf_counter()
        with mark(Phase.OPTIMIZER, i):
            self._optimizer.step()
        return loss.detach()

    def _chunk(self, value: Any) -> tuple[Any, int]:
        """Return this rank's rows of a tensor, and the tensor's number of rows; (value, 1) for other values."""
        import torch

        if not isinstance(value, torch.Tensor):
            return value, 1
        return value.chunk(self._case.devices)[self._rank], len(value)

    def observe(self) -> list[tuple[Phase, int, float, float]]:
        """Return the exposed reduction of the last step: from the end of backward's compute to its return."""
        if not self._on_host:
            return []  # the logger's CUDA times do not use the host's clock
        self.ddp.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
        compute_end_ns = self.ddp._get_ddp_logging_data().get("backward_compute_time_end", 0)
        offset_ns = time.time_ns() - time.perf_counter_ns()  # the logger's clock is the time of day
        start_s = (compute_end_ns - offset_ns) / 1e9
        return [(Phase.REDUCE, self._device.index, start_s, self._returned_s)] if compute_end_ns else []


def _tasks(case: Case, profile: Profile, ranks: Iterable[int]) -> list[Task]:
    graph = Graph()
    found = {i: _Rank(graph, case, profile, i) for i in ranks}
    pieces = buckets(profile) if len(case.rows) > 1 else [float(profile.parameter_bytes)]
    ready = {i: rank.backward(len(pieces)) for i, rank in found.items()}
    reduced: dict[int, list[int]] = {i: [] for i in found}
    for number, size in enumerate(pieces):
        for i in found:
            # the last reduction overlaps with backward, whose span in a trace contains the hidden part
            beside = graph.tasks[ready[i][-1]].overlap if number == len(pieces) - 1 else ()
            waits = [*reduced[i], ready[i][number]]
            reduced[i] = [graph.add(Phase.REDUCE, i, f"all_reduce:{number}", size, "bytes", waits, beside)]
    for i in found:
        graph.update(case, profile, i, f"host:{i}", reduced[i])
    return graph.tasks


class _Rank:
    """The tasks of one rank, which is a process with a separate interpreter."""

    def __init__(self, graph: Graph, case: Case, profile: Profile, rank: int) -> None:
        self._graph, self._profile, self._rank = graph, profile, rank
        self._rows, self._host = case.rows[rank], f"host:{rank}"

    def backward(self, count: int) -> list[int]:
        """Append all tasks up to the gradients; return the task that each of `count` buckets waits for."""
        graph, profile, i, rows = self._graph, self._profile, self._rank, self._rows
        at = graph.add(Phase.SCATTER, i, f"copy:host:{i}", rows * profile.input_bytes, "bytes")
        forward = (rows * profile.forward_flop, "flop")
        at = graph.launch(Phase.FORWARD, i, self._host, profile.forward_launches, forward, [at])
        at = graph.add(Phase.LOSS, i, f"device:{i}", rows * profile.output_bytes, "bytes", [at])
        found = []
        for _ in range(count):
            part = (rows * profile.backward_flop / count, "flop")
            at = graph.launch(Phase.BACKWARD, i, self._host, profile.backward_launches / count, part, [at])
            found.append(at)
        return found


STRATEGY = DistributedDataParallel()
