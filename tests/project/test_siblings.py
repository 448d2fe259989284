"""Siblings: without one of them, dpbench works and lacks only its commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dpbench.records import siblings
from tests import exported
from tests import observed_loops as loops

PACKAGE = Path(__file__).parents[2] / "dpbench"
COMMANDS = {"observe": {"watch", "import"}, "predict": {"predict"}, "doctor": {"doctor"}}


def do(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the copy of dpbench in `folder`, in that folder."""
    return subprocess.run(
        [sys.executable, "-m", "dpbench", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def listed(folder: Path) -> set[str]:
    _, _, commands = do(folder, "--help").stdout.partition("Commands:\n")
    return {line.split()[0] for line in commands.splitlines() if line.startswith("  ")}


@pytest.mark.slow
@pytest.mark.parametrize("package", siblings.SIBLINGS)
def test_without_a_sibling_everything_else_works(package: str, tmp_path: Path) -> None:
    copied = tmp_path / "dpbench"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    every = listed(tmp_path)
    assert COMMANDS[package] < every
    shutil.rmtree(copied / package)
    assert listed(tmp_path) == every - COMMANDS[package]

    axes = ("--models", "mlp", "--devices", "1,2", "--batch-sizes", "8", "--rounds", "1")
    ran = do(tmp_path, "run", *axes, "--name", "here")
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "reports" / "latest" / "index.html").is_file()
    watched = exported.stored(tmp_path / "dpbench.db", *loops.loop(), provenance=loops.FACTS)
    for run in ("@here", watched):
        for command in ("report", "explain"):
            told = do(tmp_path, command, "--run", run, "--json")
            assert told.returncode == 0, told.stderr
            answers = json.loads(told.stdout)["answers"]
            assert bool(answers) is (run == "@here" or package != "observe")
    assert ("machines" in do(tmp_path, "list", "--help").stdout) is (package != "predict")
    assert do(tmp_path, "list", "strategies").returncode == 0
