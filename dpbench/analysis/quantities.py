"""Quantities: one record for each number of a case that has an interval, and the rows as records.

CSV, data frame, the page's file, trackers and the table in docs/measuring.md take a number's key,
its value and what it means from here; a test compares tables and JSON, which read rows, with them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from dpbench.analysis.summary import PERCENTILES, Row
from dpbench.records import CASE_FIELDS, names, words
from dpbench.records.disturbance import NOISY
from dpbench.records.estimate import Estimate
from dpbench.records.ledger import PHASES

DEVICES = 8
"""Records have at least this many devices, so that those of different runs have equal names."""
OWN, COMMON = "own", "common"
"""The rounds of the case, and those that it and its baseline have."""
BOOTSTRAP = "bootstrap over rounds"
WITH_UNIT = {"s": "{}_s", "samples/s": "samples_per_s", "J/sample": "j_per_sample"}
"""How JSON and trackers spell the key of a number in this unit; in any other, it is the key."""
SPELLED_APART = (
    *("model", "strategy", "schedule", "devices", "device_kind", "batch_size", "options"),
    *("placement", "unverified"),
)
"""The fields of a case that `_key` spells apart from the others; labels say the last two."""
UNKEYED = ("MEASURED", "CPU-ONLY", "EMULATED", NOISY)
"""The labels that keys leave out: the kind of device says two, and NOISY changes between runs."""


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The definition of a number of a case.

    `of` returns it from a row, in `unit`; None if the row lacks it. `statistic` says what is
    computed from the timed steps, `rounds` from which rounds (`OWN` or `COMMON`), and `interval`
    what Student's interval is made from.
    """

    key: str
    unit: str
    of: Callable[[Row], Estimate | None]
    statistic: str
    rounds: str
    interval: str

    @property
    def name(self) -> str:
        """Return the key with the unit in it, as JSON and trackers spell it."""
        return WITH_UNIT.get(self.unit, "{}").format(self.key)

    def entries(self, row: Row) -> dict[str, object]:
        """Return the entries of the number in a record; see `entries`."""
        return entries(self.key, self.of(row))


def _percentile(number: int) -> Quantity:
    return Quantity(
        key=f"p{number}",
        unit="s",
        of=lambda row: row.percentiles.get(number),
        statistic=f"median of the rounds' {number} % quantiles",
        rounds=OWN,
        interval=BOOTSTRAP,
    )


QUANTITIES = (
    Quantity(
        key="step",
        unit="s",
        of=attrgetter("step"),
        statistic="median of the rounds' medians",
        rounds=OWN,
        interval=BOOTSTRAP,
    ),
    Quantity(
        key="mean",
        unit="s",
        of=attrgetter("mean"),
        statistic="mean of the rounds' means",
        rounds=OWN,
        interval="logarithms of the rounds",
    ),
    Quantity(
        key="throughput",
        unit="samples/s",
        of=attrgetter("throughput"),
        statistic="batch over the mean step",
        rounds=OWN,
        interval="that of the mean step",
    ),
    Quantity(
        key="speedup",
        unit="×",
        of=attrgetter("speedup"),
        statistic="centre of the ratios of the rounds' medians",
        rounds=COMMON,
        interval="bootstrap, and what others can have taken",
    ),
    Quantity(
        key="efficiency",
        unit="1",
        of=attrgetter("efficiency"),
        statistic="speed-up over the number of devices",
        rounds=COMMON,
        interval="that of the speed-up",
    ),
    Quantity(
        key="peak_share",
        unit="1",
        of=attrgetter("peak_share"),
        statistic="seconds of a step's operations at the GPUs' peak, over the step",
        rounds=OWN,
        interval="that of the step",
    ),
    Quantity(
        key="imbalance",
        unit="×",
        of=attrgetter("imbalance"),
        statistic="device 0's busy time over the others' mean",
        rounds=OWN,
        interval=BOOTSTRAP,
    ),
    Quantity(
        key="energy",
        unit="J/sample",
        of=attrgetter("energy"),
        statistic="energy of a sample: mean of the rounds' joules of all GPUs, by NVML",
        rounds=OWN,
        interval="the rounds",
    ),
    *map(_percentile, PERCENTILES),
)


