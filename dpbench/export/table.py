"""Table: write trials as a flat table of steps in Parquet, which needs pyarrow."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.export.choice import Labels
from dpbench.records import CASE_FIELDS, UNATTRIBUTED, Phase, Trial, ledger

if TYPE_CHECKING:
    import pyarrow as pa

MISSING = "export parquet needs pyarrow, which is not installed: pip install 'torch-dpbench[parquet]', or export csv"


def parquet(runs: Iterable[tuple[str, Iterable[Trial]]], labels: Labels, path: Path) -> int:
    """Write one row per step of every trial, warm-up included, to `path`; return the number of rows.

    `runs` yields pairs of a run id and its trials. The columns are `run_id`, the fields of the case, `source`,
    `status`, `verified` and `labels` of the trial, `round`, `step`, `seconds`, `warmup`, and `phase_*_s`. The phases
    are seconds from the ledger, which sum to the step; absent phases are 0. A trial without steps has no row. Raise
    LookupError if pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ModuleNotFoundError as error:
        raise LookupError(MISSING) from error

    schema, rows = _schema(), 0
    with pq.ParquetWriter(path, schema) as writer:
        for run_id, trials in runs:
            for trial in trials:
                found = _rows(run_id, trial, labels)
                if found:
                    writer.write_table(pa.Table.from_pylist(found, schema=schema))
                rows += len(found)
    return rows


def _schema() -> pa.Schema:
    """Return the columns, the same for every run."""
    import pyarrow as pa

    kinds = {
        "str": pa.string(), "int": pa.int64(), "tuple[int, ...]": pa.list_(pa.int64()),
        "tuple[tuple[str, str], ...]": pa.map_(pa.string(), pa.string()),
    }  # fmt: skip
    return pa.schema(
        [
            ("run_id", pa.string()),
            *((field.name, kinds[str(field.type)]) for field in CASE_FIELDS),
            *((name, pa.string()) for name in ("source", "status", "verified", "labels")),
            ("round", pa.int64()),
            ("step", pa.int64()),
            ("seconds", pa.float64()),
            ("warmup", pa.bool_()),
            *((f"phase_{phase}_s", pa.float64()) for phase in (*Phase, UNATTRIBUTED)),
        ]
    )


def _rows(run_id: str, trial: Trial, labels: Labels) -> list[dict[str, Any]]:
    """Return one row per step of a trial."""
    same = {
        "run_id": run_id, **{field.name: getattr(trial.case, field.name) for field in CASE_FIELDS},
        "source": trial.source.value, "status": trial.status.value, "verified": trial.verified.value,
        "labels": " ".join(labels(trial)), "round": trial.round,
    }  # fmt: skip
    return [
        {
            **same, "step": number, "seconds": step.seconds, "warmup": step.warmup,
            **{f"phase_{phase}_s": phases.get(phase, 0.0) for phase in (*Phase, UNATTRIBUTED)},
        }
        for number, (step, phases) in enumerate(zip(trial.steps, ledger.of_trial(trial), strict=True))
    ]  # fmt: skip
