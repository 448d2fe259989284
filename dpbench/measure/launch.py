"""Launch: the place of this process among the processes that torchrun or srun started, and the address of rank 0."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

FIRST_PORT, PORTS, TRIES = 20_000, 10_000, 16
"""Rank 0 listens at the first free port of `TRIES` consecutive ones among the `PORTS` ports from `FIRST_PORT` on.

The id of the launch selects the first of these consecutive ports.
"""


class LaunchError(RuntimeError):
    """The processes of a launch cannot work together; the message has the reason and, if known, the remedy."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process in a launch: `rank` of `size` processes, on the machine with the index `node`.

    `host` is the host name of this machine, and `leader` is the host name or address of rank 0's machine. `id` is equal
    in all processes of one launch, and differs between launches. `by` is the name of the program that started the
    processes.
    """

    rank: int
    size: int
    node: int
    host: str
    leader: str
    id: str
    by: str

    @property
    def ports(self) -> list[int]:
        """Return the ports at which rank 0 may listen, in the order in which all ranks try them."""
        number = int(hashlib.sha256(self.id.encode()).hexdigest(), 16)
        return [FIRST_PORT + (number + i) % PORTS for i in range(TRIES)]

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def of_environment(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return the launch that the environment variables of torchrun or srun describe.

    Return None if neither of them started this process, or if it is the only process. Raises LaunchError if a variable
    is missing or wrong.
    """
    try:
        if "TORCHELASTIC_RUN_ID" in environ:
            found = _torchrun(environ)
        elif "SLURM_STEP_NUM_TASKS" in environ:  # not set in an interactive allocation or in a batch script
            found = _slurm(environ)
        else:
            return None
    except (KeyError, ValueError) as error:
        raise LaunchError(f"an environment variable of torchrun or srun is missing or wrong: {error}") from None
    return found if found.size > 1 else None


def _torchrun(environ: Mapping[str, str]) -> Launch:
    leader, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Launch(
        rank=int(environ["RANK"]), size=int(environ["WORLD_SIZE"]), node=int(environ["GROUP_RANK"]),
        host=socket.gethostname(), leader=leader, by="torchrun",
        id=f"{environ['TORCHELASTIC_RUN_ID']} {leader} {port} {restart}",
    )  # fmt: skip


def _slurm(environ: Mapping[str, str]) -> Launch:
    nodes = environ["SLURM_STEP_NODELIST"]
    return Launch(
        rank=int(environ["SLURM_PROCID"]), size=int(environ["SLURM_STEP_NUM_TASKS"]),
        node=int(environ["SLURM_NODEID"]), host=environ.get("SLURMD_NODENAME") or socket.gethostname(),
        leader=_first(nodes), by="srun", id=f"{environ['SLURM_JOB_ID']} {environ['SLURM_STEP_ID']} {nodes}",
    )  # fmt: skip


def _first(nodes: str) -> str:
    """Return the first name of a list of nodes in Slurm's notation, such as gpu[01-04]."""
    if "[" not in nodes:
        return nodes.partition(",")[0]
    if not shutil.which("scontrol"):
        raise LaunchError(
            f"scontrol is not installed on this node, but is needed to expand the list of nodes {nodes}: install it, "
            "or start the ranks with torchrun"
        )
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LaunchError(f"scontrol cannot expand the list of nodes {nodes}: {done.stderr.strip()}")
    return done.stdout.split()[0]


def addresses() -> dict[str, str]:
    """Return the IPv4 address of each network interface of this machine, by the interface's name."""
    found = psutil.net_if_addrs()
    return {name: one.address for name in found for one in found[name] if one.family == socket.AF_INET}


def loopback() -> str:
    """Return the name of the network interface with the address 127.0.0.1. Raises OSError if it is missing."""
    for name, address in addresses().items():
        if address == "127.0.0.1":
            return name
    raise OSError(
        "no network interface has the address 127.0.0.1, which ranks need to connect; "
        "bring the loopback interface up (Linux: ip link set lo up)"
    )


def own_address(interface: str) -> str:
    """Return the address of a network interface of this machine. Raises LaunchError for an unknown interface."""
    known = addresses()
    if interface not in known:
        has = ", ".join(f"{name} ({address})" for name, address in known.items())
        raise LaunchError(f"this machine has no network interface {interface}; --interface takes one of: {has}")
    return known[interface]


def leader_address(launch: Launch, interface: str) -> str:
    """Return the address of rank 0 on the network of `interface`, as this rank reaches it.

    On the loopback interface, the address is 127.0.0.1. On another interface, the name of rank 0's machine must resolve
    to the address that this machine has on the interface; only rank 0 can check this. Raises LaunchError if the
    interface is unknown, or if the name does not resolve to this address.
    """
    own = own_address(interface)
    if own == "127.0.0.1":
        return own
    try:
        address = socket.gethostbyname(launch.leader)
    except OSError as error:
        raise LaunchError(
            f"the name {launch.leader} of rank 0's machine cannot be resolved ({error}): add it to DNS or /etc/hosts"
        ) from None
    # rank 0's own name often resolves to its loopback interface; the other ranks resolve it to another address
    if launch.rank == 0 and address != own and not address.startswith("127."):
        fits = [name for name, one in addresses().items() if one == address]
        way = f"give --interface {fits[0]}" if fits else f"start {launch.by} with an address of {interface}"
        raise LaunchError(
            f"the other ranks look for rank 0 at {launch.leader} ({address}), but {interface} has {own}: {way}"
        )
    return own if launch.rank == 0 else address


def names(launches: Sequence[tuple[int, str]]) -> dict[int, str]:
    """Return a distinct name for each machine, by its index; `launches` has a pair (index, host name) for each rank.

    Machines with equal host names get names such as "host#0" and "host#1".
    """
    hosts = dict(launches)
    twice = {host for host in hosts.values() if list(hosts.values()).count(host) > 1}
    return {node: f"{host}#{node}" if host in twice else host for node, host in sorted(hosts.items())}
