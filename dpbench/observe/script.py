"""Script: run a Python script or module as the interpreter would, and name places in it."""

from __future__ import annotations

import builtins
import importlib.machinery
import runpy
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def run(script: str, arguments: Sequence[str], *, module: bool = False) -> int:
    """Run a script, or with `module` a module as `python -m` does, and return its exit code.

    The script sees its own `sys.argv`, `sys.path` and `__main__`. An exception is printed as the
    interpreter prints it, from the script's frames on.
    """
    with _place(script, arguments, module):
        try:
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                _run_file(script)
        except SystemExit as error:
            return _code(error)
        except KeyboardInterrupt as error:
            _print(error)
            return 130
        except BaseException as error:
            _print(error)
            return 1
    return 0


@contextmanager
def _place(script: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    argv = sys.argv
    path = [*sys.path]
    main = sys.modules.get("__main__")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path.cwd()) if module else str(Path(script).resolve().parent))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path
        if main is not None:
            sys.modules["__main__"] = main


def _run_file(script: str) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = script
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", script)
    sys.modules["__main__"] = main
    exec(compile(Path(script).read_bytes(), script, "exec"), main.__dict__)


def _code(error: SystemExit) -> int:
    """Return the exit code of the interpreter: 1 for a text or other object, which is printed."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _print(error: BaseException) -> None:
    trace = error.__traceback__
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


_IGNORED = ("torch", "dpbench.observe", "dpbench.engine")
"""The packages whose frames do not belong to the script."""
_CALLS = 256
"""The largest number of calls of the script whose places are remembered."""
_places: dict[tuple[int, int, str], tuple[types.CodeType, str]] = {}
"""The code object and the place of a call, by code id, instruction and called function.

The code object is kept, so that no other code object gets its id.
"""


def of_script(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the innermost frame of the script at or around a frame; None if there is none."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_IGNORED):
        frame = frame.f_back
    return frame


def place(caller: types.FrameType, what: str) -> str:
    """Return the place in the script that led to a call of `what`, such as `train.py:31 item`."""
    code = caller.f_code
    key = id(code), caller.f_lasti, what
    remembered = _places.get(key)
    if remembered is not None:
        return remembered[1]
    frame = of_script(caller)
    if frame is None:
        return what
    text = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {what.strip('_')}"
    if frame is caller:
        if len(_places) >= _CALLS:
            _places.clear()
        _places[key] = code, text
    return text
