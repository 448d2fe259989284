"""The run's laws: every case every round, once.

Nothing that happens loses or repeats what was measured.
"""

from __future__ import annotations

import itertools
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dpbench.analysis.stats import LOOKS
from dpbench.measure import run as module
from dpbench.measure.run import Ended, Note, Started
from dpbench.measure.stopping import Fixed, UntilDecided
from dpbench.records import Case, Effort, Sample, Status
from dpbench.records.environment import Environment
from dpbench.records.facts import RunFacts
from dpbench.store import OPEN, Store
from tests import environments
from tests.amounts import amounts
from tests.runs import run
from tests.standing_in import Server

HERE = environments.FACTS
CASES = [Case(model=f"m{i}", strategy="single", batch_size=8) for i in range(9)]


def slots(trials):
    return Counter((trial.case, trial.round) for trial in trials)


def end_in(number, monkeypatch, error=KeyboardInterrupt):
    """Let an error end the run in this trial, counted from 1, and in no later one."""
    begun = itertools.count(1)

    def act(case, effort):
        if next(begun) == number:
            raise error
        return {}

    monkeypatch.setattr(Server, "act", staticmethod(act))


# -- with stand-ins


@pytest.mark.usefixtures("quick")
def test_every_case_is_measured_once_a_round_in_an_order_of_its_own_under_a_server_of_its_own(
    store,
):
    outcome = run(CASES, store, rounds=4)
    trials = store.trials(outcome.run_id)
    assert slots(trials) == Counter((case, number) for case in CASES for number in range(4))
    assert [trial.round for trial in trials] == [n for n in range(4) for _ in CASES], (
        "one round after the other"
    )
    orders = [tuple(t.case for t in trials if t.round == n) for n in range(4)]
    assert len(set(orders)) == 4
    assert len(Server.made) == 4
    assert [{number for _, number, _ in server.asked} for server in Server.made] == [
        {0},
        {1},
        {2},
        {3},
    ]
    assert outcome.counts == {Status.OK: 36}
    assert not outcome.resumed
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_two_runs_have_different_orders(store):
    orders = []
    for _ in range(3):
        outcome = run(CASES, store, rounds=2)
        orders.append(tuple(t.case for t in store.trials(outcome.run_id) if t.round == 1))
    assert len(set(orders)) > 1
    assert len(store.runs()) == 3, "a finished run is not resumed"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupted_run_goes_on_where_it_was_in_the_same_order(store, monkeypatch, error):
    end_in(12, monkeypatch, error)
    with pytest.raises(error):
        run(CASES, store, rounds=2)
    assert store.runs()[0].status != "finished"
    before = store.trials()
    assert len(before) == 11
    # the order of the cases names no other plan
    outcome = run(list(reversed(CASES)), store, rounds=2)
    assert outcome.resumed
    after = store.trials()
    assert after[:11] == before
    assert slots(after) == Counter((case, number) for case in CASES for number in range(2))
    assert len(Server.made[-2].asked) == 0 or {n for _, n, _ in Server.made[-1].asked} == {1}
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_what_a_resumed_run_comes_to_is_the_whole_run(store, monkeypatch):
    """Else a failure before an interruption would be forgotten, and the command exit with 0."""
    asked = []

    def act(case, effort):
        asked.append(case)
        if len(asked) == 1:
            return {"status": Status.FAILED, "reason": "planted"}
        if len(asked) == 4:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    with pytest.raises(KeyboardInterrupt):
        run(CASES, store, rounds=1)
    outcome = run(CASES, store, rounds=1)
    assert outcome.resumed
    assert outcome.counts == {Status.FAILED: 1, Status.OK: 8}


# -- a plan that grows


ONE = Case(model="mlp", strategy="single", batch_size=8)
TWO = Case(model="mlp", strategy="dp", batch_size=8, devices=2)
FOUR = Case(model="mlp", strategy="dp", batch_size=8, devices=4)
OTHER = Case(model="lstm", strategy="single", batch_size=8)


