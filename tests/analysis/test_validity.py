"""Validity on trials made by hand: each check at its limit, its wording, no guess without data."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

# scipy.stats is imported at its first use: each process of the suite collects this file
import scipy

from dpbench.analysis import statements, summary, validity
from dpbench.records import HOST, Case, Phase, Sample, Source, Status, Trial, Verified, disturbance
from dpbench.records.facts import RunFacts
from tests.amounts import amounts
from tests.trials import trial_of

CASE = Case(model="mlp", strategy="dp", schedule="reference", batch_size=64, devices=2)
GPU = replace(CASE, device_kind="cuda")


def trial(
    seconds: list[float] | None = None,
    *,
    of: Case = CASE,
    covered: float = 1.0,
    metrics: dict[Any, Any] | None = None,
    **changed: Any,
) -> Trial:
    """Return a trial of these steps with this part of each in a phase.

    `metrics` maps (metric, device) to readings.
    """
    made = trial_of(
        of,
        [9.0, *(seconds or [0.1] * 20)],
        warmup=1,
        begin_s=91.0,
        parts=[(Phase.FORWARD, 0, 0.0, covered)],
    )
    timed_s = made.steps[-1].end_s - 100.0
    samples = tuple(
        Sample(100.0 + timed_s * (i + 1) / (len(readings) + 1), device, metric, value)
        for (metric, device), readings in (metrics or {}).items()
        for i, value in enumerate(readings)
    )
    return replace(made, **{"samples": samples} | changed)


def checks(one: Trial, cores: int = 8) -> dict[str, validity.Check]:
    return {check.key: check for check in validity.check(one, cores)}


def bad(one: Trial, cores: int = 8) -> set[str]:
    return {name for name, check in checks(one, cores).items() if not check.ok}


def test_a_sound_trial_has_nothing_wrong_and_no_check_without_data() -> None:
    assert bad(trial()) == set()
    assert set(checks(trial())) == {"verification", "closure", "drift", "oversubscribed"}


def test_gradients_that_average_the_losses_of_ranks_are_a_caveat_with_the_measured_difference() -> (
    None
):
    one = trial(provenance={"averaging": {"low": 0.02, "high": 0.131, "rows": 7}})
    assert bad(one) == {"averaging"}
    ((_, said),) = validity.troubles([one], 8).items()
    assert {case: amounts(detail) for case, detail in said.items()} == {CASE: ["2.0%", "13%", "7"]}


def drifting(change: float, noise: float = 0.0, steps: int = 40) -> list[float]:
    draw = random.Random(7)
    return [
        0.1 * (1 + change * (i / (steps - 1) - 0.5)) + draw.gauss(0, noise) for i in range(steps)
    ]


@pytest.mark.parametrize(
    ("change", "found"), [(0.0, False), (0.04, False), (0.06, True), (-0.04, False), (-0.06, True)]
)
def test_drift_is_a_trend_of_more_than_five_percent_of_either_sign(
    change: float, found: bool
) -> None:
    one = checks(trial(drifting(change)))["drift"]
    assert one.ok is not found
    assert one.value == pytest.approx(change, abs=0.002)
    assert one.about["steps"] == 40


def test_a_trend_that_chance_explains_is_none() -> None:
    rising = [0.10, 0.13, 0.09, 0.12, 0.11, 0.14, 0.10, 0.13, 0.11, 0.12]
    one = checks(trial(rising))["drift"]
    assert abs(one.value) > one.limit
    assert one.about["p"] > validity.SIGNIFICANT
    assert one.ok


def test_one_outlier_is_no_drift() -> None:
    assert "drift" not in bad(trial([*drifting(0.0, 0.0005), 5.0]))


def test_few_steps_have_no_trend() -> None:
    assert "drift" not in checks(trial(drifting(0.5, steps=9)))


@pytest.mark.parametrize(
    ("bits", "found", "cause"),
    [
        ([0] * 20, False, ""),
        ([0x1, 0x2, 0x100] * 7, False, ""),  # idle, clocks that somebody set: no slowdown
        ([0x4] + [0] * 19, False, ""),
        ([0x4] * 2 + [0] * 18, True, "power cap"),
        ([0x44] * 20, True, "power cap and heat (hardware)"),
    ],
)
def test_throttling_is_more_than_a_twentieth_of_the_readings(
    bits: list[int], found: bool, cause: str
) -> None:
    one = trial(of=GPU, metrics={("throttle_reasons", 0): [0] * 20, ("throttle_reasons", 1): bits})
    assert ("throttling" in bad(one)) is found
    if found:
        ((_, said),) = validity.troubles([one], 8).items()
        assert cause in said[GPU]
        assert "on GPU 1" in said[GPU]


@pytest.mark.parametrize(
    ("metric", "device", "name"),
    [("sm_clock_hz", 1, "gpu_clock"), ("cpu_clock_hz", HOST, "cpu_clock")],
)
@pytest.mark.parametrize(
    ("low", "found"), [([1.81e9] * 3, False), ([1.79e9] * 3, True), ([1.0e9], False), ([], False)]
)
def test_a_clock_changed_when_it_fell_by_a_tenth_for_more_than_a_moment(
    metric: str, device: int, name: str, low: list[float], found: bool
) -> None:
    one = trial(metrics={(metric, device): [2.0e9] * 27 + low})
    assert (name in bad(one)) is found


def test_a_clock_that_was_read_twice_says_nothing() -> None:
    assert "cpu_clock" not in checks(trial(metrics={("cpu_clock_hz", HOST): [2.0e9, 1.0e9]}))


@pytest.mark.parametrize(
    ("held", "found"), [([0.0] * 5, False), ([0, 0, 9.0, 0, 0], False), ([2.0**20] * 5, True)]
)
def test_other_processes_on_a_gpu_count_when_they_stay(held: list[float], found: bool) -> None:
    one = trial(of=GPU, metrics={("foreign_memory_bytes", 0): held})
    assert ("foreign_gpu" in bad(one)) is found


def beside(foreign: float, steal: float = 0.0, cores: int = 4) -> dict[str, Any]:
    """Return the provenance of a trial during which others took these shares of the cores."""
    return {"foreign_load": {"foreign": foreign, "steal": steal, "cores": cores, "seconds": 2.0}}


@pytest.mark.parametrize(
    ("foreign", "steal", "found"),
    [(0.1, 0.0, False), (0.11, 0.0, True), (0.06, 0.05, True), (0.0, 0.11, True)],
)
def test_what_others_take_of_the_cores_counts_from_a_tenth_of_them(
    foreign: float, steal: float, found: bool
) -> None:
    one = trial(provenance=beside(foreign, steal))
    assert ("foreign_cpu" in bad(one)) is found
    assert disturbance.noisy(one) is found
    assert checks(one)["foreign_cpu"].value == pytest.approx((foreign + steal) * 4)
    assert checks(one)["foreign_cpu"].limit == pytest.approx(0.4)


def test_a_trial_whose_foreign_load_is_unknown_is_not_called_quiet() -> None:
    assert "foreign_cpu" not in checks(trial())
    assert not disturbance.noisy(trial())


def test_a_case_with_a_noisy_round_is_labelled_in_its_row() -> None:
    rounds = [
        trial(round=number, provenance=beside(foreign))
        for number, foreign in enumerate([0.0, 0.5, 0.0])
    ]
    (row,) = summary.rows(rounds)
    assert row.labels == ("MEASURED", "CPU-ONLY", "NOISY")
    (row,) = summary.rows([rounds[0], rounds[2]])
    assert "NOISY" not in row.labels


def test_facts_that_an_older_dpbench_stored_are_said_as_they_were() -> None:
    older = {"foreign_cpu": {"value": 0.7, "limit": 0.1, "ok": False, "cores": 2}}
    one = trial(provenance={"validity": older})
    assert next(iter(validity.troubles([one], 2).values())) == {CASE: "0.7 of 2 cores"}


def test_a_short_trial_tells_nothing_of_other_processes_on_a_gpu() -> None:
    readings = {("foreign_memory_bytes", 0): [2.0**30]}
    assert "foreign_gpu" not in checks(trial([0.05] * 19, of=GPU, metrics=readings))


@pytest.mark.parametrize(
    ("of", "cores", "found"),
    [
        (CASE, 2, False),
        (CASE, 1, True),
        (CASE, 0, False),
        (GPU, 1, False),
        (replace(CASE, devices=8, batch_size=5), 4, True),
        (replace(CASE, device_kind="emulated"), 1, False),
    ],
)
def test_each_logical_cpu_device_needs_a_core_and_other_devices_need_none(
    of: Case, cores: int, found: bool
) -> None:
    assert ("oversubscribed" in bad(trial(of=of), cores)) is found


@pytest.mark.parametrize(("pairs", "found"), [(None, None), ([], True), ([[0, 1]], False)])
def test_peer_access_is_told_where_the_worker_asked(pairs: Any, found: bool | None) -> None:
    one = checks(trial(of=GPU, provenance={"no_peer_access": pairs})).get("peer_access")
    assert (one.ok if one else None) is found


@pytest.mark.parametrize(("covered", "found"), [(0.951, False), (0.949, True)])
def test_the_ledger_must_close_to_five_percent(covered: float, found: bool) -> None:
    one = trial(covered=covered)
    assert ("closure" in bad(one)) is found
    assert checks(one)["closure"].value == pytest.approx(1 - covered)


@pytest.mark.parametrize(
    ("share", "noise", "found"), [(0.009, 0.0, False), (0.012, 0.001, True), (0.012, 0.05, False)]
)
def test_marks_may_take_one_percent_of_the_step(share: float, noise: float, found: bool) -> None:
    """A slow change of the machine is in both blocks of a pair; noise between them decides less."""
    pairs = [
        (bare * (1 + share) * (1 + noise * sign), bare)
        for bare, sign in zip((0.1, 0.2, 0.4, 0.4, 0.2, 0.1), (1, -1, 1, -1, 1, -1), strict=True)
    ]
    one = trial(provenance={"mark_pairs": pairs})
    assert ("marks" in bad(one)) is found
    check = checks(one)["marks"]
    assert check.value == pytest.approx(share, abs=1e-9 + noise / 2)
    assert check.about["low"] <= check.value <= check.about["high"]
    assert "marks" not in checks(trial())


@pytest.mark.parametrize("verified", list(Verified))
def test_what_was_not_verified_is_said(verified: Verified) -> None:
    sound = verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)
    assert ("verification" not in bad(trial(verified=verified))) is sound


@pytest.mark.parametrize("changed", [{"status": Status.OOM}, {"source": Source.PREDICTED}])
def test_what_was_not_measured_has_no_checks(changed: dict[str, Any]) -> None:
    assert validity.facts(trial(**changed), 1) == {}


# ---------------------------------------------------------------- stored, and said


def test_facts_are_plain_and_read_back_as_they_were() -> None:
    import json

    one = trial(drifting(0.2), covered=0.5)
    stored = replace(one, provenance={"validity": json.loads(json.dumps(validity.facts(one, 1)))})
    assert [(c.key, c.value, c.limit, c.ok) for c in validity.of(stored, 8)] == [
        (c.key, c.value, c.limit, c.ok) for c in validity.check(one, 1)
    ]
    assert validity.troubles([stored], 8) == validity.troubles([one], 1)


def test_facts_of_a_newer_dpbench_are_left_alone() -> None:
    newer = {"entropy": {"value": 1.0, "limit": 0.5, "ok": False}}
    assert validity.troubles([trial(provenance={"validity": newer})], 8) == {}


def test_the_worst_round_is_said_and_how_many_were_bad() -> None:
    rounds = [trial(covered=share, round=number) for number, share in enumerate([1.0, 0.8, 0.9])]
    ((rule, said),) = validity.troubles(rounds, 8).items()
    assert (rule.key, amounts(rule.headline)) == ("closure", ["5%"])
    assert {case: amounts(detail) for case, detail in said.items()} == {CASE: ["20%", "2", "3"]}


def test_warnings_group_the_cases_of_one_trouble_and_say_all_when_it_is_all() -> None:
    cases = [replace(CASE, batch_size=2**i) for i in range(1, 12)]
    some = [
        trial(of=one, covered=0.8 if i < 10 else 1.0, round=r)
        for i, one in enumerate(cases)
        for r in range(3)
    ]
    found = statements.made(summary.rows(some), some, RunFacts.of({"host": {"cores": 8}}))
    (grouped,) = [one for one in found if one.key == "closure"]
    assert (grouped.cases, grouped.every) == (tuple((one, "20%") for one in cases[:10]), False)
    assert str(grouped).endswith("and 2 more")
    assert f"{cases[1].label} (20%)" in str(grouped)
    every = [trial(of=one, covered=0.8, round=r) for one in cases for r in range(3)]
    found = statements.made(summary.rows(every), every, RunFacts.of({"host": {"cores": 8}}))
    (grouped,) = [one for one in found if one.key == "closure"]
    assert ([case for case, _ in grouped.cases], grouped.every) == (cases, True)
    assert str(grouped).endswith("all 11 cases")
    crowded = statements.made(summary.rows(every), every, RunFacts.of({"host": {"cores": 1}}))
    assert [len(one.cases) for one in crowded if one.key == "oversubscribed"] == [11]
    assert statements.summary(crowded) == "4 in 11 cases"


@hypothesis.given(st.lists(st.floats(1e-4, 10.0) | st.integers(1, 4), min_size=3, max_size=60))
def test_a_trend_is_scipys(series: list[float]) -> None:
    hypothesis.assume(min(series) < max(series))
    found, theirs = validity.trend(series), scipy.stats.spearmanr(range(len(series)), series)
    assert found.rho == pytest.approx(theirs.statistic, abs=1e-12)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)
    assert found.slope == pytest.approx(scipy.stats.theilslopes(series).slope, rel=1e-9, abs=1e-15)
