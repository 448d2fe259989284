"""Channels: authenticated connections between rank 0 and the other ranks of a launch.

Rank 0 listens at one address only. Both sides prove that they know a key before they exchange messages, which are JSON:
nothing is unpickled. The messages are not encrypted.
"""

from __future__ import annotations

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
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from dpbench.measure.launch import Launch, LaunchError, leader_address

JOIN_S = 60.0
"""The longest time in seconds that the ranks of a launch may take to connect to rank 0."""
PROVE_S = 5.0
"""The longest wait in seconds for the other side's proof that it knows the key."""
RETRY_S = 0.2
KEY = "DPBENCH_KEY"
"""The environment variable with the key, for machines that do not share the key's file."""


class Channel:
    """A connection that sends and receives messages; several threads may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()

    def send(self, kind: str, **data: Any) -> None:
        """Send a message, whose `data` are plain values. Raises OSError if the connection is closed."""
        with self._sending:
            self._connection.send_bytes(json.dumps([kind, data]).encode())

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for a message; return its kind and its data. Raises EOFError or OSError if the connection is closed."""
        kind, data = json.loads(self._connection.recv_bytes())
        return kind, data

    def fileno(self) -> int:
        """Return the descriptor, with which `multiprocessing.connection.wait` waits for several channels."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection; the other side's `receive` then raises EOFError."""
        self._connection.close()


def key() -> bytes:
    """Return the key of this user: from the environment, else from a file that only this user can read.

    The file is created if it does not exist. Raises LaunchError if it cannot be written.
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
        raise LaunchError(f"the ranks' key cannot be kept in {path} ({error}): set {KEY} to a secret text") from None


def prove(end: socket.socket, secret: bytes, *, first: bool) -> Channel:
    """Return a channel after both sides have proved that they know the secret; `first` is True on rank 0's side.

    Raises AuthenticationError, EOFError or OSError if the other side does not prove it within `PROVE_S` seconds.
    """
    end.setblocking(True)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # clocks are compared by the delay of short messages
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(PROVE_S), 0))
    connection = Connection(os.dup(end.fileno()))
    try:
        for prove_to in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            prove_to(connection, secret)
    except BaseException:
        connection.close()
        raise
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    return Channel(connection)


@contextmanager
def listen(address: str, launch: Launch) -> Iterator[socket.socket]:
    """Yield a socket that listens at the first free port of the launch. Raises LaunchError if none is free."""
    for port in launch.ports:
        with suppress(OSError):
            found = socket.create_server((address, port), backlog=launch.size)
            break
    else:
        raise LaunchError(f"the ports from {launch.ports[0]} to {launch.ports[-1]} of {address} are in use")
    with found:
        yield found


def connect(launch: Launch, interface: str) -> Channel:
    """Return a channel to rank 0. Raises LaunchError if there is none after `JOIN_S` seconds."""
    address, secret = leader_address(launch, interface), key()
    deadline_s, seen = time.monotonic() + JOIN_S, "nothing listens there"
    while time.monotonic() < deadline_s:
        for port in launch.ports:
            with suppress(OSError, EOFError), socket.create_connection((address, port), timeout=PROVE_S) as end:
                try:
                    return prove(end, secret, first=False)
                except AuthenticationError:
                    seen = f"its key differs: set {KEY} to the same secret text on all machines"
        time.sleep(RETRY_S)
    raise LaunchError(
        f"{launch} could not reach rank 0 at {address} within {JOIN_S:.0f} s: {seen}. "
        "Without --interface, the ranks connect over the loopback interface, within one machine"
    )
