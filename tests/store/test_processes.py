"""A store shared by processes: acknowledged trials survive any kill, and a run has one writer."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
import pytest

import dpbench
from dpbench import load
from dpbench.records import Case, Status, locks
from dpbench.records.trial import FINAL
from dpbench.store import DamagedStore, Growth, Identity, Naming, Store, StoreError, rows
from dpbench.store import file as module
from tests.attacks import container
from tests.exported import made, stored
from tests.marked import patience
from tests.store.test_file import contents
from tests.store.test_store import CASE, ENDED, begin, make_trial, put, query, same

ROOT = Path(dpbench.__file__).parent.parent
linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's capabilities")


class _Opened:
    """The files that Python opens, as reported to an audit hook, which cannot be removed."""

    def __init__(self) -> None:
        self._names: frozenset[str] = frozenset()
        self._seen: list[str] = []
        sys.addaudithook(self._event)

    def _event(self, name: str, arguments: tuple[object, ...]) -> None:
        if name == "open" and self._names and str(arguments[0]) in self._names:
            self._seen.append(str(arguments[0]))

    @contextmanager
    def __call__(self, *stores: Path) -> Iterator[list[str]]:
        """Yield the list that gets each opened file of these stores until the context ends."""
        self._seen = []
        self._names = frozenset(
            f"{store}{end}" for store in stores for end in ("", "-wal", "-shm", "-journal")
        )
        try:
            yield self._seen
        finally:
            self._names = frozenset()


@pytest.fixture(scope="module")
def opened_files():
    return _Opened()


@pytest.fixture
def child():
    """Start Python code that knows the store; end it with the test."""
    started = []

    def start(code, *arguments, prefix=(), **options):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        program = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)]
        command = [*prefix, *program, *map(str, arguments)]
        process = subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


PREAMBLE = """
import os, sys, time
from pathlib import Path
from dpbench.records import *
from dpbench.store import Identity, Store, StoreError
path = Path(sys.argv[1])
case = Case(model="mlp", strategy="dp", batch_size=64)
def begin(store, plan="plan"):
    return store.begin_run(Identity(plan, "host", "code"), rounds=3, provenance={})
def trial(number, n=200):
    steps = tuple(Step(0.5, False, float(i)) for i in range(n))
    spans = tuple(Span(i, Phase.FORWARD, 0, "host", float(i), i + 0.5) for i in range(n))
    samples = tuple(Sample(float(i), 0, "power_w", float(i)) for i in range(n))
    memory = (Memory(0, 1, "rss"),)
    return Trial(
        case=case, round=number, steps=steps, spans=spans, samples=samples, memory=memory
    )
"""
# -- kills


WRITER = """
    with Store.create(path) as store:
        run_id, resumed = begin(store)
        number = max((n for _, n in store.done(run_id)), default=-1) + 1
        while True:
            trial_id = store.begin_trial(run_id, case, number)
            store.end_trial(trial_id, trial(number))
            print(number, flush=True)
            number += 1
