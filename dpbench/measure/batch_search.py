"""Batch search: find the largest batch size that fits into memory, by doubling and then bisection.

Every try runs one case with one batch size in a fresh worker process. Running out of memory is an
expected result of a try; it does not end the search or the run. Every try is stored as an ordinary
trial, and an interrupted search continues from the stored tries, unless the code has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dpbench.measure.run import collect, identity
from dpbench.measure.scratch import folder
from dpbench.measure.server import Server
from dpbench.measure.stopping import Fixed
from dpbench.records import Case, Effort, Status, Trial
from dpbench.records.errors import UsageError
from dpbench.records.options import Options
from dpbench.records.trial import FINAL
from dpbench.store import FINISHED, INTERRUPTED, Identity, Store

EFFORT = Effort(
    budget_s=0.0,
    warmup_steps=1,
    min_steps=2,
    max_steps=2,
    block_steps=1,
    slow=False,
    memory_by_phase=False,
    profile=False,
    marks=False,
    links=False,
)
"""Each try has one warm-up step, which creates the optimizer's state, and two more steps.

Nothing else is measured: it would take time, and perhaps memory that no step needs.
"""
MOST = 2**20
"""The default for the largest batch size that a search tries."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The result of the search for one case.

    `largest` is the largest batch size that fitted, and `failed` the smallest that ran out of
    memory; each is None if there is none. `device` is the index of the device that ran out of
    memory first at the batch size `failed`, or None if unknown. `tries` is the number of batch
    sizes tried. `reason` says why the search ended without finding the limit (otherwise empty).
    `case` is the searched case with the batch size `largest`, or its initial batch size if none
    fitted.
    """

    case: Case
    largest: int | None
    failed: int | None
    device: int | None
    tries: int
    reason: str = ""


@dataclass(frozen=True)
class SearchOutcome:
    """The results of the batch searches of one run, one per case.

    `resumed` is True if the searches continued an interrupted run.
    """

    run_id: str
    resumed: bool
    found: tuple[Found, ...]


class _Ended(Exception):
    """A try neither fitted nor ran out of memory (for example, it timed out)."""


def check(cases: Iterable[Case]) -> None:
    """Raise ValueError if a case's devices lack separate memory of a known size."""
    for case in cases:
        if case.device_kind == "cpu":
            raise UsageError(
                "{} needs devices with separate memory, but logical CPU devices share the host's"
                " memory; use emulated devices, whose memory is counted",
                option="find_max_batch",
                value=True,
                remedy="give {device_kind:emulated} {device_memory:8GiB}",
            )
        if case.device_kind == "emulated" and not case.device_memory_bytes:
            raise UsageError(
                "{} needs the memory size of emulated devices",
                option="find_max_batch",
                value=True,
                remedy="give {device_memory}, such as 8GiB",
            )


def run(
    cases: Sequence[Case],
    store: Store,
    *,
    limit_s: float = 120.0,
    most: int = MOST,
    listen: Callable[[Trial], None] = lambda trial: None,
) -> SearchOutcome:
    """Search for the largest batch size of every case, and store each try when it ends.

    Each search starts at the batch size of its case. `limit_s` is the time limit of one try in
    seconds, and `most` the largest batch size to try. `listen` is called with the trial of every
    new try, but not with tries stored before this call.
    """
    check(cases)
    facts = collect(None)
    usual = identity(cases, Fixed(1), facts, paired=False)
    name = hashlib.sha256(f"find-max-batch {most} {usual.plan}".encode()).hexdigest()
    run_id, resumed = store.begin_run(
        Identity(name, usual.host, usual.code), rounds=1, provenance=facts
    )
    finished = False
    try:
        with folder() as scratch, Server(scratch) as server:
            tries = _Tries(server, store, run_id, limit_s, listen)
            results = tuple(_search(case, tries, most) for case in cases)
        finished = not tries.killed
    finally:
        store.end_run(run_id, FINISHED if finished else INTERRUPTED)
    return SearchOutcome(run_id, resumed, results)


def axes(options: Options) -> Options:
    """Return `options` with one initial batch size (default 1) in `batch_sizes`.

    Raises ValueError for an option that a search does not support, and for several batch sizes.
    """
    options.refuse(
        ("ladder", "batch_per_device", "rounds", "budget", "retry", "paired", "profile"),
        "{find_max_batch:True} does not support {}",
    )
    if len(options.batch_sizes) > 1:
        raise UsageError(
            "{} starts at a single batch size",
            option="find_max_batch",
            value=True,
            remedy="give only one number with {batch_sizes}",
        )
    return replace(options, batch_sizes=options.batch_sizes or (1,))


class _Tries:
    """The tries of one run, including those that earlier sessions have stored."""

    def __init__(
        self,
        server: Server,
        store: Store,
        run_id: str,
        limit_s: float,
        listen: Callable[[Trial], None],
    ) -> None:
        self._server = server
        self._store = store
        self._run_id = run_id
        self._limit_s = limit_s
        self._listen = listen
        self._known = {trial.case: trial for trial in store.trials(run_id) if trial.status in FINAL}

    @property
    def killed(self) -> bool:
        """Return whether a signal from outside has ended a try, which must then be repeated."""
        return any(trial.status is Status.KILLED for trial in self._known.values())

    def of(self, case: Case) -> Trial:
        """Return the case's stored trial with a final status, or else run and store a new one."""
        if case not in self._known:
            trial_id = self._store.begin_trial(self._run_id, case, 0)
            trial = self._server.run(case, EFFORT, 0, self._limit_s)
            self._store.end_trial(trial_id, trial)
            self._known[case] = trial
            self._listen(trial)
        return self._known[case]


def _search(case: Case, tries: _Tries, most: int) -> Found:
    made: dict[int, Trial] = {}

    def fits(batch: int) -> bool:
        trial = made[batch] = tries.of(replace(case, batch_size=batch))
        if trial.status not in (Status.OK, Status.OOM):
            raise _Ended(
                f"{trial.status} at batch {batch}: {trial.reason.strip().rpartition(chr(10))[2]}"
            )
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
        reason = f"no try ran out of memory; the largest batch size tried was {largest}"
    return Found(
        case=replace(case, batch_size=largest or case.batch_size),
        largest=largest,
        failed=smallest,
        device=made[smallest].failed_device if smallest else None,
        tries=len(made),
        reason=reason,
    )


def bracket(
    fits: Callable[[int], bool], *, start: int, unit: int, most: int
) -> tuple[int, int | None]:
    """Return neighbouring multiples of `unit`: a batch size that fits (or 0), and one that fails.

    The second value is None if every tried batch size fits. The search starts at `start`, rounded
    up to a multiple of `unit`; only this first batch size can be above `most`. If memory is
    fragmented, a batch size can fail although a larger one fits; the first value is then not always
    the largest that fits.
    """
    good = 0
    bad = None
    tried = -(-start // unit)
    last = max(tried, most // unit)
    while bad is None and good < last:
        if fits(tried * unit):
            good = tried
            tried = min(2 * tried, last)
        else:
            bad = tried
    while bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle * unit):
            good = middle
        else:
            bad = middle
    return good * unit, None if bad is None else bad * unit
