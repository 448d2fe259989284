"""What if: predictions of a step after one change, such as another schedule, faster links or a larger batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dpbench.predict import simulation
from dpbench.predict.cases import Predictor
from dpbench.predict.constants import Constants
from dpbench.records import Case, Profile, registry, schedule
from dpbench.records.machine import Machine
from dpbench.records.registry import Role

FASTER = 4.0
"""The factor by which bus bandwidths are multiplied in the what-if with faster links.

The next PCIe generation gives a factor of 2, and NVLink instead of PCIe gives more.
"""


@dataclass(frozen=True)
class WhatIf:
    """A change of a case or of its machine, with the predicted duration of the changed step in seconds.

    `change` describes the change; `devices` and `batch` are those of the changed case. `gain` is the throughput in
    samples per second with the change, divided by the throughput without the change. `schedule` is the rung to which
    the change sets the schedule; it is empty for all other changes.
    """

    model: str
    devices: int
    batch: int
    change: str
    seconds: float
    gain: float
    schedule: str = ""


def what_ifs(predictor: Predictor, cases: Sequence[Case]) -> list[WhatIf]:
    """Return the what-ifs for one case of each model: DistributedDataParallel, schedules, and changes of the machine.

    Schedules and changes of the machine are each in descending order of gain; a case without a change comes last.

    For each model, the case with the most devices on one node is selected. A model without a case on two or more
    devices of one node has no what-ifs.
    """
    found = []
    for model in dict.fromkeys(case.model for case in cases):
        node = predictor.machine.gpu.count
        mine = [case for case in cases if case.model == model and 1 < case.devices <= node]
        if mine:
            most = max(mine, key=lambda case: (case.devices, case.traits.threads, case.batch_size))
            unchanged, ddp, *rest = _of(predictor, most)
            found += [ddp, *sorted(rest, key=lambda one: (not one.schedule, -one.gain)), unchanged]
    return found


def _of(predictor: Predictor, case: Case) -> Iterator[WhatIf]:
    """Yield the what-ifs of one case.

    The first what-if has no change: the engine runs the case with the schedule of torch.nn.DataParallel. All gains are
    relative to this what-if. The second one is DistributedDataParallel.
    """
    now = replace(case, strategy=registry.of_role(Role.ENGINE), schedule=schedule.REFERENCE, options=())
    profile, machine, constants = predictor.profile(now), predictor.machine, predictor.constants

    def step(other: Case, c: Constants = constants, m: Machine = machine, p: Profile = profile) -> float:
        return simulation.step(other, p, m, c).seconds

    before = step(now)

    def what_if(change: str, other: Case, seconds: float, rung: str = "") -> WhatIf:
        gain = before / seconds * other.batch_size / now.batch_size
        return WhatIf(case.model, other.devices, other.batch_size, change, seconds, gain, rung)

    yield what_if("unchanged: the schedule of torch.nn.DataParallel", now, before)
    ddp = replace(now, strategy=registry.of_role(Role.CONTROL), schedule="")
    yield what_if("DistributedDataParallel", ddp, step(ddp))
    for name in schedule.climb(schedule.TRAIN_STEP)[1:]:
        other = replace(now, schedule=name)
        yield what_if(f"dpbench's schedule {name}", other, step(other), name)
    yield what_if(f"links {FASTER:g} times as fast", now, step(now, constants.changed(bus_scale=FASTER)))
    doubled = replace(now, batch_size=2 * now.batch_size)
    yield what_if("twice the batch", doubled, step(doubled))
    half = replace(machine, host=replace(machine.host, factor=machine.host.factor / 2))
    again = replace(predictor, machine=half).profile(now)  # the launches of a traced profile are faster, too
    yield what_if("a host twice as fast", now, step(now, m=half, p=again))
