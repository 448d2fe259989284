"""Requests: the messages with which the parent process assigns work to workers, each one line of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from dpbench.records import Case, Effort


class Job(StrEnum):
    """The kind of work that a request asks for."""

    MEASURE = "measure"
    CHECK_MODEL = "check the model"
    """Build the case's model, draw its batch and take one step; no step is timed."""
    SELF_CHECK = "self-check"
    """Measure the overhead that measuring adds to the case's step."""


class Arm(StrEnum):
    """The part of measuring whose cost a self-check measures."""

    MARKS = "marks"
    SAMPLER = "sampler"


@dataclass(frozen=True, kw_only=True)
class SelfCheck:
    """The settings of a self-check.

    `block_s` is the duration in seconds of a block (marks) or a part (sampler). With marks, CPU time is read in the
    same fraction of the steps as if a step took `step_s` seconds. `sampler_pid` is the sampler's process id.
    """

    arm: Arm
    block_s: float
    step_s: float
    sampler_pid: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """The work for one worker. `requested_s` is the time of the request on the clock of `time.perf_counter`."""

    cases: tuple[Case, ...]
    effort: Effort
    folder: Path
    round: int
    job: Job = Job.MEASURE
    self_check: SelfCheck | None = None
    requested_s: float = 0.0

    def to_json(self) -> str:
        """Return the request as one line of JSON."""
        return json.dumps(asdict(self) | {"cases": [case.to_dict() for case in self.cases], "folder": str(self.folder)})

    @classmethod
    def from_json(cls, line: str) -> Self:
        """Return the request that `to_json` wrote."""
        data = json.loads(line)
        checked = data["self_check"]
        return cls(
            cases=tuple(Case.from_dict(case) for case in data["cases"]), effort=Effort(**data["effort"]),
            folder=Path(data["folder"]), round=data["round"], requested_s=data["requested_s"], job=Job(data["job"]),
            self_check=SelfCheck(**{**checked, "arm": Arm(checked["arm"])}) if checked else None,
        )  # fmt: skip
