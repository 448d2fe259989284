"""What the command line's options take: comma-separated lists of names, schedules and numbers."""

from __future__ import annotations

from typing import Any

import click


class Names(click.ParamType[tuple[str, ...]]):
    """A comma-separated list of names."""

    name = "a,b,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas."""
        return value if isinstance(value, tuple) else tuple(part.strip() for part in value.split(",") if part.strip())


class Schedules(click.ParamType[tuple[str, ...]]):
    """A list of schedules, each a rung's name or switches."""

    name = "rung,switch=position,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas, and at `;` where two schedules of switches meet."""
        from dpbench import plan

        return value if isinstance(value, tuple) else tuple(plan.split_schedules(value))


class Numbers(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of whole numbers."""

    name = "1,2,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas; fail on what is no number."""
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is no comma-separated list of whole numbers, such as 1,2,4", param, ctx)
