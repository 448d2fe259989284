"""Launch: this process's place among those that torchrun or srun started."""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from dpbench.records.errors import UsageError

FIRST_PORT, PORTS = 20_000, 10_000
"""The range of ports for launches by srun; the id of the job step selects one."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process in a launch: `rank` of `size`, on the machine with index `node`.

    `host` is this machine's host name. `variables` are torch's environment variables that the
    launching program has not set.
    """

    rank: int
    size: int
    node: int
    host: str
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def of_environment(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the launch that the environment variables of torchrun or srun describe.

    None if neither of them started this process, or if it is the only process. Raises ValueError if
    a variable is missing or wrong.
    """
    try:
        if "TORCHELASTIC_RUN_ID" in environ:
            launch = _torchrun(environ)
        elif "SLURM_STEP_NUM_TASKS" in environ:
            # not set in an interactive allocation or in a batch script
            launch = _slurm(environ)
        else:
            return None
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"an environment variable of torchrun or srun is missing or wrong: {error}"
        ) from None
    return launch if launch.size > 1 else None


def _torchrun(environ: Mapping[str, str]) -> Launch:
    return Launch(
        rank=int(environ["RANK"]),
        size=int(environ["WORLD_SIZE"]),
        node=int(environ["GROUP_RANK"]),
        host=socket.gethostname(),
    )


def _slurm(environ: Mapping[str, str]) -> Launch:
    """The ranks of a job step meet on its first node unless MASTER_ADDR is set."""
    rank, size = environ["SLURM_PROCID"], environ["SLURM_STEP_NUM_TASKS"]
    step = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"
    # a list of nodes such as gpu[01-04,07],login becomes gpu01,login
    first = re.sub(r"\[(\d+)[^]]*\]", r"\1", environ["SLURM_STEP_NODELIST"]).partition(",")[0]
    return Launch(
        rank=int(rank),
        size=int(size),
        node=int(environ["SLURM_NODEID"]),
        host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        variables={
            "RANK": rank,
            "WORLD_SIZE": size,
            "MASTER_ADDR": environ.get("MASTER_ADDR", first),
            "MASTER_PORT": environ.get(
                "MASTER_PORT", str(FIRST_PORT + zlib.crc32(step.encode()) % PORTS)
            ),
        },
    )
