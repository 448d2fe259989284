"""Endings: how failures are told: messages that cannot be shown, SIGKILL, threads, tracebacks."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dpbench.api.progress import brief
from dpbench.hardware import processes
from dpbench.measure import failures
from dpbench.measure.verification import Verification, check_results
from dpbench.measure.worker import trial as worker
from dpbench.records import Case, Effort, Status, Trial, Verified
from dpbench.records.trial import Failure
from dpbench.strategies import Strategy, load
from tests.amounts import amounts
from tests.runs import TWO_STEPS, bare


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


class MuteRuntimeError(Mute, RuntimeError):
    pass


@pytest.mark.parametrize("error", [Mute(), MuteRuntimeError(), ValueError("\ud800 surrogate")])
def test_any_exception_becomes_a_record_that_can_be_sent(error: Exception) -> None:
    error.add_note("in replica 1")
    found = failures.of_rank(error, 1, 0.0)
    assert found.reason.startswith(type(error).__name__)
    assert "in replica 1" in found.reason
    assert Failure.from_json(found.to_json().encode().decode()) == found


# -- SIGKILL


def kernel(root: Path, cgroup: str = "", **files: str) -> Path:
    """Write the files of a kernel that counts kills for lack of memory."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_kills_for_lack_of_memory_are_those_of_the_own_cgroup_or_else_of_the_system(
    tmp_path: Path,
) -> None:
    assert processes.killed_for_memory(tmp_path) is None
    kernel(tmp_path, "4:memory:/a\n0::/b/c\n", **{"proc/vmstat": "pgfault 9\noom_kill 3\n"})
    assert processes.killed_for_memory(tmp_path) == 3
    kernel(
        tmp_path,
        "4:memory:/a\n0::/b/c\n",
        **{"sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 5"},
    )
    assert processes.killed_for_memory(tmp_path) == 5
    kernel(
        tmp_path,
        "4:memory:/a\n0::/b/c\n",
        **{"sys/fs/cgroup/b/c/memory.events": "oom 8\noom_kill 7\n"},
    )
    assert processes.killed_for_memory(tmp_path) == 7


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        (3, 4, "because memory ran out; use a smaller batch"),
        (3, 3, "another process sent the signal"),
        (None, 3, "does not report whether memory ran out"),
        (3, None, "does not report whether memory ran out"),
    ],
)
def test_sigkill_is_blamed_on_memory_only_when_the_kernel_says_so(
    monkeypatch, before, now, cause
) -> None:
    monkeypatch.setattr(processes, "killed_for_memory", lambda: now)
    assert cause in failures.of_end(-signal.SIGKILL, 0, 1.0, before).reason
    assert processes.advice(-signal.SIGSEGV, before) == ""
    assert processes.advice(0, before) == ""


@pytest.mark.parametrize(
    ("peak", "now", "cause"),
    [
        (85, None, "reached 85 of 100 GiB, so memory probably ran out; use a smaller batch"),
        (85, 3, "reached 85 of 100 GiB, so memory probably ran out; use a smaller batch"),
        (2, None, "reached 2 of 100 GiB; the kernel does not report whether memory ran out"),
        (2, 3, "reached 2 of 100 GiB; another process sent the signal"),
        (2, 4, "the kernel killed a process because memory ran out"),
    ],
)
def test_sigkill_is_blamed_on_memory_also_if_the_resident_set_says_so(
    monkeypatch, peak, now, cause
) -> None:
    monkeypatch.setattr(processes, "killed_for_memory", lambda: now)
    monkeypatch.setattr(processes, "memory_limit", lambda: 100 << 30)
    assert cause in processes.advice(-signal.SIGKILL, 3, peak << 30)
    assert cause in failures.of_end(-signal.SIGKILL, 0, 1.0, 3, peak << 30).reason


@pytest.mark.parametrize(
    ("number", "before", "now", "peak", "outside"),
    [
        (signal.SIGKILL, 3, 3, 2, True),
        (signal.SIGKILL, None, None, None, True),
        (signal.SIGKILL, 3, 4, 2, False),
        (signal.SIGKILL, 3, 3, 85, False),
        (signal.SIGTERM, 3, 4, 85, True),
        (signal.SIGHUP, 3, 3, 2, True),
        (signal.SIGSEGV, 3, 3, 2, False),
        (signal.SIGABRT, 3, 3, 2, False),
        (signal.SIGBUS, 3, 3, 2, False),
    ],
)
def test_signals_of_other_processes_are_told_from_crashes_and_lack_of_memory(
    monkeypatch, number, before, now, peak, outside
) -> None:
    monkeypatch.setattr(processes, "killed_for_memory", lambda: now)
    monkeypatch.setattr(processes, "memory_limit", lambda: 100 << 30)
    peak_bytes = None if peak is None else peak << 30
    assert processes.killed_from_outside(-number, before, peak_bytes) == outside
    assert not processes.killed_from_outside(0, before, peak_bytes)
    assert not processes.killed_from_outside(None, before, peak_bytes)
    status = Status.KILLED if outside else Status.FAILED
    assert failures.of_end(-number, 1, 0.0, before, peak_bytes).status is status


def test_the_limit_of_memory_is_that_of_the_cgroup_and_at_most_that_of_the_machine(
    tmp_path: Path,
) -> None:
    assert processes.memory_limit(tmp_path) is None
    kernel(
        tmp_path,
        "4:memory:/a\n0::/b/c\n",
        **{"proc/meminfo": "MemTotal:       8 kB\nMemFree: 1 kB\n"},
    )
    assert processes.memory_limit(tmp_path) == 8192
    kernel(
        tmp_path,
        "4:memory:/a\n0::/b/c\n",
        **{"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712"},
    )
    assert processes.memory_limit(tmp_path) == 8192
    kernel(tmp_path, "4:memory:/a\n0::/b/c\n", **{"sys/fs/cgroup/b/c/memory.max": "max\n"})
    assert processes.memory_limit(tmp_path) == 8192
    kernel(tmp_path, "4:memory:/a\n0::/b/c\n", **{"sys/fs/cgroup/b/c/memory.max": "4096\n"})
    assert processes.memory_limit(tmp_path) == 4096


