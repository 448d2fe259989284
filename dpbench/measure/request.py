"""Requests: the messages that assign work to workers, each one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import msgspec

from dpbench.records import Case, Effort

UNWRITTEN = 74
"""The exit status of a worker that cannot write its files (EX_IOERR of sysexits.h)."""


class WorkKind(StrEnum):
    """The kind of work that a request asks for."""

    MEASURE = "measure"
    CHECK_MODEL = "check the model"
    """Check that the case's model can be built and take one step, which is not timed."""


@dataclass(frozen=True, kw_only=True)
class RemoteRank:
    """One rank of a trial whose ranks have different parents, on one or several machines.

    `key` identifies the trial in the store of the launch, in which the ranks meet. `place` is the
    rank's position among the ranks that see the same cores and GPUs: it selects the rank's core or
    GPU. `timeout_s` is the longest time in seconds that the rank waits for its peers.
    """

    rank: int
    size: int
    place: int
    key: str
    timeout_s: float


@dataclass(frozen=True, kw_only=True)
class Request:
    """The work for one worker process, which is one rank of a trial if there is a `seat`.

    The worker writes its trials, log and stacks to `folder`, which the server fills in.
    `requested_s` is the time of the request in `time.perf_counter` seconds. With `turns`, the path
    of a socket, the worker takes the blocks of steps that the gate asks for (`measure.turns`).
    """

    cases: tuple[Case, ...]
    effort: Effort
    round: int
    folder: Path = Path()
    job: WorkKind = WorkKind.MEASURE
    seat: RemoteRank | None = None
    requested_s: float = 0.0
    turns: str = ""

    def to_json(self) -> str:
        """Return the request as one line of JSON."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the request in a line of JSON from `to_json`."""
        return msgspec.convert(json.loads(line), cls, dec_hook=lambda kind, text: kind(text))
