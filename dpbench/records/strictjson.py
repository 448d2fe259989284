"""JSON as its standard has it: a number that is not finite, which it cannot express, becomes null."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping


def dumps(value: object, *, default: type[str] | None = None, separators: tuple[str, str] | None = None) -> str:
    """Return plain data as JSON without NaN and Infinity; `default` converts what JSON has no type for."""
    return json.dumps(_finite(value), allow_nan=False, default=default, separators=separators)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
