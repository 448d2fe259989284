"""Output other than tables: JSON of documented shapes, plans of runs, and progress."""

from __future__ import annotations

import io
import re
import sqlite3
import typing
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from dpbench.api.progress import Progress, device_bars
from dpbench.cli import shapes
from dpbench.measure import run as runner
from dpbench.measure import selection
from dpbench.measure.batch_search import Found
from dpbench.measure.budget import OVERHEAD_S
from dpbench.measure.run import Ended, Note, Outcome, Started
from dpbench.measure.selection import RunForecast
from dpbench.predict import machine, tables
from dpbench.predict.cases import Need
from dpbench.predict.published import PublishedStep
from dpbench.predict.what_if import WhatIf
from dpbench.records import Case, Effort, Status, Trial
from dpbench.records.options import Options
from dpbench.store import Identity, Store
from tests.amounts import amounts
from tests.analysis.test_lanes import ranks_of_which_one_ran_ahead
from tests.exported import DP, PROVENANCE, is_error, made, stored, strict

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
CASES = (
    "run",
    "--models",
    "mlp",
    "--strategies",
    "single,dp",
    "--devices",
    "2",
    "--batch-sizes",
    "64",
)
SPEEDS = {SINGLE: 1.0, DP: 0.5}


def trials(rounds: int = 3) -> Iterator[Trial]:
    """Yield trials of `single` and of dp, twice as fast, with a little noise over the rounds."""
    for number in range(rounds):
        for case, speed in SPEEDS.items():
            trial = made(case, number=number)
            factor = speed * (1 + 0.01 * number * (case is DP))
            steps = tuple(replace(step, seconds=step.seconds * factor) for step in trial.steps)
            yield replace(trial, steps=steps, spans=())


@pytest.fixture
def measured(monkeypatch):
    """Replace a run's measurement by one that stores made trials and tells the listener of each."""

    def run(cases, store, how, *, listen, **_):
        run_id, resumed = store.begin_run(Identity("p", "h", "c"), rounds=3, provenance=PROVENANCE)
        listen(Started(run_id, 6, 0))
        listen(Note("a note"))
        for number, trial in enumerate(trials(), 1):
            listen(Started(run_id, 6, number - 1, trial.case, trial.round))
            store.end_trial(store.begin_trial(run_id, trial.case, trial.round), trial)
            listen(Ended(trial, number, 6, 2.0, 2.0 * (6 - number)))
        store.end_run(run_id)
        return Outcome(run_id, resumed, store.counts(run_id))

    monkeypatch.setattr(runner, "run", run)


# -- JSON


@pytest.fixture
def names(monkeypatch):
    """Let msgspec read the annotations whose names are imported for type checkers only."""
    in_shapes = RunForecast, Found
    for module, kinds in (
        (shapes, in_shapes),
        (tables, (Need, WhatIf, PublishedStep, machine.Machine)),
        (selection, (Options,)),
    ):
        for kind in kinds:
            monkeypatch.setattr(module, kind.__name__, kind, raising=False)


def read(kind: type, out: str) -> typing.Any:
    """Return the record of a JSON text, which must have exactly the record's keys and types."""
    record = msgspec.json.decode(out, type=kind)
    assert strict(msgspec.json.encode(record).decode()) == strict(out)
    assert strict(out)["schema"] == shapes.SCHEMA
    return record


def test_a_run_and_its_report_print_the_same_json_and_nothing_else_to_stdout(dpbench, measured):
    code, out, err = dpbench(
        *CASES, "--rounds", "3", "--json", "--name", "a", "--tag", "driver=550", "--tag", "room=2"
    )
    assert code == 0, err
    found = read(shapes.RunResult, out)
    assert (found.run.name, found.run.tags) == ("a", {"driver": "550", "room": "2"})
    assert "round 3" in err
    two = next(one for one in found.cases if one.case == DP)
    assert two.speedup.value == pytest.approx(2.0, rel=0.05)
    assert two.speedup.low < two.speedup.value < two.speedup.high
    assert (two.speedup.n, two.speedup.withheld, list(two.labels)) == (
        3,
        "",
        ["MEASURED", "CPU-ONLY"],
    )
    assert [one.choice for one in found.answers] == ["use"]
    assert found.answers[0].recommended == DP.label
    assert dpbench("report", "--json", "--run", "@a")[1] == out
    assert "leave out" in is_error(*dpbench("report", "--json", "--md"))


