"""The history of a case over commits, and predictions compared with measurements.

The stores are made by hand.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpbench.analysis.forecasts import Forecast, forecasts
from dpbench.analysis.history import History, histories
from dpbench.analysis.report import Report
from dpbench.api.reports import report_of
from dpbench.api.stored import choose
from dpbench.records import Case, Source, Step, Trial
from dpbench.records.trial import SLOW
from dpbench.report import figures, markdown, page
from dpbench.store import Store
from tests.trials import trial_of

CASE = Case(model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference")
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
        "dpbench": {"version": "1", "commit": commit * 10, "dirty": facts.pop("dirty", False)},
        "packages": {"torch": facts.pop("torch", "2.13.0")},
        "host": {"name": "a", "cpu": "EPYC"},
        **facts,
    }
    run_id, _ = store.begin_run(
        plan=f"{commit} {key} {facts}", host=key, code="c", rounds=4, provenance=known
    )
    for trial in trials:
        store.end_trial(store.begin_trial(run_id, trial.case, trial.round), trial)
    store.end_run(run_id)
    return run_id


def report(path: Path, run_id: str) -> Report:
    with Store.read(path) as opened:
        return report_of(choose(opened, run_id), opened.summaries(run_id), path)


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Make a store with six commits.

    A step takes 10 ms in the first three and 13 ms in the others.
    """
    with Store.create(tmp_path / "s.db") as store:
        for number, seconds in enumerate((0.010, 0.01001, 0.00999, 0.013, 0.01301, 0.01299)):
            add(store, trials_of(CASE, seconds), f"c0ffee{number}")
        add(store, trials_of(CASE, 0.5), "aaaaaaa1", key="elsewhere")
        add(store, trials_of(CASE, 0.6), "aaaaaaa2", dirty=True)
        add(store, trials_of(CASE, 0.7), "aaaaaaa3", torch="1.0")
        add(store, trials_of(CASE, 0.8, rounds=2), "aaaaaaa4")
        add(store, trials_of(CASE, 0.013), "c0ffee5")
    return tmp_path / "s.db"


def newest(path: Path) -> Report:
    with Store.read(path) as opened:
        run_id = opened.runs()[0].id
    return report(path, run_id)


def histories_of(found: Report) -> list[History]:
    cases = [row.case for row in found.rows if row.source is Source.MEASURED]
    return [*histories(cases, found.past, found.provenance)]


def forecasts_of(found: Report) -> list[Forecast]:
    return [*forecasts(found.rows, found.past, found.provenance)]


def test_a_history_has_the_commits_of_one_machine_in_order(kept: Path) -> None:
    (history,) = histories_of(newest(kept))
    assert [point.commit for point in history.points] == [f"c0ffee{number}c" for number in range(6)]
    assert [round(point.step.value * 1e3) for point in history.points] == [10, 10, 10, 13, 13, 13]
    assert [point.step.n for point in history.points] == [
        4,
        4,
        4,
        4,
        4,
        8,
    ], "the last commit has two runs"
    assert len(history.points[-1].runs) == 2
    assert history.labels == ("MEASURED", "CPU-ONLY")


def test_trials_of_few_steps_are_on_no_curve_with_ordinary_ones(kept: Path) -> None:
    """Their first steps are warmer or colder, which is no change of the code."""
    few = [replace(trial, provenance={SLOW: True}) for trial in trials_of(CASE, 0.02)]
    with Store.create(kept) as store:
        add(store, few, "facade1")
        add(store, trials_of(CASE, 0.013), "facade2")
    (history,) = histories_of(newest(kept))
    commits = [point.commit for point in history.points]
    assert commits == [f"c0ffee{number}c" for number in range(6)] + ["facade2f"]
    with Store.create(kept) as store:
        add(store, few, "facade3")
    assert not histories_of(newest(kept)), "two commits with trials of few steps are no history"


def test_the_step_is_detected_and_drawn(kept: Path) -> None:
    pytest.importorskip("asv.step_detect", reason="asv detects the steps")
    found = newest(kept)
    (history,) = histories_of(found)
    assert [(one.first, one.end) for one in history.levels] == [(0, 3), (3, 6)]
    (section,) = [one for one in figures.sections(found) if one.id == "history"]
    (panel,) = section.panels
    assert panel.caption == "6 commits. From commit c0ffee3c on, the step is 30% longer."
    assert panel.labels == ("MEASURED", "CPU-ONLY")
    assert panel.cases == [CASE]
    assert panel.svg.count("data-bar") == 6 + 2
    ids = re.findall(r'<section id="([^"]*)"', page.render(found))
    assert ids.index("cases") < ids.index("utilisation") < ids.index("history")


def test_a_step_within_the_intervals_does_not_count(tmp_path: Path) -> None:
    pytest.importorskip("asv.step_detect", reason="asv detects the steps")
    with Store.create(tmp_path / "s.db") as store:
        for number, seconds in enumerate((0.010, 0.0101, 0.0102, 0.011, 0.0109)):
            scales = (0.8, 1.0, 1.2, 0.9)
            trials = [
                replace(
                    trial,
                    steps=tuple(Step(one.seconds * scale, False, one.end_s) for one in trial.steps),
                )
                for trial, scale in zip(trials_of(CASE, seconds), scales, strict=True)
            ]
            last = add(store, trials, f"c0ffee{number}")
    found = report(tmp_path / "s.db", last)
    assert [(one.first, one.end) for one in histories_of(found)[0].levels] == [(0, 5)]
    (section,) = [one for one in figures.sections(found) if one.id == "history"]
    assert section.panels[0].caption == "5 commits. No change is detected."


def test_without_asv_the_section_has_no_steps_and_says_so(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "asv.step_detect", None)
    (section,) = [one for one in figures.sections(newest(kept)) if one.id == "history"]
    assert section.note == "Changes are not detected, because asv is not installed."
    assert section.panels[0].caption == "6 commits."
    assert section.panels[0].svg.count("data-bar") == 6


def test_two_commits_are_no_history(tmp_path: Path) -> None:
    with Store.create(tmp_path / "s.db") as store:
        for number in (1, 2, 2):
            last = add(store, trials_of(CASE, 0.01), f"c0ffee{number}")
    found = report(tmp_path / "s.db", last)
    assert histories_of(found) == []
    assert "history" not in [one.id for one in figures.sections(found)]


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
    assert (
        "Predicted against measured: the intervals of the predictions contain 1 of 2 measured step"
        " times" in section
    )
    cells = [
        re.sub(r"<[^>]*>", " ", one).split() for one in re.findall(r"<td[^>]*>(.*?)</td>", section)
    ]
    assert cells[1:6] == [["ours"], ["12.0", "9.00–14.0"], cells[3], ["+20%"], ["yes"]]
    assert cells[3][0] == "10.0"
    assert set(re.findall(r'class="badge ([A-Z-]*)"', section)) == {"PREDICTED", "MEASURED"}
    assert "Predicted against measured" in markdown.render(newest(both))


def test_without_predictions_there_is_no_section(kept: Path) -> None:
    assert 'id="predicted"' not in page.render(newest(kept))
