"""The figures of a run by flat keys, and the trackers that take them."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

import dpbench as dp
from dpbench.analysis.quantities import QUANTITIES, figures
from dpbench.records import Source
from dpbench.records.estimate import Estimate
from tests import golden
from tests.amounts import amounts
from tests.api.test_api import SINGLE, measured
from tests.commands import ROOT
from tests.exported import DP, stored

PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
RUNS = sorted(golden.REPORTS.glob(f"*/{golden.TRIALS}"))
STEPS = {SINGLE: 0.004, DP: 0.0025}


def snippet(library: str) -> str:
    """Return the code of the page that hands the figures to a library."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.partition("\n## Trackers\n")[2], re.M | re.S)
    [found] = [block for block in blocks if library in block]
    return found


def run_in(folder: Path) -> dp.Run:
    """Store a run of two cases and of one in doubt in a folder, and return it."""
    doubtful = replace(SINGLE, batch_size=32)
    stored(
        folder / "dpbench.db",
        *(measured(case, step_s, n) for n in range(5) for case, step_s in STEPS.items()),
        *(measured(doubtful, 0.002, n) for n in range(2)),
    )
    return dp.load(folder / "dpbench.db")


@pytest.mark.parametrize("path", RUNS, ids=[one.parent.name for one in RUNS])
def test_the_summary_has_each_figure_of_the_frame(path: Path) -> None:
    run = dp.open_trials(path)
    found, table = run.summary(), run.frame
    assert len(found) > 0
    for key in found:
        assert re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)+", key, re.ASCII), key
        assert len(key) <= 250, "MLflow takes no longer key"
    for quantity in QUANTITIES:
        values = [value for key, value in found.items() if key.endswith(f"/{quantity.name}")]
        sure = [value for value in values if not math.isnan(value)]
        assert sure == table[f"{quantity.key}_value"].dropna().to_list(), quantity.key
        withheld = table[f"{quantity.key}_withheld"].notna().sum()
        assert len(values) == len(sure) + withheld, quantity.key


def test_a_key_names_the_case_and_the_figure(tmp_path: Path) -> None:
    found = run_in(tmp_path).summary()
    assert found["mlp/single/x1/cpu/batch_64/step_s"] == pytest.approx(0.004, rel=0.02)
    assert found["mlp/dp/x2/cpu/batch_64/speedup"] == pytest.approx(1.6, rel=0.05)
    assert {key.rpartition("/")[2] for key in found} <= set(re.findall(r"`(\w+)`", PAGE))


def test_the_keys_of_all_cases_differ_and_do_not_depend_on_the_other_cases(tmp_path: Path) -> None:
    cases = [
        replace(DP, schedule="cached"),
        replace(DP, precision="bf16", seed=3),
        replace(DP, options=(("depth", "2"), ("kind", "a b"))),
        replace(DP, device_kind="cuda", device_ids=(1, 0)),
        replace(DP, model="../nets/own.py:net"),
        replace(DP, unverified=True),
        replace(DP, device_kind="cuda", placement="colocated"),
        SINGLE,
    ]
    trials = [measured(case, 0.002, n) for n in range(3) for case in cases]
    interval = {"interval_80_s": (0.0019, 0.0021)}
    trials.append(replace(trials[-1], source=Source.PREDICTED, provenance=interval, round=9))
    stored(tmp_path / "all.db", *trials)
    found = [key for key in dp.load(tmp_path / "all.db").summary() if key.endswith("/step_s")]
    assert sorted(found) == sorted(
        f"{one}/step_s"
        for one in (
            "mlp/dp-cached/x2/cpu/batch_64",
            "mlp/dp/x2/cpu/batch_64/precision_bf16/seed_3",
            "mlp/dp/x2/cpu/batch_64/depth_2/kind_a-b",
            "mlp/dp/x2/cuda/batch_64/device_ids_1-0",
            "nets-own.py-net/dp/x2/cpu/batch_64",
            "mlp/dp/x2/cpu/batch_64/unverified",
            "mlp/dp/x2/cuda/batch_64/colocated",
            "mlp/single/x1/cpu/batch_64",
            "mlp/single/x1/cpu/batch_64/predicted/experimental",
        )
    )
    for case in cases:
        alone = tmp_path / f"{case.fingerprint}.db"
        stored(alone, *(measured(case, 0.002, n) for n in range(3)))
        assert {*dp.load(alone).summary()} <= {*dp.load(tmp_path / "all.db").summary()}


def test_cases_that_are_spelled_alike_keep_both_figures(tmp_path: Path) -> None:
    alike = [replace(SINGLE, model=name) for name in ("a:b", "a-b")]
    steps = dict(zip(alike, (0.002, 0.004), strict=True))
    stored(tmp_path / "x.db", *(measured(c, s, n) for n in range(3) for c, s in steps.items()))
    found = dp.load(tmp_path / "x.db").summary()
    for case, step_s in steps.items():
        key = f"a-b/single/x1/cpu/batch_64/{case.fingerprint[:10]}/step_s"
        assert found[key] == pytest.approx(step_s, rel=0.02)


def test_a_figure_in_doubt_and_one_that_is_not_finite_keep_their_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path / "sure.db", *(measured(SINGLE, 0.002, n) for n in range(3)))
    sure = dp.load(tmp_path / "sure.db").summary()
    stored(tmp_path / "two.db", measured(SINGLE, 0.002, 0), measured(SINGLE, 0.002, 1))
    doubtful = dp.load(tmp_path / "two.db").summary()
    assert amounts(caplog.messages[-1]) == [str(len(doubtful))]
    assert doubtful.keys() == sure.keys()
    assert all(map(math.isnan, doubtful.values()))
    (row,) = dp.load(tmp_path / "sure.db").analysis.rows
    endless = figures([replace(row, step=Estimate(math.inf, math.inf, math.inf, 3))])
    assert endless.keys() == sure.keys()
    assert math.isnan(endless["mlp/single/x1/cpu/batch_64/step_s"])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_takes_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    run = run_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(snippet("mlflow"), {})
    [logged] = mlflow.search_runs(output_format="list", search_all_experiments=True)
    assert logged.data.metrics == pytest.approx(run.summary(), rel=0, abs=0, nan_ok=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_tensorboard_takes_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec(snippet("tensorboard"), {})
    [folder] = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    logged = {key: events.Scalars(key)[-1].value for key in events.Tags()["scalars"]}
    single = pytest.approx(run.summary(), rel=1e-6, nan_ok=True)
    assert logged == single, "events have single precision"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_wandb_takes_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    run = run_in(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    exec(snippet("wandb"), {})
    logged = dict(wandb.run.summary)
    wandb.finish()
    found = {key: logged.get(key) for key in run.summary()}
    assert found == pytest.approx(run.summary(), rel=0, abs=0, nan_ok=True)
