"""The layout: files import only files below them, and heavy libraries have one home.

Imports are read from the source, so that one inside a function, or for annotations alone, counts as
much as one at the top of a module. The import of a package that Python adds to the import of its
module does not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from dpbench.records import registry, siblings

FLOORS = (
    "records",
    "hardware",
    "store",
    "models",
    "engine",
    "strategies",
    "analysis",
    "measure",
    "report",
    "api",
    "cli",
    "observe",
    "predict",
    "doctor",
    "gating",
    "dpbench",
    "integrations",
    "__main__",
)
"""The packages of dpbench, from the ground up: each imports only packages before it.

`dpbench` and `__main__` are single files; callbacks for other libraries know the facade alone.
"""
NEVER = (("store", "hardware"), ("analysis", "hardware"), ("report", "hardware"))
"""The pairs of packages of which the first never imports the second, although it lies below."""
PLAIN = ("step", "scatter", "replicate", "parallel_apply", "gather", "reduce")
"""The files of the engine that explain DataParallel."""
DESCRIBED = ("analysis.moves", "predict.tasks", "predict.memory", "predict.strategy_memory")
"""The files that ask a strategy what its step does."""
HOMES = {
    "torch": (
        "hardware.device",
        "hardware.devices",
        "hardware.rates",
        "models",
        "engine",
        "strategies",
        "measure.clocks",
        "measure.failures",
        "measure.group",
        "measure.ranks",
        "measure.reference",
        "measure.verification",
        "measure.worker",
        "observe",
        "predict",
        "doctor",
    ),
    "pynvml": ("hardware.nvml",),
    "matplotlib": ("report",),
    "pandas": ("analysis",),
    "xml": ("report.svg",),  # it alone knows the syntax of SVG
    "networkx": ("predict.network",),
}
LIGHT = (
    "dpbench",
    "dpbench.records.plan",
    "dpbench.store",
    "dpbench.measure.run",
    "dpbench.measure.batch_search",
    "dpbench.cli",
    "dpbench.strategies.torch_dp",
    "dpbench.predict.cases",
)
ROOT = Path(__file__).parents[2] / "dpbench"
FILES = sorted(ROOT.rglob("*.py"))
REPORTED = [
    path
    for path in FILES
    if path.relative_to(ROOT).parts[0] in ("records", "store", "analysis", "report")
]
SIBLINGS_OWN = {".observed", "Source.PREDICTED", "Source.IMPORTED"}
"""What only siblings name: their cases and their sources."""
FREE = {"sorted", "min", "max", "sum", "any", "all", "len", "set", "frozenset"}
"""The functions whose result does not depend on the order of their argument."""


@lru_cache(maxsize=len(FILES))
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    """Return the name of a file's module below dpbench; that of the facade is dpbench."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return "dpbench" if name == "__init__" else name.removesuffix(".__init__")


MODULES = set(map(module_of, FILES))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything that a file imports."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def named(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt | ast.arg | ast.alias, str]]:
    """Yield each name, with its node: of an attribute with its object, an import, a definition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, f".{node.attr}"
            yield node, ast.unparse(node)
        elif isinstance(node, ast.Name):
            yield node, node.id
        elif isinstance(node, ast.arg):
            yield node, node.arg
        elif isinstance(node, ast.alias | ast.FunctionDef | ast.ClassDef):
            yield node, node.name


def module_imported(name: str) -> str:
    """Return the module of dpbench that an import of `name` reads.

    An empty text if it is of another library.
    """
    top, _, inner = name.partition(".")
    if top != "dpbench":
        return ""
    while inner and inner not in MODULES:
        inner = inner.rpartition(".")[0]
    return inner or "dpbench"


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of modules of dpbench of which the first imports the second."""
    pairs = {
        (module_of(path), module_imported(name)) for path in FILES for _, name in imports(path)
    }
    return {(above, below) for above, below in pairs if below and above != below}


def floor(module: str) -> int:
    """Return the index of a module's package in FLOORS."""
    return FLOORS.index(module.partition(".")[0])