@pytest.mark.usefixtures("quick")
def test_a_further_model_joins_the_run_and_nothing_is_measured_again(store):
    first = run([ONE, TWO], store, rounds=2)
    grown = run([ONE, TWO, OTHER], store, rounds=2)
    assert (grown.run_id, grown.resumed) == (first.run_id, True)
    assert slots(store.trials()) == Counter(
        {(case, number) for case in (ONE, TWO) for number in (0, 1)} | {(OTHER, 2), (OTHER, 3)}
    )
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_a_case_that_joins_its_model_is_measured_beside_the_baseline_of_the_same_round(store):
    """A ratio of steps from rounds at different times would also be one of two loads."""
    run([ONE, TWO, OTHER], store, rounds=2)
    run([ONE, TWO, FOUR, OTHER], store, rounds=2)
    assert slots(store.trials()) == Counter(
        {(case, number) for case in (ONE, TWO, OTHER) for number in (0, 1)}
        | {(case, number) for case in (ONE, TWO, FOUR) for number in (2, 3)}
    )


@pytest.mark.usefixtures("quick")
def test_a_run_that_grew_goes_on_after_an_interruption_and_grows_again(store, monkeypatch):
    run([ONE, TWO], store, rounds=2)
    end_in(3, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run([ONE, TWO, FOUR], store, rounds=2)
    assert run([ONE, TWO, FOUR], store, rounds=2).resumed
    grown = slots(store.trials())
    assert grown == Counter(
        {(case, number) for case in (ONE, TWO) for number in range(4)} | {(FOUR, 2), (FOUR, 3)}
    )
    run([ONE, TWO, FOUR, OTHER], store, rounds=2)
    assert slots(store.trials()) - grown == Counter({(OTHER, 4), (OTHER, 5)})
    assert len(store.runs()) == 1


@pytest.mark.usefixtures("quick")
def test_rounds_until_the_answers_are_settled_go_on_in_a_run_that_grew(store):
    run([ONE, OTHER], store, rounds=UntilDecided(), settle_s=0)
    run([ONE, OTHER, TWO], store, rounds=UntilDecided(), settle_s=0)
    rounds = {
        case: {trial.round for trial in store.trials() if trial.case == case}
        for case in (ONE, OTHER, TWO)
    }
    least = UntilDecided.least
    assert rounds[OTHER] == {*range(least)}
    assert rounds[ONE] == {*range(2 * least)}
    assert rounds[TWO] == {*range(least, 2 * least)}


@pytest.mark.usefixtures("quick")
def test_the_answers_of_cases_that_joined_late_are_looked_at_too(store, monkeypatch):
    """The looks of a run lie 2, 3, 5, 7 and 10 rounds apart: the next one could come too late."""
    answers = iter([{ONE, TWO}, {ONE, TWO}, set(), {ONE, FOUR}, set()])
    monkeypatch.setattr(UntilDecided, "unsettled", lambda self: frozenset(next(answers)))
    run([ONE, TWO], store, rounds=UntilDecided())
    assert max(trial.round for trial in store.trials()) + 1 == LOOKS[2]
    run([ONE, TWO, FOUR], store, rounds=UntilDecided())
    rounds = {trial.round for trial in store.trials() if trial.case == FOUR}
    assert rounds == {*range(LOOKS[2], LOOKS[2] + LOOKS[1])}, (
        "two looks: after 4 and after 6 rounds"
    )
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_a_case_that_becomes_a_rival_later_joins_no_round_of_an_earlier_session(store, monkeypatch):
    """Its ratio there would be one of steps from different times."""
    answers = iter([{ONE, TWO}, {ONE, TWO}, {ONE, FOUR}, {ONE, FOUR}, set()])
    monkeypatch.setattr(UntilDecided, "unsettled", lambda self: frozenset(next(answers)))
    end_in(3 * LOOKS[0] + 2 * 3 + 2, monkeypatch)  # the second trial of round 7, counted from 0
    with pytest.raises(KeyboardInterrupt):
        run([ONE, TWO, FOUR], store, rounds=UntilDecided())
    assert run([ONE, TWO, FOUR], store, rounds=UntilDecided()).resumed
    rounds = {
        case: {trial.round for trial in store.trials() if trial.case == case}
        for case in (ONE, FOUR)
    }
    assert rounds == {ONE: {*range(9)}, FOUR: {*range(LOOKS[0]), 8}}
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_the_command_of_a_run_that_grew_is_the_one_that_goes_on_with_it(store, monkeypatch):
    for command, cases in (("dpbench run a", [ONE]), ("dpbench run a,b", [ONE, TWO])):
        facts = {**module.collect(None), "command": command}
        monkeypatch.setattr(module, "collect", lambda cluster, facts=facts: facts)
        run(cases, store, rounds=1)
    assert [one.provenance["command"] for one in store.runs()] == ["dpbench run a,b"]


@pytest.mark.usefixtures("quick")
def test_a_run_that_grew_is_merged_with_a_copy_of_its_beginning(store, tmp_path):
    beginning = tmp_path / "archive.db"
    run([ONE], store, rounds=2)
    with Store.create(beginning) as archive:
        archive.merge(store.path)
    run([ONE, TWO], store, rounds=3)
    with Store.create(tmp_path / "grown.db") as grown:
        grown.merge(store.path)
        grown.merge(beginning)
    with Store.create(beginning) as archive:
        archive.merge(store.path)
    for path in (beginning, tmp_path / "grown.db"):
        with Store.read(path) as merged:
            assert [one.rounds for one in merged.runs()] == [3]
            assert slots(merged.trials()) == slots(store.trials())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("cases", "settings"),
    [
        pytest.param([ONE, OTHER], {}, id="another case in place of one"),
        pytest.param([ONE], {}, id="fewer cases"),
        pytest.param([ONE, TWO, OTHER], {"rounds": 1}, id="fewer rounds"),
        pytest.param([ONE, TWO, OTHER], {"paired": True}, id="other settings"),
    ],
)
def test_a_plan_that_does_not_only_add_cases_is_another_run(store, cases, settings):
    first = run([ONE, TWO], store, rounds=2)
    second = run(cases, store, **{"rounds": 2} | settings)
    assert (second.run_id == first.run_id, second.resumed) == (False, False)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("more", [5, UntilDecided()], ids=["fixed", "auto"])
