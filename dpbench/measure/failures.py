"""Failures: make failure records of exceptions, and of processes that end without a result."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from dpbench.engine.errors import replica_of
from dpbench.hardware import processes
from dpbench.records import Status, Verified
from dpbench.records.trial import Failure

NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "HIP error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Texts which show that an error other than an OutOfMemoryError means lack of memory.

Such errors come from the host's allocator, contexts on GPUs and libraries; torch has no exception
type for them.
"""
_kept: list[BaseException] = []
"""Exceptions of a process whose GPU has failed.

Their frames hold tensors in pinned memory. To free it, torch calls CUDA in a destructor, where an
error ends the process, before it has reported the failure.
"""
_TORCH_NAMES_THE_GPU = re.compile(r"GPU (\d+) has a total capacity")
"""An OutOfMemoryError has the GPU's ordinal only in its message."""


class Unverified(RuntimeError):
    """A strategy's gradients or outputs differ from the reference's, so it must not be timed."""


def of_error(error: BaseException, *, device_ids: Sequence[int] = ()) -> Failure:
    """Return the failure record of an exception: its status, reason, device and traceback.

    The status is `oom` if memory ran out, otherwise `failed`. The reason has the exception's
    message and, unless memory ran out, the innermost calls. It begins with the GPU that has failed,
    if CUDA still tells it. `device_ids` are the ordinals of the case's devices in order (empty:
    unknown).
    """
    replica = replica_of(error)
    notes = getattr(error, "__notes__", [])
    raised = error.__cause__ if replica is not None and error.__cause__ else error
    text = "; ".join([f"{type(raised).__name__}: {said(raised)}", *map(str, notes)])
    no_memory = out_of_memory(raised)
    ordinal = _ordinal(raised) if no_memory else None
    listed = ordinal is not None and ordinal in device_ids
    index = device_ids.index(ordinal) if listed else ordinal
    if no_memory:
        where = (
            notes[-1].removeprefix("in ")
            if replica is not None and notes
            else _memory_of(raised, ordinal)
        )
        reason = f"out of memory on {where}; use a smaller batch, or more devices; error: {text}"
    else:
        failed = _failed_gpus(device_ids)
        if failed:
            _kept.append(error)
        reason = f"{_on(failed)}{text} [{_frames(raised)}]"
    return Failure(
        status=Status.OOM if no_memory else Status.FAILED,
        reason=reason,
        device=(replica if replica is not None else index) if no_memory else None,
        verified=Verified.NO if isinstance(raised, Unverified) else Verified.NOT_APPLICABLE,
        exception=type(raised).__name__,
        traceback="".join(traceback.format_exception(error)),
        perhaps_secondary=isinstance(raised, RuntimeError) and not no_memory,
    )


def of_rank(error: BaseException, rank: int, at_s: float) -> Failure:
    """Return the failure record of an exception that a rank raised at `at_s` (`time.perf_counter`).

    If memory ran out, the device in the record is `rank`, because each rank uses the device with
    its own index.
    """
    found = of_error(error)
    return replace(found, rank=rank, at_s=at_s, device=rank if found.status is Status.OOM else None)


def of_end(
    exit_status: int | None,
    rank: int,
    at_s: float,
    killed_before: int | None = None,
    peak_bytes: int | None = None,
) -> Failure:
    """Return the failure record of a rank whose process ended without a result.

    The status is `killed` if a signal from outside ended it (see `processes.killed_from_outside`),
    otherwise `failed`. `exit_status` is negative for a signal. `at_s` is the time, in
    `time.perf_counter` seconds, at which the parent detected the end. `killed_before` is the number
    of processes that the kernel had killed for lack of memory before this process started, and
    `peak_bytes` the peak of the process's resident set. None means unknown.
    """
    advice = processes.advice(exit_status, killed_before, peak_bytes)
    reason = f"ended without a result ({processes.ending(exit_status)}){advice}"
    killed = processes.killed_from_outside(exit_status, killed_before, peak_bytes)
    status = Status.KILLED if killed else Status.FAILED
    return Failure(status=status, reason=reason, rank=rank, at_s=at_s, exit_status=exit_status)


def together(failures: Sequence[Failure], name: Callable[[int], str] = "rank {}".format) -> str:
    """Return the reason of a case whose ranks failed: that of the first failure, the likely cause.

    If the first rank ended without a result, the text also lists the other ranks that did. Ranks
    that raised an error are left out, because the end of a peer may have caused it. `name` returns
    the name of a rank.
    """
    first, *others = failures
    ends = [
        f"{name(one.rank)} ({processes.ending(one.exit_status)})"
        for one in sorted(others, key=lambda one: one.rank or 0)
        if one.exit_status is not None and one.rank is not None
    ]
    also = (
        f"; also ended without a result: {', '.join(ends)}"
        if ends and first.exit_status is not None
        else ""
    )
    return f"{name(first.rank or 0)}: {first.reason}{also}"


def said(error: BaseException) -> str:
    """Return an exception's message or, if `__str__` raises, a text with that error's type."""
    try:
        return str(error)
    except Exception as other:
        return f"(its message cannot be shown: __str__ raised {type(other).__name__})"


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that a device or the host ran out of memory."""
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in said(error) for sign in NO_MEMORY)


def _failed_gpus(device_ids: Collection[int]) -> list[int]:
    """Return the ordinals of the GPUs of this process that return an error to every call.

    These are GPUs in `device_ids` and those with memory of this process: the question would make a
    context on others. It waits for no work.
    """
    import torch

    failed = []
    for gpu in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
        if gpu not in device_ids and not torch.cuda.memory_reserved(gpu):
            continue
        try:
            torch.cuda.current_stream(gpu).query()
        except RuntimeError as error:
            if "capturing" not in said(error):
                failed.append(gpu)
    return failed


def _on(failed: Sequence[int]) -> str:
    """Return which GPU has failed, as the beginning of a reason; "" if none has."""
    names = [f"cuda:{gpu}" for gpu in failed]
    if len(names) > 1:
        return f"on one of the devices {', '.join(names)}, which all return an error: "
    return f"on device {names[0]}: " if names else ""


def _ordinal(error: BaseException) -> int | None:
    known: int | None = getattr(error, "ordinal", None)
    if known is not None:
        return known
    named = _TORCH_NAMES_THE_GPU.search(said(error))
    return int(named.group(1)) if named else None


def _memory_of(error: BaseException, ordinal: int | None) -> str:
    """Return the device whose memory ran out, such as "device cuda:0", or "device cpu"."""
    if ordinal is not None:
        return f"device {'emulated' if hasattr(error, 'ordinal') else 'cuda'}:{ordinal}"
    return "device cuda" if "CU" in said(error) else "device cpu"


def _frames(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " <- ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
