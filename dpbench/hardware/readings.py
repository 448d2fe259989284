"""Readings: ask the machine one question at a time; what cannot be answered is unknown.

Drivers, kernels and libraries fail in ways that no list of exceptions foresees, such as a name in
bytes that are no text. A reading that raises any error therefore makes this reading unknown, and
ends nothing else. Only the call into the library and the check of its answer belong into a reading;
an error of dpbench's own code must stay visible.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

_noted: set[str] = set()
"""The readings about whose errors this process has already logged a warning."""


def reading(
    name: str,
    ask: Callable[..., T],
    *arguments: Any,
    absent: type[Exception] | tuple[type[Exception], ...] = (),
) -> T | None:
    """Return `ask(*arguments)`, or None if it raises an error: the reading is then unknown.

    Errors of the types `absent` say that this machine does not have the reading. The first other
    error of each `name` is logged as a warning.
    """
    try:
        return ask(*arguments)
    except absent as error:
        log.info("%s is unknown: %s", name, error)
    except Exception as error:
        note(name, f"{type(error).__name__}: {error}")
    return None


def note(name: str, why: str) -> None:
    """Log a warning that a reading is unknown, once per process and reading."""
    if name not in _noted:
        _noted.add(name)
        log.warning("%s cannot be read, and is therefore unknown: %s", name, why)


def text(answer: Any) -> str:
    """Return an answer as text; raise TypeError or UnicodeError if it is none."""
    if isinstance(answer, bytes):
        return answer.decode()
    if not isinstance(answer, str):
        raise TypeError(f"the answer {answer!r} is not text")
    answer.encode()  # raises an error if it cannot be stored
    return answer


def number(answer: Any) -> float:
    """Return an answer as a number; raise TypeError or ValueError if it is no finite one."""
    if not isinstance(answer, int | float):
        raise TypeError(f"the answer {answer!r} is not a number")
    if not math.isfinite(answer):
        raise ValueError(f"the answer {answer!r} is not a finite number")
    return float(answer)


def whole(answer: Any) -> int:
    """Return an answer that is an integer; raise TypeError for any other."""
    if not isinstance(answer, int) or isinstance(answer, bool):
        raise TypeError(f"the answer {answer!r} is not an integer")
    return answer


def truth(answer: Any) -> bool:
    """Return an answer of 0 or 1 as a truth; raise TypeError or ValueError for any other."""
    if not isinstance(answer, int):
        raise TypeError(f"the answer {answer!r} is neither 0 nor 1")
    if answer not in (0, 1):
        raise ValueError(f"the answer {answer!r} is neither 0 nor 1")
    return bool(answer)
