"""Interpreter: whether Python's global lock is on, and which module's import switched it on.

It imports no package, because each may be the one that switches the lock on.
"""

from __future__ import annotations

import re
import sys
import warnings
from typing import Any

UNKNOWN = "a module that CPython did not name"
_SWITCHED = re.compile(r"\(GIL\) has been enabled to load module '([^']+)'")
"""A part of the warning that CPython gives for the first such module, and for no later one."""


class _Watch:
    began = False
    module = UNKNOWN


def gil() -> str:
    """Return whether the global interpreter lock is "on" or "off" in this process now.

    An imported extension can switch it on in an interpreter that began without it.
    """
    return "on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off"


def watch_gil() -> None:
    """From now on, note the module whose import switches the lock on.

    Nothing is noted if it is on already. A process that is forked goes on with the notes.
    """
    if gil() == "on" or _Watch.began:
        return
    _Watch.began = True
    shown = warnings.showwarning

    def show(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        _Watch.module = switching(str(message)) or _Watch.module
        shown(message, *args, **kwargs)

    warnings.showwarning = show


def switched_on_by() -> str:
    """Return the module that has switched the lock on since `watch_gil`, or `UNKNOWN`; else ""."""
    return _Watch.module if _Watch.began and gil() == "on" else ""


def switching(text: str) -> str:
    """Return the module that switched the lock on, as CPython's warning in `text` says; else ""."""
    found = _SWITCHED.search(text)
    return found[1] if found else ""
