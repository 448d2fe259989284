"""Frames: the recorded data of a run as tidy tables with one row per step, per phase of a step, or per sample.

Every row has the id of the run, the fields of the case, the source, status, labels and round of the trial. The status
is "ok" if the numbers can be used, else the trial's fault or status, such as "unverified".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import pandas as pd

from dpbench.analysis import imbalance, summary
from dpbench.records import CASE_FIELDS, Trial, ledger

DataFrame = pd.DataFrame
Columns = dict[str, Sequence[object]]
"""The values of a table by column; all columns are equally long."""


def cases(run_id: str, rows: Sequence[summary.Row], trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per case: `summary.frame`, and then the imbalance indexes of the cases."""
    beside = imbalance.columns([(run_id, trials)], [(run_id, row.case, row.source) for row in rows])
    return summary.frame(rows, [run_id] * len(rows), beside)


def steps(run_id: str, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per step of every trial: its index `step`, whether it is `warmup`, its `seconds`."""

    def columns(trial: Trial) -> Columns:
        return {
            "step": range(len(trial.steps)),
            "warmup": [step.warmup for step in trial.steps],
            "seconds": [step.seconds for step in trial.steps],
        }

    return _table(run_id, trials, columns)


def phases(run_id: str, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per phase of every step: the phase and its seconds, which sum to the step."""

    def columns(trial: Trial) -> Columns:
        split = ledger.of_trial(trial)
        counts = [len(parts) for parts in split]
        return {
            "step": [index for index, count in enumerate(counts) for _ in range(count)],
            "warmup": [step.warmup for step, count in zip(trial.steps, counts, strict=True) for _ in range(count)],
            "phase": list(chain.from_iterable(split)),
            "seconds": [seconds for parts in split for seconds in parts.values()],
        }

    return _table(run_id, trials, columns)


def samples(run_id: str, trials: Sequence[Trial]) -> pd.DataFrame:
    """Return a table with one row per reading of a sampler.

    A row has the time in seconds on the machine's monotonic clock, the device (-1 for the host), the metric, whose name
    ends with its unit, and the value.
    """

    def columns(trial: Trial) -> Columns:
        names = ("time_s", "device", "metric", "value")
        return {name: [getattr(sample, name) for sample in trial.samples] for name in names}

    return _table(run_id, trials, columns)


def _table(run_id: str, trials: Sequence[Trial], columns: Callable[[Trial], Columns]) -> pd.DataFrame:
    """Return a table with the rows that `columns` returns for each trial, after the facts of the trial."""
    empty = columns(Trial(case=summary.BLANK.case))
    gathered: dict[str, list[object]] = {name: [] for name in (*_facts(run_id, Trial(case=summary.BLANK.case)), *empty)}
    for trial in trials:
        found = columns(trial)
        count = len(next(iter(found.values())))
        for name, fact in _facts(run_id, trial).items():
            gathered[name] += [fact] * count
        for name, values in found.items():
            gathered[name] += values
    return pd.DataFrame(gathered)


def _facts(run_id: str, trial: Trial) -> dict[str, object]:
    """Return the columns that all rows of a trial have in common."""
    return {
        "run_id": run_id,
        **{field.name: getattr(trial.case, field.name) for field in CASE_FIELDS},
        "source": trial.source.value,
        "status": (trial.fault or trial.status).value,
        "labels": " ".join(summary.labels(trial)),
        "round": trial.round,
    }
