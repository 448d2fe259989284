"""Two models at once on separate devices: the neighbour runs while the case is timed.

Its failure fails the case.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpbench import strategies
from dpbench.hardware import processes
from dpbench.measure.selection import cases_of
from dpbench.measure.verification import Verification
from dpbench.measure.worker import neighbour, trial
from dpbench.records import Case, Effort, Status, Step, Trial, Verified, plan, registry
from dpbench.records.options import Options
from dpbench.strategies import Strategy
from tests.amounts import amounts
from tests.runs import bare
from tests.trials import report_on

CASE = Case(model="mlp", strategy="single", batch_size=4, neighbour="mlp")
FIVE = bare(Effort(budget_s=30, warmup_steps=1, min_steps=5, max_steps=5, block_steps=3))


@pytest.fixture(autouse=True)
def known_traits() -> None:
    """Look up all traits, which the registry keeps, before a test replaces `registry.strategy`."""
    for name in registry.own("strategies"):
        registry.traits(name)


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CORES", (processes.CORES * 4)[:4])


def test_the_neighbour_has_the_next_devices() -> None:
    for count in (1, 2):
        found = neighbour.devices_of(replace(CASE, devices=count))
        assert [device.index for device in found] == [*range(count)]
        assert [device.core for device in found] == [count + i for i in range(count)]


class Counting(Strategy):
    """A strategy whose steps in the neighbour count, and whose other steps record that count."""

    def __init__(self) -> None:
        self.counted = multiprocessing.get_context("fork").Value("i", 0)
        self.parent, self.seen = os.getpid(), list[int]()

    @contextmanager
    def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        def step(inputs: Any, target: Any) -> torch.Tensor:
            if os.getpid() == self.parent:
                self.seen.append(self.counted.value)
                time.sleep(0.02)
            else:
                time.sleep(0.001)
                self.counted.value += 1
            return torch.zeros(())

        yield step


def test_the_neighbour_takes_steps_during_every_step_and_ends_with_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Counting()
    monkeypatch.setattr(registry, "strategy", lambda name: both)
    monkeypatch.setattr(trial, "_verify", lambda *_: Verification(Verified.BITWISE))
    done = trial.run(CASE, FIVE, tmp_path)
    assert done.status is Status.OK, done.reason
    assert both.seen[0] >= neighbour.FIRST
    assert both.seen[-1] > both.seen[0] + 5
    assert 0 < done.provenance["neighbour_steps"] <= both.counted.value
    assert not [child for child in multiprocessing.active_children() if child.name == "neighbour"]


def test_a_case_is_verified_and_timed_with_a_neighbour(tmp_path: Path) -> None:
    done = trial.run(CASE, FIVE, tmp_path)
    assert (done.status, done.verified, len(done.timed)) == (
        Status.OK,
        Verified.BITWISE,
        5,
    ), done.reason
    assert done.provenance["neighbour_steps"] > 0
    alone = trial.run(replace(CASE, neighbour=""), FIVE, tmp_path)
    assert "neighbour_steps" not in alone.provenance


def dying(case: Case) -> Any:
    os._exit(3)


def failing(case: Case) -> Any:
    raise MemoryError("no memory is left")


@pytest.mark.parametrize(
    ("fault", "reason"), [(dying, "exit status 3"), (failing, "no memory is left")]
)
def test_a_neighbour_that_fails_fails_the_trial(
    fault: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbour, "devices_of", fault)
    done = trial.run(CASE, FIVE, tmp_path)
    assert (done.status, done.steps) == (Status.FAILED, ())
    assert done.reason.startswith("NeighbourFailed: ")
    assert reason in done.reason


def test_a_neighbour_that_dies_within_its_message_is_named_with_its_end() -> None:
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), (100).to_bytes(4, "big") + b"part")
    theirs.close()
    process = SimpleNamespace(exitcode=-signal.SIGKILL, join=lambda timeout_s: None)
    with pytest.raises(neighbour.NeighbourFailed, match="SIGKILL"):
        neighbour._reply(CASE, ours, process, None)


def test_a_neighbour_that_dies_during_the_steps_fails_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(Counting):
        @contextmanager
        def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
            with super().start(case, model, devices, mark) as step:

                def mortal(inputs: Any, target: Any) -> torch.Tensor:
                    if self.counted.value > 2 * neighbour.FIRST:
                        os._exit(4)
                    return step(inputs, target)

                yield step if os.getpid() == self.parent else mortal

    both = Dying()
    monkeypatch.setattr(registry, "strategy", lambda name: both)
    monkeypatch.setattr(trial, "_verify", lambda *_: Verification(Verified.BITWISE))
    done = trial.run(CASE, FIVE, tmp_path)
    assert done.status is Status.FAILED
    assert "exit status 4" in done.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strategy": "ddp", "devices": 2}, "needs several processes or every core"),
        ({"strategy": "single_all_cores"}, "needs several processes or every core"),
        ({"strategy": "dp", "devices": 3}, "need 6 cores (3 for each model), but available: 4"),
        (
            {"strategy": "dp", "devices": 2, "device_kind": "cuda", "device_ids": (0, 1, 2)},
            "need 4 GPUs (2 for each",
        ),
        (
            {"strategy": "dp", "devices": 2, "device_kind": "cuda", "placement": "colocated"},
            "--placement spread",
        ),
    ],
)
def test_devices_that_are_not_separate_are_skipped_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    case = replace(CASE, **changes)
    assert reason in strategies.refusal(strategies.load(case.strategy), case)
    assert reason not in strategies.refusal(
        strategies.load(case.strategy), replace(case, neighbour="")
    )


def test_each_model_is_alone_and_concurrent_with_the_other() -> None:
    cases = plan.together(("mlp", "lstm"), strategies=["single"], devices=[1], batch_sizes=[8])
    assert [(case.model, case.neighbour) for case in cases] == [
        ("mlp", ""),
        ("mlp", "lstm"),
        ("lstm", ""),
        ("lstm", "mlp"),
    ]
    assert [len(group) for group in plan.side_by_side(cases)] == [1] * 4
    with pytest.raises(ValueError, match="two models"):
        plan.together(("mlp",), strategies=["single"], devices=[1], batch_sizes=[8])
    with pytest.raises(LookupError, match="unknown model"):
        plan.sweep(
            models=["mlp"], neighbour=("nlp",), strategies=["single"], devices=[1], batch_sizes=[8]
        )
    with pytest.raises(ValueError, match="run one at a time"):
        plan.together(
            ("mlp", "mlp"),
            strategies=["single"],
            devices=[1],
            batch_sizes=[8],
            device_kind="emulated",
        )


GIVEN = Options(together=("mlp", "lstm"), device_kind="cpu")


def test_the_option_selects_the_cases() -> None:
    cases, budget_s = cases_of(GIVEN)
    assert (len(cases), {case.strategy for case in cases}, budget_s) == (4, {"single"}, None)
    several, _ = cases_of(replace(GIVEN, devices=(2,), mode=("no_grad",)))
    assert {case.strategy for case in several} == {"single", "dp"}
    assert {case.mode for case in several} == {"no_grad"}


@pytest.mark.parametrize(
    "given",
    [
        {"models": ("mlp",)},
        {"ladder": True},
        {"paired": True},
        {"loader": (2,)},
        {"compile": (True,)},
        {"read_loss": (1,)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_an_option_that_does_not_fit_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"leave out {next(iter(given))}="):
        cases_of(replace(GIVEN, **given))


def test_interference_is_the_ratio_to_the_step_alone() -> None:
    trials = []
    for case, step_s in (
        (replace(CASE, neighbour=""), 0.010),
        (replace(CASE, neighbour="lstm"), 0.013),
    ):
        for number in range(3):
            steps = tuple(Step(step_s * (1 + 0.001 * k), False, float(k)) for k in range(5))
            trials.append(Trial(case=case, verified=Verified.BITWISE, steps=steps, round=number))
    (said,) = report_on(trials).notes
    assert said.startswith("Interference, ")
    assert "lstm" in said
    assert amounts(said)[:3] == ["1.30×", "1.30", "1.30"]
