"""Model parallelism: strategies that spread the layers of a module over devices; `_layers` divides the layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import HOST, Case, Mark, Phase, Profile, Task, chunk_sizes
from dpbench.strategies import AUTOCAST, Forward, Parallelism, Reduction, Split, Step, Strategy, Traits
from dpbench.strategies._tasks import Graph
from dpbench.strategies.ddp import ExposedReduction, Observed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model
    from dpbench.strategies._layers import SpreadStep

PER_RANK = 2
"""The number of devices of a rank."""
MICRO_BATCHES = 4


class ModelParallel(Strategy):
    """Model parallelism: the layers are spread over the devices, and the whole batch passes through all of them.

    Activations move between two devices in the `forward` phase, and their gradients move back in `backward`. The loss
    is computed on the device of the last layer, to which the target is copied. Only one device computes at a time.
    """

    traits = Traits(parallelism=Parallelism.LAYERS, shared_stream=True)

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Place the layers on the devices and yield the training step; on exit, remove the hooks from the module.

        Raises ValueError if the module has fewer layers than devices.
        """
        from dpbench.strategies._layers import SpreadStep, spread

        with spread(case, model, devices, mark) as flow:
            yield SpreadStep(case, model, flow, mark)

    @contextmanager
    def infer(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Forward]:
        """Place the layers on the devices and yield the forward, whose output is on the last device."""
        from dpbench.strategies._layers import spread, spread_forward

        with spread(case, model, devices, mark) as flow:
            yield spread_forward(model.module, flow, mark)

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of one step, in which one device after the other does an equal part of the work.

        A profile does not have the sizes of activations. Each copy between two devices is assumed to be as large as the
        output.
        """
        graph, count, rows = Graph(), case.devices, case.batch_size
        moved = rows * profile.output_bytes
        at = graph.add(Phase.SCATTER, 0, "copy:host:0", rows * profile.input_bytes, "bytes")
        for phase, flop, launches, order in (
            (Phase.FORWARD, profile.forward_flop, profile.forward_launches, range(count)),
            (Phase.BACKWARD, profile.backward_flop, profile.backward_launches, range(count - 1, -1, -1)),
        ):
            for step, i in enumerate(order):
                if step:
                    at = graph.add(phase, i, f"copy:{order[step - 1]}:{i}", moved, "bytes", [at])
                work = (rows * flop / count, "flop")
                at = graph.launch(phase, i, "host", launches / count, work, [at])
            if phase is Phase.FORWARD:
                at = graph.add(Phase.LOSS, count - 1, f"device:{count - 1}", moved, "bytes", [at])
        for i in range(count):
            graph.update(case, profile, i, "host", [at], share=1 / count)
        return graph.tasks


class HalfCpu(Strategy):
    """Part CPU and part GPU: the first half of the layers is on the host, the second half on one accelerator.

    `_layers` describes how the layers are divided. The phase `scatter` of the accelerator is the copy of the
    activations from the host, and the phase `gather` of the host is the copy of the activations' gradients back to the
    host. The host waits for the accelerator before this second copy, so that `gather` contains only the copy; the copy
    would wait for the accelerator in any case. The input of the first layer stays on the host. The phases of the layers
    on the host are recorded for the device HOST.
    """

    traits = Traits(parallelism=Parallelism.NONE)

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, on logical CPU devices), or ""."""
        if case.device_kind == "cpu":
            return "half_cpu needs an accelerator in addition to the host; without a GPU, give --device-kind emulated"
        if case.precision in AUTOCAST:
            return (
                f"half_cpu runs without autocast, because autocast applies to one kind of device only: leave out "
                f"--precision {case.precision}"
            )
        if case.compile:
            return "half_cpu does not support torch.compile over layers on the host and a GPU: leave out --compile"
        return ""

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Place the layers on the host and the accelerator, and yield the training step.

        Raises ValueError if the module has fewer than two layers.
        """
        from dpbench.hardware.devices.host import CpuDevice
        from dpbench.strategies._layers import SpreadStep, spread

        with spread(case, model, [CpuDevice(HOST), devices[0]], mark) as flow:
            yield SpreadStep(case, model, flow, mark)

    @contextmanager
    def infer(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Forward]:
        """Place the layers on the host and the accelerator; yield the forward, whose output is on the accelerator."""
        from dpbench.hardware.devices.host import CpuDevice
        from dpbench.strategies._layers import spread, spread_forward

        with spread(case, model, [CpuDevice(HOST), devices[0]], mark) as flow:
            yield spread_forward(model.module, flow, mark)


class DdpModelParallel(Strategy):
    """DistributedDataParallel with model parallelism: each rank spreads its layers over two devices.

    `_layers` describes how a rank's layers are divided. A case with n devices has n / 2 ranks; rank r uses the devices
    2 r and 2 r + 1. The span of the exposed reduction (see `ddp`) is recorded for the rank's first device.
    """

    traits = Traits(
        parallelism=Parallelism.RANKS, reduction=Reduction.OVERLAPPED, shared_stream=True, devices_per_replica=PER_RANK
    )

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, an odd number of devices), or ""."""
        if reason := super().skip(case):
            return reason
        if case.devices % PER_RANK:
            return (
                f"ddp_model_parallel needs {PER_RANK} devices per rank, but the number of devices is {case.devices}: "
                f"give --devices {case.devices + 1}"
            )
        return ""

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[_SpreadRankStep]:
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
            yield _SpreadRankStep(case, step, ExposedReduction(wrapped, root), owns_loss=model.owns_loss)


