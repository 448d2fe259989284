"""Find the largest batch that fits: doubling, then halving the gap, each try a fresh worker's trial.

Out of memory is what a search looks for, and ends neither the search nor the run. Every try is stored as a trial like
any other, and a search that was interrupted goes on from those.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.hardware import provenance
from dpbench.hardware.nvml import describe
from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Status, Trial, plan, words
from dpbench.records.words import aligned
from dpbench.store import FINAL, Store

EFFORT = Effort(budget_s=0.0, warmup_steps=1, min_steps=2, max_steps=2, block_steps=1)
"""Enough for the optimizer's state to be there, and for all of a step to have been beside it."""
MOST = 2**20
"""Rows of a batch at which a search that met no limit ends."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search came to: the largest batch that fits and the smallest that did not, None where there is none.

    `device` is the one that ran out first at the smallest that failed. `reason` says why a search ended without both.
    `case` has the largest batch, or the first that was tried.
    """

    case: Case
    largest: int | None
    failed: int | None
    device: int | None
    tries: int
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """A run of searches, one a case."""

    run_id: str
    resumed: bool
    found: tuple[Found, ...]


class _Ended(Exception):
    """A try that says nothing about memory."""


def check(cases: Iterable[Case]) -> None:
    """Refuse a search where nothing says how much memory a device has."""
    for case in cases:
        if case.device_kind == "cpu":
            raise ValueError(
                "--find-max-batch needs devices with a memory of their own, and logical CPU devices share the host's; "
                "give --device-kind emulated --device-memory 8GiB, which counts every byte of each device"
            )
        if case.device_kind == "emulated" and not case.device_memory_bytes:
            raise ValueError(
                "--find-max-batch on emulated devices needs their size: give --device-memory, such as 8GiB"
            )


def run(
    cases: Sequence[Case],
    store: Store,
    *,
    limit_s: float = 120.0,
    most: int = MOST,
    listen: Callable[[Trial], None] = lambda trial: None,
) -> Outcome:
    """Search the largest batch of every case, from its own batch size on, and store each try as it ends.

    `limit_s` bounds one try, `most` the batch. `listen` hears of every try, those of an earlier session left out.
    """
    check(cases)
    facts = provenance.collect(describe())
    host, code = provenance.host_key(facts), provenance.code_key(facts)
    name = hashlib.sha256(f"find-max-batch {most} {plan.plan_hash(cases, 1)}".encode()).hexdigest()
    run_id, resumed = store.begin_run(plan=name, host=host, code=code, rounds=1, provenance=facts)
    finished, scratch = False, Path(tempfile.mkdtemp(prefix="dpbench-"))
    try:
        with Server(scratch) as server:
            tries = _Tries(server, store, run_id, limit_s, listen)
            found = tuple(_search(case, tries, most) for case in cases)
        finished = True
    finally:
        store.end_run(run_id, "finished" if finished else "interrupted")
        shutil.rmtree(scratch, ignore_errors=True)
    return Outcome(run_id, resumed, found)


def axes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a sweep with the batch that a search begins at; ValueError for those that say otherwise."""
    for axis in ("ladder", "batch_per_device", "budget", "retry"):
        if options[axis]:
            raise ValueError(f"--find-max-batch tries batches until one fails: leave out --{axis.replace('_', '-')}")
    if len(options["batch_sizes"] or ()) > 1:
        raise ValueError("--find-max-batch begins at one batch: give --batch-sizes one number, or leave it out")
    return {**options, "batch_sizes": options["batch_sizes"] or (1,)}


class _Tries:
    """The tries of one run, those of earlier sessions included."""

    def __init__(
        self, server: Server, store: Store, run_id: str, limit_s: float, listen: Callable[[Trial], None]
    ) -> None:
        self._server, self._store, self._run_id, self._limit_s, self._listen = server, store, run_id, limit_s, listen
        self._known = {trial.case: trial for trial in store.trials(run_id) if trial.status in FINAL}

    def of(self, case: Case) -> Trial:
        """Return the case's trial, made now unless it is known."""
        if case not in self._known:
            trial_id = self._store.begin_trial(self._run_id, case, 0)
            trial = self._server.run(case, EFFORT, 0, self._limit_s)
            self._store.end_trial(trial_id, trial)
            self._known[case] = trial
            self._listen(trial)
        return self._known[case]


def _search(case: Case, tries: _Tries, most: int) -> Found:
    """Search one case; a try that ends in another way than ok or out of memory ends the search."""
    made: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        trial = made[batch] = tries.of(replace(case, batch_size=batch))
        if trial.status not in (Status.OK, Status.OOM):
            raise _Ended(f"{trial.status} at batch {batch}: {trial.reason.strip().rpartition(chr(10))[2]}")
        return trial.status is Status.OK

    reason = ""
    try:
        bracket(fits, start=case.batch_size, unit=case.devices, most=most)
    except _Ended as ended:
        reason = str(ended)
    fitted = [batch for batch, trial in made.items() if trial.status is Status.OK]
    failed = [batch for batch, trial in made.items() if trial.status is Status.OOM]
    largest, smallest = max(fitted, default=None), min(failed, default=None)
    if not reason and smallest is None:
        reason = f"no limit met up to batch {largest}"
    return Found(
        case=replace(case, batch_size=largest or case.batch_size), largest=largest, failed=smallest,
        device=made[smallest].failed_device if smallest else None, tries=len(made), reason=reason,
    )  # fmt: skip


def bracket(fits: Callable[[int], bool], *, start: int, unit: int, most: int) -> tuple[int, int | None]:
    """Return the largest multiple of `unit` that fits (0: none) and the next one, which does not (None: past most).

    Begins at `start`, rounded up. Where fitting is not monotone, as it need not be when an allocator's memory is in
    pieces, the two are neighbours all the same.
    """
    good, bad, at = 0, None, -(-start // unit)
    last = max(at, most // unit)
    while bad is None and good < last:
        if fits(at * unit):
            good, at = at, min(2 * at, last)
        else:
            bad = at
    while bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle * unit):
            good = middle
        else:
            bad = middle
    return good * unit, None if bad is None else bad * unit


COLUMNS = ("model", "strategy", "devices", "largest batch", "per device", "smallest failed", "failed first", "tries")


def table(found: Sequence[Found]) -> str:
    """Return a plain text table, a line a case; what has no answer says why."""
    head, rule, *lines = aligned([COLUMNS, *map(_cells, found)], left=(0, 1))
    rows = [f"{line}  {one.reason}" if one.reason else line for line, one in zip(lines, found, strict=True)]
    return "\n".join([head, rule, *rows])


def _cells(one: Found) -> tuple[str, ...]:
    case = one.case
    name = case.strategy + (f"[{case.schedule}]" if case.schedule not in ("", "reference") else "")
    per_device = "" if one.largest is None else words.exact(one.largest / case.devices)
    failed_first = "" if one.failed is None else "unknown" if one.device is None else f"device {one.device}"
    return (
        case.model, name, str(case.devices), "none" if one.largest is None else str(one.largest), per_device,
        "" if one.failed is None else str(one.failed), failed_first, str(one.tries),
    )  # fmt: skip
