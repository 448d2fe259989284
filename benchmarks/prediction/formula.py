"""Formula: the duration of a step by formula, calculated within microseconds.

The formulas describe the same mechanisms as the simulation, but were written independently, with
sums and maxima instead of events. They are used for checks of the simulation in tests, for fits of
the constants, and for the intervals and calibrations of the scoreboard.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from benchmarks.prediction.loops import PLAIN, LoopDifferences
from dpbench.predict import network
from dpbench.predict.constants import DEFAULT, Constants, HostCosts
from dpbench.predict.machine import Machine
from dpbench.predict.network import DeviceGroup
from dpbench.predict.work import Cost, Profile
from dpbench.records import Case, Phase, registry
from dpbench.records.registry import Role
from dpbench.records.schedule import Schedule
from dpbench.strategies import OPTIMIZER_PASSES, buckets

KNOWN = (Role.BASELINE, Role.WRAPPER, Role.ENGINE, Role.CONTROL)
"""The roles of the strategies that have a formula.

Of the engine's schedules, only `reference` has a formula.
"""


def seconds(
    case: Case,
    profile: Profile,
    machine: Machine,
    constants: Constants = DEFAULT,
    *,
    phases: Collection[Phase] = tuple(Phase),
    loop: LoopDifferences = PLAIN,
) -> float:
    """Return the duration of a step in seconds, calculated by formula.

    There are formulas for one device, for torch.nn.DataParallel (also used for the engine's
    schedule `reference`), and for DistributedDataParallel.

    `phases` and `loop` have the same meaning as in `loops.step`. Raises ValueError for a case
    without a formula.
    """
    traits = case.traits
    if traits.role not in KNOWN or case.schedule not in ("", Schedule.REFERENCE):
        known = ", ".join(map(registry.of_role, KNOWN))
        raise ValueError(
            f"there is no formula for {case.label}; formulas exist only for the strategies {known},"
            " and only with the schedule reference or without a schedule"
        )
    terms = _Terms(case, profile, machine, constants, phases, loop)
    if case.devices == 1 or traits.one_device:
        return terms.alone()
    return terms.ddp() if traits.ranks else terms.data_parallel()


class _Terms:
    """The durations in seconds that add up to the step of a case.

    A phase that is not in `phases` takes 0 s.
    """

    def __init__(
        self,
        case: Case,
        profile: Profile,
        machine: Machine,
        constants: Constants,
        phases: Collection[Phase],
        loop: LoopDifferences,
    ) -> None:
        self.loop = loop
        self.case, self.p, self.machine, self.c, self.phases = (
            case,
            profile,
            machine,
            constants,
            phases,
        )
        self.n, self.rows, self.host = (
            len(case.rows),
            case.rows[0],
            HostCosts.of(machine.host, constants),
        )
        self.group = DeviceGroup(machine, case.devices, constants)
        self.memory = machine.gpu.memory_bytes_per_s or constants.memory_bytes_per_s

    def on(self, phase: Phase, seconds: float) -> float:
        """Return `seconds` if `phase` is one of the phases to time, else 0."""
        return seconds if phase in self.phases else 0.0

    def alone(self) -> float:
        """Return the duration in seconds of a step on one device."""
        scatter = self.on(Phase.SCATTER, self.pageable(self.rows))
        return (
            scatter + self.forward(1) + self.loss(self.rows) + self.backward(0) + self.optimizer()
        )

    def data_parallel(self) -> float:
        """Return the duration in seconds of a step with torch.nn.DataParallel."""
        state = self.p.parameter_bytes + self.p.buffer_bytes
        tensors = self.p.parameter_tensors + self.p.buffer_tensors
        copied = self.host.module_s * self.p.modules * self.n
        joined = self.host.tensor_s * self.n
        replicate = joined * tensors + max(copied, self.group.coalesced_s("broadcast", state))
        reduce = joined * self.p.parameter_tensors + self.group.coalesced_s(
            "reduce", self.p.parameter_bytes
        )
        return (
            self.on(Phase.SCATTER, self.scatter())
            + self.on(Phase.REPLICATE, replicate)
            + self.forward(self.n)
            + self.on(Phase.GATHER, self.moved(self.p.output_bytes))
            + self.loss(sum(self.case.rows))
            + self.backward(self.n - 1)
            + self.on(Phase.BACKWARD, reduce)
            + self.optimizer()
        )

    def ddp(self) -> float:
        """Return the duration in seconds of a step of DistributedDataParallel.

        Buckets are reduced one by one, during or after backward. The slowest rank determines the
        duration.
        """
        late = self.loop.late_reduction
        backward = self.backward(0, overlapped=not late)
        sizes = buckets(self.p.sizes)
        ended = 0.0
        for number, size in enumerate(sizes):
            ready = backward if late else backward * (number + 1) / len(sizes)
            ended = max(ended, ready) + self.group.one_s("all_reduce", size)
        before = (
            self.on(Phase.SCATTER, self.pageable(self.rows))
            + self.forward(1)
            + self.loss(self.rows)
        )
        step = before + self.on(Phase.BACKWARD, max(ended, backward)) + self.optimizer()
        return step * (1 + self.c.variation * math.sqrt(2 * math.log(self.case.devices)))

    def pageable(self, rows: int) -> float:
        """Return the duration in seconds of copying the inputs of `rows` samples to one device.

        The inputs are in pageable memory.
        """
        size = rows * self.p.input_bytes
        rate = self.machine.host.pageable_bytes_per_s or self.c.pageable_bytes_per_s
        return self.c.copy_s + size / rate if size else 0.0

    def scatter(self) -> float:
        """Return the duration in seconds of copying a batch's inputs from host to all devices."""
        if self.loop.batch_first:
            return self.pageable(sum(self.case.rows)) + self.moved(self.p.input_bytes)
        return sum(self.pageable(rows) for rows in self.case.rows)

    def moved(self, size: float) -> float:
        """Return the duration in seconds of copies between device 0 and every other device.

        The copies run one after another. Each contains the samples of one device, and `size` is the
        number of bytes per sample.
        """
        if not size:
            return 0.0
        way = network.route(self.machine, "gpu0", "gpu1")
        rate = min(network.capacities(self.machine)[hop] for hop in way)
        return (self.n - 1) * (self.c.copy_s + self.rows * size / rate)

    def forward(self, threads: int) -> float:
        """Return the duration in seconds of forward on `threads` threads, one per device."""
        known = _at(self.p.forward, self.rows)
        launches = min(self.host.launch_s * self.p.forward_launches, self.c.host_share * known)
        crowded = launches * threads * (1 + self.host.hand_off * (threads - 1))
        started = self.host.thread_s * threads if threads > 1 else 0.0
        return self.on(Phase.FORWARD, max(known, crowded, started))

    def backward(self, others: int, *, overlapped: bool = False) -> float:
        """Return the duration in seconds of backward on one device.

        Meanwhile, `others` further devices of the same process run backward. With `overlapped`,
        gradients are reduced during backward, which slows down the kernels of backward.
        """
        known = _at(self.p.backward, self.rows)
        launches = min(
            self.host.backward_launch_s * self.p.backward_launches, self.c.host_share * known
        )
        kernels = self.group.beside_s(known, self.p.parameter_bytes) if overlapped else known
        return self.on(Phase.BACKWARD, max(kernels, launches * (1 + self.c.contention * others)))

    def loss(self, rows: int) -> float:
        """Return the duration in seconds of the loss of `rows` samples on one device."""
        if self.p.loss is not None:
            return self.on(Phase.LOSS, self.p.loss.at(rows))
        return self.on(Phase.LOSS, rows * self.p.output_bytes / self.memory)

    def optimizer(self) -> float:
        """Return the duration in seconds of the optimizer step on one device."""
        if self.p.optimizer is not None:
            return self.on(Phase.OPTIMIZER, self.p.optimizer.at(self.rows))
        moved = OPTIMIZER_PASSES.get(self.case.optimizer, 5) * self.p.parameter_bytes / self.memory
        launches = self.host.update_s * self.p.parameter_tensors
        return self.on(Phase.OPTIMIZER, max(moved, launches))


def _at(cost: Cost | None, rows: int) -> float:
    return cost.at(rows) if cost else 0.0
