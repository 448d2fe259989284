"""Attacks: stores from elsewhere, runs that other containers measure, files that are overwritten.

Three parts of `tests/hardening.py`. The tests of the store use the makers below, too.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path

from dpbench.records import Case
from dpbench.store import Store, StoreError
from tests.exported import made, stored

ROOT = Path(__file__).resolve().parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT)}
CASE = Case(model="mlp", strategy="single", batch_size=64)
Call = Callable[[Sequence[str]], tuple[int, str, str]]
LONGEST_S = 120
"""The most seconds of a command, on a machine under load."""

# -- stores from elsewhere

IDS = ("{outside}", "../outside", "..", ".", "", "a/../../outside", "A" * 32, "f" * 31, "f" * 33)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n) SELECT max(i) FROM n"
STRUCTURES = {
    "VIEW run": f"ALTER TABLE run RENAME TO r; CREATE VIEW run AS {ENDLESS}",
    "VIEW extra": f"CREATE VIEW extra AS {ENDLESS}",
    "TRIGGER remover": ("CREATE TRIGGER remover AFTER UPDATE ON run BEGIN DELETE FROM trial; END"),
    "VIRTUAL TABLE words": "CREATE VIRTUAL TABLE words USING fts5(word)",
    "column twice of the table run": "ALTER TABLE run ADD COLUMN twice AS (rounds * 2)",
}
"""Statements that give a store more than plain tables, by what the error must name."""


def crafted(path: Path, run_id: object) -> None:
    """Give the newest run of a store another id."""
    with closing(sqlite3.connect(path)) as db, db:
        (old,) = db.execute("SELECT id FROM run ORDER BY rowid DESC").fetchone()
        db.execute("UPDATE run SET id=? WHERE id=?", (run_id, old))
        db.execute("UPDATE trial SET run_id=? WHERE run_id=?", (run_id, old))


def restructured(path: Path, statements: str) -> None:
    """Change the schema of a store."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(statements)


def entries(folder: Path) -> list[str]:
    """Return the paths of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def foreign(count: int, call: Call, seed: int = 0) -> list[str]:
    """Craft `count` stores, let commands remove, report and merge them, and return complaints."""
    complaints: list[str] = []
    for number in range(seed, seed + count):
        generator = random.Random(number)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            outside, path = folder / "outside", folder / "store.db"
            for place in (outside, folder / "store.db.traces", folder / "reports" / "runs"):
                place.mkdir(parents=True)
                (place / "precious").touch()
            stored(path, made(CASE))
            if number % 2:
                what = generator.choice(IDS).format(outside=outside)
                crafted(path, what)
            else:
                what = generator.choice([*STRUCTURES])
                restructured(path, STRUCTURES[what])
            before = entries(folder)
            for command in (
                ("list", "runs", "--store", str(path)),
                ("rm", "@last", "--yes", "--store", str(path)),
                ("report", "--report", str(outside / "page.html"), "--store", str(path)),
                ("merge", str(path), "--store", str(outside / "other.db")),
            ):
                signal.alarm(LONGEST_S)  # ends this process if a statement holds back signals
                code, _, err = call(command)
                signal.alarm(0)
                for own in outside.glob("other.db*"):
                    own.unlink()
                if code == -1 or "Traceback" in err or not err:
                    complaints.append(f"store {number} ({what!r}): {command[0]}: {err[-1500:]}")
                if entries(folder) != before:
                    complaints.append(f"store {number} ({what!r}): {command[0]}: files changed")
        print(f"foreign {number}: {what!r}; {len(complaints)} complaints", flush=True)
    return complaints


# -- runs that others measure

HOLDER = """
import sys, time
from pathlib import Path
from dpbench.store import Identity, Store
with Store.create(Path(sys.argv[1])) as store:
    store.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
    print("begun", flush=True)
    time.sleep(600)
