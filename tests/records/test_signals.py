"""Signals end a command once, at once and without a traceback.

What a killed process leaves behind is removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpbench.measure import scratch
from tests.commands import ROOT
from tests.marked import patience


def started(code: str) -> subprocess.Popen[str]:
    """Start Python code that knows dpbench."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_start_shows_one_line(number: signal.Signals) -> None:
    """The signal arrives while the command's modules are imported."""
    code = f"""
import os, signal, sys
from dpbench import __main__
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, *_):
        if name == "dpbench.cli": os.kill(os.getpid(), {int(number)})
sys.meta_path.insert(0, Finder())
__main__.main(["list", "models"])
"""
    process = started(code)
    assert process.communicate(timeout=patience(30)) == ("", "interrupted\n")
    assert process.returncode == 128 + number


def test_a_signal_that_python_drops_ends_the_next_wait() -> None:
    code = """
import os, signal, time
from dpbench.records import signals
signals.install()
class Dropped:
    def __del__(self): os.kill(os.getpid(), signal.SIGTERM)
Dropped()
print(signals.received(), flush=True)
try:
    signals.wait(os.pipe()[0], 60)
except signals.EndedBySignal:
    print("ended")
"""
    out, err = started(code).communicate(timeout=patience(30))
    assert out.split() == [str(int(signal.SIGTERM)), "ended"], err


def test_a_signal_wakes_a_wait_and_a_second_interrupt_ends_at_once() -> None:
    code = """
import os, time
from dpbench.records import signals
signals.install()
try:
    print("waits", flush=True)
    signals.wait(os.pipe()[0], 60)
finally:
    print("cleans", flush=True)
    time.sleep(60)
"""
    process = started(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "cleans\n"
    process.send_signal(signal.SIGTERM)  # the first signal is still at work
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(patience(5)) == 130


def test_processes_of_a_worker_in_sessions_of_their_own_are_ended() -> None:
    code = """
import os, time
from dpbench.hardware import processes
processes.adopt()
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.write(write, str(os.getpid()).encode())
        time.sleep(60)
    os._exit(0)
os.wait()
pid = int(os.read(read, 20))
os.kill(pid, 0)
processes.end_children()
try:
    os.kill(pid, 0)
except ProcessLookupError:
    print("ended")
"""
    assert started(code).communicate(timeout=patience(30)) == ("ended\n", "")


def test_folders_of_killed_processes_are_removed_by_their_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {
        name: tmp_path / f"dpbench-{name}" for name in ("killed", "nameless", "foreign", "locked")
    }
    for path in folders.values():
        path.mkdir()
    (folders["foreign"] / scratch.LOCK).write_text(
        "the lock of another program\n", encoding="utf-8"
    )
    with scratch.folder() as used:
        for name in ("killed", "locked"):
            (folders[name] / scratch.LOCK).write_bytes((used / scratch.LOCK).read_bytes())
        with (folders["locked"] / scratch.LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            assert scratch.sweep() == [folders["killed"]]
        assert {*tmp_path.iterdir()} == {used, *folders.values()} - {folders["killed"]}
    assert not used.exists()
    with scratch.folder():
        assert not folders["locked"].exists(), "the next start removes it"
    assert {*tmp_path.iterdir()} == {folders["nameless"], folders["foreign"]}


# -- temporary files that cannot be written


def test_a_folder_of_temporary_files_that_cannot_be_used_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with (
        pytest.raises(OSError, match=rf"{tmp_path / 'missing'}.*TMPDIR") as raised,
        scratch.folder(),
    ):
        pass
    assert raised.value.errno == errno.ENOENT


def test_a_full_disk_leaves_no_folder_and_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(scratch.os, "write", full)
    with pytest.raises(OSError, match=rf"{tmp_path} .*TMPDIR") as raised, scratch.folder():
        pass
    monkeypatch.undo()
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_an_error_inside_the_folder_of_temporary_files_stays_as_it_is() -> None:
    error = OSError(errno.ENOSPC, "the store's disk is full")
    with pytest.raises(OSError, match="store's disk") as raised, scratch.folder():
        raise error
    assert raised.value is error
    with pytest.raises(OSError, match="Too many") as raised, scratch.explained():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert "TMPDIR" not in str(raised.value)
