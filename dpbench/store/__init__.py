"""Store: keep runs and trials in one SQLite file that stays consistent if the process is killed.

Writers commit one trial at a time; readers open the file read-only. The row of a trial is written
before its worker starts, with the status `running`. When a run is resumed, trials that still have
this status become `killed` and are repeated.
"""

from __future__ import annotations

import json
import logging
import math
import shlex
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any, NoReturn, Self

from dpbench.records import SCHEMA, Case, Status, Trial, hidden, locks, words
from dpbench.records.environment import Environment, differences
from dpbench.records.errors import told
from dpbench.records.facts import Growth, RunFacts
from dpbench.records.plan import Parts
from dpbench.records.spelling import dashed
from dpbench.records.trial import FINAL
from dpbench.store import copying, file, locking, rows, summaries
from dpbench.store.copying import Merged
from dpbench.store.file import DamagedStore, StoreError
from dpbench.store.rows import UnreadableRow
from dpbench.store.runs import (
    FINISHED,
    LATEST,
    PREDICTED,
    Identity,
    Naming,
    PastRun,
    StoredRun,
    inside,
    new_id,
)

__all__ = [
    "FINISHED",
    "INTERRUPTED",
    "OPEN",
    "LATEST",
    "PAST",
    "DamagedStore",
    "Growth",
    "Merged",
    "Identity",
    "Naming",
    "PastRun",
    "Store",
    "StoreError",
    "StoredRun",
    "UnreadableRow",
    "inside",
]

log = logging.getLogger(__name__)
RUNNING = "running"
OPEN = "open"
"""The status of a run that used up its time before its answers were settled or its rounds done."""
INTERRUPTED = "interrupted"
GONE, OVERWRITTEN = "deleted or replaced", "overwritten or damaged"
"""How a store can be lost to the process that writes to it."""
_RANKED = (
    "SELECT id, run_id, status, row_number() OVER (PARTITION BY run_id, fingerprint, round ORDER BY"
    " status IN ('running', 'killed'), status='ok' AND verified<>'no' DESC, id DESC) AS place FROM"
    " trial"
)
"""The id, run, status and place of all trials, without large columns, which sorting would copy.

`place` numbers the trials of one run, case and round from 1; only trials with place 1 count.
"""


PAST = 50
"""The most earlier runs of each case in a report."""
EARLIER = 100
"""The most earlier trials of each case from which the time of a plan is forecast."""


def _beginning(column: str) -> str:
    """Return the SQL condition that a text is '?' (unknown) or begins with a value.

    Its parameters are the value and `_after(value)`.
    """
    return f"({column}>=? AND {column}<? OR {column}='?')"


def _after(beginning: str) -> str:
    """Return a text that sorts after all texts with this beginning."""
    return f"{beginning}\U0010ffff"


def _start(row: tuple[object, int, str]) -> tuple[float, int]:
    """Return the sort key of a run's row by start; a start that is no number comes last."""
    return (row[0] if isinstance(row[0], float) else math.inf), row[1]


def _write(db: file.Connection, trial_id: int, trial: Trial) -> bool:
    """Store the results of a trial; return whether its row exists."""
    updated = db.execute(
        "UPDATE trial SET status=?, reason=?, verified=?, source=?, schema=?, setup=?,"
        " provenance=?, failed_device=?, summary=? WHERE id=?",
        (
            trial.status,
            rows.short(hidden.text(trial.reason)),
            trial.verified,
            trial.source,
            trial.schema,
            json.dumps(dict(trial.setup)),
            json.dumps(hidden.everywhere(trial.provenance)),
            trial.failed_device,
            summaries.packed(trial),
            trial_id,
        ),
    )
    if not updated.rowcount:
        return False
    db.executemany(
        "INSERT INTO step VALUES (?,?,?,?,?)",
        [(trial_id, i, s.seconds, int(s.warmup), s.end_s) for i, s in enumerate(trial.steps)],
    )
    db.executemany(
        "INSERT INTO span VALUES (?,?,?,?,?,?,?,?)",
        [
            (trial_id, i, s.step, s.phase, s.device, s.clock, s.start_s, s.end_s)
            for i, s in enumerate(trial.spans)
        ],
    )
    db.executemany(
        "INSERT INTO memory VALUES (?,?,?,?,?,?)",
        [(trial_id, m.device, m.peak_bytes, m.source, m.phase, m.kind) for m in trial.memory],
    )
    db.executemany(
        "INSERT INTO series VALUES (?,?,?,?,?,?,?,?)", rows.series_rows(trial_id, trial.samples)
    )
    return True


