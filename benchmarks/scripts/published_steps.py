"""Published steps: the measurements that `dpbench predict` shows beside its predictions.

    python -m benchmarks.scripts.published_steps FILE.csv

The rows of FILE.csv, such as tests/data/published.csv, whose step time is known and trusted and
whose strategy dpbench knows, are written to `published.FILE`. Of the models that one owner measured
in the same way, some are kept, first those that `predict` knows by name, spread over the
numbers of parameters, and of each model the largest batch.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from benchmarks.prediction import named_models, rows
from benchmarks.prediction.published import NAMED, PublishedRow, distrusted, read
from dpbench.predict import network, published
from dpbench.predict.published import PublishedStep
from dpbench.records import Phase, registry
from dpbench.records.files import write
from dpbench.records.registry import Role

MODELS, DATA_PARALLEL_MODELS = 3, 8
"""The most models of those that one owner measured in the same way; few measured DataParallel."""
DEVICES = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of devices of the rows that are kept."""
KEPT = {
    "dp": registry.of_role(Role.WRAPPER),
    "ddp": registry.of_role(Role.CONTROL),
    "horovod": "horovod",
    "mirrored": "mirrored",
    "replicated": "replicated",
}
"""The strategy in the package for each kind of published strategy; others are left out."""


def step_of(row: PublishedRow) -> PublishedStep | None:
    """Return a row as a published step; None if dpbench does not predict such steps."""
    alone = row.devices == 1
    strategy = registry.of_role(Role.BASELINE) if alone else KEPT.get(NAMED.get(row.strategy, ""))
    if strategy is None or row.devices not in DEVICES or distrusted(row):
        return None
    if Phase.BACKWARD not in rows.timed(row):
        return None
    known = named_models.find(row.model, row.parameters or None)
    counted = known.profile.parameter_bytes / 4
    one_node = NAMED.get(row.strategy) == "dp"
    machine = rows.describe(row.gpu, row.interconnect, row.devices, one_node=one_node)
    return PublishedStep(
        model=row.model,
        strategy=strategy,
        gpu=machine.gpu.name,
        devices=row.devices,
        interconnect=row.interconnect,
        link="alone" if alone else network.link_kind(machine, row.devices),
        precision=row.precision,
        parameters=row.parameters if known.known == "estimated" else counted,
        batch=row.batch,
        step_s=float(f"{row.step_s:.4g}"),
        source=re.sub(r"index ids? [\d, ]+;? ?", "", row.source),
    )


def chosen(steps: list[PublishedStep]) -> list[PublishedStep]:
    """Return the steps to keep, of steps that one owner measured in the same way."""
    largest = {one.model: one for one in sorted(steps, key=lambda one: one.batch)}
    traced = [one for one in largest.values() if named_models.find(one.model).known == "traced"]
    ordered = sorted(traced or largest.values(), key=lambda one: (one.parameters, one.model))
    last = len(ordered) - 1
    most = DATA_PARALLEL_MODELS if steps[0].strategy == KEPT["dp"] else MODELS
    places = {round(last * i / (most - 1)) for i in range(most)}
    return [ordered[i] for i in sorted(places)]


def main(path: Path) -> None:
    """Write the file of the package."""
    table, _ = read(path)
    alike: dict[tuple[object, ...], list[PublishedStep]] = defaultdict(list)
    for row in table:
        if one := step_of(row):
            machine = (row.owner, one.gpu, one.link)
            alike[(*machine, one.strategy, one.devices, published.bits(one.precision))].append(one)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(published.COLUMNS)
    for key in sorted(alike, key=str):
        for one in chosen(alike[key]):
            writer.writerow([_cell(value) for value in msgspec.structs.astuple(one)[:-1]])
    write(published.FILE, text.getvalue())


def _cell(value: object) -> object:
    whole = isinstance(value, float) and math.isfinite(value) and value == int(value)
    return int(value) if whole else value  # type: ignore[call-overload]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
