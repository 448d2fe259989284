"""One case -> one trial: launch the processes that its strategy needs, and join what they measured."""

from __future__ import annotations

import faulthandler
import re
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dpbench import ledger, plan, registry
from dpbench.records import HOST, Case, Effort, Memory, Status, Trial, Verified
from dpbench.worker import modelcheck, selfcheck
from dpbench.worker.loop import measure, measure_together, prepare

NO_MEMORY = (
    "can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""What lack of memory says where it is no OutOfMemoryError: the host's allocator, contexts, libraries."""
LOST_PEER = ("Connection reset by peer", "Connection closed by peer", "Broken pipe")
"""What a rank says when another one is gone: never the cause."""
FATAL = {"Aborted": "SIGABRT", "Segmentation fault": "SIGSEGV", "Bus error": "SIGBUS", "Illegal instruction": "SIGILL"}
"""What Python's fault handler writes into the log for each signal."""
ERROR_FILE = "error-{rank}.txt"


def run(case: Case, effort: Effort, folder: Path) -> Trial:
    """Run one case; a failure is a trial too, with its reason. `folder` is scratch space of this trial alone."""
    strategy = registry.load("strategies", case.strategy)
    if reason := _skip(strategy, case):
        return Trial(case=case, status=Status.SKIPPED, reason=reason)
    try:
        if case.options == plan.CHECK:
            return modelcheck.check(case)
        if dict(case.options).get("role") == selfcheck.ROLE:
            return selfcheck.measure(case, effort)
        if not hasattr(strategy, "launch"):
            return measure(case, effort, strategy)

        def entry(rank: int) -> dict[str, Any]:
            # its own file: ranks that write their stacks into one overwrite each other
            faulthandler.register(signal.SIGUSR1, file=(folder / f"stacks-{rank}").open("w"), all_threads=True)
            try:
                return measure(case, effort, strategy, rank).to_dict()
            except BaseException as error:
                (folder / ERROR_FILE.format(rank=rank)).write_text("\n".join(explain(error)))
                raise

        parts = strategy.launch(case, entry, folder)
        return merge([Trial.from_dict(part) for part in parts])
    except BaseException as error:
        return _failed(case, *(_killed(error) or _of_ranks(folder, len(case.rows)) or explain(error)))


def run_together(cases: Sequence[Case], effort: Effort, folder: Path) -> list[Trial]:
    """Run cases side by side in this process: those that can be prepared; an error in a step ends all of them."""
    if len(cases) == 1:
        return [run(cases[0], effort, folder)]
    done, subjects = {}, []
    for case in cases:
        strategy = registry.load("strategies", case.strategy)
        if reason := _skip(strategy, case):
            done[case] = Trial(case=case, status=Status.SKIPPED, reason=reason)
            continue
        try:
            subjects.append(prepare(case, strategy))
        except BaseException as error:
            done[case] = _failed(case, *explain(error))
    try:
        done |= {trial.case: trial for trial in measure_together(subjects, effort)}
    except BaseException as error:
        status, reason = explain(error)
        beside = f"{reason} [measured side by side with {len(subjects) - 1} other(s), which ended too]"
        done |= {subject.case: _failed(subject.case, status, beside) for subject in subjects}
    return [done[case] for case in cases]


def _skip(strategy: ModuleType, case: Case) -> str:
    """Return why a strategy cannot run a case; empty when it can."""
    reason: str = getattr(strategy, "skip", lambda case: "")(case)
    return reason


def _failed(case: Case, status: str, reason: str) -> Trial:
    """Return the trial of a case that ended in an error."""
    return Trial(
        case=case, status=Status(status), reason=reason, verified=_verified(reason),
        failed_device=failed_device(case, reason) if status == Status.OOM else None,
    )  # fmt: skip


def explain(error: BaseException) -> tuple[str, str]:
    """Return status and reason of an error: what, where, the numbers, and the last lines of its traceback."""
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
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in NO_MEMORY)