"""


def _allowed(*commands: list[str]) -> list[str]:
    """Return the first beginning of a command that this system allows; [] for none."""
    for command in commands:
        with suppress(OSError):
            if not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
                return command
    return []


@cache
def container() -> list[str]:
    """Return the beginning of a command with process ids of its own; [] if not allowed."""
    end = ["--pid", "--fork", "--mount-proc", "--kill-child"]
    return _allowed(["unshare", *end], ["unshare", "--user", "--map-root-user", *end])


def later(folder: Path) -> list[str]:
    """Return the beginning of a command for which the clock is 2 s ahead; [] if not allowed.

    The kernel counts the start of a process from the boot, whose time it states in /proc/stat.
    """
    stat = folder / "stat"
    lines = Path("/proc/stat").read_text(encoding="utf-8").splitlines()
    stat.write_text(
        "\n".join(
            f"btime {int(line.split()[1]) + 2}" if line.startswith("btime") else line
            for line in lines
        )
        + "\n",
        encoding="utf-8",
    )
    mounted = ["sh", "-c", 'mount --bind "$0" /proc/stat && exec "$@"', str(stat)]
    return _allowed(
        ["unshare", "--mount", *mounted],
        ["unshare", "--user", "--map-root-user", "--mount", *mounted],
    )


def guarded(count: int, call: Call, seed: int = 0) -> list[str]:
    """Let other containers and clocks remove a run that is measured; return the complaints."""
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        here: dict[str, list[str]] = {"beside it": []}
        visitors = {**here, "in a container": container(), "after a clock step": later(folder)}
        for place in [place for place in visitors if place not in here and not visitors[place]]:
            print(f"guards: SKIPPED {place}: unshare is missing or not allowed")
            del visitors[place]
        pairs = [
            (owner, visitor)
            for owner in visitors
            for visitor in visitors
            if owner != "after a clock step"
        ]
        for number in range(seed, seed + count):
            owner, visitor = pairs[number % len(pairs)]
            path = folder / f"{number}.db"
            holder = subprocess.Popen(
                [*visitors[owner], sys.executable, "-c", HOLDER, str(path)],
                env=ENV,
                stdout=subprocess.PIPE,
                text=True,
            )
            remove = [sys.executable, "-m", "dpbench", "rm", "@last", "--yes", "--store", str(path)]
            try:
                assert holder.stdout
                assert holder.stdout.readline()
                command = [*visitors[visitor], *remove]
                done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
            finally:
                holder.kill()
                holder.communicate()
            where = f"guards {number}: the run {owner}, `rm` {visitor}"
            if done.returncode != 2 or "adding trials" not in done.stderr:
                complaints.append(f"{where}: {done.returncode}: {done.stderr[-500:]}")
            if code := call(("rm", "@last", "--yes", "--store", str(path)))[0]:
                complaints.append(f"{where}: the run of the killed process is not free: {code}")
            if left := [*folder.glob("*.lock-*")]:
                complaints.append(f"{where}: these are left: {left}")
            print(f"{where}; {len(complaints)} complaints", flush=True)
    return complaints


# -- files that are overwritten

WRITER = """
import sys, time
from pathlib import Path
from dpbench.store import Identity, Store
from tests.attacks import CASE
from tests.exported import made
with Store.create(Path(sys.argv[1])) as store:
    run_id, _ = store.begin_run(Identity("p", "h", "c"), rounds=1, provenance={})
    print("begun", flush=True)
    for number in range(int(sys.argv[2])):
        trial_id = store.begin_trial(run_id, CASE, number)
        time.sleep(0.05)
        store.end_trial(trial_id, made(CASE, number=number))
        print(number, flush=True)
    store.end_run(run_id)
"""
LOSSES = ("deleted", "replaced", "another store", "an earlier copy", "emptied", "cut")


def copied(path: Path, how: str) -> bytes:
    """Return the bytes of another store, or for "an earlier copy" of this one as it is now."""
    copy = path.with_name("copy.db")
    copy.unlink(missing_ok=True)
    if how == "an earlier copy":
        with closing(sqlite3.connect(path)) as db:
            db.execute("VACUUM INTO ?", (str(copy),))
    else:
        stored(copy, *(made(number=number) for number in range(3)))
    return copy.read_bytes()


def overwrite(path: Path, how: str, content: bytes) -> bytes:
    """Change a store's file as another program may; return what the file then has."""
    if how in ("deleted", "replaced"):
        path.unlink()
    if how == "replaced":
        path.write_bytes(b"")
    if how in ("another store", "an earlier copy"):
        path.write_bytes(content)
    if how == "emptied":
        os.truncate(path, 0)
    if how == "cut":
        os.truncate(path, 20000)
    return path.read_bytes() if path.exists() else b""


def overwritten(count: int, call: Call, seed: int = 0) -> list[str]:
    """Overwrite `count` stores while a process writes to them, and return the complaints."""
    complaints: list[str] = []
    for number in range(seed, seed + count):
        generator = random.Random(number)
        how = LOSSES[number % len(LOSSES)]
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "store.db"
            writer = subprocess.Popen(
                [sys.executable, "-c", WRITER, str(path), "100"],
                env=ENV,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert writer.stdout
            assert writer.stdout.readline() == "begun\n"
            content = copied(path, how)
            acknowledged = [writer.stdout.readline() for _ in range(generator.randrange(1, 10))]
            time.sleep(generator.uniform(0, 0.1))
            overwrite(path, how, content)
            out, err = writer.communicate(timeout=LONGEST_S)
            acknowledged += out.splitlines()
            kept = [*path.parent.glob("store.db.kept-*")]
            where = f"overwritten {number}: {how} after {len(acknowledged)} trials"
            if not writer.returncode or "StoreError" not in err:
                complaints.append(f"{where}: ended with {writer.returncode}: {err[-500:]}")
            elif not kept:
                complaints.append(f"{where}: nothing is kept: {err[-500:]}")
            else:
                complaints += [f"{where}: {fault}" for fault in _missing(kept[0], acknowledged)]
            print(f"{where}; {len(complaints)} complaints", flush=True)
    return complaints


def _missing(kept: Path, acknowledged: Sequence[str]) -> list[str]:
    """Return what a kept store lacks."""
    try:
        with Store.read(kept) as opened:
            rounds = {trial.round for trial in opened.trials()}
    except StoreError as error:
        return [str(error)]
    lost = {int(line) for line in acknowledged} - rounds
    return [f"acknowledged trials are not kept: {sorted(lost)}"] if lost else []
