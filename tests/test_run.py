"""The run's laws: every case every round, once; nothing that happens loses or repeats what was measured."""

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest

from dpbench.cli import showing
from dpbench.hardware import foreign_load, samplers
from dpbench.hardware.foreign_load import Load, UnknownLoad
from dpbench.measure import run as module
from dpbench.measure.run import Ended, Note, Started, run
from dpbench.records import Case, Effort, Sample, Status, Step, Trial, Verified
from dpbench.store import Store
from tests import commands

CASES = [Case(model=f"m{i}", strategy="single", batch_size=8) for i in range(9)]
QUIET = Load(foreign=0.0, steal=0.0, cores=2, seconds=1.0)
BUSY = Load(foreign=0.5, steal=0.0, cores=2, seconds=1.0)
ONLY_MLP = ("run", "--models", "mlp", "--strategies", "single,dp,ddp", "--devices", "1,2", "--batch-sizes", "32")


class Server:
    """Stands in for a server: answers at once, remembers what it was asked, and may be told to misbehave."""

    made: ClassVar[list] = []
    checked: ClassVar[list] = []
    act = staticmethod(lambda case, effort: {})
    verdict = staticmethod(lambda case: {})

    def __init__(self, scratch):
        assert scratch.is_dir()
        self.asked, self.open = [], False
        Server.made.append(self)

    def __enter__(self):
        assert not any(server.open for server in Server.made)
        self.open = True
        return self

    def __exit__(self, *error):
        self.open = False

    def check(self, case, limit_s):
        assert self.open
        Server.checked.append(case)
        return Trial(**({"case": case} | Server.verdict(case)))

    def run_together(self, cases, effort, number, limit_s):
        return [self.run(case, effort, number, limit_s) for case in cases]

    def run(self, case, effort, number, limit_s):
        assert self.open
        self.asked.append((case, number, effort))
        step = Step(0.01, False, time.perf_counter())
        return Trial(**({"case": case, "round": number, "steps": (step,)} | Server.act(case, effort)))


