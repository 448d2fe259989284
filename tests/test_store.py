"""The store's laws: what was acknowledged survives any kill, and nobody's file is harmed."""

import ctypes
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dpbench
from dpbench.records import Case, Memory, Phase, Sample, Source, Span, Status, Step, Trial, Verified
from dpbench.store import FINAL, Store, StoreError
from dpbench.store import file as module

ROOT = Path(dpbench.__file__).parent.parent
CASE = Case(model="mlp", strategy="dp", batch_size=64, devices=2, schedule="reference")
ENDED = [status for status in Status if status is not Status.KILLED]
NEWER = len(module.MIGRATIONS) + 1
linux = pytest.mark.skipif(sys.platform != "linux", reason="uses Linux's capabilities")


def make_trial(**changes) -> Trial:
    steps = tuple(Step(0.25 * (i + 1), i < 2, 10.0 + i) for i in range(5))
    spans = tuple(
        Span(i, phase, device, "host", 10.0 + i, 10.1 + i) for i in range(5) for phase in Phase for device in (0, 1)
    )
    samples = tuple(Sample(t / 7, d, m, t * d + 0.1) for t in range(9) for d in (-1, 0, 1) for m in ("power_w", "rss"))
    trial = Trial(
        case=CASE, verified=Verified.BITWISE, steps=steps, spans=spans, samples=samples,
        memory=(Memory(0, 123, "ledger"), Memory(0, 99, "ledger", "forward", "reserved"), Memory(-1, 1 << 40, "rss")),
        failed_device=1, setup={"start_s": 0.0125, "verify_s": 1.5},
        provenance={"torch": "2.13.0", "threads": 1, "nested": {"ä": [1, None]}}, round=1, started_s=1.5,
    )  # fmt: skip
    return replace(trial, **changes)


def begin(store: Store, **changes) -> tuple[str, bool]:
    keys = {"plan": "plan", "host": "host", "code": "code", "rounds": 3, "provenance": {"command": "run"}}
    return store.begin_run(**(keys | changes))


def put(store: Store, run_id: str, trial: Trial) -> int:
    trial_id = store.begin_trial(run_id, trial.case, trial.round)
    store.end_trial(trial_id, trial)
    return trial_id


def same(found: Trial, stored: Trial) -> bool:
    """Compare what matters: the order among series is free, the time of start is the store's own."""
    plain = [replace(t, samples=tuple(sorted(t.samples, key=repr)), started_s=0.0) for t in (found, stored)]
    return plain[0] == plain[1]


def query(path: Path, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute(sql).fetchall()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def child():
    """Start Python code that knows the store; end it with the test."""
    started = []

    def start(code, *arguments, **options):
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, arguments)]
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
from dpbench.store import Store, StoreError
path = Path(sys.argv[1])
case = Case(model="mlp", strategy="dp", batch_size=64)
def begin(store, plan="plan"):
    return store.begin_run(plan=plan, host="host", code="code", rounds=3, provenance={})
def trial(number, n=200):
    steps = tuple(Step(0.5, False, float(i)) for i in range(n))
    spans = tuple(Span(i, Phase.FORWARD, 0, "host", float(i), i + 0.5) for i in range(n))
    samples = tuple(Sample(float(i), 0, "power_w", float(i)) for i in range(n))
    return Trial(case=case, round=number, steps=steps, spans=spans, samples=samples, memory=(Memory(0, 1, "rss"),))