def entries(name: str, number: Estimate | None) -> dict[str, object]:
    """Return the entries of a number in a record; all are None for None.

    They are value, low, high and withheld, the reason why reports do not show it, or None.
    """
    parts = {f"{name}_{part}": getattr(number, part, None) for part in ("value", "low", "high")}
    return parts | {f"{name}_withheld": (number.doubt or None) if number else None}


def records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Return the numbers of each row by name; every row has the same names.

    Each estimate has the entries of `entries`. The names are the same for every run, except for
    devices beyond the first eight.
    """
    count = max([DEVICES, *(device + 1 for row in rows for device in (*row.busy, *row.memory))])
    return [_record(row, count) for row in rows]


def _record(row: Row, devices: int) -> dict[str, object]:
    record: dict[str, object] = {f.name: getattr(row.case, f.name) for f in CASE_FIELDS}
    record |= {
        "status": row.outcome,
        "verified": row.verified,
        "rounds": row.rounds,
        "steps": row.steps,
    }
    for quantity in QUANTITIES:
        record |= quantity.entries(row)
    for number in _lacking(row):
        record[f"p{number}_withheld"] = words.NOT_ENOUGH_STEPS
    record["peak_source"] = row.peak_source
    record |= {f"phase_{name}_s": row.phases.get(name) for name in PHASES}
    record |= {f"busy_{device}_s": row.busy.get(device) for device in range(devices)}
    record |= {f"memory_{device}_bytes": row.memory.get(device) for device in range(devices)}
    return record | {"scaling": row.scaling, "labels": " ".join(row.labels), "reason": row.reason}


def _lacking(row: Row) -> list[int]:
    """Return the percentiles for which a measured row has too few steps."""
    timed = row.step and row.source.timed
    return [number for number in PERCENTILES if timed and number not in row.percentiles]


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the numbers of all rows by a key such as "mlp/dp/x2/cpu/batch_64/step_s".

    Numbers in doubt, those that are not finite, and percentiles of too few steps are NaN.
    docs/integrations.md explains the keys, which do not depend on the other rows. If the keys of
    two cases have the same spelling, both have the beginning of the case's fingerprint, too.
    """
    keys = [*map(_key, rows)]
    uses = Counter(keys)
    found = {}
    for row, key in zip(rows, keys, strict=True):
        own = f"{key}/{row.case.fingerprint[:10]}" if uses[key] > 1 else key
        for quantity in QUANTITIES:
            if number := quantity.of(row):
                sure = not number.doubt and math.isfinite(number.value)
                found[f"{own}/{quantity.name}"] = number.value if sure else math.nan
        found |= {f"{own}/{_percentile(lacking).name}": math.nan for lacking in _lacking(row)}
    return found


def _key(row: Row) -> str:
    case = row.case
    set_to = [(one.name, getattr(case, one.name), one.default) for one in CASE_FIELDS]
    settings = [
        *(
            (name, value)
            for name, value, usual in set_to
            if name not in SPELLED_APART and value != usual
        ),
        *case.options,
    ]
    parts = (
        case.model,
        names.strategy(case),
        f"x{case.devices}",
        case.device_kind,
        f"batch_{case.batch}",
        *(f"{name}_{_spelled(str(value))}" for name, value in settings),
        *(label.lower() for label in row.labels if label not in UNKEYED),
    )
    return "/".join(filter(None, map(_spelled, parts)))


def _spelled(text: str) -> str:
    """Return a text in the characters that trackers take; MLflow refuses a path such as "../x"."""
    return re.sub(r"[^\w.-]+", "-", text, flags=re.ASCII).strip(".-")


def definitions() -> str:
    """Return the definitions as a Markdown table, which docs/measuring.md contains."""
    lines = ["| number | unit | from | rounds | interval |", "|---|---|---|---|---|"]
    lines += [
        f"| {one.key} | {one.unit} | {one.statistic} | {one.rounds} | {one.interval} |"
        for one in QUANTITIES
    ]
    return "\n".join(lines)
