"""The house keeps its floors: imports point strictly down, heavy dependencies have one home, modules stay small.

Read from the source alone, so that a lazy import counts as much as one at the top.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FLOORS = (
    {
        "records",
        "estimate",
        "devices",
        "nvml",
        "machine",
        "registry",
        "lifeline",
        "schedule",
        "columns",
        "words",
        "strictjson",
        "cores",
        "heap",
    },
    {
        "engine",
        "models",
        "samplers",
        "clock",
        "busy",
        "stats",
        "shown",
        "steady",
        "store",
        "plan",
        "provenance",
        "ledger",
        "server",
        "listing",
        "links",
        "peaks",
        "ranks",
        "quiet",
    },
    {
        "strategies",
        "verify",
        "analyse",
        "ladder",
        "export",
        "validity",
        "selfcheck",
        "imbalance",
        "footprint",
        "traffic",
        "preflight",
    },
    {"worker", "predict", "probe", "diagnose", "findings", "rounds"},
    {"run", "report", "progress", "find_batch"},
    {"cli"},
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}
HOMES = {
    "torch": {"engine", "models", "strategies", "clock", "busy", "worker", "verify", "predict", "probe", "ranks"},
    "pynvml": {"nvml"},
    "matplotlib": {"report"},
    "pandas": {"analyse", "diagnose", "report"},
}
LIGHT = ("dpbench", "dpbench.plan", "dpbench.store", "dpbench.run", "dpbench.cli")
ROOT = Path(__file__).parent.parent / "dpbench"
FACADE = ROOT / "__init__.py"
FILES = [path for path in sorted(ROOT.rglob("*.py")) if path != FACADE]
every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def unit_of(path: Path) -> str:
    """Return the floor table's name of a file: its folder's, or its own."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, in full; blocks under TYPE_CHECKING are left out."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ("dpbench", *path.relative_to(ROOT).parts[:-1])
            parts = [*package[: len(package) - node.level + 1]] if node.level else []
            yield from (".".join([*parts, *filter(None, [node.module]), alias.name]) for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))


@every_file
def test_imports_point_strictly_down(path: Path) -> None:
    mine = unit_of(path)
    assert mine in FLOOR, f"{mine} has no floor; give it one in docs/design.md and here"
    for name in imports(path):
        top, _, rest = name.partition(".")
        theirs = rest.partition(".")[0]
        if top == "dpbench" and theirs and theirs != mine and not theirs.startswith("__"):
            assert theirs in FLOOR, f"{path.name} imports {name}, which has no floor"
            assert FLOOR[theirs] < FLOOR[mine], f"{mine} (F{FLOOR[mine]}) imports {name} (F{FLOOR[theirs]})"


@every_file
def test_heavy_dependencies_have_one_home(path: Path) -> None:
    for name in imports(path):
        home = HOMES.get(name.partition(".")[0])
        assert home is None or unit_of(path) in home, f"{unit_of(path)} imports {name}"


@every_file
def test_modules_stay_small_and_say_what_they_are(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= 400, f"{lines} lines"
    if lines > 250:
        print(f"{path.relative_to(ROOT)}: {lines} lines, more than the 250 to aim at")
    assert path.stem not in {"utils", "util", "common", "core", "base", "helpers"}


def test_records_know_the_standard_library_alone() -> None:
    assert {name.partition(".")[0] for name in imports(ROOT / "records.py")} <= sys.stdlib_module_names


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    if not list(ROOT.parent.glob(module.replace(".", "/") + "*")):
        pytest.skip(f"{module} is not there yet")
    code = f"import sys, {module}; print(*sorted({{'torch', 'matplotlib', 'pandas'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == ""


def test_facade_loads_the_engine_on_first_use() -> None:
    code = "import dpbench; [getattr(dpbench, name) for name in dpbench.__all__]; print(dpbench.scatter.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "scatter"
