"""Hardening: damage and craft stores, kill commands at random, and report what goes wrong.

A complaint is about something lost, left behind or shown as a traceback.

`python -m tests.hardening PART [N] [SEED]` prints one line per complaint and a summary; the exit
status is 1 if there is a complaint. The parts are the keys of `PARTS`; `make hardening N=...` runs
all. What this machine does not allow is printed as SKIPPED. `tests/writers.py` and
`tests/attacks.py` have parts of their own.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from dpbench import cli
from dpbench.cli.options import EXIT_UNDECIDED, EXIT_WORSE
from dpbench.records import Case
from dpbench.store import Naming, Store, StoreError, file
from tests import attacks, disks, writers
from tests.commands import Folder
from tests.commands import folder as working_folder
from tests.exported import made, stored
from tests.marked import poll

CASES = (
    Case(model="mlp", strategy="single", batch_size=64),
    Case(model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference"),
)


def original(path: Path) -> None:
    """Write a store with two runs of two cases in three rounds."""
    for name in ("before", "after"):
        trials = [made(case, number=number) for number in range(3) for case in CASES]
        stored(path, *trials, naming=Naming(name=name, tags={"night": "1"}, command="dpbench run"))


def damaged(data: bytes, generator: random.Random) -> bytes:
    """Return a file's bytes with the end cut off, or up to 59 changed anywhere or in one page."""
    found = bytearray(data)
    kind = generator.choice(("cut", "anywhere", "anywhere", "page", "first"))
    if kind == "cut":
        return data[: generator.randrange(1, len(data))]
    low, high = 0, len(found)
    if kind == "page":
        low = generator.randrange(len(found) // 4096) * 4096
        high = low + 4096
    elif kind == "first":
        high = 4096
    for _ in range(generator.randrange(1, 60)):
        found[generator.randrange(low, high)] = generator.randrange(256)
    return bytes(found)


def commands(path: Path, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield the commands that read or write a store, each of which must end without a traceback."""
    store = ("--store", str(path))
    yield ("report", "--report", str(folder / "page.html"), *store)
    yield ("explain", "--all", *store)
    yield ("list", "runs", *store)
    yield ("show", "@before", *store)
    yield ("export", "csv", "--all", *store)
    yield ("compare", "@before", "@after", *store)
    yield ("merge", str(path), "--store", str(folder / "merged.db"))


def call(arguments: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in this process.

    Return its exit code and output, with the traceback of any exception.
    """
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([*arguments])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            code = -1
            traceback.print_exc()
    return code, out.getvalue(), err.getvalue()


RESULTS = (0, EXIT_WORSE, EXIT_UNDECIDED)
"""The exit codes of commands that gave a result."""


def damage_stores(count: int, seed: int = 0) -> list[str]:
    """Damage a store `count` times, run every command on each copy, and return the complaints."""
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        original(place / "whole.db")
        data = (place / "whole.db").read_bytes()
        for number in range(seed, seed + count):
            copy = place / str(number)
            copy.mkdir()
            path = copy / "store.db"
            path.write_bytes(damaged(data, random.Random(number)))
            codes = []
            for arguments in commands(path, copy):
                code, _, err = call(arguments)
                codes.append(code)
                if code == -1 or "Traceback" in err:
                    complaints.append(f"store {number}: {' '.join(arguments)}: {err[-2000:]}")
                elif code not in RESULTS and "store" not in err:
                    complaints.append(
                        f"store {number}: {' '.join(arguments)}: the error names no store: {err}"
                    )
            given = sum(code in RESULTS for code in codes)
            print(f"store {number}: {given} of {len(codes)} commands gave a result")
    return complaints


def faults_of(path: Path) -> list[str]:
    """Return the first fault of a store's structure, and each row that cannot be read."""
    faults: list[StoreError] = []
    try:
        with Store.read(path, faults.append) as opened:
            file.refuse_damaged(opened._db)
            opened.runs()
            opened.trials(superseded=True)
    except StoreError as error:
        faults.append(error)
    return [*map(str, faults)]


ROLES = ("command", "worker", "server", "rank", "sampler", "group")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSTOP)
RUN = (
    "run",
    "--models",
    "mlp",
    "--strategies",
    "dp,ddp",
    "--devices",
    "2",
    "--rounds",
    "40",
    "--budget",
    "600",
    "--patience",
    "0",
)
STARTS_S, ENDS_S, LATE_S = 60.0, 30.0, 1.0
"""Seconds to wait for a process to signal, for the end of a command, and within which a signal ends
a command.
"""


def role_of(process: psutil.Process, command: int) -> str:
    """Return the part that a process plays in the run of the process `command`.

    Empty if it plays none of `ROLES`.
    """
    if process.pid == command:
        return "command"
    line = " ".join(process.cmdline())
    if "samplers._process" in line:
        return "sampler"
    if "dpbench.measure.worker" not in line:
        return ""
    depth, parent = 0, process.parent()
    while parent is not None and parent.pid != command:
        depth, parent = depth + 1, parent.parent()
    return ("server", "worker", "rank")[min(depth, 2)]


def found(folder: Folder, command: int, role: str) -> psutil.Process | None:
    """Return a process that plays a role; None if there is none at this moment."""
    for process in folder.mark.alive():
        with contextlib.suppress(psutil.Error):
            if role_of(process, command) == role:
                return process
    return None


def send(folder: Folder, command: int, role: str, number: signal.Signals) -> bool:
    """Send a signal to the process of `command` that plays a role, to the command, or to its group.

    Continue a stop.

    Return whether there was such a process.
    """
    target = found(folder, command, role) if role not in ("command", "group") else None
    if target is None and role not in ("command", "group"):
        return False
    deliver = os.killpg if role == "group" else os.kill
    with contextlib.suppress(ProcessLookupError):
        deliver(target.pid if target else command, number)
        if number is signal.SIGSTOP:
            time.sleep(0.5)
            deliver(target.pid if target else command, signal.SIGCONT)
        return True
    return False


def late(process: subprocess.Popen[str], number: signal.Signals) -> Iterator[str]:
    """Yield the complaints about the end of a command that has got a signal."""
    sent_s = time.monotonic()
    try:
        process.wait(ENDS_S)
    except subprocess.TimeoutExpired:
        yield f"the command did not end within {ENDS_S:g} s"
    if (late_s := time.monotonic() - sent_s) > LATE_S:
        load = os.getloadavg()[0] / len(os.sched_getaffinity(0))
        yield f"the command ended {late_s:.1f} s after the signal, at a load of {load:.1f} per core"
    if process.returncode not in (-number, 128 + number):
        yield f"the exit status is {process.returncode}, not {128 + number}"


def kill(folder: Folder, role: str, number: signal.Signals, after_s: float) -> list[str]:
    """Start a command, signal one of its processes after `after_s`, and return the complaints."""
    kept, complaints = folder.final(), []
    process = folder.start(*RUN, "--store", folder.store.name)
    time.sleep(after_s)
    whole = role in ("command", "group")
    poll(lambda: process.poll() is not None or send(folder, process.pid, role, number), STARTS_S)
    if whole and number is not signal.SIGSTOP:
        complaints += late(process, number)
    else:  # the command goes on; it is ended after its next trials
        poll(lambda: process.poll() is not None or len(folder.final()) > len(kept) + 1, ENDS_S)
        # all trials are done; killed ranks made failed ones
        if process.poll() in (0, 2) and "report: " in folder.err:
            return left(folder, kept)
        if process.poll() is not None:
            complaints.append(f"the command ended with {process.returncode}: {folder.err[-500:]}")
        process.send_signal(signal.SIGINT)
        complaints += late(process, signal.SIGINT)
    return complaints + left(folder, kept)


def left(folder: Folder, kept: list[tuple[object, ...]]) -> list[str]:
    """Return complaints about a command that has ended.

    They are about the processes, output, trials and files that it left behind.
    """
    complaints = []
    if alive := folder.mark.settles(0):
        complaints.append(f"these have outlived the command: {alive}")
    if "Traceback" in folder.err:
        complaints.append(f"a traceback: {folder.err[-1500:]}")
    if folder.store.exists():
        complaints += [f"the store is damaged: {fault}" for fault in faults_of(folder.store)]
        if folder.final()[: len(kept)] != kept:
            complaints.append("trials that had ended are lost")
    subprocess.run(
        [sys.executable, "-c", "from dpbench.measure.scratch import sweep; sweep()"],
        env=folder.env,
        check=True,
    )
    if litter := [*folder.temporary.iterdir()]:
        complaints.append(f"these are left after the next start: {litter}")
    return complaints


def kill_commands(count: int, seed: int = 0) -> list[str]:
    """Kill commands of one run `count` times at random moments, and return the complaints."""
    complaints: list[str] = []
    pairs = [(role, number) for role in ROLES for number in SIGNALS]
    with tempfile.TemporaryDirectory() as name, working_folder(Path(name)) as started:
        for number in range(seed, seed + count):
            generator = random.Random(number)
            role, sent = pairs[number % len(pairs)]
            after_s = generator.uniform(0.3, 8.0)
            new = kill(started, role, sent, after_s)
            complaints += [
                f"kill {number} ({sent.name} to the {role} after {after_s:.2f} s): {one}"
                for one in new
            ]
            trials = len(started.final())
            print(
                f"kill {number}: {sent.name} to the {role}; {trials} trials,"
                f" {new or 'no complaint'}",
                flush=True,
            )
        killed = started.query("SELECT count(*) FROM trial WHERE status='killed'")
        if killed and killed[0][0] > count:
            complaints.append(f"{killed[0][0]} trials in flight were lost by {count} kills")
    return complaints


def outputs(folder: Path) -> dict[str, tuple[str, ...]]:
    """Return the commands that write a file into a folder, by the name of the file."""
    return {
        "page.html": ("report", "--report", str(folder / "page.html")),
        "out.jsonl": ("export", "jsonl", "--output", str(folder / "out.jsonl")),
        "out.csv": ("export", "csv", "--output", str(folder / "out.csv")),
        "trace.json": ("export", "trace", "--all", "--output", str(folder / "trace.json")),
    }


def fill_disks(count: int, seed: int = 0) -> list[str]:
    """Write pages and exports over earlier ones on `count` full disks; return the complaints.

    Without the right to mount a tmpfs, nothing is done, which is said.
    """
    complaints: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        stored(place / "small.db", made())
        stored(place / "large.db", *[made(number=number, steps=40) for number in range(40)])
        for number in range(seed, seed + count):
            disk = place / str(number)
            try:
                with disks.mounted(disk, size=2**20):
                    found = filled(disk, place, left=random.Random(number).randrange(64 * 1024))
            except subprocess.CalledProcessError:
                print("disks: skipped, because this process may not mount a tmpfs")
                return complaints
            complaints += [f"disk {number}: {one}" for one in found]
            print(f"disk {number}: {found or 'no complaint'}")
    return complaints


def filled(disk: Path, stores: Path, left: int) -> list[str]:
    """Write files onto a disk, fill it but for `left` bytes, and write larger ones over them."""
    complaints = []
    for words in outputs(disk).values():
        call([*words, "--store", str(stores / "small.db")])
    disks.fill(disk, left)
    for name, words in outputs(disk).items():
        before = (disk / name).read_bytes()
        code, _, err = call([*words, "--store", str(stores / "large.db")])
        after = (disk / name).read_bytes()
        if code and after != before:
            complaints.append(f"{name} was {len(before)} bytes, and has {len(after)} now")
        if code and name not in err:
            complaints.append(f"the error does not name {name}: {err[-500:]}")
        if parts := [*disk.glob(".dpbench-*")]:
            complaints.append(f"these are left: {parts}")
    return complaints


PARTS: dict[str, Callable[[int, int], list[str]]] = {
    "stores": damage_stores,
    "kills": kill_commands,
    "writers": lambda n, seed: writers.share(n, call, seed),
    "foreign": lambda n, seed: attacks.foreign(n, call, seed),
    "guards": lambda n, seed: attacks.guarded(n, call, seed),
    "overwritten": lambda n, seed: attacks.overwritten(n, call, seed),
    "disks": fill_disks,
}


def main(arguments: Sequence[str]) -> int:
    """Run one part of the suite; return the exit status."""
    part, count, seed = (
        arguments[0],
        *map(int, [*arguments[1:], *(["20", "0"][len(arguments) - 1 :])]),
    )
    os.environ["DPBENCH_PATIENCE"] = "0"
    complaints = PARTS[part](count, seed)
    for one in complaints:
        print(one)
    print(f"{part}: {count} tried, {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
