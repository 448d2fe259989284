"""The scripts of `examples/`: dpbench names the fault of each, and not with `--fixed`.

The tests compare costs, because other processes may keep an answer from a decision. Fake GPUs keep
time if they compute no values; `tests.fakegpu.check` runs the tests on GPUs in this way.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dpbench
from dpbench.analysis.answer import Answer
from dpbench.analysis.decision import Choice
from dpbench.observe import imported, verdict, watching
from dpbench.records import fake, trial
from dpbench.records.disturbance import NOISY
from dpbench.store import Naming
from tests.commands import ROOT
from tests.marked import patience
from tests.observe.watched_scripts import run

EXAMPLES = ROOT / "examples"
VARIANTS = ((), ("--fixed",))


@dataclass(frozen=True)
class Told:
    """What dpbench says of a script: its answer, and the seconds of a step that problems cost."""

    answer: Answer
    costs: dict[str, float]

    def seconds(self, key: str) -> float:
        """Return the cost of the problem with this key, in or below a decision; 0 without it."""
        return self.costs.get(key, 0.0)

    def share(self, key: str) -> float:
        assert self.answer.row
        assert self.answer.row.mean
        return self.seconds(key) / self.answer.row.mean.value

    def names(self, key: str) -> bool:
        return self.answer.problem == key

    @property
    def sure(self) -> bool:
        """Return whether the answer is a decision, and no other process can have changed it."""
        return NOISY not in self.answer.labels and self.answer.choice is not Choice.UNKNOWN


def told(store: Path) -> Told:
    found = dpbench.load(store)
    (answer,) = found.answers
    (diagnosis,) = found.analysis.diagnoses
    problems = [*diagnosis.findings, *diagnosis.open]
    return Told(
        answer,
        {one.rule.key: one.evidence.size_s.value for one in problems if one.evidence.size_s},
    )


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dpbench judge the times of fake GPUs, as if they were real."""
    for module in (fake, trial):
        monkeypatch.setattr(module, "fake_gpus", lambda facts: False)


def watched(script: str, folder: Path) -> list[Told]:
    """Watch both variants of an example in this process."""
    stores = [folder / f"{number}.db" for number in range(len(VARIANTS))]
    for store, variant in zip(stores, VARIANTS, strict=True):
        with watching.watch(store, script=script, command=script) as result:
            assert run(EXAMPLES / script, variant) == 0
        assert result.run_id, result.unknown
    return [told(store) for store in stores]


def profiled(script: str, folder: Path) -> list[Told]:
    """Run both variants of an example that writes a trace, and import the traces."""
    stores = [folder / f"{number}.db" for number in range(len(VARIANTS))]
    for store, variant in zip(stores, VARIANTS, strict=True):
        assert run(EXAMPLES / script, variant) == 0
        imported.store(store, imported.load([folder / "small_batch.json"]), Naming())
    return [told(store) for store in stores]


def assert_ends(key: str, faulty: Told, fixed: Told) -> None:
    """Check that a problem costs a share of a step that stands out, and little in the fixed one."""
    assert faulty.share(key) > 2 * verdict.WORTH
    assert faulty.names(key) or not faulty.sure
    assert fixed.seconds(key) < faulty.seconds(key) / 2
    assert not fixed.names(key) or not fixed.sure


@pytest.mark.slow
@pytest.mark.alone
def test_a_starved_loader_is_named(tmp_path: Path) -> None:
    faulty, fixed = watched("starved_loader.py", tmp_path)
    assert_ends("loading", faulty, fixed)


RANK = """
import os, sys
from pathlib import Path

from dpbench.observe import watching
from tests.observe.watched_scripts import run

script, *ports = sys.argv[1:]
for number, port in enumerate(ports):
    os.environ["MASTER_PORT"] = port
    with watching.watch(f"{number}.db", script=script):
        assert run(Path(script), ["--fixed"] * number) == 0
"""
"""A rank that watches both variants, because each new process would load torch again."""


@pytest.mark.slow
@pytest.mark.alone
def test_a_late_rank_is_named(tmp_path: Path) -> None:
    with ExitStack() as stack:  # all at once, so that the ports differ
        free = [stack.enter_context(socket.socket()) for _ in VARIANTS]
        for one in free:
            one.bind(("127.0.0.1", 0))
        ports = [str(one.getsockname()[1]) for one in free]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(EXAMPLES / "late_rank.py"), *ports],
            cwd=tmp_path,
            env={
                **os.environ,
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2"),
                **{"MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""},
                **{"PYTHONPATH": str(ROOT)},
            },
        )
        for rank in range(2)
    ]
    assert [one.wait(patience(60)) for one in ranks] == [0, 0]
    faulty, fixed = (told(tmp_path / f"{number}.db") for number in range(len(VARIANTS)))
    assert_ends("late rank", faulty, fixed)


@pytest.mark.gpu
@pytest.mark.usefixtures("judged")
def test_reads_in_each_step_are_named_on_a_gpu(tmp_path: Path) -> None:
    faulty, fixed = watched("many_reads.py", tmp_path)
    assert_ends("reads", faulty, fixed)


@pytest.mark.gpu
@pytest.mark.usefixtures("judged")
def test_a_batch_too_small_is_named_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faulty, fixed = profiled("small_batch.py", tmp_path)
    assert_ends("launches", faulty, fixed)


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("script", "observed", "key"),
    [("many_reads.py", watched, "reads"), ("small_batch.py", profiled, "launches")],
)
@pytest.mark.usefixtures("on_cpu")
def test_what_only_a_gpu_suffers_from_is_not_named_on_a_cpu(
    script: str,
    observed: Callable[[str, Path], list[Told]],
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for one in observed(script, tmp_path):
        assert one.share(key) < verdict.WORTH
        assert not one.names(key)
