"""A run on a busy machine: repeated trials, waiting, and labels."""

from __future__ import annotations

import pytest

from dpbench.api import reports
from dpbench.hardware import foreign_load
from dpbench.measure.budget import Budget
from dpbench.measure.run import Ended, Note
from dpbench.records import Case, Status, Verified
from dpbench.records.load import Load, Measured, UnknownLoad
from tests.amounts import amounts
from tests.measure.test_run import CASES, slots
from tests.runs import run
from tests.standing_in import QUIET, Server

BUSY = Load(foreign=0.5, steal=0.0, cores=2, seconds=1.0)


@pytest.fixture
def crowded(quick, monkeypatch):
    """Let other processes use the cores during the trials with these numbers, from 0."""
    numbers: set[int] = set()
    began = []

    def since(before):
        began.append(before)
        return BUSY if len(began) - 1 in numbers else QUIET

    monkeypatch.setattr(foreign_load, "since", since)
    monkeypatch.setattr(
        Server, "act", staticmethod(lambda case, effort: {"verified": Verified.BITWISE})
    )
    return numbers


def measured(outcome, store):
    """Return the run's number of trials, how many count, and why it is noisy, in numbers."""
    (found,) = [one for one in store.runs() if one.id == outcome.run_id]
    every = store.trials(outcome.run_id, superseded=True)
    noisy = {when: amounts(why) for when, why in found.provenance["noisy"].items()}
    return len(every), len(store.trials(outcome.run_id)), noisy


def with_a_budget_of(trials, store, monkeypatch):
    """Measure three cases in one round with a budget that is spent after this many trials."""
    heard = []
    monkeypatch.setattr(
        Budget, "spent", lambda self: sum(isinstance(one, Ended) for one in heard) >= trials
    )
    return run(CASES[:3], store, rounds=1, patience_s=1, budget_s=1000, listen=heard.append)


def test_a_trial_beside_others_is_measured_once_more_at_the_end_and_that_one_counts(store, crowded):
    crowded.update({1, 4})
    heard = []
    outcome = run(CASES[:3], store, rounds=2, patience_s=1, listen=heard.append)
    assert measured(outcome, store) == (8, 6, {})
    every = store.trials(outcome.run_id, superseded=True)
    assert [(one.case, one.round) for one in every[6:]] == [
        (every[i].case, every[i].round) for i in (1, 4)
    ]
    assert set(slots(store.trials(outcome.run_id)).values()) == {1}
    assert every[1] not in store.trials(outcome.run_id)
    assert outcome.counts == {Status.OK: 6}
    assert [event.done for event in heard if isinstance(event, Ended)] == [*range(1, 9)]


def test_a_trial_that_is_noisy_again_is_kept_and_labelled_and_not_measured_a_third_time(
    store, crowded
):
    crowded.update({1, 6})
    outcome = run(CASES[:3], store, rounds=2, patience_s=1)
    assert measured(outcome, store) == (7, 6, {"during": ["1"]})
    content = reports.report_of(store.runs()[0], store.trials(outcome.run_id))
    (noisy,) = (one for one in content.remarks if one.key == "noisy")
    assert amounts(noisy.text) == ["1"]
    assert ["NOISY" in row.labels for row in content.rows].count(True) == 1


def test_without_patience_noisy_trials_are_labelled_and_not_repeated(store, crowded):
    crowded.update({1, 4})
    outcome = run(CASES[:3], store, rounds=2, patience_s=0)
    assert measured(outcome, store) == (6, 6, {"during": ["2"]})


def test_when_the_budget_is_spent_nothing_is_repeated(store, crowded, monkeypatch):
    crowded.update({0, 1, 2})
    outcome = with_a_budget_of(3, store, monkeypatch)
    assert measured(outcome, store) == (3, 3, {"during": ["3"]})


def test_a_repeat_that_fails_replaces_nothing(store, crowded, monkeypatch):
    crowded.add(0)
    done = []

    def act(case, effort):
        done.append(case)
        return {"status": Status.FAILED} if len(done) == 4 else {"verified": Verified.BITWISE}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    outcome = run(CASES[:3], store, rounds=1, patience_s=1)
    assert measured(outcome, store) == (4, 3, {"during": ["1"]})
    assert outcome.counts == {Status.OK: 3}


