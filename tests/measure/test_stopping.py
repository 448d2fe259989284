"""Rounds until a speed-up is known: cases that get more, a run's end, paired measurements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dpbench.measure.stopping import UntilPrecise, shortage
from dpbench.records import Case, Status, Trial, Verified, plan
from tests.trials import trial_of

SINGLE = Case(model="mlp", strategy="single", batch_size=64)
DP = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=64)
DDP = Case(model="mlp", strategy="ddp", devices=2, batch_size=64)


def trial(case: Case, number: int, seconds: float, **rest) -> Trial:
    return trial_of(case, [seconds] * 10, round=number, **rest)


def fed(rule: UntilPrecise, rounds: int, spread: dict[Case, float], seed: int = 0) -> UntilPrecise:
    generator = np.random.default_rng(seed)
    for number in range(rounds):
        for case, noise in spread.items():
            rule.add(trial(case, number, float(np.exp(noise * generator.standard_normal()))))
    return rule


def test_everything_is_measured_in_the_first_rounds() -> None:
    rule = UntilPrecise(least=3)
    assert all(rule.wanted([SINGLE, DP], number) == [SINGLE, DP] for number in range(3))


def test_only_what_is_not_precise_goes_on_and_its_baseline_with_it() -> None:
    rule = fed(UntilPrecise(), 5, {SINGLE: 0.0, DP: 0.2, DDP: 0.001})
    assert rule.wanted([DDP, DP, SINGLE], 5) == [DP, SINGLE]
    reasons = rule.reasons([DDP, DP, SINGLE])
    assert reasons[DDP.label].startswith("precise: speed-up known to within 0.")
    assert reasons[DP.label].startswith("budget: speed-up known to within ")
    assert "after 5 rounds, undecided" in reasons[DP.label]
    assert SINGLE.label not in reasons, "a baseline is not judged"


def test_nothing_is_wanted_when_all_is_precise_or_the_most_rounds_are_reached() -> None:
    assert fed(UntilPrecise(), 4, {SINGLE: 0.0, DP: 0.0001}).wanted([SINGLE, DP], 4) == []
    rule = fed(UntilPrecise(most=4), 4, {SINGLE: 0.0, DP: 0.5})
    assert rule.wanted([SINGLE, DP], 4) == []
    assert rule.reasons([SINGLE, DP])[DP.label].startswith("rounds: ")


def test_rounds_end_when_the_interval_is_as_narrow_as_was_asked() -> None:
    """The count of rounds follows the noise, (1.96 x spread / precision)^2, and is enough."""
    counts = {}
    for noise in (0.01, 0.03):
        rule, number = UntilPrecise(precision=0.02, most=500), 0
        generator = np.random.default_rng(3)
        while rule.wanted([SINGLE, DP], number):
            rule.add(trial(SINGLE, number, 1.0))
            rule.add(trial(DP, number, float(np.exp(noise * generator.standard_normal()))))
            number += 1
        counts[noise] = number
        assert rule.reasons([SINGLE, DP])[DP.label].startswith("precise: speed-up known to within ")
    assert 3 <= counts[0.01] <= 8
    assert 6 <= counts[0.03] <= 25


def test_without_a_baseline_the_step_itself_must_be_precise() -> None:
    rule = fed(UntilPrecise(), 5, {DP: 0.2})
    assert rule.wanted([DP], 5) == [DP]
    assert rule.reasons([DP])[DP.label].startswith("budget: step time known to within ")
    assert fed(UntilPrecise(), 5, {DP: 0.0}).wanted([DP], 5) == []


def test_failed_and_unverified_trials_ask_for_no_more_rounds() -> None:
    rule = fed(UntilPrecise(), 5, {SINGLE: 0.0})
    for number in range(5):
        rule.add(Trial(case=DP, round=number, status=Status.OOM))
        rule.add(trial(DDP, number, 1.0 + number, verified=Verified.NO))
    assert rule.wanted([SINGLE, DP, DDP], 5) == []


def test_another_precision_is_another_plan() -> None:
    assert plan.plan_hash([DP], UntilPrecise(0.01).name) != plan.plan_hash(
        [DP], UntilPrecise(0.02).name
    )
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
    from dpbench.measure.run import run
    from dpbench.records import Effort
    from dpbench.store import Store

    cases = [SINGLE, DP]
    with Store.create(tmp_path / "s.db") as store:
        done = run(
            cases,
            store,
            rounds=2,
            paired=True,
            effort=Effort(budget_s=0.2, min_steps=20, max_steps=40),
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
    from dpbench.records import Effort

    torch_dp = replace(DP, strategy="torch_dp", schedule="")
    small = Effort(budget_s=0.05, min_steps=5, max_steps=10)
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
    from dpbench.records import Effort

    def broken(self):
        raise RuntimeError("planted")

    monkeypatch.setattr(bench.CaseTimer, "block", broken)
    done = trial.run_together(
        [SINGLE, DP], Effort(budget_s=0.05, min_steps=5, max_steps=10), tmp_path
    )
    assert [t.status for t in done] == [Status.FAILED, Status.FAILED]
    assert all("planted" in t.reason and "other cases that failed too: 1" in t.reason for t in done)


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
    from dpbench.records import Effort

    original = bench.CaseTimer._block

    def planted(self, steps):
        original(self, steps)
        return 9.0 if self._taken == 1 else second_s[self._prepared.case.strategy]

    monkeypatch.setattr(bench.CaseTimer, "_block", planted)
    effort = Effort(budget_s=0.0, min_steps=8, max_steps=40, slow=told)
    done = trial.run_together([SINGLE, DP], effort, tmp_path)
    assert [(t.status, t.slow) for t in done] == [(Status.OK, slow)] * 2
    assert {len(t.timed) >= 8 for t in done} == {not slow}


def test_a_budget_that_cannot_hold_the_trials_is_said_after_the_first_round() -> None:
    assert shortage(100.0, 52, 1.8) == ""
    assert shortage(float("inf"), 10_000, 5.0) == ""
    assert shortage(-0.1, 0, 1.8) == "", "the last trial has spent the budget"
    said = shortage(93.0, 52, 1.8)
    assert "52 more trials would take" in said
    assert "96.2 s" in said
    assert "but 93.0 s of the budget is left" in said
    assert "--budget" in said