"""


def test_a_killed_writer_loses_at_most_the_trial_in_flight(path, child):
    generator = random.Random(1)
    acknowledged = -1
    for _ in range(6):
        writer = child(WRITER, path)
        for _ in range(generator.randrange(1, 12)):
            acknowledged = int(writer.stdout.readline())
        time.sleep(generator.random() * 0.02)  # anywhere within the next trial, or between two
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])

        with Store.read(path) as store:
            found = store.trials()
        assert query(path, "PRAGMA integrity_check") == [("ok",)]
        rounds = [trial.round for trial in found]
        assert rounds == list(range(len(rounds))), "a trial is missing or stored twice"
        assert acknowledged <= max(rounds) <= acknowledged + 1
        assert all(
            len(t.steps) == len(t.spans) == len(t.samples) == 200 and len(t.memory) == 1
            for t in found
        )
        acknowledged = max(rounds)
    assert len(query(path, "SELECT id FROM run")) == 1, "each writer went on with the same run"
    statuses = Counter(status for (status,) in query(path, "SELECT status FROM trial"))
    assert statuses["running"] <= 1
    assert statuses["killed"] <= 5


@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_process_killed_within_a_rollback_journal_does_not_lock_out_the_next(path, child, open_):
    """A connection that only reads cannot roll back the transaction of a dead process."""
    with Store.create(path) as store:
        run_id, _ = begin(store)
        for number in range(3):
            put(store, run_id, make_trial(round=number))
    code = """
        import sqlite3
        db = sqlite3.connect(path, isolation_level=None)
        # changed pages are written to the file before the end of the transaction
        db.execute("PRAGMA cache_size=1")
        db.execute("BEGIN")
        db.execute("UPDATE span SET clock=hex(zeroblob(500))")
        os._exit(0)
    """
    assert child(code, path).wait() == 0
    assert path.with_name(f"{path.name}-journal").stat().st_size > 512
    with open_(path) as store:
        found = store.trials()
    assert [same(trial, make_trial(round=number)) for number, trial in enumerate(found)] == [
        True
    ] * 3
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def test_what_ran_in_a_dead_process_is_killed_and_redone(path, child):
    dead = child(
        "store = Store.create(path); run, _ = begin(store); store.begin_trial(run, case, 2);"
        " os._exit(9)",
        path,
    )
    assert dead.wait() == 9, dead.stderr.read()
    assert query(path, "SELECT status FROM trial") == [("running",)]
    with Store.read(path) as reader:
        assert reader.trials() == []
    with Store.create(path) as store:
        run_id, resumed = begin(store)
        assert resumed
        assert store.done(run_id) == set()
        assert query(path, "SELECT status FROM trial") == [("killed",)]
        assert store.trials(run_id) == store.trials() == []
        case = Case(model="mlp", strategy="dp", batch_size=64)
        put(store, run_id, make_trial(case=case, round=2))
        assert store.done(run_id) == {(case.fingerprint, 2)}
        assert len(store.trials(run_id)) == 1


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_the_end_of_a_run_kills_what_still_runs(path, status):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial())
        store.begin_trial(run_id, CASE, 2)
        store.end_run(run_id, status)
        assert store.runs()[0].status == status
    assert query(path, "SELECT status FROM trial ORDER BY id") == [("ok",), ("killed",)]


# -- one run, one writer


@pytest.mark.parametrize("changed", [{}, {"plan": "other"}, {"host": "other"}, {"code": "other"}])
@pytest.mark.parametrize("ended", ["finished", "interrupted", None])
def test_only_an_unfinished_run_of_same_plan_host_and_code_is_resumed(path, changed, ended):
    with Store.create(path) as store:
        first, resumed = begin(store)
        assert not resumed
        if ended:
            store.end_run(first, ended)
        second, resumed = begin(store, **changed)
        expected = not changed and ended != "finished"
        assert resumed is expected
        assert (second == first) is expected
        assert len(store.runs()) == (1 if expected else 2)


def test_of_several_unfinished_runs_the_right_one_is_resumed(path):
    with Store.create(path) as store:
        runs = {plan: begin(store, plan=plan)[0] for plan in ("a", "b", "c")}
        for plan in ("b", "a", "c"):
            assert begin(store, plan=plan) == (runs[plan], True)


def test_a_run_that_a_living_process_fills_is_refused_naming_it(path, child):
    holder = child(
        "store = Store.create(path); begin(store); print(1, flush=True); time.sleep(600)", path
    )
    assert holder.stdout.readline(), holder.stderr.read()
    with Store.create(path) as store:
        with pytest.raises(StoreError, match=str(holder.pid)) as refused:
            begin(store)
        assert str(path) in str(refused.value)
        other, resumed = begin(store, plan="other")  # a different run does not prevent it
        assert other
        assert not resumed
        holder.kill()
        holder.wait()
        assert begin(store)[1], "the dead process's run is free again"


@pytest.mark.parametrize("status", ["open", "interrupted"])
def test_a_living_process_whose_run_has_ended_holds_no_run(path, child, status):
    """As a notebook whose `dpbench.run` ended without all answers."""
    code = f"store = Store.create(path); store.end_run(begin(store)[0], {status!r}); print(1, flush"
    holder = child(f"{code}=True); time.sleep(600)", path)
    assert holder.stdout.readline(), holder.stderr.read()
    with Store.create(path) as store:
        (run,) = store.runs()
        assert begin(store) == (run.id, True)


HOLDER = """
    store = Store.create(path)
    print(begin(store)[0], flush=True)
    time.sleep(600)