def test_more_rounds_go_on_with_the_run_and_their_intervals_hold_at_every_look(store, more):
    """Who looks at three rounds, and adds two because they decide nothing, looks twice."""
    first = run([ONE, TWO], store, rounds=3)
    assert {trial.facts.looks for trial in store.trials()} == {1}
    grown = run([ONE, TWO], store, rounds=more, settle_s=0)
    assert grown.run_id == first.run_id
    looks = {trial.round: trial.facts.looks for trial in store.trials()}
    if more == 5:
        assert looks == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2}
    else:
        assert looks == {0: 1, 1: 1, 2: 1, 3: 2 * len(LOOKS)}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("more", [[], [TWO]], ids=["an open run", "a plan that grows"])
def test_trials_of_an_edited_model_are_never_added_to_a_run(store, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "net.py"
    file.write_text("net = 1\n")
    mine = replace(ONE, model="net.py:net")
    first = run([mine], store, rounds=2)
    if not more:
        store.end_run(first.run_id, OPEN)
    file.write_text("net = 2\n")
    assert not run([mine, *more], store, rounds=2).resumed
    file.write_text("net = 1\n")
    if not more:
        assert run([mine], store, rounds=2).run_id == first.run_id


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("more", [[], [TWO]], ids=["an open run", "a plan that grows"])
def test_trials_under_another_environment_variable_are_never_added_to_a_run(
    store, monkeypatch, more
):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    first = run([ONE], store, rounds=2)
    if not more:
        store.end_run(first.run_id, OPEN)
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    monkeypatch.setenv("UNRELATED", "1")
    assert not run([ONE, *more], store, rounds=2).resumed
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    if not more:
        assert run([ONE], store, rounds=2).run_id == first.run_id


@pytest.mark.usefixtures("quick")
def test_a_run_goes_on_under_other_threads_of_the_shell_but_not_with_another_file(
    store, monkeypatch
):
    """The processes that measure have one thread an operation whatever the shell says."""
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/etc/none-a.xml")
    first = run([ONE], store, rounds=2)
    store.end_run(first.run_id, OPEN)
    monkeypatch.setenv("NCCL_TOPO_FILE", "/etc/none-b.xml")
    assert run([ONE], store, rounds=2).run_id != first.run_id
    monkeypatch.setenv("NCCL_TOPO_FILE", "/etc/none-a.xml")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run([ONE], store, rounds=2).run_id == first.run_id


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("more", [[], [TWO]], ids=["an open run", "a plan that grows"])
@pytest.mark.parametrize("name", environments.FORBIDS)
def test_trials_of_another_environment_are_never_added_to_a_run(
    store, monkeypatch, caplog, name, more
):
    def under(facts, cases):
        monkeypatch.setattr(module, "collect", lambda cluster: facts)
        return run(cases, store, rounds=2)

    first = under(environments.FACTS, [ONE])
    if not more:
        store.end_run(first.run_id, OPEN)
    second = under(environments.facts(name), [ONE, *more])
    assert (second.resumed, second.run_id == first.run_id) == (False, False)
    if not more:
        assert first.run_id[:8] in caplog.text
        assert "a new run begins" in caplog.text
        caplog.clear()
        assert under(environments.FACTS, [ONE]).run_id == first.run_id
    assert not caplog.text


@pytest.mark.usefixtures("quick")
def test_a_fact_that_is_not_known_this_time_begins_another_run_and_is_named(
    store, monkeypatch, caplog
):
    monkeypatch.setattr(module, "collect", lambda cluster: HERE)
    store.end_run(run([ONE], store, rounds=2).run_id, OPEN)
    lost = {name: value for name, value in HERE["gpus"].items() if name != "driver"}
    monkeypatch.setattr(module, "collect", lambda cluster: {**HERE, "gpus": lost})
    assert not run([ONE], store, rounds=2).resumed
    assert "driver: 550.54, then unknown" in caplog.text


@pytest.mark.usefixtures("quick")
def test_a_damaged_run_of_the_same_plan_keeps_no_other_from_beginning(store, monkeypatch):
    monkeypatch.setattr(module, "collect", lambda cluster: HERE)
    first = run([ONE], store, rounds=2).run_id
    store.end_run(first, OPEN)
    with closing(sqlite3.connect(store.path)) as db, db:
        db.execute("UPDATE run SET provenance='[]'")
    monkeypatch.setattr(module, "collect", lambda cluster: environments.facts("driver"))
    assert run([ONE], store, rounds=2).run_id != first


@pytest.mark.usefixtures("quick")
def test_another_machine_of_a_launch_begins_another_run_if_its_environment_changes():
    def identity(facts):
        machines = [
            {"name": "a", "machine": "1", "ranks": [0], "facts": one} for one in (HERE, facts)
        ]
        return module.identity(
            [ONE], Fixed(2), {**HERE, "hosts": {"machines": machines}}, paired=False
        )

    assert identity(HERE) == identity(environments.facts("memory_bytes"))
    assert identity(HERE).code != identity(environments.facts("nccl")).code


def test_the_facts_of_a_run_give_every_fact_of_its_environment_but_those_of_gpus():
    found = Environment.of(RunFacts.of(module.collect(None)))
    facts = vars(found)
    lacking = {name for name, value in facts.items() if value is None}
    of_gpus = {"power_limits_w", "driver", "cuda", "cudnn", "nccl"}
    assert lacking - of_gpus == {*environments.OF_TRIALS}
    assert found.gil == ("on" if getattr(sys, "_is_gil_enabled", lambda: True)() else "off")


@pytest.mark.usefixtures("quick")
def test_a_run_joins_the_latest_run_only(store):
    """Else trials of a much earlier time could become a part of it."""
    run([ONE, TWO], store, rounds=2)
    run([OTHER], store, rounds=2)
    assert not run([ONE, TWO, FOUR], store, rounds=2).resumed


# -- statuses, budgets and events


@pytest.mark.usefixtures("quick")
def test_retry_measures_again_what_it_names_and_nothing_else(store, monkeypatch):
    bad = {CASES[0]: Status.FAILED, CASES[1]: Status.OOM, CASES[2]: Status.TIMEOUT}
    asked = []

    def act(case, effort):
        asked.append(case)
        if len(asked) == len(CASES) + 1:
            raise KeyboardInterrupt  # in the second round
        return {"status": bad.get(case, Status.OK)}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    with pytest.raises(KeyboardInterrupt):
        run(CASES, store, rounds=2)
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {}))
    Server.made.clear()
    run(CASES, store, rounds=2, retry=["failed", "timeout"])
    first = [case for server in Server.made for case, number, _ in server.asked if number == 0]
    assert set(first) == {CASES[0], CASES[2]}
    assert len(first) == 2


