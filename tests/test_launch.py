"""Launches by torchrun and srun: ranks on several machines measure one plan; each fault is a trial that names it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from dpbench.records import Trial
from dpbench.store import Store
from tests.commands import Folder
from tests.launched import MODELS, Launched, launch
from tests.marked import poll

pytestmark = pytest.mark.slow
RUN = ("--rounds", "1", "--patience", "0", "--batch-sizes", "12")


def trials(folder: Folder) -> dict[str, Trial]:
    """Return the stored trials by a short name of their cases."""
    with Store.read(folder.store) as store:
        found = store.trials()
    return {f"{one.case.model.partition(':')[2]} {one.case.strategy} {one.case.devices}": one for one in found}


def test_every_fault_of_a_rank_is_a_trial_with_its_name_and_the_sweep_goes_on(folder: Folder) -> None:
    models = [part for name in ("good", "broken", "dead", "late") for part in ("--model", f"nets:{name}")]
    run = launch(
        folder, *models, "--strategies", "single,ddp", "--devices", "3", "--limit", "9", *RUN, nodes=3, slow={2: 0.01}
    )
    assert run.codes() == [2, 0, 0], run.err()
    found = trials(folder)
    good = found["good ddp 3"]
    assert good.verified.value in ("bitwise", "within_tolerance"), good.reason
    assert good.case.hosts == 3
    assert [host.ranks for host in good.hosts] == [(0,), (1,), (2,)]
    assert {span.device for span in good.spans} == {0, 1, 2}, "every rank's phases arrive"
    names = [host.name for host in good.hosts]
    for model, rank, reason in (
        ("broken", 1, "a planted error"), ("dead", 2, "killed by SIGABRT"), ("late", 2, "it is late"),
    ):  # fmt: skip
        failed = found[f"{model} ddp 3"]
        assert failed.status.value == "failed"
        assert failed.reason.startswith(f"rank {rank} on {names[rank]}".partition("#")[0]), failed.reason
        assert reason in failed.reason
    alone = found["good single 1"]
    assert set(alone.readings("step_alone_s")) == {-1, -2, -3}, "every machine runs the baseline"
    assert "COLOCATED" in run.out()
    assert folder.mark.settles() == ""


def test_what_was_measured_is_kept_when_ranks_are_killed_and_the_same_command_goes_on(folder: Folder) -> None:
    axes = ("--model", "nets:good", "--strategies", "single,ddp,fsdp", "--devices", "1,2", "--limit", "20")
    command = (*axes, *RUN[:-1], "12,18")  # enough trials that neither run ends before it is killed
    run = launch(folder, *command)
    assert poll(folder.final, 60), run.err()
    run.processes[1].send_signal(signal.SIGKILL)
    assert poll(lambda: any(row[3] == "failed" for row in folder.final()), 60), run.err()
    reasons = [trial.reason for trial in trials(folder).values() if trial.status.value == "failed"]
    assert all("rank 1 on" in reason and "its process has ended" in reason for reason in reasons), reasons
    run.processes[0].send_signal(signal.SIGKILL)
    run.codes()
    assert folder.mark.settles() == ""
    kept = folder.final()

    again = launch(folder, *command)
    assert poll(lambda: len(folder.final()) > len(kept) or again.processes[0].poll() is not None, 60), again.err()
    again.processes[0].send_signal(signal.SIGKILL)
    assert again.codes()[1] == 64
    assert "lost the connection to rank 0" in again.err(1)
    assert "resuming run" in again.err() or len(kept) == 10
    assert folder.final()[: len(kept)] == kept, "what was measured stays"
    assert folder.mark.settles() == ""


EACH = int(os.environ.get("DPBENCH_TEST_RANKS", "1"))
"""The number of ranks of each torchrun agent; 8 makes the launch of 16 ranks, which takes a minute on two cores."""


def test_two_torchrun_agents_measure_together_and_end_without_a_traceback(folder: Folder) -> None:
    (folder.path / "nets.py").write_text(MODELS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    axes = (
        "--model",
        "nets:good",
        "--strategies",
        "single,ddp",
        "--devices",
        f"{2 * EACH}",
        *RUN,
        "--batch-sizes",
        "48",
    )
    agents = []
    for node in range(2):
        launcher = (
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}",
            f"--nproc-per-node={EACH}", "--master-addr=127.0.0.1", f"--master-port={port}",
        )  # fmt: skip
        with (folder.path / f"{node}.err").open("w") as err:
            agents.append(
                subprocess.Popen(
                    [*launcher, "-m", "dpbench", "run", *axes],
                    cwd=folder.path,
                    env=folder.env,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=err,
                    start_new_session=True,
                )
            )
    run = Launched(folder, agents)
    assert run.codes() == [0, 0], run.err() + run.err(1)
    assert "Traceback" not in run.err() + run.err(1)
    found = trials(folder)[f"good ddp {2 * EACH}"]
    assert found.status.value == "ok", found.reason
    assert found.case.hosts == 2
    assert [len(host.ranks) for host in found.hosts] == [EACH, EACH]
    assert folder.mark.settles() == ""
