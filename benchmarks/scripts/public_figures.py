"""Public figures: predict other people's published step times on present machines, without any of their measurements.

    python benchmarks/scripts/public_figures.py

Each row of reports/public-figures/figures.csv is predicted from the machine's description and from the model's counts;
the measured step on one device is not used. The output is the table of reports/public-figures/README.md.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpbench.predict.cases import Predictor
from dpbench.records import Case, machine

FIGURES = Path(__file__).parents[2] / "reports" / "public-figures" / "figures.csv"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A published step time and its prediction, in seconds; `low_s` and `high_s` are the ends of the 80 % interval.

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
            model=row["model"], strategy=row["strategy"], devices=devices, batch_size=devices * batch, size="full",
            device_kind="cuda", inputs="device",  # their loaders copy batches while the step before runs
            precision="fp32" if row["precision"] == "tf32" else row["precision"],  # torch's default on such GPUs
        )  # fmt: skip
        try:
            found = Predictor(machine.load(row["machine"])).predict(case)
        except LookupError as error:
            yield Figure(row=row, published_s=published_s, missing=str(error).partition(";")[0])
        else:
            yield Figure(
                row=row, published_s=published_s, predicted_s=found.seconds, low_s=found.low_s, high_s=found.high_s
            )


def main() -> None:
    """Print the table and the summary."""
    found = list(figures())
    print(
        "| id | model | devices | batch per GPU | precision | published, ms | predicted, ms (80 %) | error | inside |"
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
            cells.append(f"{one.predicted_s * 1e3:.1f} ({one.low_s * 1e3:.0f}-{one.high_s * 1e3:.0f})")
            cells += [f"{one.error:+.0%}", "yes" if one.inside else "no"]
        print(f"| {' | '.join(cells)} |")
    predicted = [one for one in found if not one.missing]
    middle = statistics.median(abs(one.error) for one in predicted)
    inside = sum(one.inside for one in predicted)
    print(
        f"\n{len(predicted)} of {len(found)} figures predicted, {inside} inside the 80 % interval; "
        f"median error {middle:.1%}."
    )


if __name__ == "__main__":
    main()
