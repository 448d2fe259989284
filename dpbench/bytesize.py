"""Byte sizes as the command line takes them: 8GiB, 512MiB, 1000000."""

from __future__ import annotations

import re
from typing import Any

import click


class Bytes(click.ParamType[int]):
    """A number of bytes, with a unit or without."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a number and its unit; fail on what is neither."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", str(value), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is no number of bytes, such as 8GiB, 512MiB or 1000000", param, ctx)
        power = " KMGT".index((found[2] or " ").upper())
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)
