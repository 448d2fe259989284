"""Versions: what pyproject.toml declares is what `make ci-versions` installs."""

from __future__ import annotations

import re
import tomllib

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
