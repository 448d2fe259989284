"""Streams: a command works with closed streams, in the locale C, and with an unwritable home."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.analysis import comparison
from dpbench.cli.options import EXIT_CLOSED, EXIT_FAILED, open_streams
from tests.exported import Command, made, stored

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