class Series:
    def cut(self, began, ended):
        assert began < ended
        return (Sample(began, -1, "rss_bytes", 1.0),)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Replace processes by stand-ins, and temporary files by ones that can be looked at."""

    @contextmanager
    def sampling(ordinals, path):
        yield Series()

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setattr(module, "Server", Server)
    monkeypatch.setattr(samplers, "sampling", sampling)
    monkeypatch.setattr(Server, "made", [])
    monkeypatch.setattr(Server, "checked", [])
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {}))
    monkeypatch.setattr(Server, "verdict", staticmethod(lambda case: {}))
    monkeypatch.setattr(foreign_load, "measure", lambda: QUIET)
    monkeypatch.setattr(foreign_load, "since", lambda before: QUIET)
    yield
    assert list(temporary.iterdir()) == [], "nothing is left in the folder of temporary files"


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "store.db") as store:
        yield store


def slots(trials):
    return Counter((trial.case, trial.round) for trial in trials)


# -- with stand-ins


@pytest.mark.usefixtures("quick")
def test_every_case_is_measured_once_a_round_in_an_order_of_its_own_under_a_server_of_its_own(store):
    outcome = run(CASES, store, rounds=4)
    trials = store.trials(outcome.run_id)
    assert slots(trials) == Counter((case, number) for case in CASES for number in range(4))
    assert [trial.round for trial in trials] == [n for n in range(4) for _ in CASES], "one round after the other"
    orders = [tuple(t.case for t in trials if t.round == n) for n in range(4)]
    assert len(set(orders)) == 4
    assert len(Server.made) == 4
    assert [{number for _, number, _ in server.asked} for server in Server.made] == [{0}, {1}, {2}, {3}]
    assert outcome.counts == {Status.OK: 36}
    assert not outcome.resumed
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_two_runs_have_different_orders(store):
    orders = []
    for _ in range(3):
        outcome = run(CASES, store, rounds=1)
        orders.append(tuple(trial.case for trial in store.trials(outcome.run_id)))
    assert len(set(orders)) > 1
    assert len(store.runs()) == 3, "a finished run is not resumed"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_an_interrupted_run_goes_on_where_it_was_in_the_same_order(store, monkeypatch, error):
    asked = []

    def act(case, effort):
        asked.append(case)
        if len(asked) == 12:
            raise error
        return {}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    with pytest.raises(error):
        run(CASES, store, rounds=2)
    assert store.runs()[0].status != "finished"
    before = store.trials()
    assert len(before) == 11
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {}))
    outcome = run(list(reversed(CASES)), store, rounds=2)  # the order of the cases names no other plan
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
def test_the_budget_bounds_the_run_and_what_it_leaves_out_is_skipped_with_the_reason(store, monkeypatch):
    given, now = [], [0.0]

    def tick():
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=tick))

    def act(case, effort):
        given.append(effort.budget_s)
        now[0] += 0.1
        return {}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    outcome = run(CASES, store, rounds=10, budget_s=1.05, effort=Effort(budget_s=5))
    trials = store.trials(outcome.run_id)
    assert slots(trials) == Counter((case, number) for case in CASES for number in range(10))
    skipped = [trial for trial in trials if trial.status is Status.SKIPPED]
    assert outcome.counts == {Status.OK: 11, Status.SKIPPED: 79}
    assert all("--budget" in trial.reason for trial in skipped)
    assert {trial.status for trial in trials[: 90 - len(skipped)]} == {Status.OK}, "what was begun is no skipped one"
    assert all(0 < seconds <= 5 for seconds in given)
    assert max(given) < 1, "the timed parts are shortened"


@pytest.mark.usefixtures("quick")
def test_without_a_budget_every_trial_gets_the_whole_effort_and_the_limit(store, monkeypatch):
    limits = []
    original = Server.run
    monkeypatch.setattr(
        Server, "run", lambda self, c, e, n, limit: limits.append(limit) or original(self, c, e, n, limit)
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
        {"status": Status.FAILED, "reason": "weights-\udcff.pt\0 [bold]not markup[/]" + "x" * 100_000},
        {"samples": (Sample(1.0, 0, "power_w", float("nan")), Sample(2.0, 0, "power_w", float("inf")))},
        {"status": Status.OK, "steps": ()},
        {"setup": {"verify_s": float("nan")}},
    ]
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: odd[int(case.model[1:])]))
    outcome = run(CASES[: len(odd)], store, rounds=1)
    assert len(store.trials(outcome.run_id)) == len(odd)


@pytest.mark.usefixtures("quick")
def test_a_trial_has_the_samples_of_its_timed_steps_alone(store, monkeypatch, tmp_path):
    """Neither those of its warm-up, of what came before and after, nor of devices that it does not use."""
    output = tmp_path / "samples.jsonl"
    times = (100.5, 101.0, 101.9, 102.0, 102.5, 103.0, 103.1, 103.9)
    output.write_text("".join(f'[{at}, {device}, "power_w", 1.0]\n' for at in times for device in (1, 3)))

    @contextmanager
    def sampling(ordinals, path):
        yield samplers.Series(output, 0, None)

    steps = tuple(Step(1.0, warmup, end_s) for warmup, end_s in ((True, 101.0), (False, 102.0), (False, 103.0)))
    monkeypatch.setattr(samplers, "sampling", sampling)
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {"steps": steps}))
    case = Case(model="m", strategy="single", batch_size=8, device_kind="cuda", device_ids=(3,))
    (trial,) = store.trials(run([case], store, rounds=1).run_id)
    assert [(one.time_s, one.device) for one in trial.samples] == [(at, 0) for at in times if 101.0 <= at <= 103.0]


# -- a busy machine


@pytest.fixture
def crowded(quick, monkeypatch):
    """Have others use the cores during the trials of these numbers, counted from the first on."""
    numbers: set[int] = set()
    began = []

    def since(before):
        began.append(before)
        return BUSY if len(began) - 1 in numbers else QUIET

    monkeypatch.setattr(foreign_load, "since", since)
    monkeypatch.setattr(Server, "act", staticmethod(lambda case, effort: {"verified": Verified.BITWISE}))
    return numbers


def measured(outcome, store):
    """Return how many trials the run has, how many of them count, and the reasons to call it noisy."""
    (found,) = [one for one in store.runs() if one.id == outcome.run_id]
    every = store.trials(outcome.run_id, superseded=True)
    return len(every), len(store.trials(outcome.run_id)), found.provenance["noisy"]


def test_a_trial_beside_others_is_measured_once_more_at_the_end_and_that_one_counts(store, crowded):
    crowded.update({1, 4})
    heard = []
    outcome = run(CASES[:3], store, rounds=2, patience_s=1, listen=heard.append)
    assert measured(outcome, store) == (8, 6, {})
    every = store.trials(outcome.run_id, superseded=True)
    assert [(one.case, one.round) for one in every[6:]] == [(every[i].case, every[i].round) for i in (1, 4)]
    assert set(slots(store.trials(outcome.run_id)).values()) == {1}
    assert every[1] not in store.trials(outcome.run_id)
    assert outcome.counts == {Status.OK: 6}
    assert [event.done for event in heard if isinstance(event, Ended)] == [*range(1, 9)]


def test_a_trial_that_is_noisy_again_is_kept_and_labelled_and_not_measured_a_third_time(store, crowded):
    crowded.update({1, 6})
    outcome = run(CASES[:3], store, rounds=2, patience_s=1)
    assert measured(outcome, store) == (7, 6, {"during": "1 trial(s) ran under too much foreign load"})
    content = showing.report_of(store.runs()[0], store.trials(outcome.run_id))
    assert content.verdict.endswith("NOISY: 1 trial(s) ran under too much foreign load.")
    assert ["NOISY" in row.labels for row in content.rows].count(True) == 1


def test_without_patience_noisy_trials_are_labelled_and_not_repeated(store, crowded):
    crowded.update({1, 4})
    outcome = run(CASES[:3], store, rounds=2, patience_s=0)
    assert measured(outcome, store) == (6, 6, {"during": "2 trial(s) ran under too much foreign load"})


def test_when_the_budget_is_spent_nothing_is_repeated(store, crowded, monkeypatch):
    crowded.update({0, 1, 2})
    monkeypatch.setattr(module._Session, "_spent", lambda self: len(self._times) >= 3)
    outcome = run(CASES[:3], store, rounds=1, patience_s=1, budget_s=1000)
    assert measured(outcome, store) == (3, 3, {"during": "3 trial(s) ran under too much foreign load"})


def test_a_repeat_that_fails_replaces_nothing(store, crowded, monkeypatch):
    crowded.add(0)
    done = []

    def act(case, effort):
        done.append(case)
        return {"status": Status.FAILED} if len(done) == 4 else {"verified": Verified.BITWISE}

    monkeypatch.setattr(Server, "act", staticmethod(act))
    outcome = run(CASES[:3], store, rounds=1, patience_s=1)
    assert measured(outcome, store) == (4, 3, {"during": "1 trial(s) ran under too much foreign load"})
    assert outcome.counts == {Status.OK: 3}


def test_a_resumed_run_repeats_what_the_earlier_session_found_noisy(store, crowded, monkeypatch):
    crowded.update({0, 1})
    calm, done = Server.act, []

    def act(case, effort):
        done.append(case)
        if len(done) == 3:
            raise KeyboardInterrupt
        return calm(case, effort)

    monkeypatch.setattr(Server, "act", staticmethod(act))
    with pytest.raises(KeyboardInterrupt):
        run(CASES[:3], store, rounds=1, patience_s=1)
    outcome = run(CASES[:3], store, rounds=1, patience_s=1)
    assert outcome.resumed
    assert measured(outcome, store) == (5, 3, {})


def test_what_was_noisy_twice_is_not_repeated_when_the_run_is_opened_again(store, crowded):
    crowded.update({0, 3})
    first = run(CASES[:3], store, rounds=1, patience_s=1)
    again = run(CASES[:3], store, rounds=1, patience_s=1, retry=["failed"])
    assert (again.run_id, again.resumed) == (first.run_id, True)
    assert measured(again, store) == (4, 3, {"during": "1 trial(s) ran under too much foreign load"})


def test_repeats_end_with_the_budget(store, crowded, monkeypatch):
    crowded.update({0, 1, 2})
    monkeypatch.setattr(module._Session, "_spent", lambda self: self._times.total() >= 4)
    outcome = run(CASES[:3], store, rounds=1, patience_s=1, budget_s=1000)
    assert measured(outcome, store) == (4, 3, {"during": "2 trial(s) ran under too much foreign load"})


def test_side_by_side_the_whole_group_is_measured_again(store, crowded, monkeypatch):
    """Their ratio needs both from one process."""
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
    assert note.text.startswith("busy machine: other processes took 50%")
    assert measured(outcome, store) == (1, 1, {})
    monkeypatch.setattr(foreign_load, "measure", lambda: BUSY)
    outcome = run(CASES[:1], store, rounds=1, patience_s=0)
    assert list(measured(outcome, store)[2]) == ["before"]
    content = showing.report_of(store.runs()[0], store.trials(outcome.run_id))
    assert "NOISY: other processes took 50%" in content.verdict


@pytest.mark.usefixtures("quick")
def test_a_load_that_cannot_be_told_is_not_called_quiet(store, monkeypatch):
    monkeypatch.setattr(foreign_load, "measure", lambda: UnknownLoad("no counts here"))
    outcome = run(CASES[:1], store, rounds=1)
    content = showing.report_of(store.runs()[0], store.trials(outcome.run_id))
    assert "it is unknown whether other processes used the cores: no counts here" in content.warnings
    assert "NOISY" not in content.verdict


# -- models that fail their check


def refuse(model):
    return lambda case: {"status": Status.FAILED, "reason": "planted\nmore"} if case.model == model else {}


@pytest.mark.usefixtures("quick")
def test_a_model_that_fails_its_check_is_told_once_and_stored_once_a_case_while_the_others_are_measured(
    store, monkeypatch
):
    monkeypatch.setattr(Server, "verdict", staticmethod(refuse("bad")))
    cases = [
        Case(model=model, strategy=strategy, batch_size=size, devices=devices)
        for model in ("bad", "good") for strategy, devices in (("single", 1), ("ddp", 2)) for size in (8, 32)
    ]  # fmt: skip
    heard = []
    outcome = run(cases, store, rounds=3, listen=heard.append)
    trials = store.trials(outcome.run_id)
    assert Counter((one.case.model, one.round, one.status) for one in trials) == {
        ("bad", 0, Status.FAILED): 4, ("good", 0, Status.OK): 4, ("good", 1, Status.OK): 4, ("good", 2, Status.OK): 4,
    }  # fmt: skip
    assert all("planted" in one.reason for one in trials if one.case.model == "bad")
    assert [event.text for event in heard if isinstance(event, Note)] == [
        "bad (small) failed its check (failed), so its 4 case(s) will not be measured: planted"
    ]
    ended = [event for event in heard if isinstance(event, Ended)]
    assert (ended[0].done, ended[0].total, ended[-1].done, ended[-1].total) == (1, 12, 12, 12)
    assert sorted((case.model, case.strategy, case.devices, case.batch_size) for case in Server.checked) == [
        ("bad", "single", 1, 32), ("good", "single", 1, 32),
    ]  # fmt: skip
    assert all(case.batch_size >= 1 and case.devices == 1 for case in Server.checked)
    assert store.runs()[0].status == "finished"


@pytest.mark.usefixtures("quick")
def test_the_check_of_a_model_takes_nothing_of_the_budget(store, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def check(case):
        now[0] += 10
        return {}

    monkeypatch.setattr(Server, "verdict", staticmethod(check))
    outcome = run(CASES[:2], store, rounds=1, budget_s=1.0)
    assert len(Server.checked) == 2
    assert outcome.counts == {Status.OK: 2}


@pytest.mark.usefixtures("quick")
def test_where_no_model_passes_nothing_is_measured(store, monkeypatch):
    monkeypatch.setattr(Server, "verdict", staticmethod(refuse("m0")))
    outcome = run(CASES[:1], store, rounds=3)
    assert outcome.counts == {Status.FAILED: 1}
    assert [server.asked for server in Server.made] == [[]]


@pytest.mark.usefixtures("quick")
def test_a_model_that_failed_its_check_is_measured_when_it_is_retried_and_passes(store, monkeypatch):
    monkeypatch.setattr(Server, "verdict", staticmethod(refuse("m0")))
    run(CASES[:2], store, rounds=2)
    monkeypatch.setattr(Server, "verdict", staticmethod(lambda case: {}))
    outcome = run(CASES[:2], store, rounds=2, retry=["failed"])
    assert outcome.counts == {Status.OK: 4}


@pytest.mark.parametrize(
    "name",
    [
        "measure.run", "records.plan", "store", "measure.server", "hardware.provenance", "cli.progress", "cli",
        "hardware.foreign_load", "measure.preflight",
    ],
)  # fmt: skip
def test_the_parent_of_the_workers_never_loads_torch(name):
    code = f"import sys, dpbench.{name}; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=commands.ROOT, check=False).returncode == 0


# -- for real


@pytest.fixture
def folder(tmp_path):
    with commands.folder(tmp_path) as folder:
        yield folder


@pytest.mark.slow
def test_however_it_is_ended_the_same_command_completes_the_run_without_repeating_a_trial(folder):
    """Five cases, two rounds; the command is ended in four ways, after each of them two trials or more further on."""
    command = (*ONLY_MLP, "--rounds", "2", "--store", "acceptance.db")
    folder.store = folder.path / "acceptance.db"
    expected = {"interrupt": 130, "terminate": None, "kill": -9, "kill group": -9}
    kept: list[tuple] = []
    for goal, (how, code) in zip((1, 3, 5, 7), expected.items(), strict=True):
        process = folder.start(*command)
        assert folder.wait_for(process, goal), folder.err
        ended = commands.end(process, how)
        assert folder.mark.settles(0) == "", f"{how}: these have outlived the command"
        rows = folder.final()
        assert rows[: len(kept)] == kept, "what was final has changed"
        kept = rows
        assert ended == code if code is not None else ended != 0
        if how == "interrupt":
            assert "same command" in folder.err
            assert "Traceback" not in folder.err
    left = set(folder.temporary.iterdir())
    done = folder.do(*command)
    assert done.returncode == 0, done.stderr
    assert f"{len(kept)} of 10 trials are done" in done.stderr
    assert folder.final()[: len(kept)] == kept
    assert set(folder.temporary.iterdir()) <= left, "a run that finishes leaves no temporary file"
    assert folder.mark.settles(0) == ""
    with Store.read(folder.store) as store:
        (found,) = store.runs()
        trials = store.trials(found.id)
    assert found.status == "finished"
    assert len({trial.case for trial in trials}) == 5
    assert {trial.round for trial in trials} == {0, 1}
    assert set(slots(trials).values()) == {1}
    assert len(trials) == 10
    assert {trial.status for trial in trials} == {Status.OK}
    assert {trial.verified for trial in trials} <= {"bitwise", "within_tolerance"}
    assert folder.query("SELECT count(*) FROM trial WHERE status='killed'")[0][0] <= 4
    assert folder.query("PRAGMA integrity_check") == [("ok",)]


@pytest.mark.parametrize("how", ["interrupt group", "terminate", "kill", "kill group"])
def test_ranks_that_hang_do_not_outlive_the_command(folder, how):
    process = folder.start("run", "--model", "tests.hungry:STUBBORN_IN_RANK_1", "--strategies", "ddp", "--devices", "2")
    # the command, its sampler, the server, the worker, two ranks
    commands.poll(lambda: len(folder.mark.alive()) >= 6, 30)
    assert len(folder.mark.alive()) >= 6, folder.err
    time.sleep(0.5)  # so that the ranks are at work
    code = commands.end(process, how)
    assert folder.mark.settles(0) == ""
    assert code == 130 if "interrupt" in how else code != 0
    if "kill" not in how:
        assert list(folder.temporary.iterdir()) == [], "a temporary folder is left behind"


def test_a_second_command_for_the_same_run_is_refused_and_the_first_goes_on(folder):
    command = ("run", "--models", "mlp", "--strategies", "single", "--batch-sizes", "8", "--rounds", "1")
    first = folder.start(*command)
    assert folder.wait_for(first, 0)
    first.send_signal(signal.SIGSTOP)  # or it might finish before the second one has begun
    second = subprocess.run(
        [*commands.COMMAND, *command], cwd=folder.path, env=folder.env, capture_output=True, text=True, check=False
    )
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert second.stdout == ""
    assert second.stderr.startswith("error: ")
    assert str(first.pid) in second.stderr
    assert second.stderr.count("\n") == 1
    assert first.wait(60) == 0, folder.err
    assert len(folder.final()) == 1