def test_an_estimate_in_doubt_says_so_in_json(dpbench, tmp_path):
    stored(tmp_path / "dpbench.db", *trials(2))
    found = read(shapes.RunResult, dpbench("report", "--json")[1])
    assert {one.speedup.withheld for one in found.cases if one.speedup} == {"too few rounds"}
    assert [one.choice for one in found.answers] == ["cannot tell"]


def test_explain_list_show_predict_and_searches_print_json(dpbench, tmp_path, names):
    oom = replace(
        made(DP), case=replace(DP, devices=4), status=Status.OOM, reason="full", steps=(), spans=()
    )
    stored(
        tmp_path / "dpbench.db",
        *(made(case, number=n) for n in range(3) for case in (SINGLE, DP)),
        oom,
    )
    found = read(shapes.Explanation, dpbench("explain", "--json")[1])
    assert [one.label for one in found.diagnoses] == [DP.label]
    assert all(
        finding.cost_s.low > 0
        for one in found.diagnoses
        for finding in one.findings
        if finding.cost_s
    )
    assert [one.reason for one in found.without_result] == ["oom: full"]
    for kind in ("models", "strategies", "schedules", "machines", "metrics"):
        listed = read(shapes.NameList, dpbench("list", kind, "--json")[1])
        assert [one.name for one in listed.names] == [
            re.split(r"\s{2,}", line)[0] for line in dpbench("list", kind)[1].splitlines()
        ]
    assert [
        one.cases for one in read(shapes.RunList, dpbench("list", "runs", "--json")[1]).runs
    ] == [3]
    assert [one.trials for one in read(shapes.ShownRun, dpbench("show", "--json")[1]).cases][
        -1
    ] == {"oom": 1}
    asked = (
        "predict",
        "--machine",
        "rtx-3090-x8",
        "--models",
        "resnet50",
        "--devices",
        "1,2",
        "--strategies",
    )
    predicted = read(tables.Predictions, dpbench(*asked, "single,dp", "--json")[1])
    one, two = predicted.cases[0], predicted.cases[-1]
    assert one.step_s.low < one.step_s.value < one.step_s.high
    assert (two.case.devices, two.scaling, list(two.labels)) == (2, "weak", ["PREDICTED"])
    assert two.speedup.low < two.speedup.value < two.speedup.high
    assert two.speedup.value > 1
    assert predicted.what_ifs


# -- the plan of a run


def plan_told(text: str) -> list[str]:
    """Return the cases, the rounds and the trials of the plan in a text."""
    (line,) = (line for line in text.splitlines() if line.endswith(" to measure"))
    return amounts(line)


def test_a_dry_run_has_the_cases_the_trials_and_the_basis_of_the_time_and_makes_nothing(
    dpbench, tmp_path, names
):
    code, out, err = dpbench(*CASES, "--rounds", "4", "--budget", "30", "--dry-run")
    assert (code, err) == (0, "")
    assert [line for line in out.splitlines() if line.startswith(DP.label)] == [
        f"{DP.label}  no earlier trial"
    ]
    assert plan_told(out) == ["2", "4", "8"]
    assumed = 8 * (OVERHEAD_S + Effort().budget_s)
    (expected,) = (line for line in out.splitlines() if line.startswith("expected time: "))
    assert amounts(expected)[:2] == [f"{assumed:.1f} s", "2"], "the cases without a trial"
    assert "time budget: 30.0 s" in out
    assert list(tmp_path.iterdir()) == []
    plan = read(shapes.RunPlan, dpbench(*CASES, "--dry-run", "--json")[1])
    assert (plan.trials, plan.seconds) == (8, 8 * (OVERHEAD_S + selection.SHORT_S))
    assert list(tmp_path.iterdir()) == []


