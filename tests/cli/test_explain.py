"""`dpbench explain` from end to end, on a small run that is really measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpbench import cli, models
from dpbench.analysis import validity
from dpbench.measure import run as runner
from dpbench.measure.server import Server
from dpbench.records import disturbance
from dpbench.records.estimate import Estimate
from dpbench.store import Store

RUN = (
    "run",
    "--models",
    "mlp",
    "--strategies",
    "single,dp",
    "--schedules",
    "reference,cached",
    "--devices",
    "2",
    "--batch-sizes",
    "8",
    "--rounds",
    "1",
)


@pytest.fixture(scope="module", autouse=True)
def _shown_whatever_the_noise() -> Iterator[None]:
    """Show every estimate and label none as noisy, so that one round suffices to test the words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Estimate, "ROUNDS", 1)
        patch.setattr(Estimate, "WIDEST", math.inf)
        patch.setattr(disturbance, "LIMIT", math.inf)
        patch.setattr(disturbance, "SPARE_CORES", math.inf)
        patch.setattr(disturbance, "taken_from", lambda trial: 0.0)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Path:
    path = tmp_path_factory.mktemp("explain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Server", lambda scratch: nullcontext(server))
        done = command(path, *RUN, "--report", str(path / "index.html"))
    assert done.exit_code == 0, done.output
    (path / "out").write_text(done.stdout)
    return path


def command(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(cli.cli, [*arguments, "--store", str(path / "x.db")])


def test_the_answer_comes_first_and_the_findings_follow_by_size(folder: Path) -> None:
    done = command(folder, "explain", "--all")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert said.startswith("mlp: ")
    assert (
        said.index("- certainty: ")
        < said.index("- cause: ")
        < said.index("- change: ")
        < said.index("next: dpbench ")
    )
    assert "batch 8 [MEASURED CPU-ONLY]" in said
    assert "against perfect scaling" in said
    assert " 1. " in done.stdout
    assert "replicate takes" in said
    assert "6 parameter tensors × " in said  # three linear layers
    assert "dp[cached]" in said
    assert "Not judged" in said
    pasted = ("  next: ", "  code")
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(pasted)) <= 100


def test_the_run_prints_its_answer_last(folder: Path) -> None:
    table, _, answer = (folder / "out").read_text().partition("\nmlp: ")
    assert table.startswith("model ")
    assert answer.splitlines()[-1].startswith("  Next: ")


def test_a_run_can_be_named_and_one_that_is_not_there_says_so(folder: Path) -> None:
    with Store.read(folder / "x.db") as store:
        (run,) = store.runs()
    assert (
        command(folder, "explain", "--run", run.id[:6]).stdout == command(folder, "explain").stdout
    )
    assert command(folder, "explain", "--run", "nothing").exit_code != 0


def test_each_trial_is_stored_with_its_checks_and_its_model(folder: Path) -> None:
    with Store.read(folder / "x.db") as store:
        trials = store.trials(store.runs()[0].id)
    mlp = models.load("mlp", "small", 0)
    inputs, _ = mlp.batch(1, 0)
    assert len(trials) == 3
    for trial in trials:
        checks = trial.provenance["validity"]
        assert {"verification", "closure", "drift", "oversubscribed", "marks"} <= set(checks)
        assert all({"value", "limit", "ok"} <= set(check) for check in checks.values())
        assert [check.ok for check in validity.of(trial, 0)] == [
            check["ok"] for check in checks.values()
        ]
        model = trial.provenance["model"]
        assert (model["modules"], model["parameter_tensors"], model["buffer_tensors"]) == (5, 6, 0)
        assert model["parameter_bytes"] == sum(p.nbytes for p in mlp.module.parameters())
        assert model["input_bytes"] == inputs.nbytes
        assert model["output_bytes"] == mlp.module(inputs).nbytes


def test_the_page_and_the_markdown_show_findings(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    markdown = command(folder, "report", "--md").stdout
    for text in (page, markdown):
        assert "replicate takes" in text
        assert "with perfect scaling" in text
