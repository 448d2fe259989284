"""Api: measure cases, and read stored or exported runs, from Python.

The command line uses it too.
"""

from __future__ import annotations

from pathlib import Path

STORE = Path("dpbench.db")
"""The results file, unless another one is given."""
REPORTS = Path("reports")
"""The folder of the pages of all runs."""
LATEST = REPORTS / "latest" / "index.html"
