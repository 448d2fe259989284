"""torch's DistributedDataParallel: one process per device, with an all-reduce that overlaps with backward.

Outside a launch, the ranks are forked processes on this machine, which connect over the loopback interface only. The
strategy `ddp` installs no communication hook, because a hook would change the measurement. The exposed part of the
reduction, which no compute hides, lasts from the end of backward's compute until backward returns. torch's private DDP
logger reports the end of backward's compute. Only this file uses this logger (`_set_ddp_runtime_logging_sample_rate`,
`_get_ddp_logging_data`, `logger.set_runtime_stats_and_log`).

DDP synchronises buffers inside its forward; the `forward` phase therefore includes the time of this synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, Profile, Task, chunk_sizes
from dpbench.records.work import Move, Shapes
from dpbench.strategies import Forward, Parallelism, Reduction, Role, Split, Strategy, Traits
from dpbench.strategies._ranks import RankStep, forward_of_rank
from dpbench.strategies._tasks import Graph, batch, buckets, ring

if TYPE_CHECKING:
    from torch import nn

    from dpbench.models import Model

Observed = tuple[Phase, int, float, float]
"""A span that an internal timer of a library has recorded: phase, device, start_s and end_s."""


class DistributedDataParallel(Strategy):
    """torch's DistributedDataParallel: one process per device, with an all-reduce that overlaps with backward."""

    def __init__(
        self, role: Role = Role.OTHER, *, hook: str = "", rounds_gradients: bool = False, parts: int = 1, **options: Any
    ) -> None:
        """Set the strategy's traits from `role` and `rounds_gradients`; `options` are passed to torch's class.

        `hook` is the name of a communication hook in `ddp_comm_hooks.default_hooks`; empty for no hook.
        `rounds_gradients` is True if the hook rounds the gradients to 16 bits for the all-reduce. `parts` is the number
        of micro-batches of each rank; only the last of them synchronises gradients. The attribute `views` is
        True if gradients are views of the communication buckets.
        """
        self.traits = Traits(
            parallelism=Parallelism.RANKS, reduction=Reduction.OVERLAPPED, role=role, shared_stream=True,
            rounds_gradients=rounds_gradients,
        )  # fmt: skip
        self.parts = parts
        self.views = bool(options.get("gradient_as_bucket_view"))
        self._hook, self._options = hook, options

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[_Step]:
        """Yield this rank's training step; `devices` has only the device of this rank."""
        yield _Step(case, model, devices[0], mark, self)

    @contextmanager
    def infer(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Forward]:
        """Yield the forward of torch's wrapper on this rank's rows; rank 0's buffers are first copied to all ranks."""
        yield forward_of_rank(case, model, devices[0], mark, self.wrap)

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case, or "" if it can.

        A variant such as `ddp_fp16` cannot run the forward alone, because it differs from ddp only in the gradients.
        """
        if not case.trains and (self._hook or self._options or self.parts > 1):
            return f"{case.strategy} differs from ddp only in the gradients: for the forward alone, give ddp"
        return super().skip(case)

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return the rows of each micro-batch of each rank."""
        return Split(tuple(part for rows in case.rows for part in chunk_sizes(rows, self.parts)))

    def compares_buffers(self, case: Case) -> bool:
        """Return False for several micro-batches: each updates the buffers, but the reference updates them once."""
        return self.parts == 1

    def wrap(self, module: nn.Module, device: Device) -> nn.Module:
        """Return this rank's module wrapped in torch's DistributedDataParallel, with the communication hook if any."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
        from torch.nn.parallel import DistributedDataParallel

        ids = None if device.torch_device.type == "cpu" else [device.torch_device]
        wrapped = DistributedDataParallel(module, device_ids=ids, **self._options)
        if self._hook:
            wrapped.register_comm_hook(None, getattr(default_hooks, self._hook))
        return wrapped

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of all ranks in one step, with each bucket reduced as soon as backward has filled it."""
        return self._tasks(case, profile, range(len(case.rows)))

    def one_rank(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of rank 0 in one step, including its part of each collective."""
        return self._tasks(case, profile, [0])

    def _tasks(self, case: Case, profile: Profile, ranks: Iterable[int]) -> list[Task]:
        graph = Graph()
        found = {i: _Rank(graph, case, profile, i, self.parts) for i in ranks}
        # gradients that are rounded for the transfer have 16 of 32 bits
        scale = 0.5 if self.traits.rounds_gradients else 1.0
        pieces = buckets(profile) if len(case.rows) > 1 else [float(profile.parameter_bytes)]
        ready = {i: rank.backward(len(pieces)) for i, rank in found.items()}
        reduced: dict[int, list[int]] = {i: [] for i in found}
        for number, size in enumerate(pieces):
            for i in found:
                # the last reduction overlaps with backward, whose span in a trace contains the hidden part
                beside = graph.tasks[ready[i][-1]].overlap if number == len(pieces) - 1 else ()
                waits = [*reduced[i], ready[i][number]]
                reduced[i] = [graph.add(Phase.REDUCE, i, f"all_reduce:{number}", scale * size, "bytes", waits, beside)]
        for i in found:
            graph.update(case, profile, i, f"host:{i}", reduced[i])
        return graph.tasks

    def moves(self, case: Case, shapes: Shapes) -> Iterable[Move]:
        """Yield the transfers in one step: each rank's rows, rank 0's buffers in forward, and a ring all-reduce."""
        yield from batch(case, shapes, local=True)
        count = len(case.rows)
        for rank in range(1, count):
            yield Move(Phase.FORWARD, 0, rank, shapes.buffer_bytes)
        yield from ring(count, shapes.trainable_bytes / (2 if self.traits.rounds_gradients else 1))


class _Step(RankStep):
    """The training step of one rank, which also reports the exposed part of the reduction."""

    def __init__(self, case: Case, model: Model, device: Device, mark: Mark, strategy: DistributedDataParallel) -> None:
        super().__init__(case, model, device, mark, strategy.wrap, parts=strategy.parts)
        self._reduction = ExposedReduction(self.wrapped, device)

    def observe(self) -> list[Observed]:
        """Return a list with the span of the exposed reduction in the last step; it is empty on GPUs."""
        return self._reduction.observe(self.returned_s)


class ExposedReduction:
    """The part of the reduction after the end of backward's compute, which the DDP logger of `wrapped` reports.

    `wrapped` is a module that is wrapped in torch's DistributedDataParallel.
    """

    def __init__(self, wrapped: Any, device: Device) -> None:
        self._wrapped, self._device = wrapped, device
        self._on_host = device.torch_device.type == "cpu"
        if self._on_host:  # on CUDA the logger would wait for the device in every forward
            wrapped._set_ddp_runtime_logging_sample_rate(1)

    def observe(self, returned_s: float) -> list[Observed]:
        """Return a list with the span from the end of backward's compute to `returned_s`, at which backward returned.

        The list is empty on GPUs, where the logger's times do not use the host's clock.
        """
        if not self._on_host:
            return []
        self._wrapped.logger.set_runtime_stats_and_log()
        compute_end_ns = self._wrapped._get_ddp_logging_data().get("backward_compute_time_end", 0)
        offset_ns = time.time_ns() - time.perf_counter_ns()  # the logger's clock is the time of day
        start_s = (compute_end_ns - offset_ns) / 1e9
        return [(Phase.REDUCE, self._device.index, start_s, returned_s)] if compute_end_ns else []


class _Rank:
    """A builder of the tasks of one rank, which is a process with a separate interpreter.

    The rank's rows are split into up to `parts` micro-batches.
    """

    def __init__(self, graph: Graph, case: Case, profile: Profile, rank: int, parts: int) -> None:
        self._graph, self._profile, self._rank = graph, profile, rank
        self._rows, self._host = chunk_sizes(case.rows[rank], parts), f"host:{rank}"

    def backward(self, count: int) -> list[int]:
        """Append this rank's tasks up to backward; return, for each bucket, the index of the task that fills it.

        `count` is the number of buckets of gradients, which only the last micro-batch reduces.
        """
        graph, profile, i = self._graph, self._profile, self._rank
        at = graph.add(Phase.SCATTER, i, f"copy:host:{i}", sum(self._rows) * profile.input_bytes, "bytes")
        for rows in self._rows[:-1]:
            at = self._pass(rows, 1, at)[-1]
        return self._pass(self._rows[-1], count, at)

    def _pass(self, rows: int, count: int, at: int) -> list[int]:
        """Append forward, loss and backward on `rows` rows, which wait for the task `at`.

        Backward is `count` tasks, one after the other; return their indices.
        """
        graph, profile, i = self._graph, self._profile, self._rank
        forward = (rows * profile.forward_flop, "flop")
        at = graph.launch(Phase.FORWARD, i, self._host, profile.forward_launches, forward, [at])
        at = graph.add(Phase.LOSS, i, f"device:{i}", rows * profile.output_bytes, "bytes", [at])
        found = []
        for _ in range(count):
            part = (rows * profile.backward_flop / count, "flop")
            at = graph.launch(Phase.BACKWARD, i, self._host, profile.backward_launches / count, part, [at])
            found.append(at)
        return found


class Bf16(DistributedDataParallel):
    """DistributedDataParallel with torch's communication hook that rounds gradients to bf16 for the all-reduce."""

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, the ranks do not use NCCL), or ""."""
        if reason := super().skip(case):
            return reason
        return "" if "nccl" in self.backend(case) else "torch's bf16_compress_hook needs NCCL, and thus distinct GPUs"


class BucketView(DistributedDataParallel):
    """DistributedDataParallel whose gradients are views of the communication buckets, which saves a copy of each."""


class Fp16(DistributedDataParallel):
    """DistributedDataParallel with torch's communication hook that rounds gradients to fp16 for the all-reduce."""


class NoSync(DistributedDataParallel):
    """DistributedDataParallel with gradient accumulation: two micro-batches per step, the first under `no_sync`."""


class StaticGraph(DistributedDataParallel):
    """DistributedDataParallel with `static_graph=True`: torch assumes that every step uses the same parameters."""


DDP = DistributedDataParallel(Role.CONTROL)
STRATEGIES = {
    "ddp": DDP,
    "ddp_bf16": Bf16(hook="bf16_compress_hook", rounds_gradients=True),
    "ddp_bucket_view": BucketView(gradient_as_bucket_view=True),
    "ddp_fp16": Fp16(hook="fp16_compress_hook", rounds_gradients=True),
    "ddp_no_sync": NoSync(parts=2),
    "ddp_static_graph": StaticGraph(static_graph=True),
}
