"""Legal: which switches of a schedule this module, loss, optimizer and these devices forbid, and why.

An explicit schedule runs as named or is refused. `fastest` sets back what is forbidden, and keeps the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from dpbench.engine.errors import Refused
from dpbench.engine.flat_storage import is_dense
from dpbench.engine.identity import has_hooks, is_watched
from dpbench.engine.losses import Loss
from dpbench.engine.optimizer_state import ELEMENTWISE, groups_of
from dpbench.engine.replicate import unique
from dpbench.hardware.device import Device
from dpbench.records.schedule import Schedule

BEST = Schedule(
    workers="pool", replicas="persistent", storage="flat", loss="local", backward="local", update="sharded",
    optimizer="flat",
)  # fmt: skip
"""What wins where everything is legal. Overlap is left out: it needs a link that is idle during backward."""
FALLBACKS = {
    "loss": {"loss": "gathered", "backward": "joint"},
    "optimizer": {"optimizer": "per_parameter"},
    "storage": {"storage": "separate", "optimizer": "per_parameter"},
    "update": {"update": "root", "optimizer": "per_parameter"},
}
"""What `fastest` sets back when a switch may not stand as it does in `BEST`."""
CACHED = Schedule(workers="pool", replicas="cached")
"""The schedule of `fastest` where replicas may not keep their weights."""
EXACT_DTYPES = (torch.float32, torch.float64)
"""Dtypes whose elementwise kernels make the same bits wherever an element lies in a tensor."""


@dataclass(frozen=True)
class Subject:
    """A training that schedules are checked for. `powers`: losses are scaled by powers of two only, if at all."""

    module: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    devices: Sequence[Device]
    powers: bool = True

    @property
    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that take part in training."""
        return trained(self.module)


def trained(module: nn.Module) -> list[torch.Tensor]:
    """Return a module's parameters that want gradients, each once."""
    return [p for p in unique(module.parameters()) if p.requires_grad]


Reason = Callable[[Schedule, Subject], str]


def _local_loss(schedule: Schedule, subject: Subject) -> str:
    if schedule.loss == "local" and subject.loss.summed() is None:
        return (
            "loss=local needs a loss whose mean has a known divisor: one of torch's own, such as "
            "torch.nn.functional.cross_entropy, without hooks, or a pair (sum_fn, weight_fn)"
        )
    return ""


def _persistent(schedule: Schedule, subject: Subject) -> str:
    if schedule.replicas != "persistent":
        return ""
    groups_of(subject.optimizer, unique(subject.module.parameters()))
    if any(getattr(part, "sparse", False) for part in subject.module.modules()):
        return "replicas=persistent needs dense gradients; use schedule='cached', or sparse=False"
    if any(buffer.requires_grad for buffer in subject.module.buffers()):
        return "replicas=persistent gives no gradients to buffers, and one wants them; use schedule='cached'"
    return ""


def _storage(schedule: Schedule, subject: Subject) -> str:
    shared = any(p.untyped_storage().nbytes() != p.nbytes for p in subject.trained if is_dense(p))
    if schedule.storage == "flat" and subject.devices[0].torch_device.type == "cpu" and shared:
        return "storage=flat needs parameters that share no memory with other tensors; use storage=separate"
    return storage(schedule, subject.module, subject.devices)


def storage(schedule: Schedule, module: nn.Module, devices: Sequence[Device]) -> str:
    """Return why parameters cannot move into the memory that a schedule wants them in; "" if they can."""
    if schedule.storage != "flat":
        return ""
    kind = devices[0].torch_device.type
    if kind not in ("cpu", "cuda"):
        return f"storage=flat needs CPU or CUDA devices: parameters on {kind} cannot be views of one buffer"
    if kind == "cuda" and any(isinstance(part, nn.RNNBase) for part in module.modules()):
        return "storage=flat needs a module without RNNs on CUDA: cuDNN packs their weights itself"
    for parameter in (wanted := trained(module)):
        if not is_dense(parameter):
            return (
                f"storage=flat needs parameters without holes; one of shape {tuple(parameter.shape)} has strides "
                f"{parameter.stride()}: make it .contiguous(), or use storage=separate"
            )
    if _overlap(wanted):
        return "storage=flat needs parameters that share no memory, and two do; use storage=separate"
    return ""