"""


def held(path, child, **options):
    """Return a process that adds trials to a run of the store."""
    process = child(HOLDER, path, **options)
    assert process.stdout.readline(), process.stderr.read()
    return process


def refused(path, dpbench):
    """Check that a run that is being measured is neither removed, resumed nor merged."""
    other = path.with_name("other.db")
    for command in (
        ("rm", "@last", "--yes", "--store", path),
        ("merge", path, "--store", other),
    ):
        code, _, err = dpbench(*command)
        assert code == 2, command
        assert "is adding trials" in err, command
    with Store.create(path) as store, pytest.raises(StoreError, match="is adding trials"):
        begin(store)
    assert len(query(path, "SELECT id FROM run")) == 1


def test_a_step_of_the_clock_frees_no_run(path, child, dpbench, monkeypatch):
    """The start of a process is counted from the boot, whose time moves with the clock."""
    held(path, child)
    real = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: real(self) + 2)
    refused(path, dpbench)


def test_a_run_of_another_container_is_refused(path, child, dpbench):
    """Containers share the folder of a store, and neither process ids nor host names."""
    if not (command := container()):
        pytest.skip("unshare --pid is missing or not allowed")
    held(path, child, prefix=command)
    refused(path, dpbench)


def test_a_worker_that_outlives_its_run_does_not_hold_it(path, child):
    code = """
        store = Store.create(path)
        begin(store)
        if os.fork() == 0:
            os.setsid()
            print(os.getpid(), flush=True)
            time.sleep(600)
        time.sleep(600)
    """
    process = child(code, path)
    worker = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        assert psutil.pid_exists(worker)
        with Store.create(path) as store:
            assert begin(store)[1]
    finally:
        os.kill(worker, signal.SIGKILL)


def test_one_store_of_a_process_holds_a_run_until_it_is_closed(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        assert begin(store) == (run_id, True)
        with (
            Store.create(path) as other,
            pytest.raises(StoreError, match=f"process {os.getpid()} "),
        ):
            begin(other)
        assert begin(store, plan="other")[1] is False
    with Store.create(path) as other:
        assert begin(other) == (run_id, True)


def test_locks_lie_beside_the_store_and_are_deleted_with_the_end_of_their_run(path, child):
    real = path.parent / "real"
    real.mkdir()
    path.symlink_to(real / "store.db")
    before = held(path, child)
    (lock,) = real.glob("*.lock-*")
    before.kill()
    before.wait()
    with Store.create(path) as store:
        assert not lock.exists(), "the next start deletes it"
        run_id, _ = begin(store)
        assert [*real.glob("*.lock-*")] == [lock]
        store.end_run(run_id)
        assert not lock.exists()
        begin(store)
    assert sorted(file.name for file in real.iterdir()) == ["store.db"]
    assert [*path.parent.glob("*.lock-*")] == []


def test_a_store_whose_name_is_as_long_as_sqlite_allows_has_room_for_a_lock(path):
    with Store.create(path.with_name("y" * 240)) as store:
        begin(store)
        assert [*path.parent.glob("*.lock-*")]


def test_a_file_system_without_locks_is_refused_with_the_remedy(path, monkeypatch):
    def without_locks(descriptor, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks.fcntl, "flock", without_locks)
    with Store.create(path) as store, pytest.raises(StoreError, match=r"locks .* store="):
        begin(store)
    monkeypatch.undo()
    assert query(path, "SELECT id FROM run") == []


def test_an_earlier_version_which_knows_no_locks_cannot_open_the_store(path):
    with Store.create(path) as store:
        begin(store)
        assert query(path, "SELECT pid, pid_born FROM run") == [(0, 0.0)]
    assert query(path, "PRAGMA user_version")[0][0] > 6


def test_the_writer_of_a_run_that_is_removed_by_force_gets_one_clear_error(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        trial_id = store.begin_trial(run_id, CASE, 1)
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("DELETE FROM trial")
            db.execute("DELETE FROM run")
        for attempt in (
            lambda: store.end_trial(trial_id, make_trial()),
            lambda: store.begin_trial(run_id, CASE, 2),
            lambda: store.annotate(run_id, "noisy", {}),
        ):
            with pytest.raises(StoreError, match="was removed"):
                attempt()
        store.end_run(run_id, "interrupted")
    assert query(path, "SELECT * FROM step") == []
    assert [*path.parent.glob("*.kept-*")] == []


def test_final_statuses_are_done_killed_is_not_and_retry_opens_what_it_names(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        for number, status in enumerate(ENDED):
            put(store, run_id, make_trial(status=status, round=number))
        store.begin_trial(run_id, CASE, 99)
        slots = {status: (CASE.fingerprint, number) for number, status in enumerate(ENDED)}
        assert set(ENDED) == set(FINAL)
        assert store.done(run_id) == set(slots.values())
        for status in ENDED:
            assert store.done(run_id, retry=[status.value]) == set(slots.values()) - {slots[status]}
        assert store.done(run_id, retry=["failed", "oom"]) == set(slots.values()) - {
            slots["failed"],
            slots["oom"],
        }
        assert store.done(run_id, retry=[status.value for status in ENDED]) == set()
        # a slot that failed and was then measured is done, whatever is retried
        put(store, run_id, make_trial(status=Status.OK, round=slots["failed"][1]))
        assert slots["failed"] in store.done(run_id, retry=["failed"])


# -- several at once


def test_writers_of_different_runs_share_a_fresh_file(path, child):
    """All begin at the same moment, so that making and migrating the file is contended too."""
    code = """
        begun = path.with_name("go")
        print("there", flush=True)
        while not begun.exists():
            pass
        with Store.create(path) as store:
            run_id, _ = begin(store, plan=sys.argv[2])
            for number in range(10):
                store.end_trial(store.begin_trial(run_id, case, number), trial(number, 50))
            store.end_run(run_id)
    """
    for attempt in range(3):
        folder = path.parent / str(attempt)
        folder.mkdir()
        fresh = folder / "store.db"
        writers = [child(code, fresh, f"plan {i}") for i in range(5)]
        for writer in writers:
            assert writer.stdout.readline() == "there\n"
        (folder / "go").touch()
        ends = [
            (writer.wait(timeout=patience(60)), writer.stderr.read()[-500:]) for writer in writers
        ]
        assert ends == [(0, "")] * len(writers)
        with Store.read(fresh) as store:
            assert len(store.runs()) == len(writers)
            assert len(store.trials()) == 10 * len(writers)
            assert {len(trial.steps) for trial in store.trials()} == {50}
        assert query(fresh, "PRAGMA integrity_check") == [("ok",)]


def test_a_process_that_ends_leaves_the_log_of_a_running_writer_alone(path, child):
    """A writer that has also read its store, as runs do for a forecast, still holds its locks."""
    visitor = """
        with Store.create(path) as store:
            try:
                begin(store)
            except StoreError:
                run_id, _ = begin(store, plan="other")
                number = int(sys.argv[2])
                store.end_trial(store.begin_trial(run_id, case, number), trial(number, 50))
                print("refused, then another run")
    """
    wal = path.with_name(f"{path.name}-wal")
    with Store.create(path) as store:
        run_id, _ = begin(store)
        for number in range(3):
            with Store.read(path) as reader:
                assert len(reader.trials(run_id)) == number
            found = store.unfinished(Naming(), Identity("plan", "host", "code"))
            assert found == (run_id, Growth())
            before = wal.stat().st_ino
            other = child(visitor, path, number)
            out, err = other.communicate(timeout=patience(60))
            assert (out, err) == ("refused, then another run\n", "")
            assert wal.exists()
            assert wal.stat().st_ino == before
            put(store, run_id, make_trial(round=number))
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    with Store.read(path) as reader:
        assert [len(reader.trials(run.id)) for run in reader.runs()] == [3, 3]


def test_python_never_opens_the_file_of_a_store(dpbench, path, opened_files):
    """Closing any descriptor of a file drops all the process's locks on it, also SQLite's."""
    part = path.with_name("part.db")
    first = stored(part, made(), naming=Naming(name="part"))
    with Store.create(path) as store:
        run_id, _ = begin(store)
        with opened_files(path, part) as seen:
            put(store, run_id, make_trial())
            stored(path, made(), naming=Naming(name="second"))
            commands: tuple[tuple[object, ...], ...] = (
                ("merge", part),
                ("list", "runs"),
                ("show", "@second"),
                ("report", "--report", path.with_name("a.html")),
                ("report", "--md"),
                ("explain", "--run", first),
                ("compare", "@part", "@second"),
                ("export", "csv"),
                ("export", "trace", "--output", path.with_name("trace.json")),
                ("rm", "@part", "--yes"),
            )
            for command in commands:
                code, _, err = dpbench(*command, "--store", path)
                assert (code, err.count("error: ")) == (3 if command[0] == "compare" else 0, 0), (
                    command,
                    err,
                )
            assert len(load(path, run_id).trials) == 1
    assert seen == []


def test_a_file_that_python_opens_is_noticed(path, opened_files):
    with opened_files(path) as seen:
        path.touch()
        path.read_bytes()
    assert seen == [str(path)] * 2


def damaged_while_open(path, child):
    """Return an open store whose file another process has damaged."""
    store = Store.create(path)
    put(store, begin(store)[0], make_trial())
    assert child("path.open('r+b').write(bytes(4096))", path).wait() == 0
    return store


def test_an_error_of_sqlite_when_the_log_is_merged_names_the_store(path, child):
    """SQLite's error for a damaged file is no OperationalError."""
    store = damaged_while_open(path, child)
    with pytest.raises(DamagedStore, match=re.escape(str(path))), store:
        pass
    with pytest.raises(sqlite3.ProgrammingError):
        store._db.execute("SELECT 1")  # the connection is closed


