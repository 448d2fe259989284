"""Select: which schedule runs, and why a training cannot run under one.

A schedule that the user has named runs unchanged or is refused. For "copying" and "fastest",
TrainStep runs the highest schedule that nothing forbids, and reports the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise

import torch
from torch import nn
from torch.optim import Optimizer

from dpbench.engine.containers import tensors_in
from dpbench.engine.errors import Refused
from dpbench.engine.fast.exchange import NEEDS_DENSE
from dpbench.engine.fast.flat_storage import is_dense
from dpbench.engine.fast.losses import ROUNDED, summed_form
from dpbench.engine.fast.notice import HAS_GRAD_DTYPE, is_watched
from dpbench.engine.fast.parameter_gradients import GradientHooks
from dpbench.engine.fast.stepper import ELEMENTWISE, groups_of
from dpbench.engine.replicate import buffers_of, parameters_of
from dpbench.engine.training import Training
from dpbench.records.schedule import Schedule

EXACT_DTYPES = (torch.float32, torch.float64)
"""Dtypes for which elementwise kernels round an element independently of its position."""


def check(schedule: Schedule, training: Training) -> None:
    """Raise Refused if the engine cannot run this training under a schedule."""
    if reason := next(reasons(schedule, training), ""):
        raise Refused(f"schedule {schedule}: {reason}")


def highest(schedule: Schedule, training: Training, unfit: str) -> tuple[Schedule, str]:
    """Return the highest schedule up to `schedule` that nothing forbids, and what forbids others.

    The results are bitwise equal to those of `reference` (on distinct GPUs: equal within rounding).
    With a single device, the schedule is `reference`. `unfit` is a reason, found in an earlier
    step, for which replicas should not be kept.
    """
    if len(training.devices) == 1:
        return Schedule.REFERENCE, ""
    if unfit:
        return Schedule.CACHED, unfit
    ladder = list(Schedule)
    notes: list[str] = []
    while reason := next(chain(reasons(schedule, training), inexact(schedule, training)), ""):
        notes.append(reason)
        schedule = ladder[ladder.index(schedule) - 1]
    return schedule, "; ".join(dict.fromkeys(notes))


def reasons(schedule: Schedule, training: Training) -> Iterator[str]:
    """Yield each reason why the engine cannot run this training under a schedule."""
    try:
        if schedule.keeps_replicas:
            yield from filter(None, (_local_loss(training), _optimizer(training)))
            yield from filter(None, (_kept(training),))
        if schedule.updates_everywhere:
            yield from filter(None, (_update(training), _gradient(training)))
        if schedule is Schedule.SHARDED:
            yield from filter(None, (_elementwise(training), _flat(training)))
    except Refused as error:
        yield str(error)


def inexact(schedule: Schedule, training: Training) -> Iterator[str]:
    """Yield each reason why a result could differ from that of `reference` in a bit."""
    if schedule.keeps_replicas:
        summed = summed_form(training.loss_fn)
        if summed is not None and not summed.keeps_bits(powers=training.powers):
            yield ROUNDED
    if schedule is not Schedule.SHARDED:
        return
    if any(group.get("fused") for group in training.optimizer.param_groups):
        yield (
            "each device updates all weights, because the rounding of fused optimizers depends on"
            " the position of an element in its tensor"
        )
    if any(p.dtype not in EXACT_DTYPES for p in trained(training.module)):
        yield (
            "each device updates all weights, because the rounding of low-precision kernels depends"
            " on the position of an element in its tensor"
        )


def trained(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters that require gradients, each of them once."""
    return [p for p in parameters_of(module) if p.requires_grad]


def _local_loss(training: Training) -> str:
    if summed_form(training.loss_fn) is None:
        return (
            "each device computes its part of the loss, which needs a loss whose mean has a known"
            " divisor, but the divisor of loss_fn is unknown; use one of torch's losses without"
            " hooks, such as torch.nn.functional.cross_entropy, or a pair (sum_fn, weight_fn)"
        )
    half = any(p.dtype is torch.float16 for p in trained(training.module))
    if half and not isinstance(training.loss_fn, tuple):
        return (
            "the losses of all rows are added before they are divided, and such a sum in fp16, the"
            " dtype of a parameter, is infinite above 65504; use the schedule cached"
        )
    return ""


READ = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The attributes of an optimizer that kept replicas need, besides the methods of every schedule.

