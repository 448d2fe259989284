"""How the reasons of failed ranks are put together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dpbench.engine import parallel_apply
from dpbench.records import Status
from dpbench.worker.trial import _of_ranks, explain

LOST = "failed\nRuntimeError: Read error: Connection reset by peer"


def test_a_rank_that_ended_without_a_word_is_named_with_its_signal(tmp_path: Path) -> None:
    (tmp_path / "error-0.txt").write_text(LOST)
    (tmp_path / "log").write_text("Fatal Python error: Aborted")
    status, reason = _of_ranks(tmp_path, 2) or ("", "")
    assert status == Status.FAILED
    assert reason.startswith("rank 1 ended without a word (killed by SIGABRT)")


def test_a_ranks_own_error_goes_before_its_peers_lost_connections(tmp_path: Path) -> None:
    (tmp_path / "error-0.txt").write_text(LOST)
    (tmp_path / "error-1.txt").write_text("failed\nArithmeticError: planted")
    assert _of_ranks(tmp_path, 2) == (Status.FAILED, "rank 1: ArithmeticError: planted")


def test_no_memory_goes_before_all(tmp_path: Path) -> None:
    (tmp_path / "error-0.txt").write_text("failed\nArithmeticError: planted")
    (tmp_path / "error-1.txt").write_text("oom\nout of memory on device cpu:1")
    assert _of_ranks(tmp_path, 2) == (Status.OOM, "rank 1: out of memory on device cpu:1")


def test_without_errors_of_ranks_there_is_nothing_to_tell(tmp_path: Path) -> None:
    assert _of_ranks(tmp_path, 2) is None


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyError("a"), Status.FAILED, "KeyError: 'a'; in replica 1 on device cpu:1 [test_trial.py:"),
        (
            torch.OutOfMemoryError("GPU 0 has a total capacity of"),
            Status.OOM,
            "out of memory on replica 1 on device cpu:1; use a smaller batch, or more devices; OutOfMemoryError: GPU 0",
        ),
    ],
    ids=repr,
)
def test_an_error_in_a_replica_is_told_as_it_was_raised(error: Exception, status: Status, told: str) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        parallel_apply([lambda: None, fail], [(), ()], None, ["cpu", "cpu"])
    got, reason = explain(caught.value)
    assert got == status
    assert reason.startswith(told)
    assert "\n" not in reason
