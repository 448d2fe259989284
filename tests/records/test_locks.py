"""Locks: held by one process, free when it ends, and safe where others can write."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dpbench.records import locks

ROOT = Path(__file__).parents[2]
HOLDER = """
import os, sys, time
from pathlib import Path
from dpbench.records import locks
lock = locks.take(Path(sys.argv[1]))
"""


def started(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER + code, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_lock_is_held_once_and_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert locks.holder(path) == ""
    assert not path.exists()
    lock = locks.take(path)
    assert locks.holder(path) == f"process {os.getpid()} on {os.uname().nodename}"
    with pytest.raises(locks.Held, match=f"process {os.getpid()} "):
        locks.take(path)
    lock.release()
    assert not path.exists()
    lock.release()  # a second time has no effect on the next lock
    other = locks.take(path)
    lock.release()
    assert path.exists()
    other.release()


def test_the_lock_of_a_killed_process_is_free_and_its_file_is_known_as_left(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with started("print(1, flush=True); time.sleep(600)", path) as process:
        assert process.stdout
        assert process.stdout.readline()
        assert locks.holder(path).startswith(f"process {process.pid} ")
        with pytest.raises(locks.Held), locks.abandoned(path):
            pass
        process.send_signal(signal.SIGKILL)
    assert locks.holder(path) == ""
    with locks.abandoned(path) as left:
        assert left
    locks.take(path).release()
    path.write_text("the file of another program")
    with locks.abandoned(path) as left:
        assert not left


def test_a_forked_child_that_lives_on_neither_holds_nor_deletes_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = """
if os.fork() == 0:
    lock.release()
    print(os.getpid(), flush=True)
    time.sleep(600)
input()
"""
    process = started(code, path)
    assert process.stdout
    child = int(process.stdout.readline())
    try:
        assert locks.holder(path).startswith(f"process {process.pid} ")
        process.kill()
        process.wait()
        os.kill(child, 0)
        assert locks.holder(path) == ""
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_file_that_its_owner_deletes_meanwhile_is_not_taken(tmp_path, monkeypatch) -> None:
    path = tmp_path / "lock"
    flock = fcntl.flock

    def deleted(descriptor: int, kind: int) -> None:
        monkeypatch.undo()
        path.unlink()
        flock(descriptor, kind)

    monkeypatch.setattr(locks.fcntl, "flock", deleted)
    lock = locks.take(path)
    assert locks.holder(path)
    lock.release()


def test_who_only_looks_at_a_lock_keeps_nobody_from_taking_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    looking = threading.Timer(0.05, os.close, (descriptor,))
    looking.start()
    locks.take(path).release()
    looking.join()


def test_a_link_or_a_pipe_at_the_place_of_a_lock_is_refused(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / "link").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"symbolic links|Invalid argument"):
            locks.take(tmp_path / name)
    assert precious.read_text() == "content"
    assert locks.holder(tmp_path / "pipe") == ""


def test_the_name_of_a_holder_cannot_control_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("\x1b[2Jprocess\n1")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert locks.holder(path) == r"\x1b[2Jprocess\n1"
    path.write_text("")
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert locks.holder(path) == "another process"


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch) -> None:
    path = tmp_path / "lock"

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(locks.os, "write", full)
    with pytest.raises(OSError, match="space"):
        locks.take(path)
    monkeypatch.undo()
    assert not path.exists()
