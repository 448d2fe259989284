"""What if: predictions of a step after one change, such as faster links or a larger batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dpbench.analysis.stats import quotient
from dpbench.predict.cases import Predictor
from dpbench.records import Case, registry
from dpbench.records.registry import Role
from dpbench.records.schedule import EFFECTS, Schedule

FASTER = 4.0
"""The factor of bus bandwidths in the what-if with faster links.

The next PCIe generation gives a factor of 2, and NVLink instead of PCIe gives more.
"""


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change of a case or of its machine, with the predicted duration of the changed step.

    `devices` and `batch` are those of the changed case. `gain` is the throughput in samples per
    second with the change, divided by that without, and has the 80 % interval from `gain_low` to
    `gain_high`. `schedule` is the schedule that the change sets; it is empty for all other changes.
    """

    model: str
    devices: int
    batch: int
    change: str
    seconds: float
    gain: float
    gain_low: float
    gain_high: float
    schedule: str = ""


def what_ifs(predictor: Predictor, cases: Sequence[Case]) -> list[WhatIf]:
    """Return the what-ifs for one case of each model.

    Their order is: DistributedDataParallel; the engine's schedules by descending gain; other
    changes (a faster machine, a larger batch) by descending gain; and the unchanged case. For each
    model, the case with the most devices on one node is selected, if there are two or more.
    """
    ordered = []
    for model in dict.fromkeys(case.model for case in cases):
        node = predictor.machine.gpu.count
        candidates = [case for case in cases if case.model == model and 1 < case.devices <= node]
        if candidates:
            most = max(
                candidates, key=lambda case: (case.devices, case.traits.threads, case.batch_size)
            )
            unchanged, ddp, *rest = _of(predictor, most)
            rest.sort(key=lambda one: (not one.schedule, -one.gain))
            ordered += [ddp, *rest, unchanged]
    return ordered


def _of(predictor: Predictor, case: Case) -> Iterator[WhatIf]:
    """Yield the unchanged case, then DistributedDataParallel, then the others.

    The unchanged case has the schedule of torch.nn.DataParallel; all gains are relative to it.
    """
    now = replace(
        case, strategy=registry.of_role(Role.ENGINE), schedule=Schedule.REFERENCE, options=()
    )
    before = predictor.predict(now)

    def what_if(
        change: str, other: Case, schedule: str = "", changed: Predictor = predictor
    ) -> WhatIf:
        after = changed.predict(other)
        ratio = quotient(before.step, after.step, before.draws, after.draws).scaled(
            other.batch_size / now.batch_size
        )
        return WhatIf(
            model=case.model,
            devices=other.devices,
            batch=other.batch_size,
            change=change,
            seconds=after.seconds,
            gain=ratio.value,
            gain_low=ratio.low,
            gain_high=ratio.high,
            schedule=schedule,
        )

    yield what_if("unchanged: the schedule of torch.nn.DataParallel", now)
    yield what_if(
        "DistributedDataParallel",
        replace(now, strategy=registry.of_role(Role.CONTROL), schedule=""),
    )
    for name in EFFECTS:
        yield what_if(f"dpbench's schedule {name}", replace(now, schedule=name), name)
    faster = replace(predictor, constants=replace(predictor.constants, bus_scale=FASTER))
    yield what_if(f"links {FASTER:g} times as fast", now, changed=faster)
    yield what_if("twice the batch", replace(now, batch_size=2 * now.batch_size))
    quick = replace(predictor, constants=replace(predictor.constants, host_scale=0.5))
    yield what_if("a host twice as fast", now, changed=quick)
