"""`dpbench run` on fake GPUs that fail: one trial ends with its cause, and the others are measured.

Each run has a machine of its own, on whose GPU 1 one fault happens (FAKECUDA_FAIL_*). GPUs that
only disturb each other are measured.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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
BOTH = """
import torch
from dpbench.measure.failures import of_error

tensors = [torch.ones(8, device=gpu) for gpu in range(2)]
for gpu in (1, 0):
    try:
        for _ in range(9):
            tensors[gpu].add_(1)
        torch.cuda.synchronize(gpu)
    except RuntimeError as error:
        print(of_error(error).reason.partition("AcceleratorError")[0])
"""


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[commands.Folder]:
    """A folder whose commands have two GPUs without earlier faults."""
    machine = f"faults-{os.getpid()}-{abs(hash(request.node.name))}"
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


def test_gpus_that_all_return_errors_are_all_named(
    folder: commands.Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA then does not tell which of them has failed first."""
    monkeypatch.setenv("FAKECUDA_FAIL_LAUNCH", "0-5")
    monkeypatch.setenv("FAKECUDA_FAIL_ECC", "1-5")
    done = subprocess.run(
        [sys.executable, "-c", BOTH], env=folder.env, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "on device cuda:1: ",
        "on one of the devices cuda:0, cuda:1, which all return an error: ",
    ], done.stderr


@pytest.mark.slow
def test_eight_gpus_that_start_slowly_and_disturb_each_other_are_measured(
    folder: commands.Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKECUDA_DEVICES", "8")
    monkeypatch.setenv("FAKECUDA_CONTEXT_S", "0.5")
    monkeypatch.setenv("FAKECUDA_DELAY_US", "100")
    monkeypatch.setenv("FAKECUDA_TAKEN", "5-6G")
    # the copies that time the links of eight GPUs would take this machine most of a minute
    monkeypatch.setenv("FAKECUDA_NUMERICS", "0")
    monkeypatch.setenv("FAKECUDA_DATA", "0")
    options = ("--strategies", "single,dp", "--devices", "8", "--unverified")
    done = folder.do("run", *RUN, *options, *REPORT)
    assert done.returncode == 0, done.stderr
    trials = {trial.case.devices: trial for trial in dpbench.load(folder.store).trials}
    assert {*trials} == {1, 8}
    for count, trial in trials.items():
        assert trial.status is Status.OK, trial.reason
        assert "no_profile" not in trial.provenance
        assert sum(trial.setup.values()) > 0.5 * count
