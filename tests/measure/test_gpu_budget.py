"""Default runs on several GPUs end in their budget with an answer, however long trials take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dpbench.analysis.answer import RANKED, Answer
from dpbench.analysis.decision import Choice
from dpbench.analysis.report import Report
from dpbench.api.reports import report_of
from dpbench.api.stored import choose
from dpbench.cli.showing import expectation
from dpbench.hardware import gpus
from dpbench.measure import budget, selection
from dpbench.measure import run as runner
from dpbench.measure.rounds import RunRounds
from dpbench.measure.run import Note
from dpbench.records import Case, Effort, Status, Verified, plan
from dpbench.records.names import devices, in_words
from dpbench.records.options import Options
from dpbench.report import table
from dpbench.store import Store
from tests.standing_in import Server
from tests.trials import trial_of

STEP_S = {"single": 0.10, "dp": 0.14, "torch_dp": 0.15, "ddp": 0.11}
"""The seconds of a step with 64 samples per device, in which the strategies differ decidedly."""
ROUNDS = 4
"""The rounds that every case of a default run needs."""


def machine(count: int) -> gpus.TorchGpus:
    """Return what torch tells of a machine with this number of equal GPUs."""
    return gpus.TorchGpus(
        gpus=tuple(
            {
                "index": index,
                "name": "H100",
                "uuid": f"GPU-{index}",
                "memory_bytes": 80 * 2**30,
                "capability": [9, 0],
            }
            for index in range(count)
        )
    )


@dataclass
class Session:
    """A default run on a machine of which each trial, and each check of a model, takes long.

    `start_s` are the seconds that a process takes to start, as a function of its number of GPUs.
    """

    count: int
    start_s: Callable[[int], float]
    monkeypatch: pytest.MonkeyPatch
    store: Store
    now_s: float = 0.0
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.monkeypatch.setattr(gpus, "of_torch", lambda: machine(self.count))
        self.monkeypatch.setattr(runner.time, "perf_counter", lambda: self.now_s)
        self.monkeypatch.setattr(Server, "act", staticmethod(self._trial))
        self.monkeypatch.setattr(Server, "verdict", staticmethod(self._check))
        self.cases, self.budget_s = selection.cases_of(Options())

    def _trial(self, case: Case, effort: Effort) -> dict[str, Any]:
        self.now_s += self.start_s(case.devices) + effort.budget_s
        steps = trial_of(case, [STEP_S[case.strategy]] * 10).steps
        return {"steps": steps, "verified": Verified.BITWISE}

    def _check(self, case: Case) -> dict[str, Any]:
        self.now_s += self.start_s(case.devices)
        return {}

    def run(self) -> Report:
        """Measure the cases, and return the report of the run."""
        outcome = selection.measure(
            Options(),
            self.cases,
            self.store,
            budget_s=self.budget_s,
            listen=lambda event: self.notes.append(event.text) if isinstance(event, Note) else None,
        )
        chosen = choose(self.store, outcome.run_id)
        return report_of(chosen, self.store.summaries(outcome.run_id), self.store.path)


def names_left_out(answer: Answer, report: Report) -> int:
    """Check that an answer names the cases of its question that were left out; return how many."""
    asked = {answer.home, *answer.compared}
    left_out = [row.case for row in report.rows if row.left_out and row.case in asked]
    names = {f"{in_words(case)} on {devices(case)}" for case in left_out}
    clause = answer.certainty.partition("left out for lack of time: ")[2].partition(";")[0]
    listed, _, more = clause.partition(" and ")
    assert {*listed.split(", ")} <= names if names else not clause
    assert listed.count(", ") + 1 == min(RANKED, len(names)) if names else not clause
    assert more == (f"{len(names) - RANKED} more" if len(names) > RANKED else "")
    return len(names)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("count", "start_s", "growing"),
    [
        (count, start_s, growing)
        for growing in (False, True)
        for start_s in (4.5, 15.0, 25.0)
        for count in (1, 2, 4, 8)
        # starts that cannot grow are those that are alike
        if not growing or (start_s > 4.5 and count > 1)
    ],
)
def test_a_default_run_ends_in_its_budget_with_a_ranking_on_the_most_gpus(
    store: Store, monkeypatch: pytest.MonkeyPatch, count: int, start_s: float, growing: bool
) -> None:
    """A start takes as long on any number of GPUs, or 4.5 s on one and the whole time on all."""

    def each_s(used: int) -> float:
        return 4.5 + (start_s - 4.5) * (used - 1) / max(1, count - 1) if growing else start_s

    session = Session(count, each_s, monkeypatch, store)
    report = session.run()
    assert session.budget_s
    assert session.now_s <= session.budget_s
    named = sum(names_left_out(answer, report) for answer in report.answers)
    first = report.answers[0]
    if count == 1:
        assert first.baseline
        assert first.baseline.step
        mine = {case for case in session.cases if case.model == first.home.model}
        unmeasured = mine - {trial.case for trial in store.trials() if trial.status is Status.OK}
        assert ("lack of time" in first.text) is bool(unmeasured)
        return
    ranked = {(row.case.strategy, row.case.devices) for row in first.ranking}
    assert {("single", 1), ("dp", count), ("ddp", count)} <= ranked
    assert first.choice is Choice.USE
    assert first.row
    assert (first.row.case.strategy, first.row.case.devices) == ("ddp", count)
    measured = {trial.case for trial in store.trials() if trial.status is Status.OK}
    left_out = [case for case in session.cases if case not in measured]
    said = " ".join(answer.text for answer in report.answers).lower()
    if left_out:
        assert store.runs()[0].status == "open"
        assert "lack of time" in said
        found = {row.case for row in report.rows if row.left_out}
        assert {*left_out} <= found
        assert named == len(found)
        assert not any("left out" in note for note in session.notes), "the answer says it"
        assert not [one for one in report.statements if found & {case for case, _ in one.cases}]
        before = len(store.trials())
        session.now_s = 0.0
        session.run()
        assert len(store.runs()) == 1, "the same command goes on"
        assert len(store.trials()) > before
    else:
        assert "left out" not in said
        assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_a_case_that_is_dropped_after_its_first_round_is_named_with_its_result(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second round on, a trial takes longer than the first round told."""
    session = Session(4, lambda used: 8.0, monkeypatch, store)
    # a run's id gives the order: with one id of eighty, no case that has begun is dropped
    shuffled = RunRounds.shuffled
    monkeypatch.setattr(
        RunRounds,
        "shuffled",
        lambda rounds, cases, number, run_id: shuffled(rounds, cases, number, "a"),
    )
    begun: set[Case] = set()

    def slower(case: Case, effort: Effort) -> dict[str, Any]:
        session.now_s += 40.0 * (case in begun)
        begun.add(case)
        return session._trial(case, effort)

    monkeypatch.setattr(Server, "act", staticmethod(slower))
    report = session.run()
    dropped = [row for row in report.rows if row.left_out and row.step]
    assert dropped
    assert {row.outcome for row in dropped} == {"ok"}
    assert max(row.rounds for row in dropped) < ROUNDS
    said = " ".join(answer.text for answer in report.answers).lower()
    assert said.count("left out for lack of time") == len(report.answers)
    assert sum(names_left_out(answer, report) for answer in report.answers) == len(dropped)
    cells = {row.case: table.COLUMNS[-1].cell(row).text for row in report.rows}
    assert {case for case, text in cells.items() if "lack of time" in text} == {
        row.case for row in dropped
    }
    assert not [one for one in report.statements if "budget" in str(one)]
    assert not any(row.label in note for row in dropped for note in session.notes)
    while store.runs()[0].status == "open":  # the same command goes on
        session.now_s = 0.0
        report = session.run()
    assert len(store.runs()) == 1
    assert min(row.rounds for row in report.rows) >= ROUNDS
    assert not [row for row in report.rows if row.left_out]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("budget_s", [25.0, 60.0])
