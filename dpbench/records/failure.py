"""Failure: the record of an error, as it travels from a rank to its worker and from the worker to the parent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from dpbench.records.trial import Status, Verified


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a case, or one rank of it, gave no result.

    `reason` is text for the user; no decision depends on it. `device` is the index of the device that failed first
    among the case's devices, where it is known. `rank` is the rank that failed. `verified` is NO when the gradients
    were wrong. `at_s` is the time at which the rank raised, or at which its process was found dead, in seconds on the
    clock of `time.perf_counter`. `exception` is the name of the exception's class, empty when the process ended without
    raising. `traceback` is Python's text. `exit_status` is the status of a process that ended without raising; it is
    negative for a signal. `perhaps_secondary` says that torch also raises this type of exception in a rank whose peer
    has died: a RuntimeError other than lack of memory.
    """

    status: Status
    reason: str
    device: int | None = None
    rank: int | None = None
    verified: Verified = Verified.NOT_APPLICABLE
    at_s: float = 0.0
    exception: str = ""
    traceback: str = ""
    perhaps_secondary: bool = False
    exit_status: int | None = None

    def to_json(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"status": Status(fields["status"]), "verified": Verified(fields["verified"])})
