"""Strategies: ways to train on several devices, one file each.

    start(case, model, devices, mark) -> context manager yielding step(inputs, target) -> loss
    tasks(case, profile) -> list[Task]      the same step as a graph of work, for the predictor

and, where the defaults do not fit:

    skip(case) -> str                       why this strategy cannot run the case; "" when it can
    launch(case, entry, folder) -> list     call entry(rank) once per process, and return what the calls returned
    threads(case) -> int                    intra-op threads of each process on the CPU (default 1)
    compares_buffers(case) -> bool          whether verification compares buffers too (default True)
    SHARED_STREAM = True                    colocated replicas use one stream

A step that has a method `observe()` is asked after each call, off the clock, for spans that only the library's own
timers know: a list of (phase, device, start_s, end_s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dpbench.records import Case, Phase, Profile, Task

Step = Callable[[Any, Any], torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}


def optimizer_of(case: Case) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the case's optimizer as a function of parameters."""
    if case.optimizer not in OPTIMIZERS:
        raise LookupError(f"unknown optimizer {case.optimizer!r}; known: {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[case.optimizer]


def precision_of(case: Case) -> AbstractContextManager[Any]:
    """Return the autocast region that the case's forward runs in."""
    if case.precision == "fp32":
        return nullcontext()
    return torch.autocast(case.device_kind, dtype=torch.bfloat16)


class Graph:
    """A list of tasks in the making."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def add(
        self, phase: Phase, device: int, resource: str, amount: float, unit: str,
        after: Iterable[int] = (), overlap: Iterable[int] = (),
    ) -> int:  # fmt: skip
        """Append a task and return its index."""
        self.tasks.append(Task(phase, device, resource, amount, unit, tuple(after), tuple(overlap)))
        return len(self.tasks) - 1

    def update(self, profile: Profile, device: int, after: Iterable[int]) -> int:
        """Append the optimizer: it reads gradients and state, and rewrites the weights."""
        return self.add(Phase.OPTIMIZER, device, f"device:{device}", 3 * profile.parameter_bytes, "bytes", after)
