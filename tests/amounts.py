"""Amounts: the numbers in a text, with their units, whatever words stand around them.

The words of a text are asserted in golden files only.
"""

from __future__ import annotations

import re

_AMOUNT = re.compile(
    r"(?<![\w.])[-−+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"
    r"(?:×|%| ?(?:[kKMGT]i?)?B(?:/s)?\b| (?:[nµm]?s|min|h|m?J|W|MHz|[MGTP]?FLOP/s)(?!\w))?"
)


def amounts(text: str) -> list[str]:
    """Return the numbers in a text in their order, as in ["2", "41%", "10.0 ms"]."""
    return [found.rstrip(",") for found in _AMOUNT.findall(text)]