def test_an_error_of_sqlite_when_the_log_is_merged_hides_no_earlier_error(path, child):
    store = damaged_while_open(path, child)
    with pytest.raises(ZeroDivisionError), store:
        raise ZeroDivisionError


def test_a_reader_works_while_a_writer_is_in_the_middle(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        with Store.read(path) as early:
            assert early.trials() == []
            put(store, run_id, make_trial())
            store.begin_trial(run_id, CASE, 2)
            assert len(early.trials(run_id)) == 1  # the same reader sees what came
            with Store.read(path) as late:
                assert len(late.trials(run_id)) == 1
            put(store, run_id, make_trial(round=3))  # and blocks no other writer
            assert len(early.trials(run_id)) == 2


def test_a_run_that_is_removed_while_it_is_read_is_read_whole(path, monkeypatch):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        for number in range(3):
            put(store, run_id, make_trial(round=number))

        def removed_meanwhile(db, row, original=rows.summary):
            with closing(sqlite3.connect(path)) as other, other:
                other.execute("DELETE FROM trial")
            return original(db, row)

        monkeypatch.setattr(rows, "summary", removed_meanwhile)
        with Store.read(path) as reader:
            assert [trial.round for trial in reader.summaries(run_id)] == [0, 1, 2]
            assert reader.trials() == []


def test_a_reader_never_writes(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial())
        trial_id = store.begin_trial(run_id, CASE, 2)
    before, stamp = contents(path.parent), path.stat().st_mtime_ns
    with Store.read(path) as reader:
        assert len(reader.trials()) == 1
        for attempt in (
            lambda: begin(reader),
            lambda: reader.end_trial(trial_id, make_trial()),
            lambda: reader.end_run(run_id),
        ):
            with pytest.raises((sqlite3.OperationalError, StoreError)):
                attempt()
    assert contents(path.parent) == before
    assert path.stat().st_mtime_ns == stamp


def without_privilege():
    """Give up root's right to write anywhere, from the next exec on.

    The capabilities are CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
    """
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)


