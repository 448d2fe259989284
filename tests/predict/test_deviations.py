"""Deviations: what machines lose beyond the model, on which machines, and how it is fitted."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
from scipy.special import stdtrit

from benchmarks.prediction import fit_deviations
from benchmarks.prediction.published import Matched, PublishedRow
from benchmarks.prediction.score import Modelled
from dpbench.predict import cases, deviations, machine, network
from dpbench.predict.constants import FREEDOM, column, students_quantile
from dpbench.predict.deviations import NONE, Deviation
from dpbench.predict.machine import Collective, Host, Machine
from dpbench.records import Case
from dpbench.records.registry import Parallelism

UNKNOWN = machine.load("rtx-3090-x8")
MEASURED = replace(
    UNKNOWN, host=Host(launch_s=10e-6), collective=Collective(bytes_per_s=5e9, start_s=40e-6)
)
"""As `dpbench doctor` describes a machine with several GPUs."""
NOTHING = dict.fromkeys(Parallelism, NONE)


def case(strategy: str, devices: int = 8) -> Case:
    return Case(
        model="resnet50",
        strategy=strategy,
        devices=devices,
        batch_size=32 * devices,
        device_kind="cuda",
    )


def both(on: Machine, asked: Case) -> tuple[cases.Prediction, cases.Prediction]:
    """Return a prediction, and that of the model alone."""
    usual = cases.Predictor(on, given=(0.05, 32))
    return usual.predict(asked), replace(usual, lost=NOTHING).predict(asked)


# ---------------------------------------------------------------- predictions


@pytest.mark.parametrize("strategy", ["torch_dp", "dp", "ddp"])
def test_steps_on_an_unknown_machine_are_later_and_less_sure(strategy: str) -> None:
    found, alone = both(UNKNOWN, case(strategy))
    assert found.seconds == pytest.approx(alone.seconds * math.exp(found.deviation.mean))
    assert found.seconds > 1.05 * alone.seconds
    assert found.high_s / found.low_s > 1.02 * alone.high_s / alone.low_s
    assert found.low_s < found.seconds < found.high_s
    assert sum(found.trial().ledger.phases[0].values()) == pytest.approx(found.seconds)


@pytest.mark.parametrize("strategy", ["torch_dp", "dp", "ddp"])
def test_a_measured_machine_keeps_its_own_interval(strategy: str) -> None:
    found, alone = both(MEASURED, case(strategy))
    assert found == alone


def test_a_bus_alone_is_no_measured_machine() -> None:
    asked = case("ddp")
    found = deviations.of(asked, replace(UNKNOWN, collective=MEASURED.collective))
    assert found == deviations.of(asked, UNKNOWN) != NONE


@pytest.mark.parametrize("strategy", ["single", "torch_dp", "ddp"])
def test_one_device_deviates_from_nothing(strategy: str) -> None:
    assert deviations.of(case(strategy, 1), UNKNOWN) == NONE


def test_strategies_of_one_machine_deviate_together() -> None:
    predictor = cases.Predictor(UNKNOWN, given=(0.05, 32))
    dp, ddp = (predictor.predict(case(strategy)) for strategy in ("torch_dp", "ddp"))
    alone = replace(predictor, lost=NOTHING)
    dp_alone, ddp_alone = (alone.predict(case(strategy)) for strategy in ("torch_dp", "ddp"))
    parts = [
        [(ours - without) / scale for ours, without in zip(one.draws, other.draws, strict=True)]
        for one, other, scale in (
            (dp, dp_alone, dp.deviation.scale),
            (ddp, ddp_alone, ddp.deviation.scale),
        )
    ]
    assert parts[0] == pytest.approx(parts[1])


def test_the_package_has_every_predicted_strategy_on_every_link() -> None:
    table = deviations.published()
    assert set(table) == set(fit_deviations.PREDICTED)
    for by_link in table.values():
        assert set(by_link) == set(network.LINK_KINDS)
        assert all(0 <= one.mean < 0.3 and 0 < one.scale < 0.3 for one in by_link.values())
    facts = json.loads(deviations.FILE.read_text(encoding="utf-8"))
    assert facts["owners"] >= 10


def test_quantiles_are_those_of_students_t() -> None:
    for share in (0.0025, 0.1, 0.4, 0.5, 0.9, 0.9975):
        assert students_quantile(share) == pytest.approx(stdtrit(FREEDOM, share), abs=1e-9)
    assert sorted(column("deviation")) == pytest.approx(
        [students_quantile((number + 0.5) / 200) for number in range(200)]
    )


# ---------------------------------------------------------------- the fit


def row(owner: str, log_ratio: float, strategy: str = "ddp", link: str = "peer") -> Modelled:
    """Return a row of an owner whose step took e**log_ratio times its predicted duration."""
    published = PublishedRow(
        id=f"{owner}-1",
        group=owner,
        source=f"{owner}/repository @1",
        model="resnet50",
        parameters=0.0,
        framework="pytorch",
        strategy=strategy,
        gpu="A100",
        devices=8,
        interconnect="PCIe4",
        precision="fp32",
        batch=32.0,
        metric="step_s",
        value=0.1 * math.exp(log_ratio),
        timed="step",
        optimizer="",
        repeats="",
        notes="",
    )
    spread = tuple(0.03 * (number / 100 - 1) for number in range(200))
    return Modelled(Matched(published, 0.09, 32.0), 0.1, spread, 0.09, link)


def owners(number: int, mean: float, scale: float) -> list[Modelled]:
    values = [mean + scale * students_quantile((i + 0.5) / number) for i in range(number)]
    random.Random(0).shuffle(values)
    return [row(f"owner{i}", value) for i, value in enumerate(values)]


def test_a_fit_finds_the_mean_and_the_scale_between_owners() -> None:
    found = fit_deviations.fit(owners(60, 0.15, 0.1))
    assert found.deviation("ddp", "peer").mean == pytest.approx(0.15, abs=0.03)
    assert found.scale == pytest.approx(0.1, abs=0.03)


def test_an_owner_weighs_the_same_however_many_rows_it_has() -> None:
    few = [row("a", 0.0), row("b", 0.2), row("c", 0.1)]
    many = [few[0]] * 500 + few[1:]
    alike = [fit_deviations.fit(rows).deviation("ddp", "peer") for rows in (few, many)]
    assert alike[0].mean == pytest.approx(alike[1].mean, abs=1e-3)
    assert alike[0].scale == pytest.approx(alike[1].scale, abs=1e-3)


def test_one_owner_far_off_hardly_moves_the_others() -> None:
    usual = owners(12, 0.1, 0.05)
    before = fit_deviations.fit(usual).deviation("ddp", "peer").mean
    after = fit_deviations.fit([*usual, row("far", 2.0)]).deviation("ddp", "peer").mean
    assert after - before < 0.05, "a mean would move by 0.15"


def test_what_few_owners_measured_is_shrunk_towards_the_mean_of_all_and_less_sure() -> None:
    rows = [*owners(12, 0.1, 0.05), row("dp", 0.4, strategy="dp")]
    found = fit_deviations.fit(rows)
    usual, rare, never = (
        found.deviation(strategy, link)
        for strategy, link in (("ddp", "peer"), ("dp", "peer"), ("horovod", "network"))
    )
    assert usual.mean < rare.mean < 0.3
    assert never.mean == pytest.approx(found.parameters[0], abs=1e-4)
    assert usual.scale < rare.scale
    assert usual.scale < never.scale


def test_each_owner_is_left_out_in_turn() -> None:
    rows = [row("a", 0.0), row("b", 0.0), row("c", 0.6), row("d", 0.0)]
    fits = fit_deviations.without_each(rows)
    assert set(fits) == {"", "a", "b", "c", "d"}
    without = fits["c"].deviation("ddp", "peer")
    assert without == fit_deviations.fit(rows[:2] + rows[3:]).deviation("ddp", "peer")
    assert without.mean < fits[""].deviation("ddp", "peer").mean


def test_a_deviation_multiplies_a_step_and_widens_its_draws() -> None:
    seconds, draws = Deviation(math.log(1.1), 0.1).of_step(2.0, [0.0] * 200)
    assert seconds == pytest.approx(2.2)
    assert draws == pytest.approx(tuple(0.1 * t for t in column("deviation")))
    assert NONE.of_step(2.0, [0.5] * 200) == (2.0, (0.5,) * 200)
