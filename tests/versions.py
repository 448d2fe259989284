"""Versions: the requirements of dpbench in other versions than those of constraints.txt.

`python tests/versions.py lowest` prints the lowest version of each package that pyproject.toml
declares, and `python tests/versions.py 2.11.0` the usual versions with this torch. `make
ci-versions` runs the fast tests with both. With `integrations`, it prints the usual versions and
the libraries that `dpbench.integrations` and `docs/integrations.md` serve; with `free-threaded`,
what dpbench and its tests need, in any declared version, because interpreters without a lock have
wheels of their own.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("dev", "asv", "notebook")
"""The extras that the tests need."""
LOWEST, INTEGRATIONS, FREE_THREADED = "lowest", "integrations", "free-threaded"
LIBRARIES = ("transformers", "accelerate", "lightning", "mlflow", "tensorboard", "wandb")
"""The libraries whose tests run in the stage `INTEGRATIONS` alone, in their newest versions."""
RUNNING = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "pyperf", "pyyaml")
"""The tools of the tests that run there; some others have no wheels for all interpreters."""
_NAME = re.compile(r"[\w-]+")


def declared(tools: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Return the requirements of dpbench and of its tests, of which `tools` selects some."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_tests = (one for extra in EXTRAS for one in extras[extra] if tools(_name_of(one)))
    every = [*project["dependencies"], *of_tests]
    return [one for one in every if not one.startswith(project["name"])]


def _name_of(requirement: str) -> str:
    return _NAME.match(requirement)[0]  # type: ignore[index]


def requirements(version: str) -> Iterator[str]:
    """Yield the requirements with the versions to install.

    `version` is `LOWEST`, `INTEGRATIONS`, `FREE_THREADED` or a version of torch.
    """
    if version == FREE_THREADED:
        yield from declared(RUNNING.__contains__)
        return
    usual = dict(
        line.lower().split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    for requirement in declared():
        name = _name_of(requirement)
        if version == LOWEST:
            yield re.sub(r">=([\w.]+).*", r"==\1", requirement)
        else:
            other = name == "torch" and version != INTEGRATIONS
            yield f"{name}=={version if other else usual[name]}"
    if version == INTEGRATIONS:
        yield from LIBRARIES


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