From `allreduce` up, the optimizer's class must also be one of torch.optim.
"""


def _optimizer(training: Training) -> str:
    optimizer = training.optimizer
    kind = type(optimizer).__name__
    if isinstance(optimizer, Optimizer):
        missing = next((name for name in READ if not hasattr(optimizer, name)), "")
        what = f"the {kind} has no attribute {missing}" if missing else ""
    else:
        what = f"the optimizer is a {kind}"
    return what and (
        "kept replicas need a complete torch.optim.Optimizer, which tells what it steps, but"
        f" {what}; use schedule='cached'"
    )


def _kept(training: Training) -> str:
    groups_of(training.optimizer, parameters_of(training.module))
    if HAS_GRAD_DTYPE and any(p.grad_dtype != p.dtype for p in trained(training.module)):
        return (
            "kept replicas compute gradients in the dtype of their parameters, but a parameter has"
            " another grad_dtype; use schedule='cached'"
        )
    if any(getattr(part, "sparse", False) for part in training.module.modules()):
        return NEEDS_DENSE.format("a layer has sparse=True")
    if any(buffer.requires_grad for buffer in buffers_of(training.module)):
        return (
            "kept replicas compute no gradients of buffers, but a buffer of the module requires"
            " gradients; use schedule='cached'"
        )
    return ""


def _update(training: Training) -> str:
    kind = type(training.optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return (
            "each device needs a copy of the optimizer, which must therefore be one of torch.optim,"
            f" but the optimizer is {kind.__name__}; use the schedule local"
        )
    if _overlap(trained(training.module)):
        return (
            "each device updates parameters on its own, so that they must share no memory, but two"
            " of them do; use the schedule local"
        )
    return ""


def _gradient(training: Training) -> str:
    """Return why the summed gradients must be complete in the module's parameters, or ""."""
    stepped = {id(p) for group in training.optimizer.param_groups for p in group["params"]}
    wanted = trained(training.module)
    needs: dict[str, Callable[[], bool]] = {
        "several calls accumulate them": lambda: training.accumulate > 1,
        "their norm is clipped": lambda: training.clip_norm is not None,
        "a GradScaler must see them": lambda: training.scaler is not None,
        "the optimizer has a hook or a replaced method": lambda: is_watched(training.optimizer),
        "a parameter has a hook": lambda: bool(GradientHooks(wanted)),
        "no optimizer steps one of them": lambda: any(id(p) not in stepped for p in wanted),
    }
    for need, found in needs.items():
        if found():
            return (
                f"only the first device updates weights, because gradients must be complete there:"
                f" {need}; use the schedule local"
            )
    return ""


def _elementwise(training: Training) -> str:
    if type(training.optimizer) in ELEMENTWISE:
        return ""
    names = ", ".join(one.__name__ for one in ELEMENTWISE)
    return (
        f"an update in shares needs an optimizer that steps every element independently ({names}),"
        f" but the optimizer is {type(training.optimizer).__name__}; use the schedule allreduce"
    )


def _flat(training: Training) -> str:
    """Return why the parameters cannot be views of flat buffers, or ""."""
    module, wanted = training.module, trained(training.module)
    kind = training.devices[0].torch_device.type
    if kind not in ("cpu", "cuda"):
        return (
            f"flat buffers need CPU or CUDA devices, but the device type is {kind}, on which"
            " parameters cannot be views of one buffer; use the schedule allreduce"
        )
    if kind == "cuda" and any(isinstance(part, nn.RNNBase) for part in module.modules()):
        return (
            "flat buffers cannot hold the weights of RNNs on GPUs, where torch packs them into"
            " one buffer itself; use the schedule allreduce"
        )
    if reason := next(filter(None, map(_unlike_a_view, wanted)), ""):
        return f"flat buffers need {reason}, or use the schedule allreduce"
    if kind == "cpu" and any(p.untyped_storage().nbytes() != p.nbytes for p in wanted):
        return (
            "flat buffers need parameters that share no memory with other tensors, but the memory"
            " of one parameter is part of a larger tensor; use the schedule allreduce"
        )
    if reason := _shared(module, wanted):
        return (
            f"flat buffers need parameters that share no memory, but {reason}; use the schedule"
            " allreduce"
        )
    return ""


def _unlike_a_view(parameter: torch.Tensor) -> str:
    """Return why a view of a flat buffer cannot be the parameter, with the way out, or ""."""
    shape = tuple(parameter.shape)
    if type(parameter) is not nn.Parameter:
        return (
            f"ordinary parameters, but the parameter of shape {shape} is a"
            f" {type(parameter).__name__}, whose operations a view does not have: use nn.Parameter"
        )
    if not is_dense(parameter):
        return (
            f"parameters that are dense in memory, but the parameter of shape {shape} has strides"
            f" {parameter.stride()}: set parameter.data = parameter.data.contiguous()"
        )
    return ""


def _shared(module: nn.Module, parameters: Sequence[torch.Tensor]) -> str:
    """Return a clause that says what shares memory with one of the parameters, or ""."""
    if _overlap(parameters):
        return "two of them share memory"
    if any(p.device.type == "cpu" and p.is_shared() for p in parameters):
        return "share_memory() has put one of them into memory that processes share"
    memory = {p.untyped_storage().data_ptr() for p in parameters if p.numel()}
    parameter_ids = set(map(id, parameters_of(module)))
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