def _update(schedule: Schedule, subject: Subject) -> str:
    kind = type(subject.optimizer)
    if schedule.update == "root":
        return ""
    if schedule.update == "sharded" and kind not in ELEMENTWISE:
        return (
            "update=sharded needs an optimizer that treats parameters one by one, and does not know "
            f"{kind.__name__}; use update=root"
        )
    if not kind.__module__.startswith("torch.optim."):
        return (
            "update=each needs one of torch's own optimizers, which it can make again for each device, not "
            f"{kind.__name__}; use update=root"
        )
    if _overlap(subject.trained):
        return f"update={schedule.update} needs parameters that share no memory, and two do; use update=root"
    return ""


def _flat_optimizer(schedule: Schedule, subject: Subject) -> str:
    if schedule.optimizer == "flat" and type(subject.optimizer) not in ELEMENTWISE:
        names = ", ".join(one.__name__ for one in ELEMENTWISE)
        return f"optimizer=flat needs an elementwise optimizer ({names}), not {type(subject.optimizer).__name__}"
    return ""


def _exact_loss(schedule: Schedule, subject: Subject) -> str:
    summed = subject.loss.summed() if schedule.loss == "local" else None
    if summed is None or summed.keeps_bits(powers=subject.powers):
        return ""
    return "the loss is taken over the gathered batch: by parts, its gradients would differ in the last bits"


def _exact_optimizer(schedule: Schedule, subject: Subject) -> str:
    if schedule.optimizer != "flat":
        return ""
    if any(group.get("fused") for group in subject.optimizer.param_groups):
        return "the optimizer steps parameters one by one: fused kernels round an element by its place in a tensor"
    if any(p.dtype not in EXACT_DTYPES for p in subject.trained):
        return "the optimizer steps parameters one by one: low precision rounds an element by its place in a tensor"
    return ""


def _unwatched(schedule: Schedule, subject: Subject) -> str:
    if schedule.replicas == "persistent" and has_hooks(subject.trained):
        return "a parameter has a hook, which is to see the reduced gradient of autograd"
    return ""


def _unwatched_optimizer(schedule: Schedule, subject: Subject) -> str:
    if schedule.update != "root" and is_watched(subject.optimizer):
        return "the optimizer's step is hooked or replaced, and is to see the module's own parameters"
    return ""


ALWAYS: dict[Reason, str] = {
    _persistent: "replicas",
    _local_loss: "loss",
    _storage: "storage",
    _update: "update",
    _flat_optimizer: "optimizer",
}
"""What forbids a schedule, each with the switch that it forbids."""
FOR_FASTEST: dict[Reason, str] = {
    _unwatched: "replicas",
    _unwatched_optimizer: "update",
    _exact_loss: "loss",
    _exact_optimizer: "optimizer",
}
"""What `fastest` avoids besides: detours, and bits that differ from those of `reference`."""


def hindrances(schedule: Schedule, subject: Subject, reasons: dict[Reason, str]) -> Iterator[tuple[str, str]]:
    """Yield (switch, reason) for all that forbids a schedule."""
    for find, switch in reasons.items():
        try:
            reason = find(schedule, subject)
        except Refused as error:
            reason = str(error)
        if reason:
            yield switch, reason


def check(schedule: Schedule, subject: Subject) -> None:
    """Raise Refused, with the reason, where a schedule cannot train the subject."""
    if isinstance(subject.optimizer, torch.optim.LBFGS):
        raise Refused(
            "LBFGS asks for the loss several times a step, through a closure; TrainStep takes one step at a time"
        )
    for _, reason in hindrances(schedule, subject, ALWAYS):
        raise Refused(f"schedule {str(schedule)!r}: {reason}")


def best_legal(subject: Subject) -> tuple[Schedule, list[str]]:
    """Return the best schedule that makes the bits of `reference`, and the reason for each switch that it sets back."""
    if len(subject.devices) == 1:
        return Schedule(), []
    schedule, notes = BEST, []
    while found := next(hindrances(schedule, subject, ALWAYS | FOR_FASTEST), None):
        switch, reason = found
        notes.append(reason)
        schedule = CACHED if switch == "replicas" else replace(schedule, **FALLBACKS[switch])
    return schedule, notes


def _overlap(parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether two parameters share memory without being the same object."""
    spans = sorted(
        (p.untyped_storage().data_ptr(), p.storage_offset() * p.itemsize, p.storage_offset() * p.itemsize + _extent(p))
        for p in parameters
        if p.layout is torch.strided and p.device.type in ("cpu", "cuda") and p.numel()
    )
    return any(one[0] == other[0] and other[1] < one[2] for one, other in pairwise(spans))


def _extent(tensor: torch.Tensor) -> int:
    """Return how many bytes a tensor spans in its storage."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize
