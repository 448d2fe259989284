"""The tutorial is a notebook that runs as it is committed, and whose check finds a wrong change."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import commands

nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

PATH = commands.ROOT / "docs" / "tutorial.ipynb"
CHECKS = "check(Mine)\n"
PHASES = ("scatter", "replicate", "forward", "gather", "loss", "backward", "reduce", "optimizer")
RIGHT = {"scatter": "inputs", "forward": "replicas, pieces"}
"""The arguments of the phases for which the prose suggests a right change, as code."""
WRONG = {
    "scatter": ("inputs", "dp.scatter((inputs.flip(0),), devices)"),
    "forward": ("replicas, pieces", "[replicas[0](*pieces[0]) for _ in pieces]"),
    "gather": ("outputs", "torch.cat(outputs[::-1])"),
    "loss": ("output, target", "net.loss(output[:64], target[:64])"),
    "reduce": ("gradients", "[one / 2 for one in dp.reduce(gradients, devices)]"),
}
"""Wrong changes of a phase: its arguments, and what it returns."""


def suggested(phase: str, prose: str) -> str:
    """Return what a phase returns after the change that the prose suggests."""
    (found,) = re.findall(rf"^- `{phase}`: .*?`([^`]*\([^`]*)`", prose, re.MULTILINE)
    return str(found)


def edited(phase: str, arguments: str, returns: str) -> str:
    """Return a cell in which a reader changes a phase, and checks it."""
    change = f"    def {phase}(self, {arguments}):\n        return {returns}"
    return f"class Mine(Step):\n{change}\n\n\ncheck(Mine)"


def test_the_tutorial_is_committed_without_outputs_and_its_links_lead_to_files() -> None:
    cells = json.loads(PATH.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
    prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)#\s]+)\)", prose)
    assert links
    assert [one for one in links if not (PATH.parent / one).exists()] == []


@pytest.mark.slow
def test_the_tutorial_runs_and_tells_right_changes_of_a_phase_from_wrong_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cloudpickle", reason="pip install '.[notebook]'")
    monkeypatch.setenv("PYTHONPATH", str(commands.ROOT))
    notebook = nbformat.read(PATH, as_version=4)
    mine = [cell["source"] for cell in notebook.cells if cell["source"].startswith(CHECKS)]
    assert len(mine) == 1
    prose = "\n".join(cell["source"] for cell in notebook.cells if cell["cell_type"] == "markdown")
    changes = [
        *(edited(phase, arguments, suggested(phase, prose)) for phase, arguments in RIGHT.items()),
        *(edited(phase, *change) for phase, change in WRONG.items()),
    ]
    tried = [
        nbformat.v4.new_code_cell(text, metadata={"tags": ["raises-exception"]}) for text in changes
    ]
    where = 1 + next(
        n for n, cell in enumerate(notebook.cells) if cell["source"].startswith(CHECKS)
    )
    notebook.cells[where:where] = tried
    nbclient.NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()

    outputs = {cell["source"]: cell["outputs"] for cell in notebook.cells if "outputs" in cell}
    ended = [[one["output_type"] for one in outputs[text]] for text in changes]
    assert ended == [["stream"]] * len(RIGHT) + [["error"]] * len(WRONG)
    assert {outputs[text][0]["ename"] for text in changes[len(RIGHT) :]} == {"AssertionError"}
    (printed, table) = outputs[mine[0]]
    assert "Mine" in printed["text"]
    assert [name for name in (*PHASES, "step") if name not in table["data"]["text/html"]] == []
    [plot] = outputs["run.plot()"]
    assert "<svg " in plot["data"]["text/html"]
    [said] = outputs["print(run.answers)"]
    assert said["text"].startswith("__main__:Net: ")
    assert "Next:" not in said["text"], "no command has this model"
