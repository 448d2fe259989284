"""Strategies: ways to train on several devices, one file each.

    start(case, model, devices, mark) -> context manager yielding step(inputs, target) -> loss
    tasks(case, profile) -> list[Task]      the same step as a graph of work, for the predictor

and, where the defaults do not fit:

    skip(case) -> str                       why this strategy cannot run the case; "" when it can
    backend(case) -> str                    torch's name of the process group's backend, if each device has a rank
    threads(case) -> int                    intra-op threads of each process on the CPU (default 1)
    compares_buffers(case) -> bool          whether verification compares buffers too (default True)
    SHARED_STREAM = True                    colocated replicas use one stream

A step that has a method `observe()` is asked after each call, off the clock, for spans that only the library's own
timers know: a list of (phase, device, start_s, end_s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from dpbench.records import Case, Phase, Profile, Task

if TYPE_CHECKING:  # the predictor asks for tasks, and loads no torch
    import torch
    from torch import nn

Step = Callable[[Any, Any], "torch.Tensor"]


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.optim import SGD

    return SGD(parameters, lr=0.01, momentum=0.9)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.optim import Adam

    return Adam(parameters, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {"sgd": _sgd, "adam": _adam}
PASSES = {"sgd": 5, "adam": 7}
"""How often an optimizer's step reads or writes as many bytes as the parameters have: weight, gradient and state."""


def optimizer_of(case: Case) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the case's optimizer as a function of parameters."""
    if case.optimizer not in OPTIMIZERS:
        raise LookupError(f"unknown optimizer {case.optimizer!r}; known: {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[case.optimizer]


def precision_of(case: Case) -> AbstractContextManager[Any]:
    """Return the autocast region that the case's forward runs in."""
    if case.precision == "fp32":
        return nullcontext()
    import torch

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

    def launch(
        self, phase: Phase, device: int, host: str, launches: float, kernels: tuple[float, str],
        after: Iterable[int] = (), overlap: Iterable[int] = (),
    ) -> int:  # fmt: skip
        """Append what the host hands to a device, and the kernels that run beside it and end with it or later."""
        before = tuple(after)
        handed = self.add(phase, device, host, launches, "launches", before, overlap)
        amount, unit = kernels
        return self.add(phase, device, f"device:{device}", amount, unit, before, [handed])

    def each(
        self, phase: Phase, devices: Sequence[int], collective: str, amount: float,
        after: Callable[[int], Iterable[int]], overlap: Callable[[int], Iterable[int]] = lambda i: (),
    ) -> list[int]:  # fmt: skip
        """Append one collective, a task for each device."""
        return [self.add(phase, i, collective, amount, "bytes", after(i), overlap(i)) for i in devices]

    def update(
        self, case: Case, profile: Profile, device: int, host: str, after: Iterable[int],
        *, flat: bool = False, share: float = 1.0,
    ) -> int:  # fmt: skip
        """Append the optimizer: it reads gradients and state, and rewrites the weights."""
        launches = 1 if flat else profile.parameter_tensors
        moved = PASSES.get(case.optimizer, 5) * profile.parameter_bytes * share
        return self.launch(Phase.OPTIMIZER, device, host, launches * share, (moved, "bytes"), after)


FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""What torch's DistributedDataParallel reduces first, and from then on, in one message."""


def buckets(profile: Profile, first: int = FIRST_BUCKET_BYTES, limit: int = BUCKET_BYTES) -> list[float]:
    """Return the bytes of each bucket of gradients, in the order in which backward fills them.

    As torch assigns them: a bucket is closed by the tensor with which it reaches its limit.
    """
    count = max(1, profile.parameter_tensors)
    sizes = profile.gradient_bytes or (profile.parameter_bytes / count,) * count
    found, full = [0.0], first
    for size in sizes:
        if found[-1] >= full:
            found.append(0.0)
            full = limit
        found[-1] += size
    return found
