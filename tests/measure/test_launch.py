"""Launches by torchrun and srun: ranks on several machines measure one plan.

Each fault is a trial that names it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from dpbench.records import Trial
from dpbench.store import Store
from tests.commands import Folder
from tests.marked import poll
from tests.measure.launched import MODELS, Launched, free_port, launch

pytestmark = pytest.mark.slow
RUN = ("--rounds", "1", "--patience", "0", "--batch-sizes", "12")


def measures(pid: int) -> bool:
    """Return whether the server of a rank's process has a worker."""
    with suppress(psutil.NoSuchProcess):
        return any(server.children() for server in psutil.Process(pid).children())
    return False


def every(folder: Folder) -> list[Trial]:
    """Return the stored trials."""
    with Store.read(folder.store) as store:
        return store.trials()


def trials(folder: Folder) -> dict[str, Trial]:
    """Return the stored trials by a short name of their cases."""
    return {
        f"{one.case.model.partition(':')[2]} {one.case.strategy} {one.case.devices}": one
        for one in every(folder)
    }


def test_every_fault_of_a_rank_is_a_trial_with_its_name_and_the_sweep_goes_on(
    folder: Folder,
) -> None:
    models = [
        part for name in ("good", "broken", "dead", "late") for part in ("--model", f"nets:{name}")
    ]
    run = launch(
        folder,
        *models,
        "--strategies",
        "single,ddp",
        "--devices",
        "3",
        "--limit",
        "9",
        *RUN,
        nodes=3,
        slow={2: 0.01},
    )
    assert run.codes() == [2, 0, 0], run.err()
    found = trials(folder)
    good = found["good ddp 3"]
    assert good.verified.value in ("bitwise", "within_tolerance"), good.reason
    assert good.case.hosts == 3
    assert [host.ranks for host in good.facts.hosts] == [(0,), (1,), (2,)]
    assert {span.device for span in good.spans} == {0, 1, 2}, "every rank's phases arrive"
    names = [host.name for host in good.facts.hosts]
    for model, rank, reason in (
        ("broken", 1, "a planted error"),
        ("dead", 2, "killed by SIGABRT"),
        ("late", 2, "exceeded the limit"),
    ):
        failed = found[f"{model} ddp 3"]
        assert failed.status.value == ("timeout" if model == "late" else "failed")
        assert failed.reason.startswith(f"rank {rank} on {names[rank]}".partition("#")[0]), (
            failed.reason
        )
        assert reason in failed.reason
    alone = found["good single 1"]
    assert set(alone.readings("step_alone_s")) == {-1, -2, -3}, "every machine runs the baseline"
    assert "COLOCATED" in run.out()
    assert folder.mark.settles() == ""


def test_whichever_process_is_killed_the_same_command_measures_the_rest(folder: Folder) -> None:
    axes = ("--model", "nets:good", "--strategies", "ddp,fsdp", "--devices", "2", "--limit", "20")
    command = (*axes, "--rounds", "3", "--patience", "0", "--batch-sizes", "12")
    run = launch(folder, *command)
    assert poll(folder.final, 60), run.err()
    assert poll(lambda: measures(run.processes[1].pid), 60), run.err()
    run.processes[1].send_signal(signal.SIGKILL)
    assert run.codes() == [2, -signal.SIGKILL]
    assert "Traceback" not in run.err()
    kept = folder.final()
    (failed,) = [trial for trial in every(folder) if trial.status.value != "ok"]
    assert failed.status.value == "failed"
    assert failed.reason.startswith(f"rank 1 on {socket.gethostname()}: "), failed.reason
    assert folder.mark.settles() == ""

    second = launch(folder, *command)
    assert poll(lambda: len(folder.final()) > len(kept), 60), second.err()
    second.processes[0].send_signal(signal.SIGKILL)
    assert second.codes() == [-signal.SIGKILL, 2]
    assert "connection to rank 0" in second.err(1)
    assert folder.mark.settles() == ""
    assert folder.final()[: len(kept)] == kept, "what was measured stays"
    kept = folder.final()

    last = launch(folder, *command)
    assert last.codes() == [2, 0], "the case that failed is not repeated without --retry"
    assert folder.final()[: len(kept)] == kept
    assert len(folder.final()) == 6
    assert folder.query("SELECT count(*) FROM run") == [(1,)]
    assert folder.mark.settles() == ""


