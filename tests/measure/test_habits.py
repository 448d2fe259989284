"""Habits of a training loop: where the batch is before a step, and how often loss is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench import models, strategies
from dpbench.analysis import moves, transfers
from dpbench.analysis.report import Report
from dpbench.cli import tables
from dpbench.hardware.devices import open_devices
from dpbench.measure.verification import Verification
from dpbench.measure.worker import trial
from dpbench.records import (
    HABITS,
    HOST,
    Case,
    Effort,
    Phase,
    Status,
    Step,
    Trial,
    Verified,
    no_mark,
    plan,
)
from dpbench.records.work import Shapes
from dpbench.report import markdown, small_multiples
from dpbench.store.export import formats
from tests.amounts import amounts
from tests.runs import bare
from tests.trials import report_on

EMULATED = Case(model="mlp", strategy="single", batch_size=8, device_kind="emulated")
FOUR = bare(Effort(budget_s=30, min_steps=12, max_steps=12, warmup_steps=2, block_steps=7))


class Reading(torch.Tensor):
    """A loss that counts how often it is read as a number."""

    reads = 0

    def item(self) -> float:
        Reading.reads += 1
        return 0.0


class Loop(strategies.Strategy):
    """A strategy whose step does nothing."""

    def __init__(self) -> None:
        self.steps = 0

    @contextmanager
    def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        def step(inputs: Any, target: Any) -> torch.Tensor:
            self.steps += 1
            return torch.zeros(()).as_subclass(Reading)

        yield step


@pytest.mark.parametrize("every", [0, 1, 5, 100])
def test_the_loss_is_read_in_every_nth_step(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_verify", lambda *_, **__: Verification(Verified.BITWISE))
    monkeypatch.setattr(Reading, "reads", 0)
    loop = Loop()
    case = Case(model="mlp", strategy="single", batch_size=4, read_loss=every)
    done = trial.measure(case, FOUR, loop)
    assert len(done.steps) == loop.steps > 10
    assert Reading.reads == (-(-loop.steps // every) if every else 0)


@pytest.mark.parametrize("strategy", ["single", "dp", "torch_dp"])
def test_inputs_on_the_device_are_there_before_the_step(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    original = trial.start_timer

    def spied(prepared: Any, effort: Effort) -> Any:
        seen.extend(
            tensor.device for inputs, target in prepared.batches for tensor in (inputs, target)
        )
        return original(prepared, effort)

    monkeypatch.setattr(trial, "start_timer", spied)
    for inputs, expected in (("pinned", "cpu"), ("device", "lazy:0")):
        case = replace(
            EMULATED, strategy=strategy, inputs=inputs, devices=1 if strategy == "single" else 2
        )
        done = trial.measure(
            case, replace(FOUR, min_steps=3, max_steps=3), strategies.load(strategy)
        )
        assert done.verified is Verified.BITWISE
        assert {*seen} == {torch.device(expected)}
        seen.clear()


def test_a_tensor_on_the_accelerator_is_not_copied() -> None:
    from dpbench.strategies import put_all

    (device,) = open_devices("emulated", 1)
    there, here = torch.ones(2).to("lazy:0"), torch.ones(2)
    first, second, third = put_all([there, here, "text"], device)
    assert first is there
    assert second.device == there.device
    assert third == "text"
    (cpu,) = open_devices("cpu", 1)
    assert put_all([here], cpu)[0].data_ptr() != here.data_ptr(), (
        "a logical device has its own memory"
    )


SHAPES = Shapes(
    parameter_tensors=2,
    parameter_bytes=1000,
    trainable_bytes=1000,
    buffer_bytes=10,
    input_bytes=40.0,
    target_bytes=8.0,
    output_bytes=4.0,
)


@pytest.mark.parametrize(
    ("strategy", "devices", "expected"),
    [
        ("single", 1, []),
        ("ddp", 2, []),
        ("dp", 2, [(0, 1, 4 * 40.0)]),
        ("torch_dp", 2, [(0, 1, 4 * 40.0)]),
    ],
)
def test_inputs_on_device_0_do_not_cross_the_host(
    strategy: str, devices: int, expected: list[Any]
) -> None:
    case = Case(
        model="mlp",
        strategy=strategy,
        devices=devices,
        batch_size=8,
        device_kind="cuda",
        inputs="device",
        schedule="reference" if strategy == "dp" else "",
    )

    def scattered(one: Case) -> list[tuple[int, int, float]]:
        found = moves.of_step(one, SHAPES)
        return [
            (move.source, move.target, move.bytes) for move in found if move.phase is Phase.SCATTER
        ]

    assert scattered(case) == expected
    assert {source for source, _, _ in scattered(replace(case, inputs="pinned"))} == {HOST}
    assert transfers.flows([]) == []


def test_each_habit_is_a_case_with_a_baseline_of_the_same_habit() -> None:
    cases = plan.sweep(
        models=["mlp"],
        strategies=["single", "dp"],
        devices=[2],
        batch_sizes=[8],
        device_kind="cuda",
        inputs=["pinned", "device"],
        read_loss=[0, 1, 10],
    )
    assert len(cases) == 12
    assert [case.habits for case in cases[:4]] == [
        (),
        ("loss read",),
        ("loss read every 10",),
        ("inputs device",),
    ]
    assert cases[5].label.endswith(" ".join(("batch 8", *cases[5].habits)))
    assert cases[5].habits == ("inputs device", "loss read every 10")
    for case in cases[6:]:
        assert plan.alone(case, 8) in cases[:6]
    assert Case(model="mlp", strategy="single", batch_size=8).to_dict().keys() == {
        "model",
        "strategy",
        "batch_size",
    }


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("cpu", {"inputs": ["device"]}, "no effect on logical CPU devices"),
        ("emulated", {"inputs": ["pageable"]}, "no effect on emulated devices"),
    ],
)
def test_a_habit_without_effect_is_refused(kind: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.sweep(
            models=["mlp"],
            strategies=["single"],
            devices=[1],
            batch_sizes=[8],
            device_kind=kind,
            **given,
        )


def test_the_worker_runs_every_habit(tmp_path: Path) -> None:
    case = replace(
        EMULATED, strategy="dp", schedule="reference", devices=2, inputs="device", read_loss=2
    )
    (done,) = trial.run_together([case], replace(FOUR, min_steps=3, max_steps=3), tmp_path)
    assert (done.status, done.verified) == ("ok", Verified.BITWISE)


def test_batches_that_wait_on_the_device_do_not_count_as_memory_of_the_step() -> None:
    for inputs, expected in (("pinned", trial.BATCHES), ("device", 1)):
        case = replace(EMULATED, inputs=inputs)
        assert len(trial.prepare(case, strategies.load("single")).batches) == expected


def test_every_habit_is_a_field_with_a_text() -> None:
    usual = Case(model="mlp", strategy="single", batch_size=8)
    other = replace(
        usual,
        inputs="device",
        read_loss=1,
        zero_grad="zero",
        compile=True,
        mode="no_grad",
        loader=2,
        neighbour="lstm",
    )
    assert {name for name, value in vars(other).items() if value != getattr(usual, name)} == {
        *HABITS
    }
    assert not usual.habits
    assert len({*other.habits}) == len(HABITS)
    for name in {*HABITS} - {"mode"}:
        assert other.without(name).habits == tuple(
            one for one in other.habits if one != other.habit(name)
        )
    assert other.without("mode") == replace(other, mode="forward"), "training is other work"


def report() -> Report:
    """Return the report of two models, one of which ran with three kinds of loop."""
    trials = []
    for case in plan.sweep(
        models=["mlp"],
        strategies=["single", "dp"],
        devices=[2],
        batch_sizes=[8],
        device_kind="cuda",
        inputs=["pinned", "device"],
        read_loss=[0, 1],
    ):
        for number in range(3):
            steps = tuple(Step(0.01, False, k / 100) for k in range(1, 6))
            trials.append(Trial(case=case, verified=Verified.BITWISE, steps=steps, round=number))
    return report_on(trials)


def test_every_reader_tells_the_habits_apart() -> None:
    found = report()
    lines = [line for line in tables.table(found.rows).splitlines() if line.startswith("mlp")]
    assert len({line.partition(")")[0] for line in lines}) == 4, "the habits stand with the model"
    assert len(set(lines)) == len(lines) == 8
    subjects = [answer.subject for answer in found.answers]
    assert subjects == [
        "mlp",
        *(
            f"mlp ({habits})"
            for habits in ("loss read", "inputs device", "inputs device, loss read")
        ),
    ]
    assert len({diagnosis.row.label for diagnosis in found.diagnoses}) == 4
    facets, _ = small_multiples.split(found.rows, per=8)
    assert len({facet.title for facet in facets}) == len(facets) == 4
    assert [len(facet.rows) for facet in facets] == [2, 2, 2, 2]
    assert (
        len({line for line in markdown.render(found).splitlines() if line.startswith("| mlp")})
        == 16
    ), "in both tables"
    exported = {formats.name(row.case) for row in found.rows}
    assert len(exported) == 8
    assert not [name for name in exported if "inputs=" in name], "the label has it"


def test_gradients_are_dropped_or_filled_with_zeros() -> None:
    trained = []
    for how, kept in (("none", False), ("zero", True)):
        case = Case(model="mlp", strategy="single", batch_size=8, zero_grad=how)
        model = models.load("mlp", "small", 0)
        with strategies.load("single").start(
            case, model, open_devices("cpu", case.devices), no_mark
        ) as step:
            step(*model.batch(8, 1))
            first = [parameter.grad for parameter in model.module.parameters()]
            step(*model.batch(8, 1))
            after = [parameter.grad for parameter in model.module.parameters()]
        assert [one is other for one, other in zip(first, after, strict=True)] == [kept] * len(
            first
        )
        trained.append(
            torch.cat([parameter.detach().flatten() for parameter in model.module.parameters()])
        )
    assert torch.equal(*trained), (
        "the gradients of one step are not added to those of the step before"
    )


def test_zeroed_gradients_are_those_of_the_reference() -> None:
    done = trial.measure(
        replace(EMULATED, zero_grad="zero"),
        replace(FOUR, min_steps=3, max_steps=3),
        strategies.load("single"),
    )
    assert (done.verified, done.case.habits) == (Verified.BITWISE, ("gradients zeroed",))


def test_the_engine_which_always_drops_gradients_skips_zeroing_them(tmp_path: Path) -> None:
    done = trial.run(
        replace(EMULATED, strategy="dp", schedule="reference", zero_grad="zero"), FOUR, tmp_path
    )
    assert done.status is Status.SKIPPED
    assert "leave out --zero-grad" in done.reason


def timed(case: Case, step_s: float, **setup: float) -> list[Trial]:
    """Return three trials of a case, whose steps take about `step_s` seconds."""
    lengths = [step_s * (1 + 0.001 * k) for k in range(5)]
    steps = tuple(Step(length, False, k) for k, length in enumerate(lengths))
    return [
        Trial(case=case, verified=Verified.BITWISE, steps=steps, round=n, setup=setup)
        for n in range(3)
    ]


def test_the_effect_of_each_habit_is_told_apart_from_the_others() -> None:
    both = Case(model="mlp", strategy="single", batch_size=8, read_loss=1, compile=True)
    trials = [
        *timed(both, 0.009, compile_s=3.0),
        *timed(both.without("read_loss"), 0.006, compile_s=4.0),
        *timed(both.without("compile"), 0.012),
        *timed(both.without("compile").without("read_loss"), 0.010),
    ]
    settings, compilation = report_on(trials).notes
    said = {
        name: amounts(rest)[::4]
        for name in ("compiled", "loss read")
        for rest in [settings.partition(f"{name}: ")[2].partition("; ")[0]]
    }
    assert said == {"compiled": ["0.600×", "0.750×"], "loss read": ["1.20×", "1.50×"]}
    assert amounts(compilation) == ["4.00 s"]
    assert report_on(timed(both, 0.01)).notes == ()