def height(module: str, below: dict[str, set[str]]) -> int:
    """Return the number of modules of the longest chain of imports that starts at a module."""
    return 1 + max((height(one, below) for one in below.get(module, ())), default=0)


def circles(pairs: set[tuple[str, str]]) -> list[set[str]]:
    """Return the largest sets of modules that all import each other, directly or not."""
    below: dict[str, set[str]] = {}
    for module, other in pairs:
        below.setdefault(module, set()).add(other)

    def reached(module: str) -> set[str]:
        seen: set[str] = set()
        left = [module]
        while left:
            new = below.get(left.pop(), set()) - seen
            seen |= new
            left += new
        return seen

    reach = {module: reached(module) for module in below}
    found: list[set[str]] = []
    for module in sorted(below):
        circle = {other for other in reach[module] if module in reach.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def test_the_packages_are_the_floors() -> None:
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith("__")} - {"py.typed"}
    assert found == {*FLOORS} - {"dpbench", "__main__"}


def test_a_circle_and_an_arrow_that_points_up_are_found() -> None:
    pairs = {("cli", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "d"), ("d", "e"), ("e", "d")}
    assert circles(pairs) == [{"a", "b", "c"}, {"d", "e"}]
    assert floor("measure.run") > floor("records")
    assert module_imported("dpbench.records.trial.Trial") == "records.trial"
    assert module_imported("dpbench.__version__") == "dpbench"


def test_no_import_points_up_and_none_is_in_a_circle() -> None:
    pairs = arrows()
    upward = sorted((module, other) for module, other in pairs if floor(module) < floor(other))
    found = circles(pairs)
    print(
        f"{len(FILES)} files, {len(pairs)} arrows: {len(upward)} point up, and {len(found)} circles"
    )
    assert upward == []
    assert found == []


def test_no_package_imports_a_sibling() -> None:
    """The facade names `watch` and `gate` for type checkers, and imports them on first use."""
    found = {
        (module, other)
        for module, other in arrows()
        if (top := other.partition(".")[0]) in siblings.SIBLINGS and module.partition(".")[0] != top
    }
    assert found == {("dpbench", "observe.watching"), ("dpbench", "gating.pairs")}


def test_no_package_asks_for_what_only_siblings_make() -> None:
    """Sources and traits answer what others ask, and a result on a machine is text for others.

    The facts of an observed loop are stored data, whose types are in `records`.
    """
    found = [
        f"{path}:{node.lineno} {name}"
        for path in FILES
        if module_of(path).partition(".")[0] not in siblings.SIBLINGS
        for node, name in named(parsed(path))
        if name in SIBLINGS_OWN or "examination" in name.lower()
    ]
    assert found == []


def test_stores_and_opinions_on_them_ask_no_machine() -> None:
    tops = {
        (module, other): tuple(one.partition(".")[0] for one in (module, other))
        for module, other in arrows()
    }
    assert [pair for pair, top in tops.items() if top in NEVER] == []


def test_the_explanation_of_dataparallel_comes_before_the_fast_schedules() -> None:
    found = {other for module, other in arrows() if module in {f"engine.{one}" for one in PLAIN}}
    assert [other for other in found if other.startswith("engine.fast")] == []


def test_a_step_is_what_its_strategy_says() -> None:
    """The bytes, the time and the memory of a step follow from no role and no name."""
    names = registry.own("strategies")
    for path in FILES:
        if module_of(path) not in DESCRIBED:
            continue
        for node in ast.walk(parsed(path)):
            assert getattr(node, "attr", "") not in ("role", "of_role"), f"{path}:{node.lineno}"
            assert not isinstance(node, ast.Constant) or node.value not in names, path
        assert not [name for _, name in imports(path) if name.endswith(".Role")], path


def test_heavy_libraries_have_one_home() -> None:
    for path in FILES:
        mine = module_of(path) + "."
        for line, name in imports(path):
            homes = HOMES.get(name.partition(".")[0])
            at_home = homes is None or any(mine.startswith(f"{home}.") for home in homes)
            assert at_home, f"{path}:{line} imports {name}; its home is {homes}"
            slow = name.startswith("scipy.stats")
            assert not slow, (
                f"{path}:{line}: every run would import scipy.stats, which takes longer than all of"
                " pandas"
            )


