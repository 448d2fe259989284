"""Reports: render the analysis of a run as one offline HTML page or as Markdown.

Modules here select, format and draw numbers; dpbench.analysis computes them. Only the modules that
draw import matplotlib, and a caller imports these after `check_drawings`.
"""

from __future__ import annotations

from importlib.util import find_spec

from dpbench.records.errors import UsageError
from dpbench.records.spelling import dashed


class NoDrawings(UsageError, LookupError):
    """Nothing can be drawn, because matplotlib is not installed."""


def check_drawings() -> None:
    """Raise NoDrawings if matplotlib, which drawings and pages need, is not installed."""
    if find_spec("matplotlib") is None:
        raise NoDrawings(
            "drawings and pages need the package matplotlib, which is not installed; install it"
            f" with pip install matplotlib, or use `dpbench report {dashed('md')}`, which draws"
            " nothing"
        )