def _device_in(message: str) -> str:
    """Return the device that torch's message names."""
    named = re.search(r"(GPU|emulated device) (\d+) has a total capacity", message)
    if named:
        return f"device {'cuda' if named.group(1) == 'GPU' else 'emulated'}:{named.group(2)}"
    return "device cuda" if "CU" in message else "device cpu"


def failed_device(case: Case, reason: str) -> int | None:
    """Return the index of the device that a reason names, rank before replica before device; None if it names none."""
    for named in (r"^rank (\d+): ", r"out of memory on replica (\d+) "):
        if found := re.search(named, reason):
            return int(found.group(1))
    found = re.search(r"out of memory on device (?:cuda|emulated):(\d+)", reason)
    if found is None:
        return None
    ordinal = int(found.group(1))
    return case.device_ids.index(ordinal) if ordinal in case.device_ids else ordinal


def _killed(error: BaseException) -> tuple[str, str] | None:
    """Return status and reason when a signal ended a rank; the launcher itself ends the others by SIGTERM."""
    for rank, failure in sorted(getattr(error, "failures", {}).items()):
        if failure.exitcode < 0 and -failure.exitcode not in (signal.SIGTERM, signal.SIGINT):
            return Status.FAILED, f"rank {rank} was killed by {signal.Signals(-failure.exitcode).name}"
    return None


def _of_ranks(folder: Path, ranks: int) -> tuple[str, str] | None:
    """Return status and reason that the lowest failed rank wrote; its own error, not its peers' broken links."""
    found = []
    for file in sorted(folder.glob(ERROR_FILE.format(rank="*"))):
        status, _, reason = file.read_text().partition("\n")
        rank = file.stem.rpartition("-")[2]
        found.append((file.stat().st_mtime_ns, status, f"rank {rank}: {reason}"))
    # an out-of-memory kills the others' connections: it is the cause, then whoever failed first
    found.sort(key=lambda row: (row[1] != Status.OOM, _lost_peer(row[2]), row[0]))
    if found and _lost_peer(found[0][2]):
        return Status.FAILED, _silent(folder, ranks)
    return found[0][1:] if found else None


def _lost_peer(reason: str) -> bool:
    return any(sign in reason for sign in LOST_PEER)


def _silent(folder: Path, ranks: int) -> str:
    """Say which ranks ended without a word, their peers' connections with them, and by which signal if any told."""
    left = [rank for rank in range(ranks) if not (folder / ERROR_FILE.format(rank=rank)).exists()]
    log = (folder / "log").read_text(errors="replace") if (folder / "log").exists() else ""
    told = next(
        (f"killed by {name}" for words, name in FATAL.items() if f"Fatal Python error: {words}" in log), "killed"
    )
    return (
        f"rank {', '.join(map(str, left)) or '?'} ended without a word ({told}), and its peers lost their connections"
    )


def _verified(reason: str) -> Verified:
    return Verified.NO if "its gradients are wrong" in reason else Verified.NOT_APPLICABLE


def merge(parts: Sequence[Trial]) -> Trial:
    """Join the ranks' trials; see `ledger.joined` for their steps and spans. Samples are all kept."""
    if len(parts) == 1:
        return parts[0]
    steps, spans = ledger.joined(parts)
    resident = sum(m.peak_bytes for part in parts for m in part.memory if m.device == HOST)
    of_devices = tuple(m for part in parts for m in part.memory if m.device != HOST)
    order = list(Verified)
    slowest: Callable[[str], float] = lambda stage: max(part.setup.get(stage, 0.0) for part in parts)  # noqa: E731
    return replace(
        parts[0],
        verified=max((part.verified for part in parts), key=order.index),
        steps=steps,
        spans=spans,
        samples=tuple(sample for part in parts for sample in part.samples),
        memory=(*of_devices, Memory(HOST, resident, "rss")),
        setup={stage: slowest(stage) for stage in parts[0].setup},
    )
