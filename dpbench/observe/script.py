"""Script: run a Python script or module as the interpreter would, and name places in it."""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from collections.abc import Sequence
from pathlib import Path

INTERRUPTED = -signal.SIGINT
"""The result of `run` if the script ended by KeyboardInterrupt, which it did not catch."""


def run(script: str, arguments: Sequence[str], *, module: bool = False) -> int:
    """Run a script, or with `module` a module as `python -m` does.

    Return the exit code, from 0 to 255, or `INTERRUPTED`. The script has `sys.argv`, `sys.path` and
    `__main__` of its own, which stay: functions that it has registered with atexit need them, too.
    An exception goes to `sys.excepthook`, from the script's frames on.
    """
    sys.argv = ["-m" if module else script, *arguments]
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    if not sys.flags.safe_path:
        # instead of the folder of the command dpbench
        sys.path[0] = str(Path.cwd()) if module else str(Path(script).resolve().parent)
    try:
        if module:
            # unlike run_module, it leaves the module in place
            runpy._run_module_as_main(script)  # type: ignore[attr-defined]
        else:
            _run_file(script, main)
    except SystemExit as error:
        return _code(error)
    except BaseException as error:
        _show(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(script: str, main: types.ModuleType) -> None:
    path = os.path.join(Path.cwd(), script)  # noqa: PTH118  # it stays as it was written
    main.__dict__.update(
        __file__=path,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
    )
    code = compile(Path(script).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def _code(error: SystemExit) -> int:
    """Return the exit code of the interpreter: 1 for a text or other object, which is printed."""
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)


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
