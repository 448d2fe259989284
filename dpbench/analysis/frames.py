"""Frames: the recorded data of a run as tables with a row per step, phase of a step, or sample.

Every row has the run's id, the fields of the case, and the trial's source, status, labels and
round. The status is "ok" if the numbers can be used, else the trial's fault or status, such as
"unverified".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from dpbench.analysis import imbalance, quantities, summary
from dpbench.records import CASE_FIELDS, Trial, files
from dpbench.records.errors import UnknownName
from dpbench.records.ledger import PHASES

DataFrame = pd.DataFrame
Columns = dict[str, Sequence[object]]
"""The values of a table by column; all columns are equally long."""


def cases(
    runs: Sequence[tuple[str, Sequence[summary.Row], Sequence[Trial]]], *, raw: bool = False
) -> pd.DataFrame:
    """Return a table with one row per case of the runs, given with their ids.

    It has the run's id, the columns of `frame`, and the imbalance indexes. For `raw`, see `frame`.
    """
    ids = ["", *(run_id for run_id, rows, _ in runs for _ in rows)]
    numbers = quantities.records([summary.BLANK, *(row for _, rows, _ in runs for row in rows)])
    beside = imbalance.records([summary.BLANK], [])
    for _, rows, trials in runs:
        beside += imbalance.records(rows, trials)
    lines = zip(ids, numbers, beside, strict=True)
    return _frame([{"run_id": run_id, **one, **more} for run_id, one, more in lines], raw=raw)


def steps(run_id: str, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per step: its index, whether it is `warmup`, its `seconds`."""
    return _table(run_id, trials, _of_steps)


def _of_steps(trial: Trial) -> Columns:
    return {
        "step": range(len(trial.steps)),
        "warmup": trial.by_column.warmup,
        "seconds": trial.by_column.seconds,
    }


MISSING = (
    "the format parquet needs the package pyarrow, which is not installed; install it with "
    "pip install 'torch-dpbench[parquet]', or export csv instead"
)


def parquet(runs: Sequence[tuple[str, Sequence[Trial]]], path: Path) -> None:
    """Write a Parquet file with one row per step of every trial of `runs`, given with their ids.

    The columns are those of `steps`, `verified`, and one `phase_*_s` per phase. The phases,
    including `phase_unattributed_s`, sum to `seconds`; a phase that a step does not have is 0.
    Raises LookupError without pyarrow.
    """

    def columns(trial: Trial) -> Columns:
        split = trial.ledger.phases
        return {
            **_of_steps(trial),
            "verified": [trial.verified.value] * len(trial.steps),
            **{f"phase_{phase}_s": [parts.get(phase, 0.0) for parts in split] for phase in PHASES},
        }

    table = pd.concat([_table(run_id, trials, columns) for run_id, trials in runs])
    try:
        with files.replacing(path) as part:
            table.to_parquet(part, engine="pyarrow", index=False)
    except ImportError as error:
        raise UnknownName(MISSING) from error


def phases(run_id: str, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per phase of every step; its seconds sum to the step."""

    def columns(trial: Trial) -> Columns:
        steps = zip(trial.by_column.warmup, trial.ledger.phases, strict=True)
        rows = [
            (index, warmup, phase, seconds)
            for index, (warmup, parts) in enumerate(steps)
            for phase, seconds in parts.items()
        ]
        names = ("step", "warmup", "phase", "seconds")
        return {name: [row[place] for row in rows] for place, name in enumerate(names)}

    return _table(run_id, trials, columns)


def samples(run_id: str, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per reading of a sampler.

    A row has the time in seconds on the machine's monotonic clock, the device (-1 for the host),
    the metric, whose name ends with its unit, and the value.
    """

    def columns(trial: Trial) -> Columns:
        names = ("time_s", "device", "metric", "value")
        return {name: [getattr(sample, name) for sample in trial.samples] for name in names}

    return _table(run_id, trials, columns)


def _table(
    run_id: str, trials: Sequence[Trial], columns: Callable[[Trial], Columns]
) -> pd.DataFrame:
    blank = Trial(case=summary.BLANK.case)
    gathered: dict[str, list[object]] = {
        name: [] for name in (*_facts(run_id, blank), *columns(blank))
    }
    for trial in trials:
        found = columns(trial)
        count = len(next(iter(found.values())))
        facts = {name: [fact] * count for name, fact in _facts(run_id, trial).items()}
        for name, values in {**facts, **found}.items():
            gathered[name] += values
    return pd.DataFrame(gathered)


def _facts(run_id: str, trial: Trial) -> dict[str, object]:
    return {
        "run_id": run_id,
        **{field.name: getattr(trial.case, field.name) for field in CASE_FIELDS},
        "source": trial.source.value,
        "status": (trial.fault or trial.status).value,
        "labels": " ".join(summary.labels(trial)),
        "round": trial.round,
    }


def frame(rows: Sequence[summary.Row], *, raw: bool = False) -> pd.DataFrame:
    """Return the rows as a flat table with the columns of `quantities.records`.

    A number that reports withhold is NaN, and its column `*_withheld` has the reason; `raw` keeps
    the number. The phases of a step are withheld together with its time.
    """
    return _frame(quantities.records([summary.BLANK, *rows]), raw=raw)


def _frame(records: Sequence[Mapping[str, object]], *, raw: bool) -> pd.DataFrame:
    """Return a table of all records but the first, whose keys are its columns."""
    blank, *lines = records
    table = pd.DataFrame(lines, columns=list(blank))
    if not raw:
        _withhold(table)
    return table


def _withhold(table: pd.DataFrame) -> None:
    """Replace each number by NaN for which `*_withheld` has a reason."""
    names = list(map(str, table))
    phases = [name for name in names if name.startswith("phase_")]
    for reason in [name for name in names if name.endswith("_withheld")]:
        estimate = reason.removesuffix("_withheld")
        numbers = [f"{estimate}_{part}" for part in ("value", "low", "high")]
        if estimate == "step":
            numbers += phases
        table.loc[table[reason].notna(), numbers] = float("nan")


def csv(table: pd.DataFrame) -> str:
    """Return a table as CSV text in which spreadsheets see no text as a formula."""
    inert = table.copy()
    for name, column in table.items():
        if not pd.api.types.is_numeric_dtype(column):
            inert[name] = pd.Series([*map(_inert, column)], column.index, object)
    return inert.to_csv(index=False)


def _inert(cell: object) -> object:
    """Put an apostrophe before a text that a spreadsheet would evaluate."""
    return (
        f"'{cell}"
        if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        else cell
    )
