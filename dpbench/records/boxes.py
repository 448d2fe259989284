"""Boxes: what the picture of a machine shows."""

from __future__ import annotations

from dataclasses import dataclass

SLOW = 0.5
"""The share of a link's promised rate, or of the median of its kind, below which it is slow."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of the machine's picture: a socket, a switch or a GPU.

    `row` counts from the top, `column` from the left; a box may lie between two columns.
    """

    id: str
    row: int
    column: float
    texts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between two boxes of the machine's picture, and its measured over its promised rate.

    `share` is None if one of the two rates is unknown, and 0 if copies are wrong or have no end.
    """

    ends: tuple[str, str]
    share: float | None

    @property
    def slow(self) -> bool:
        """Return whether the link reaches less than `SLOW` of what it promises."""
        return self.share is not None and self.share < SLOW
