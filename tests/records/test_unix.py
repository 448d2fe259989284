"""On a system without Unix's locks and signals, the command is refused in one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

AS_ELSEWHERE = """
import os, signal, sys
sys.modules["fcntl"] = None
for name in ("SIGHUP", "SIGPIPE", "SIGUSR1", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "register_at_fork", "getuid", "uname"):
    delattr(os, name)
"""


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", AS_ELSEWHERE + code], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("arguments", [["run"], ["--help"], ["list", "models"]], ids=str)
def test_the_command_says_what_it_needs(arguments: list[str]) -> None:
    found = ran(f"from dpbench.__main__ import main; main({arguments!r})")
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith("error: dpbench measures on Unix")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("module", ["signals", "locks"])
def test_python_says_it_too(module: str) -> None:
    found = ran(f"import dpbench.records.{module}")
    assert found.stderr.splitlines()[-1].endswith(" run it in WSL")
    assert "NotUnix" in found.stderr
