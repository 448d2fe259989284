"""Peers: rank 0's view of all ranks of a launch: send work to them, collect their answers, and compare their clocks."""

from __future__ import annotations

import queue
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError, connection
from typing import Any

from dpbench.hardware import provenance
from dpbench.measure.agent import Member, Reply, Work
from dpbench.measure.launch import JOIN_S, Channel, Launch, LaunchError, key, prove
from dpbench.measure.server import START_LIMIT_S
from dpbench.records import Status
from dpbench.records.trial import Failure

POLL_S = 0.1
PINGS = 10
"""The number of messages for estimating the offset of a machine's clock; the one with the shortest delay counts."""
SETTLE_S = 2.5
"""The seconds to wait, after a failure that another rank may have caused, for the failure of that other rank."""
SILENT_S = 20.0
"""The seconds for which rank 0 waits for an overdue message; a rank that stays silent counts as failed or lost."""


class Peer:
    """One rank of a launch, as rank 0 sees it; `member` has the facts that the rank sent when it connected.

    `lost` is the reason why the rank can no longer be used; it is empty as long as the rank can be used.
    """

    def __init__(self, number: int, member: Member, to: Channel) -> None:
        self.number, self.member, self.lost = number, member, ""
        self._to = to

    def __str__(self) -> str:
        return f"rank {self.number} on {self.member.host}"

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self._to.fileno()

    def send(self, kind: str, **data: Any) -> None:
        """Send a message; mark the rank as lost if its connection is closed. Do nothing if the rank is lost already."""
        try:
            if not self.lost:
                self._to.send(kind, **data)
        except OSError as error:
            self.lose(f"its connection failed: {error}")

    def receive(self, kind: str, limit_s: float = SILENT_S) -> dict[str, Any] | None:
        """Return the data of the next message; None if the message is not of the kind `kind`.

        Mark the rank as lost and return None if the connection is closed, if no message arrives for `limit_s` seconds,
        or if the message is incomplete, too long or forged.
        """
        try:
            if not connection.wait([self._to.fileno()], limit_s):
                self.lose(f"it did not answer for {limit_s:.0f} s")
                return None
            found, data = self._to.receive()
        except (EOFError, ConnectionResetError):  # a process that ends closes or resets it
            self.lose("its process has ended")
            return None
        except OSError as error:
            self.lose(f"its connection failed: {error}")
            return None
        return data if found == kind else None

    def lose(self, reason: str) -> None:
        """Mark the rank as lost for `reason`, and close its connection, so that its agent ends."""
        self.lost = self.lost or reason
        self._to.close()

    def failure(self, reason: str, *, secondary: bool = False) -> Reply:
        """Return a failed answer for this rank, which sent none; with `secondary`, another rank may be the cause."""
        failure = Failure(
            status=Status.FAILED, reason=reason, rank=self.number, at_s=time.perf_counter(),
            perhaps_secondary=secondary, exception="ended" if secondary else "",
        )  # fmt: skip
        return Reply(turn=0, failure=failure)


@dataclass(frozen=True)
class Offset:
    """The offset of a machine's clock from the clock of rank 0's machine, and its largest error, both in seconds."""

    seconds: float = 0.0
    error_s: float = 0.0

    def between(self, later: Offset) -> Offset:
        """Return the mean of this offset and a later one; half of their difference adds to the error."""
        mean = statistics.mean([self.seconds, later.seconds])
        return Offset(mean, max(self.error_s, later.error_s) + abs(later.seconds - self.seconds) / 2)


def gather(listener: socket.socket, launch: Launch) -> list[Peer]:
    """Wait at most `JOIN_S` seconds until all ranks have connected to `listener`; return them in order.

    Raises LaunchError if a rank is still missing then, because the cases depend on the ranks that take part.
    """
    found: dict[int, tuple[Member, Channel]] = {}
    guests: queue.Queue[tuple[Member, Channel]] = queue.Queue()
    secret, deadline_s = key(), time.monotonic() + JOIN_S
    listener.settimeout(POLL_S)
    while len(found) < launch.size and time.monotonic() < deadline_s:
        with suppress(OSError):  # no rank connected within `POLL_S` seconds
            end, _ = listener.accept()
            # in a thread, because an unknown peer may be slow
            threading.Thread(target=_introduce, args=(end, secret, guests), daemon=True).start()
        while not guests.empty():
            member, to = guests.get()
            reason = _objection(member, launch, found)
            if reason:
                with suppress(OSError):
                    to.send("reject", reason=reason)
            else:
                found[member.rank] = member, to
    if missing := [f"rank {rank}" for rank in range(launch.size) if rank not in found]:
        raise LaunchError(
            f"{len(missing)} of {launch.size} ranks did not connect to rank 0 within {JOIN_S:.0f} s: "
            f"{', '.join(missing)}; the output of a missing rank may show the cause"
        )
    return [Peer(number, *found[number]) for number in range(launch.size)]


def _introduce(end: socket.socket, secret: bytes, guests: queue.Queue[tuple[Member, Channel]]) -> None:
    """Let the rank at the other end of a connection prove that it knows the key, and put it into the queue `guests`.

    Close the connection if the rank fails to prove it.
    """
    try:
        to = prove(end, secret, first=True)
        kind, data = to.receive()
        if kind == "hello":
            to.limit(SILENT_S)  # limit the wait for the rest of a message that has begun
            guests.put((Member.from_dict(data), to))
    except (OSError, EOFError, AuthenticationError):
        end.close()