class _SpreadRankStep:
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


class Pipelined(Strategy):
    """Model parallelism with micro-batches: torch's pipeline schedule GPipe, with one rank per stage of layers.

    The layers are divided as in `model_parallel`, one group per rank. A step runs the forward of all micro-batches,
    then their backward. Activations and their gradients move between neighbouring ranks by messages. The time in which
    a rank waits for messages (the bubble of the pipeline) is in no phase.
    """

    traits = Traits(parallelism=Parallelism.RANKS, stages=True, shared_stream=True)

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case (for example, unequal micro-batches), or ""."""
        if reason := super().skip(case):
            return reason
        if rest := case.batch_size % MICRO_BATCHES:
            return (
                f"torch's pipeline needs {MICRO_BATCHES} micro-batches of equal size, but the batch size is "
                f"{case.batch_size}: give --batch-sizes {case.batch_size - rest + MICRO_BATCHES}"
            )
        if case.precision in AUTOCAST:
            return (
                "model_parallel_pipelined runs without autocast, because torch's pipeline would run backward inside "
                f"autocast too: leave out --precision {case.precision}"
            )
        if case.compile:
            return (
                "torch.fx, which records the layers of each stage, cannot record a compiled module: leave out --compile"
            )
        return ""

    def compares_buffers(self, case: Case) -> bool:
        """Return False: torch's pipeline runs one more micro-batch in its first step, which updates the buffers too."""
        return False

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return the rows of each micro-batch; one micro-batch has all rows if they cannot be split equally."""
        parts = 1 if case.batch_size % MICRO_BATCHES else MICRO_BATCHES
        return Split(chunk_sizes(case.batch_size, parts), replays=False)

    @contextmanager
    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
        """Yield this rank's training step; on exit, copy weights, gradients and buffers to the modules of all ranks.

        Raises ValueError if the module has fewer layers than ranks, or is not a chain of layers.
        """
        from dpbench.strategies._pipeline import PipelineStep

        step = PipelineStep(case, model, devices[0], mark, len(self.split(case, model.module).rows))
        yield step
        step.restore()

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of one step, in which each stage does an equal part of the work of each micro-batch.

        A profile does not have the sizes of activations. Each message is assumed to be as large as the output.
        """
        graph, count = Graph(), len(case.rows)
        parts = chunk_sizes(case.batch_size, 1 if case.batch_size % MICRO_BATCHES else MICRO_BATCHES)
        size, last = profile.output_bytes, count - 1
        done = [
            graph.add(Phase.SCATTER, i, f"copy:host:{i}", case.batch_size * bytes_, "bytes")
            for i, bytes_ in ((0, profile.input_bytes), (last, size))
        ]
        waits = {i: [done[0]] * (i == 0) + [done[1]] * (i == last) for i in range(count)}
        losses: list[int] = []
        for phase, flop, launches, order in (
            (Phase.FORWARD, profile.forward_flop, profile.forward_launches, range(count)),
            (Phase.BACKWARD, profile.backward_flop, profile.backward_launches, range(last, -1, -1)),
        ):
            for rows in parts:
                for before, i in zip([None, *order], order, strict=False):
                    if before is not None:
                        sent = graph.add(phase, i, f"copy:{before}:{i}", rows * size, "bytes", waits[before])
                        waits[i] = [*waits[i], sent]
                    elif phase is Phase.BACKWARD:
                        waits[i] = [*waits[i], losses.pop(0)]
                    work = (rows * flop / count, "flop")
                    waits[i] = [graph.launch(phase, i, f"host:{i}", launches / count, work, waits[i])]
                if phase is Phase.FORWARD:
                    losses.append(graph.add(Phase.LOSS, last, f"device:{last}", rows * size, "bytes", waits[last]))
        for i in range(count):
            graph.update(case, profile, i, f"host:{i}", waits[i], share=1 / count)
        return graph.tasks


STRATEGIES = {
    "ddp_model_parallel": DdpModelParallel(),
    "half_cpu": HalfCpu(),
    "model_parallel": ModelParallel(),
    "model_parallel_pipelined": Pipelined(),
}