def test_the_expected_time_is_that_of_earlier_trials_of_this_machine_only(
    dpbench, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner.provenance, "host_key", lambda facts: "here")
    path = tmp_path / "dpbench.db"
    for host, stage_s in (("here", 2.0), ("there", 50.0)):
        with Store.create(path) as store:
            run_id, _ = store.begin_run(Identity(host, host, "c"), rounds=1, provenance=PROVENANCE)
            for number, status in enumerate((Status.OK, Status.OK, Status.TIMEOUT)):
                trial = made(
                    DP,
                    number=number,
                    status=status,
                    setup={"verify_s": 1.0, "steps_s": stage_s + number},
                )
                store.end_trial(store.begin_trial(run_id, DP, number), trial)
            store.end_run(run_id)
    before = path.read_bytes()
    found = strict(dpbench(*CASES, "--dry-run", "--json", "--rounds", "auto")[1])
    planned = {
        one["case"]["strategy"]: (one["trial_s"], one["earlier"])
        for one in found["forecast"]["cases"]
    }
    assert planned == {"single": (None, 0), "dp": (3.5, 2)}
    assert found["seconds"] == 4 * (3.5 + OVERHEAD_S + selection.SHORT_S)
    assert (found["forecast"]["auto"], found["forecast"]["budget_s"]) == (True, None)
    (expected,) = (
        line
        for line in dpbench(*CASES, "--dry-run")[1].splitlines()
        if line.startswith("expected time: ")
    )
    assert amounts(expected)[1:3] == ["1", "1"], "cases with earlier trials, and without"
    assert path.read_bytes() == before


def test_an_empty_store_says_nothing_about_a_plan(dpbench, tmp_path):
    """As `mktemp` makes it."""
    (tmp_path / "dpbench.db").touch()
    code, out, err = dpbench(*CASES, "--rounds", "4", "--dry-run")
    assert (code, err) == (0, "")
    assert plan_told(out) == ["2", "4", "8"]


def test_an_earlier_trial_that_cannot_be_read_forbids_no_run(dpbench, tmp_path, monkeypatch):
    monkeypatch.setattr(runner.provenance, "host_key", lambda facts: "h")
    path = tmp_path / "dpbench.db"
    stored(path, made(DP), made(DP, number=1))
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE trial SET setup='[1]' WHERE id=1")
    found = strict(dpbench(*CASES, "--dry-run", "--json")[1])
    earlier = {one["case"]["strategy"]: one["earlier"] for one in found["forecast"]["cases"]}
    assert earlier == {"single": 0, "dp": 1}


@pytest.mark.slow
def test_a_dry_run_of_an_interrupted_run_has_the_trials_that_are_left(
    dpbench, tmp_path, monkeypatch
):
    """The real identity of a run is used: the same command, without --dry-run, resumes this run."""

    class Ended(BaseException):
        pass

    def stop(session):
        for case, number in ((SINGLE, 0), (SINGLE, 1), (DP, 0)):
            trial = made(case, number=number)
            session.store.end_trial(session.store.begin_trial(session.run_id, case, number), trial)
        raise Ended if not session.rounds.done else KeyboardInterrupt

    monkeypatch.setattr(runner._Session, "measure", stop)
    command = (*CASES, "--rounds", "3", "--name", "a")
    with pytest.raises(Ended):
        dpbench(*command)
    found = strict(dpbench(*command, "--dry-run", "--json")[1])
    assert {one["case"]["strategy"]: one["left"] for one in found["forecast"]["cases"]} == {
        "single": 1,
        "dp": 2,
    }
    assert found["trials"] == 3
    run_id = found["forecast"]["resumes"]
    out = dpbench(*command, "--dry-run")[1]
    assert f"resumes the run {run_id[:8]}, which has 3 trials" in out
    assert plan_told(out) == ["2", "3", "3"]
    for other in (("--name", "b"), ("--rounds", "2"), ("--paired",), ("--batch-sizes", "8")):
        assert (
            strict(dpbench(*command, *other, "--dry-run", "--json")[1])["forecast"]["resumes"] == ""
        )
    more = strict(dpbench(*command, "--rounds", "4", "--dry-run", "--json")[1])
    assert (more["forecast"]["resumes"], more["trials"]) == (run_id, 5), "a plan with more rounds"
    assert dpbench(*command)[0] == 130
    with Store.read(tmp_path / "dpbench.db") as store:
        assert [run.id for run in store.runs()] == [run_id], "the run was resumed"


def test_a_search_has_no_plan(dpbench):
    search = (
        "--device-kind",
        "emulated",
        "--device-memory",
        "1GiB",
        "--find-max-batch",
        "--batch-sizes",
        "8",
    )
    arguments = (
        "run",
        "--models",
        "mlp",
        "--strategies",
        "dp",
        "--devices",
        "2",
        *search,
        "--dry-run",
    )
    assert "--dry-run" in is_error(*dpbench(*arguments))


# -- progress


