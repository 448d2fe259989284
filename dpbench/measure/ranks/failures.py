"""Failures: an error as a status and a line of text, and the record in which a rank reports its failure.

The record travels as JSON from the rank's process to the process that started it.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from dpbench.hardware import parent_death
from dpbench.records import Status

NO_MEMORY = (
    "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""Parts of the messages of errors that mean lack of memory without being an OutOfMemoryError: from the host's
allocator, from CUDA contexts and from libraries."""


def explain(error: BaseException) -> tuple[Status, str]:
    """Return status and reason of an error: its type, where it was raised, the numbers, and its traceback's end."""
    notes = getattr(error, "__notes__", [])
    in_replica = any(note.startswith("in replica") for note in notes)
    error = error.__cause__ if in_replica and error.__cause__ else error  # what a replica raised, before it was retold
    text = "; ".join([f"{type(error).__name__}: {error}", *notes])
    if out_of_memory(error):
        where = notes[-1].removeprefix("in ") if notes else _device_in(str(error))
        return Status.OOM, f"out of memory on {where}; use a smaller batch, or more devices; {text}"
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    trace = " <- ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
    return Status.FAILED, f"{text} [{trace}]"


def out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is a device's, or the host's, lack of memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)


def _device_in(message: str) -> str:
    """Return the device that torch's message names."""
    named = re.search(r"(GPU|emulated device) (\d+) has a total capacity", message)
    if named:
        return f"device {'cuda' if named.group(1) == 'GPU' else 'emulated'}:{named.group(2)}"
    return "device cuda" if "CU" in message else "device cpu"


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of one rank.

    `at_s` is the time at which the rank raised, or at which its process was found dead, in seconds on the clock of
    `time.perf_counter`. `exception` is the name of the exception's class, empty where the process ended without
    raising. `reason` is one line for the user. `traceback` is Python's text. `exit_status` is the status of a process
    that ended without raising; it is negative for a signal. `perhaps_secondary` says that the exception is of a type
    that torch also raises in a rank whose peer has died: a RuntimeError other than lack of memory.
    """

    rank: int
    at_s: float
    status: Status
    reason: str
    exception: str = ""
    traceback: str = ""
    perhaps_secondary: bool = False
    exit_status: int | None = None

    @classmethod
    def of(cls, error: BaseException, rank: int, at_s: float) -> Self:
        """Return the record of an error that a rank raised."""
        status, reason = explain(error)
        return cls(
            rank=rank, at_s=at_s, status=status, reason=reason, exception=type(error).__name__,
            traceback="".join(traceback.format_exception(error)),
            perhaps_secondary=isinstance(error, RuntimeError) and status is not Status.OOM,
        )  # fmt: skip

    @classmethod
    def of_end(cls, exit_status: int | None, rank: int, at_s: float) -> Self:
        """Return the record of a process that ended without a result."""
        reason = f"ended without a result ({parent_death.ending(exit_status)}){parent_death.advice(exit_status)}"
        return cls(rank=rank, at_s=at_s, status=Status.FAILED, reason=reason, exit_status=exit_status)

    def to_json(self) -> str:
        """Return the record as a line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"status": Status(fields["status"])})


def in_order(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return failures by time, except that the cause comes first.

    A process that dies closes its connections before its parent can find it dead. Its peers may report the lost
    connection in between. Such a report follows the record of a rank that died or ran out of memory, although its time
    is earlier.
    """
    by_time = sorted(failures, key=lambda failure: failure.at_s)
    causes = [one for one in by_time if not one.exception or one.status is Status.OOM]
    if by_time and by_time[0].perhaps_secondary and causes:
        return causes[0], *(one for one in by_time if one is not causes[0])
    return tuple(by_time)
