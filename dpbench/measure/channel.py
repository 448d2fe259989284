"""Channels: authenticated connections between rank 0 and the other ranks of a launch.

Rank 0 listens at one address only. Both sides prove that they know a key before they exchange messages. The messages
are JSON, so that no data is unpickled; they are authenticated, not encrypted.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

from dpbench.measure.launch import Launch, LaunchError, leader_address

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

        Raises EOFError or OSError if the connection is closed, if the rest of a message does not arrive, or if the
        message is not from the other end.
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
    """Return the key of this user: from the environment, else from a file that only this user can read.

    The file is created if it does not exist. Raises LaunchError if the file cannot be written or read.
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
        "Without --interface, the ranks use the loopback interface, so all ranks must be on one machine"
    )
