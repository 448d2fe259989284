"""A real Slurm of two nodes on this machine, started and ended by the test that needs it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.marked import poll
from tests.measure.launched import free_port

NODES = ("n1", "n2")
CONFIGURATION = """
ClusterName=dpbench
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldPort={port}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=1000
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """Return why no Slurm can be started here; empty if one can."""
    lacking = [
        name
        for name in ("slurmctld", "slurmd", "srun", "munged", "mungekey")
        if not shutil.which(name)
    ]
    if lacking:
        return f"no Slurm on this machine: {', '.join(lacking)} missing (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons are started as root"


class Slurm:
    """A running Slurm; `env` makes its commands talk to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, limit_s: float = 20) -> str:
        """Run one of Slurm's commands, and return its output."""
        return subprocess.run(
            command,
            env=os.environ | self.env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        ).stdout

    def pid(self, daemon: str) -> int:
        """Return the process id of a daemon: "ctld", or the name of a node."""
        return int((self.folder / f"{daemon}.pid").read_text())

    def start_node(self, name: str) -> None:
        """Start the daemon of a node."""
        subprocess.run(
            ["slurmd", "-N", name], env=os.environ | self.env, check=True, capture_output=True
        )

    def idle(self) -> bool:
        """Return whether both nodes are idle."""
        return self.call("sinfo", "--noheader", "--format=%T %D").split() == ["idle", "2"]


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons, wait until both nodes are idle, and end the daemons by id afterwards."""
    (folder / "state").mkdir()
    folder.chmod(0o755)
    values = {"host": socket.gethostname().partition(".")[0], "folder": folder, "port": free_port()}
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(**values, first=free_port(), second=free_port())
    )
    found = Slurm(folder)
    key = folder / "munge.key"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], check=True, capture_output=True)
    munged = subprocess.Popen(
        [
            "munged",
            "--foreground",
            "--force",
            f"--socket={folder}/munge.socket",
            f"--key-file={key}",
            f"--log-file={folder}/munge.log",
            f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert poll((folder / "munge.socket").exists), (folder / "munge.log").read_text()
        subprocess.run(["slurmctld"], env=os.environ | found.env, check=True, capture_output=True)
        for name in NODES:
            found.start_node(name)
        assert poll(found.idle, 30), found.call("scontrol", "show", "nodes")
        yield found
    finally:
        found.call("scancel", "--user=root")
        poll(lambda: not found.call("squeue", "--noheader"), 10)
        for daemon in ("ctld", *NODES):
            with suppress(OSError, ValueError):
                os.kill(found.pid(daemon), signal.SIGTERM)
        poll(lambda: not any((folder / f"{name}.pid").exists() for name in ("ctld", *NODES)), 10)
        munged.terminate()
        munged.wait(10)
