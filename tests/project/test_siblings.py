"""Siblings: without one of them, dpbench works and lacks only its commands.

A copy of the package runs and reports, and in a copy of the checkout the remaining tests pass.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from dpbench.cli.options import EXIT_UNDECIDED
from dpbench.records import siblings
from dpbench.store import Naming, Store
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
COMMANDS = {
    "observe": {"watch", "import"},
    "predict": {"predict"},
    "doctor": {"doctor"},
    "gating": {"gate"},
}


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
    every = listed(package_alone)
    for package in siblings.SIBLINGS:
        shutil.rmtree(package_alone / "dpbench" / package)
    assert listed(package_alone) == every.difference(*COMMANDS.values())
    axes = ("--models", "mlp", "--strategies", "single,dp", "--devices", "2", "--batch-sizes", "8")
    ran = do(package_alone, "run", *axes, "--rounds", "1", "--name", "here")
    assert ran.returncode == 0, ran.stderr
    assert (package_alone / "reports" / "latest" / "index.html").is_file()
    for command in ("report", "explain"):
        assert answers(package_alone, command, "@here")
        assert not answers(package_alone, command, "@watched")
    for reading in (
        ("export", "csv", "--all"),
        ("export", "trace", "--run", "@watched"),
        ("list", "strategies"),
    ):
        read = do(package_alone, *reading)
        assert read.returncode == 0, read.stderr
        assert read.stdout
    compared = do(package_alone, "compare", "@here", "@here")
    assert compared.returncode == EXIT_UNDECIDED, "one round decides nothing"
    page, gone = package_alone / "examined.html", "of a sibling that is gone"
    with Store.create(package_alone / "dpbench.db") as store:
        store.keep_machine_result("h", 1.7e9, gone)
        assert [run.machine_result for run in store.runs()] == ["", gone]
    assert do(package_alone, "report", "--run", "@watched", "--report", str(page)).returncode == 0
    assert gone not in page.read_text()


def delete_tests_of(packages: Sequence[str], tests: Path) -> None:
    """Delete the tests of siblings, and those that import one, or a file deleted before."""
    for package in packages:
        shutil.rmtree(tests / package)
    gone = [f"{top}.{package}." for top in ("dpbench", "tests") for package in packages]
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
@pytest.mark.parametrize(
    "packages", [*((one,) for one in siblings.SIBLINGS), siblings.SIBLINGS], ids=",".join
)
def test_the_remaining_tests_pass_without_siblings(
    packages: Sequence[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("all"):
        pytest.skip("minutes long: make test-all runs it")
    copied = tmp_path / "checkout"
    shutil.copytree(CHECKOUT, copied, ignore=shutil.ignore_patterns(*LEFT_OUT))
    for package in packages:
        shutil.rmtree(copied / "dpbench" / package)
    delete_tests_of(packages, copied / "tests")
    others = [one for one in siblings.SIBLINGS if one not in packages]
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
