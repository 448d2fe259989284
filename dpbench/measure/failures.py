"""Failures: convert an exception, or the end of a process, to the record of a failure."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpbench.engine.errors import replica_of
from dpbench.hardware import processes
from dpbench.records import Status, Verified
from dpbench.records.trial import Failure

NO_MEMORY = (
    "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""Parts of the messages of errors other than OutOfMemoryError that mean lack of memory. They come from the host's
allocator, from CUDA contexts and from libraries; torch has no exception type for them."""
_TORCH_NAMES_THE_GPU = re.compile(r"GPU (\d+) has a total capacity")
"""torch's message is the only place in which an OutOfMemoryError of CUDA names its device."""


class Unverified(RuntimeError):
    """The gradients of a strategy differ from the reference's, so its step must not be timed."""


def of_error(error: BaseException, *, device_ids: Sequence[int] = ()) -> Failure:
    """Return the record of an exception: its type, the place that raised it, and the end of its traceback.

    `device_ids` are the ordinals of the case's devices in order; empty if the case uses the first ordinals.
    """
    replica, notes = replica_of(error), getattr(error, "__notes__", [])
    raised = error.__cause__ if replica is not None and error.__cause__ else error
    text = "; ".join([f"{type(raised).__name__}: {raised}", *notes])
    no_memory = out_of_memory(raised)
    ordinal = _ordinal(raised) if no_memory else None
    index = ordinal if ordinal is None or not device_ids else _place(ordinal, device_ids)
    if no_memory:
        where = notes[-1].removeprefix("in ") if replica is not None and notes else _memory_of(raised, ordinal)
        reason = f"out of memory on {where}; use a smaller batch, or more devices; {text}"
    else:
        reason = f"{text} [{_frames(raised)}]"
    return Failure(
        status=Status.OOM if no_memory else Status.FAILED, reason=reason,
        device=(replica if replica is not None else index) if no_memory else None,
        verified=Verified.NO if isinstance(raised, Unverified) else Verified.NOT_APPLICABLE,
        exception=type(raised).__name__, traceback="".join(traceback.format_exception(error)),
        perhaps_secondary=isinstance(raised, RuntimeError) and not no_memory,
    )  # fmt: skip


def of_rank(error: BaseException, rank: int, at_s: float) -> Failure:
    """Return the record of an exception that a rank raised; the index of a rank's device is the rank."""
    found = of_error(error)
    return replace(found, rank=rank, at_s=at_s, device=rank if found.status is Status.OOM else None)


def of_end(exit_status: int | None, rank: int, at_s: float) -> Failure:
    """Return the record of a rank whose process ended without a result."""
    reason = f"ended without a result ({processes.ending(exit_status)}){processes.advice(exit_status)}"
    return Failure(status=Status.FAILED, reason=reason, rank=rank, at_s=at_s, exit_status=exit_status)


def in_order(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures in order of time, but with the cause first.

    A process that dies closes its connections before its parent detects its death. In between, its peers may report the
    lost connection. Such a report is placed after the record of a rank that died or ran out of memory, although the
    report is earlier.
    """
    by_time = sorted(failures, key=lambda failure: failure.at_s)
    causes = [one for one in by_time if not one.exception or one.status is Status.OOM]
    if by_time and by_time[0].perhaps_secondary and causes:
        return causes[0], *(one for one in by_time if one is not causes[0])
    return tuple(by_time)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means lack of memory, of a device or of the host."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)


def _ordinal(error: BaseException) -> int | None:
    """Return the ordinal of the device that ran out of memory, or None if the error does not give it."""
    known: int | None = getattr(error, "ordinal", None)
    if known is not None:
        return known
    named = _TORCH_NAMES_THE_GPU.search(str(error))
    return int(named.group(1)) if named else None


def _memory_of(error: BaseException, ordinal: int | None) -> str:
    """Return the name of the device that ran out of memory, or only its kind if `ordinal` is None."""
    if ordinal is not None:
        return f"device {'emulated' if hasattr(error, 'ordinal') else 'cuda'}:{ordinal}"
    return "device cuda" if "CU" in str(error) else "device cpu"


def _place(ordinal: int, device_ids: Sequence[int]) -> int:
    return list(device_ids).index(ordinal) if ordinal in device_ids else ordinal


def _frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " <- ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