GROUP = """
import json, os, signal, sys, time
from datetime import timedelta
from dpbench.measure import group as module
from dpbench.measure.group import Answer, RanksLost, Task
from dpbench.measure.launch import of_environment

module.JOIN, module.LATE_S = timedelta(seconds=3), 2.0


class Group(module.Group):
    tasks = 0

    def _crossings(self):
        self.tasks += 1
        if self.launch.rank == 1 and self.tasks == 3 and fault == "early":
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._crossings()

    def _answer(self, task):
        if self.launch.rank == 1 and task.renew and fault == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.launch.rank == 1:
            time.sleep(4)
        return Answer()


def work(rank):
    os.environ |= {"RANK": str(rank), "GROUP_RANK": str(rank), "WORLD_SIZE": "3"}
    os.dup2(os.open(f"{fault}-{rank}.err", os.O_CREAT | os.O_WRONLY), 2)
    with Group(of_environment()) as group:
        if group.launch.rank:
            group.serve()
        slow = [answer.failure for answer in group.ask(Task(limit_s=4)).values()]
        lost = None
        try:
            failures = [one.failure for one in group.ask(Task(limit_s=0, renew=True)).values()]
            lost = [failure and failure.perhaps_secondary for failure in failures]
            group.ask(Task())
        except RanksLost as error:
            print(json.dumps([slow, lost, error.ranks, str(error)]))


# this process has loaded torch for the ranks of all groups
for word in sys.argv[1:]:
    fault, os.environ["MASTER_PORT"] = word.split(":")
    children = []
    for rank in range(3):
        children.append(os.fork())
        if not children[-1]:
            work(rank)
            sys.exit()
    first, *_ = [os.waitpid(pid, 0)[1] for pid in children]
    if first:
        sys.exit(f"{fault}: rank 0 ended with {os.waitstatus_to_exitcode(first)}")
"""
FAULTS = ("early", "dead", "silent")


def test_a_task_may_outlast_the_time_to_join_and_a_lost_rank_is_named(folder: Folder) -> None:
    """Three groups, one after the other; rank 1 of each has another fault."""
    named = [f"{fault}:{free_port()}" for fault in FAULTS]
    run = launch(folder, program=("-c", GROUP, *named), nodes=1)
    assert run.codes() == [0], run.err()
    for fault, line in zip(FAULTS, run.out().splitlines(), strict=True):
        slow, lost, ranks, reason = json.loads(line)
        assert slow == [None, None, None], f"{fault}: a slow task is no failure"
        expected = None if fault == "early" else [None, False, True]
        assert lost == expected, (
            f"{fault}: no case has failed before the work; afterwards, the failure of rank 2 is"
            " secondary"
        )
        assert ranks == [1], fault
        assert reason.startswith(f"rank 1 on {socket.gethostname()} "), fault
        assert "rank 0" in (folder.path / f"{fault}-2.err").read_text(), fault


EACH = int(os.environ.get("DPBENCH_TEST_RANKS", "1"))
"""The number of ranks of each torchrun agent; 8 makes the launch of 16 ranks, which takes a minute
on two cores.
"""


def test_two_torchrun_agents_measure_together_and_end_without_a_traceback(folder: Folder) -> None:
    (folder.path / "nets.py").write_text(MODELS)
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
    port = free_port()
    agents = []
    for node in range(2):
        launcher = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            f"--node-rank={node}",
            f"--nproc-per-node={EACH}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
        )
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
    assert [len(host.ranks) for host in found.facts.hosts] == [EACH, EACH]
    assert folder.mark.settles() == ""
