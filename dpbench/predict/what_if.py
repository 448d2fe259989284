"""What if: the gain of a case from another schedule or strategy, faster links, a faster host, or a larger batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dpbench.predict import simulation
from dpbench.predict.cases import Predictor
from dpbench.predict.constants import Constants
from dpbench.records import Case, Profile, registry, schedule
from dpbench.records.machine import Machine
from dpbench.records.traits import Role

FASTER = 4.0
"""The assumed speed-up of faster links: the next PCIe generation gives a factor of 2, NVLink instead of PCIe more."""


@dataclass(frozen=True)
class WhatIf:
    """A change of a case, with the duration of the changed step in seconds.

    `gain` is the throughput in samples per second with the change, divided by that without.
    """

    model: str
    devices: int
    batch: int
    change: str
    seconds: float
    gain: float


def what_ifs(predictor: Predictor, cases: Sequence[Case]) -> list[WhatIf]:
    """Return the changes for each model's case with the most devices on one node, the largest gain first."""
    found = []
    for model in dict.fromkeys(case.model for case in cases):
        node = predictor.machine.gpu.count
        mine = [case for case in cases if case.model == model and 1 < case.devices <= node]
        if mine:
            most = max(mine, key=lambda case: (case.devices, case.traits.threads, case.batch_size))
            found += sorted(_of(predictor, most), key=lambda one: -one.gain)
    return found


def _of(predictor: Predictor, case: Case) -> Iterator[WhatIf]:
    """Yield the predictions of changes to one case.

    The first is the case under the schedule of torch.nn.DataParallel, with which the others are compared.
    """
    now = replace(case, strategy=registry.of_role(Role.ENGINE), schedule=schedule.REFERENCE, options=())
    profile, machine, constants = predictor.profile(now), predictor.machine, predictor.constants

    def step(other: Case, c: Constants = constants, m: Machine = machine, p: Profile = profile) -> float:
        return simulation.step(other, p, m, c).seconds

    before = step(now)

    def what_if(change: str, other: Case, seconds: float) -> WhatIf:
        gain = before / seconds * other.batch_size / now.batch_size
        return WhatIf(case.model, other.devices, other.batch_size, change, seconds, gain)

    yield what_if("unchanged: DataParallel as torch runs it", now, before)
    for name in schedule.climb(schedule.TRAIN_STEP)[1:]:
        other = replace(now, schedule=name)
        yield what_if(f"dpbench's schedule {name}", other, step(other))
    ddp = replace(now, strategy=registry.of_role(Role.CONTROL), schedule="")
    yield what_if("DistributedDataParallel", ddp, step(ddp))
    yield what_if(f"links {FASTER:g} times as fast", now, step(now, constants.changed(bus_scale=FASTER)))
    doubled = replace(now, batch_size=2 * now.batch_size)
    yield what_if("twice the batch", doubled, step(doubled))
    half = replace(machine, host=replace(machine.host, factor=machine.host.factor / 2))
    again = replace(predictor, machine=half).profile(now)  # the launches of a traced profile are faster, too
    yield what_if("a host twice as fast", now, step(now, m=half, p=again))
