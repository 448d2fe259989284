"""Rounds until a speed-up is known: cases that get more, a run's end, paired measurements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dpbench.analysis import stats, summary
from dpbench.analysis.stats import LOOKS
from dpbench.measure import selection
from dpbench.measure.stopping import Stopping, UntilDecided
from dpbench.records import Case, Effort, Status, Trial, Verified, plan
from tests.amounts import amounts
from tests.runs import bare
from tests.trials import trial_of

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
DP = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=64)
DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=64)


def trial(case: Case, number: int, seconds: float, **rest) -> Trial:
    return trial_of(case, [seconds] * 10, round=number, **rest)


def fed(
    rounds: int, speeds: dict[Case, float], spread: float = 0.01, seed: int = 0
) -> UntilDecided:
    """Return the rule after some rounds; `speeds` are true speed-ups, with noise of `spread`."""
    generator = np.random.default_rng(seed)
    rule = UntilDecided()
    for number in range(rounds):
        for case, speed in speeds.items():
            noise = float(np.exp(spread * generator.standard_normal()))
            rule.add(trial(case, number, noise / speed))
    return rule


def test_everything_is_measured_in_the_first_rounds() -> None:
    rule = UntilDecided()
    assert all(rule.wanted([SINGLE, DP], number) == [SINGLE, DP] for number in range(rule.least))


def test_a_settled_answer_gets_no_further_round() -> None:
    speeds = {SINGLE: 1.0, DP: 0.5, DDP: 1.8}
    assert fed(LOOKS[0], speeds).wanted([*speeds], LOOKS[0]) == []


def test_only_the_cases_of_an_open_answer_go_on_and_its_baseline_with_them() -> None:
    other = replace(SINGLE, model="resnet18")
    other_ddp = replace(DDP, model="resnet18")
    rule = fed(LOOKS[0], {SINGLE: 1.0, DP: 0.5, DDP: 1.05, other: 1.0, other_ddp: 1.9}, 0.02)
    assert rule.wanted([other_ddp, DDP, other, DP, SINGLE], LOOKS[0]) == [DDP, SINGLE]


def test_a_rival_of_the_recommended_case_goes_on() -> None:
    rule = fed(LOOKS[0], {SINGLE: 1.0, DP: 1.5, DDP: 1.52}, 0.03)
    assert set(rule.wanted([SINGLE, DP, DDP], LOOKS[0])) == {SINGLE, DP, DDP}


def test_between_two_looks_the_cases_stay_the_same() -> None:
    """A look is another chance of a wrong verdict, and the intervals allow for these looks only."""
    speeds = {SINGLE: 1.0, DDP: 1.05}
    rule = fed(LOOKS[0], speeds, 0.1)
    assert rule.wanted([*speeds], LOOKS[0]) == [*speeds]
    for number in range(100, 200):
        for case, speed in {SINGLE: 1.0, DDP: 3.0}.items():
            rule.add(trial(case, number, 1 / speed))
    assert rule.unsettled() == frozenset()
    assert rule.wanted([*speeds], LOOKS[1] - 1) == [*speeds]
    assert rule.wanted([*speeds], LOOKS[1]) == []


def test_no_case_is_measured_after_the_last_look() -> None:
    speeds = {SINGLE: 1.0, DDP: 1.05}
    rule = fed(LOOKS[0], speeds, 0.2)
    assert rule.wanted([*speeds], LOOKS[0])
    assert rule.wanted([*speeds], LOOKS[-1]) == []
    assert rule.unsettled() == {*speeds}


def test_without_a_baseline_nothing_can_be_settled() -> None:
    assert fed(LOOKS[0], {DP: 1.0}, 0.2).wanted([DP], LOOKS[0]) == []


def test_failed_and_unverified_trials_ask_for_no_more_rounds() -> None:
    rule = fed(LOOKS[0], {SINGLE: 1.0})
    for number in range(LOOKS[0]):
        rule.add(Trial(case=DP, round=number, status=Status.OOM))
        rule.add(trial(DDP, number, 1.0 + number, verified=Verified.NO))
    assert rule.wanted([SINGLE, DP, DDP], LOOKS[0]) == []


def test_the_looks_widen_the_intervals_that_decide() -> None:
    """All intervals of all looks hold together, and the trials carry how many looks there are."""
    trials = [
        trial(case, number, 1.0 + 0.1 * number, provenance=provenance)
        for provenance in ({}, {"looks": len(LOOKS)})
        for number in range(4)
        for case in (SINGLE, DP, DDP)
    ]
    (plain, looked) = (
        next(row.speedup for row in summary.rows(half) if row.case == DDP)
        for half in (trials[:12], trials[12:])
    )
    assert plain.level == stats.joint_level(2)
    assert looked.level == stats.joint_level(2 * len(LOOKS))


def test_an_open_number_of_rounds_is_another_plan() -> None:
    assert plan.plan_hash([DP], UntilDecided.name) != plan.plan_hash([DP], UntilDecided.least)
    assert plan.plan_hash([DP], 3) != plan.plan_hash([DP], 3, "paired")


def test_side_by_side_are_cases_of_one_model_that_start_no_processes() -> None:
    other = Case(model="resnet18", strategy="dp", schedule="reference", devices=2, batch_size=64)
    mine, variant = (
        Case(model=f"net:{name}", strategy="single", batch_size=8) for name in ("old", "new")
    )
    groups = plan.side_by_side([DP, other, DDP, mine, SINGLE, variant])
    assert groups == [(DP, SINGLE), (other,), (DDP,), (mine, variant)]


def test_strategies_with_processes_or_threads_of_their_own_are_known_to_the_plan() -> None:
    from dpbench.records import registry

    for name in registry.names("strategies"):
        traits = registry.traits(name)
        assert traits.alone == (name in ("ddp", "fsdp", "single_all_cores")), name


@pytest.mark.slow
@pytest.mark.usefixtures("one_server")
def test_side_by_side_for_real(tmp_path) -> None:
    """Both sides' blocks alternate in one process, and each side's trial is whole."""
    from dpbench.store import Store
    from tests.runs import run

    cases = [SINGLE, DP]
    with Store.create(tmp_path / "s.db") as store:
        done = run(
            cases,
            store,
            rounds=2,
            paired=True,
            effort=bare(Effort(budget_s=0.2, min_steps=20, max_steps=40)),
        )
        trials = store.trials(done.run_id)
    assert {(t.case, t.round) for t in trials} == {
        (case, number) for case in cases for number in range(2)
    }
    for number in range(2):
        ours = [t for t in trials if t.round == number]
        assert all(t.status is Status.OK and t.verified is Verified.BITWISE for t in ours), [
            t.reason for t in ours
        ]
        order = sorted((step.end_s, t.case.strategy) for t in ours for step in t.steps)
        changes = sum(a[1] != b[1] for a, b in itertools.pairwise(order))
        assert changes >= 3, "their blocks took turns"
        assert all(t.spans and t.steps[0].warmup and not t.memory for t in ours)


def test_side_by_side_one_that_cannot_run_or_is_wrong_leaves_the_others_alone(
    tmp_path, monkeypatch
) -> None:
    from dpbench.measure.worker import trial

    torch_dp = replace(DP, strategy="torch_dp", schedule="")
    small = bare(Effort(budget_s=0.05, min_steps=5, max_steps=10))
    done = trial.run_together([SINGLE, torch_dp, DP], small, tmp_path)
    assert [t.case for t in done] == [SINGLE, torch_dp, DP]
    assert [t.status for t in done] == [Status.OK, Status.SKIPPED, Status.OK]
    assert "needs an accelerator" in done[1].reason

    verify = trial._verify

    def wrong(case, *rest, **named):
        if case == DP:
            raise trial.Unverified(
                "the case was not timed, because its gradients or buffers are wrong: fc1"
            )
        return verify(case, *rest, **named)

    monkeypatch.setattr(trial, "_verify", wrong)
    done = trial.run_together([DP, SINGLE], small, tmp_path)
    assert [(t.status, t.verified) for t in done] == [
        (Status.FAILED, Verified.NO),
        (Status.OK, Verified.BITWISE),
    ]


def test_side_by_side_an_error_in_a_step_ends_all_and_says_so(tmp_path, monkeypatch) -> None:
    from dpbench.measure.worker import bench, trial

    def broken(self):
        raise RuntimeError("planted")

    monkeypatch.setattr(bench.CaseTimer, "block", broken)
    done = trial.run_together(
        [SINGLE, DP], bare(Effort(budget_s=0.05, min_steps=5, max_steps=10)), tmp_path
    )
    assert [t.status for t in done] == [Status.FAILED, Status.FAILED]
    for trial_ in done:
        assert "planted" in trial_.reason
        assert amounts(trial_.reason)[-1] == "1", "the other case failed too"


@pytest.mark.parametrize(
    ("second_s", "told", "slow"),
    [
        ({"single": 0.01, "dp": 0.01}, None, False),
        ({"single": 0.01, "dp": 9.0}, None, True),
        ({"single": 9.0, "dp": 9.0}, False, False),
        ({"single": 0.01, "dp": 0.01}, True, True),
    ],
)
def test_the_second_step_decides_whether_all_cases_of_a_worker_are_slow(
    tmp_path, monkeypatch, second_s, told, slow
) -> None:
    from dpbench.measure.worker import bench, trial

    original = bench.CaseTimer._block

    def planted(self, steps):
        original(self, steps)
        return 9.0 if self._taken == 1 else second_s[self._prepared.case.strategy]

    monkeypatch.setattr(bench.CaseTimer, "_block", planted)
    effort = bare(Effort(budget_s=0.0, min_steps=8, max_steps=40, slow=told))
    done = trial.run_together([SINGLE, DP], effort, tmp_path)
    assert [(t.status, t.facts.slow) for t in done] == [(Status.OK, slow)] * 2
    assert {len(t.timed) >= 8 for t in done} == {not slow}


def test_timed_steps_last_for_their_least_time_whatever_the_budget_is(tmp_path) -> None:
    from dpbench.measure.worker import trial

    effort = bare(Effort(budget_s=0.0, min_steps=3, max_steps=100_000, least_s=0.2))
    (done,) = trial.run_together([SINGLE], effort, tmp_path)
    assert done.status is Status.OK, done.reason
    assert sum(done.timed) >= 0.2


@pytest.mark.parametrize(
    ("rounds", "kind", "seconds"),
    [("auto", "cpu", selection.SHORT_S), (5, "cpu", 1.5), ("auto", "cuda", 1.5)],
)
def test_a_run_on_a_cpu_that_ends_when_it_is_settled_has_short_trials(
    rounds: int | str, kind: str, seconds: float
) -> None:
    cases = [replace(case, device_kind=kind) for case in (SINGLE, DDP)]
    assert selection.effort_of(cases, auto=rounds == "auto").budget_s == seconds


def test_a_series_that_begins_anew_has_not_ended() -> None:
    rule = Stopping(budget_s=1e9, min_steps=6, max_steps=6)
    for _ in range(6):
        rule.add(1.0)
    assert rule.finished()
    rule.restart()
    assert not rule.finished()
    assert rule.reason == ""
    assert rule.warmup == 6
