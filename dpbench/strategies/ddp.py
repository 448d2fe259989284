"""torch's DistributedDataParallel: one process per device, all-reduce overlaps backward.

Outside a launch, the ranks are forked processes on this machine, which connect over the loopback
interface only. `ddp` installs no communication hook, because it would change the measurement. The
exposed part of the reduction lasts from the end of backward's compute, as torch's private DDP
logger reports it, until backward returns. Only this file uses this logger
(`_set_ddp_runtime_logging_sample_rate`, `_get_ddp_logging_data`,
`logger.set_runtime_stats_and_log`).

The phase `forward` includes the synchronisation of buffers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase
from dpbench.records.work import Group, StepSizes, Task
from dpbench.strategies import (
    Forward,
    Memory,
    ObservedSpan,
    Parallelism,
    Reduction,
    Role,
    Strategy,
    Traits,
)
from dpbench.strategies._ranks import RankStep, forward_of_rank
from dpbench.strategies._steps import Graph, buckets, ring, to_backward

if TYPE_CHECKING:
    from torch import nn

    from dpbench.models import Model


class Wrapped(Strategy):
    """A variant of DistributedDataParallel: its `wrap` may give options, or register a hook."""

    traits = Traits(
        parallelism=Parallelism.RANKS,
        reduction=Reduction.OVERLAPPED,
        shared_stream=True,
    )

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[DdpStep]:
        """Yield this rank's training step; `devices` has only the device of this rank."""
        yield DdpStep(case, model, devices[0], mark, self.wrap)

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module on its device, wrapped in torch's class."""
        return wrap(module, device)


class DistributedDataParallel(Wrapped):
    """torch's DistributedDataParallel: one process per device, all-reduce overlaps backward."""

    traits = replace(Wrapped.traits, role=Role.CONTROL)
    memory = Memory.RANKS

    @contextmanager
    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Forward]:
        """Yield the forward of torch's wrapper on this rank's rows, with rank 0's buffers."""
        yield forward_of_rank(case, model, devices[0], mark, self.wrap)

    def describe(self, case: Case, sizes: StepSizes) -> list[Task]:
        """Return the tasks of all ranks; a bucket is reduced as soon as it is full."""
        graph = Graph()
        ranks = range(len(case.rows))
        several = len(ranks) > 1
        pieces = buckets(sizes) if several else [float(sizes.trainable_bytes)]
        row_bytes = sizes.input_bytes + sizes.target_bytes
        ready = [
            to_backward(graph, case, sizes, i, len(pieces), row_bytes=row_bytes) for i in ranks
        ]
        from_0, every = Group((0,), tuple(ranks)), ring(len(ranks))
        graph.untimed(Phase.FORWARD, 0, "broadcast:buffers", sizes.buffer_bytes, from_0)

        def all_reduce(number: int, size: float, before: list[int]) -> list[int]:
            # the last one overlaps with backward, whose span in a trace contains the hidden part
            last = number == len(pieces) - 1
            return graph.each(
                Phase.REDUCE,
                ranks,
                f"all_reduce:{number}",
                size,
                every,
                lambda i: [*before[i : i + 1], ready[i][number]],
                lambda i: graph.tasks[ready[i][-1]].overlap if last else (),
            )

        reduced: list[int] = []
        for number, size in enumerate(pieces):
            reduced = all_reduce(number, size, reduced)
        for i in ranks:
            graph.update(case, sizes, i, f"host:{i}", [reduced[i]])
        return graph.tasks


def wrap(module: nn.Module, device: Device, **options: Any) -> nn.parallel.DistributedDataParallel:
    """Move a rank's module to its device, and wrap it in torch's class with `options`."""
    from torch.nn.parallel import DistributedDataParallel

    ids = None if device.torch_device.type == "cpu" else [device.torch_device]
    return DistributedDataParallel(module.to(device.torch_device), device_ids=ids, **options)


class DdpStep(RankStep):
    """The training step of one rank, which also reports the exposed part of the reduction.

    `wrap` returns the module wrapped in torch's DistributedDataParallel.
    """

    def __init__(
        self,
        case: Case,
        model: Model,
        device: Device,
        mark: Mark,
        wrap: Callable[[nn.Module, Device], nn.Module],
    ) -> None:
        super().__init__(case, model, device, mark, wrap)
        self._reduction = ExposedReduction(self.wrapped, device)

    def observe(self) -> list[ObservedSpan]:
        """Return a list with the span of the exposed reduction in the last step; empty on GPUs."""
        return self._reduction.observe(self.returned_s)


class ExposedReduction:
    """The part of the reduction after the end of backward's compute.

    `wrapped` is a module wrapped in torch's DistributedDataParallel, whose logger reports the end.
    """

    def __init__(self, wrapped: Any, device: Device) -> None:
        self._wrapped, self._device = wrapped, device
        self._on_host = device.torch_device.type == "cpu"
        if self._on_host:  # on CUDA the logger would wait for the device in every forward
            wrapped._set_ddp_runtime_logging_sample_rate(1)

    def observe(self, returned_s: float) -> list[ObservedSpan]:
        """Return a list with the span from the end of backward's compute to `returned_s`.

        `returned_s` is the time at which backward returned. The list is empty on GPUs, where the
        logger's times do not use the host's clock.
        """
        if not self._on_host:
            return []
        self._wrapped.logger.set_runtime_stats_and_log()
        compute_end_ns = self._wrapped._get_ddp_logging_data().get("backward_compute_time_end", 0)
        offset_ns = time.time_ns() - time.perf_counter_ns()  # the logger's clock is the time of day
        start_s = (compute_end_ns - offset_ns) / 1e9
        return [(Phase.REDUCE, self._device.index, start_s, returned_s)] if compute_end_ns else []


strategy = DistributedDataParallel()