def test_a_resumed_run_repeats_what_the_earlier_session_found_noisy(store, crowded, monkeypatch):
    crowded.update({0, 1})
    interrupted(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(CASES[:3], store, rounds=1, patience_s=1)
    outcome = run(CASES[:3], store, rounds=1, patience_s=1)
    assert outcome.resumed
    assert measured(outcome, store) == (5, 3, {})


def interrupted(monkeypatch, number):
    """Interrupt the run in the trial with this number, from 0."""
    calm, done = Server.act, []

    def act(case, effort):
        done.append(case)
        if len(done) == number + 1:
            raise KeyboardInterrupt
        return calm(case, effort)

    monkeypatch.setattr(Server, "act", staticmethod(act))


def test_an_interrupted_run_is_labelled_as_noisy_as_it_was(store, crowded, monkeypatch):
    crowded.add(0)
    interrupted(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        run(CASES[:3], store, rounds=1, patience_s=0)
    (stopped,) = store.runs()
    assert {when: amounts(why) for when, why in stopped.provenance["noisy"].items()} == {
        "during": ["1"]
    }


@pytest.mark.usefixtures("quick")
def test_a_load_before_an_earlier_session_stays_a_reason_for_the_label(store, monkeypatch):
    loads = [BUSY, QUIET, BUSY]
    monkeypatch.setattr(foreign_load, "measure", lambda: loads.pop(0))
    for number in (0, 1):
        interrupted(monkeypatch, number)
        with pytest.raises(KeyboardInterrupt):
            run(CASES[:2], store, rounds=1, patience_s=0)
        before = store.runs()[0].provenance["noisy"]["before"]
        assert amounts(before)[0] == "50%"
    run(CASES[:2], store, rounds=1, patience_s=0)
    assert store.runs()[0].provenance["noisy"] == {"before": before}, "the same load is told once"


def test_what_was_noisy_twice_is_not_repeated_when_the_run_is_opened_again(store, crowded):
    crowded.update({0, 3})
    first = run(CASES[:3], store, rounds=1, patience_s=1)
    again = run(CASES[:3], store, rounds=1, patience_s=1, retry=["failed"])
    assert (again.run_id, again.resumed) == (first.run_id, True)
    assert measured(again, store) == (4, 3, {"during": ["1"]})


def test_repeats_end_with_the_budget(store, crowded, monkeypatch):
    crowded.update({0, 1, 2})
    outcome = with_a_budget_of(4, store, monkeypatch)
    assert measured(outcome, store) == (4, 3, {"during": ["2"]})


def test_side_by_side_the_whole_group_is_measured_again(store, crowded, monkeypatch):
    """The ratio of two cases needs both trials from one process."""
    cases = [Case(model="mlp", strategy=name, batch_size=8) for name in ("single", "dp")]
    crowded.add(1)
    groups, together = [], Server.run_together

    def remembered(self, asked, effort, number, limit_s):
        groups.append(({case.strategy for case in asked}, number))
        return together(self, asked, effort, number, limit_s)

    monkeypatch.setattr(Server, "run_together", remembered)
    outcome = run(cases, store, rounds=2, paired=True, patience_s=1)
    both = {"single", "dp"}
    assert groups == [(both, 0), (both, 1), (both, 1)]
    assert measured(outcome, store) == (6, 4, {})


@pytest.mark.usefixtures("quick")
def test_a_busy_machine_is_waited_for_and_the_run_labelled_when_it_stays_busy(store, monkeypatch):
    loads, heard = [BUSY, BUSY, QUIET], []
    monkeypatch.setattr(foreign_load, "measure", lambda: loads.pop(0))
    outcome = run(CASES[:1], store, rounds=1, patience_s=1e6, listen=heard.append)
    (note,) = [event for event in heard if isinstance(event, Note)]
    assert note.text.startswith("busy machine: ")
    assert amounts(note.text)[0] == "50%"
    assert measured(outcome, store) == (1, 1, {})
    monkeypatch.setattr(foreign_load, "measure", lambda: BUSY)
    outcome = run(CASES[:1], store, rounds=1, patience_s=0)
    assert list(measured(outcome, store)[2]) == ["before"]
    content = reports.report_of(store.runs()[0], store.trials(outcome.run_id))
    (noisy,) = (one for one in content.remarks if one.key == "noisy")
    assert amounts(noisy.text)[0] == "50%"


@pytest.mark.usefixtures("quick")
def test_the_wait_for_a_low_load_leaves_half_of_the_budget_for_trials(store, monkeypatch):
    waits = []

    def wait(patience_s, *_):
        waits.append(patience_s)
        return Measured(BUSY)

    monkeypatch.setattr(foreign_load, "wait", wait)
    for patience_s, budget_s in ((30, 20.0), (30, 110.0), (30, None)):
        run(CASES[:1], store, rounds=1, patience_s=patience_s, budget_s=budget_s)
    assert waits == [10, 30, 30]


@pytest.mark.usefixtures("quick")
def test_a_load_that_cannot_be_told_is_not_called_quiet(store, monkeypatch):
    unknown = UnknownLoad("no counts here")
    monkeypatch.setattr(foreign_load, "measure", lambda: unknown)
    outcome = run(CASES[:1], store, rounds=1)
    content = reports.report_of(store.runs()[0], store.trials(outcome.run_id))
    (warning,) = (one for one in content.warnings if one.key == "unknown_load")
    assert warning.text.endswith(f": {unknown.unknown}")
    assert "NOISY" not in " ".join(content.notes)
