"""The status and the reason of an error, and the collector during a trial."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dpbench.engine import parallel_apply
from dpbench.engine.fast.turns import KEPT
from dpbench.measure.failures import of_error
from dpbench.measure.worker import bench, trial
from dpbench.records import Case, Effort, Status


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (
            KeyError("a"),
            Status.FAILED,
            "KeyError: 'a'; in replica 1 on device cpu:1 [test_bench.py:",
        ),
        (
            torch.OutOfMemoryError("GPU 0 has a total capacity of"),
            Status.OOM,
            (
                "out of memory on replica 1 on device cpu:1; use a smaller batch, or more devices;"
                " error: OutOfMemory"
            ),
        ),
    ],
    ids=repr,
)
def test_an_error_in_a_replica_is_told_as_it_was_raised(
    error: Exception, status: Status, told: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        parallel_apply([lambda: None, fail], [(), ()], None, ["cpu", "cpu"])
    failure = of_error(caught.value)
    assert failure.status == status
    assert failure.reason.startswith(told)
    assert "\n" not in failure.reason


@pytest.mark.parametrize("frozen", [False, True])
def test_a_trial_leaves_to_the_collector_what_it_had_and_no_more(frozen: bool) -> None:
    """A server freezes torch's half a million objects: collecting them outlasts a small trial."""
    seen: list[tuple[bool, bool]] = []

    def block() -> None:
        seen.append((gc.isenabled(), gc.get_freeze_count() > 0))
        fake.finished = True

    fake = SimpleNamespace(first=block, heat=lambda: None, block=block, finished=False)
    gc.unfreeze()
    if frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    bench.frozen.cache_clear()
    try:
        bench.run_timers([fake])  # type: ignore[list-item]
        # frozen objects of earlier tests may be freed during the trial, because nothing refers to
        # them any more
        assert (
            (0 < gc.get_freeze_count() <= before)
            if frozen
            else gc.get_freeze_count() == before == 0
        )
    finally:
        gc.freeze()
        bench.frozen.cache_clear()
    assert seen == [(False, True)]
    assert gc.isenabled()


@pytest.mark.parametrize(("schedule", "least"), [("reference", 2), ("pool", 1 + 2 * KEPT)])
def test_steps_in_which_the_engine_tries_alternatives_are_warm_up(
    schedule: str, least: int, tmp_path: Path
) -> None:
    """A median over forwards of two kinds would be the time of neither."""
    case = Case(model="mlp", strategy="dp", devices=2, batch_size=8, schedule=schedule)
    effort = Effort(warmup_steps=2, min_steps=4, max_steps=4, budget_s=0.0, block_steps=1)
    found = trial.run(case, effort, tmp_path)
    assert found.status is Status.OK, found.reason
    assert sum(step.warmup for step in found.steps) >= least
    assert len(found.timed) == 4
