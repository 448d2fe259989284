"""Shapes: the JSON that commands print with --json: one record per command, whose fields are the keys of the JSON.

Times are seconds, memory is bytes, and shares are fractions. A number that is missing, NaN or infinite is null. Keys
are never removed or changed in meaning without a higher `schema`; new keys may appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click
import msgspec

from dpbench.records import Case

if TYPE_CHECKING:
    from dpbench.store import StoredRun

SCHEMA = 1


def show(record: object) -> None:
    """Print one of the records of this module to stdout as JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(record), indent=1).decode())


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of a stored run, in `list runs`, `show` and every result.

    `started` is in ISO 8601, in UTC. `cases` is the number of cases that the run has started, and `rounds` the number
    of planned rounds, 0 if a rule decides. `commit` is that of dpbench; `dirty` says that its files had changed.
    """

    id: str
    name: str
    tags: Mapping[str, str]
    command: str
    status: str
    started: str
    rounds: int
    cases: int
    models: Sequence[str]
    host: str
    cpu: str
    gpus: Sequence[str]
    commit: str
    dirty: bool
    torch: str

    @classmethod
    def of(cls, run: StoredRun, cases: Sequence[Case]) -> RunFacts:
        """Return the facts of a stored run that has started these cases."""
        facts, naming = run.provenance, run.naming
        host, code, gpus = (facts.get(key) or {} for key in ("host", "dpbench", "gpus"))
        return cls(
            id=run.id, name=naming.name, tags=dict(naming.tags), command=naming.command, status=run.status,
            started=datetime.fromtimestamp(run.started, UTC).isoformat(timespec="seconds"), rounds=run.rounds,
            cases=len(cases), models=list(dict.fromkeys(case.model for case in cases)), host=host.get("name", ""),
            cpu=host.get("cpu", ""), gpus=[gpu.get("name", "") for gpu in gpus.get("gpus", ())],
            commit=code.get("commit") or "", dirty=bool(code.get("dirty")),
            torch=(facts.get("packages") or {}).get("torch", ""),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The JSON of `dpbench list runs`: the newest run first."""

    runs: Sequence[RunFacts]
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Name:
    """A name that options accept, and its description."""

    name: str
    description: str


@dataclass(frozen=True, kw_only=True)
class NameList:
    """The JSON of `dpbench list` for models, strategies, schedules, machines and metrics."""

    kind: str
    names: Sequence[Name]
    schema: int = SCHEMA


@dataclass(frozen=True, kw_only=True)
class StartedCase:
    """A case that a run has started; `trials` is the number of its trials by status, such as "ok" and "killed"."""

    label: str
    case: Case
    trials: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class ShownRun:
    """The JSON of `dpbench show`: the facts of a run, and its cases in the order of their start."""

    run: RunFacts
    cases: Sequence[StartedCase] = field(default_factory=tuple)
    schema: int = SCHEMA
