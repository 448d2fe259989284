"""Batch search: double the batch until it no longer fits, then bisect; every try runs in a fresh worker.

Running out of memory is an expected result, which ends neither the search nor the run. Every try is stored as an
ordinary trial, and an interrupted search continues from the stored tries.
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
"""The effort of a try: one warm-up step, which creates the optimizer's state, then two steps with that state."""
MOST = 2**20
"""The largest batch size that a search tries."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of the search for one case.

    `largest` is the largest batch size that fits, `failed` the smallest that ran out of memory; None means that no try
    had this result. `device` is the index of the device that ran out of memory first at the batch size `failed`.
    `reason` explains why the search ended without finding the limit; it is empty if the search found it. `case` has the
    batch size `largest`, or the batch size at which the search started if none fits.
    """

    case: Case
    largest: int | None
    failed: int | None
    device: int | None
    tries: int
    reason: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """The results of a run's searches, one per case."""

    run_id: str
    resumed: bool
    found: tuple[Found, ...]


class _Ended(Exception):
    """A try ended neither ok nor out of memory, so the search cannot continue."""


def check(cases: Iterable[Case]) -> None:
    """Check that the devices of each case have separate memory of a known size. Raises ValueError otherwise."""
    for case in cases:
        if case.device_kind == "cpu":
            raise ValueError(
                "--find-max-batch needs devices with separate memory, but logical CPU devices share the host's; "
                "use emulated devices, which count every byte: --device-kind emulated --device-memory 8GiB"
            )
        if case.device_kind == "emulated" and not case.device_memory_bytes:
            raise ValueError(
                "--find-max-batch on emulated devices needs their memory size: give --device-memory, such as 8GiB"
            )


def run(
    cases: Sequence[Case],
    store: Store,
    *,
    limit_s: float = 120.0,
    most: int = MOST,
    listen: Callable[[Trial], None] = lambda trial: None,
) -> SearchOutcome:
    """Search for the largest batch of every case, starting at the case's batch size, and store each try when it ends.

    `limit_s` limits the duration of one try in seconds, `most` the batch size. `listen` is called with every new try,
    but not with the tries of an earlier session.
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
    return SearchOutcome(run_id, resumed, found)


def axes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a sweep, with 1 as the batch size at which the search starts if none is given.

    Raises ValueError for options that a search does not support.
    """
    for axis in ("ladder", "batch_per_device", "budget", "retry"):
        if options[axis]:
            raise ValueError(f"--find-max-batch tries batches until one fails: leave out --{axis.replace('_', '-')}")
    if len(options["batch_sizes"] or ()) > 1:
        raise ValueError("--find-max-batch starts at one batch size: give --batch-sizes one number, or leave it out")
    return {**options, "batch_sizes": options["batch_sizes"] or (1,)}


class _Tries:
    """The tries of one run, including those of earlier sessions."""

    def __init__(
        self, server: Server, store: Store, run_id: str, limit_s: float, listen: Callable[[Trial], None]
    ) -> None:
        self._server, self._store, self._run_id, self._limit_s, self._listen = server, store, run_id, limit_s, listen
        self._known = {trial.case: trial for trial in store.trials(run_id) if trial.status in FINAL}

    def of(self, case: Case) -> Trial:
        """Return the case's trial; run and store it first if the run does not have it yet."""
        if case not in self._known:
            trial_id = self._store.begin_trial(self._run_id, case, 0)
            trial = self._server.run(case, EFFORT, 0, self._limit_s)
            self._store.end_trial(trial_id, trial)
            self._known[case] = trial
            self._listen(trial)
        return self._known[case]


def _search(case: Case, tries: _Tries, most: int) -> Found:
    """Return the result of the search for one case."""
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
        reason = f"no limit reached up to batch {largest}"
    return Found(
        case=replace(case, batch_size=largest or case.batch_size), largest=largest, failed=smallest,
        device=made[smallest].failed_device if smallest else None, tries=len(made), reason=reason,
    )  # fmt: skip


def bracket(fits: Callable[[int], bool], *, start: int, unit: int, most: int) -> tuple[int, int | None]:
    """Return the largest multiple of `unit` that fits (0 if none does), and the next multiple, which does not fit.

    The second value is None if the largest multiple up to `most` fits. The search starts at `start`, rounded up to a
    multiple of `unit`. Fragmented memory can make a batch fail although a larger one fits; even then, the two results
    are neighbouring multiples.
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
    """Return a plain text table with one line per case; the line of an incomplete search ends with the reason."""
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
