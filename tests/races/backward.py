"""The streams of a backward: torch's rules for CUDA, applied to torch's engine on the host.

The rules are those of torch's notes ("CUDA semantics", "Stream semantics of backward passes") and
of its source:

- A node has one stream: the stream that was current, in forward, on the device of the node's first
  output (`Node::stream` in autograd/function.h, `InputMetadata` in autograd/input_metadata.h). For
  a leaf it is the stream that was current when the leaf was first used. The node runs with this
  stream current.
- The node waits for the stream of the node that computed its gradient, and records its stream on
  the gradient. If several nodes compute it, their gradients are added on the consumer's stream if
  they are on its device, otherwise on the producer's (`InputBuffer::add` in
  autograd/input_buffer.cpp).
- The first node waits for the stream that is current in the thread that calls backward
  (`GraphRoot`, basic_ops.h).
- At the end, the caller's current streams wait for the streams of all leaves
  (`GraphTask::exec_post_processing` in autograd/engine.cpp).
- torch runs the nodes of each GPU in a separate thread, in which the streams of the other GPUs are
  the default streams.

A backward within a backward (a reentrant checkpoint) is not supported. torch's engine runs the
nodes of different GPUs at the same time, here they run one after the other in the order in which
they were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.races.clocks import HOST, Clock, Machine, Stream
from tests.races.recorder import Recorder

STREAM = "stream of forward"
"""The key of a node's stream in the node's metadata."""


def annotate(outputs: Sequence[torch.Tensor], machine: Machine, recorder: Recorder) -> None:
    """Store in each new node below `outputs` the current stream of its output's device."""
    for output in outputs:
        if output.grad_fn is None:
            continue
        found, ordinal = [output.grad_fn], recorder.ordinal_of(output)
        while found:
            node: Any = found.pop()
            if STREAM in node.metadata:
                continue
            at = recorder.ordinal_of(node.variable) if hasattr(node, "variable") else ordinal
            node.metadata[STREAM] = machine.current(at)
            found += [below for below, _ in node.next_functions if below is not None]


@dataclass
class Buffer:
    """A node's waiting gradient: the stream that adds it up, and the work that must come before."""

    stream: Stream
    clock: Clock


class Backward:
    """One backward of torch's engine, of which every node runs on its stream."""

    def __init__(self, machine: Machine, recorder: Recorder, root: torch.Tensor) -> None:
        self._machine, self._recorder = machine, recorder
        self._callers = dict(machine.streams)
        self._buffers: dict[tuple[int, int], Buffer] = {}
        self._sums: list[tuple[Buffer, Clock]] = []
        self._leaves: set[Stream] = set()
        self._nodes: list[Any] = []
        self._inside = False
        annotate([root], machine, recorder)
        start = machine.current(recorder.ordinal_of(root))
        self._buffers[id(root.grad_fn), root.output_nr] = Buffer(start, dict(start.clock))
        self._root = root

    def run(self, backward: Callable[[], None]) -> None:
        """Call `backward` with hooks on all nodes of the graph."""
        handles, found, seen = [], [self._root.grad_fn], set[int]()
        while found:
            node: Any = found.pop()
            if node is None or id(node) in seen:
                continue
            seen.add(id(node))
            self._nodes.append(node)  # keep the ids valid
            handles += [
                node.register_prehook(self._before(node)),
                node.register_hook(self._after(node)),
            ]
            found += [below for below, _ in node.next_functions]
        try:
            with self._machine.entered(None):
                backward()
        finally:
            for handle in handles:
                handle.remove()
            self._nodes.clear()
        for leaf in self._leaves:
            caller = self._machine.current(leaf.ordinal)
            if leaf.ordinal != HOST and caller is not leaf:
                caller.wait_stream(leaf)

    def sum_stream(self, tensors: Sequence[torch.Tensor]) -> tuple[Stream, Buffer] | None:
        """Return the stream on which the engine adds two gradients, and their buffer.

        None inside a node.
        """
        if self._inside or not self._sums:
            return None
        buffer, clock = self._sums.pop(0)
        buffer.stream.merge(buffer.clock)
        buffer.stream.merge(clock)
        for tensor in tensors:
            self._recorder.borrow(tensor, buffer.stream)
        return buffer.stream, buffer

    def _before(self, node: Any) -> Callable[[Any], None]:
        stream: Stream = node.metadata.get(STREAM) or self._machine.host

        def hook(gradients: Sequence[torch.Tensor | None]) -> None:
            assert not self._sums, "the engine added fewer gradients than expected"
            for number, gradient in enumerate(gradients):
                buffer = self._buffers.pop((id(node), number), None)
                if buffer is None or stream.ordinal == HOST:
                    continue
                stream.merge(buffer.clock)
                if gradient is not None:
                    self._recorder.borrow(gradient, stream)
            self._machine.streams = (
                dict(self._callers) if stream.ordinal == HOST else {stream.ordinal: stream}
            )
            self._inside = True

        return hook

    def _after(self, node: Any) -> Callable[[Any, Any], None]:
        stream: Stream = node.metadata.get(STREAM) or self._machine.host

        def hook(results: Sequence[torch.Tensor | None], _: Any) -> None:
            for (below, number), gradient in zip(node.next_functions, results, strict=False):
                if below is not None and gradient is not None:
                    self._deliver(below, number, gradient, stream)
            if not node.next_functions:
                self._leaves.add(stream)
            self._inside = False

        return hook

    def _deliver(
        self, consumer: Any, number: int, gradient: torch.Tensor, producer: Stream
    ) -> None:
        """Note that a node has computed a gradient of its consumer.

        If there is one already, expect their sum.
        """
        key, clock = (id(consumer), number), dict(producer.clock)
        if key in self._buffers:
            self._sums.append((self._buffers[key], clock))
            return
        home, stream = (
            self._recorder.ordinal_of(gradient),
            consumer.metadata.get(STREAM) or self._machine.host,
        )
        if home != stream.ordinal:
            stream = producer if home == producer.ordinal else self._machine.default(home)
        self._buffers[key] = Buffer(stream, clock)
