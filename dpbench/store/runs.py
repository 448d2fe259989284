"""Runs: the facts of a stored run, its name and tags, and the process that adds trials to it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dpbench.records import Trial
from dpbench.records.examination import Examination

PREDICTED = "predicted:"
"""The beginning of the `host` of a run that was predicted for a described machine."""
LATEST = "last"
"""The name that always means the newest run, and that no run can have."""
_WORD = re.compile(r"[^\W_][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The name and the tags that the user gave to a run, and the command that started it.

    Name and tags are part of a run's identity: the same command resumes an unfinished run, and
    another name or other tags begin a new run. Several runs may have the same name. Names and keys
    of tags consist of letters, digits, ".", "-" and "_", and begin with a letter or a digit; other
    ones, and the name "last", raise ValueError.
    """

    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        for what, word in (("name", self.name), *(("tag", key) for key in self.tags)):
            if (word or what == "tag") and not _WORD.fullmatch(word):
                raise ValueError(
                    f"the {what} {word!r} must consist of letters, digits, '.', '-' and '_', and"
                    " begin with a letter or a digit"
                )
        if self.name == LATEST:
            raise ValueError(
                f"a run cannot have the name {LATEST}, because @{LATEST} is the newest run; give"
                " another name"
            )

    def identified(self, plan: str) -> str:
        """Return a hash of a run's plan, name and tags; a run with the same hash can be resumed.

        `plan` is the hash of the plan alone, which is returned if there is neither a name nor a
        tag.
        """
        if not (self.name or self.tags):
            return plan
        return hashlib.sha256(
            json.dumps([plan, self.name, sorted(self.tags.items())]).encode()
        ).hexdigest()

    def added_to(self, provenance: Mapping[str, Any]) -> dict[str, Any]:
        """Return a run's provenance with `name`, `tags` and `command` if not empty."""
        given = {"name": self.name, "tags": dict(self.tags), "command": self.command}
        return {**provenance, **{key: value for key, value in given.items() if value}}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How the plan of a run has grown: by cases, or by rounds.

    `joined` has the first round of each case that joined the run later, by fingerprint. `looks` is
    how often results were looked at before the plan grew.
    """

    joined: Mapping[str, int] = field(default_factory=dict)
    looks: int = 0


@dataclass(frozen=True)
class StoredRun:
    """One stored run, without its trials.

    `status` is `running`, `finished`, `open` or `interrupted`. `started` is in seconds since the
    epoch. `rounds` is the number of planned rounds, 0 if it was not fixed. `examination` is the
    last one of the run's machine, None if the store has none.
    """

    id: str
    status: str
    started: float
    rounds: int
    provenance: Mapping[str, Any]
    examination: Examination | None = None

    @property
    def naming(self) -> Naming:
        """Return the name, tags and command in the run's provenance, or empty ones."""
        facts = self.provenance
        return Naming(
            name=facts.get("name", ""), tags=facts.get("tags", {}), command=facts.get("command", "")
        )


@dataclass(frozen=True)
class PastRun:
    """A run that shares cases with a given run, with the summaries of its trials of them."""

    run: StoredRun
    trials: tuple[Trial, ...]

    @property
    def run_id(self) -> str:
        """Return the id of the run."""
        return self.run.id

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Return the facts that are stored with the run."""
        return self.run.provenance


def born(pid: int) -> float:
    """Return the start time of a process in seconds since the epoch; 0 if it does not exist.

    It distinguishes the process from later ones with the same id.
    """
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0


def alive(pid: int, born_s: float) -> bool:
    """Return whether the process with this id and start time exists."""
    return born_s > 0 and abs(born(pid) - born_s) < 1.0
