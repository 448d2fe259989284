"""Strategies: ways to train on one or several devices, one file each.

A strategy is an instance of a subclass of `Strategy`. Plans, verification, reports and predictions depend on a
strategy's methods and traits only; no other package uses a strategy's name. Users run their strategies with `--strategy
file.py:name`, or by the name of an entry point in the group `dpbench.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Profile, Task, registry
from dpbench.records.registry import Parallelism, Reduction, Role, Traits
from dpbench.records.work import Move, Shapes

if TYPE_CHECKING:  # the predictor calls `tasks` without loading torch
    import torch
    from torch import nn

    from dpbench.models import Model

__all__ = [
    "Strategy", "Step", "Traits", "Role", "Parallelism", "Reduction", "Unpredictable", "load", "optimizer_of",
    "precision_of",
]  # fmt: skip

Step = Callable[[Any, Any], "torch.Tensor"]
"""One training step: (inputs, target) -> the loss, a 0-dim tensor.

If the step has a method `observe()`, the timer calls it after each step, outside the timed region. It returns the spans
that only a library's internal timers record, as a list of (phase, device, start_s, end_s).
"""


class Unpredictable(ValueError):
    """A strategy cannot be predicted, because it does not describe its step as tasks."""


class Strategy(Protocol):
    """One way to train. Subclasses set `traits` and define `start`; the other methods have defaults."""

    traits: Traits = Traits()

    def start(self, case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> AbstractContextManager[Step]:
        """Return a context manager that yields the training step of a case.

        `devices` are the case's devices; in a strategy with ranks, only the device of this rank. The step enters
        `mark(phase, index)` around each phase that it runs on a device. On exit the model's module must have the
        trained weights.
        """
        ...

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case; an empty string if it can."""
        if self.traits.needs_accelerator and case.device_kind != "cuda":
            return f"{case.strategy} needs an accelerator, not {case.device_kind} devices"
        if self.traits.ranks and case.device_kind == "emulated":
            return f"{case.strategy} runs one process per rank, and emulated devices exist in one process only"
        return ""

    def backend(self, case: Case) -> str:
        """Return torch's name of the backend with which ranks communicate."""
        return rank_backend(case)

    def compares_buffers(self, case: Case) -> bool:
        """Return whether verification compares buffers as well as gradients."""
        return True

    def tasks(self, case: Case, profile: Profile) -> list[Task]:
        """Return one step as a graph of tasks, for the predictor. Raises Unpredictable if the step is not described."""
        raise Unpredictable(
            f"the strategy {case.strategy} cannot be predicted, because it does not describe its step as tasks; "
            "measure the strategy instead"
        )

    def one_rank(self, case: Case, profile: Profile) -> list[Task]:
        """Return the tasks of one representative rank, for predictions of many ranks."""
        return self.tasks(case, profile)

    def moves(self, case: Case, shapes: Shapes) -> Iterable[Move]:
        """Return the transfers between devices in one step; empty if they are not known."""
        return ()


def load(name: str) -> Strategy:
    """Return the strategy with the name `name`. Raises LookupError for an unknown name."""
    found: Strategy = registry.strategy(name)
    return found


def rank_backend(case: Case) -> str:
    """Return the backend for the ranks of a case: NCCL between distinct GPUs, gloo otherwise."""
    # NCCL refuses two ranks on one GPU; gloo reduces through the host, which works for colocated ranks
    spread = case.device_kind == "cuda" and case.placement == "spread"
    return "cpu:gloo,cuda:nccl" if spread else "gloo"


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.optim import SGD

    return SGD(parameters, lr=0.01, momentum=0.9)


def _adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from torch.optim import Adam

    return Adam(parameters, lr=1e-3)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {"sgd": _sgd, "adam": _adam}


def optimizer_of(case: Case) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Return the function that creates the case's optimizer from parameters. Raises LookupError for an unknown name."""
    if case.optimizer not in OPTIMIZERS:
        raise LookupError(f"unknown optimizer {case.optimizer!r}; known: {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[case.optimizer]


def precision_of(case: Case) -> AbstractContextManager[Any]:
    """Return the context manager for the case's forward: autocast for bf16, a context without effect for fp32."""
    if case.precision == "fp32":
        return nullcontext()
    import torch

    return torch.autocast(case.device_kind, dtype=torch.bfloat16)