# -- threads


def test_a_model_that_changes_the_number_of_threads_is_noticed() -> None:
    strategy = load("dp")
    worker.check_threads(strategy)
    torch.set_num_threads(3)
    with pytest.raises(
        RuntimeError, match=r"number of torch's threads from 1 to 3.*remove torch.set_num_threads"
    ):
        worker.check_threads(strategy)


NET = """
import torch
from types import SimpleNamespace

class Net(torch.nn.Linear):
    def forward(self, x):
        torch.set_num_threads(3)
        return super().forward(x)

net = SimpleNamespace(
    build=lambda size: Net(4, 2),
    batch=lambda n, seed, size: (torch.ones(n, 4), torch.ones(n, 2)),
    loss=torch.nn.functional.mse_loss,
)
"""


def test_a_trial_whose_model_changes_the_number_of_threads_fails(tmp_path: Path) -> None:
    path = tmp_path / "greedy.py"
    path.write_text(NET)
    case = Case(model=f"{path}:net", strategy="single", batch_size=4)
    found = worker.run(case, TWO_STEPS, tmp_path)
    assert found.status is Status.FAILED
    assert "threads" in found.reason
    assert amounts(found.reason)[:2] == ["1", "3"]


# -- NaN after the first step


class Loop(Strategy):
    """A strategy with given losses, which spoils the model's weights in the step `weights`."""

    def __init__(self, losses: dict[int, float], *, weights: int = 0, shared: bool = False) -> None:
        self._losses, self._weights, self._taken = losses, weights, 0
        self._memory = torch.zeros(()) if shared else None

    @contextmanager
    def start(self, case: Case, model: Any, devices: Any, mark: Any) -> Iterator[Any]:
        self._taken = 0

        def step(inputs: Any, target: Any) -> torch.Tensor:
            self._taken += 1
            if self._taken == self._weights:
                next(model.module.parameters()).data.fill_(math.nan)
            loss = torch.tensor(self._losses.get(self._taken, 1.0))
            return loss if self._memory is None else self._memory.copy_(loss)

        yield step


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (Loop({7: math.nan}), "the loss of step 7 contains NaN; the first step was correct"),
        (Loop({7: math.inf, 8: math.nan}), "the loss of step 7 contains infinity"),
        (
            Loop(dict.fromkeys(range(4, 99), math.nan), shared=True),
            "the loss of step 7 contains NaN",
        ),  # the last one
        (Loop({}, weights=12), "after the timed steps, the weight fc1.weight contains NaN"),
    ],
    ids=["NaN", "infinity", "shared", "weights"],
)
def test_a_loss_or_weight_that_becomes_nan_in_the_timed_steps_is_named(
    monkeypatch, loop, said
) -> None:
    monkeypatch.setattr(worker, "_verify", lambda *_, **__: Verification(Verified.BITWISE))
    effort = bare(Effort(min_steps=10, max_steps=10, warmup_steps=2, block_steps=5))
    with pytest.raises(ValueError, match=said):
        worker.measure(Case(model="mlp", strategy="single", batch_size=4), effort, loop)
    case = Case(model="mlp", strategy="single", batch_size=4, unverified=True)
    assert worker.measure(case, effort, loop).status is Status.OK


DIVERGING = """
import torch
from types import SimpleNamespace

net = SimpleNamespace(build=lambda size: torch.nn.Linear(4, 2), loss=torch.nn.functional.mse_loss,
                      batch=lambda n, seed, size: (torch.ones(n, 4), torch.ones(n, 2)),
                      optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e9))
"""


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_trial_whose_training_diverges_fails(tmp_path: Path, strategy: str) -> None:
    path = tmp_path / "diverging.py"
    path.write_text(DIVERGING)
    case = Case(model=f"{path}:net", strategy=strategy, batch_size=4, optimizer="own")
    found = worker.run(case, bare(Effort()), tmp_path)
    assert found.status is Status.FAILED
    assert re.search(r"loss .* [2-9] contains (NaN|infinity)", found.reason), found.reason


@pytest.mark.parametrize(("output", "fails"), [(math.nan, True), (-math.inf, False)])
def test_outputs_may_be_infinite_but_not_nan(output: float, fails: bool) -> None:
    with (
        pytest.raises(ValueError, match="the output of step 9 contains NaN")
        if fails
        else nullcontext()
    ):
        check_results([{"scores": torch.tensor([1.0, output])}], 9, trains=False)


# -- progress


@pytest.mark.parametrize(
    ("status", "reason", "line"),
    [
        (
            Status.FAILED,
            (
                "ValueError: Caught ValueError in replica 0\nTraceback:\n  a\nValueError: no"
                " [m.py:3]\n"
            ),
            "ValueError: no [m.py:3]",
        ),
        (
            Status.TIMEOUT,
            "the limit of 5 s was exceeded:\nstack\nstack",
            "the limit of 5 s was exceeded:",
        ),
        (Status.SKIPPED, "needs a GPU", "needs a GPU"),
        (Status.FAILED, "", ""),
    ],
)
def test_progress_shows_the_error_and_not_the_head_of_its_traceback(
    status: Status, reason: str, line: str
) -> None:
    assert (
        brief(
            Trial(case=Case(model="mlp", strategy="dp", batch_size=8), status=status, reason=reason)
        )
        == line
    )
