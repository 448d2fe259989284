"""Columns: plain text tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(lines: Sequence[Sequence[str]], left: Collection[int]) -> list[str]:
    """Return cells in columns as wide as their widest, a rule below the first line; `left` columns begin alike."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def text(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return [text(lines[0]), "  ".join("-" * width for width in widths), *map(text, lines[1:])]