"""


# -- what goes in comes out


@pytest.mark.parametrize("status", ENDED)
@pytest.mark.parametrize("verified", Verified)
def test_a_trial_comes_back_as_it_was(path, status, verified):
    trial = make_trial(status=status, verified=verified, reason="why — 'quoted'\nand a second line\0")
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, trial)
        (found,) = store.trials(run_id)
    assert same(found, trial)
    with Store.read(path) as store:
        (found,) = store.trials()
    assert same(found, trial)
    assert abs(found.started_s - time.time()) < 60


def test_a_trial_that_saw_nothing_comes_back_empty(path):
    trial = Trial(case=CASE, status=Status.SKIPPED, reason="no GPU", source=Source.PREDICTED)
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, trial)
        assert same(store.trials(run_id)[0], trial)


finite = st.floats(allow_nan=False, width=64)
counts = st.integers(-1, 1 << 40)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    steps=st.lists(st.builds(Step, finite, st.booleans(), finite), max_size=4),
    spans=st.lists(
        st.builds(Span, st.integers(0, 9), st.sampled_from(Phase), counts, st.just("cuda_event"), finite, finite),
        max_size=4,
    ),
    samples=st.lists(
        st.builds(Sample, finite, st.integers(-1, 3), st.sampled_from(["a", "ß"]), st.floats(-1e300, 1e300)), max_size=6
    ),
    memory=st.lists(st.builds(Memory, counts, counts, st.text(max_size=3)), max_size=3),
    reason=st.text(),
    setup=st.dictionaries(st.text(), finite, max_size=3),
    number=st.integers(0, 1000),
)  # fmt: skip
def test_any_finite_reading_comes_back_bit_for_bit(
    tmp_path_factory, steps, spans, samples, memory, reason, setup, number
):
    trial = Trial(
        case=CASE, steps=tuple(steps), spans=tuple(spans), samples=tuple(samples), memory=tuple(memory), reason=reason,
        setup=setup, round=number,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("any") / "store.db"
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, trial)
        assert same(store.trials(run_id)[0], trial)


def test_a_reason_that_is_no_valid_unicode_is_stored_all_the_same(path):
    """Python puts undecodable bytes of file names into messages so; a user's exception may quote one."""
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial(status=Status.FAILED, reason="no such file: weights-\udcff.pt"))
        (found,) = store.trials(run_id)
    assert found.status is Status.FAILED
    assert "no such file: weights-" in found.reason


def test_the_trials_of_one_run_are_not_another_runs(path):
    with Store.create(path) as store:
        first, _ = begin(store, plan="one")
        put(store, first, make_trial(reason="first"))
        store.end_run(first)
        second, _ = begin(store, plan="two")
        put(store, second, make_trial(reason="second"))
        assert [t.reason for t in store.trials(first)] == ["first"]
        assert [t.reason for t in store.trials(second)] == ["second"]
        assert [t.reason for t in store.trials()] == ["first", "second"]
        assert [run.id for run in store.runs()] == [second, first]
        assert store.runs()[1].provenance == {"command": "run"}


def test_a_trial_is_stored_whole_or_not_at_all(path):
    broken = make_trial(memory=(Memory(0, None, "rss"),))  # what comes after steps and spans fails
    with Store.create(path) as store:
        run_id, _ = begin(store)
        trial_id = store.begin_trial(run_id, CASE, 0)
        with pytest.raises(sqlite3.Error):
            store.end_trial(trial_id, broken)
        with Store.read(path) as reader:
            assert reader.trials() == []
        assert query(path, "SELECT status FROM trial") == [("running",)]
        for table in ("step", "span", "memory", "series"):
            assert query(path, f"SELECT count(*) FROM {table}") == [(0,)]
        store.end_trial(trial_id, make_trial())  # and the store goes on
        assert len(store.trials(run_id)) == 1


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
        assert all(len(t.steps) == len(t.spans) == len(t.samples) == 200 and len(t.memory) == 1 for t in found)
        acknowledged = max(rounds)
    assert len(query(path, "SELECT id FROM run")) == 1, "each writer went on with the same run"
    statuses = Counter(status for (status,) in query(path, "SELECT status FROM trial"))
    assert statuses["running"] <= 1
    assert statuses["killed"] <= 5