def test_the_same_command_reaches_the_end_of_a_run_however_short_its_budget_is(
    store: Store, monkeypatch: pytest.MonkeyPatch, budget_s: float
) -> None:
    """Each call measures something, although its trials take longer than its budget."""
    session = Session(8, lambda used: 5.0 + 1.5 * used, monkeypatch, store)
    session.budget_s = budget_s
    measured = 0
    while not measured or store.runs()[0].status == "open":
        session.now_s = 0.0
        session.run()
        found = sum(trial.status is Status.OK for trial in store.trials())
        assert found > measured
        measured = found
    assert {trial.case for trial in store.trials()} == {*session.cases}


@pytest.mark.usefixtures("quick")
def test_a_run_whose_cases_share_a_worker_leaves_none_out_by_need(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = Session(8, lambda used: 2.0, monkeypatch, store).cases
    options = Options(paired=True)
    path = store.path.with_name("none.db")
    planned = selection.forecast(path, options, cases, selection.naming(options), None, 60.0)
    assert planned.left_out == []
    assert replace(planned, paired=False).left_out


@pytest.mark.usefixtures("quick")
def test_trials_that_take_less_time_than_assumed_leave_nothing_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(8, lambda used: 2.0, monkeypatch, store)
    path = store.path.with_name("none.db")
    planned = selection.forecast(
        path, Options(), session.cases, selection.naming(Options()), None, session.budget_s
    )
    assert planned.left_out, "the plan cannot know it"
    said = expectation(planned)
    assert all(case.label in said for case in planned.left_out)
    assert f"--budget {planned.budget_of_all_s} measures all" in said
    assert not replace(planned, budget_s=planned.budget_of_all_s).left_out
    session.run()
    assert {trial.case for trial in store.trials()} == {*session.cases}
    assert not any("left out" in note for note in session.notes)


def test_what_a_trial_tells_holds_for_its_number_of_gpus_first() -> None:
    one = Case(model="m", strategy="single", batch_size=8, device_kind="cuda")
    on = {
        (name, devices): Case(
            model="m", strategy=name, batch_size=8, devices=devices, device_kind="cuda"
        )
        for name in ("dp", "ddp")
        for devices in (2, 8)
    }
    assert budget.assumed_s(one) == budget.GPU_S
    assert budget.assumed_s(on["dp", 8]) == budget.GPU_S + 7 * budget.FURTHER_GPU_S
    found = budget.Budget(
        deadline_s=1e9, settle_by_s=1e9, settles=True, effort=Effort(budget_s=1.5)
    )
    each = {case: found.usual_s({case: 1}) for case in (one, *on.values())}
    assert each[one] == budget.GPU_S + 1.5
    found.took([trial_of(one, [0.1])], 12.0)
    assert found.usual_s({on["ddp", 8]: 1}) == pytest.approx(2 * each[on["ddp", 8]])
    found.took([trial_of(on["dp", 8], [0.1])], 40.0)
    assert found.usual_s({on["ddp", 8]: 1}) == 40.0
    assert found.usual_s({one: 2}) == 24.0
    found.took([trial_of(on["ddp", 8], [0.1])], 20.0)
    assert found.usual_s({on["ddp", 8]: 1, on["dp", 8]: 1}) == 60.0


def test_the_units_of_a_plan_are_the_cores_of_its_models_and_then_each_other_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpus, "of_torch", lambda: machine(8))
    cases, _ = selection.cases_of(Options())
    parts = [
        [(case.model, case.strategy, case.devices) for case in part] for part in plan.units(cases)
    ]
    assert parts[:2] == [
        [(model, "single", 1), (model, "ddp", 8), (model, "dp", 8)]
        for model in ("resnet18", "transformer")
    ]
    assert parts[2] == [("resnet18", "torch_dp", 8)]
    assert sorted(case for part in parts for case in part) == sorted(
        (case.model, case.strategy, case.devices) for case in cases
    )
