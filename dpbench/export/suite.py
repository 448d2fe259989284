"""Suite: write trials as a pyperf benchmark suite, for `pyperf stats`, `hist`, `check` and `compare_to`.

Each case is a benchmark, whose name is the same in all runs. Each round is a run of it, with its warm-up steps and its
timed steps in seconds. The format is 1.0 of pyperf's JSON files (pyperf 1.0 and later).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dpbench.export.choice import Labels, name
from dpbench.records import Source, Trial

VERSION = "1.0"
Metadata = dict[str, str | int | float]


def pyperf(run_id: str, provenance: Mapping[str, Any], trials: Iterable[Trial], labels: Labels) -> str:
    """Return the text of a suite with the trusted trials of one run; the last trial of each round counts.

    Raises ValueError if there are none.
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
    """Return the run of one round: warm-up steps with their loop count, and the timed steps."""
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
