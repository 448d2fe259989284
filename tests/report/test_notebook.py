"""A run in a real notebook: its HTML is the output of a cell.

Progress and results reach the notebook.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import commands
from tests.api.test_api import FAILED, HOSTILE, trials
from tests.exported import stored

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")


def executed(folder: Path, *cells: str) -> list[list[Any]]:
    """Run the cells of a notebook in a folder; return the outputs of each cell."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell["outputs"] for cell in notebook.cells]


@pytest.mark.slow
def test_a_notebook_shows_the_answers_and_the_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(commands.ROOT))
    run_id = stored(tmp_path / "dpbench.db", *trials(FAILED))
    loading, shown, verdict, answers, table, plot = executed(
        tmp_path,
        "import dpbench as dp\nrun = dp.load()",
        "run",
        "print(run.verdict)",
        "run.answers",
        "run.steps.groupby('strategy')['seconds'].median()",
        "run.plot()",
    )
    assert loading == []
    [output] = shown
    html, plain = output["data"]["text/html"], output["data"]["text/plain"]
    assert plain.startswith(f"<dpbench.Run {run_id[:8]}: 3 cases, finished;")
    assert html.startswith('<div class="dpbench">')
    assert '<div class="card">mlp<b>' in html
    assert HOSTILE not in html
    assert "\n\nmlp: " in verdict[0]["text"]
    said = answers[0]["data"]["text/plain"]
    assert "\n\nmlp: " in said
    assert "\n  Next: " in said
    assert "single" in table[0]["data"]["text/plain"]
    assert plot[0]["data"]["text/html"].count("<svg ") == 2