@linux
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_read_only_copy_can_be_read(path, child, killed):
    if killed:  # its rows are in the WAL
        code = (
            "s = Store.create(path); r, _ = begin(s); s.end_trial(s.begin_trial(r, case, 0),"
            " trial(0)); os._exit(0)"
        )
        assert child(code, path).wait() == 0
    else:
        with Store.create(path) as store:
            run_id, _ = begin(store)
            put(store, run_id, make_trial())
    folder = path.parent / "copy"
    folder.mkdir()
    for file in path.parent.glob("store.db*"):
        shutil.copy(file, folder)
        (folder / file.name).chmod(0o444)
    before = contents(folder)
    folder.chmod(0o555)
    try:
        code = """
            try:
                (path.parent / "probe").touch()
            except PermissionError:
                with Store.read(path) as store:
                    print(len(store.runs()), len(store.trials()), len(store.trials()[0].steps) > 0)
        """
        reader = child(code, folder / path.name, preexec_fn=without_privilege)
        out, err = reader.communicate(timeout=patience(60))
    finally:
        folder.chmod(0o755)
    assert (out, reader.returncode) == ("1 1 True\n", 0), err
    assert contents(folder) == before


@pytest.mark.parametrize("watched", [False, True])
def test_after_the_close_the_file_alone_holds_everything(path, watched):
    wal = path.with_name(path.name + "-wal")
    with ExitStack() as readers:
        with Store.create(path) as store:
            run_id, _ = begin(store)
            put(store, run_id, make_trial())
            assert wal.exists()
            if watched:  # by one that stays open longer than the writer
                assert readers.enter_context(Store.read(path)).trials()
        assert not wal.exists() or (watched and wal.stat().st_size == 0)
        alone = shutil.copy(path, path.parent / "moved.db")
    with Store.read(alone) as reader:
        assert len(reader.trials()) == 1


