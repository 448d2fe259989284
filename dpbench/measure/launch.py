"""Launch: the processes that torchrun or srun started, and authenticated channels between rank 0 and the others.

Rank 0 listens at one address only. Both sides prove that they know a key before they exchange messages. The messages
are JSON, so that no data is unpickled; they are authenticated, not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import psutil

FIRST_PORT, PORTS, TRIES = 20_000, 10_000, 16
"""Rank 0 listens at the first free port of `TRIES` consecutive ones among the `PORTS` ports from `FIRST_PORT` on.

The id of the launch selects the first of these consecutive ports.
"""
JOIN_S = 60.0
"""The longest time in seconds that the ranks of a launch may take to connect to rank 0."""
PROVE_S = 5.0
"""The longest wait in seconds for the other side's proof that it knows the key."""
RETRY_S = 0.2
LARGEST_BYTES = 1 << 30
_OPTIONS = (
    ((socket.IPPROTO_TCP, socket.TCP_NODELAY), 1),  # send short messages at once: their delays help to compare clocks
    ((socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1),  # detects that the other machine has lost its power or its network
    ((socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", socket.TCP_KEEPINTVL)), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPINTVL), 10),
    ((socket.IPPROTO_TCP, socket.TCP_KEEPCNT), 6),
)
KEY = "DPBENCH_KEY"
"""The environment variable with the key, for machines that do not share the key's file."""


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
        other = f"let {launch.leader} resolve to {own}, or start torchrun with --master-addr {own}"
        way = f"give --interface {fits[0]}" if fits else other
        raise LaunchError(
            f"the other ranks look for rank 0 at {launch.leader} ({address}), but the network interface {interface} of "
            f"rank 0's machine has the address {own}: {way}"
        )
    return own if launch.rank == 0 else address


def names(launches: Sequence[tuple[int, str]]) -> dict[int, str]:
    """Return a distinct name for each machine, by its index; `launches` has a pair (index, host name) for each rank.

    Machines with equal host names get names such as "host#0" and "host#1".
    """
    hosts = dict(launches)
    twice = {host for host in hosts.values() if list(hosts.values()).count(host) > 1}
    return {node: f"{host}#{node}" if host in twice else host for node, host in sorted(hosts.items())}


class Channel:
    """An authenticated connection that sends and receives messages; several threads may send at the same time.

    Every message carries a code that only the two ends of this connection can make, so that no third party can insert,
    change or repeat a message.
    """

    def __init__(self, end: socket.socket, session: bytes, *, first: bool) -> None:
        self._end, self._session = end, session
        self._mine, self._theirs = (b"0", b"1") if first else (b"1", b"0")
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(self, kind: str, **data: Any) -> None:
        """Send a message of the kind `kind`; `data` must be JSON values. Raises OSError if the connection is closed."""
        payload = json.dumps([kind, data]).encode()
        with self._sending:
            self._sent += 1
            code = self._code(self._mine, self._sent, payload)
            self._end.sendall(struct.pack(">Q", len(payload)) + code + payload)

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for a message; return its kind and its data.

        Raises EOFError or OSError if no complete message arrives, because the connection is closed or the rest of the
        message is late. Raises OSError if a message is too long, or if its code shows that another sender made it.
        """
        size, code = struct.unpack(">Q32s", self._read(40))
        if size > LARGEST_BYTES:
            raise ConnectionError(
                f"the other end announced a message of {size:,} bytes, but at most {LARGEST_BYTES:,} bytes are accepted"
            )
        payload = self._read(size)
        self._received += 1
        if not hmac.compare_digest(code, self._code(self._theirs, self._received, payload)):
            raise ConnectionError("a message has a wrong code, so the other end of the connection did not send it")
        kind, data = json.loads(payload)
        return kind, data

    def _code(self, direction: bytes, number: int, payload: bytes) -> bytes:
        return hmac.digest(self._session, direction + struct.pack(">Q", number) + payload, "sha256")

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            chunk = self._end.recv(min(size - len(found), 1 << 20))
            if not chunk:
                raise EOFError("the connection is closed")
            found += chunk
        return bytes(found)

    def limit(self, seconds: float | None) -> None:
        """Limit the wait for each part of a message to `seconds`; None means no limit."""
        self._end.settimeout(seconds)

    def fileno(self) -> int:
        """Return the socket's descriptor, so that `multiprocessing.connection.wait` can wait for several channels."""
        return self._end.fileno()

    def close(self) -> None:
        """Close the connection; the other side's `receive` then raises EOFError."""
        self._end.close()


def key() -> bytes:
    """Return the key of this user: the environment variable DPBENCH_KEY or, if it is not set, the content of a file.

    Only this user can read the file. It is created if it does not exist. Raises LaunchError if it cannot be written or
    read.
    """
    if given := os.environ.get(KEY):
        return given.encode()
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "dpbench"
    path = folder / "key"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            with tempfile.NamedTemporaryFile(dir=folder) as file:  # its mode is 0600
                file.write(secrets.token_hex(32).encode())
                file.flush()
                with suppress(FileExistsError):  # another rank was faster
                    os.link(file.name, path)
        return path.read_bytes()
    except OSError as error:
        raise LaunchError(
            f"the key of the ranks cannot be written to or read from {path} ({error}): set the environment variable "
            f"{KEY} to the same secret text for all ranks"
        ) from None


def prove(end: socket.socket, secret: bytes, *, first: bool) -> Channel:
    """Return a channel after both sides have proved that they know the secret; `first` is True on rank 0's side.

    `end` is the connected socket. Both sides contribute a random number to the key of the channel, so that the messages
    of an earlier connection cannot be replayed. Raises AuthenticationError, EOFError or OSError if the other side does
    not prove within `PROVE_S` seconds that it knows the secret.
    """
    end.settimeout(PROVE_S)
    for option, value in _OPTIONS:
        end.setsockopt(*option, value)
    mine = secrets.token_bytes(32)
    end.sendall(mine)
    plain = Channel(end, b"", first=first)
    theirs = plain._read(32)
    session = hmac.digest(secret, b"dpbench" + (mine + theirs if first else theirs + mine), "sha256")
    proofs = [hmac.digest(session, side, "sha256") for side in (b"rank 0", b"another rank")]
    own, other = proofs if first else reversed(proofs)
    end.sendall(own)
    if not hmac.compare_digest(plain._read(32), other):
        raise AuthenticationError("the other side has another key")
    return Channel(end, session, first=first)


@contextmanager
def listen(address: str, launch: Launch) -> Iterator[socket.socket]:
    """Yield a socket that listens at `address` and the first free port of the launch.

    Raises LaunchError if all ports of the launch are in use.
    """
    for port in launch.ports:
        with suppress(OSError):
            found = socket.create_server((address, port), backlog=launch.size)
            break
    else:
        raise LaunchError(
            f"rank 0 cannot listen at {address}: all {len(launch.ports)} ports from {launch.ports[0]} to "
            f"{launch.ports[-1]} are in use; end the processes that use them"
        )
    with found:
        yield found


def connect(launch: Launch, interface: str) -> Channel:
    """Return a channel to rank 0 over the network interface `interface`.

    Raises LaunchError if rank 0 cannot be reached within `JOIN_S` seconds.
    """
    address, secret = leader_address(launch, interface), key()
    deadline_s, seen = time.monotonic() + JOIN_S, "nothing listens there"
    while time.monotonic() < deadline_s:
        for port in launch.ports:
            with suppress(OSError, EOFError):
                end = socket.create_connection((address, port), timeout=PROVE_S)
                try:
                    found = prove(end, secret, first=False)
                    found.limit(None)  # rank 0 may be silent for as long as a trial takes
                    return found
                except AuthenticationError:
                    seen = f"rank 0 has another key: set {KEY} to the same secret text on all machines"
        time.sleep(RETRY_S)
    raise LaunchError(
        f"{launch} could not reach rank 0 at {address} within {JOIN_S:.0f} s: {seen}. "
        "Without --interface, the ranks use the loopback interface, so all ranks must be on one machine: give "
        "--interface if they are on several machines"
    )
