"""A loop fed by a DataLoader: the same batches, its wait as a phase, and each rank's own rows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from dpbench import models, strategies
from dpbench.cli import cli
from dpbench.hardware import processes
from dpbench.hardware.devices import open_devices
from dpbench.measure.worker import feed, trial
from dpbench.records import HOST, Case, Effort, Phase, Status, Step, Trial, Verified, no_mark, plan
from dpbench.records.options import Options
from dpbench.strategies import FunctionStep, ObservedSpan, _ranks, rows_of
from tests.amounts import amounts
from tests.runs import bare
from tests.trials import report_on

CASE = Case(model="mlp", strategy="single", batch_size=4, loader=0)
TEN = bare(Effort(budget_s=30, warmup_steps=1, min_steps=8, max_steps=8, block_steps=3))


def taken(case: Case, batches: list[Any], steps: int) -> list[Any]:
    """Return the batches that the steps of a loop get."""
    found: list[Any] = []
    kept = FunctionStep(lambda inputs, target: found.append((inputs, target)))
    with feed.fed(case, kept, batches, no_mark) as step:
        for _ in range(steps):
            step("not used", "not used")
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_batches_of_the_loop_without_it(workers: int) -> None:
    batches = [
        ((torch.randn(4, 3), 0.5 + k, torch.arange(4)), torch.randint(9, (4,))) for k in range(3)
    ]
    found = taken(replace(CASE, loader=workers), batches, 7)
    assert len(found) == 7
    for number, (inputs, target) in enumerate(found):
        expected, wanted = batches[number % 3]
        assert isinstance(inputs, tuple)
        assert inputs[1] == expected[1], "a value that is no tensor stays as it is"
        assert torch.equal(inputs[0], expected[0])
        assert torch.equal(inputs[2], expected[2])
        assert torch.equal(target, wanted)


def test_workers_use_all_cores_and_end_with_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [torch.tensor(0)] * 2
    monkeypatch.setattr(
        feed.Examples,
        "__getitem__",
        lambda *_: [torch.tensor(len(os.sched_getaffinity(0))), torch.tensor(os.getpid())],
    )
    with processes.staying(0):
        seen = taken(replace(CASE, loader=1), [(torch.randn(4, 3), torch.zeros(4))], 2)
    cores, pids = seen[0]
    assert cores.tolist() == [len(processes.CORES)] * 4
    assert pids[0] != os.getpid()
    for _ in range(100):
        if not Path(f"/proc/{pids[0]}").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the worker has outlived its loop")


def test_a_slow_dataset_is_the_phase_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = trial.run(CASE, TEN, tmp_path)
    one = feed.Examples.__getitem__

    def slow(examples: feed.Examples, index: int) -> list[torch.Tensor]:
        time.sleep(0.005)
        return one(examples, index)

    monkeypatch.setattr(feed.Examples, "__getitem__", slow)
    done = trial.run(CASE, TEN, tmp_path)
    assert (done.status, done.verified) == (Status.OK, Verified.BITWISE)
    for phases in done.ledger.phases:
        assert phases[Phase.DATA] >= CASE.batch_size * 0.005
    assert min(phases[Phase.DATA] for phases in usual.ledger.phases) < CASE.batch_size * 0.005
    assert {span.device for span in done.spans if span.phase is Phase.DATA} == {HOST}


def test_without_a_loader_there_is_no_phase_data(tmp_path: Path) -> None:
    done = trial.run(replace(CASE, loader=-1), TEN, tmp_path)
    assert Phase.DATA not in {span.phase for span in done.spans}
    assert taken(replace(CASE, loader=-1), [], 1) == [("not used", "not used")]


class Trying(strategies.Step):
    """A step that tries alternatives, and whose library has timed the reduction."""

    settled = False

    def observe(self) -> list[ObservedSpan]:
        return [(Phase.REDUCE, 0, 1.0, 2.0)]


def test_a_fed_step_says_what_the_step_says() -> None:
    batches = [(torch.zeros(4, 3), torch.zeros(4))]
    with feed.fed(CASE, Trying(), batches, no_mark) as step:
        assert (step.settled, step.observe()) == (False, [(Phase.REDUCE, 0, 1.0, 2.0)])
    with feed.fed(CASE, FunctionStep(print), batches, no_mark) as step:  # type: ignore[arg-type]
        assert (step.settled, [*step.observe()]) == (True, [])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_trains_on_rows_that_it_has_loaded_itself(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of 7 samples are 4 and 3.

    Gradients and loss are those of the rank's part of the whole batch.
    """
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    case = Case(model="mlp", strategy="ddp", devices=2, batch_size=7, loader=0)
    results = []
    for alone in (False, True):
        model = models.load("mlp", "small", 0)
        batch = model.batch(7, 1)
        given = rows_of(batch, case, rank) if alone else batch
        assert len(given[1]) == (case.rows[rank] if alone else 7)
        step = _ranks.RankStep(
            case, model, open_devices("cpu", 1)[0], no_mark, lambda module, device: module
        )
        loss = step(*given)
        results.append((loss, [parameter.grad for parameter in model.module.parameters()]))
    (loss, gradients), (other, others) = results
    assert torch.equal(loss, other)
    assert all(torch.equal(one, two) for one, two in zip(gradients, others, strict=True))


def test_each_rank_has_its_own_loader(tmp_path: Path) -> None:
    done = trial.run(
        replace(CASE, strategy="ddp", devices=2, loader=1), replace(TEN, max_steps=2), tmp_path
    )
    assert (done.status, done.verified) == (Status.OK, Verified.BITWISE), done.reason
    assert len([span for span in done.spans if span.phase is Phase.DATA]) == 2 * len(done.steps)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loader": (-2,)}, r"must be off \(-1\) or a number of workers"),
        ({"loader": (2,), "inputs": ("device",)}, "a DataLoader puts batches in the host's memory"),
    ],
)
def test_a_loader_that_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    def cases() -> list[Case]:
        options = Options.of(**given)
        return plan.sweep(
            models=["mlp"],
            strategies=["single"],
            devices=[1],
            batch_sizes=[8],
            device_kind="cuda",
            loader=options.loader,
            inputs=options.inputs,
        )

    with pytest.raises(ValueError, match=message):
        cases()


def test_the_option_takes_off_and_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "dpbench.cli.running._measure", lambda output, cluster, options: asked.append(options)
    )
    for text in ("off,0,2", "some"):
        done = CliRunner().invoke(cli, ["run", "--loader", text])
        assert (done.exit_code == 2) is (text == "some"), done.output
    assert "off (-1)" in done.output
    assert [options.loader for options in asked] == [(-1, 0, 2)]


def timed(case: Case, step_s: float) -> Iterator[Trial]:
    for number in range(3):
        steps = tuple(Step(step_s * (1 + 0.001 * k), False, float(k)) for k in range(5))
        yield Trial(case=case, verified=Verified.BITWISE, steps=steps, round=number)


def test_the_effect_of_a_loader_is_the_ratio_to_the_loop_without_it() -> None:
    made = [
        *timed(replace(CASE, loader=-1), 0.010),
        *timed(CASE, 0.015),
        *timed(replace(CASE, loader=1), 0.012),
    ]
    (said,) = report_on(made).notes
    first, second = ["1.50×", "1.50", "1.50", "4"], ["1", "1.20×", "1.20", "1.20", "4"]
    assert amounts(said) == [*first, *second], "no worker, then 1, each in batch 4"
