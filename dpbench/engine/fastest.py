"""Fastest: the best schedule that needs no tolerance, for this module, loss, optimizer and devices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from dpbench.devices import Device
from dpbench.engine.losses import Loss
from dpbench.engine.persistent import check_hooks
from dpbench.engine.stepper import groups_of, why_not
from dpbench.schedule import Schedule

BEST = Schedule(
    workers="pool", replicas="persistent", storage="flat", loss="local", backward="local", update="sharded",
    optimizer="flat",
)  # fmt: skip
"""What wins where everything is legal. Overlap is left out: it needs a link that is idle during backward."""

PAUSE, PAIRS = 2, 6
"""Steps that no trial counts, and pairs of timed ones: two candidates settle within 14 steps."""


def best_legal(
    module: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    devices: Sequence[Device],
    conditions: Sequence[str],
) -> Schedule:
    """Return the best schedule with what this module, loss or optimizer forbids set back."""
    if len(devices) == 1:
        return Schedule()
    kind = devices[0].torch_device.type
    schedule = BEST
    rnn = any(isinstance(part, nn.RNNBase) for part in module.modules())
    if kind not in ("cpu", "cuda") or (kind == "cuda" and rnn):
        schedule = replace(schedule, storage="separate", optimizer="per_parameter")
    if not loss.has_sum:
        schedule = replace(schedule, loss="gathered", backward="joint")
    if why_not(optimizer, schedule):
        schedule = replace(schedule, optimizer="per_parameter", update="root")
    if not _may_persist(module, optimizer):
        schedule = Schedule(workers="pool", replicas="cached")
    return schedule.check(*conditions)


def _may_persist(module: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether replicas may keep their weights: no hooks on parameters, no sparse gradients, no strangers."""
    if any(getattr(part, "sparse", False) for part in module.modules()):
        return False
    try:
        check_hooks(module)
        groups_of(optimizer, list({id(p): p for p in module.parameters()}.values()))
    except ValueError:
        return False
    return True


class Trials:
    """Takes turns between a pool of threads and none over the first steps, then settles for the faster.

    Threads win where kernels are long; where they are short, two threads cost each other the interpreter's lock. The
    choice moves no bit.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._candidates = [schedule, replace(schedule, workers="serial")] if len(devices) > 1 else [schedule]
        self._seconds: dict[str, list[float]] = {one.workers: [] for one in self._candidates}
        self._started_s: float | None = None
        self._running = schedule
        self._order = self._turns()
        self.settled = len(self._candidates) == 1

    def _turns(self) -> Iterator[tuple[Schedule, bool]]:
        """Yield which schedule runs next, and whether it counts."""
        for _ in range(PAUSE):
            yield self._candidates[0], False
        for _ in range(PAIRS):
            for one in self._candidates:
                yield one, True

    def next(self) -> Schedule:
        """Return the schedule of the step that begins now, having timed the one before."""
        for device in self._devices:
            device.synchronize()
        now_s = time.perf_counter()
        if self._started_s is not None:
            self._seconds[self._running.workers].append(now_s - self._started_s)
        if self.settled:
            return self._running
        turn = next(self._order, None)
        if turn is None:
            self.settled = True
            return min(self._candidates, key=lambda one: statistics.median(self._seconds[one.workers]))
        self._running, counts = turn
        self._started_s = now_s if counts else None
        return self._running
