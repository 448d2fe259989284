"""Runs: the facts of a stored run, its id, its name and its tags."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dpbench.records import Trial
from dpbench.records.errors import UsageError
from dpbench.records.facts import RunFacts
from dpbench.records.plan import Parts

PREDICTED = "predicted:"
"""The beginning of the `host` of a run that was predicted for a described machine."""
FINISHED = "finished"
"""The status of a run whose plan is done."""
LATEST = "last"
"""The name that always means the newest run, and that no run can have."""
_WORD = re.compile(r"[^\W_][\w.-]*")
_ID = re.compile(r"[0-9a-f]{32}")


def new_id() -> str:
    """Return the id of a new run: 32 hexadecimal digits."""
    return os.urandom(16).hex()


def known_id(stored: object) -> str:
    """Return the id in a row of the table `run`. Raises ValueError if it has another form."""
    if not isinstance(stored, str) or not _ID.fullmatch(stored):
        raise ValueError(f"the run's id {stored!r} does not consist of 32 hexadecimal digits")
    return stored


def inside(folder: Path, name: str) -> Path:
    """Return the path of the entry `name` of a folder.

    Every path with the id of a run comes from here. Raises ValueError for a name that would lead
    elsewhere, although `known_id` lets no such id in.
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"the run's id {name!r} cannot be a part of a path")
    return folder / name


@dataclass(frozen=True)
class Identity:
    """The plan, the host and the code of a run, by which a run to go on with is found.

    Each is a key. `parts` is the plan whose smaller plans are recognised; None for one without.
    """

    plan: str
    host: str
    code: str
    parts: Parts | None = None


@dataclass(frozen=True, kw_only=True)
class Naming:
    """The name and the tags that the user gave to a run, and the command that started it.

    Name and tags are part of a run's identity: the same command resumes an unfinished run, and
    another name or other tags begin a new run. Several runs may have the same name. Names and keys
    of tags consist of letters, digits, ".", "-" and "_", and begin with a letter or a digit; other
    ones, and the name "last", raise UsageError.
    """

    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    command: str = ""

    def __post_init__(self) -> None:
        for what, word in (("name", self.name), *(("tag", key) for key in self.tags)):
            if (word or what == "tag") and not _WORD.fullmatch(word):
                raise UsageError(
                    f"the {what} {word!r} must consist of letters, digits, '.', '-' and '_', and"
                    " begin with a letter or a digit"
                )
        if self.name == LATEST:
            raise UsageError(
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


@dataclass(frozen=True)
class StoredRun:
    """One stored run, without its trials.

    `status` is `running`, `finished`, `open` or `interrupted`. `started` is in seconds since the
    epoch. `rounds` is the number of planned rounds, 0 if it was not fixed. `machine_result` is
    the last text that a sibling has stored on the run's machine, "" without one.
    """

    id: str
    status: str
    started: float
    rounds: int
    provenance: Mapping[str, Any]
    machine_result: str = ""

    @cached_property
    def facts(self) -> RunFacts:
        """Return what the run states. Raises ValueError for a fact of a wrong type."""
        return RunFacts.of(self.provenance)

    @property
    def naming(self) -> Naming:
        """Return the name, tags and command in the run's provenance, or empty ones."""
        facts = self.facts
        return Naming(name=facts.name, tags=facts.tags, command=facts.command)


@dataclass(frozen=True)
class PastRun:
    """A run that shares cases with a given run, with the summaries of its trials of them."""

    run: StoredRun
    trials: tuple[Trial, ...]
