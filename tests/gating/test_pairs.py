"""Pairs: the order of the sides, and unequal work, with sides that take no steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpbench.gating import pairs
from dpbench.gating.judge import LOOKS, Answer
from dpbench.gating.sides import Block, Starter
from dpbench.gating.trees import Tree
from dpbench.gating.verdict import Verdict
from dpbench.records import Trial
from dpbench.records.facts import stated
from dpbench.records.observed import Observed
from tests.gating.projects import commit, project
from tests.observed_loops import case
from tests.trials import trial_of


class Side:
    """A side whose steps all take as long, and which has a log of what it does."""

    files: Sequence[str] = ()

    def __init__(self, name: str, log: list[str], trial: Trial | None) -> None:
        self._name, self._log, self._trial = name, log, trial
        log.append(f"{name} starts")

    def take(self, steps: int) -> Block:
        self._log.append(self._name)
        return Block(0.01, 0.01, 10**9)

    def release(self) -> None:
        pass

    def trials(self) -> Sequence[Trial]:
        return [self._trial] if self._trial else []


class Known:
    """A work whose sides have these trials, base and head."""

    name = "step"

    def __init__(self, *trials: Trial) -> None:
        self._trials = dict(zip(("base", "head"), trials, strict=False))
        self.log: list[str] = []

    @contextmanager
    def starting(self, trees: Sequence[Tree], folder: Path) -> Iterator[Starter]:
        yield self._side

    @contextmanager
    def _side(self, tree: Tree, number: int) -> Iterator[Any]:
        name = tree.folder.name
        yield Side(name, self.log, self._trials.get(name))


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def decided(repository: Path, work: Known) -> Verdict:
    commit(repository, {f"{len([*repository.iterdir()])}.py": ""})
    return pairs.decided("base", [work], folder=repository)


def test_each_side_starts_first_in_every_second_pair(repository: Path) -> None:
    work = Known()
    assert decided(repository, work).answer is Answer.NOT_SLOWER
    starts = [line.split()[0] for line in work.log if line.endswith("starts")]
    assert starts[:8] == ["base", "head", "head", "base"] * 2


@pytest.mark.parametrize(("first_s", "pairs_taken"), [(200.0, 1), (60.0, 2), (20.0, 4)])
def test_no_pair_begins_after_the_budget(
    repository: Path, monkeypatch: pytest.MonkeyPatch, first_s: float, pairs_taken: int
) -> None:
    now = [0.0]
    monkeypatch.setattr(pairs, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Known):
        @contextmanager
        def _side(self, tree: Tree, number: int) -> Iterator[Any]:
            now[0] += first_s / 2
            with super()._side(tree, number) as side:
                yield side

    commit(repository, {"more.py": ""})
    verdict = pairs.decided("base", [Slow()], folder=repository, budget_s=100, limit=1e-9)
    assert verdict.findings[0].pairs == pairs_taken


def of_loop(optimizer: str = "sgd", batch: int = 64, **facts: Any) -> Trial:
    loop = Observed(command="train.py", reads={}, **facts)
    of = case(batch_size=batch, optimizer=optimizer)
    return trial_of(of, [0.01] * 4, provenance=stated(loop=loop))


@pytest.mark.parametrize(
    "head",
    [of_loop(batch=32), of_loop("adamw+muon"), of_loop(batches=2), of_loop(updates=3)],
    ids=["batch", "optimizers", "accumulation", "backwards"],
)
def test_unequal_work_gets_no_answer(repository: Path, head: Trial) -> None:
    verdict = decided(repository, Known(of_loop(), head))
    assert verdict.answer is Answer.UNKNOWN
    assert not verdict.worse
    assert "unequal" in verdict.findings[0].reason
    assert verdict.findings[0].pairs == LOOKS[0]


def test_batches_of_random_sizes_are_no_unequal_work(repository: Path) -> None:
    class Random(Known):
        @contextmanager
        def _side(self, tree: Tree, number: int) -> Iterator[Any]:
            name = tree.folder.name
            yield Side(name, self.log, of_loop(batch=20 + number + 50 * (name == "head")))

    assert decided(repository, Random()).answer is Answer.NOT_SLOWER
    unknown = Known(of_loop(batch=0), of_loop(batch=32))
    assert decided(repository, unknown).answer is Answer.NOT_SLOWER


def test_other_settings_of_equal_work_are_told(repository: Path) -> None:
    base = of_loop()
    head = replace(base, case=replace(base.case, precision="bf16"))
    verdict = decided(repository, Known(base, head))
    assert verdict.answer is Answer.NOT_SLOWER
    assert any("bf16" in note for note in verdict.notes)
    same = decided(repository, Known(base, of_loop("adamw")))
    assert same.answer is Answer.NOT_SLOWER
