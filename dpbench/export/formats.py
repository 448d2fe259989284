"""Formats: select and name the trials of a run, and write them as JSON lines, as a pyperf suite, or as Parquet.

pyperf reads the suite with `pyperf stats`, `hist`, `check` and `compare_to`. Parquet needs pyarrow; it holds a flat
table of steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.records import CASE_FIELDS, UNATTRIBUTED, Case, Phase, Source, Trial, ledger, words

if TYPE_CHECKING:
    import pyarrow as pa


Labels = Callable[[Trial], tuple[str, ...]]
"""A function that returns the labels that must accompany a trial's numbers."""

IN_LABEL = frozenset(
    {
        "model",
        "size",
        "strategy",
        "schedule",
        "devices",
        "device_kind",
        "placement",
        "batch_size",
        "precision",
        "inputs",
        "read_loss",
    }
)
"""The fields of a case that its label includes."""


def name(case: Case) -> str:
    """Return a unique name of a case: its label, then other fields whose values differ from their defaults."""
    rest = {field: value for field, value in case.to_dict().items() if field not in IN_LABEL}
    return " ".join([case.label, *(f"{field}={_plain(value)}" for field, value in sorted(rest.items()))])


def _plain(value: Any) -> str:
    """Return the value of a field as text without brackets."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(":".join(part) if isinstance(part, tuple) else str(part) for part in value)


def title(trial: Trial, labels: Labels) -> str:
    """Return the title of a trial: its case, its round, and the labels that must accompany its numbers."""
    said = [*labels(trial), *([trial.fault.upper()] if trial.fault else [])]
    ended = "" if trial.status == "ok" else f" {trial.status}"
    return f"{name(trial.case)} round {trial.round}{ended} [{' '.join(said)}]"


def pick(trials: Sequence[Trial], part: str | None = None, *, every: bool = False) -> list[Trial]:
    """Return the first trusted trial of each case that `part` selects; with `every`, all trials of these cases.

    `part` is the number of a case, from 1 in the order in which the run started them, or a part of its name. A
    complete name selects that case only. Raises ValueError, with the existing cases, if no trial is selected.
    """
    names = list(dict.fromkeys(name(trial.case) for trial in trials))
    wanted = set(_named(names, part)) if part is not None else set(names)
    fitting = [trial for trial in trials if name(trial.case) in wanted]
    found = [trial for trial in fitting if every or (trial.trusted and trial.timed)]
    if not every:
        first: dict[str, Trial] = {}
        for trial in found:
            first.setdefault(name(trial.case), trial)
        found = [first[one] for one in names if one in first]
    if not found:
        ends = ", ".join(f"{trial.case.label}: {trial.fault or trial.status}" for trial in fitting[:8]) or "no trials"
        raise ValueError(f"the selected cases have no measured trial ({ends})")
    return found


def _named(names: Sequence[str], part: str) -> list[str]:
    """Return the names selected by `part`, a number or a part of a name. Raises ValueError if there are none."""
    if part.isdigit() and 1 <= int(part) <= len(names):
        return [names[int(part) - 1]]
    found = [part] if part in names else [name for name in names if part in name]
    if not found or part.isdigit():
        raise ValueError(f"no case {part}; the run has: {numbered(names)}")
    return found


def numbered(names: Sequence[str]) -> str:
    """Return the names as text, each after the number that `pick` accepts for it."""
    return "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)) or "none"


def nameless(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's provenance without the host name, for files that leave the machine."""
    host = {key: value for key, value in provenance.get("host", {}).items() if key != "name"}
    return {**provenance, **({"host": host} if host else {})}


def jsonl(run_id: str, trials: Iterable[Trial]) -> Iterator[str]:
    """Yield one line per trial: its run, its case, its status, and each step's seconds by phase."""
    for trial in trials:
        steps = [
            {"seconds": step.seconds, "warmup": step.warmup, "phases": phases}
            for step, phases in zip(trial.steps, ledger.of_trial(trial), strict=True)
        ]
        line = words.dumps(
            {
                "run_id": run_id,
                "case": {**trial.case.to_dict(), "devices": trial.case.devices},
                "source": trial.source,
                "status": trial.status,
                "reason": trial.reason,
                "verified": trial.verified,
                "round": trial.round,
                "steps": steps,
                "memory": [asdict(peak) for peak in trial.memory],
                "failed_device": trial.failed_device,
                "setup": dict(trial.setup),
                "provenance": dict(trial.provenance),
            }
        )
        yield f"{line}\n"


