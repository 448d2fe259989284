"""Indexes of trials made by hand, against answers worked out on paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dpbench.analysis import frames, imbalance, stats, summary
from dpbench.records import Case, Memory, Phase, Sample, Span, Status, Trial, Verified
from dpbench.records.work import Shapes
from tests.trials import trial_of

DP = Case(model="mlp", strategy="dp", schedule="reference", batch_size=64, devices=3)
DDP = replace(DP, strategy="ddp", schedule="")
SINGLE = replace(DDP, strategy="single", devices=1)


def trial(case: Case, busy: list[list[float]], *, number: int = 0, **changed: Any) -> Trial:
    """Return a trial whose first step is warm-up.

    `busy` has a row a timed step, a column a device.
    """
    rows = [[99.0] * len(busy[0]), *busy]
    made = trial_of(case, [1.0] * len(rows), warmup=1, round=number)
    samples = tuple(
        Sample(step.end_s, d, "busy_s", v)
        for step, row in zip(made.steps, rows, strict=True)
        for d, v in enumerate(row)
    )
    return replace(made, **{"samples": samples} | changed)


def index(
    trials: list[Trial], quantity: str = "busy time", case: Case = DP
) -> imbalance.Index | None:
    found = [i for i in imbalance.indexes(trials) if i.quantity == quantity and i.case == case]
    assert len(found) < 2
    return found[0] if found else None


def rounds(case: Case, busy: list[list[float]], count: int = 3, **changed: Any) -> list[Trial]:
    return [trial(case, busy, number=number, **changed) for number in range(count)]


# ---------------------------------------------------------------- the two figures


def test_device_0_over_the_mean_of_the_others_and_the_fullest_over_the_mean_of_all() -> None:
    found = index(rounds(DP, [[1.5, 0.8, 1.2]] * 10))
    assert found is not None
    assert (found.first.value, found.first.low, found.first.high, found.first.n) == pytest.approx(
        (1.5, 1.5, 1.5, 3)
    )
    assert found.most.value == pytest.approx(1.5 / (3.5 / 3))
    assert found.devices == {0: 1.5, 1: 0.8, 2: 1.2}
    assert (found.basis, found.unit) == ("thread CPU time", "s")


def test_the_fullest_need_not_be_device_0() -> None:
    found = index(rounds(DP, [[1.0, 3.0, 2.0]] * 10))
    assert found is not None
    assert found.first.value == pytest.approx(0.4)
    assert found.most.value == pytest.approx(1.5)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(0.1, 10.0), min_size=4, max_size=12), st.integers(2, 5), st.integers(1, 3)
)
def test_equal_devices_have_the_index_1(amounts: list[float], devices: int, count: int) -> None:
    case = replace(DP, devices=devices)
    found = index(rounds(case, [[amount] * devices for amount in amounts], count), case=case)
    assert found is not None
    for estimate in (found.first, found.most):
        assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.0, 1.0, 1.0))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(*[st.floats(0.1, 10.0)] * 3), min_size=3, max_size=10),
    st.floats(1e-3, 1e3),
)
def test_scaling_all_devices_changes_nothing(busy: list[tuple[float, ...]], factor: float) -> None:
    rows = [list(row) for row in busy]
    plain = index(rounds(DP, rows))
    scaled = index(rounds(DP, [[value * factor for value in row] for row in rows]))
    assert plain is not None
    assert scaled is not None
    for one, other in ((plain.first, scaled.first), (plain.most, scaled.most)):
        assert (other.value, other.low, other.high) == pytest.approx((one.value, one.low, one.high))
    assert plain.most.value >= 1 - 1e-12


def test_an_interval_covers_what_rounds_and_steps_differ_by() -> None:
    generator = np.random.default_rng(3)
    noisy = [
        trial(
            DP,
            (np.array([2.0, 1.0, 1.0]) * generator.normal(1, 0.05, (40, 3))).tolist(),
            number=number,
        )
        for number in range(5)
    ]
    found = index(noisy)
    assert found is not None
    assert 1.9 < found.first.low < 2.0 < found.first.high < 2.1
    assert found.first.n == 5


def test_a_step_is_resampled_with_all_its_devices() -> None:
    # steps differ a hundredfold, devices by nothing: resampled apart, the interval would be wide
    vectors = {n: stats.beside([[10.0**k for k in range(9)]] * 2) for n in range(3)}
    found = stats.balance(vectors).first
    assert (found.low, found.high) == pytest.approx((1.0, 1.0))


# ---------------------------------------------------------------- what is left out


def test_warm_up_counts_for_nothing_and_neither_does_what_is_not_trusted() -> None:
    wrong = trial(DP, [[9.0, 1.0, 1.0]] * 10, number=1, verified=Verified.NO)
    oom = Trial(case=DP, status=Status.OOM, round=2)
    found = index([trial(DP, [[1.0, 1.0, 1.0]] * 10), wrong, oom])
    assert found is not None
    assert (found.first.value, found.first.n) == (pytest.approx(1.0), 1)


def test_a_round_that_was_measured_again_counts_by_its_last_trial() -> None:
    found = index([trial(DP, [[9.0, 1.0, 1.0]] * 5), trial(DP, [[2.0, 1.0, 1.0]] * 5)])
    assert found is not None
    assert found.first.value == pytest.approx(2.0)


def test_one_device_idle_devices_and_others_of_the_machine_have_no_index() -> None:
    assert index(rounds(SINGLE, [[1.0]] * 5), case=SINGLE) is None
    assert index(rounds(DP, [[1.0, 0.0, 1.0]] * 5)) is None
    # the samplers watch every GPU of the run, this case uses two of them
    two = replace(DP, devices=2)
    found = index(rounds(two, [[1.0, 1.0, 50.0, 50.0]] * 5), case=two)
    assert found is not None
    assert found.devices == {0: 1.0, 1: 1.0}


def test_kernels_go_before_cpu_time_and_need_no_series() -> None:
    kernels = tuple(Sample(0.0, d, "kernel_busy_s", v) for d, v in enumerate((0.6, 0.3, 0.3)))
    cpu = trial(DP, [[9.0, 1.0, 1.0]] * 5)
    found = index([replace(cpu, samples=(*cpu.samples, *kernels))])
    assert found is not None
    assert found.first.value == pytest.approx(2.0)
    assert found.basis == "kernels of profiled steps"


# ---------------------------------------------------------------- control and floor


@pytest.mark.parametrize(
    ("dp", "ddp", "said"),
    [
        (2.0, 1.0, "above the control"),
        (1.0, 2.0, "below the control"),
        (1.0, 1.0, "not distinguishable from the control"),
    ],
)
def test_an_index_is_held_against_the_controls(dp: float, ddp: float, said: str) -> None:
    def noisy(case: Case, first: float, seed: int) -> list[Trial]:
        draws = np.random.default_rng(seed).normal(1, 0.03, (3, 30, 3)) * [first, 1, 1]
        return [trial(case, rows.tolist(), number=number) for number, rows in enumerate(draws)]

    trials = [*noisy(DP, dp, 1), *noisy(DDP, ddp, 2), *rounds(SINGLE, [[3.0]] * 5)]
    found = index(trials)
    assert found is not None
    assert found.verdict == said
    assert found.control is not None
    assert found.control.value == pytest.approx(ddp, rel=0.05)
    assert found.floor == pytest.approx(3.0)
    control = index(trials, case=DDP)
    assert control is not None
    assert (control.verdict, control.control) == ("the control", None)


def test_unlike_work_or_another_source_is_no_control() -> None:
    kernels = tuple(Sample(0.0, d, "kernel_busy_s", 1.0) for d in range(3))
    ddp = trial(DDP, [[1.0] * 3] * 5)
    for other in (replace(ddp, samples=kernels), replace(ddp, case=replace(DDP, batch_size=32))):
        found = index([*rounds(DP, [[2.0, 1.0, 1.0]] * 5), other])
        assert found is not None
        assert (found.verdict, found.control) == ("no control", None)


def test_single_figures_of_one_round_decide_nothing() -> None:
    def memory(case: Case, first: int, count: int) -> list[Trial]:
        peaks = tuple(Memory(d, size, "allocator") for d, size in enumerate((first, 100, 100)))
        return rounds(case, [[1.0] * 3] * 3, count, memory=peaks)

    once = index([*memory(DP, 300, 1), *memory(DDP, 100, 3)], "memory, allocated")
    often = index([*memory(DP, 300, 3), *memory(DDP, 100, 3)], "memory, allocated")
    assert once is not None
    assert often is not None
    assert once.verdict == "undecided: not enough rounds"
    assert (often.verdict, often.first.value) == ("above the control", pytest.approx(3.0))


# ---------------------------------------------------------------- quantities


def test_every_quantity_comes_from_what_a_trial_holds() -> None:
    shapes = Shapes(
        parameter_tensors=2,
        parameter_bytes=1000,
        trainable_bytes=1000,
        buffer_bytes=0,
        input_bytes=4.0,
        target_bytes=8.0,
        output_bytes=0.0,
    )
    case = replace(DP, batch_size=3, device_kind="cuda")
    base = trial(case, [[1.0] * 3] * 4)
    readings = tuple(
        Sample(t, d, metric, value)
        for d in range(3)
        for t, metric, value in [
            (101.0, "memory_used_bytes", 10.0),
            (102.0, "memory_used_bytes", 20.0 * (d == 0) + 20),
            (103.0, "memory_used_bytes", 15.0),
            (101.0, "energy_j", 5000.0),
            (102.5, "energy_j", 5004.0 + 4 * (d == 0)),
            (104.0, "energy_j", 5006.0 + 6 * (d == 0)),
            (105.0, "energy_j", 5000.0 + 8 * (1 + (d == 0))),
        ]
    )
    memory = tuple(
        Memory(d, size * (1 + (d == 0)), "allocator", phase, kind)
        for d in range(3)
        for size, phase, kind in [
            (100, "", "allocated"),
            (900, "backward", "allocated"),
            (150, "", "reserved"),
        ]
    )
    spans = tuple(
        Span(k, Phase.FORWARD, d, "cuda_event", step.start_s, step.end_s - (0.5 if d else 0.0))
        for k, step in enumerate(base.steps)
        for d in range(3)
    )
    given = replace(
        base,
        samples=(*base.samples, *readings),
        memory=memory,
        spans=spans,
        provenance={"model": vars(shapes)},
    )
    found = {i.quantity: i.devices for i in imbalance.indexes([given])}
    assert found == {
        "busy time": {0: 1.0, 1: 1.0, 2: 1.0},
        "occupied time": pytest.approx({0: 1.0, 1: 0.5, 2: 0.5}),
        "memory, allocated": {0: 200, 1: 100, 2: 100},
        "memory, reserved": {0: 300, 1: 150, 2: 150},
        "memory, in use": {0: 40.0, 1: 20.0, 2: 20.0},
        "energy of a step": {0: 4.0, 1: 2.0, 2: 2.0},
        # 0 sends 2 x 1000 weights, takes 2 x 1000 gradients, its row and three targets; others 1000
        # each way, their row
        "bytes moved": {0: 4000 + 4 + 24, 1: 2000 + 4, 2: 2000 + 4},
    }


def test_columns_are_the_same_for_every_table_and_frames_carry_them() -> None:
    trials = rounds(DP, [[1.5, 0.8, 1.2]] * 10)
    table = summary.rows([*trials, trial(SINGLE, [[1.0]] * 3)])
    columns = list(frames.cases([]).columns)
    assert columns[0] == "run_id"
    assert sum("imbalance_" in name for name in columns) == 9 * len(imbalance.QUANTITIES) + 4
    framed = frames.cases([("a", table, trials)])
    assert list(framed.columns) == columns
    assert set(framed["run_id"]) == {"a"}
    framed = framed.set_index("strategy")
    assert framed.loc["dp", "imbalance_busy_time_first_value"] == pytest.approx(1.5)
    assert framed.loc["dp", "imbalance_busy_time_verdict"] == "no control"
    assert framed.isna().loc["single", "imbalance_busy_time_first_value"]
