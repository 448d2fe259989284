"""Strategies: ways to train on one or several devices.

A strategy is an instance of a subclass of `Strategy`; the rest of dpbench depends only on its
methods and traits, never on its name. Users name their own strategies as `file.py:name`, or by an
entry point in the group `dpbench.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from dpbench.hardware import processes
from dpbench.hardware.device import Device
from dpbench.records import HOST, Case, Mark, Phase, registry
from dpbench.records.arguments import call
from dpbench.records.errors import UnknownName, UsageError
from dpbench.records.registry import Parallelism, Reduction, Role, Traits
from dpbench.records.spelling import dashed
from dpbench.records.work import RESOURCES, UNITS, Group, StepSizes, Task
from dpbench.strategies._steps import OPTIMIZER_PASSES, Graph, bucket_sizes, buckets

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dpbench.models import Model

__all__ = [
    "Strategy",
    "Step",
    "StepFunction",
    "FunctionStep",
    "ObservedSpan",
    "Forward",
    "Split",
    "Traits",
    "Role",
    "Parallelism",
    "Reduction",
    "Memory",
    "StepSizes",
    "Task",
    "Group",
    "Graph",
    "OPTIMIZER_PASSES",
    "bucket_sizes",
    "buckets",
    "Updates",
    "load",
    "described",
    "begin",
    "refusal",
    "AUTOCAST",
    "put_all",
    "rows_of",
    "clip_norm_of",
    "optimizer_of",
    "scheduler_of",
    "precision_of",
    "scaler_of",
]

StepFunction = Callable[[Any, Any], "torch.Tensor"]
"""One training step: a function of (inputs, target) that returns the loss as a 0-dim tensor."""

ObservedSpan = tuple[Phase, int, float, float]
"""A span that an internal timer of a library has recorded: phase, device, start_s and end_s."""


class Step:
    """A `StepFunction` that can say more; a subclass overrides what concerns it.

    By default, all steps run alike, and the marks record everything.
    """

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Train on a batch, and return the loss as a 0-dim tensor."""
        raise NotImplementedError

    settled: bool = True
    """Whether the next steps run alike.

    Steps are part of the warm-up until then, because they still try alternatives.
    """

    def observe(self) -> Sequence[ObservedSpan]:
        """Return the spans of the last step that only a library's internal timers record.

        The timer calls this after each step, outside the timed region.
        """
        return ()


class FunctionStep(Step):
    """The step of a strategy that yields a function; it is settled when `of` is.

    `of` is the object that does the work, if that is not the function itself: a TrainStep and a
    DataParallel of dpbench say whether they are settled, and others are always settled.
    """

    def __init__(self, function: StepFunction, of: Any = None) -> None:
        self._function = function
        self._of = function if of is None else of

    @property
    def settled(self) -> bool:  # type: ignore[override]
        """Return whether the next steps run alike."""
        return bool(getattr(self._of, "settled", True))

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        """Call the function."""
        return self._function(inputs, target)


Forward = Callable[..., "torch.Tensor"]
"""The forward alone: a function from the module's positional arguments to its output."""


class Memory(StrEnum):
    """What a strategy keeps allocated on several devices, and for how long.

    A prediction of memory replays these allocations. On one device, they are those of the module
    alone.
    """

    UNKNOWN = "unknown"
    WRAPPER = "wrapper"
    """Those of torch.nn.DataParallel, whose copies live as long as the autograd graph."""
    SCHEDULE = "schedule"
    """Those of the engine's schedules."""
    RANKS = "ranks"
    """Each rank has the weights, the gradients and DistributedDataParallel's buckets."""


@dataclass(frozen=True)
class Split:
    """The split of the batch in one step: `rows` has the samples of each forward, in batch order.

    `replays` is True if each pass calls the module's forward once and draws from one generator;
    verification can then replay the random numbers.
    """

    rows: tuple[int, ...]
    replays: bool = True


