"""Trials beside other processes: they carry no verdict, and their label reaches every output."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dpbench as dp
from dpbench.analysis import comparison, ladder, stats, summary, validity
from dpbench.analysis.decision import Choice
from dpbench.analysis.report import Report
from dpbench.api.progress import RunningSpeedups
from dpbench.records import Case, Phase, Span, Step, Trial, Verified
from dpbench.records.estimate import Doubt
from dpbench.records.facts import stated
from dpbench.records.load import Load
from dpbench.report import notebook
from dpbench.report import page as pages
from tests import exported
from tests.trials import report_on

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=64)
DP = Case(model="mlp", strategy="dp", devices=2, batch_size=64, schedule="reference")
QUIET_MS = {SINGLE: 14.0, DDP: 10.0, DP: 21.0}
"""The step without a load: ddp gives 1.4 times, dp 0.67 times."""
LOADED_MS = {SINGLE: 14.5, DDP: 20.0, DP: 12.0}
"""The loaded step: cases of several processes lose cores first; wrongly, ddp gives 0.73 times."""
FACTS = {"host": {"name": "bench-07", "cpu": "EPYC", "cores": 2}, "packages": {"torch": "2.13.0"}}
ROUNDS = range(5)
ALL = frozenset(ROUNDS)


def trial(case: Case, number: int, step_s: float, taken: float = 0.0, *, steps: int = 20) -> Trial:
    """Return a trial whose steps are a forward and a backward.

    Other processes took the share `taken` of two cores.
    """
    draw = random.Random(f"{case.label} {number}")
    level = step_s * draw.lognormvariate(0, 0.003)
    found, spans, end_s = [], [], 100.0
    for index in range(steps):
        start_s, end_s = end_s, end_s + level * draw.lognormvariate(0, 0.003)
        middle_s = (start_s + end_s) / 2
        found.append(Step(end_s - start_s, index < 2, end_s))
        for device in range(case.devices):
            spans.append(Span(index, Phase.FORWARD, device, "host", start_s, middle_s))
            spans.append(Span(index, Phase.BACKWARD, device, "host", middle_s, end_s))
    load = Load(foreign=taken, steal=0.0, cores=2, seconds=3.0)
    return Trial(
        case=case,
        round=number,
        verified=Verified.BITWISE,
        steps=tuple(found),
        spans=tuple(spans),
        provenance=stated(foreign_load=load, torch="2.13.0"),
        started_s=1.7e9 + number,
    )


def run(
    noisy: Collection[int], cases: Sequence[Case] = (SINGLE, DDP, DP), only: Case | None = None
) -> list[Trial]:
    """Return the trials of five rounds, of which those in `noisy` ran beside a load.

    `only` is the case beside it.
    """
    found = []
    for number in ROUNDS:
        for case in cases:
            loaded = number in noisy and only in (None, case)
            step_ms = (LOADED_MS if loaded else QUIET_MS)[case]
            found.append(trial(case, number, step_ms / 1e3, 0.6 if loaded else 0.0))
    return found


def report(trials: Sequence[Trial]) -> Report:
    return report_on([one.summary() for one in trials], FACTS)


def rows(trials: Sequence[Trial]) -> dict[Case, summary.Row]:
    return {row.case: row for row in summary.rows(trials)}


# -- no verdict


def test_without_a_load_the_gain_is_decided() -> None:
    (answer,) = report(run(())).answers
    assert (answer.choice, answer.row and answer.row.case) == (Choice.USE, DDP)
    assert "NOISY" not in answer.labels


@pytest.mark.parametrize("only", [None, SINGLE, DDP])
def test_noisy_rounds_decide_no_answer_whichever_side_was_beside_the_load(
    only: Case | None,
) -> None:
    found = report(run(ALL, only=only))
    (answer,) = found.answers
    assert (answer.choice, answer.row) == (Choice.UNKNOWN, None)
    assert "other processes used the cores" in answer.text
    assert "--patience" in answer.command
    assert "NOISY" in answer.labels
    speedup = rows(run(ALL, only=only))[DDP].speedup
    # one device leaves the other core free, so that the load can have taken but 0.2 of a core
    assert speedup.noisy == (only is not SINGLE), "the number is kept, with the reason"
    assert speedup.value == pytest.approx(
        {None: 14.5 / 20, SINGLE: 14.5 / 10, DDP: 14 / 20}[only], rel=0.02
    )


def test_with_enough_quiet_rounds_these_alone_decide() -> None:
    row = rows(run({0, 4}))[DDP]
    assert (row.speedup.doubt, row.speedup.n) == (None, 3)
    assert row.speedup.value == pytest.approx(1.4, rel=0.02)
    assert "NOISY" in row.labels, "the step time is that of all rounds"
    (answer,) = report(run({0, 4})).answers
    assert (answer.choice, answer.row and answer.row.case) == (Choice.USE, DDP)
    assert "NOISY" in answer.labels
    assert rows(run({0, 1, 4}))[DDP].speedup.doubt is Doubt.NOISY, "two quiet rounds are not enough"


def test_a_round_is_quiet_only_if_it_is_quiet_on_both_sides() -> None:
    mixed = [*run({0}, only=SINGLE, cases=[SINGLE]), *run({1, 2}, only=DDP, cases=[DDP])]
    assert rows(mixed)[DDP].speedup.doubt is Doubt.NOISY
    fewer = [*run({0}, only=SINGLE, cases=[SINGLE]), *run({0, 2}, only=DDP, cases=[DDP])]
    assert rows(fewer)[DDP].speedup.n == 3


def test_a_round_that_was_measured_again_without_the_load_is_quiet() -> None:
    again = [
        trial(case, number, QUIET_MS[case] / 1e3) for case in (SINGLE, DDP) for number in ROUNDS
    ]
    row = rows([*run(ALL, cases=(SINGLE, DDP)), *again])[DDP]
    assert (row.speedup.doubt, row.speedup.n, "NOISY" in row.labels) == (None, 5, False)
    assert row.speedup.value == pytest.approx(1.4, rel=0.02)


def test_noisy_rounds_carry_no_finding_and_no_cure() -> None:
    """Beside the load, dp seems to be faster than ddp and than one device."""
    quiet, noisy = report(run(())), report(run(ALL))
    found = quiet.diagnoses[0].findings
    verdicts = {cure.verdict for one in found for cure in one.cures}
    assert "faster" in verdicts, "ddp is faster than dp"
    (diagnosis,) = noisy.diagnoses
    assert {cure.verdict for one in diagnosis.findings for cure in one.cures} <= {"undecided"}
    (answer,) = noisy.answers
    assert "perfect scaling" not in answer.text, "what is lost against it is a comparison"


@pytest.mark.parametrize(("before", "after"), [(ALL, ALL), (ALL, ()), ((), ALL), ({0, 1, 2}, ())])
def test_noisy_runs_are_not_compared(before: Collection[int], after: Collection[int]) -> None:
    lines = comparison.between(report(run(before)), report(run(after))).lines
    assert {line.verdict for line in lines} == {"undecided"}
    assert all("NOISY" in line.labels for line in lines)
    doubts = {line.ratio.doubt for line in lines if line.case.devices > 1}
    assert doubts == {Doubt.NOISY}


def test_runs_with_enough_quiet_rounds_are_compared_by_these() -> None:
    slower = [replace(one, steps=_longer(one.steps, 1.5)) for one in run({0})]
    lines = comparison.between(report(run({3, 4})), report(slower)).lines
    assert {line.verdict for line in lines} == {"slower"}
    assert all(line.ratio.value == pytest.approx(1 / 1.5, rel=0.02) for line in lines)
    assert all("NOISY" in line.labels for line in lines)


def _longer(steps: Sequence[Step], factor: float) -> tuple[Step, ...]:
    end_s, found = 100.0, []
    for step in steps:
        end_s += step.seconds * factor
        found.append(Step(step.seconds * factor, step.warmup, end_s))
    return tuple(found)


def test_noisy_rounds_decide_no_rung() -> None:
    names = ("reference", "pool", "cached")
    cases = [replace(DP, schedule=name) for name in names]
    for taken, verdicts in ((0.0, {"faster"}), (0.6, {"undecided"})):
        trials = [
            trial(case, number, 0.02 / (1 + place), taken)
            for number in ROUNDS
            for place, case in enumerate(cases)
        ]
        (found,) = ladder.ladders(summary.rows(trials))
        assert {rung.change.verdict for rung in found.rungs if rung.change} == verdicts


def test_the_speed_ups_of_a_run_that_goes_on_are_not_shown_from_noisy_rounds() -> None:
    shown = RunningSpeedups()
    for one in run(ALL, cases=(SINGLE, DDP)):
        shown.add(one)
    table = shown.table()
    assert table is not None
    cells = [[*column.cells] for column in table.columns]
    assert cells[1] == ["not enough quiet rounds"]
    assert "NOISY" in cells[2][0]


def test_a_difference_in_seconds_leaves_noisy_rounds_out_too() -> None:
    table = rows(run({0, 4}))
    saved = stats.difference(table[SINGLE].series, table[DDP].series)
    assert (saved.n, saved.doubt) == (3, None)
    assert saved.value == pytest.approx(0.004, rel=0.1)
    table = rows(run(ALL))
    assert stats.difference(table[SINGLE].series, table[DDP].series).doubt is Doubt.NOISY


@pytest.mark.parametrize(
    ("case", "cores", "taken_cores", "noisy"),
    [
        # one busy process on two cores takes at least a half of one core from any case
        (SINGLE, 2, 1.0, True),
        (replace(SINGLE, strategy="single_all_cores"), 2, 0.67, True),
        (DP, 2, 0.5, True),
        (DDP, 2, 0.5, True),
        (DDP, 2, 0.15, False),
        # on more cores, a part of one core is a small fraction of all, and halves a rank if no core
        # is free
        (replace(DDP, devices=8), 8, 0.5, True),
        (replace(SINGLE, strategy="single_all_cores"), 8, 0.5, True),
        (replace(DDP, devices=8), 8, 0.2, False),
        (replace(DDP, devices=4), 8, 0.5, False),
        (SINGLE, 8, 0.5, False),
        (replace(DDP, devices=4), 8, 0.9, True),
        (replace(DDP, devices=16, hosts=2), 8, 0.5, True),
        # the cores of a shared machine with GPUs are busy, but those that the case needs are free
        (replace(DDP, devices=8, device_kind="cuda"), 8, 0.5, True),
        (replace(DDP, devices=8, device_kind="cuda"), 64, 32.0, False),
    ],
)
def test_a_load_is_noisy_if_it_takes_cores_that_the_case_needs(
    case: Case, cores: int, taken_cores: float, noisy: bool
) -> None:
    load = Load(foreign=taken_cores / cores, steal=0.0, cores=cores, seconds=3.0)
    one = replace(trial(case, 0, 0.01), provenance=stated(foreign_load=load))
    assert ("NOISY" in summary.labels(one)) is noisy
    (check,) = [found for found in validity.check(one, cores) if found.key == "foreign_cpu"]
    assert check.ok is not noisy


# -- what others can have taken


def beside(used: float, cases: Sequence[Case] = (SINGLE, DDP)) -> list[Trial]:
    """Return five rounds, in all of which other processes used so much of a core."""
    return [
        trial(case, number, QUIET_MS[case] / 1e3, used / 2) for number in ROUNDS for case in cases
    ]


@pytest.mark.parametrize("used", [0.1, 0.3, 0.6])
def test_an_interval_includes_what_others_can_have_taken(used: float) -> None:
    quiet, loaded = (rows(beside(each))[DDP].speedup for each in (0.0, used))
    taken = used + 0.02 / 3  # a tick of each core in three seconds
    shortest = (1 - taken) / (1 + taken)
    assert loaded.value == pytest.approx(quiet.value)
    assert loaded.low == pytest.approx(quiet.low), "one device leaves the other core free"
    assert loaded.high == pytest.approx(quiet.high / shortest, rel=1e-3)
    assert loaded.decides
    of_means = stats.mean_ratio(*(rows(beside(used))[case].series for case in (SINGLE, DDP)))
    assert of_means.high > of_means.value / (1 - taken)


def test_a_gain_is_decided_beside_a_load_if_the_interval_allows_it() -> None:
    (answer,) = report(beside(0.3)).answers
    assert (answer.choice, answer.row and answer.row.case) == (Choice.USE, DDP)
    assert "of a core" in answer.certainty
    slower = [SINGLE, DP]
    (answer,) = report(beside(0.3, slower)).answers
    assert answer.choice is Choice.UNKNOWN, "without the load, dp may be as fast"
    (answer,) = report(beside(0.1, slower)).answers
    assert answer.choice is Choice.STAY


def test_beside_a_busy_process_a_ranking_is_rough_and_nothing_is_chosen() -> None:
    trials = beside(0.95, (SINGLE, DDP, DP))
    few = [one for one in trials if one.round < 2]
    for some in (trials, few):
        (answer,) = report(some).answers
        assert answer.choice is Choice.UNKNOWN
        assert "rough ranking" in answer.ranked
    assert "fastest" not in answer.ranked


# -- one interval


def test_the_headline_and_the_table_say_the_same_of_one_interval() -> None:
    """With several cases, the interval of one alone may exclude 1, and that of all not."""
    told = set()
    others = [replace(DP, schedule=name) for name in ("pool", "cached", "local")]
    for spread in range(2, 15):
        draw = random.Random(7)
        trials = [trial(SINGLE, number, 0.014) for number in ROUNDS]
        for case in (DP, *others):
            trials += [
                trial(case, number, 0.0151 * draw.lognormvariate(0, spread / 400))
                for number in ROUNDS
            ]
        found = report(trials)
        (answer,) = found.answers
        row = next(row for row in found.rows if row.case == DP)
        alone = stats.ratio(rows(trials)[SINGLE].series, row.series)
        slower = row.speedup.high < 1
        told.add((alone.high < 1, slower))
        if slower:
            assert "gives only" in answer.headline or answer.choice is Choice.UNKNOWN
        assert answer.choice is not Choice.USE
        every = [one.speedup for one in found.rows if one.speedup]
        assert (answer.choice is Choice.STAY) == all(one.high < 1.05 for one in every)
    assert (True, False) in told, "the case that once gave two answers is among them"


# -- labels


EVERY_LABEL = ("MEASURED", "CPU-ONLY", "UNVERIFIED", "NOISY")


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """A store of two runs.

    In each, only the first of five rounds is NOISY, so that no last trial shows it.
    """
    cases = [replace(case, unverified=True) for case in (SINGLE, DDP, DP)]
    for _ in range(2):
        trials = [
            trial(
                case, number, QUIET_MS[replace(case, unverified=False)] / 1e3, 0.4 * (number == 0)
            )
            for number in ROUNDS
            for case in cases
        ]
        exported.stored(tmp_path / "dpbench.db", *trials, provenance=FACTS)
    return tmp_path


OUTPUTS = {
    "show": ("show",),
    "show --json": ("show", "--json"),
    "report --md": ("report", "--md"),
    "report --json": ("report", "--json"),
    "report": ("report", "--report", "out"),
    "explain": ("explain",),
    "explain --all": ("explain", "--all"),
    "explain --json": ("explain", "--json"),
    "export jsonl": ("export", "jsonl"),
    "export csv": ("export", "csv"),
    "export trace": ("export", "trace"),
    "export pyperf": ("export", "pyperf"),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_label_of_a_run_is_in_every_output(name: str, labelled: Path, dpbench: Any) -> None:
    code, out, err = dpbench(*OUTPUTS[name])
    assert code == 0, err
    text = (labelled / "out").read_text() if "out" in OUTPUTS[name] else out
    missing = [label for label in EVERY_LABEL if label not in text]
    assert not missing


@pytest.mark.parametrize("form", [(), ("--md",), ("--json",), ("--report", "out")])
def test_every_label_of_two_runs_is_beside_every_line_of_their_comparison(
    form: Sequence[str], labelled: Path, dpbench: Any
) -> None:
    with_ids = json.loads(dpbench("list", "runs", "--json")[1])["runs"]
    _, out, err = dpbench("compare", with_ids[1]["id"], with_ids[0]["id"], *form)
    text = (labelled / "out").read_text() if "out" in form else out
    assert err == "" or "out" in form
    if form == ("--json",):
        assert [set(case["labels"]) for case in json.loads(text)["cases"]] == [set(EVERY_LABEL)] * 3
    else:
        lines = [
            line
            for line in text.splitlines()
            if "mlp d" in line and ("same" in line or "undecided" in line)
        ]
        assert all(label in text for label in EVERY_LABEL)
        if "out" not in form:
            assert len(lines) == 2


@pytest.mark.slow
def test_every_label_is_in_a_notebook_in_frames_and_on_the_page(labelled: Path) -> None:
    found = dp.load(labelled / "dpbench.db")
    assert all(label in found._repr_html_() for label in EVERY_LABEL)
    assert all(label in repr(found) for label in EVERY_LABEL)
    assert all(set(labels.split()) == set(EVERY_LABEL) for labels in found.frame["labels"])
    assert {*found.steps["labels"][found.steps["round"] == 0]} == {" ".join(EVERY_LABEL)}
    assert all(label in pages.render(found.analysis) for label in EVERY_LABEL)
    compared = found.compare(found)
    for text in (str(compared), compared._repr_html_(), notebook.render(found.analysis)):
        assert all(label in text for label in EVERY_LABEL)


def test_a_finding_has_the_labels_of_the_cases_that_it_compares() -> None:
    found = report(run({0}, only=DDP))
    assert "NOISY" not in found.labels[DP]
    (diagnosis,) = found.diagnoses
    cured = [one for one in diagnosis.findings if "faster" in {cure.verdict for cure in one.cures}]
    assert cured, "ddp is faster than dp in the four quiet rounds"
    assert all("NOISY" in one.labels for one in cured)
    assert "NOISY" in diagnosis.labels
