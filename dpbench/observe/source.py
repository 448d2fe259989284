"""Source: lines of a training script that mislead its user, found in its text.

The script runs unchanged, so that its text tells what no hook in torch sees: calls of Python's
clocks, and how the script chooses its batch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_CLOCKS = {"time", "perf_counter", "perf_counter_ns", "monotonic", "time_ns"}
_WAITS = {"synchronize", "elapsed_time"}
"""The calls that wait for a GPU, or time its own work."""
_READS = {"item", "cpu", "tolist", "numpy"}
"""The calls that wait for a GPU because they read values from it."""
_BATCH = re.compile(r"(?:^|_)batch(?:_?size)?$", re.I)
"""Matches a name of the batch or its size, but not of a loss or a number of batches."""
_COUNTS = {"world_size", "get_world_size", "device_count", "num_gpus", "n_gpus", "ngpus", "nprocs"}
"""The usual names of the number of devices or ranks."""


def notes(path: Path, *, on_gpus: bool, devices: int) -> Iterator[str]:
    """Yield a sentence on each line of a script that misleads.

    `on_gpus` is whether it trains on GPUs, and `devices` the number of devices of all ranks.
    """
    tree = _tree(path)
    if on_gpus and not any(_called(call) in _WAITS for call in _calls(tree)):
        for line in _timed(tree):
            yield (
                f"{path.name}:{line} reads a clock of the host in the loop of the steps, and no"
                f" line of {path.name} calls torch.cuda.synchronize(): the script's own times are"
                " those of launching the work, not of doing it"
            )
    if devices > 1:
        for line, divided in _divided(tree):
            yield (
                f"{path.name}:{line} divides the batch by the number of devices ({divided}): each"
                " further device makes the batch per device smaller, and leaves the devices less"
                " work to hide communication; compare numbers of devices at equal batch per device"
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


def _divided(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each line that divides a batch by a number of devices, and the division."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Div)):
            continue
        names = {
            one.id if isinstance(one, ast.Name) else one.attr
            for one in ast.walk(node.right)
            if isinstance(one, ast.Name | ast.Attribute)
        }
        if names & _COUNTS and _is_batch(node.left):
            yield node.lineno, ast.unparse(node)


def _is_batch(node: ast.expr) -> bool:
    """Return whether an expression is a batch or its size by its name, perhaps as a number."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return bool(_BATCH.search(name))
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return bool(_BATCH.search(name))
        case ast.Call(func=ast.Name(id="int" | "float" | "len"), args=[inner]):
            return _is_batch(inner)
    return False
