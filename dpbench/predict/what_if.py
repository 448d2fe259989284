"""Remedies: what a case would gain from another schedule, another strategy, faster links or more work a device."""

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
"""How much faster links are tried: one PCIe generation is twice, NVLink in the place of PCIe far more."""


@dataclass(frozen=True)
class WhatIf:
    """A change, the step in seconds that it leads to, and how many times as many samples a second that gives."""

    model: str
    devices: int
    batch: int
    what: str
    seconds: float
    gain: float


def what_ifs(predictor: Predictor, cases: Sequence[Case]) -> list[WhatIf]:
    """Return what would help DataParallel on the most devices that were asked for, for each model, the best first."""
    found = []
    for model in dict.fromkeys(case.model for case in cases):
        node = predictor.machine.gpu.count
        mine = [case for case in cases if case.model == model and 1 < case.devices <= node]
        if mine:
            most = max(mine, key=lambda case: (case.devices, case.traits.threads, case.batch_size))
            found += sorted(_of(predictor, most), key=lambda one: -one.gain)
    return found


def _of(predictor: Predictor, case: Case) -> Iterator[WhatIf]:
    """Yield the changes to one case, the case as torch.nn.DataParallel runs it first."""
    now = replace(case, strategy=registry.of_role(Role.ENGINE), schedule=schedule.REFERENCE, options=())
    profile, machine, constants = predictor.profile(now), predictor.machine, predictor.constants

    def step(other: Case, c: Constants = constants, m: Machine = machine, p: Profile = profile) -> float:
        return simulation.step(other, p, m, c).seconds

    before = step(now)

    def remedy(what: str, other: Case, seconds: float) -> WhatIf:
        gain = before / seconds * other.batch_size / now.batch_size
        return WhatIf(case.model, other.devices, other.batch_size, what, seconds, gain)

    yield remedy("nothing: DataParallel as torch does it", now, before)
    for name in schedule.climb(schedule.TRAIN_STEP)[1:]:
        other = replace(now, schedule=name)
        yield remedy(f"dpbench's schedule {name}", other, step(other))
    ddp = replace(now, strategy=registry.of_role(Role.CONTROL), schedule="")
    yield remedy("DistributedDataParallel", ddp, step(ddp))
    yield remedy(f"links {FASTER:g} times as fast", now, step(now, constants.changed(bus_scale=FASTER)))
    doubled = replace(now, batch_size=2 * now.batch_size)
    yield remedy("twice the batch", doubled, step(doubled))
    half = replace(machine, host=replace(machine.host, factor=machine.host.factor / 2))
    again = replace(predictor, machine=half).profile(now)  # launches of a traced net take half as long
    yield remedy("a host twice as fast", now, step(now, m=half, p=again))
