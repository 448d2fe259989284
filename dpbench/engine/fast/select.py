"""Legal: which switches of a schedule the module, loss, optimizer or devices forbid, and why.

A schedule that the user has named runs unchanged or is refused. Under `copying` and `fastest`,
TrainStep sets the forbidden switches to other values, and reports the reasons.

An `Identity` records properties of the parameters and the optimizer on which the engine's
persistent state depends. It is compared at the start of each step, so that a changed property takes
effect, or raises an error, in that step. Writing values into a parameter in place changes none of
these properties; `ReplicaWeights.versions` and `TrainStep.sync` handle these writes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer, lr_scheduler
from torch.optim import optimizer as torch_optimizer

from dpbench.engine.containers import tensors_in
from dpbench.engine.errors import Refused
from dpbench.engine.flat_storage import is_dense
from dpbench.engine.losses import Loss
from dpbench.engine.optimizer_state import ELEMENTWISE, groups_of
from dpbench.engine.replicate import unique
from dpbench.hardware.device import Device
from dpbench.records.schedule import Schedule
from dpbench.engine._switches import OF, Switches

_HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")  # since torch 2.10
_requires_grad = attrgetter("requires_grad", *(["grad_dtype"] if _HAS_GRAD_DTYPE else []))
_tensor_hooks = attrgetter("_backward_hooks")
_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
Hooks = dict[int, Any]
"""Hooks by the number that torch has given each of them."""


class Identity:
    """A record of parameters' memory and `requires_grad`, of the optimizer's groups and hooks."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], optimizer: Optimizer | None = None
    ) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._memory = [p.detach() for p in parameters]
        self._wanted = list(map(_requires_grad, parameters))
        self._groups = (
            [list(group["params"]) for group in optimizer.param_groups] if optimizer else []
        )
        self.watched = optimizer is not None and is_watched(optimizer)

    def changed(self) -> bool:
        """Return whether one of the recorded properties has changed."""
        return (
            not all(map(torch.Tensor.is_set_to, self._parameters, self._memory))
            or list(map(_requires_grad, self._parameters)) != self._wanted
            or (self._optimizer is not None and self._stepped_otherwise(self._optimizer))
        )

    def _stepped_otherwise(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        return (
            is_watched(optimizer) != self.watched
            or len(groups) != len(self._groups)
            or not all(
                _same(group["params"], seen)
                for group, seen in zip(groups, self._groups, strict=True)
            )
        )


class GradientHooks:
    """The hooks on parameters' gradients: on the tensors, and on the nodes that accumulate them.

    torch shows the hooks of a node only to a hook's handle, so the constructor adds and removes
    one. It keeps the nodes, because a parameter does not keep its node, and a new node would have
    other hooks. `release` drops them, because a node also keeps the parameter's shape.
    """

    @torch.inference_mode(mode=False)  # in which tensors have no nodes
    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._nodes = [get_gradient_edge(p).node for p in parameters if p.requires_grad]
        registers = [
            register for n in self._nodes for register in (n.register_hook, n.register_prehook)
        ]
        handles = [register(print) for register in registers]
        self._of_nodes: list[Any] = [handle.hooks_dict_ref() for handle in handles]
        for handle in handles:
            handle.remove()

    def __bool__(self) -> bool:
        tensors = self._parameters
        return (
            any(map(_tensor_hooks, tensors))
            or any(map(_accumulate_hooks, tensors))
            or any(self._of_nodes)
        )

    def dicts(self) -> list[Hooks]:
        """Return torch's own dicts of these hooks, without empty ones."""
        of_tensors = [
            kind(p) for p in self._parameters for kind in (_tensor_hooks, _accumulate_hooks)
        ]
        return [*filter(None, of_tensors), *filter(None, self._of_nodes)]

    def release(self) -> None:
        """Drop the nodes."""
        self._nodes, self._of_nodes = [], []


def is_watched(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has a hook, or a replaced `step` or `zero_grad`.

    A hook or replaced method expects the module's own parameters and gradients. A `step` that one
    of torch's learning rate schedulers has wrapped is not a replaced one: the wrapper only counts
    the calls.
    """
    step: Any = optimizer.__dict__.get("step")
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
        or (step is not None and not _only_counts(step, type(optimizer)))
        or "zero_grad" in optimizer.__dict__
    )


def _only_counts(step: Any, kind: type[Optimizer]) -> bool:
    """Return whether `step` is a learning rate scheduler's wrapper that counts the calls.

    The attribute that torch's scheduler sets on it does not show this, because `functools.wraps`
    copies it to functions of the user.
    """
    of_torch = getattr(step, "__globals__", None) is vars(lr_scheduler)
    return of_torch and getattr(step, "__wrapped__", None) is kind.step


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


class Muted:
    """Hooks on parameters' gradients. The constructor removes them; `restore` puts them back.

    They are absent during a backward that may reach the parameters directly, without passing
    through the replicas. In such a backward a parameter gets only a part of its gradient, but hooks
    must be called once, with all of it.
    """

    def __init__(self, hooks_of_parameters: Sequence[Hooks]) -> None:
        self._hooks = [(hooks, dict(hooks)) for hooks in hooks_of_parameters]
        for hooks, _ in self._hooks:
            hooks.clear()  # in place: the handles that remove hooks reference these dicts

    def restore(self) -> None:
        """Put the hooks back, ahead of the hooks that were added in the meantime."""
        while self._hooks:
            hooks, taken = self._hooks.pop()
            hooks.update({**taken, **hooks})


EXACT_DTYPES = (torch.float32, torch.float64)
"""Dtypes for which elementwise kernels round an element independently of its position."""


@dataclass(frozen=True)
class TrainingSetup:
    """The module, loss, optimizer and devices for which schedules are checked.

    `powers` is True if the loss is scaled only by powers of two, or not at all.
    """

    module: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    devices: Sequence[Device]
    powers: bool = True

    @property
    def trained(self) -> list[torch.Tensor]:
        """Return the module's parameters that require gradients, each of them once."""
        return trained(self.module)


def trained(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters that require gradients, each of them once."""
    return [p for p in unique(module.parameters()) if p.requires_grad]


Reason = Callable[[Switches, TrainingSetup], str]


def _local_loss(schedule: Switches, setup: TrainingSetup) -> str:
    if schedule.loss == "local" and setup.loss.summed() is None:
        return (
            "loss=local needs a loss whose mean has a known divisor, but the divisor of loss_fn is"
            " unknown; use one of torch's losses without hooks, such as"
            " torch.nn.functional.cross_entropy, or a pair (sum_fn, weight_fn)"
        )
    if (
        schedule.loss == "local"
        and not setup.loss.pair
        and any(p.dtype is torch.float16 for p in setup.trained)
    ):
        return (
            "loss=local adds the losses of all rows before it divides, and such a sum in fp16, the"
            " dtype of a parameter, is infinite above 65504; use loss=gathered"
        )
    return ""


def _persistent(schedule: Switches, setup: TrainingSetup) -> str:
    if schedule.replicas != "persistent":
        return ""
    groups_of(setup.optimizer, unique(setup.module.parameters()))
    if _HAS_GRAD_DTYPE and any(p.grad_dtype != p.dtype for p in setup.trained):
        return (
            "replicas=persistent computes gradients in the dtype of their parameters, but a"
            " parameter has another grad_dtype; use schedule='cached'"
        )
    if any(getattr(part, "sparse", False) for part in setup.module.modules()):
        return (
            "replicas=persistent needs dense gradients, but a layer has sparse=True; use"
            " schedule='cached', or create the layer with sparse=False"
        )
    if any(buffer.requires_grad for buffer in setup.module.buffers()):
        return (
            "replicas=persistent computes no gradients of buffers, but a buffer of the module"
            " requires gradients; use schedule='cached'"
        )
    return ""


def _storage(schedule: Switches, setup: TrainingSetup) -> str:
    shared = any(p.untyped_storage().nbytes() != p.nbytes for p in setup.trained if is_dense(p))
    if schedule.storage == "flat" and setup.devices[0].torch_device.type == "cpu" and shared:
        return (
            "storage=flat needs parameters that share no memory with other tensors, but the memory"
            " of one parameter is part of a larger tensor; use storage=separate"
        )
    return storage(schedule, setup.module, setup.devices)


def storage(schedule: Switches, module: nn.Module, devices: Sequence[Device]) -> str:
    """Return why the parameters cannot be stored as the schedule requires, or "" if they can."""
    if schedule.storage != "flat":
        return ""
    kind = devices[0].torch_device.type
    if kind not in ("cpu", "cuda"):
        return (
            f"storage=flat needs CPU or CUDA devices, but the device type is {kind}, on which"
            " parameters cannot be views of one buffer; use storage=separate"
        )
    if kind == "cuda" and any(isinstance(part, nn.RNNBase) for part in module.modules()):
        return (
            "storage=flat cannot store the weights of RNNs on CUDA, because cuDNN packs them into"
            " one buffer itself; use storage=separate"
        )
    for parameter in (wanted := trained(module)):
        if not is_dense(parameter):
            return (
                "storage=flat needs parameters that are dense in memory, but the parameter of"
                f" shape {tuple(parameter.shape)} has strides {parameter.stride()}: set"
                " parameter.data = parameter.data.contiguous(), or use storage=separate"
            )
    if reason := _shared(module, wanted):
        return (
            f"storage=flat needs parameters that share no memory, but {reason}; use"
            " storage=separate"
        )
    return ""


def _shared(module: nn.Module, parameters: Sequence[torch.Tensor]) -> str:
    """Return a clause that says what shares memory with one of the parameters, or ""."""
    if _overlap(parameters):
        return "two of them share memory"
    if any(p.device.type == "cpu" and p.is_shared() for p in parameters):
        return "share_memory() has put one of them into memory that processes share"
    memory = {p.untyped_storage().data_ptr() for p in parameters if p.numel()}
    parameter_ids = set(map(id, module.parameters()))
    for prefix, part in module.named_modules():
        attributes = {
            name: value
            for name, value in vars(part).items()
            if name not in ("_parameters", "_modules")
        }
        for name, value in {**attributes, **part._buffers}.items():
            others = (
                t
                for t in tensors_in(value)
                if t.layout is torch.strided and id(t) not in parameter_ids
            )
            # torch's spectral_norm sets `weight` before each forward
            recomputed = hasattr(part, f"{name}_orig")
            if not recomputed and any(
                tensor.untyped_storage().data_ptr() in memory for tensor in others
            ):
                return f"{prefix}.{name}".removeprefix(".") + " is in the memory of one of them"
    return ""


def _update(schedule: Switches, setup: TrainingSetup) -> str:
    kind = type(setup.optimizer)
    if schedule.update == "root":
        return ""
    if schedule.update == "sharded" and kind not in ELEMENTWISE:
        return (
            "update=sharded needs an optimizer that is known to step every element independently,"
            f" but the optimizer is {kind.__name__}; use update=root"
        )
    if not kind.__module__.startswith("torch.optim."):
        return (
            "update=each gives a copy of the optimizer to each device and therefore needs an"
            f" optimizer of torch.optim, but the optimizer is {kind.__name__}; use update=root"
        )
    if _overlap(setup.trained):
        return (
            f"update={schedule.update} needs parameters that share no memory, but two of them share"
            " memory; use update=root"
        )
    return ""


def _flat_optimizer(schedule: Switches, setup: TrainingSetup) -> str:
    if schedule.optimizer == "flat" and type(setup.optimizer) not in ELEMENTWISE:
        names = ", ".join(one.__name__ for one in ELEMENTWISE)
        return (
            f"optimizer=flat needs an elementwise optimizer ({names}), but the optimizer is "
            f"{type(setup.optimizer).__name__}; use optimizer=per_parameter"
        )
    return ""


def _exact_loss(schedule: Switches, setup: TrainingSetup) -> str:
    summed = setup.loss.summed() if schedule.loss == "local" else None
    if summed is None or summed.keeps_bits(powers=setup.powers):
        return ""
    return (
        "the loss is computed over the gathered batch, because summing the replicas' losses could"
        " change the last bit of the gradients"
    )


def _exact_optimizer(schedule: Switches, setup: TrainingSetup) -> str:
    if schedule.optimizer != "flat":
        return ""
    if any(group.get("fused") for group in setup.optimizer.param_groups):
        return (
            "the optimizer steps parameters one by one, not as a flat buffer, because the rounding"
            " of fused kernels depends on the position of an element in its tensor"
        )
    if any(p.dtype not in EXACT_DTYPES for p in setup.trained):
        return (
            "the optimizer steps parameters one by one, not as a flat buffer, because the rounding"
            " of low-precision kernels depends on the position of an element in its tensor"
        )
    return ""


def _unwatched(schedule: Switches, setup: TrainingSetup) -> str:
    if schedule.replicas == "persistent" and GradientHooks(setup.trained):
        return (
            "replicas are not persistent, because a parameter has a hook that must get the gradient"
            " from autograd"
        )
    return ""


def _unwatched_optimizer(schedule: Switches, setup: TrainingSetup) -> str:
    if schedule.update != "root" and is_watched(setup.optimizer):
        return (
            "only the first device runs an optimizer, because the optimizer has a hook or a"
            " replaced method, which must get the module's own parameters"
        )
    return ""


ALWAYS: dict[Reason, str] = {
    _persistent: "replicas",
    _local_loss: "loss",
    _storage: "storage",
    _update: "update",
    _flat_optimizer: "optimizer",
}
"""The checks that every schedule must pass, each with the switch that it can forbid."""
FOR_SELECTED: dict[Reason, str] = {
    _unwatched: "replicas",
    _unwatched_optimizer: "update",
    _exact_loss: "loss",
    _exact_optimizer: "optimizer",
}
"""The additional checks for a schedule that TrainStep selects, each with the switch it can forbid.

They exclude schedules whose results could differ from those of `reference` in any bit, and
schedules that hooks would slow down.
"""


def hindrances(
    schedule: Switches, setup: TrainingSetup, reasons: dict[Reason, str]
) -> Iterator[tuple[str, str]]:
    """Yield a pair (switch, reason) for each of the checks that forbids the schedule."""
    for find, switch in reasons.items():
        try:
            reason = find(schedule, setup)
        except Refused as error:
            reason = str(error)
        if reason:
            yield switch, reason


def check(schedule: Schedule, setup: TrainingSetup) -> None:
    """Raise Refused, with the reason, if the engine cannot run this training with the schedule."""
    _check_closure(setup.optimizer)
    for _, reason in hindrances(OF[schedule], setup, ALWAYS):
        raise Refused(f"schedule {schedule}: {reason}")


def _check_closure(optimizer: Optimizer) -> None:
    """Raise Refused if the optimizer's `step` has an argument that must be given, as LBFGS has."""
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    if any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[1:]):
        kind = type(optimizer).__name__
        raise Refused(
            f"{kind} evaluates the loss several times per step, through a closure, which TrainStep"
            " does not support; use another optimizer"
        )


def best_legal(setup: TrainingSetup, highest: Schedule) -> tuple[Schedule, list[str]]:
    """Return the schedule that TrainStep selects, and why it is below `highest`.

    It is the highest that nothing forbids. Its results are bitwise equal to those of `reference`
    (on distinct GPUs: equal within rounding). With a single device it is `reference`.
    """
    _check_closure(setup.optimizer)
    if len(setup.devices) == 1:
        return Schedule.REFERENCE, []
    notes: list[str] = []
    ladder = list(Schedule)
    for schedule in reversed(ladder[: ladder.index(highest) + 1]):
        found = next(hindrances(OF[schedule], setup, ALWAYS | FOR_SELECTED), None)
        if found is None:
            break
        if found[1] not in notes:
            notes.append(found[1])
    return schedule, notes


def _overlap(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether two of the parameters share memory without being the same object."""
    spans = sorted(
        (
            p.untyped_storage().data_ptr(),
            p.storage_offset() * p.itemsize,
            p.storage_offset() * p.itemsize + _extent(p),
        )
        for p in parameters
        if p.layout is torch.strided and p.device.type in ("cpu", "cuda") and p.numel()
    )
    return any(one[0] == other[0] and other[1] < one[2] for one, other in pairwise(spans))


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of bytes from a tensor's first to its last element, both included."""
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return (steps + 1) * tensor.itemsize
