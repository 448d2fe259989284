"""The state of the GPUs of a run: their clocks, their facts, and their links."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Status

ALONE = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")
QUICK = Effort(budget_s=0.1, memory_by_phase=False, profile=False, links=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("scratch")) as running:
        yield running


@pytest.mark.gpu
@pytest.mark.parametrize(("warmup_steps", "heats"), [(2, True), (200, False)])
def test_gpus_are_heated_for_the_time_that_the_warm_up_does_not_last(
    server: Server, warmup_steps: int, heats: bool
) -> None:
    """The steps of `mlp` take more than half a millisecond, also on a fast GPU."""
    trial = server.run(ALONE, replace(QUICK, warmup_steps=warmup_steps), 0, 120.0)
    assert trial.status is Status.OK, trial.reason
    assert (trial.setup.get("heat_s", 0.0) > 0) is heats
    assert all(step.warmup for step in trial.steps[:2])


def test_cpus_are_not_heated(server: Server) -> None:
    trial = server.run(replace(ALONE, device_kind="cpu"), QUICK, 0, 120.0)
    assert "heat_s" not in trial.setup
