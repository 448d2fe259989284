"""Writers: processes use one store at the same time, and are killed at random moments.

3 to 6 processes run, read, report, remove and merge.

After each round, when all its processes have ended, the store must pass SQLite's integrity check
and have every trial whose storing was acknowledged. A process notes what was acknowledged in a file
of its own, one JSON object per line:

    stored    a trial was stored: its run, its round and the sum of its steps' end times
    removing  the removal of a run begins, which may happen or not if the process is killed
    removed   the run was removed
    refused   the removal, or the begin of a run, was refused
    read      a command has read the store
    merged    a store was merged
    wrong     a complaint
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from dpbench.records import Case, Trial
from dpbench.store import DamagedStore, Identity, Naming, Store, StoreError, UnreadableRow
from tests.exported import made, stored

CASE = Case(model="mlp", strategy="single", batch_size=64)
PLANS = ("a", "b")
"""The plans of the runs: fewer than the processes of a round, so that runs are refused and
resumed.
"""
LONGEST_S = 1.5
"""The most seconds of a round."""
Call = Callable[[Sequence[str]], tuple[int, str, str]]


class Process:
    """One process of a round: it repeats its part to the end, and notes what was acknowledged."""

    def __init__(self, store: Path, notes: Path, call: Call, seed: int) -> None:
        self.store, self.call, self.generator = store, call, random.Random(seed)
        self.private = notes.with_suffix(".db")
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, **fact: object) -> None:
        """Write a fact, which outlives this process, however it ends."""
        os.write(self._notes, f"{json.dumps(fact)}\n".encode())

    def act(self, part: str, until_s: float) -> None:
        """Repeat a part until the given time; note each error that no user may see."""
        while time.monotonic() < until_s:
            try:
                getattr(self, part)()
            except (DamagedStore, UnreadableRow) as error:
                self.note(wrong=f"{part}: {error}")
            except StoreError as error:
                if "adding trials to" not in str(error):
                    self.note(wrong=f"{part}: {error}")
                self.note(refused=part)
            except Exception:
                self.note(wrong=f"{part}: {traceback.format_exc()[-1500:]}")

    def run(self) -> None:
        """Add trials to a run, or be refused.

        As in the command, the store is also read for the forecast.
        """
        identity = Identity(self.generator.choice(PLANS), "h", "c")
        with Store.create(self.store) as opened:
            with Store.read(self.store) as reader:
                reader.unfinished(Naming(), identity)
            run_id, _ = opened.begin_run(identity, rounds=0, provenance={})
            first = max((number for _, number in opened.done(run_id)), default=-1) + 1
            for number in range(first, first + self.generator.randrange(1, 9)):
                trial = self._trial(number)
                opened.end_trial(opened.begin_trial(run_id, CASE, number), trial)
                self._stored(run_id, trial)
            opened.end_run(run_id, self.generator.choice(("finished", "interrupted")))

    def read(self) -> None:
        """Read every trial of every run."""
        with Store.read(self.store) as opened:
            for run in opened.runs():
                opened.trials(run.id)
        self.note(read="trials")

    def report(self) -> None:
        """Read the store with one of the commands."""
        page = str(self.private.with_suffix(".html"))
        arguments = self.generator.choice(
            (
                ("report", "--report", page),
                ("list", "runs"),
                ("show",),
                ("export", "csv", "--all"),
                ("explain",),
            )
        )
        code, _, err = self.call((*arguments, "--store", str(self.store)))
        nothing = "the store has no run" in err
        if code == -1 or any(
            word in err for word in ("Traceback", "unreadable", "damaged", "malformed")
        ):
            self.note(wrong=f"{' '.join(arguments)}: {err[-1500:]}")
        elif code and not nothing:
            self.note(wrong=f"{' '.join(arguments)}: exit code {code}: {err[-500:]}")
        self.note(read=arguments[0])

    def remove(self) -> None:
        """Remove one run, unless a process adds trials to it."""
        with Store.read(self.store) as reader:
            runs = reader.runs()
        if len(runs) > len(PLANS):
            run_id = self.generator.choice(runs).id
            self.note(removing=run_id)
            try:
                with Store.create(self.store) as opened:
                    opened.remove([run_id])
                self.note(removed=run_id)
            except StoreError:
                self.note(kept=run_id)
                raise
        time.sleep(self.generator.random() * 0.2)

    def merge(self) -> None:
        """Merge a store of one new run into the store, or the store into another one."""
        self.private.unlink(missing_ok=True)
        if self.generator.random() < 0.5:
            trials = [self._trial(number) for number in range(3)]
            run_id = stored(self.private, *trials, naming=Naming(name="part"))
            with Store.create(self.store) as opened:
                opened.merge(self.private)
            for trial in trials:
                self._stored(run_id, trial)
        else:
            with Store.create(self.private) as opened:
                opened.merge(self.store)
        self.note(merged=1)

    def _trial(self, number: int) -> Trial:
        return made(CASE, number=number, at_s=self.generator.randrange(1, 10**6), steps=4)

    def _stored(self, run_id: str, trial: Trial) -> None:
        self.note(stored=[run_id, trial.round, sum(step.end_s for step in trial.steps)])


PARTS = ("run", "read", "report", "remove", "merge")


def start(store: Path, notes: Path, call: Call, part: str, seed: int, until_s: float) -> int:
    """Start a process that plays a part; return its id."""
    if pid := os.fork():
        return pid
    try:
        Process(store, notes, call, seed).act(part, until_s)
    finally:
        os._exit(0)


def facts(folder: Path) -> list[dict[str, Any]]:
    """Return the facts that all processes have noted."""
    return [
        json.loads(line)
        for notes in sorted(folder.glob("*.notes"))
        for line in notes.read_text().splitlines()
    ]


def faults(store: Path, found: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a store that no process uses, given all processes' facts."""
    with closing(sqlite3.connect(store)) as db:
        try:
            complaints = [
                f"integrity: {text}"
                for (text,) in db.execute("PRAGMA integrity_check")
                if text != "ok"
            ]
            query = (
                "SELECT run_id, round, (SELECT total(end_s) FROM step WHERE trial_id=id) FROM trial"
            )
            here = {
                (run_id, number): total
                for run_id, number, total in db.execute(f"{query} WHERE status='ok'")
            }
            runs = {run_id for (run_id,) in db.execute("SELECT id FROM run")}
        except sqlite3.DatabaseError as error:
            return [f"the store cannot be read: {error}"]
    said = {
        name: [fact[name] for fact in found if name in fact]
        for name in ("removing", "removed", "kept", "stored")
    }
    begun = Counter(said["removing"])
    begun.subtract(said["kept"])
    gone = {run_id for run_id, number in begun.items() if number > 0}
    lost = [
        one for one in said["stored"] if one[0] not in gone and here.get((one[0], one[1])) != one[2]
    ]
    if lost:
        complaints.append(
            f"{len(lost)} of {len(said['stored'])} acknowledged trials are lost, such as {lost[0]}"
        )
    if back := runs & {*said["removed"]}:
        complaints.append(f"removed runs are there: {back}")
    return complaints


