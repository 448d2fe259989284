"""Model parallelism with micro-batches: torch's pipeline schedule GPipe, with one rank per stage of layers.

The layers are divided as in `model_parallel`, one group per rank. A step runs the forward of all micro-batches, then
their backward. Activations and their gradients move between neighbouring ranks by messages. The time in which a rank
waits for messages (the bubble of the pipeline) is in no phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Phase, Profile, Task, chunk_sizes
from dpbench.strategies import AUTOCAST, Parallelism, Split, Step, Strategy, Traits
from dpbench.strategies._tasks import Graph

if TYPE_CHECKING:
    from torch import nn

    from dpbench.models import Model

MICRO_BATCHES = 4


class Pipelined(Strategy):
    """The strategy that trains with torch.distributed.pipelining, with one rank per group of layers."""

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
                "model_parallel_pipelined runs without autocast, which would include backward: leave out --precision "
                f"{case.precision}"
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


STRATEGY = Pipelined()
