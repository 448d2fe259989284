"""Forecasts: predictions compared with measurements, in stores that are made by hand."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis.forecasts import Forecast, forecasts
from dpbench.analysis.report import Report
from dpbench.api.reports import report_of
from dpbench.api.stored import choose
from dpbench.records import Case, Source, Step, Trial
from dpbench.report import markdown, page
from dpbench.store import Identity, Store
from tests.trials import trial_of

GPU = Case(
    model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference", device_kind="cuda"
)
GPUS = {"gpus": [{"name": "NVIDIA GeForce RTX 3090"}] * 2}


def trials_of(case: Case, seconds: float, rounds: int = 4) -> list[Trial]:
    """Return measured trials whose rounds differ by 0.1 %."""
    return [
        trial_of(case, [seconds * (1 + 0.001 * number)] * 8, round=number)
        for number in range(rounds)
    ]


def add(
    store: Store, trials: Sequence[Trial], commit: str, *, key: str = "here", **facts: Any
) -> str:
    """Add a finished run on a machine to a store, and return its id."""
    known = {
        "dpbench": {"version": "1", "commit": commit * 10, "dirty": False},
        "packages": {"torch": "2.13.0"},
        "host": {"name": "a", "cpu": "EPYC"},
        **facts,
    }
    run_id, _ = store.begin_run(
        Identity(f"{commit} {key} {facts}", key, "c"), rounds=4, provenance=known
    )
    for trial in trials:
        store.end_trial(store.begin_trial(run_id, trial.case, trial.round), trial)
    store.end_run(run_id)
    return run_id


def newest(path: Path) -> Report:
    with Store.read(path) as opened:
        run_id = opened.runs()[0].id
        return report_of(choose(opened, run_id), opened.summaries(run_id), path)


def forecasts_of(found: Report) -> list[Forecast]:
    return [*forecasts(found.rows, found.past, found.run.facts)]


def predicted(case: Case, seconds: float, low: float, high: float, machine: str) -> Trial:
    return Trial(
        case=case,
        source=Source.PREDICTED,
        steps=(Step(seconds, False, seconds),),
        provenance={"machine": machine, "profile": "given", "interval_80_s": [low, high]},
    )


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Make a store with a measurement on two GPUs, and predictions for these and other GPUs."""
    here = {"host": {"cpu": "described"}, "gpus": {"gpus": [{"name": "RTX 3090"}] * 8}}
    other = {"host": {"cpu": "described"}, "gpus": {"gpus": [{"name": "A100-SXM4-80GB"}] * 8}}
    put = functools.partial(predicted, GPU)
    with Store.create(tmp_path / "s.db") as store:
        add(store, [put(0.020, 0.018, 0.022, "ours")], "p0", key="predicted:ours", **here)
        add(store, [put(0.012, 0.009, 0.014, "ours")], "p1", key="predicted:ours", **here)
        add(store, [put(0.005, 0.004, 0.006, "theirs")], "p2", key="predicted:theirs", **other)
        add(store, [put(0.008, 0.007, 0.009, "ours too")], "p3", key="predicted:ours too", **here)
        add(store, trials_of(GPU, 0.010), "c0ffee1", gpus=GPUS)
    return tmp_path / "s.db"


def test_the_newest_prediction_for_this_hardware_stands_beside_the_measurement(both: Path) -> None:
    found = forecasts_of(newest(both))
    assert [(one.machine, round(one.error, 2), one.inside) for one in found] == [
        ("ours", 0.2, True),
        ("ours too", -0.2, False),
    ]
    assert found[0].labels == ("PREDICTED", "MEASURED")


def test_the_section_has_values_intervals_errors_and_labels(both: Path) -> None:
    text = page.render(newest(both))
    section = re.search(r'<section id="predicted".*?</section>', text, re.DOTALL)[0]
    assert " 1 of 2 " in section, "of the intervals contain the measured time"
    cells = [
        re.sub(r"<[^>]*>", " ", one).split() for one in re.findall(r"<td[^>]*>(.*?)</td>", section)
    ]
    assert cells[1:6] == [["ours"], ["12.0", "9.00–14.0"], cells[3], ["+20%"], ["yes"]]
    assert cells[3][0] == "10.0"
    assert set(re.findall(r'class="badge ([A-Z-]*)"', section)) == {"PREDICTED", "MEASURED"}
    assert "Predicted against measured" in markdown.render(newest(both))


def test_without_predictions_there_is_no_section(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s.db") as store:
        add(store, trials_of(GPU, 0.010), "c0ffee1", gpus=GPUS)
    assert 'id="predicted"' not in page.render(newest(tmp_path / "s.db"))