def test_modules_say_what_they_are() -> None:
    for path in FILES:
        assert path.stem not in {"utils", "util", "common", "core", "base", "helpers"}


def texts(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls that read or write text in a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        modes = [
            one.value
            for one in node.args
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        ]
        binary = called.endswith("open") and any("b" in mode for mode in modes)
        if (
            called.rpartition(".")[2] in {"open", "fdopen", "read_text", "write_text"}
            and not binary
        ):
            yield node


def test_the_encoding_of_every_text_is_explicit() -> None:
    """The encoding of the locale is not that of a file from another machine."""
    for path in FILES:
        for call in texts(parsed(path)):
            explicit = any(keyword.arg == "encoding" for keyword in call.keywords)
            assert explicit or ast.unparse(call.func) in {
                "os.open",
                "gzip.open",
            }, f"{path}:{call.lineno}"


def is_set(node: ast.AST) -> bool:
    """Return whether an expression is visibly a set."""
    if isinstance(node, ast.BinOp):
        return is_set(node.left) or is_set(node.right)
    named = (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"set", "frozenset"}
    )
    return named or isinstance(node, ast.Set | ast.SetComp)


def walks(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the iterations over a set whose order may show in a result."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            walked = [node.iter]
        else:
            found = isinstance(node, ast.ListComp | ast.GeneratorExp | ast.DictComp)
            walked = [one.iter for one in node.generators] if found else []  # type: ignore[attr-defined]
        user = parents.get(node)
        free = (
            isinstance(user, ast.Call) and isinstance(user.func, ast.Name) and user.func.id in FREE
        )
        if any(map(is_set, walked)) and not free:
            yield node


def test_no_report_depends_on_the_order_of_a_set() -> None:
    """The hashes of texts differ in every process, and with them the order of a set of texts."""
    found = [f"{path}:{node.lineno}" for path in REPORTED for node in walks(parsed(path))]  # type: ignore[attr-defined]
    assert found == []


def test_records_know_the_standard_library_and_msgspec_alone() -> None:
    for path in (ROOT / "records").glob("*.py"):
        found = {name.partition(".")[0] for _, name in imports(path)} - {"dpbench"}
        # files from users and stored records are checked against their types by a library
        assert found - {"msgspec"} <= sys.stdlib_module_names, path


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    code = (
        f"import sys, {module}; print(*sorted({{'torch', 'matplotlib', 'pandas'}} &"
        " set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert done.stdout.strip() == ""


def test_facade_loads_the_engine_on_first_use() -> None:
    code = (
        "import dpbench; [getattr(dpbench, name) for name in dpbench.__all__];"
        " print(dpbench.scatter.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert done.stdout.strip() == "scatter"


def test_two_files_stand_above_the_plain_engine_and_the_fast_one_and_all_on_few_floors() -> None:
    inside = {
        (above, below)
        for above, below in arrows()
        if above.startswith("engine.") and below.startswith("engine.")
    }
    fast = "engine.fast"
    above_both = {one for one, below in inside if below.startswith(fast) and fast not in one}
    assert above_both == {"engine.data_parallel", "engine.train_step"}
    below: dict[str, set[str]] = {}
    for module, other in inside:
        below.setdefault(module, set()).add(other)
    floors = max(height(module, below) for module in below)
    print(f"engine: {floors} floors, {len(inside)} arrows")
    assert floors <= 8


def test_the_fast_engine_knows_phases_marks_and_schedules_and_no_case() -> None:
    found = {
        name.removeprefix("dpbench.records.")
        for path in (ROOT / "engine" / "fast").glob("*.py")
        for _, name in imports(path)
        if name.startswith("dpbench.records")
    }
    assert found == {"Phase", "Mark", "marked", "no_mark", "schedule.Schedule"}