def test_what_ran_in_a_dead_process_is_killed_and_redone(path, child):
    dead = child(
        "store = Store.create(path); run, _ = begin(store); store.begin_trial(run, case, 2); os._exit(9)", path
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
    holder = child("store = Store.create(path); begin(store); print(1, flush=True); time.sleep(600)", path)
    assert holder.stdout.readline(), holder.stderr.read()
    with Store.create(path) as store:
        with pytest.raises(StoreError, match=str(holder.pid)) as refused:
            begin(store)
        assert str(path) in str(refused.value)
        other, resumed = begin(store, plan="other")  # a different run is no trouble
        assert other
        assert not resumed
        holder.kill()
        holder.wait()
        assert begin(store)[1], "the dead process's run is free again"


def test_a_process_that_only_inherited_the_pid_does_not_hold_the_run(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE run SET pid=?, pid_born=pid_born-1000", (os.getppid(),))
    assert psutil.pid_exists(os.getppid())
    with Store.create(path) as store:
        assert begin(store) == (run_id, True)


def test_final_statuses_are_done_killed_is_not_and_retry_opens_what_it_names(path):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        for number, status in enumerate(ENDED):
            put(store, run_id, make_trial(status=status, round=number))
        store.begin_trial(run_id, CASE, 99)
        slots = {status: (CASE.fingerprint, number) for number, status in enumerate(ENDED)}
        assert set(ENDED) == FINAL
        assert store.done(run_id) == set(slots.values())
        for status in ENDED:
            assert store.done(run_id, retry=[status.value]) == set(slots.values()) - {slots[status]}
        assert store.done(run_id, retry=["failed", "oom"]) == set(slots.values()) - {slots["failed"], slots["oom"]}
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
        ends = [(writer.wait(timeout=60), writer.stderr.read()[-500:]) for writer in writers]
        assert ends == [(0, "")] * len(writers)
        with Store.read(fresh) as store:
            assert len(store.runs()) == len(writers)
            assert len(store.trials()) == 10 * len(writers)
            assert {len(trial.steps) for trial in store.trials()} == {50}
        assert query(fresh, "PRAGMA integrity_check") == [("ok",)]


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
            put(store, run_id, make_trial(round=3))  # and stands in nobody's way
            assert len(early.trials(run_id)) == 2


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
    """Give up root's right to write anywhere, from the next exec on: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2):
        libc.prctl(24, capability, 0, 0, 0)


@linux
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_read_only_copy_can_be_read(path, child, killed):
    if killed:  # what it wrote lies in the WAL
        code = "s = Store.create(path); r, _ = begin(s); s.end_trial(s.begin_trial(r, case, 0), trial(0)); os._exit(0)"
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
        out, err = reader.communicate(timeout=60)
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


# -- other files


def newer(path: Path, kind: str) -> None:
    """Make the file of a newer dpbench: closed well, in either journal mode, or killed with its log left behind."""
    code = f"""
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode={"DELETE" if kind == "journal" else "WAL"}")
db.execute("CREATE TABLE future (x)")
db.execute("PRAGMA user_version={NEWER}")
db.execute("INSERT INTO future VALUES (1)")
if {kind == "killed"}: os._exit(0)
db.close()
"""
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


@pytest.mark.parametrize("kind", ["journal", "wal", "killed"])
@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_newer_file_is_refused_before_anything_is_written(path, kind, open_):
    newer(path, kind)
    before = contents(path.parent)
    with pytest.raises(StoreError) as refused:
        open_(path)
    words = str(refused.value)
    for part in (str(path), str(NEWER), str(NEWER - 1), "update", "--store"):
        assert part in words
    del refused
    after = contents(path.parent)
    # the lock's shared memory is no data, but it must not be left where none was
    assert after.keys() == before.keys()
    assert {k: v for k, v in after.items() if "-shm" not in k} == {k: v for k, v in before.items() if "-shm" not in k}


@pytest.mark.parametrize("bytes_", [b"model,seconds\n" * 500, b"SQLite format 3\0" + b"\xff" * 5000, b"x"])
@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_file_that_is_no_database_is_refused_and_left_alone(path, bytes_, open_):
    path.write_bytes(bytes_)
    with pytest.raises(StoreError) as refused:
        open_(path)
    assert str(path) in str(refused.value)
    assert "--store" in str(refused.value) or "dpbench" in str(refused.value)
    del refused
    assert contents(path.parent) == {path.name: bytes_}


@pytest.mark.parametrize("kind", ["empty", "foreign"])
def test_reading_a_database_that_is_no_store_says_so(path, kind):
    path.touch()
    if kind == "foreign":
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("CREATE TABLE cookies (x)")
    with pytest.raises(StoreError, match=str(path)), Store.read(path) as reader:
        reader.runs()


def test_somebody_elses_database_is_not_written_into(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE run (mine)")
        db.execute("CREATE TABLE cookies (x)")
    before = contents(path.parent)
    with pytest.raises(StoreError, match=str(path)):
        Store.create(path)
    assert contents(path.parent) == before


@pytest.mark.parametrize("open_", [Store.create, Store.read], ids=["create", "read"])
def test_a_directory_is_refused(path, open_):
    path.mkdir()
    with pytest.raises(StoreError, match=str(path)):
        open_(path)


def test_a_store_below_a_file_is_refused(path):
    path.write_text("a file")
    with pytest.raises(StoreError, match="--store"):
        Store.create(path / "store.db")


def test_a_missing_store_is_not_made_by_reading(path):
    with pytest.raises(StoreError, match=r"dpbench run.*--store"):
        Store.read(path)
    assert not path.exists()


def test_missing_folders_are_made_by_writing(path):
    deep = path.parent / "a" / "b" / "store.db"
    with Store.create(deep):
        assert deep.exists()


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
        out, err = writer.communicate(timeout=60)
    finally:
        folder.chmod(0o755)
    assert str(folder / "store.db") in out, err
    assert "--store" in out
    assert list(folder.iterdir()) == []


# -- migrations


def test_an_older_file_is_brought_up_with_its_trials(path, monkeypatch):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial())
    monkeypatch.setattr(module, "MIGRATIONS", (*module.MIGRATIONS, "CREATE TABLE note (text TEXT);"))
    with Store.create(path) as store:
        assert same(store.trials(run_id)[0], make_trial())
    assert query(path, "PRAGMA user_version") == [(NEWER,)]
    assert query(path, "SELECT count(*) FROM note") == [(0,)]


@pytest.mark.parametrize("writes", [False, True], ids=["read only", "migrated"])
def test_a_file_of_schema_1_is_read_as_what_it_holds(path, writes):
    """The file is what the code of schema 1 wrote."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript((Path(__file__).parent / "data" / "store_schema1.sql").read_text())
    if writes:
        with Store.create(path) as store:
            store.trials()
            put(store, store.runs()[0].id, make_trial())
    with Store.read(path) as store:
        good, oom, *rest = store.trials()
    assert query(path, "PRAGMA user_version") == [(len(module.MIGRATIONS) if writes else 1,)]
    assert good.memory == (Memory(0, 300, "allocator"), Memory(1, 100, "allocator"), Memory(-1, 1000, "rss"))
    assert (len(good.steps), len(good.spans), len(good.samples), good.schema) == (3, 6, 6, 1)
    assert (oom.status, oom.failed_device) == (Status.OOM, None)
    assert [same(trial, make_trial()) for trial in rest] == [True] * writes


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    with Store.create(path) as store:
        run_id, _ = begin(store)
        put(store, run_id, make_trial())
    good = module.MIGRATIONS
    monkeypatch.setattr(module, "MIGRATIONS", (*good, "CREATE TABLE note (text TEXT); CREATE TABLE run (twice);"))
    with pytest.raises(StoreError, match=str(path)):
        Store.create(path)
    assert query(path, "PRAGMA user_version") == [(NEWER - 1,)]
    assert query(path, "SELECT name FROM sqlite_master WHERE name='note'") == []
    monkeypatch.setattr(module, "MIGRATIONS", good)
    with Store.create(path) as store:
        assert len(store.trials(run_id)) == 1


def test_what_a_trial_stores_is_plain_to_sql(path):
    """The file is the artefact that people share: case as JSON, figures in columns."""
    with Store.create(path) as store:
        run_id, _ = begin(store)
        trial_id = put(store, run_id, make_trial())
    ((case,),) = query(path, f"SELECT case_json FROM trial WHERE id={trial_id}")
    assert Case.from_dict(json.loads(case)) == CASE
    assert query(path, "SELECT sum(seconds) FROM step WHERE warmup=0") == [(3.0,)]
    assert query(path, "SELECT n, peak FROM series WHERE device=1 AND metric='power_w'") == [(9, 8.1)]


@pytest.mark.parametrize(
    ("ends", "counted"),
    [
        ([(Status.OK, "bitwise"), (Status.OK, "bitwise")], 1),
        ([(Status.OK, "bitwise"), (Status.FAILED, "not_applicable")], 0),
        ([(Status.OK, "bitwise"), (Status.FAILED, "no")], 0),
        ([(Status.FAILED, "not_applicable"), (Status.OK, "bitwise")], 1),
        ([(Status.FAILED, "not_applicable"), (Status.OOM, "not_applicable")], 1),
        ([(Status.OK, "bitwise"), (Status.OK, "bitwise"), (Status.KILLED, "")], 1),
    ],
)
def test_of_a_slot_that_was_measured_again_the_last_trusted_trial_counts_and_all_are_kept(path, ends, counted):
    case = Case(model="mlp", strategy="single", batch_size=8)
    with Store.create(path) as store:
        run_id, _ = store.begin_run(plan="p", host="h", code="c", rounds=1, provenance={})
        for number, (status, verified) in enumerate(ends):
            trial_id = store.begin_trial(run_id, case, 0)
            if status is not Status.KILLED:  # left as running: the end of the run kills it
                store.end_trial(trial_id, Trial(case=case, status=status, reason=str(number), verified=verified))
        store.end_run(run_id)
        (found,) = store.trials(run_id)
        assert found.reason == str(counted)
        assert store.trials() == [found]
        everything = [status for status, _ in ends if status is not Status.KILLED]
        assert [one.status for one in store.trials(run_id, superseded=True)] == everything
        assert store.counts(run_id) == {ends[counted][0]: 1}
