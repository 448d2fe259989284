"""Versions: what pyproject.toml declares is what `make ci-versions` installs."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from tests import versions


def test_the_lowest_versions_are_those_that_are_declared() -> None:
    project = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
    lowest = [*versions.requirements(versions.LOWEST)]
    for requirement in project["dependencies"]:
        name, _, bound = requirement.partition(">=")
        assert bound, f"{requirement} has no lowest version"
        assert f"{name}=={bound}" in lowest


def test_another_torch_leaves_the_usual_versions_of_all_other_packages() -> None:
    found = dict(one.split("==") for one in versions.requirements("2.11.0"))
    assert found["torch"] == "2.11.0"
    constraints = (versions.ROOT / "constraints.txt").read_text().lower().splitlines()
    assert all(f"{name}=={found[name]}" in constraints for name in found if name != "torch")
    assert {one.partition("=")[0] for one in versions.requirements(versions.LOWEST)} == {*found}


def test_the_tests_of_integrations_run_where_their_libraries_are_installed() -> None:
    found = [*versions.requirements(versions.INTEGRATIONS)]
    assert {*versions.LIBRARIES} <= {*found}
    names = "|".join(versions.LIBRARIES)
    skips = re.compile(rf'importorskip\((?:"(?:{names})"|library\))')
    tests = {
        str(path.relative_to(versions.ROOT))
        for path in (versions.ROOT / "tests").rglob("test_*.py")
        if skips.search(path.read_text())
    }
    makefile = (versions.ROOT / "Makefile").read_text()
    (named,) = re.findall(r"^INTEGRATED := (.*)$", makefile.replace("\\\n", ""), re.M)
    assert tests == {one.partition("::")[0] for one in named.split()}


def test_without_a_lock_what_runs_the_tests_is_installed_in_any_declared_version() -> None:
    project = tomllib.loads((versions.ROOT / "pyproject.toml").read_text())["project"]
    found = [*versions.requirements(versions.FREE_THREADED)]
    assert found[: len(project["dependencies"])] == project["dependencies"]
    tools = found[len(project["dependencies"]) :]
    assert {re.split("[>=<]", one)[0] for one in tools} == {*versions.RUNNING}
    assert {*tools} <= {*versions.declared()}


def plan_of(*arguments: str) -> str:
    """Return the commands that `make ci-versions` would run."""
    command = ["make", "--dry-run", "ci-versions", *arguments]
    return subprocess.run(
        command, cwd=versions.ROOT, capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("others", ["", "lowest "], ids=["alone", "beside another"])
def test_without_such_an_interpreter_its_stage_is_left_out_by_name(others: str) -> None:
    printed = plan_of(f"VERSIONS={others}free-threaded", "FREE=")
    assert "free-threaded is left out" in printed
    assert "PYTHON_GIL" not in printed
    assert "versions.py free-threaded" not in printed
    assert ("versions.py lowest" in printed) is bool(others)


def test_with_such_an_interpreter_its_stage_runs_without_the_lock() -> None:
    printed = plan_of("VERSIONS=lowest free-threaded", "FREE=/opt/python3.14t", "ARGS=-k a_name")
    assert "left out" not in printed
    assert "/opt/python3.14t -m venv .venv-versions/free-threaded" in printed
    assert "/opt/python3.14t -m venv .venv-versions/lowest" not in printed
    runs = re.findall(r"PYTHON_GIL=0 \S+ (test\S*) .*?free-threaded ARGS=\"(.*?)\"", printed)
    assert runs == [("test", "tests/engine -k a_name"), ("test-fast", "-k a_name")]