@pytest.mark.usefixtures("quick")
def test_the_budget_bounds_the_run_and_the_same_call_goes_on_with_what_it_leaves_out(
    store, monkeypatch
):
    given, now, notes = [], [0.0], []

    def tick():
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(module.time, "perf_counter", tick)

    def act(case, effort):
        given.append(effort.budget_s)
        now[0] += 0.1
        return {}

    monkeypatch.setattr(Server, "act", staticmethod(act))

    def listen(event):
        if isinstance(event, Note):
            notes.append(event.text)

    def again(budget_s):
        effort = Effort(budget_s=5)
        return run(CASES, store, rounds=3, budget_s=budget_s, effort=effort, listen=listen)

    outcome = again(1.05)
    assert outcome.counts == {Status.OK: 11}
    assert amounts(notes[-1].partition(" left out: ")[0]) == ["2", "3"]
    assert "the same command" in notes[-1]
    assert all(0 < seconds <= 5 for seconds in given)
    assert max(given) < 1, "the timed parts are shortened"
    assert store.runs()[0].status == "open"
    for count in (11 + 7, 27):  # to the end of a round, and to the end of the run
        outcome = again((count - outcome.counts[Status.OK]) / 10 - 0.05)
        assert (outcome.resumed, outcome.counts) == (True, {Status.OK: count})
    left_out = [text.partition(" left out: ")[0] for text in notes if " left out: " in text]
    assert [amounts(rounds) for rounds in left_out] == [["2", "3"], ["3"]]
    trials = store.trials(outcome.run_id)
    assert slots(trials) == Counter((case, number) for case in CASES for number in range(3))
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_a_case_that_the_budget_did_not_reach_is_skipped_and_measured_later(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def act(case, effort):
        now[0] += 1
        return {}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    assert run(CASES, store, rounds=2, budget_s=8.0).counts == {Status.OK: 8, Status.SKIPPED: 1}
    (skipped,) = [one for one in store.trials() if one.status is Status.SKIPPED]
    assert (skipped.round, skipped.case in CASES) == (0, True)
    assert "--budget" in skipped.reason
    for count, status in ((16, "open"), (18, "finished")):
        assert run(CASES, store, rounds=2, budget_s=8.0).counts == {Status.OK: count}
        assert store.runs()[0].status == status


@pytest.mark.usefixtures("quick")
def test_without_a_budget_every_trial_gets_the_whole_effort_and_the_limit(store, monkeypatch):
    limits = []
    original = Server.run
    monkeypatch.setattr(
        Server,
        "run",
        lambda self, c, e, n, limit: limits.append(limit) or original(self, c, e, n, limit),
    )
    run(CASES[:2], store, rounds=2, effort=Effort(budget_s=9), limit_s=77)
    assert {effort.budget_s for server in Server.made for _, _, effort in server.asked} == {9}
    assert limits == [77] * 4


@pytest.mark.usefixtures("quick")
def test_the_listener_hears_each_trial_begin_and_end_with_true_counts(store):
    heard = []
    run(CASES[:3], store, rounds=2, listen=heard.append)
    assert isinstance(heard[0], Started)
    assert (heard[0].case, heard[0].total, heard[0].done) == (None, 6, 0)
    assert [type(event) for event in heard[1:]] == [Started, Ended] * 6
    assert [event.done for event in heard if isinstance(event, Ended)] == [1, 2, 3, 4, 5, 6]
    assert {event.total for event in heard} == {6}


@pytest.mark.usefixtures("quick")
def test_a_trial_is_in_the_store_before_its_end_is_told(store):
    def listen(event):
        if isinstance(event, Ended):
            with Store.read(store.path) as reader:
                assert len(reader.trials()) == event.done

    run(CASES[:3], store, rounds=1, listen=listen)


@pytest.mark.usefixtures("quick")
def test_whatever_a_worker_returns_is_stored_and_ends_nothing(store, monkeypatch):
    odd = [
        {
            "status": Status.FAILED,
            "reason": "weights-\udcff.pt\0 [bold]not markup[/]" + "x" * 100_000,
        },
        {
            "samples": (
                Sample(1.0, 0, "power_w", float("nan")),
                Sample(2.0, 0, "power_w", float("inf")),
            )
        },
        {"status": Status.OK, "steps": ()},
        {"setup": {"verify_s": float("nan")}},
    ]
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: odd[int(case.model[1:])]))
    outcome = run(CASES[: len(odd)], store, rounds=1)
    assert len(store.trials(outcome.run_id)) == len(odd)


