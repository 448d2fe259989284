"""Visible: escape characters that would control a terminal, reorder a text or break a line.

Texts of a store, an export or a trace may come from another machine. They pass through `visible`
where they enter, so that no renderer has to escape them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, direction marks, line separators and lone surrogates."""


def visible(text: str, *, lines: bool = False) -> str:
    r"""Return `text` with an escape, such as \x1b or \u202e, in place of each hidden character.

    These are control characters, direction marks, line separators and lone surrogates. With
    `lines`, line feeds are kept.
    """
    if text.isprintable():
        return text
    return _HIDDEN.sub(
        lambda found: (
            "\n" if lines and found[0] == "\n" else found[0].encode("unicode_escape").decode()
        ),
        text,
    )


def everywhere(data: Any) -> Any:
    """Return a copy of plain data in which `visible` has converted all texts and keys."""
    if isinstance(data, str):
        return visible(data)
    if isinstance(data, Mapping):
        return {
            visible(key) if isinstance(key, str) else key: everywhere(value)
            for key, value in data.items()
        }
    if isinstance(data, list | tuple):
        return type(data)(map(everywhere, data))
    return data


def column(values: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a column; texts are converted by `visible`.

    A column has either texts only or no texts. A text that occurs several times is converted once.
    """
    if not values or not isinstance(values[0], str):
        return values
    shown = {value: everywhere(value) for value in dict.fromkeys(values)}
    return [shown[value] for value in values]


def loads(text: str) -> Any:
    """Return the data of a JSON text, in which `visible` has converted all texts and keys."""
    return everywhere(json.loads(text))
