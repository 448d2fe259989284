"""CUDA graphs: a capture keeps the operations of its stream, and a replay queues them again on the current stream.

The rules are those of the CUDA C++ Programming Guide ("CUDA Graphs") and of torch/cuda/graphs.py:

- A capture queues nothing: the operations of the capturing stream run when the graph is replayed.
- torch.cuda.graph makes the host wait for the device before the capture begins.
- A replay reads and writes the memory of the capture. That memory belongs to the graph and is not reused while the
  graph exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch

from tests.races.clocks import Stream


@dataclass
class Operation:
    """An operation of a graph, with the tensors that it reads and writes."""

    ordinal: int
    work: str
    reads: list[torch.Tensor]
    writes: list[torch.Tensor]


@dataclass
class Graph:
    """The operations of one capture; it replaces torch.cuda.CUDAGraph."""

    detector: Any
    operations: list[Operation] = field(default_factory=list)

    def replay(self) -> None:
        """Queue the operations on the streams that are current."""
        for one in self.operations:
            self.detector.kernel(self.detector.machine.current(one.ordinal), one.work, one.reads, one.writes)


class Capture:
    """The context of one capture on `stream`; it replaces torch.cuda.graph."""

    def __init__(self, graph: Graph, *, stream: Stream, **_: Any) -> None:
        self.graph, self.stream, self.machine = graph, stream, stream.machine
        self._entered = self.machine.entered(stream)

    def __enter__(self) -> Self:
        self.machine.synchronize(self.stream.ordinal)
        self._entered.__enter__()
        self.graph.detector.capture = self
        return self

    def __exit__(self, *error: object) -> None:
        self.graph.detector.capture = None
        self._entered.__exit__(*error)
        self.machine.host.merge(self.stream.clock)  # since the wait, the stream has only allocated memory


def cuda(detector: Any) -> dict[str, Any]:
    """Return the functions and classes of torch.cuda for graphs, by name."""
    return {
        "CUDAGraph": lambda: Graph(detector), "graph": Capture, "graph_pool_handle": lambda: (0, 0),
        "get_rng_state": lambda device: None, "set_rng_state": lambda state, device: None,
    }  # fmt: skip
