"""The forward alone: verified outputs, percentiles of latency, and skipped strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch

from dpbench import strategies
from dpbench.analysis import frames, stats, summary
from dpbench.analysis.findings import text
from dpbench.analysis.moves import of_step
from dpbench.analysis.report import Report
from dpbench.cli import tables
from dpbench.measure.worker import trial
from dpbench.predict import stored
from dpbench.records import Case, Phase, Status, Trial, Verified, plan, registry, words
from dpbench.records.case import MODES
from dpbench.records.work import Shapes
from dpbench.report import devices, markdown
from dpbench.strategies.single import Single
from tests.runs import TWO_STEPS
from tests.trials import report_on, trial_of

CASE = Case(model="mlp", strategy="single", batch_size=8, mode="no_grad")
SHAPES = Shapes(
    parameter_tensors=2,
    parameter_bytes=100,
    trainable_bytes=100,
    buffer_bytes=0,
    input_bytes=40.0,
    target_bytes=8.0,
    output_bytes=4.0,
)
FORWARD = {Phase.SCATTER, Phase.REPLICATE, Phase.FORWARD, Phase.GATHER}


@pytest.mark.parametrize(
    ("strategy", "kind", "schedule", "mode"),
    [
        ("single", "cpu", "", "forward"),
        ("dp", "cpu", "cached", "inference"),
        ("dp", "cpu", "reference", "forward"),
        ("dp", "cpu", "fastest", "no_grad"),
        ("torch_dp", "emulated", "", "inference"),
    ],
)
def test_the_outputs_of_one_process_are_verified_and_only_the_forward_runs(
    strategy: str, kind: str, schedule: str, mode: str, tmp_path: Path
) -> None:
    case = plan.normalise(
        replace(CASE, strategy=strategy, device_kind=kind, schedule=schedule, mode=mode, devices=2)
    )
    done = trial.run(case, TWO_STEPS, tmp_path)
    assert (done.status, done.verified) == (Status.OK, Verified.BITWISE), done.reason
    assert {span.phase for span in done.spans} <= FORWARD
    assert len(done.timed) == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_outputs_of_each_rank_are_its_rows(strategy: str, tmp_path: Path) -> None:
    done = trial.run(replace(CASE, strategy=strategy, devices=2), TWO_STEPS, tmp_path)
    assert (done.status, done.verified) == (Status.OK, Verified.BITWISE), done.reason
    assert {span.device for span in done.spans} == {0, 1}


class Faulty(Single):
    """The forward on one device, with a fault."""

    def __init__(self, fault: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]) -> None:
        self._fault = fault

    @contextmanager
    def infer(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        with super().infer(case, model, devices, mark) as forward:
            yield lambda *inputs: self._fault(model.module, forward(*inputs))


def changed_weight(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
    next(module.parameters()).data.add_(1.0)
    return output


FAULTS: dict[str, Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]] = {
    "a wrong output": lambda module, output: output + 0.1,
    "outputs in another order": lambda module, output: output.flip(0),
    "fewer rows": lambda module, output: output[:-1],
    "a weight that the forward changes": changed_weight,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_forward_is_not_timed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "strategy", lambda name: Faulty(FAULTS[fault]))
    done = trial.run(CASE, TWO_STEPS, tmp_path)
    assert (done.status, done.verified, done.steps) == (Status.FAILED, Verified.NO, ())
    assert "its outputs are wrong" in done.reason


def test_the_module_is_in_eval_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(CASE, model="resnet18", batch_size=4)
    assert trial.run(case, TWO_STEPS, tmp_path).verified is Verified.BITWISE
    monkeypatch.setattr(torch.nn.Module, "eval", lambda module: module)
    monkeypatch.setattr(registry, "strategy", lambda name: Faulty(lambda module, output: output))
    done = trial.run(case, TWO_STEPS, tmp_path)
    assert done.verified is Verified.NO, "the forward has changed the statistics of BatchNorm"


@pytest.mark.parametrize("mode", MODES[1:])
def test_autograd_is_that_of_the_mode(mode: str) -> None:
    seen: list[tuple[bool, bool]] = []

    def watch(module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        assert output.requires_grad is (mode == "forward")
        return output

    trial.measure(replace(CASE, mode=mode), TWO_STEPS, Faulty(watch))
    assert {*seen} == {(mode == "forward", mode == "inference")}


def test_a_schedule_without_a_forward_of_its_own_is_skipped_with_the_reason(tmp_path: Path) -> None:
    done = trial.run(
        replace(CASE, strategy="dp", schedule="sharded", devices=2), TWO_STEPS, tmp_path
    )
    assert done.status is Status.SKIPPED
    assert "needs TrainStep" in done.reason


def test_every_strategy_has_a_forward_or_a_reason() -> None:
    for name in registry.own("strategies"):
        case = replace(CASE, strategy=name, devices=2)
        strategy = strategies.load(name)
        has = type(strategy).infer is not strategies.Strategy.infer
        assert has or "whole training steps only" in strategies.refusal(strategy, case)
        assert strategies.refusal(strategy, replace(case, mode="train")) == strategy.skip(
            replace(case, mode="train")
        )


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"mode": ("no_grad",), "read_loss": (1,)}, "read_loss= has no effect on a forward alone"),
        (
            {"mode": ("train", "inference"), "zero_grad": ("zero",)},
            "zero_grad= has no effect on a forward alone",
        ),
    ],
)
def test_a_habit_without_effect_on_a_forward_is_refused(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.sweep(models=["mlp"], strategies=["single"], devices=[1], batch_sizes=[8], **axes)


def test_a_ladder_trains() -> None:
    with pytest.raises(ValueError, match="leave out mode="):
        plan.ladder(models=["mlp"], devices=[2], batch_sizes=[8], mode=("no_grad",))


# ---------------------------------------------------------------- latency


def trials(case: Case, step_s: float, steps: int, *, rounds: int = 3) -> list[Trial]:
    """Return trials whose steps have an uneven distribution, which is known from its seed."""
    found = []
    for number in range(rounds):
        series = step_s * (1 + np.random.default_rng(number).exponential(0.1, steps))
        found.append(trial_of(case, series.tolist(), round=number))
    return found


def test_a_percentile_is_the_median_of_those_that_numpy_has_of_each_round() -> None:
    made = trials(CASE, 0.01, 200)
    (row,) = summary.rows(made)
    for number in (95, 99):
        found = row.percentiles[number]
        each = [np.percentile(one.timed, number, method="median_unbiased") for one in made]
        assert found.value == pytest.approx(np.median(each), rel=1e-12)
        assert found.n == 3
        assert found.low < found.value < found.high


@pytest.mark.parametrize(("number", "enough"), [(95, 20), (99, 100)])
def test_a_percentile_of_rounds_with_too_few_steps_is_withheld(number: int, enough: int) -> None:
    """A round of fewer steps is expected to have none above its true percentile."""
    steps = np.random.default_rng(0).random(enough)
    few = {0: steps, 1: steps, 2: steps[:-1]}
    assert stats.percentile(few, number) is None
    assert stats.percentile({**few, 2: steps}, number)


def test_a_percentile_of_two_rounds_is_in_doubt() -> None:
    steps = np.random.default_rng(0).random(100)
    found = stats.percentile({0: steps, 1: steps}, 95)
    assert found
    assert found.doubt


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.0, 0.02, 0.05])
def test_the_interval_of_a_percentile_contains_it_also_where_rounds_differ(between: float) -> None:
    generator = np.random.default_rng(1)
    runs, within = 200, 0.02
    hits = {95: 0, 99: 0}
    for _ in range(runs):
        middles = generator.normal(0, between, 6)
        rounds = {
            number: np.exp(middle + generator.normal(0, within, 100))
            for number, middle in enumerate(middles)
        }
        for number in hits:
            found = stats.percentile(rounds, number)
            assert found
            # one round of a typical process has the truth; 100 steps see 1 of them above p99
            truth = np.exp(within * scipy.stats.norm.ppf(number / 100))
            hits[number] += found.low <= truth <= found.high
    # of 200, 95 % is 190; three standard deviations below it are 181
    assert min(hits.values()) >= 181


@pytest.fixture(scope="module")
def report() -> Report:
    """Return the report of a run whose rounds have enough steps for p95, and not for p99."""
    on_two = replace(CASE, strategy="dp", schedule="reference", devices=2)
    made = [
        *trials(CASE, 0.010, 60),
        *trials(replace(CASE, mode="forward"), 0.012, 60),
        *trials(on_two, 0.020, 60),
        *trials(replace(CASE, mode="train"), 0.03, 60),
    ]
    return report_on(made)


def test_every_reader_shows_latency_with_its_labels_and_withholds_it_by_name(
    report: Report,
) -> None:
    lines = tables.latencies(report.rows).splitlines()
    assert len(lines) == 2 + 3, "training has no latency"
    for line in lines[2:]:
        assert "3, 180" in line
        assert line.endswith("MEASURED CPU-ONLY")
        assert line.count("not enough steps") == 1
    (part,) = [part for part in devices.parts(report) if part.id == "latency"]
    assert part.labels == ("MEASURED", "CPU-ONLY")
    (shown,) = part.tables
    assert [line[4].small for line in shown.lines] == ["180 steps"] * 3
    assert "not enough steps" in markdown.render(report)
    table = frames.frame(report.rows)
    assert set(table["p99_withheld"]) == {words.NOT_ENOUGH_STEPS}
    assert not [one for one in table["p95_withheld"] if one]
    assert (table["p95_low"] < table["p95_value"]).all()
    assert table["p99_low"].isna().all()


def test_the_forward_is_verified_by_its_outputs_and_says_so(report: Report) -> None:
    lines = tables.table(report.rows).splitlines()[2:]
    assert [("outputs" in line) for line in lines] == ["forward" in line for line in lines]
    assert sum("forward" in line for line in lines) == 3


def test_modes_are_compared_with_the_forward_that_autograd_records(report: Report) -> None:
    said = " ".join(report.notes)
    assert "forward under no_grad: 0.83" in said
    assert f"in {report.rows[0].case.without('mode').label}" in said
    assert "forward with autograd: " not in said, "training is other work"
    alike = next(row for row in report.rows if row.case.devices > 1 and not row.case.trains)
    assert alike.speedup.value == pytest.approx(0.5, rel=0.01), (
        "the baseline is the same forward on one device"
    )


def test_remedies_and_predictions_are_about_training(report: Report) -> None:
    assert not report.diagnoses
    assert "no training step" in text.render(report.diagnoses)
    assert [
        stored._usable(one)
        for one in (*trials(CASE, 1.0, 2), *trials(replace(CASE, mode="train"), 1.0, 2))
    ] == [False] * 3 + [True] * 3


def test_the_forward_moves_no_target_and_no_gradients() -> None:
    for strategy in ("single", "dp", "ddp", "torch_dp", "fsdp"):
        case = replace(CASE, strategy=strategy, devices=1 if strategy == "single" else 2)
        case = replace(case, schedule="reference" if strategy == "dp" else "")
        moves = of_step(case, SHAPES)
        assert {move.phase for move in moves} <= FORWARD
        assert sum(move.bytes for move in moves if move.phase is Phase.SCATTER) == 8 * 40.0
        trained = of_step(replace(case, mode="train"), SHAPES)
        assert sum(move.bytes for move in trained) > sum(move.bytes for move in moves)