def share(count: int, call: Call, seed: int = 0) -> list[str]:
    """Let processes share one store for `count` rounds, and return the complaints.

    `call` runs a command.
    """
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = folder / "store.db"
        stored(store, made(CASE))
        for command in ("report", "list"):  # loads all modules, so that a process need not
            call(
                (
                    command,
                    *(
                        ("--report", str(folder / "page.html"))
                        if command == "report"
                        else ("runs",)
                    ),
                    "--store",
                    str(store),
                )
            )
        for number in range(seed, seed + count):
            generator = random.Random(number)
            parts = ["run", "run", *generator.choices(PARTS, k=generator.randrange(1, 5))]
            begun_s = time.monotonic()
            until_s = begun_s + generator.uniform(0.3, LONGEST_S)
            started = [
                start(
                    store,
                    folder / f"{number}-{place}.notes",
                    call,
                    part,
                    10 * number + place,
                    until_s,
                )
                for place, part in enumerate(parts)
            ]
            victims = [pid for pid in started if generator.random() < 0.7]
            for pid in victims:
                time.sleep(
                    max(0.0, generator.uniform(0.0, until_s - time.monotonic()) / len(victims))
                )
                os.kill(pid, signal.SIGKILL)
            for pid in started:
                os.waitpid(pid, 0)
            found = facts(folder)
            wrong = dict.fromkeys(fact["wrong"] for fact in found if "wrong" in fact)
            new = [
                f"round {number} ({', '.join(parts)}): {one}"
                for one in (*faults(store, found), *wrong)
            ]
            did = Counter(name for fact in found for name in fact)
            print(
                f"round {number}: {', '.join(parts)}; {len(victims)} killed; {dict(did)};"
                f" {new or 'no complaint'}",
                flush=True,
            )
            complaints += new
            if new:
                break  # later rounds would repeat the complaints
        complaints += [
            f"no process was ever {name}"
            for name in ("stored", "refused", "read", "removed", "merged")
            if count >= 20 and not did[name] and not complaints
        ]
    return complaints
