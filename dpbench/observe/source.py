"""Source: lines of a training script that mislead its user, found in its text.

The script runs unchanged, so that its text tells what no hook in torch sees, such as calls of
Python's clocks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_CLOCKS = {"time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns"}
_WAITS = {"synchronize", "elapsed_time"}
"""The calls that wait for a GPU, or time its own work."""
_READS = {"item", "cpu", "tolist", "numpy"}
"""The calls that wait for a GPU because they read values from it."""


def notes(path: Path, *, on_gpus: bool) -> Iterator[str]:
    """Yield a sentence on each line of a script that misleads; it trains on GPUs if `on_gpus`."""
    tree = _tree(path)
    if on_gpus and not any(_called(call) in _WAITS for call in _calls(tree)):
        for line in _timed(tree):
            yield (
                f"{path.name}:{line} reads a clock of the host in the loop of the steps, and no"
                f" line of {path.name} calls torch.cuda.synchronize(): the script's own times are"
                " those of launching the work, not of doing it"
            )


def missing_binding(path: Path) -> Iterator[str]:
    """Yield clauses on the usual lines by which a rank takes memory on the first GPU."""
    calls = _calls(_tree(path))
    for call in calls:
        named = {one.arg for one in call.keywords}
        mapped = len(call.args) > 1 or named & {"map_location", None}
        if ast.unparse(call.func) == "torch.load" and not mapped:
            yield f"{path.name}:{call.lineno} calls torch.load without map_location"
    if calls and not any(_called(call) == "set_device" for call in calls):
        yield f"no line of {path.name} calls torch.cuda.set_device"


def _tree(path: Path) -> ast.Module:
    """Return the tree of a script; an empty one if it cannot be read."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _called(call: ast.Call) -> str:
    """Return the last name of the function that is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def _timed(tree: ast.AST) -> Iterator[int]:
    """Yield the first line that reads a clock in a loop that calls backward."""
    for loop in ast.walk(tree):
        calls = _calls(loop) if isinstance(loop, ast.For | ast.While) else []
        clocks = [one.lineno for one in calls if _is_clock(one)]
        called = {_called(one) for one in calls}
        if clocks and "backward" in called and not called & _READS:
            yield min(clocks)
            return


def _is_clock(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    return name in _CLOCKS and owner in ("", "time") and not call.args
