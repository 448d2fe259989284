"""`dpbench run` on fake GPUs that fail: one trial ends with its cause, and the others are measured.

Each run has a machine of its own, on whose GPU 1 one fault happens (FAKECUDA_FAIL_*).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

import dpbench
from dpbench.records import Status
from tests import commands

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("fakecuda") is None,
        reason="no fake GPUs: `make test-gpu` installs them into .venv-gpu",
    ),
]
RUN = ("--models", "mlp", "--devices", "2", "--rounds", "1", "--limit", "60", "--quiet")
REPORT = ("--report", "page.html")


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[commands.Folder]:
    """A folder whose commands have two GPUs without earlier faults."""
    machine = f"faults-{os.getpid()}-{request.node.callspec.id}"
    monkeypatch.setenv("FAKECUDA_MACHINE", machine)
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    with commands.folder(tmp_path) as made:
        yield made
    for counters in Path("/dev/shm").glob(f"fakegpu-*-{machine}"):
        counters.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "number", "strategy", "status", "begins", "says"),
    [
        (
            "ALLOC",
            3,
            "dp",
            Status.OOM,
            "out of memory on replica 1 on device cuda:1; ",
            "GPU 1 has a total capacity of 8.00 GiB",
        ),
        (
            "LAUNCH",
            100,
            "ddp",
            Status.FAILED,
            "rank 1: on device cuda:1: AcceleratorError: ",
            "unspecified launch failure",
        ),
        (
            "ECC",
            100,
            "dp",
            Status.FAILED,
            "on device cuda:1: AcceleratorError: ",
            "uncorrectable ECC error encountered",
        ),
        (
            "GPU",
            150,
            "dp",
            Status.FAILED,
            "on device cuda:1: AcceleratorError: ",
            "CUDA-capable device(s) is/are busy or unavailable",
        ),
        (
            "NCCL",
            2,
            "ddp",
            Status.FAILED,
            "rank 1: DistBackendError: NCCL error",
            "rank 1 of 2: ncclBroadcast",
        ),
        (
            "NCCL",
            2,
            "dp[allreduce]",
            Status.FAILED,
            "RuntimeError: NCCL Error 2: unhandled system error",
            "",
        ),
    ],
    ids=["alloc", "launch", "ecc", "gpu", "nccl", "nccl-in-process"],
)
def test_a_fault_fails_one_trial_with_its_cause_and_the_run_goes_on(
    folder: commands.Folder,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    number: int,
    strategy: str,
    status: Status,
    begins: str,
    says: str,
) -> None:
    monkeypatch.setenv(f"FAKECUDA_FAIL_{variable}", f"1-{number}")
    done = folder.do("run", *RUN, "--strategies", f"single,{strategy}", *REPORT)
    assert done.returncode == 2, done.stderr
    trials = {trial.case.strategy: trial for trial in dpbench.load(folder.store).trials}
    failed = trials.pop(strategy.partition("[")[0])
    assert failed.status is status
    assert failed.reason.startswith(begins), failed.reason
    assert says in failed.reason
    assert [trial.status for trial in trials.values()] == [Status.OK]
    page = unescape((folder.path / "page.html").read_text(encoding="utf-8"))
    assert begins.partition(";")[0] in page
    assert says in page
    assert begins.partition(";")[0] in done.stderr
