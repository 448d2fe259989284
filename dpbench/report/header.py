"""Header: the facts at the top of a report, and the environment at its end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import Trial, words


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the facts on the run, the machine and the code as (name, value)."""
    provenance = report.provenance
    host, packages = provenance.get("host") or {}, provenance.get("packages") or {}
    cores = f", {words.count(host['cores'], 'core')}" if "cores" in host else ""
    return [
        ("run", report.run_id[:12]),
        ("date", datetime.fromtimestamp(report.started_s, UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("host", f"{host.get('name', 'unknown')}, {host.get('cpu', 'unknown CPU')}{cores}"),
        ("GPUs", _gpus(provenance.get("gpus") or {})),
        ("torch", str(packages.get("torch", "unknown"))),
        ("dpbench", _code(provenance.get("dpbench") or {})),
        *([("project", _code(provenance["project"]))] if provenance.get("project") else []),
    ]


def _gpus(found: Mapping[str, Any]) -> str:
    """Return the number of GPUs of each model, and the driver, as text."""
    models = Counter(str(gpu.get("name", "unknown")) for gpu in found.get("gpus") or ())
    driver = f", driver {found['driver']}" if "driver" in found else ""
    return ", ".join(f"{count} × {name}" for name, count in models.items()) + driver if models else "none"


def _code(code: Mapping[str, Any]) -> str:
    """Return a version and its commit as text."""
    commit = f"commit {code['commit'][:12]}" if code.get("commit") else ""
    dirty = "dirty" if code.get("dirty") else ""
    return " ".join(filter(None, (str(code.get("version", "")), commit, dirty))) or "unknown"


def badges(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return each label of the run with the number of cases that have it, as text; "" if all cases have it."""
    counts = Counter(label for row in rows for label in row.labels)
    return [(label, "" if n == len(rows) else f"{n} of {len(rows)} cases") for label, n in counts.items()]


def environment(provenance: Mapping[str, Any], trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Return the facts on the run and its workers as (name, value); commas separate differing values of workers."""
    # the page has the self-check's results as text
    found = list(_flat({name: value for name, value in provenance.items() if name != "self_check"}, ""))
    workers: dict[str, dict[str, None]] = {}
    for trial in trials:
        # the results of a trial's checks differ between trials, and the warnings report them
        same = {name: value for name, value in trial.provenance.items() if name not in ("validity", "foreign_load")}
        for name, value in _flat(same, "worker."):
            workers.setdefault(name, {})[value] = None
    return found + [(name, ", ".join(values)) for name, values in workers.items()]


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield nested facts with dotted names."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}{name}.")
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}{index}.")
    elif value not in ([], (), None, ""):
        yield prefix.rstrip("."), value if isinstance(value, str) else json.dumps(value, default=str)