def test_a_line_per_round_has_the_time_left(dpbench, measured):
    code, out, err = dpbench(*CASES, "--rounds", "3")
    assert code == 0
    lines = [line for line in err.splitlines() if line.startswith("round ")]
    assert [amounts(line) for line in lines] == [
        ["1", "1", "10.0 s"],
        ["2", "3", "6.00 s"],
        ["3", "5", "2.00 s"],
    ], "the round, the trials, and the time left"
    assert plan_told(err.partition("round 1,")[0]) == ["2", "3", "6"], "said before the first trial"
    assert "expected time: " in err.partition("round 1,")[0]
    assert "expected time: " not in out
    assert " to measure" not in out
    assert "a note" in err
    again = dpbench("run", *CASES[1:], "--quiet")[1]
    for told in (again, out):
        assert "dpbench explain --run " in told
    again = re.sub(r" Against run [^.]*: [^)]*\)[^.]*\.", "", again)
    without_id = [re.sub(r"--run \w+", "", one) for one in (out, again)]
    assert without_id[0] == without_id[1] != ""


def test_quiet_prints_no_progress_and_verbose_more(dpbench, measured):
    _, _, quiet = dpbench(*CASES, "-q")
    assert "round 1" not in quiet
    assert "expected time" not in quiet
    assert "a note" not in quiet
    assert "report: " in quiet
    _, _, verbose = dpbench(*CASES, "-v")
    lines = verbose.splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith(f"{SINGLE.label}, round 1: ok"))
    assert amounts(lines[at])[-1] == "2.00 ms"
    assert amounts(lines[at + 1]) == ["500 ms", "1.00 s", "4", "2", "0", "1.00 MiB"]
    assert lines[at + 1].endswith(" bitwise")
    assert "--quiet" in is_error(*dpbench(*CASES, "-q", "-v"))


def shown(events: Callable[[Progress], None], **terminal: typing.Any) -> str:
    """Return what a terminal shows in the end, without control sequences."""
    file = io.StringIO()
    with Progress(
        console=Console(file=file, force_terminal=True, width=120, height=40, **terminal)
    ) as progress:
        events(progress)
    return file.getvalue()


def listen(progress: Progress, rounds: int = 3) -> None:
    progress.listen(Started("abc", 6, 0))
    for number, trial in enumerate(trials(rounds), 1):
        progress.listen(Started("abc", 6, number - 1, trial.case, trial.round))
        progress.listen(Ended(trial, number, 6, 2.0, 2.0 * (6 - number)))


def test_a_terminal_shows_the_case_the_time_left_and_speed_ups_with_intervals_and_labels():
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(listen))
    assert f"{DP.label}, round 3" in plain
    assert re.search(rf"{re.escape(DP.label)} +1\.9\d× \(1\.9\d–2\.0\d\) +MEASURED CPU-ONLY", plain)
    two = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(lambda progress: listen(progress, rounds=2)))
    assert re.search(rf"{re.escape(DP.label)} +not enough rounds +MEASURED CPU-ONLY", two)
    assert "about 4.00 s left" in two


def test_a_terminal_shows_a_bar_for_each_device_of_the_newest_trial():
    def one(progress: Progress) -> None:
        progress.listen(Started("abc", 6, 0))
        progress.listen(Ended(made(DP), 1, 6, 2.0))
        progress.listen(
            Ended(Trial(case=SINGLE, status=Status.FAILED, reason="no room"), 2, 6, 2.0)
        )

    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(one))
    assert f"{DP.label}: share of" in plain
    # device 0 has no phase open from 0.05 to 0.06, from 0.38 to 0.40 and from 0.98 on; device 1
    # none from 0 to 0.03, from 0.06 to 0.12, from 0.40 to 0.50 and from 0.80 on
    first, second = (re.search(rf"\n{n} +(\S+) +(\S+) +MEASURED CPU-ONLY", plain) for n in (0, 1))
    assert first
    assert second
    assert (first[2], second[2]) == ("95%", "61%")
    assert device_bars(made(SINGLE, steps=3, warmup=3)) is None
    many = device_bars(made(DP), most=1)
    assert many
    assert (many.row_count, many.caption) == (1, "1 more device not shown")


def test_the_bar_of_a_device_that_ran_ahead_counts_its_phases_before_the_step():
    first, second = device_bars(ranks_of_which_one_ran_ahead()).columns[2].cells
    assert (first, second) == ("100%", "62%")  # of 16 s, rank 1 waits for rank 0 in 6


def test_no_color_removes_colours(monkeypatch):
    assert re.search(r"\x1b\[[0-9;]*3[0-9]", shown(listen))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", shown(listen))
