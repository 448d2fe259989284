"""Spelling: how the command line and Python write an option.

Everything else names an option as its field of `Options`, or its argument in Python, is named.
"""

from __future__ import annotations

from collections.abc import Callable

Spelling = Callable[[str, object], str]
"""A way to write an option: a function of its name and its value, "" without a value."""


def dashed(name: str, value: object = "") -> str:
    """Return an option as on the command line, such as --batch-sizes 64.

    A list has commas. A flag, which has the value True, is written without it.
    """
    option = f"--{name.replace('_', '-')}"
    text = ",".join(map(str, value)) if isinstance(value, list) else value
    return option if value == "" or value is True else f"{option} {text}"


def keyword(name: str, value: object = "") -> str:
    """Return an option as an argument in Python, such as batch_sizes=64 or device_kind='cpu'.

    A text of digits becomes a number. Without a value, nothing follows =.
    """
    if value == "":
        return f"{name}="
    digits = isinstance(value, str) and value.isdecimal()
    return f"{name}={int(str(value)) if digits else value!r}"
