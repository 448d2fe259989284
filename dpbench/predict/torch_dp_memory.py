"""The memory of torch.nn.DataParallel: as under the engine's schedule `reference`, with two differences.

First, torch frees replicas and outputs when its forward returns. From then on, weights, inputs and outputs live as long
as the autograd graph needs them: backward frees the weights of a layer after their last use. Second, gradients are
joined into buffers on every device before they are summed, with or without NCCL.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpbench.predict.allocator import Names
from dpbench.predict.strategy_memory import (
    EngineMemory,
    gradients_of,
    play_backward,
    play_forward,
    play_loss,
    play_optimizer,
)
from dpbench.predict.trace import Trace
from dpbench.records.bucketing import COALESCED_BYTES, chunks

Release = tuple[int, list[int]]
"""A number of backward ops, and the holdings that are released after these ops."""


class WrapperMemory(EngineMemory):
    """The allocations of training with torch.nn.DataParallel."""

    def _step(self, step: int) -> None:
        tape, parts = self._tape, self._shards.parts
        whole_trace, count = self._shards.whole, len(parts)
        tape.stage = "optimizer"
        tape.give(self._gradients)
        tape.stage = "scatter"
        target = tape.take_all(0, whole_trace.target.sizes_bytes, "inputs")
        inputs = [tape.take_all(i, trace.inputs.sizes_bytes, "inputs") for i, trace in enumerate(parts)]
        tape.stage = "replicate"
        copies = self._copied(self._sizes, 0), self._copied(whole_trace.buffers.sizes_bytes, len(self._sizes))
        names: list[Names] = [{} for _ in parts]
        for i, trace in enumerate(parts):
            play_forward(tape, i, trace, names[i])
        gathered = self._gather()
        copied = [[*weights, *buffers] for weights, buffers in zip(*copies, strict=True)]
        releases = [self._releases(i, trace, copied[i], inputs[i], names[i]) for i, trace in enumerate(parts)]
        for held in releases:
            tape.give([holding for at, holdings in held for holding in holdings if at == 0])
        whole: Names = {}
        play_loss(tape, 0, whole_trace, whole)
        self._hand_out(whole, names)
        for i, trace in enumerate(parts):
            tape.stage = "backward"
            done = 0
            for at, holdings in sorted(releases[i]):
                play_backward(tape, i, trace, names[i], done, max(done, at))
                done = max(done, at)
                tape.give(holdings)
            play_backward(tape, i, trace, names[i], done)
        tape.stage = "reduce"
        found = [holding for trace, held in zip(parts, names, strict=True) for holding in gradients_of(trace, held)]
        self._gradients = self._sums() if count > 1 else found
        tape.give([] if count == 1 else found)
        tape.give(holding for held in names for holding in held.values())
        first, later = self._shards.optimizer(self._units(0))
        losses = [whole.pop(number) for number in whole_trace.losses if number in whole]
        tape.give(whole.values())
        play_optimizer(tape, 0, later if step else first, self._state[0])
        tape.give([*losses, *target, *gathered])

    def _copied(self, sizes: Sequence[int], first: int) -> list[list[tuple[list[int], list[int]]]]:
        """Copy tensors to the other devices; return per device the numbers of the tensors in each holding."""
        tape, found = self._tape, []
        runs = chunks(sizes, COALESCED_BYTES) if self._collective else [[size] for size in sizes]
        for i in self._devices:
            mine, number = [], first
            for run in runs:
                numbers = list(range(number, number + len(run)))
                number += len(run)
                if i:
                    joined = tape.take(0, sum(run), "replicas") if self._collective and len(run) > 1 and i == 1 else []
                    mine.append((numbers, tape.take(i, sum(run), "replicas")))
                    tape.give(joined)
            found.append(mine)
        return found

    def _releases(
        self, i: int, trace: Trace, copies: Sequence[tuple[list[int], list[int]]], inputs: Sequence[int], names: Names
    ) -> list[Release]:
        """Return when the copies, inputs and outputs of device i are released."""
        at = trace.released_at
        found = [(max(at[n] for n in numbers), holdings) for numbers, holdings in copies]
        begin = len(trace.parameters.sizes_bytes) + len(trace.buffers.sizes_bytes)
        found += [(at[begin + k], [holding]) for k, holding in enumerate(inputs)]
        begin += len(trace.inputs.sizes_bytes)
        if len(self._devices) > 1:  # on one device, the caller keeps the module's own output
            found += [
                (at[begin + k], [names.pop(storage)]) for k, storage in enumerate(trace.outputs) if storage in names
            ]
        return found

    def _sums(self) -> list[int]:
        """Join the gradients on every device and sum the buffers on device 0; return the holdings of the sums.

        The buffers of one iteration are freed in the next, because torch's loop variables keep them alive.
        """
        tape, others = self._tape, list(self._devices[1:])
        sums: list[int] = []
        former: list[int] = []
        for run in chunks([self._sizes[n] for n in self._trainable], COALESCED_BYTES):
            joined = self._devices if len(run) > 1 else range(0)
            flats = [holding for i in joined for holding in tape.take(i, sum(run), "reduced")]
            tape.give(former)
            if self._collective:
                sums += tape.take(0, sum(run), "reduced")
            else:
                here = tape.take(0, sum(run), "reduced")
                sums += tape.take(0, sum(run), "reduced")
                tape.give(here)
                for _ in others[1:]:
                    tape.give(tape.take(0, sum(run), "reduced"))
            former = flats
        tape.give(former)
        return sums