@linux
def test_a_read_only_folder_is_refused(path, child):
    folder = path.parent / "locked"
    folder.mkdir()
    folder.chmod(0o555)
    code = """
        try:
            Store.create(path)
        except StoreError as error:
            print(error)
    """
    try:
        writer = child(code, folder / "store.db", preexec_fn=without_privilege)
        out, err = writer.communicate(timeout=patience(60))
    finally:
        folder.chmod(0o755)
    assert str(folder / "store.db") in out, err
    assert "another file with store=" in out
    assert list(folder.iterdir()) == []


class Waiting:
    """A clock that only sleeping moves; `then` is called when it has moved by `after_s` seconds."""

    def __init__(self, after_s: float = 1e9, then: Callable[[], object] = int) -> None:
        self.now_s, self._after_s, self._then = 0.0, after_s, then

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > self._after_s:
            self._after_s = 1e9
            self._then()


@pytest.fixture
def holder(path, child):
    """Yield a process that has locked a store of one trial."""
    with Store.create(path) as store:
        put(store, begin(store)[0], make_trial())
    code = (
        "import sqlite3; sqlite3.connect(path).execute('BEGIN EXCLUSIVE'); print('locked',"
        " flush=True); input()"
    )
    process = child(code, path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "locked\n"
    return process


@linux
@pytest.mark.parametrize("open_", [Store.create, Store.read])
def test_a_store_that_stays_locked_is_refused_with_the_process_that_has_locked_it(
    path, holder, open_, monkeypatch, caplog
):
    clock = Waiting()
    monkeypatch.setattr(module, "time", clock)
    named = f"the store {re.escape(str(path))} is locked by process {holder.pid} \\(.*python"
    with pytest.raises(
        StoreError, match=rf"{named}.* for more than 30 s: wait until that process has ended"
    ):
        open_(path)
    assert 30 < clock.now_s < 31
    (said,) = caplog.messages
    assert re.match(rf"{named}.* 30 s$", said), "the longest time that this process waits"


@linux
@pytest.mark.parametrize(("after_s", "said"), [(1.9, 0), (2.1, 1)])
def test_a_store_that_is_locked_for_a_while_is_read_then(
    path, holder, monkeypatch, caplog, after_s, said
):
    clock = Waiting(after_s, lambda: holder.communicate("\n"))
    monkeypatch.setattr(module, "time", clock)
    with Store.read(path) as store:
        assert len(store.trials()) == 1
    assert clock.now_s == pytest.approx(after_s, abs=0.1)
    assert len(caplog.messages) == said


def test_a_signal_after_a_checkpoint_does_not_keep_the_run_from_being_ended(path, monkeypatch):
    statements: list[str] = []

    def signalled(path, action, original=module._patiently):
        original(path, action)
        if statements and "wal_checkpoint" in statements[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "time", Waiting())
    with Store.create(path) as store:
        run_id = begin(store)[0]
        trial_id = store.begin_trial(run_id, CASE, 1)
        monkeypatch.setattr(module, "_patiently", signalled)
        store._db.set_trace_callback(statements.append)
        try:
            store.end_trial(trial_id, make_trial())
            pytest.fail("the signal did not arrive")
        except KeyboardInterrupt:  # its traceback lives until the run has been ended
            store.end_run(run_id, "interrupted")
        store._db.set_trace_callback(None)
    with Store.read(path) as store:
        assert [run.status for run in store.runs()] == ["interrupted"]
        assert len(store.trials()) == 1


@linux
def test_a_row_of_a_locked_store_is_not_called_unreadable(path, holder, child, monkeypatch):
    holder.communicate("\n")
    with Store.read(path) as store:
        code = (
            "import sqlite3; sqlite3.connect(path).execute('BEGIN EXCLUSIVE'); print('locked',"
            " flush=True); input()"
        )
        other = child(code, path, stdin=subprocess.PIPE)
        assert other.stdout.readline() == "locked\n"
        monkeypatch.setattr(module, "time", Waiting())
        with pytest.raises(StoreError, match=f"locked by process {other.pid}"):
            store.trials()


@linux
@pytest.mark.parametrize("changes", [False, True], ids=["whole", "in the log"])
def test_a_store_with_a_log_in_a_read_only_folder_is_read_or_refused(path, child, changes):
    """SQLite's own error is "unable to open database file"."""
    folder = path.parent / "locked"
    folder.mkdir()
    with Store.create(path) as store:
        put(store, begin(store)[0], make_trial())
        if changes:
            shutil.copy(path, folder / "store.db")
            shutil.copy(f"{path}-wal", folder / "store.db-wal")
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode=WAL")
    if not changes:
        shutil.copy(path, folder / "store.db")
    folder.chmod(0o555)
    code = """
        try:
            with Store.read(path) as store:
                print(len(store.trials()))
        except StoreError as error:
            print(error)
    """
    try:
        out, err = child(code, folder / "store.db", preexec_fn=without_privilege).communicate(
            timeout=patience(60)
        )
    finally:
        folder.chmod(0o755)
    assert err == ""
    if changes:
        assert "store.db-wal" in out
        assert "copy both" in out
    else:
        assert out == "1\n"
