"""Runs in a real Slurm of two nodes: as tasks of srun; what was measured survives every kill."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from dpbench.store import Store
from tests.commands import COMMAND, Folder
from tests.marked import poll
from tests.measure import slurm as slurms
from tests.measure.launched import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(slurms.missing()), reason=slurms.missing())]
GOOD = ("--model", "nets:good", "--patience", "0", "--batch-sizes", "12")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurms.Slurm]:
    with slurms.slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def start(folder: Folder, slurm: slurms.Slurm, *command: str) -> subprocess.Popen[str]:
    """Start a command in a folder with the test's models; its output is in the folder's files."""
    (folder.path / "nets.py").write_text(MODELS)
    # the nodes' names are known to Slurm only
    env = folder.env | slurm.env | {"MASTER_ADDR": "127.0.0.1"}
    with (folder.path / "out").open("w") as out, (folder.path / "err").open("w") as err:
        return subprocess.Popen(
            command,
            cwd=folder.path,
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def agent_of(folder: Folder, rank: int) -> int:
    """Return the process id of a rank's agent, from its environment."""
    for process in folder.mark.alive():
        if process.environ().get("SLURM_PROCID") == str(rank) and process.cmdline()[1:4] == [
            "-m",
            "dpbench",
            "run",
        ]:
            return process.pid
    raise LookupError(rank)


def test_srun_measures_over_two_nodes_and_goes_on_after_daemons_and_ranks_were_killed(
    folder: Folder, slurm: slurms.Slurm
) -> None:
    run = (
        *COMMAND,
        "run",
        *GOOD,
        "--rounds",
        "2",  # so that the rank that is killed is never in the last trial
        "--limit",
        "20",
        "--strategies",
        "single,ddp,fsdp",
        "--devices",
        "1,2",
    )
    process = start(folder, slurm, "srun", "--nodes=2", "--ntasks=2", *run)
    assert poll(folder.final, 60), folder.err
    os.kill(slurm.pid("n2"), signal.SIGKILL)  # the daemon of a node: its tasks go on
    (slurm.folder / "n2.pid").unlink()
    assert poll(
        lambda: any(row[3] == "ok" and '"hosts": 2' in case for row, case in cases(folder)), 60
    ), folder.err
    os.kill(agent_of(folder, 1), signal.SIGKILL)
    process.wait(100)
    with Store.read(folder.store) as store:
        trials = store.trials()
    spread = [trial for trial in trials if trial.case.hosts == 2]
    assert [
        host.name for host in next(t for t in spread if t.status.value == "ok").facts.hosts
    ] == [
        "n1",
        "n2",
    ]
    assert all(t.reason.startswith("rank 1 on n2: ") for t in trials if t.status.value != "ok")
    assert "rank 1 on n2" in folder.err
    kept = folder.final()
    slurm.start_node("n2")
    assert poll(slurm.idle, 30)

    again = start(folder, slurm, "srun", "--nodes=2", "--ntasks=2", *run)
    again.wait(100)
    assert folder.final()[: len(kept)] == kept, "what was measured stays"
    assert len(folder.final()) == 10, folder.err
    assert folder.query("SELECT count(*) FROM run") == [(1,)], folder.err


def cases(folder: Folder) -> list[tuple[tuple, str]]:
    """Return the ended trials, each with the JSON of its case."""
    texts = dict(folder.query("SELECT id, case_json FROM trial"))
    return [(row, texts[row[0]]) for row in folder.final()]
