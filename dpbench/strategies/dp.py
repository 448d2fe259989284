"""dpbench's own engine: a thin adapter over TrainStep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark, Profile, Task
from dpbench.records.schedule import FASTEST, REFERENCE, TRAIN_STEP, Schedule, best, parse
from dpbench.strategies import Step, optimizer_of, precision_of, single
from dpbench.strategies._chain import Chain

if TYPE_CHECKING:
    import torch

    from dpbench.models import Model


def skip(case: Case) -> str:
    """Refuse flat storage on emulated devices."""
    if case.device_kind == "emulated" and case.schedule not in ("", FASTEST) and parse(case.schedule).storage == "flat":
        return "storage=flat needs CPU or CUDA devices: emulated parameters cannot be views of one buffer"
    return ""


@contextmanager
def start(case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
    """Yield the engine's training step on the case's schedule."""
    from dpbench.engine.train_step import TrainStep

    module = model.module.to(devices[0].torch_device)
    train_step = TrainStep(
        module, model.loss, optimizer_of(case), list(devices), case.schedule or "reference", mark=mark
    )

    def step(inputs: Any, target: Any) -> torch.Tensor:
        with precision_of(case):
            return train_step(inputs, target)

    with train_step:
        yield step


def tasks(case: Case, profile: Profile) -> list[Task]:
    """Return the schedule's tasks; `fastest` is taken for the best exact rung."""
    return single.tasks(case, profile) if case.devices == 1 else Chain(case, profile, schedule_of(case)).tasks()


def schedule_of(case: Case) -> Schedule:
    """Return the switches of a case's schedule."""
    return best(TRAIN_STEP) if case.schedule == FASTEST else parse(case.schedule or REFERENCE)