class Strategy:
    """The base class of strategies.

    Subclasses set `traits` and define `start`. `memory` and the other methods have defaults.
    """

    traits: Traits = Traits()
    memory: Memory = Memory.UNKNOWN

    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> AbstractContextManager[StepFunction]:
        """Return a context manager that yields the training step of a case.

        It is a function, or a `Step`, which can say more. `devices` has the devices of the case;
        with ranks, only those of this rank. The step runs each phase on a device inside
        `mark(phase, index)`, where `index` is the index of the device. On exit, the module of
        `model` must have the trained weights.
        """
        raise NotImplementedError

    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> AbstractContextManager[Forward]:
        """Return a context manager that yields the forward of a case that does not train.

        The arguments are those of `start`. The module is in eval mode. The output stays on a
        device; with ranks, it has only the rows of this rank. Cases that do not train are skipped
        under a strategy that does not override this method.
        """
        raise UsageError(_no_forward(case))

    def describe(self, case: Case, sizes: StepSizes) -> Sequence[Task] | None:
        """Return what a step copies, computes and reduces, on which devices; None if unknown.

        Predictions of the step's time, and the bytes that it moves, come from this list, which a
        `Graph` builds. The phases and devices of the timed tasks are those that the step marks.
        `sizes` are those of the model.
        """
        return None

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case; an empty string if it can."""
        if self.traits.ranks and case.device_kind == "emulated":
            return (
                f"{case.strategy} runs one process per rank, but emulated devices exist in one"
                " process only"
            )
        return ""

    def backend(self, case: Case) -> str:
        """Return torch's name of the backend for a case's ranks: NCCL between GPUs, else gloo."""
        # NCCL refuses two ranks on one GPU; gloo reduces through the host, which works for
        # colocated ranks
        spread = case.device_kind == "cuda" and case.placement == "spread"
        return "cpu:gloo,cuda:nccl" if spread else "gloo"

    def compares_buffers(self, case: Case) -> bool:
        """Return whether verification compares the module's buffers as well as the gradients."""
        return True

    def split(self, case: Case, module: nn.Module) -> Split:
        """Return how a step splits the batch; verification splits the reference's batch alike.

        By default, each replica runs its samples in one forward pass. With `Parallelism.OTHER`, one
        pass runs the whole batch.
        """
        whole = self.traits.parallelism is Parallelism.OTHER
        # each GPU has its own generator
        generators = case.device_kind == "cuda" and (whole or self.traits.devices_per_replica > 1)
        return Split((case.batch_size,) if whole else case.rows, replays=not generators)


def load(name: str) -> Strategy:
    """Return the strategy with the given name. Raises LookupError for an unknown name."""
    strategy: Strategy = registry.strategy(name)
    return strategy


def described(case: Case, sizes: StepSizes) -> Sequence[Task] | None:
    """Return the tasks of a case's step; None if its strategy is unknown or does not describe it.

    Code of a user that this process has not imported counts as unknown (see `registry.imported`).
    Raises UsageError for a task whose resource, unit or device is unknown.
    """
    describe = getattr(registry.imported(case.strategy), "describe", None)
    tasks: Sequence[Task] | None = describe(case, sizes) if describe else None
    for task in tasks or ():
        kind = task.resource.partition(":")[0]
        known = kind in RESOURCES and task.unit in UNITS
        if not known or not HOST <= task.device < case.devices:
            raise UsageError(
                f"the strategy {case.strategy} describes a task of {task.amount:g} {task.unit} on"
                f" {task.resource!r} of device {task.device}: resources begin with one of"
                f" {', '.join(sorted(RESOURCES))}, units are {', '.join(sorted(UNITS))}, and there"
                f" are {case.devices} devices, from 0 on"
            )
    return tasks


def refusal(strategy: Strategy, case: Case) -> str:
    """Return the reason why a strategy cannot run a case; an empty string if it can."""
    if not case.trains and type(strategy).infer is Strategy.infer:
        return _no_forward(case)
    return _no_neighbour(strategy, case) or strategy.skip(case)


def _no_neighbour(strategy: Strategy, case: Case) -> str:
    if not case.neighbour:
        return ""
    if strategy.traits.alone:
        return (
            f"{case.strategy} needs several processes or every core: for two models at once, give"
            " another strategy"
        )
    if case.placement == "colocated":
        return (
            "replicas that share one GPU leave no device to the other model: give"
            f" {dashed('placement', 'spread')}"
        )
    import torch

    cores = len(processes.CORES) or case.devices * 2
    available = (
        cores if case.device_kind == "cpu" else len(case.device_ids) or torch.cuda.device_count()
    )
    if 2 * case.devices > available:
        kind = "cores" if case.device_kind == "cpu" else "GPUs"
        return (
            f"two models need {2 * case.devices} {kind} ({case.devices} for each model), but"
            f" available: {available}"
        )
    return ""


def _no_forward(case: Case) -> str:
    return (
        f"{case.strategy} runs whole training steps only, not the forward alone: leave out"
        f" {dashed('mode')}"
    )


@contextmanager
def begin(
    strategy: Strategy, case: Case, model: Model, devices: Sequence[Device], mark: Mark
) -> Iterator[Step]:
    """Start the strategy, and yield the step of a case: a training step, or the forward alone.

    The forward alone returns the output after all devices have finished, so the duration of the
    step is the latency of one request.
    """
    if case.trains:
        with strategy.start(case, model, devices, mark) as training:
            yield _step_of(training)
        return
    import torch

    autograd: Any = {"no_grad": torch.no_grad, "inference": torch.inference_mode}.get(
        case.mode, nullcontext
    )
    model.module.eval()
    with strategy.infer(case, model, devices, mark) as forward:

        def step(inputs: Any, target: Any) -> torch.Tensor:
            with autograd(), precision_of(case):
                output = call(forward, inputs)
            for device in devices:
                device.synchronize()
            return output

        yield FunctionStep(step, of=forward)


def _step_of(training: StepFunction) -> Step:
    """Return what `start` yields as a step; raise UsageError if it observes and is no `Step`."""
    if isinstance(training, Step):
        return training
    if hasattr(training, "observe"):
        raise UsageError(
            f"the step of the strategy, a {type(training).__name__}, has the method observe, but is"
            " no dpbench.strategies.Step, from which alone dpbench takes spans; yield a function,"
            " or an instance of a subclass of dpbench.strategies.Step"
        )
    return FunctionStep(training)


