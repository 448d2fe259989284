"""Public figures: predict others' published step times and memory without their measurements.

    python -m benchmarks.scripts.public_figures [--memory]

Each row of reports/public-figures/figures.csv is predicted from the machine's description and from
the model's counts; the measured step on one device is not used. With --memory, each row of
memory.csv is predicted from a trace of the model as benchmarks/models/published.py defines it. The
output is a table of reports/public-figures/README.md.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpbench.predict import machine
from dpbench.predict.cases import Predictor
from dpbench.records import Case

FOLDER = Path(__file__).parents[2] / "reports" / "public-figures"
FIGURES, MEMORY = FOLDER / "figures.csv", FOLDER / "memory.csv"
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published step time and its prediction, in seconds.

    `low_s` and `high_s` are the ends of the 80 % interval.

    `missing` says why there is no prediction; it is empty if there is one.
    """

    row: dict[str, str]
    published_s: float
    predicted_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    missing: str = ""

    @property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self.predicted_s / self.published_s - 1

    @property
    def inside(self) -> bool:
        """Return whether the published time lies in the interval."""
        return self.low_s <= self.published_s <= self.high_s


def figures() -> Iterator[Figure]:
    """Yield each published figure with its prediction."""
    for row in csv.DictReader(FIGURES.read_text(encoding="utf-8").splitlines()):
        devices, batch, value = int(row["devices"]), int(row["batch_per_gpu"]), float(row["value"])
        published_s = value / 1e3 if row["metric"] == "step_ms" else devices * batch / value
        case = Case(
            model=row["model"],
            strategy=row["strategy"],
            devices=devices,
            batch_size=devices * batch,
            size="full",
            device_kind="cuda",
            inputs="device",  # their loaders copy batches while the step before runs
            # torch's default on such GPUs
            precision=("fp32" if row["precision"] == "tf32" else row["precision"]),
        )
        try:
            found = Predictor(machine.load(row["machine"])).predict(case)
        except LookupError as error:
            yield Figure(row=row, published_s=published_s, missing=str(error).partition(";")[0])
        else:
            yield Figure(
                row=row,
                published_s=published_s,
                predicted_s=found.seconds,
                low_s=found.low_s,
                high_s=found.high_s,
            )


def main() -> None:
    """Print the table and the summary."""
    found = list(figures())
    print(
        "| id | model | devices | batch per GPU | precision | published, ms | predicted, ms (80 %)"
        " | error | inside |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for one in found:
        row = one.row
        cells = [
            row["id"],
            row["model"],
            f"{row['devices']} of {row['machine']}",
            row["batch_per_gpu"],
            row["precision"],
        ]
        cells.append(f"{one.published_s * 1e3:.1f}")
        if one.missing:
            cells += [f"none: {one.missing}", "", ""]
        else:
            cells.append(
                f"{one.predicted_s * 1e3:.1f} ({one.low_s * 1e3:.0f}-{one.high_s * 1e3:.0f})"
            )
            cells += [f"{one.error:+.0%}", "yes" if one.inside else "no"]
        print(f"| {' | '.join(cells)} |")
    predicted = [one for one in found if not one.missing]
    middle = statistics.median(abs(one.error) for one in predicted)
    inside = sum(one.inside for one in predicted)
    print(
        f"\n{len(predicted)} of {len(found)} figures predicted, {inside} inside the 80 % interval; "
        f"median error {middle:.1%}."
    )


def memory_mib(row: dict[str, str]) -> float | None:
    """Return the predicted memory of a row of memory.csv in MiB.

    None if its model is not defined.
    """
    from benchmarks.models import published
    from dpbench.predict.memory import needed

    if not hasattr(published, row["model"]):
        return None
    devices = int(row["devices"])
    case = Case(
        model=f"benchmarks.models.published:{row['model']}",
        strategy=row["strategy"],
        devices=devices,
        size="full",
        batch_size=devices * int(row["batch_per_gpu"]),
        device_kind="cuda",
        precision=row["precision"],
        optimizer="sgd" if row["optimizer"] == "sgd" else "own",
        zero_grad="zero" if row["gradients"] == "kept" else "none",
    )
    found = needed(case)[int(row["device"])]
    sizes = {"allocated": found.peak.allocated_bytes, "reserved": found.peak.reserved_bytes}
    return sizes.get(row["quantity"], found.process_bytes) / MIB


def print_memory() -> None:
    """Print the table of memory and its summary."""
    print(
        "| id | model | strategy, GPU | batch per GPU | precision | quantity | published, MiB |"
        " predicted | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = list(csv.DictReader(MEMORY.read_text(encoding="utf-8").splitlines()))
    errors: list[float] = []
    for row in rows:
        found, published = memory_mib(row), float(row["value_mib"])
        cells = [row["id"], row["model"], f"{row['strategy']} {row['device']} of {row['devices']}"]
        cells += [row["batch_per_gpu"], row["precision"], row["quantity"], f"{published:.0f}"]
        if found is None:
            cells += ["none", ""]
        else:
            errors.append(found / published - 1)
            cells += [f"{found:.0f}", f"{errors[-1]:+.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    near = sum(abs(error) <= 0.1 for error in errors)
    middle = statistics.median(abs(error) for error in errors)
    print(
        f"\n{len(errors)} of {len(rows)} figures predicted, {near} of them within 10 %; median"
        f" error {middle:.1%}."
    )


if __name__ == "__main__":
    if "--memory" in sys.argv[1:]:
        print_memory()
    else:
        main()