# -- models that fail their check


def refuse(model):
    return lambda case: (
        {"status": Status.FAILED, "reason": "planted\nmore"} if case.model == model else {}
    )


@pytest.mark.usefixtures("quick")
def test_a_model_that_fails_its_check_is_told_once_and_stored_per_case_and_the_others_are_measured(
    store, monkeypatch
):
    monkeypatch.setattr(Server, "verdict", staticmethod(refuse("bad")))
    cases = [
        Case(model=model, strategy=strategy, batch_size=size, devices=devices)
        for model in ("bad", "good")
        for strategy, devices in (("single", 1), ("ddp", 2))
        for size in (8, 32)
    ]
    heard = []
    outcome = run(cases, store, rounds=3, listen=heard.append)
    trials = store.trials(outcome.run_id)
    assert Counter((one.case.model, one.round, one.status) for one in trials) == {
        ("bad", 0, Status.FAILED): 4,
        ("good", 0, Status.OK): 4,
        ("good", 1, Status.OK): 4,
        ("good", 2, Status.OK): 4,
    }
    assert all("planted" in one.reason for one in trials if one.case.model == "bad")
    (note,) = (event.text for event in heard if isinstance(event, Note))
    assert note.startswith("bad (small) ")
    assert note.endswith(": planted")
    assert amounts(note) == ["4"], "cases that will not be measured"
    ended = [event for event in heard if isinstance(event, Ended)]
    assert (ended[0].done, ended[0].total, ended[-1].done, ended[-1].total) == (1, 12, 12, 12)
    assert sorted(
        (case.model, case.strategy, case.devices, case.batch_size) for case in Server.checked
    ) == [
        ("bad", "single", 1, 32),
        ("good", "single", 1, 32),
    ]
    assert all(case.batch_size >= 1 and case.devices == 1 for case in Server.checked)
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_the_check_of_a_model_is_part_of_the_budget(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    def check(case):
        now[0] += 10
        return {}

    monkeypatch.setattr(Server, "verdict", staticmethod(check))
    outcome = run(CASES[:2], store, rounds=1, budget_s=15.0)
    assert len(Server.checked) == 2
    assert outcome.counts == {Status.OK: 1, Status.SKIPPED: 1}, "20 s of checks"
    again = run(CASES[:2], store, rounds=1, budget_s=15.0)
    assert again.counts == {Status.OK: 2}, "each call measures one trial at least"


@pytest.mark.usefixtures("quick")
def test_where_no_model_passes_nothing_is_measured(store, monkeypatch):
    monkeypatch.setattr(Server, "verdict", staticmethod(refuse("m0")))
    outcome = run(CASES[:1], store, rounds=3)
    assert outcome.counts == {Status.FAILED: 1}
    assert [server.asked for server in Server.made] == [[]]


@pytest.mark.usefixtures("quick")
def test_a_model_that_failed_its_check_is_measured_when_it_is_retried_and_passes(
    store, monkeypatch
):
    monkeypatch.setattr(Server, "verdict", staticmethod(refuse("m0")))
    run(CASES[:2], store, rounds=2)
    monkeypatch.setattr(Server, "verdict", staticmethod(lambda case: {}))
    outcome = run(CASES[:2], store, rounds=2, retry=["failed"])
    assert outcome.counts == {Status.OK: 4}


# -- signals from outside


@pytest.mark.usefixtures("quick")
def test_a_model_whose_check_was_killed_is_measured_and_checked_again_in_the_next_round(
    store, monkeypatch
):
    monkeypatch.setattr(
        Server, "verdict", staticmethod(lambda case: {"status": Status.KILLED, "reason": "planted"})
    )
    heard = []
    outcome = run(CASES[:2], store, rounds=2, listen=heard.append)
    assert outcome.counts == {Status.OK: 4}
    assert Counter(case.model for case in Server.checked) == {"m0": 2, "m1": 2}
    assert [("planted" in event.text) for event in heard if isinstance(event, Note)] == [True] * 4
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_the_same_call_measures_again_what_was_killed_and_nothing_else(store, monkeypatch):
    killed = {"status": Status.KILLED, "steps": (), "reason": "planted"}
    monkeypatch.setattr(
        Server, "act", staticmethod(lambda case, effort: killed if case.model == "m1" else {})
    )
    first = run(CASES[:3], store, rounds=2)
    assert first.counts == {Status.OK: 4, Status.KILLED: 2}
    assert store.runs()[0].status == "interrupted"
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {}))
    Server.made.clear()
    second = run(CASES[:3], store, rounds=2)
    assert (second.run_id, second.resumed, second.counts) == (first.run_id, True, {Status.OK: 6})
    assert [case.model for server in Server.made for case, _, _ in server.asked] == ["m1", "m1"]
    assert store.runs()[0].status == "finished"


