"""dpbench's data-parallel engine, `TrainStep`, under the schedule of the case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpbench.hardware.device import Device
from dpbench.records import Case, Mark
from dpbench.records.schedule import Schedule, known
from dpbench.records.spelling import dashed
from dpbench.records.work import StepSizes, Task
from dpbench.strategies import (
    Forward,
    Memory,
    Role,
    Step,
    Strategy,
    Traits,
    clip_norm_of,
    optimizer_of,
    precision_of,
    scaler_of,
    scheduler_of,
)
from dpbench.strategies._chain import of_schedule

if TYPE_CHECKING:
    import torch

    from dpbench.engine.train_step import TrainStep
    from dpbench.models import Model


class Engine(Strategy):
    """dpbench's data-parallel engine, `TrainStep`, under the schedule of the case."""

    traits = Traits(role=Role.ENGINE)
    memory = Memory.SCHEDULE

    def skip(self, case: Case) -> str:
        """Return the reason why this strategy cannot run a case, or "" if it can.

        Emulated devices have no flat storage. The forward alone runs in dpbench.DataParallel, which
        keeps no replicas between steps.
        """
        if case.zero_grad == "zero":
            return (
                f"{case.strategy} always sets gradients to None, so zero_grad=zero cannot run:"
                f" leave out {dashed('zero_grad')}"
            )
        schedule = known(case.schedule or Schedule.REFERENCE)
        if schedule is None:  # TrainStep selects one that can run
            return ""
        if not case.trains and schedule.keeps_replicas:
            can = ", ".join(one for one in Schedule if not one.keeps_replicas)
            return (
                f"the schedule {schedule} needs TrainStep, but the forward alone runs in"
                f" dpbench.DataParallel: give one of {can} in {dashed('schedules')}"
            )
        if case.precision == "fp16" and schedule.updates_everywhere:
            return (
                f"the schedule {schedule} has complete gradients on no device, but the GradScaler"
                f" of fp16 needs them: give {Schedule.LOCAL} in {dashed('schedules')}, or"
                f" {dashed('precision', 'bf16')}"
            )
        if case.device_kind == "emulated" and schedule is Schedule.SHARDED:
            return (
                "the schedule sharded needs CPU or CUDA devices: parameters on emulated devices"
                " cannot be views of one buffer"
            )
        return ""

    @contextmanager
    def start(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Step]:
        """Yield the engine's training step under the case's schedule."""
        from dpbench.engine.train_step import TrainStep

        module = model.module.to(devices[0].torch_device)
        train_step = TrainStep(
            module,
            model.loss,
            optimizer_of(case, model),
            list(devices),
            case.schedule or Schedule.REFERENCE,
            clip_norm=clip_norm_of(case, model),
            scaler=scaler_of(case),
            mark=mark,
        )
        scheduler = scheduler_of(case, model, train_step.optimizer)

        with train_step:
            yield _Training(case, train_step, scheduler)

    @contextmanager
    def infer(
        self, case: Case, model: Model, devices: Sequence[Device], mark: Mark
    ) -> Iterator[Forward]:
        """Yield the forward of dpbench.DataParallel under the case's schedule."""
        from dpbench.engine import DataParallel

        module = model.module.to(devices[0].torch_device)
        schedule = case.schedule or Schedule.REFERENCE
        yield DataParallel(module, list(devices), schedule=schedule, mark=mark)

    def describe(self, case: Case, sizes: StepSizes) -> list[Task] | None:
        """Return the tasks of a step; None if TrainStep selects the schedule, at run time."""
        schedule = known(case.schedule or Schedule.REFERENCE)
        return None if schedule is None else of_schedule(case, sizes, schedule)


class _Training(Step):
    def __init__(self, case: Case, train_step: TrainStep, scheduler: Any) -> None:
        self._case, self._train_step, self._scheduler = case, train_step, scheduler

    @property
    def settled(self) -> bool:  # type: ignore[override]
        return self._train_step.settled

    def __call__(self, inputs: Any, target: Any) -> torch.Tensor:
        with precision_of(self._case):
            loss = self._train_step(inputs, target)
        if self._scheduler is not None:
            self._scheduler.step()
        return loss


strategy = Engine()
