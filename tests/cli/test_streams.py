"""Streams: a command works with closed streams, in the locale C, and with an unwritable home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis import comparison
from dpbench.cli.options import EXIT_CLOSED, EXIT_FAILED
from dpbench.cli.streams import open_streams
from dpbench.store import FINISHED, Store
from tests.commands import ROOT
from tests.exported import Command, made, stored
from tests.marked import patience, poll

QUIET = {"LC_ALL": "C", "HOME": "/proc/nothing", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize("redirected", [">&- 2>&-", "<&- >&-"])
def test_a_command_whose_streams_are_closed_ends_as_usual_and_spares_the_store(
    tmp_path: Path, redirected: str
) -> None:
    path = tmp_path / "dpbench.db"
    stored(path, made())
    before = path.read_bytes()
    command = f"{sys.executable} -m dpbench list runs {redirected}"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, **QUIET, **paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes() == before


def test_a_comparison_whose_reader_closes_it_does_not_say_that_a_case_is_slower(
    tmp_path: Path,
) -> None:
    stored(tmp_path / "dpbench.db", made())
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "dpbench", "compare", "@last", "@last"],
        cwd=tmp_path,
        env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode == EXIT_CLOSED, done.stderr
    assert done.stderr.endswith("the output was closed\n")


def test_an_error_of_dpbench_itself_does_not_say_that_a_case_is_slower(
    dpbench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path / "dpbench.db", made())
    monkeypatch.setattr(comparison, "between", lambda *_, **__: None)
    code, out, err = dpbench("compare", "@last", "@last")
    assert (code, out) == (EXIT_FAILED, "")
    assert "Traceback" in err


def test_streams_that_python_lacks_are_the_null_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    open_streams()
    assert sys.stdin.read() == ""
    for stream in (sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        stream.write("ends nowhere")
        stream.close()
    sys.stdin.close()


def test_texts_are_printed_in_the_locale_c(tmp_path: Path) -> None:
    stored(tmp_path / "dpbench.db", made())
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "dpbench", "explain"],
        cwd=tmp_path,
        env={**os.environ, **QUIET, **paths},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"mlp")


def a_run(folder: Path, rounds: int = 1, **streams: Any) -> subprocess.Popen[bytes]:
    """Start a run of one trial per round with these streams."""
    case = ("--models", "mlp", "--strategies", "single", "--rounds", str(rounds))
    words = ("run", *case, "--patience", "0", "--quiet")
    return subprocess.Popen(
        [sys.executable, "-m", "dpbench", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        **streams,
    )


def written(folder: Path) -> list[str]:
    """Check that a run's result is stored and its page is written; return the run's id."""
    with Store.read(folder / "dpbench.db") as opened:
        [run] = opened.runs()
        assert (run.status, len(opened.trials(run.id))) == (FINISHED, 1)
    assert (folder / "reports/latest/index.html").read_text().rstrip().endswith("</html>")
    return [run.id[:8]]


def test_a_run_whose_output_is_on_a_full_disk_keeps_its_result_and_writes_its_page(
    tmp_path: Path,
) -> None:
    with Path("/dev/full").open("w") as full:
        process = a_run(tmp_path, stdout=full, stderr=subprocess.PIPE)
        err = process.communicate(timeout=patience(120))[1].decode()
    [run_id] = written(tmp_path)
    assert process.returncode == EXIT_FAILED
    assert f"run: {run_id}" in err
    assert "Traceback" not in err
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "No space left" in error
    assert f"dpbench report --run {run_id}" in error


def test_a_run_goes_on_whose_terminal_was_closed(tmp_path: Path) -> None:
    """It ignores SIGHUP, as by nohup; writing to the terminal then gives EIO."""
    ours, terminal = os.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = a_run(tmp_path, stdout=terminal, stderr=terminal, start_new_session=True)
    finally:
        signal.signal(signal.SIGHUP, before)
    os.close(terminal)
    os.close(ours)
    assert process.wait(patience(120)) == EXIT_FAILED
    written(tmp_path)


def test_a_closed_terminal_ends_a_command_with_the_code_of_its_signal(tmp_path: Path) -> None:
    ours, terminal = os.openpty()
    streams = {"stdout": terminal, "stderr": terminal}
    # many rounds: a slow machine must not end the run before the signal
    process = a_run(tmp_path, rounds=50, **streams, start_new_session=True)
    assert poll((tmp_path / "dpbench.db").exists, patience(60))
    os.close(terminal)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(patience(60)) == 128 + signal.SIGHUP


@pytest.mark.parametrize(
    "command", [("list", "runs"), ("explain",), ("export", "jsonl"), ("show", "--json")]
)
def test_a_command_whose_output_is_lost_says_so_in_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    stored(tmp_path / "dpbench.db", made())
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dpbench", *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == EXIT_FAILED
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert "No space left" in done.stderr
    assert "another output" in done.stderr


@pytest.mark.parametrize("command", ["list runs", "--no-config doctor", "run --dry-run"])
def test_a_removed_working_folder_is_named(tmp_path: Path, command: str) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    done = subprocess.run(
        ["sh", "-c", f'rmdir "$PWD"; {sys.executable} -m dpbench {command}'],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (EXIT_FAILED, "")
    assert done.stderr.count("\n") == 1
    assert "working folder" in done.stderr
    assert "with cd" in done.stderr