# -- on GPUs


ON_GPUS = [
    Case(model=f"m{i % 2}", strategy="single", batch_size=8 + i, device_kind="cuda")
    for i in range(6)
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("weak", [False, True], ids=["strong", "weak"])
def test_the_first_trial_decides_whether_all_that_share_its_baseline_take_few_steps(
    store, monkeypatch, weak
):
    compared = {
        (model, batch): [
            Case(
                model=model,
                strategy=strategy,
                devices=devices,
                batch_size=batch * (devices if weak else 1),
                device_kind="cuda",
            )
            for strategy, devices in (("single", 1), ("dp", 2), ("ddp", 4))
        ]
        for model in ("m0", "m1")
        for batch in (8, 4096)
    }

    def act(case, effort):
        first = case in compared["m0", 4096]
        return {"provenance": {"slow": first if effort.slow is None else effort.slow}}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    run([case for cases in compared.values() for case in cases], store, rounds=2)
    asked = [(case, effort.slow) for server in Server.made for case, _, effort in server.asked]
    for which, cases in compared.items():
        slow = which == ("m0", 4096)
        assert [how for case, how in asked if case in cases] == [None] + [slow] * 5
        assert {trial.facts.slow for trial in store.trials() if trial.case in cases} == {slow}


@pytest.mark.usefixtures("quick")
def test_on_gpus_a_round_that_does_not_fit_is_left_out_and_named_and_no_trial_is_shortened(
    store, monkeypatch
):
    clock = SimpleNamespace(now_s=0.0)

    def act(case, effort):
        clock.now_s += 5.0
        return {}

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(Server, "act", staticmethod(act))
    notes = []
    outcome = run(
        ON_GPUS,
        store,
        rounds=4,
        budget_s=75.0,
        listen=lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )
    assert outcome.counts == {Status.OK: 12}, "two rounds of 30 s fit into 75 s"
    assert any("rounds 3 to 4" in text for text in notes)
    efforts = {(effort.budget_s, effort.least_s) for s in Server.made for _, _, effort in s.asked}
    assert efforts == {(Effort().budget_s, 0.5)}
    assert store.runs()[0].status == "open", "nothing failed"
    again = run(ON_GPUS, store, rounds=4, budget_s=75.0)
    assert again.resumed
    assert again.counts == {Status.OK: 24}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("settle_s", "rounds"), [(125.0, LOOKS[0]), (160.0, LOOKS[0] + 1)])
