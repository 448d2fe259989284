"""Fitted: the constants that a published group is predicted with, which must not have been fitted to it."""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path

from dpbench.predict.constants import DEFAULT, Constants
from dpbench.predict.scoring.rows import PUBLISHED_HOST

FILE = Path(__file__).parents[1] / "data" / "fitted.toml"


@lru_cache(maxsize=1)
def _sections() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = tomllib.loads(FILE.read_text())
    return found


@lru_cache(maxsize=64)
def without(group: str) -> tuple[Constants, float]:
    """Return constants and host factor fitted without a group; those of all groups where it was never in a fit."""
    section = dict(_sections().get(group, {}))
    host = section.pop("host", PUBLISHED_HOST)
    return DEFAULT.changed(**section), host
