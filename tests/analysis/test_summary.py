"""Tables from trials made by hand: every number can be worked out on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from dpbench.analysis import comparison, frames, summary
from dpbench.records import (
    UNATTRIBUTED,
    Case,
    Memory,
    Phase,
    Sample,
    Source,
    Span,
    Status,
    Step,
    Trial,
    Verified,
    plan,
)
from tests.trials import trial_of


def case(strategy: str = "dp", batch: int = 64, devices: int = 2, **changed: Any) -> Case:
    schedule = "reference" if strategy == "dp" else ""
    return Case(
        model="mlp",
        strategy=strategy,
        batch_size=batch,
        devices=devices,
        schedule=schedule,
        **changed,
    )


SINGLE = case("single", devices=1)


def trial(
    of: Case,
    seconds: float | list[float] = 1.0,
    *,
    number: int = 0,
    warm: int = 1,
    busy: dict[int, float] | None = None,
    **changed: Any,
) -> Trial:
    """Return a trial of slow warm-up steps and then timed ones: half forward, a quarter reduce."""
    timed = [seconds] * 10 if isinstance(seconds, float | int) else seconds
    parts = [
        (Phase.FORWARD, 0, 0.0, 0.5),
        (Phase.FORWARD, 1, 0.0, 0.25),
        (Phase.REDUCE, 0, 0.5, 0.75),
    ]
    made = trial_of(of, [50.0] * warm + timed, warmup=warm, parts=parts, round=number)
    samples = tuple(
        Sample(step.end_s, device, "busy_s", 99.0 if step.warmup else value)
        for step in made.steps
        for device, value in (busy or {}).items()
    )
    return replace(made, **{"samples": samples, "memory": (Memory(-1, 1000, "rss"),)} | changed)


LOST = "out of memory on device cuda:0"


def failed(of: Case, status: Status = Status.OOM, **changed: Any) -> Trial:
    return Trial(case=of, status=status, reason=LOST, **changed)


def row_of(of: Case, *trials: Trial) -> summary.Row:
    (found,) = [row for row in summary.rows(trials) if row.case == of]
    return found


# ---------------------------------------------------------------- steps and speed-ups


def test_a_row_is_a_case_and_a_round_one_trial_of_it() -> None:
    trials = [trial(case(), s, number=r) for r, s in enumerate([1.0, 2.0, 4.0])]
    found = row_of(case(), *trials)
    assert (found.step.value, found.step.n, found.rounds, found.steps) == (2.0, 3, 3, 30)
    assert found.step.low < 1.0, "three rounds so far apart tell little"
    assert found.step.high > 4.0
    throughput = found.throughput
    assert throughput.value == pytest.approx(64 * 3 / (1.0 + 2.0 + 4.0)), (
        "rows over the time of all timed steps"
    )
    assert (throughput.low, throughput.high) == (64 / found.mean.high, 64 / found.mean.low)
    assert found.status is Status.OK
    assert found.verified is Verified.BITWISE


def test_strong_speed_up_compares_equal_global_work() -> None:
    found = row_of(
        case(),
        *[trial(SINGLE, 3.0, number=r) for r in range(3)],
        *[trial(case(), 2.0, number=r) for r in range(3)],
    )
    assert found.scaling == "strong"
    assert found.speedup.value == pytest.approx(1.5)
    assert found.efficiency.value == pytest.approx(0.75)
    assert found.speedup.n == 3


def test_weak_speed_up_compares_equal_work_a_device() -> None:
    base, wide = case("single", 32, 1), case(batch=128, devices=4)
    found = row_of(wide, trial(base, 2.0), trial(wide, 4.0))
    assert found.scaling == "weak"
    assert found.speedup.value == pytest.approx(2.0)  # four times the work in twice the time
    assert found.efficiency.value == pytest.approx(0.5)


def test_strong_goes_before_weak() -> None:
    found = row_of(
        case(), trial(SINGLE, 3.0), trial(case("single", 32, 1), 1.0), trial(case(), 2.0)
    )
    assert (found.scaling, found.speedup.value) == ("strong", pytest.approx(1.5))


@pytest.mark.parametrize(
    "base",
    [
        case("single", 63, 1),
        case("single", 16, 1),
        case("single", 64, 1, size="full"),
        case("single", 64, 1, precision="bf16"),
        case("single", 64, 1, device_kind="cuda"),
        case("single", 64, 1, optimizer="adam"),
        case("single_all_cores", 64, 1),
        Case(model="lstm", strategy="single", batch_size=64),
    ],
    ids=lambda c: c.label,
)
def test_unlike_work_is_never_compared(base: Case) -> None:
    found = row_of(case(), trial(base, 3.0), trial(case(), 2.0))
    assert found.speedup is None
    assert found.efficiency is None
    assert found.scaling == ""


@pytest.mark.parametrize(("batch", "devices"), [(65, 2), (130, 4), (7, 2)])
def test_shares_that_are_not_equal_are_not_weak_scaling(batch: int, devices: int) -> None:
    uneven = case(batch=batch, devices=devices)
    found = row_of(uneven, trial(case("single", batch // devices, 1), 1.0), trial(uneven, 2.0))
    assert found.speedup is None


@hypothesis.given(st.integers(1, 4), st.integers(1, 200), st.integers(1, 200))
def test_a_speed_up_is_over_equal_work_or_there_is_none(
    devices: int, batch: int, base: int
) -> None:
    one = case("ddp", batch, devices)
    found = row_of(one, trial(case("single", base, 1), 3.0), trial(one, 2.0))
    if found.scaling == "strong":
        assert base == batch
    elif found.scaling == "weak":
        assert base * devices == batch
    else:
        assert found.speedup is None
        assert base != batch
        assert base * devices != batch


def test_colocated_replicas_compare_with_one_that_is_not() -> None:
    shared = case(device_kind="cuda", placement="colocated")
    found = row_of(
        shared, trial(case("single", 64, 1, device_kind="cuda"), 3.0), trial(shared, 2.0)
    )
    assert found.speedup.value == pytest.approx(1.5)


def test_the_baseline_has_no_speed_up_of_its_own_and_all_cores_has() -> None:
    cores = case("single_all_cores", 64, 1)
    trials = [trial(SINGLE, 3.0), trial(cores, 2.0)]
    assert row_of(SINGLE, *trials).speedup is None
    assert row_of(cores, *trials).speedup.value == pytest.approx(1.5)


# ---------------------------------------------------------------- what is no result


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_what_did_not_end_well_has_no_number(status: Status) -> None:
    found = row_of(case(), trial(SINGLE), failed(case(), status))
    assert found.status is status
    assert found.reason == LOST
    assert (found.step, found.throughput, found.speedup, found.imbalance) == (
        None,
        None,
        None,
        None,
    )
    assert not found.phases
    assert not found.busy
    assert not found.memory


def test_unverified_is_never_a_number() -> None:
    wrong = trial(case(), 0.1, verified=Verified.NO, busy={0: 1.0, 1: 1.0})
    found = row_of(case(), trial(SINGLE, 3.0), wrong)
    assert (found.step, found.throughput, found.speedup) == (None, None, None)
    assert not found.phases
    assert not found.busy
    assert (
        row_of(case(), trial(SINGLE, 3.0, verified=Verified.NO), trial(case(), 2.0)).speedup is None
    )


def test_an_unverified_round_adds_nothing_to_the_verified_ones() -> None:
    good = trial(case(), 2.0, busy={0: 1.0, 1: 1.0})
    spans = tuple(
        Span(k, Phase.LOSS, 0, "host", s.start_s, s.end_s) for k, s in enumerate(good.steps)
    )
    wrong = trial(
        case(),
        2.0,
        number=1,
        verified=Verified.NO,
        busy={0: 7.0, 1: 1.0},
        memory=(Memory(-1, 9999, "rss"),),
    )
    wrong = Trial.from_dict(
        wrong.to_dict() | {"spans": trial(case(), 2.0, spans=spans).to_dict()["spans"]}
    )
    alone, both = row_of(case(), good), row_of(case(), good, wrong)
    for name in (
        "step",
        "throughput",
        "phases",
        "busy",
        "imbalance",
        "host_bytes",
        "rounds",
    ):
        assert getattr(both, name) == getattr(alone, name), name


def test_a_round_that_failed_leaves_the_others_and_says_so() -> None:
    found = row_of(
        case(), trial(case(), 2.0), failed(case(), round=1), trial(case(), 2.0, number=2)
    )
    assert (found.status, found.rounds, found.step.value) == (Status.OK, 2, 2.0)
    assert found.reason == LOST


def test_the_last_trial_of_a_round_counts_alone() -> None:
    first = trial(case(), 9.0, spans=(), busy={0: 5.0, 1: 1.0})
    again = trial(case(), 2.0, busy={0: 1.0, 1: 1.0})
    alone, both = row_of(case(), again), row_of(case(), first, again)
    for name in ("step", "phases", "busy", "imbalance"):
        assert getattr(both, name) == getattr(alone, name), name


def test_predictions_do_not_mix_with_measurements() -> None:
    measured = [trial(case(), 2.0, number=r) for r in range(2)]
    predicted = [
        trial(case(), 8.0, number=r, source=Source.PREDICTED, verified=Verified.NOT_APPLICABLE)
        for r in range(2)
    ]
    found = summary.rows([*measured, *predicted])
    assert {(row.source, row.step.value) for row in found} == {
        (Source.MEASURED, 2.0),
        (Source.PREDICTED, 8.0),
    }


def test_a_prediction_is_not_a_measurements_baseline() -> None:
    base = trial(SINGLE, 8.0, source=Source.PREDICTED, verified=Verified.NOT_APPLICABLE)
    assert row_of(case(), base, trial(case(), 2.0)).speedup is None


# ---------------------------------------------------------------- where time goes


def test_phases_sum_to_the_mean_step() -> None:
    found = row_of(case(), trial(case(), [1.0] * 8 + [40.0, 2.0]), trial(case(), 2.0, number=1))
    assert found.mean.value == pytest.approx((50 / 10 + 2) / 2)
    assert found.phases == pytest.approx(
        {
            "forward": found.mean.value / 2,
            "reduce": found.mean.value / 4,
            UNATTRIBUTED: found.mean.value / 4,
        }
    )
    assert list(found.phases) == ["forward", "reduce", UNATTRIBUTED]


@pytest.mark.parametrize("later", [0.7, 1.0, 1.4])
def test_a_case_without_later_rounds_is_shown_as_in_all_rounds_of_its_baseline(
    later: float,
) -> None:
    """The machine becomes faster or slower after three rounds, which `dp` alone has."""
    base = plan.alone(case(), case().batch_size)
    speeds = [1.0] * 3 + [later] * 5
    trials = [trial(base, 20.0 * speed, number=n) for n, speed in enumerate(speeds)]
    trials += [trial(case(), 16.0, number=n) for n in range(3)]
    found = {row.case: row for row in summary.rows(trials)}
    alone, several = found[base], found[case()]
    assert several.speedup.value == pytest.approx(1.25)
    assert several.step.value == pytest.approx(alone.step.value / 1.25)
    assert several.mean.value == pytest.approx(alone.mean.value / 1.25)
    assert sum(several.phases.values()) == pytest.approx(several.mean.value)
    assert several.step.low <= several.step.value <= several.step.high


@hypothesis.given(
    st.lists(st.lists(st.floats(0.01, 9), min_size=1, max_size=9), min_size=1, max_size=4)
)
def test_phases_sum_to_the_mean_step_whatever_the_series(series: list[list[float]]) -> None:
    found = row_of(case(), *[trial(case(), list(s), number=r) for r, s in enumerate(series)])
    assert sum(found.phases.values()) == pytest.approx(found.mean.value)
    assert all(seconds >= 0 for seconds in found.phases.values())


def test_warm_up_counts_for_nothing() -> None:
    found = row_of(case(), trial(case(), [2.0, 2.0], warm=5, busy={0: 1.0, 1: 0.5}))
    assert (found.step.high, found.steps) == (2.0, 2)
    assert found.busy == {0: 1.0, 1: 0.5}


def test_occupied_is_the_union_of_a_devices_spans() -> None:
    base = trial(case(), 4.0)
    spans = [
        Span(k, phase, d, "host", s.start_s + a, s.start_s + b)
        for k, s in enumerate(base.steps)
        for phase, d, a, b in [
            (Phase.FORWARD, 0, 0, 2),
            (Phase.LOSS, 0, 1, 3),
            (Phase.FORWARD, 1, 0, 1),
            (Phase.REDUCE, 1, 3, 4),
            (Phase.FORWARD, -1, 0, 4),
        ]
    ]
    found = trial(case(), 4.0, spans=tuple(spans)).ledger.occupied
    assert {device: set(seconds) for device, seconds in found.items()} == {0: {3.0}, 1: {2.0}}


# ---------------------------------------------------------------- imbalance


def test_imbalance_is_device_0_over_the_mean_of_the_others() -> None:
    found = row_of(
        case(devices=3),
        *[trial(case(devices=3), 2.0, number=r, busy={0: 1.5, 1: 0.8, 2: 1.2}) for r in range(3)],
    )
    assert (found.imbalance.value, found.imbalance.low, found.imbalance.high) == pytest.approx(
        (1.5, 1.5, 1.5)
    )
    assert found.imbalance.n == 3
    assert found.busy_source == "thread CPU time"


def test_one_device_has_no_imbalance() -> None:
    assert row_of(SINGLE, trial(SINGLE, 2.0, busy={0: 1.5})).imbalance is None
    assert row_of(case(), trial(case(), 2.0)).imbalance is None


def test_kernels_of_a_profiled_step_go_before_cpu_time() -> None:
    profiled = (Sample(0.0, 0, "kernel_busy_s", 0.6), Sample(0.0, 1, "kernel_busy_s", 0.3))
    found = row_of(
        case(),
        trial(case(), 2.0, samples=(*trial(case(), 2.0, busy={0: 9, 1: 1}).samples, *profiled)),
    )
    assert found.busy == {0: 0.6, 1: 0.3}
    assert found.imbalance.value == pytest.approx(2.0)
    assert found.busy_source == "kernels of profiled steps"


def test_several_profiled_steps_give_a_median_and_an_interval() -> None:
    def profiled(number: int) -> Trial:
        first = (0.5, 0.6, 0.62, 0.58, 0.9)  # the first and the last are disturbed
        other_s = 0.3 + 0.01 * (number - 1)
        samples = (
            Sample(0.0, d, "kernel_busy_s", s) for s in first for d, s in ((0, s), (1, other_s))
        )
        return trial(case(), 2.0, number=number, samples=tuple(samples))

    found = row_of(case(), *(profiled(number) for number in range(3)))
    assert found.busy == {0: 0.6, 1: 0.3}
    assert found.imbalance.value == pytest.approx(2.0)
    assert found.imbalance.low < 1.99
    assert 2.01 < found.imbalance.high < 3.0


def test_devices_that_were_not_busy_together_have_no_imbalance() -> None:
    one, other = trial(case(), busy={0: 1.0}), trial(case(), number=1, busy={1: 1.0})
    assert row_of(case(), one, other).imbalance is None


def test_a_device_whose_peak_of_memory_is_unknown_is_not_one_without_memory() -> None:
    four = case(devices=4)
    known = tuple(Memory(device, size, "allocator") for device, size in enumerate((300, 100, 100)))
    row = row_of(four, trial(four, memory=known))
    assert row.memory == {0: 300, 1: 100, 2: 100}
    assert row.memory_imbalance is None
    whole = trial(four, memory=(*known, Memory(3, 100, "allocator")))
    assert row_of(four, whole).memory_imbalance == pytest.approx(3)


def test_memory_is_the_peak_of_all_rounds() -> None:
    def peaks(first: int, second: int, host: int) -> tuple[Memory, ...]:
        return (
            Memory(0, first, "allocator"),
            Memory(1, second, "allocator"),
            Memory(-1, host, "rss"),
        )

    found = row_of(
        case(),
        trial(case(), memory=peaks(300, 100, 7)),
        trial(case(), number=1, memory=peaks(200, 150, 5)),
    )
    assert found.memory == {0: 300, 1: 150}
    assert found.memory_imbalance == pytest.approx(2.0)
    assert found.memory_source == "allocator"
    assert found.host_bytes == 7


# ---------------------------------------------------------------- labels and tables


@pytest.mark.parametrize(
    ("of", "source", "expected"),
    [
        (case(), Source.MEASURED, {"MEASURED", "CPU-ONLY"}),
        (case(), Source.PREDICTED, {"PREDICTED", "EXPERIMENTAL", "CPU-ONLY"}),
        (case(device_kind="cuda"), Source.MEASURED, {"MEASURED"}),
        (case(device_kind="cuda"), Source.PREDICTED, {"PREDICTED"}),
        (
            case(device_kind="cuda", placement="colocated"),
            Source.MEASURED,
            {"MEASURED", "COLOCATED"},
        ),
        (case(device_kind="emulated"), Source.MEASURED, {"MEASURED", "EMULATED"}),
    ],
)
def test_labels_stand_beside_every_figure(of: Case, source: Source, expected: set[str]) -> None:
    given = trial(of, source=source)
    assert set(summary.labels(given)) == expected
    assert set(row_of(of, given).labels) == expected


@pytest.mark.parametrize("gil", ["on", "off", None])
@pytest.mark.parametrize("source", [Source.MEASURED, Source.PREDICTED])
def test_a_step_without_the_interpreter_lock_says_so(gil: str | None, source: Source) -> None:
    given = trial(case(), source=source, provenance={"gil": gil} if gil else {})
    assert ("NO-GIL" in row_of(case(), given).labels) is (gil == "off")


def test_a_frame_has_a_line_a_case_and_no_number_that_is_none() -> None:
    table = summary.rows(
        [trial(SINGLE, 3.0), trial(case(), 2.0, busy={0: 1.0, 1: 0.5}), failed(case("ddp"))]
    )
    found = frames.frame(table, raw=True).set_index("strategy")
    assert list(found.index) == ["single", "ddp", "dp"]
    assert found.loc["dp", "speedup_value"] == pytest.approx(1.5)
    assert found.loc["dp", "busy_1_s"] == 0.5
    assert found.loc["dp", "phase_forward_s"] == pytest.approx(1.0)
    assert found.loc["dp", "labels"] == "MEASURED CPU-ONLY"
    assert found.loc["ddp", "status"] == "oom"
    assert found.loc["ddp", [c for c in found.columns if c.endswith(("_value", "_s"))]].isna().all()
    assert frames.frame([]).empty
    assert list(frames.frame([]).columns) == list(frames.frame(table).columns)
    wide = frames.frame([row_of(case(), trial(case(), 2.0, busy=dict.fromkeys(range(10), 1.0)))])
    assert {"busy_8_s", "busy_9_s"} == set(wide.columns) - set(frames.frame([]).columns) - {
        "memory_8_bytes",
        "memory_9_bytes",
    }


def test_a_frame_has_no_number_that_reports_withhold_unless_it_is_raw() -> None:
    single = [trial(SINGLE, 3.0, number=number) for number in range(3)]
    table = summary.rows([*single, trial(case(), 2.0, busy={0: 1.0, 1: 0.5})])
    shown = frames.frame(table).set_index("strategy")
    raw = frames.frame(table, raw=True).set_index("strategy")
    hidden = shown.isna() & raw.notna()
    assert not {*hidden.columns[hidden.loc["single"]]}
    assert {*hidden.columns[hidden.loc["dp"]]} == {
        *(
            f"{name}_{part}"
            for name in ("step", "mean", "throughput", "speedup", "efficiency", "imbalance")
            for part in ("value", "low", "high")
        ),
        *("phase_forward_s", "phase_reduce_s", "phase_unattributed_s"),
    }
    reasons = ["step_withheld", "speedup_withheld", "p95_withheld"]
    assert [*shown.loc["dp", reasons]] == ["too few rounds", "too few rounds", "not enough steps"]


def test_the_order_of_trials_changes_no_row() -> None:
    trials = [
        trial(SINGLE, 3.0),
        trial(case(), 2.0),
        trial(case(), 2.5, number=1),
        failed(case("ddp")),
    ]
    assert summary.rows(trials) == summary.rows(trials[::-1])


def test_comparing_a_run_with_itself_is_the_same_and_with_a_slower_one_slower() -> None:
    before = [trial(case(), [2.0, 2.001] * 5, number=r) for r in range(3)]
    slower = [trial(case(), [3.0, 3.001] * 5, number=r) for r in range(3)]
    (same,), (found,) = comparison.compare(before, before), comparison.compare(before, slower)
    assert same.verdict == "same"
    assert (found.verdict, found.ratio.value) == ("slower", pytest.approx(2 / 3, rel=1e-3))
    assert comparison.compare(before, [failed(case())]) == []


def test_a_prediction_keeps_the_interval_that_was_stated_with_it() -> None:
    def predicted(case: Case, step_s: float, low_s: float, high_s: float) -> Trial:
        return Trial(
            case=case,
            source=Source.PREDICTED,
            steps=(Step(step_s, False, step_s),),
            provenance={"interval_80_s": [low_s, high_s]},
        )

    single = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")
    ddp = Case(model="mlp", strategy="ddp", devices=2, batch_size=8, device_kind="cuda")
    one, two = summary.rows([predicted(single, 0.2, 0.1, 0.4), predicted(ddp, 0.1, 0.1, 0.2)])
    assert one.step is not None
    assert (one.step.low, one.step.value, one.step.high) == (0.1, 0.2, 0.4)
    assert two.speedup is not None
    assert two.speedup.value == pytest.approx(2.0)
    # single may be half as long and ddp twice: together a factor of 2 ** sqrt(2) down, and of 2 up
    assert (two.speedup.low, two.speedup.high) == (pytest.approx(2 / 2**2**0.5), pytest.approx(4.0))