def put_all(arguments: Sequence[Any], device: Device) -> list[Any]:
    """Return the arguments with all tensors copied to `device`.

    The copies are made on the device's stream, as by `x.to(device, non_blocking=True)` in an
    ordinary loop: they run after the work that the device already has. Tensors that are already on
    an accelerator `device` are not copied. Tensors in nested tuples, lists, dicts and dataclass
    instances are copied too.
    """
    from dpbench.engine.containers import mapped

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.device == device.torch_device and tensor.device.type != "cpu"
        return tensor if there else tensor.to(device.torch_device, non_blocking=True, copy=True)

    with device.guard():
        return [mapped(argument, placed) for argument in arguments]


def rows_of(value: Any, case: Case, rank: int) -> Any:
    """Return the structure `value` with only those rows of each tensor on which `rank` trains.

    A tensor with the rank's number of rows is kept, because the rank has loaded only its own rows.
    """
    from dpbench.engine.containers import mapped

    rows = case.rows[rank]
    return mapped(
        value, lambda tensor: tensor if len(tensor) == rows else tensor.split(case.rows)[rank]
    )


MakeOptimizer = Callable[[Iterable["nn.Parameter"]], "torch.optim.Optimizer"]


def _of_torch(name: str, **settings: float) -> MakeOptimizer:
    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        from torch import optim

        optimizer: optim.Optimizer = getattr(optim, name)(parameters, **settings)
        return optimizer

    return make


OPTIMIZERS = {
    "sgd": _of_torch("SGD", lr=0.01, momentum=0.9),
    "adam": _of_torch("Adam", lr=1e-3),
    "adamw": _of_torch("AdamW", lr=1e-3),
}
OWN = "own"
"""The name of the optimizer of the model's object, whose scheduler and clip norm then apply too."""


def optimizer_of(case: Case, model: Model | None = None) -> MakeOptimizer:
    """Return the function that creates the case's optimizer from parameters.

    Raises LookupError if the optimizer is unknown, or is "own" and the model provides none.
    """
    if case.optimizer == OWN:
        if model is None or model.loop.optimizer is None:
            raise UnknownName(
                f"{dashed('optimizer', OWN)}: the model {case.model} has no function"
                " optimizer(parameters): add it to the model's object, or give"
                f" {dashed('optimizer', 'sgd')}"
            )
        make = model.loop.optimizer
        return lambda parameters: make(list(parameters))
    if case.optimizer not in OPTIMIZERS:
        raise UnknownName(
            f"unknown optimizer {case.optimizer!r}; known optimizers:"
            f" {', '.join(sorted(OPTIMIZERS))}"
        )
    return OPTIMIZERS[case.optimizer]


AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""torch's name of the type to which autocast rounds in forward, by precision."""


def precision_of(case: Case) -> AbstractContextManager[Any]:
    """Return the context manager for the case's forward: autocast for bf16 and fp16."""
    if case.precision not in AUTOCAST:
        return nullcontext()
    import torch

    return torch.autocast(case.device_kind, dtype=getattr(torch, AUTOCAST[case.precision]))


def scaler_of(case: Case) -> torch.amp.GradScaler | None:
    """Return a GradScaler for fp16, in which small gradients would become 0; otherwise None."""
    if case.precision != "fp16":
        return None
    import torch

    return torch.amp.GradScaler(case.device_kind)


def clip_norm_of(case: Case, model: Model) -> float | None:
    """Return the norm to which the loop of a case clips the gradient; None if it does not clip."""
    return model.loop.clip_norm if case.optimizer == OWN else None


def scheduler_of(case: Case, model: Model, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate scheduler in the loop of a case; None if it has none."""
    make = model.loop.scheduler if case.optimizer == OWN else None
    return None if make is None else make(optimizer)


class Updates:
    """The optimizer of a case's training loop, with a GradScaler if the precision needs one."""

    def __init__(self, case: Case, model: Model, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer_of(case, model)(self._parameters)
        self._scaler = scaler_of(case)
        self._clip_norm = clip_norm_of(case, model)
        self._scheduler = scheduler_of(case, model, self._optimizer)
        self._drops = case.zero_grad == "none"

    def clear(self) -> None:
        """Clear the gradients before a step, to None or to zero, as the case's `zero_grad` says."""
        self._optimizer.zero_grad(set_to_none=self._drops)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the tensor on which the loop calls backward: the loss, scaled for a GradScaler."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def step(self) -> None:
        """Clip the gradients if the loop does, then update the weights and step the scheduler.

        A GradScaler first unscales the gradients, and skips the update if one is infinite or NaN.
        """
        if self._clip_norm is not None:
            from torch.nn.utils import clip_grad_norm_

            if self._scaler is not None:
                self._scaler.unscale_(self._optimizer)
            clip_grad_norm_(self._parameters, self._clip_norm)
        if self._scaler is None:
            self._optimizer.step()
        else:
            self._scaler.step(self._optimizer)
            self._scaler.update()
        if self._scheduler is not None:
            self._scheduler.step()
