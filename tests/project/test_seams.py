"""The seams are typed: no decision depends on a strategy's name, or on the wording of a message."""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dpbench
from dpbench import models
from dpbench.engine import errors
from dpbench.hardware import processes
from dpbench.hardware.devices import _byte_count
from dpbench.measure import failures, verification
from dpbench.measure.worker import memory, trial
from dpbench.records import Case, Mark, Status, Trial, Verified, registry
from dpbench.records.trial import in_order
from dpbench.strategies import Strategy
from tests.runs import TWO_STEPS

ROOT = Path(dpbench.__file__).parent
NAMES = frozenset(registry.own("strategies"))
WORDING = {
    "records/plan.py": (
        "the strategies that a run without --strategies measures on each kind of device"
    ),
    "report/devices.py": "headings of a table",
    "report/figures.py": "texts of a drawing",
    "analysis/findings/scale.py": "the name of a finding",
}
"""The modules in which the name of a strategy means something else, or is a default or a text."""
DP = Case(model="mlp", strategy="dp", schedule="reference", devices=2, batch_size=8)
EMULATED = Case(
    model="mlp",
    strategy="dp",
    schedule="reference",
    devices=2,
    batch_size=8,
    device_kind="emulated",
)


def named(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the constants of a module that are exactly a strategy's name."""
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node.value in NAMES
    )


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def decides(node: ast.AST, above: dict[ast.AST, ast.AST]) -> bool:
    """Return whether a constant is compared with a strategy, or given as a case's strategy."""
    around = above[node]
    if isinstance(around, ast.keyword):
        return around.arg == "strategy"
    while isinstance(around, ast.Tuple | ast.List | ast.Set):
        around = above[around]
    if not isinstance(around, ast.Compare):
        return False
    sides = [around.left, *around.comparators]
    return any(getattr(side, "attr", getattr(side, "id", "")) == "strategy" for side in sides)


@pytest.mark.parametrize(
    "path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_only_strategies_know_a_strategy_by_its_name(path: Path) -> None:
    if path.parent.name == "strategies":
        return
    tree = ast.parse(path.read_text())
    above = parents(tree)
    found = list(named(tree))
    decided = [f"{path}:{node.lineno}: {node.value!r}" for node in found if decides(node, above)]
    assert not decided, f"{decided}: ask for traits (Case.traits, registry.of_role)"
    if str(path.relative_to(ROOT)) not in WORDING:
        assert not found, [f"{path}:{node.lineno}: {node.value!r}" for node in found]


# ---------------------------------------------------------------- wording


AS_DP = registry.traits("dp")
"""For strategies in the place of dp, because a process keeps the traits of a name."""


class Wrong(Strategy):
    """Takes a step whose gradients are wrong."""

    traits = AS_DP

    @contextmanager
    def start(self, case: Case, model: models.Model, devices: Any, mark: Mark) -> Iterator[Any]:
        def step(inputs: Any, target: Any) -> torch.Tensor:
            for parameter in model.module.parameters():
                parameter.grad = torch.ones_like(parameter)
            return torch.zeros(())

        yield step


class Raising(Strategy):
    """Raises an error when it starts."""

    traits = AS_DP

    def __init__(self, error: Exception) -> None:
        self._error = error

    def start(self, case: Case, model: models.Model, devices: Any, mark: Mark) -> Any:
        raise self._error


def run(case: Case, folder: Path, **_: Any) -> Trial:
    return trial.run(case, TWO_STEPS, folder)


def bounded_device_1(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Run a case whose emulated device 1 alone has too little memory.

    The trial has a thread for itself: torch keeps the graph of a backward that failed, with tensors
    on the devices, until its thread ends.
    """

    @contextmanager
    def bound(case: Case) -> Iterator[None]:
        _byte_count.byte_count.bind(torch.device("lazy", 1), 400_000)
        try:
            yield
        finally:
            _byte_count.byte_count.bind(torch.device("lazy", 1), None)

    monkeypatch.setattr(memory, "bound", bound)
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(trial.run, case, TWO_STEPS, folder).result()
    # torch frees it after Python's part of the thread has ended
    while _byte_count.byte_count.now(torch.device("lazy", 0)):
        gc.collect()
    return done


def planted(strategy: Strategy) -> Callable[..., Trial]:
    def run(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
        monkeypatch.setattr(registry, "strategy", lambda name: strategy)
        return trial.run(case, TWO_STEPS, folder)

    return run


FAILED = (Status.FAILED, None, Verified.NOT_APPLICABLE)
CASES: dict[str, tuple[Callable[..., Trial], Case, tuple[Status, int | None, Verified]]] = {
    "device 1 is full": (bounded_device_1, EMULATED, (Status.OOM, 1, Verified.NOT_APPLICABLE)),
    "wrong gradients": (planted(Wrong()), DP, (Status.FAILED, None, Verified.NO)),
    "an error": (planted(Raising(ValueError("a"))), DP, FAILED),
    "the host is full": (
        planted(Raising(MemoryError("a"))),
        DP,
        (Status.OOM, None, Verified.NOT_APPLICABLE),
    ),
    "no such model": (run, Case(model="none", strategy="dp", batch_size=1), FAILED),
}


def say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every text of ours that a failure is made of."""
    monkeypatch.setattr(verification.Verification, "__str__", lambda self: "-")
    monkeypatch.setattr(trial, "Unverified", lambda message: failures.Unverified("-"))
    monkeypatch.setattr(failures, "_frames", lambda error: "-")
    monkeypatch.setattr(failures, "_memory_of", lambda error, ordinal: "-")
    monkeypatch.setattr(processes, "ending", lambda status: "-")
    monkeypatch.setattr(processes, "advice", lambda status, killed_before, peak_bytes: "-")
    monkeypatch.setattr(errors, "_rebuilt", lambda error, message: RuntimeError("-"))
    monkeypatch.setattr(
        _byte_count.DeviceFull, "__init__", lambda self, *_: RuntimeError.__init__(self, "-")
    )


@pytest.mark.parametrize("silent", [False, True], ids=["as usual", "every message changed"])
@pytest.mark.parametrize("name", CASES)
def test_the_outcome_of_a_failure_depends_on_no_message(
    name: str, silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, case, expected = CASES[name]
    if silent:
        say_nothing(monkeypatch)
    done = how(case, tmp_path, monkeypatch=monkeypatch)
    assert (done.status, done.failed_device, done.verified) == expected, done.reason


@pytest.mark.parametrize("silent", [False, True], ids=["as usual", "every message changed"])
def test_the_record_of_a_rank_depends_on_no_message(
    silent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if silent:
        say_nothing(monkeypatch)
    wrong = failures.of_rank(failures.Unverified("-" if silent else "wrong"), 1, 0.0)
    assert (wrong.status, wrong.rank, wrong.device, wrong.verified) == (
        Status.FAILED,
        1,
        None,
        Verified.NO,
    )
    full = failures.of_rank(torch.OutOfMemoryError("-"), 1, 0.0)
    assert (full.status, full.device, full.perhaps_secondary) == (Status.OOM, 1, False)
    ended = failures.of_end(-9, 0, 1.0)
    lost = failures.of_rank(RuntimeError("-"), 1, 0.5)
    assert in_order([lost, ended]) == (ended, lost)
    assert in_order([full, lost])[0] is full
    assert all(type(one).from_json(one.to_json()) == one for one in (wrong, full, ended, lost))