def test_open_rounds_end_in_time_the_run_is_open_and_the_same_call_goes_on(
    store, monkeypatch, settle_s, rounds
):
    clock = SimpleNamespace(now_s=0.0)

    def act(case, effort):
        clock.now_s += 5.0
        return {}

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(Server, "act", staticmethod(act))
    monkeypatch.setattr(UntilDecided, "unsettled", lambda self: frozenset(ON_GPUS))
    first = run(ON_GPUS, store, rounds=UntilDecided(), settle_s=settle_s)
    assert slots(store.trials()) == Counter(
        (case, number) for case in ON_GPUS for number in range(rounds)
    ), "a round takes 30 s"
    assert store.runs()[0].status == "open"
    monkeypatch.setattr(UntilDecided, "unsettled", lambda self: frozenset())
    again = run(ON_GPUS, store, rounds=UntilDecided(), settle_s=settle_s)
    assert (again.run_id, again.resumed) == (first.run_id, True)
    assert len(store.trials()) == rounds * len(ON_GPUS)
    assert store.runs()[0].status == "finished"
    assert {trial.facts.looks for trial in store.trials()} == {len(LOOKS)}


@pytest.mark.usefixtures("quick")
def test_the_rounds_that_every_case_needs_are_measured_however_long_they_take(store, monkeypatch):
    clock = SimpleNamespace(now_s=0.0)

    def act(case, effort):
        clock.now_s += 5.0
        return {}

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock.now_s)
    monkeypatch.setattr(Server, "act", staticmethod(act))
    left = []
    run(
        CASES,
        store,
        rounds=UntilDecided(),
        settle_s=1.0,
        listen=lambda event: left.append(event.left_s) if isinstance(event, Ended) else None,
    )
    assert slots(store.trials()) == Counter(
        (case, number) for case in CASES for number in range(LOOKS[0])
    )
    assert left == sorted(left, reverse=True), "equal trials leave less and less"
    assert left[0] == pytest.approx(5.0 * (len(CASES) * LOOKS[0] - 1))
    assert left[-1] == 0


@pytest.mark.usefixtures("quick")
def test_one_trial_on_gpus_says_nothing_of_others(store):
    notes = []
    run(ON_GPUS[:1], store, rounds=1, listen=lambda event: notes.append(type(event)))
    assert Note not in notes