VERSION = "1.0"
Metadata = dict[str, str | int | float]


def pyperf(run_id: str, provenance: Mapping[str, Any], trials: Iterable[Trial], labels: Labels) -> str:
    """Return the text of a suite with the trusted trials of one run; the last trial of each round counts.

    Raises ValueError if there are no such trials.
    """
    rounds: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        if trial.trusted and trial.timed:
            measured = "" if trial.source is Source.MEASURED else f" {trial.source}"
            rounds.setdefault(f"{name(trial.case)}{measured}", {})[trial.round] = trial
    if not rounds:
        raise ValueError(f"run {run_id[:8]} has no measured trial, and pyperf cannot read an empty suite")
    benchmarks = [
        {
            "metadata": {
                "name": title,
                "unit": "second",
                "loops": 1,
                "labels": " ".join(labels(next(iter(found.values())))),
            },
            "runs": [_run(number, trial) for number, trial in sorted(found.items())],
        }
        for title, found in rounds.items()
    ]
    facts = _facts(provenance, {"dpbench_run": run_id})
    return json.dumps({"version": VERSION, "metadata": facts, "benchmarks": benchmarks}) + "\n"


def _run(number: int, trial: Trial) -> dict[str, Any]:
    """Return pyperf's run for one round: warm-up steps with their loop count, and the timed steps."""
    metadata: Metadata = {"round": number, "verified": str(trial.verified)}
    if trial.setup:
        metadata["duration"] = sum(trial.setup.values())
    if trial.started_s:
        metadata["date"] = datetime.fromtimestamp(trial.started_s, UTC).replace(tzinfo=None).isoformat(" ")
    run: dict[str, Any] = {"metadata": metadata, "values": list(trial.timed)}
    warmups = [(1, step.seconds) for step in trial.steps if step.warmup]
    return run | ({"warmups": warmups} if warmups else {})


def _facts(provenance: Mapping[str, Any], first: Metadata) -> Metadata:
    """Return a run's provenance without the host name, under pyperf's names for facts that pyperf defines."""
    host, gpus = provenance.get("host", {}), provenance.get("gpus", {})
    packages, code = provenance.get("packages", {}), provenance.get("dpbench", {})
    facts = {
        "platform": f"{host.get('system', '')} {host.get('machine', '')}",
        "cpu_model_name": host.get("cpu"),
        "cpu_count": host.get("cores"),
        "python_version": provenance.get("python"),
        "gpus": _counted([gpu.get("name", "") for gpu in gpus.get("gpus", [])]),
        "gpu_driver": gpus.get("driver"),
        **{f"{package}_version": version for package, version in packages.items()},
        "dpbench_version": code.get("version"),
        "dpbench_commit": f"{code.get('commit', '')}{' (dirty)' if code.get('dirty') else ''}",
    }
    # pyperf rejects values that are empty or have several lines
    plain = {key: " ".join(value.split()) if isinstance(value, str) else value for key, value in facts.items()}
    return first | {key: value for key, value in plain.items() if value}


def _counted(names: Sequence[str]) -> str:
    """Return the distinct names with their counts as text."""
    return ", ".join(f"{names.count(one)}x {one}" for one in dict.fromkeys(names))


MISSING = "export parquet needs pyarrow, which is not installed: pip install 'torch-dpbench[parquet]', or export csv"


def parquet(runs: Iterable[tuple[str, Iterable[Trial]]], labels: Labels, path: Path) -> int:
    """Write one row per step of every trial, warm-up included, to `path`; return the number of rows.

    `runs` yields pairs of a run id and its trials. The columns are `run_id`, the fields of the case, `source`,
    `status`, `verified` and `labels` of the trial, `round`, `step`, `seconds`, `warmup`, and `phase_*_s`. The phases
    are seconds from the ledger, which sum to the step; absent phases are 0. A trial without steps has no row. Raises
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