@dataclass
class _Measured:
    """A run to which a Store adds trials: its lock, and the trials that this Store has begun.

    `ended` has, for each of them by id, whether it has ended, and `spares` the id of its copy.
    """

    lock: locks.Lock
    ended: dict[int, bool] = field(default_factory=dict)
    spares: dict[int, int] = field(default_factory=dict)


class Store:
    """An open store, which is a context manager.

    Use `Store.create` for writing, and `Store.read` for reading only.
    """

    def __init__(
        self,
        path: Path,
        connection: file.Connection,
        *,
        writes: bool,
        naming: Naming | None = None,
        unreadable: Callable[[UnreadableRow], None] | None = None,
    ) -> None:
        self.path = path
        self._db = connection
        self._writes = writes
        self._naming = naming or Naming()
        self._unreadable = unreadable
        self._named: set[tuple[str, int]] = set()
        """The unreadable rows that were passed to `unreadable`, as pairs of a table and a row."""
        self._measured: dict[str, _Measured] = {}
        """The runs to which this object adds trials."""
        self._spare: file.Connection | None = None
        """A copy of what this object has added to them, for the case that the file is lost."""

    @classmethod
    def create(cls, path: Path, naming: Naming | None = None) -> Store:
        """Return the store at `path`, opened for writing; create or migrate the file if necessary.

        Runs that begin through this object get the name, tags and command in `naming`. Raises
        StoreError if the file is not a store, or if a newer version of dpbench has written it.
        """
        connection = file.open_to_write(path)
        locking.sweep(path)
        return cls(path, connection, writes=True, naming=naming)

    @classmethod
    def read(cls, path: Path, unreadable: Callable[[UnreadableRow], None] | None = None) -> Store:
        """Return the store at `path`, opened read-only.

        Methods that read several rows pass each unreadable row to `unreadable`, each once, and
        return the others; if `unreadable` is None, they raise UnreadableRow. Raises StoreError if
        the file is missing or is not a store.
        """
        return cls(path, file.open_to_read(path), writes=False, unreadable=unreadable)

    @property
    def traces(self) -> Path:
        """Return the folder for profiles of trials: one folder per run, given by `inside`."""
        return self.path.with_name(f"{self.path.name}.traces")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if self._writes and not self._db.lost:
                # an earlier error is the one to show
                with suppress(StoreError) if kind else nullcontext():
                    file.fold(self._db)
        finally:
            self._db.close()
            for run_id in [*self._measured]:
                self._release(run_id)

    # -- runs

    def begin_run(
        self,
        identity: Identity,
        *,
        rounds: int,
        provenance: Mapping[str, Any],
        reopen: bool = False,
        started_s: float | None = None,
    ) -> tuple[str, bool]:
        """Return the id of the run to add trials to, and whether it is a resumed run.

        The latest unfinished run with the same identity, name and tags is resumed, or with `reopen`
        also a finished one. Without one, the latest run on this host and code is resumed if its
        cases and rounds are a part of this plan; the run then has a `growth`. Otherwise a new run
        is added; a warning says so if there is a run with this plan that is not resumed because its
        environment differs. Trials of the resumed run that are still `running` become `killed`.
        `started_s` is the start of a new run in seconds since the epoch (default: now). The run is
        locked until `end_run`, or until this object is closed.
        Raises StoreError if another process, or another Store, has locked it.
        """
        identified = self._naming.identified(identity.plan)
        parts = identity.parts
        provenance = self._naming.added_to(provenance)
        with file.transaction(self._db):
            same = self._latest(self._naming, identity, reopen)
            earlier = same or self._part(self._naming, identity)
            if earlier:
                self._measure(earlier)
                self._db.execute("UPDATE run SET status=? WHERE id=?", (RUNNING, earlier))
                self._kill_running(earlier)
                if parts and not same:
                    self._annotate(earlier, "growth", asdict(self._grown(earlier, parts)))
                    # the command that goes on with the run
                    self._annotate(earlier, "command", provenance.get("command", ""))
                    self._db.execute(
                        "UPDATE run SET plan=?, rounds=? WHERE id=?", (identified, rounds, earlier)
                    )
                return earlier, True
            self._tell_unlike(identified, provenance, reopen)
            run_id = new_id()
            self._measure(run_id)
            # pid and pid_born are of earlier versions, which have no locks
            self._db.execute(
                "INSERT INTO run (id, plan, host, code, status, started, rounds, pid, pid_born,"
                " provenance) VALUES (?,?,?,?,?,?,?,0,0,?)",
                (
                    run_id,
                    identified,
                    identity.host,
                    identity.code,
                    RUNNING,
                    started_s or time.time(),
                    rounds,
                    json.dumps(hidden.everywhere(provenance)),
                ),
            )
            return run_id, False

    def _measure(self, run_id: str) -> None:
        """Lock a run, unless this object has done so. Raises StoreError if another one has."""
        if run_id not in self._measured:
            self._measured[run_id] = _Measured(locking.take(self.path, run_id))

    def _release(self, run_id: str) -> None:
        if run_id in self._measured:
            self._measured.pop(run_id).lock.release()
        if self._spare and not self._measured:
            self._spare.close()
            self._spare = None

    def unfinished(
        self, naming: Naming, identity: Identity, *, reopen: bool = False
    ) -> tuple[str, Growth] | None:
        """Return the id of the run that `begin_run` would resume, and what would be its `growth`.

        None if it would add a new run. `naming` has the name and the tags of the run.
        """
        with file.snapshot(self._db):
            if run_id := self._latest(naming, identity, reopen):
                return run_id, self.growth(run_id)
            run_id = self._part(naming, identity)
            parts = identity.parts
            return (run_id, self._grown(run_id, parts)) if run_id and parts else None

    def _latest(self, naming: Naming, identity: Identity, reopen: bool) -> str | None:
        """Return the id of the run to resume."""
        query = (
            "SELECT id, rowid FROM run WHERE plan=? AND host=? AND code=? AND status<>? ORDER BY"
            " started DESC LIMIT 1"
        )
        plan = naming.identified(identity.plan)
        unlike = "" if reopen else FINISHED
        row = self._db.execute(query, (plan, identity.host, identity.code, unlike)).fetchone()
        if row:
            rows.run(self._db, row[1])  # raises for a damaged row
        return row and str(row[0])

    def _part(self, naming: Naming, identity: Identity) -> str | None:
        """Return the id of the latest run on this host and code if it has a part of a plan."""
        query = (
            "SELECT id, rowid, plan, rounds FROM run WHERE host=? AND code=? ORDER BY started DESC"
            " LIMIT 1"
        )
        parts = identity.parts
        place = (identity.host, identity.code)
        row = self._db.execute(query, place).fetchone() if parts else None
        if not row or not parts:
            return None
        smaller = parts.smaller({case for case, _ in self.begun(row[0])}, row[3])
        if smaller is None or naming.identified(smaller) != row[2]:
            return None
        rows.run(self._db, row[1])  # raises for a damaged row
        return str(row[0])

    def _tell_unlike(self, plan: str, provenance: Mapping[str, Any], reopen: bool) -> None:
        """Log a warning if the latest run to resume with a plan is of another environment.

        This run has been ruled out by its `code`, which has the key of its environment.
        """
        query = "SELECT rowid FROM run WHERE plan=? AND status<>? ORDER BY started DESC LIMIT 1"
        row = self._db.execute(query, (plan, "" if reopen else FINISHED)).fetchone()
        if not row:
            return
        with suppress(UnreadableRow):
            earlier = rows.run(self._db, row[0])
            then = Environment.of(earlier.facts)
            now = Environment.of(RunFacts.of(hidden.everywhere(provenance)))
            if then.key != now.key:
                log.warning(
                    "a new run begins: the run %s with the same plan was measured in an environment"
                    " that is not known to be this one (%s), and measurements in both are not"
                    " mixed",
                    earlier.id[:8],
                    "; ".join(map(str, differences(then, now))),
                )

    def begun(self, run_id: str) -> set[tuple[str, int]]:
        """Return (fingerprint, round) of each trial of a run that was begun."""
        query = "SELECT DISTINCT fingerprint, round FROM trial WHERE run_id=?"
        return set(self._db.execute(query, (run_id,)).fetchall())

    def _grown(self, run_id: str, parts: Parts) -> Growth:
        """Return the growth of a run to a plan: its further cases join it in the next round."""
        begun = self.begun(run_id)
        number = 1 + max(each for _, each in begun)
        before = self.growth(run_id)
        added = dict.fromkeys(parts.cases - {case for case, _ in begun}, number)
        return Growth(joined={**before.joined, **added}, looks=before.looks + 1)

    def facts(self, run_id: str) -> RunFacts:
        """Return what a run states. Raises ValueError for a fact of a wrong type."""
        return RunFacts.of(self.provenance(run_id))

    def growth(self, run_id: str) -> Growth:
        """Return how the plan of a run has grown."""
        return self.facts(run_id).growth

    def end_run(self, run_id: str, status: str = FINISHED) -> None:
        """Set the final status of a run; a run whose status is not `finished` can be resumed.

        Trials of the run that are still `running` become `killed`.
        """
        with file.transaction(self._db):
            self._kill_running(run_id)
            self._db.execute(
                "UPDATE run SET status=?, ended=? WHERE id=?", (status, time.time(), run_id)
            )
        self._release(run_id)

    def annotate(self, run_id: str, name: str, facts: Mapping[str, Any]) -> None:
        """Store `facts` in a run's provenance under the key `name`, replacing earlier ones."""
        with file.transaction(self._db):
            self._annotate(run_id, name, facts)

    def _annotate(self, run_id: str, name: str, facts: Mapping[str, Any] | str) -> None:
        added = json.dumps(hidden.everywhere({**self.provenance(run_id), name: facts}))
        self._db.execute("UPDATE run SET provenance=? WHERE id=?", (added, run_id))

    def provenance(self, run_id: str) -> dict[str, Any]:
        """Return the facts that are stored with a run."""
        query = "SELECT provenance FROM run WHERE id=?"
        found = self._db.execute(query, (run_id,)).fetchone()
        if found is None:
            raise self._removed()
        return dict(json.loads(found[0]))

    def _removed(self) -> StoreError:
        return StoreError(
            f"the run was removed from the store {self.path} while it was measured; the same"
            " command measures it again"
        )

    def _kill_running(self, run_id: str) -> None:
        self._db.execute(
            "UPDATE trial SET status=?, reason='the run ended before this trial had finished' "
            "WHERE run_id=? AND status=?",
            (Status.KILLED, run_id, RUNNING),
        )

    def keep_machine_result(self, host: str, started_s: float, result: str) -> None:
        """Store the text of a sibling's result on a machine, replacing an earlier one.

        `host` is the host key of the machine, and `started_s` in seconds since the epoch.
        """
        with file.transaction(self._db):
            self._db.execute(
                "INSERT OR REPLACE INTO examination VALUES (?,?,?)",
                (host, started_s, result),
            )

    def runs(self) -> list[StoredRun]:
        """Return all runs, the newest first."""
        return list(self.newest())

    def newest(self) -> Iterator[StoredRun]:
        """Yield all runs, the newest first; each is read when the caller asks for it."""
        return self._runs("TRUE")

    def newest_on(self, host: str) -> Iterator[StoredRun]:
        """Yield the runs on a machine, the newest first; `host` is its host key."""
        return self._runs("host=?", host)

    def matching(self, selector: str | None) -> list[StoredRun]:
        """Return the runs that `selector` names, the newest first.

        `selector` is @NAME or the beginning of a run's id; @last and None mean the newest run
        alone.
        """
        if selector is None or selector == f"@{LATEST}":
            return list(islice(self.newest(), 1))
        if selector.startswith("@"):
            named = self._runs(f"{file.NAME} IN (?, '?')", selector[1:])
            return [run for run in named if run.naming.name and run.naming.name == selector[1:]]
        return [
            run
            for run in self._runs(_beginning("id"), selector, _after(selector))
            if run.id.startswith(selector)
        ]

    def of_commit(self, beginning: str) -> list[StoredRun]:
        """Return the runs whose commit of dpbench or of the project may begin so, the newest first.

        A run whose provenance SQLite cannot read is returned too.
        """
        either = f"{_beginning(file.COMMIT)} OR {_beginning(file.PROJECT)}"
        limits = (beginning, _after(beginning))
        return list(self._runs(either, *limits, *limits))

    def _runs(self, condition: str, *values: str) -> Iterator[StoredRun]:
        with file.snapshot(self._db):
            ids = self._db.execute(
                f"SELECT rowid FROM run WHERE {condition} ORDER BY started DESC, rowid DESC", values
            )
            yield from self._read(rows.run, ids)

    def remove(self, run_ids: Sequence[str]) -> None:
        """Delete runs with their trials and profiles, and shrink the file.

        Raises StoreError, and deletes nothing, if a process is adding trials to one of the runs.
        """
        profiles = [inside(self.traces, run_id) for run_id in run_ids]
        with file.transaction(self._db):
            for run_id in run_ids:
                locking.refuse_measured(self.path, run_id)
                for table in copying.PARTS:
                    self._db.execute(
                        f"DELETE FROM {table} WHERE trial_id IN (SELECT id FROM trial WHERE"
                        " run_id=?)",
                        (run_id,),
                    )
                self._db.execute("DELETE FROM trial WHERE run_id=?", (run_id,))
                self._db.execute("DELETE FROM run WHERE id=?", (run_id,))
        # OperationalError: the file is in use, or the disk is full, and the file keeps its size
        with suppress(sqlite3.OperationalError):
            self._db.execute("VACUUM")
        from shutil import rmtree  # every command imports this module

        # what a link names is not the store's own
        for folder in profiles if not self.traces.is_symlink() else ():
            rmtree(folder, ignore_errors=True)

    def merge(self, part: Path) -> Merged:
        """Copy the runs and trials of the store `part` that are not yet here, in one transaction.

        Raises StoreError if `part` is not a store, if the stores contradict each other (see
        `copying.merge`), or if a process is adding trials to a run of `part`, in either store.
        """
        with Store.read(part) as other, file.snapshot(other._db), file.transaction(self._db):
            file.refuse_damaged(other._db)
            for run in other.runs():
                for path in (part, self.path):
                    locking.refuse_measured(path, run.id)
            return copying.merge(other._db, self._db)

    # -- trials

    def add(
        self,
        trials: Sequence[Trial],
        identity: Identity,
        *,
        provenance: Mapping[str, Any],
        status: str = FINISHED,
    ) -> str:
        """Add a run with ended trials and its final status, and return its id.

        It started with its first trial.
        """
        rounds = 1 + max((trial.round for trial in trials), default=0)
        run_id, _ = self.begin_run(
            identity,
            rounds=rounds,
            provenance=provenance,
            started_s=min((trial.started_s for trial in trials), default=None),
        )
        for trial in trials:
            trial_id = self.begin_trial(run_id, trial.case, trial.round, trial.started_s)
            self.end_trial(trial_id, trial)
        self.end_run(run_id, status)
        return run_id

    def done(self, run_id: str, *, retry: Iterable[str] = ()) -> set[tuple[str, int]]:
        """Return (fingerprint, round) of each trial of a run that a resumed run does not repeat.

        Its status is final and not in `retry`.
        """
        final = sorted({*FINAL} - {*retry})
        marks = ",".join("?" * len(final))
        query = f"SELECT fingerprint, round FROM trial WHERE run_id=? AND status IN ({marks})"
        return set(self._db.execute(query, (run_id, *final)).fetchall())

    def counts(self, run_id: str) -> dict[str, int]:
        """Return the number of a run's trials by status; repeated trials count once."""
        query = (
            f"SELECT status, count(*) FROM ({_RANKED}) WHERE run_id=? AND place=1 GROUP BY status"
        )
        return dict(self._db.execute(query, (run_id,)).fetchall())

    def outcomes(self, run_id: str) -> dict[Case, dict[str, int]]:
        """Return, for each case in the order of start, the number of its trials by status."""
        counters: dict[Case, Counter[str]] = {}
        query = f"SELECT id FROM ({_RANKED}) WHERE run_id=? AND place=1 ORDER BY id"
        with file.snapshot(self._db):
            ids = self._db.execute(query, (run_id,)).fetchall()
            for case, status in self._read(rows.outcome, ids):
                counters.setdefault(case, Counter())[status] += 1
        return {case: dict(counts) for case, counts in counters.items()}

    def durations(self, host: str, fingerprints: Iterable[str]) -> dict[str, list[float]]:
        """Return, by fingerprint, the seconds of the last `EARLIER` `ok` trials on a host."""
        seconds_by_case: dict[str, list[float]] = {}
        query = (
            "SELECT trial.id FROM trial CROSS JOIN run ON run.id=run_id WHERE fingerprint=? AND"
            f" trial.status=? AND host=? ORDER BY trial.id DESC LIMIT {EARLIER}"
        )
        with file.snapshot(self._db):
            for wanted in fingerprints:
                ids = self._db.execute(query, (wanted, Status.OK, host)).fetchall()
                for fingerprint, seconds in self._read(rows.seconds_of, ids):
                    seconds_by_case.setdefault(fingerprint, []).append(seconds)
        return seconds_by_case

    def begin_trial(
        self, run_id: str, case: Case, number: int, started_s: float | None = None
    ) -> int:
        """Add a trial of `case` in round `number` with the status `running`, and return its id.

        `started_s` is its start in seconds since the epoch (default: now). Raises StoreError if the
        run was removed, or the file deleted, replaced or overwritten.
        """
        with self._kept_if_lost(), file.transaction(self._db):
            if not self._db.execute("SELECT 1 FROM run WHERE id=?", (run_id,)).fetchone():
                raise self._removed()
            cursor = self._db.execute(
                "INSERT INTO trial (run_id, fingerprint, round, case_json, status, schema, started)"
                " VALUES (?,?,?,?,?,?,?)",
                (
                    run_id,
                    case.fingerprint,
                    number,
                    json.dumps(case.to_dict()),
                    RUNNING,
                    SCHEMA,
                    started_s or time.time(),
                ),
            )
            assert cursor.lastrowid is not None
            self._begin_spare(run_id, cursor.lastrowid)
        if run_id in self._measured:
            self._measured[run_id].ended[cursor.lastrowid] = False
        # a worker runs now: whoever overwrites the file meanwhile keeps what he puts there
        with self._kept_if_lost():
            file.checkpoint(self._db)
        return cursor.lastrowid

    def end_trial(self, trial_id: int, trial: Trial) -> None:
        """Store the results of a trial in one transaction, and read them back.

        Raises StoreError if its run was removed, or the file deleted, replaced or overwritten.
        """
        self._end_spare(trial_id, trial)
        with self._kept_if_lost(), file.transaction(self._db):
            if not _write(self._db, trial_id, trial):
                raise self._removed()
        for run in self._measured.values():
            if trial_id in run.ended:
                run.ended[trial_id] = True
        with self._kept_if_lost():
            file.checkpoint(self._db)
            if not self._has_trials():
                self._lose(OVERWRITTEN)

    def _begin_spare(self, run_id: str, trial_id: int) -> None:
        """Copy the row of a trial that begins, and that of its run as it is now."""
        if run_id not in self._measured:
            return
        try:
            self._spare = self._spare or file.open_spare()
            with file.transaction(self._spare):
                self._spare.execute("DELETE FROM run WHERE id=?", (run_id,))
                copying.copy_run(self._db, run_id, self._spare)
                copy = copying.copy_trial(self._db, trial_id, self._spare, run_id)
            self._measured[run_id].spares[trial_id] = copy
        except (sqlite3.OperationalError, StoreError) as error:
            log.warning("the trial has no copy, which a lost store would need: %s", told(error))

    def _end_spare(self, trial_id: int, trial: Trial) -> None:
        for run in self._measured.values():
            if self._spare and trial_id in run.spares:
                try:
                    with file.transaction(self._spare):
                        _write(self._spare, run.spares[trial_id], trial)
                except (sqlite3.OperationalError, StoreError) as error:
                    why = told(error)
                    log.warning("the trial has no copy, which a lost store would need: %s", why)

    @contextmanager
    def _kept_if_lost(self) -> Iterator[None]:
        """Raise StoreError if the file is, or becomes here, no longer what this object has written.

        Its trials are first kept in a new file.
        """
        if self._db.lost:
            raise StoreError(self._db.lost)
        left, now = self._db.left, file.state(self.path)
        if left is not None and now != left:
            if now is None or now.is_other(left):
                self._lose(GONE)
            # otherwise, another process may have merged the log into the file
            if not self._has_trials(thorough=True):
                self._lose(OVERWRITTEN)
            self._db.left = now
        try:
            yield
        except DamagedStore:
            self._lose(OVERWRITTEN)

    def _has_trials(self, *, thorough: bool = False) -> bool:
        """Return whether a new connection finds the trials that this object has written.

        With `thorough`, the file must also pass SQLite's quick check.
        """
        query = "SELECT id, status<>? FROM trial WHERE run_id=?"
        try:
            with closing(file.connect_read_only(self.path)) as other:
                if thorough:
                    file.refuse_damaged(other)
                for run_id, run in self._measured.items():
                    found = dict(other.execute(query, (RUNNING, run_id)))
                    if any(found.get(number) != ended for number, ended in run.ended.items()):
                        return False
                    if not other.execute("SELECT 1 FROM run WHERE id=?", (run_id,)).fetchone():
                        return False
        except file.Locked:
            raise
        except (sqlite3.Error, StoreError, OSError):
            return False
        return True

    def _lose(self, how: str) -> NoReturn:
        """Keep the trials in a new file, write nothing more to this one, and raise StoreError."""
        names = (self.path.with_name(f"{self.path.name}.kept-{n}") for n in count(1))
        kept = next(path for path in names if not path.exists())
        try:
            number = self._keep(kept, how)
            where = (
                f"{words.count(number, 'trial')} {words.verb(number, 'is', 'are')} kept in {kept};"
                f" `dpbench merge {shlex.quote(str(kept))} {dashed('store', 'FILE')}` copies the"
                " trials into a store"
            )
        except (sqlite3.Error, StoreError, OSError) as error:
            why = told(error.__cause__ or error)
            where = f"its trials are lost, because {kept} cannot be written: {why}"
        if how == GONE:
            # the log beside a new file of this name would be merged into that file
            with suppress(StoreError):
                file.fold(self._db)
        self._db.lost = f"the store {self.path} was {how} while a run was writing to it; {where}"
        raise StoreError(self._db.lost)

    def _keep(self, kept: Path, how: str) -> int:
        """Write the trials into a new store, and return their number.

        These are all trials of a deleted file, which is still open and whole, or else those of
        which there are copies.
        """
        if how == GONE:
            self._db.execute("VACUUM INTO ?", (str(kept),))
        with Store.create(kept) as copy:
            if self._spare:
                with file.transaction(copy._db):
                    copying.merge(self._spare, copy._db)
            return len(copy.trials(superseded=True))

    def trials(self, run_id: str | None = None, *, superseded: bool = False) -> list[Trial]:
        """Return the ended trials of a run, or of all runs, in the order of start.

        Of several trials of one case and round, only one is returned: the last `ok` one whose
        gradients or outputs were not found wrong, or else the last. With `superseded`, all are
        returned. Killed trials are always left out.
        """
        return self._trials(run_id, superseded=superseded)

    def summaries(self, run_id: str) -> list[Trial]:
        """Return `Trial.summary` of each trial in `trials(run_id)`, rarely reading spans."""
        return self._trials(run_id, superseded=False, read=rows.summary)

    def _trials(
        self, run_id: str | None, *, superseded: bool, read: rows.Reader[Trial] = rows.trial
    ) -> list[Trial]:
        where, values = ("run_id=? AND ", (run_id,)) if run_id else ("", ())
        where += "" if superseded else "place=1 AND "
        with file.snapshot(self._db):
            ids = self._db.execute(
                f"SELECT id FROM ({_RANKED}) WHERE {where}status NOT IN (?,?) ORDER BY id",
                (*values, RUNNING, Status.KILLED),
            ).fetchall()
            return list(self._read(read, ids))

    def _read(self, read: rows.Reader[rows.Read], ids: Iterable[tuple[int]]) -> Iterator[rows.Read]:
        """Yield the object that `read` makes of each row; see `Store.read` for unreadable ones."""
        for (row,) in ids:
            try:
                yield read(self._db, row)
            except UnreadableRow as fault:
                if self._unreadable is None:
                    raise
                if (fault.table, fault.row) not in self._named:
                    self._named.add((fault.table, fault.row))
                    self._unreadable(fault)

    def past(self, run_id: str, trials: Sequence[Trial]) -> tuple[PastRun, ...]:
        """Return the runs that share cases with a run, with summaries of their `ok` trials.

        They are those on the same hardware and those of predictions, at most `PAST` per case, in
        the order of start. The run `run_id` itself is included, with `trials`.
        """
        with file.snapshot(self._db):
            return tuple(self._past(run_id, trials))

    def _past(self, run_id: str, trials: Sequence[Trial]) -> Iterator[PastRun]:
        query = "SELECT started, rowid, id FROM run WHERE id=?"
        chosen = [self._db.execute(query, (name,)).fetchone() for name in self._sharing(run_id)]
        for _, row, name in sorted(filter(None, chosen), key=_start):
            if name == run_id:
                ended = [trial for trial in trials if trial.status is Status.OK]
            else:
                ids = self._db.execute(
                    "SELECT id FROM trial WHERE run_id=? AND status=? AND fingerprint IN "
                    "(SELECT fingerprint FROM trial WHERE run_id=?) ORDER BY id",
                    (name, Status.OK, run_id),
                ).fetchall()
                ended = list(self._read(rows.summary, ids))
            for run in self._read(rows.run, [(row,)] if ended else []):
                yield PastRun(run, tuple(ended))

    def _sharing(self, run_id: str) -> set[str]:
        """Return the ids of a run and of the runs that `past` includes."""
        query = (  # the trials of the case first, and not all runs
            "SELECT run_id FROM trial CROSS JOIN run ON run.id=run_id WHERE fingerprint=? AND"
            " trial.status=? AND (host=(SELECT host FROM run WHERE id=?) OR host LIKE ?) ORDER BY"
            " trial.id DESC"
        )
        shared = {run_id}
        cases = self._db.execute(
            "SELECT DISTINCT fingerprint FROM trial WHERE run_id=?", (run_id,)
        ).fetchall()
        for (fingerprint,) in cases:
            last = self._db.execute(query, (fingerprint, Status.OK, run_id, f"{PREDICTED}%"))
            distinct = (one for one, _ in groupby(name for (name,) in last))
            runs: set[str] = set()
            while len(runs) < PAST and (name := next(distinct, None)) is not None:
                runs.add(name)
            shared |= runs
        return shared
