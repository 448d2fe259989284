"""Siblings: without one of them, dpbench works and lacks only its commands.

A copy of the package runs and reports, and in a copy of the checkout the remaining tests pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from dpbench.records import siblings
from dpbench.store import Naming
from tests import exported
from tests import observed_loops as loops
from tests.project.test_floors import imports

PACKAGE = Path(__file__).parents[2] / "dpbench"
CHECKOUT = PACKAGE.parent
LEFT_OUT = (".*", "__pycache__", "build", "*.egg-info")
"""What a checkout contains besides its own files."""
UPPER = (
    "records",
    "store",
    "hardware",
    "analysis",
    "measure",
    "report",
    "api",
    "cli",
    "strategies",
)
"""The folders of tests to run without a sibling, besides those of the other siblings.

Packages below them, such as the engine, are tested alike; rules about the whole checkout name it.
"""
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


@pytest.fixture
def package_alone(tmp_path: Path) -> Path:
    """A folder with a copy of the package, and a store with a watched run."""
    shutil.copytree(PACKAGE, tmp_path / "dpbench", ignore=shutil.ignore_patterns("__pycache__"))
    watched = Naming(name="watched")
    exported.stored(tmp_path / "dpbench.db", *loops.loop(), provenance=loops.FACTS, naming=watched)
    return tmp_path


def answers(folder: Path, command: str, run: str) -> list[object]:
    told = do(folder, command, "--run", run, "--json")
    assert told.returncode == 0, told.stderr
    found: list[object] = json.loads(told.stdout)["answers"]
    return found


def places_of(part: str | Mapping[str, str]) -> list[str]:
    """Return the places in a field of a sibling, which are one or have names."""
    return [*filter(None, [part] if isinstance(part, str) else part.values())]


def test_all_that_siblings_add_exists() -> None:
    for sibling in siblings.installed():
        places = [place for part in vars(sibling).values() for place in places_of(part)]
        assert places
        for place in places:
            assert siblings.at(place) is not None


@pytest.mark.slow
@pytest.mark.parametrize("package", siblings.SIBLINGS)
def test_without_a_sibling_its_commands_alone_are_missing(
    package: str, package_alone: Path
) -> None:
    every = listed(package_alone)
    assert COMMANDS[package] < every
    shutil.rmtree(package_alone / "dpbench" / package)
    assert listed(package_alone) == every - COMMANDS[package]
    assert bool(answers(package_alone, "report", "@watched")) is (package != "observe")
    machines = "machines" in do(package_alone, "list", "--help").stdout
    assert machines is (package != "predict")


@pytest.mark.slow
def test_without_all_siblings_everything_else_works(package_alone: Path) -> None:
    for package in siblings.SIBLINGS:
        shutil.rmtree(package_alone / "dpbench" / package)
    axes = ("--models", "mlp", "--devices", "1,2", "--batch-sizes", "8", "--rounds", "1")
    ran = do(package_alone, "run", *axes, "--name", "here")
    assert ran.returncode == 0, ran.stderr
    assert (package_alone / "reports" / "latest" / "index.html").is_file()
    for command in ("report", "explain"):
        assert answers(package_alone, command, "@here")
        assert not answers(package_alone, command, "@watched")
    assert do(package_alone, "list", "strategies").returncode == 0


def delete_tests_of(package: str, tests: Path) -> None:
    """Delete the tests of a sibling, and those that import it, or a file deleted before."""
    shutil.rmtree(tests / package)
    gone = [f"dpbench.{package}.", f"tests.{package}."]
    files = {path: [name for _, name in imports(path)] for path in tests.rglob("*.py")}
    while users := [
        path
        for path, names in files.items()
        if any(f"{name}.".startswith(one) for name in names for one in gone)
    ]:
        for path in users:
            gone.append(".".join(path.relative_to(tests.parent).with_suffix("").parts) + ".")
            del files[path]
            path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("package", siblings.SIBLINGS)
def test_the_remaining_tests_pass_without_a_sibling(
    package: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("all"):
        pytest.skip("minutes long: make test-all runs it")
    copied = tmp_path / "checkout"
    shutil.copytree(CHECKOUT, copied, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.rmtree(copied / "dpbench" / package)
    delete_tests_of(package, copied / "tests")
    others = [one for one in siblings.SIBLINGS if one != package]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--fast", "-p", "no:cacheprovider"]
        + [f"tests/{folder}" for folder in (*UPPER, *others)],
        cwd=copied,
        env={**os.environ, "PYTHONPATH": str(copied)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