def _objection(member: Member, launch: Launch, found: Mapping[int, object]) -> str:
    """Return the reason why a rank cannot take part, or an empty string if it can."""
    if member.version != provenance.own_version():
        return f"it has dpbench {member.version}, and rank 0 has {provenance.own_version()}: install the same version"
    if not 0 <= member.rank < launch.size:
        return f"it is rank {member.rank}, but the launch has {launch.size} ranks: start all ranks with one command"
    return f"another process is rank {member.rank} of this launch" if member.rank in found else ""


class Peers(Sequence[Peer]):
    """All ranks of a launch, in order.

    Every request has a new number, `turn`. Answers to earlier requests are dropped.
    """

    def __init__(self, peers: Sequence[Peer]) -> None:
        self._peers, self.turn = tuple(peers), 0

    def __getitem__(self, at: Any) -> Any:
        return self._peers[at]

    def __len__(self) -> int:
        return len(self._peers)

    def renew(self) -> None:
        """Make every rank start a new server, and wait until all are ready."""
        self.turn += 1
        for peer in self:
            peer.send("renew", turn=self.turn)
        self._collect(self, START_LIMIT_S)

    def ask(self, work: Mapping[int, Work], *, timeout_s: float | None = None) -> dict[int, Reply]:
        """Send each rank its work, and return the ranks' answers; the keys of both dictionaries are ranks.

        `timeout_s` is the time in seconds for which a rank waits for its peers; None if the ranks work independently.
        If ranks wait for each other and one fails, rank 0 ends the work of all ranks that have not answered. They
        are reported as late if at least `timeout_s` seconds have passed since the start, and if each failed rank may
        have failed because of another rank.
        """
        self.turn += 1
        began_s, limit_s = time.perf_counter(), max(one.limit_s for one in work.values())
        peers = [self[number] for number in work]
        for peer in peers:
            peer.send("work", **replace(work[peer.number], turn=self.turn).to_dict())
        answers = self._collect(peers, limit_s + SILENT_S, together=timeout_s is not None)
        left = [peer for peer in peers if peer.number not in answers]
        failures = [one.failure for one in answers.values() if one.failure]
        waited_s = time.perf_counter() - began_s
        late = timeout_s is not None and failures and waited_s >= timeout_s and _secondary(failures)
        self._end(left)
        for peer in left:
            if late:
                reason = (
                    f"it is late: it had not answered when its peers stopped waiting, {waited_s:.0f} s after the start"
                )
                answers[peer.number] = peer.failure(reason)
            else:
                reason = peer.lost or "rank 0 ended this rank's work: another rank had failed, or the time limit passed"
                answers[peer.number] = peer.failure(reason, secondary=not peer.lost)
        return answers

    def _end(self, peers: Sequence[Peer]) -> None:
        """End the work of ranks that have not answered; mark those as lost that still do not answer."""
        for peer in peers:
            peer.send("abort", turn=self.turn)
        ended = self._collect(peers, SILENT_S)
        for peer in peers:
            if peer.number not in ended:
                peer.lose(f"it did not answer for {SILENT_S:.0f} s after its work was ended")

    def _collect(self, peers: Sequence[Peer], limit_s: float, *, together: bool = False) -> dict[int, Reply]:
        """Return the answers of `peers` that arrive within `limit_s` seconds, and a failure for each lost rank.

        With `together`, do not wait for all answers after a failure: stop at once or, if another rank may have caused
        the failure, after `SETTLE_S` seconds.
        """
        answers: dict[int, Reply] = {}
        deadline_s, settling = time.perf_counter() + limit_s, False
        while True:
            answers |= {p.number: p.failure(p.lost) for p in peers if p.lost and p.number not in answers}
            pending = [peer for peer in peers if peer.number not in answers]
            failures = [one.failure for one in answers.values() if one.failure]
            if together and failures and not settling:
                wait_s = SETTLE_S if _secondary(failures) else 0.0
                deadline_s, settling = min(deadline_s, time.perf_counter() + wait_s), True
            left_s = deadline_s - time.perf_counter()
            if not pending or left_s <= 0:
                return answers
            ready = connection.wait([peer.fileno() for peer in pending], left_s)
            for peer in [peer for peer in pending if peer.fileno() in ready]:
                data = peer.receive("answer")
                if data and data["turn"] == self.turn:
                    answers[peer.number] = _received(peer, data)

    def offset(self, peer: Peer) -> Offset:
        """Return the offset of a rank's clock from this process's clock, computed from the fastest of several pings.

        If the rank is lost, the error of the offset is infinite.
        """
        return min(self._pings(peer), key=lambda one: one.error_s, default=Offset(0.0, float("inf")))

    def _pings(self, peer: Peer) -> Iterator[Offset]:
        for number in range(PINGS):
            sent_s = time.perf_counter()
            peer.send("ping", number=number)
            data = None if peer.lost else peer.receive("pong")
            now_s = time.perf_counter()
            if data and data["number"] == number:
                yield Offset(data["at_s"] - (sent_s + now_s) / 2, (now_s - sent_s) / 2)


def _secondary(failures: Sequence[Failure]) -> bool:
    return all(failure.perhaps_secondary for failure in failures)


def _received(peer: Peer, data: Mapping[str, Any]) -> Reply:
    """Return the answer that the message `data` contains.

    If it is a failure, its time is replaced by the time at which rank 0 received the message, because the clocks of the
    ranks' machines differ.
    """
    answer = Reply.from_dict(data)
    if answer.failure is None:
        return answer
    return replace(answer, failure=replace(answer.failure, rank=peer.number, at_s=time.perf_counter()))
