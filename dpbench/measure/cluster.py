"""Cluster: rank 0's side of a launch by torchrun or srun: which machines take part, and trials over their ranks.

Every process of the launch, rank 0 included, has an agent (`measure.agent`). Rank 0 plans, stores and reports. It sends
each rank its part of a trial, and merges the answers. If a rank fails, its trial fails. If the agent of a rank is lost,
the later cases that need this rank fail too, and all other cases are measured.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any, Self

from dpbench.hardware import foreign_load
from dpbench.measure import agent, channel
from dpbench.measure.agent import Answer, Member, Work
from dpbench.measure.channel import Channel
from dpbench.measure.failures import in_order
from dpbench.measure.launch import Launch, LaunchError, leader_address, names
from dpbench.measure.merging import merge, shifted
from dpbench.measure.request import Job, Request, Seat
from dpbench.measure.server import START_LIMIT_S, as_trials
from dpbench.records import HOST, Case, Effort, Sample, Status, Trial, host_device
from dpbench.records.registry import Role
from dpbench.records.trial import ALONE, HOSTS, Failure, Host

PINGS = 10
"""The number of messages from whose delays the offset of a machine's clock is estimated; the shortest one counts."""
TIMEOUT_S = 60.0
"""The longest time in seconds that a rank waits for its peers, if a third of the trial's limit is not shorter."""
SETTLE_S = 2.5
"""The seconds to wait for the failures of other ranks after a failure that another one may have caused."""
SILENT_S = 20.0
"""The seconds beyond a trial's limit after which a rank without an answer counts as lost."""


class Rank:
    """One rank of the launch, as rank 0 sees it; `lost` is the reason why it can no longer be used, or empty."""

    def __init__(self, number: int, member: Member | None, to: Channel | None) -> None:
        self.number, self.member, self.lost = number, member, ""
        self._to = to
        if to is None:
            self.lost = f"it did not connect within {channel.JOIN_S:.0f} s"

    def __str__(self) -> str:
        return f"rank {self.number}" + (f" on {self.member.host}" if self.member else "")

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        assert self._to is not None
        return self._to.fileno()

    def send(self, kind: str, **data: Any) -> None:
        """Send a message; if the connection is closed, the rank is lost."""
        try:
            if self._to is not None and not self.lost:
                self._to.send(kind, **data)
        except OSError as error:
            self.lose(f"its connection failed: {error}")

    def receive(self, kind: str) -> dict[str, Any] | None:
        """Return the data of the next message if it has this kind; None for another message, or if the rank is lost."""
        assert self._to is not None
        try:
            found, data = self._to.receive()
        except (EOFError, OSError):
            self.lose("its process has ended")
            return None
        return data if found == kind else None

    def lose(self, reason: str) -> None:
        """Mark the rank as lost, and close its connection, so that its agent ends."""
        self.lost = self.lost or reason
        if self._to is not None:
            self._to.close()


@dataclass(frozen=True)
class Offset:
    """The offset of a machine's clock from that of rank 0's machine, in seconds, and the largest error."""

    seconds: float = 0.0
    error_s: float = 0.0


class Cluster:
    """The ranks of a launch; a context manager of rank 0's process."""

    def __init__(self, launch: Launch, interface: str) -> None:
        self._launch, self._interface = launch, interface
        self._address = leader_address(launch, interface)
        self._turn = 0
        self._ranks: list[Rank] = []

    def __enter__(self) -> Self:
        with channel.listen(self._address, self._launch) as listener:
            own = threading.Thread(target=self._be_agent, name="agent of rank 0", daemon=True)
            own.start()
            found = _gather(listener, self._launch)
        self._ranks = [Rank(number, *found.get(number, (None, None))) for number in range(self._launch.size)]
        self._refuse_others()
        # no other user's process can listen at this port, and every worker of rank 0 can
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((self._address, 0))
        self._own = own
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.send("abort")
            rank.send("end")
        self._reserved.close()
        self._own.join(START_LIMIT_S)

    def _be_agent(self) -> None:
        with suppress(LaunchError):  # rank 0 sees that its own agent is missing
            agent.serve(self._launch, self._interface)

    def _refuse_others(self) -> None:
        """Lose the ranks whose version of dpbench differs from rank 0's. Raises LaunchError without rank 0's agent."""
        first = self._ranks[0].member
        if first is None:
            raise LaunchError(f"rank 0 cannot connect to itself at {self._address}: check the firewall of this machine")
        for rank in self._ranks:
            theirs = rank.member and rank.member.facts["software"]["dpbench"]
            if theirs not in (None, ours := first.facts["software"]["dpbench"]):
                reason = f"it has dpbench {theirs}, and rank 0 has {ours}: install the same version"
                rank.send("reject", reason=reason)
                rank.lose(reason)

    # -- what takes part

    @property
    def size(self) -> int:
        """Return the number of ranks, lost ones included."""
        return len(self._ranks)

    @property
    def lost(self) -> list[str]:
        """Return a line of text for each lost rank."""
        return [f"{rank}: {rank.lost}" for rank in self._ranks if rank.lost]

    def hosts(self, count: int | None = None) -> list[Host]:
        """Return the machines of the first `count` ranks (None: of all), in the order of their first ranks."""
        members = [rank.member for rank in self._ranks[:count] if rank.member]
        called = names([(member.node, member.host) for member in members])
        machine = {member.node: member.machine for member in members}
        return [
            Host(called[node], machine[node], tuple(m.rank for m in members if m.node == node))
            for node in dict.fromkeys(m.node for m in members)
        ]

    def facts(self) -> dict[str, Any]:
        """Return the machines, with the facts of each, as plain data for the run's provenance."""
        described = []
        for host in self.hosts():
            member = self._ranks[host.ranks[0]].member
            described.append(asdict(host) | {"facts": member.facts if member else {}})
        return {"by": self._launch.by, "interface": self._interface, "machines": described}

    def placed(self, case: Case) -> Case:
        """Return the case with the number of machines that its ranks use."""
        hosts = len(self.hosts(len(case.rows))) if case.traits.ranks else 1
        return replace(case, hosts=max(1, hosts))

    def counts(self) -> tuple[int, ...]:
        """Return default numbers of devices: one, those of the first machine, and of 2, 4, 8, ... and all machines."""
        sizes = [len(host.ranks) for host in self.hosts()]
        machines = [number for number in (1, 2, 4, 8, 16, 32, 64) if number < len(sizes)]
        return tuple(dict.fromkeys([1, *(sum(sizes[:number]) for number in machines), sum(sizes)]))

    # -- the interface of a server

    @contextmanager
    def workers(self, _: Path) -> Iterator[Self]:
        """Start new servers at all ranks, and yield this object, which runs trials on them."""
        self._turn += 1
        for rank in self._ranks:
            rank.send("renew", turn=self._turn)
        self._collect(self._ranks, START_LIMIT_S, lambda answers: False)
        yield self

    def check(self, case: Case, limit_s: float) -> Trial:
        """Check the model of a case in a worker of rank 0; return a trial without steps."""
        request = Request(cases=(case,), effort=Effort(), round=0, job=Job.CHECK_MODEL)
        return self._by_rank_0(request, limit_s)[0]

    def run_together(self, cases: Sequence[Case], effort: Effort, number: int, limit_s: float) -> list[Trial]:
        """Run a case over its ranks, or cases of one process by rank 0; return a trial for each case.

        A single case of the baseline runs on all machines at the same time, which shows how much they differ. Its trial
        is that of rank 0's machine; the steps of all machines are samples.
        """
        request = Request(cases=tuple(cases), effort=effort, round=number)
        (first, *others) = cases
        if not others and first.traits.ranks:
            return [self._over_ranks(request, limit_s)]
        if not others and first.traits.role is Role.BASELINE:
            return [self._everywhere(request, limit_s)]
        return self._by_rank_0(request, limit_s * len(cases))

    def _by_rank_0(self, request: Request, limit_s: float) -> list[Trial]:
        answers = self._ask({0: Work(turn=self._next(), request=request, limit_s=limit_s, roots=self._roots(0))})
        return as_trials(_outcome(answers[0]), request)

    def _everywhere(self, request: Request, limit_s: float) -> Trial:
        """Run a case on every machine alone; return the trial of rank 0's machine with the steps of all as samples."""
        turn = self._next()
        hosts = [replace(host, ranks=host.ranks[:1]) for host in self.hosts()]
        leads = [lead for host in hosts for lead in host.ranks if not self._ranks[lead].lost]
        answers = self._ask({
            lead: Work(turn=turn, request=request, limit_s=limit_s, roots=self._roots(lead)) for lead in leads
        })  # fmt: skip
        (trial,) = as_trials(_outcome(answers[0]), request)
        steps = [
            Sample(step.end_s, host_device(number), ALONE, step.seconds)
            for number, host in enumerate(hosts)
            for one in (answers[host.ranks[0]].trials if host.ranks[0] in answers else ())
            for step in one.steps
            if not step.warmup
        ]
        return self._described(replace(trial, samples=(*trial.samples, *steps)), hosts, answers, Offset())

    def _over_ranks(self, request: Request, limit_s: float) -> Trial:
        """Run a case over its ranks, and return its trial."""
        (case,) = request.cases
        size, turn = len(case.rows), self._next()
        if reason := self._absent(size):
            return Trial(case=case, status=Status.FAILED, reason=reason, round=request.round, started_s=time.time())
        timeout_s, hosts = min(TIMEOUT_S, limit_s / 3), self.hosts(size)
        leads = {host.ranks[0] for host in hosts}
        work = {}
        for number in range(size):
            place, peers = self._place(number)
            seat = Seat(
                rank=number, size=size, place=place, address=self._address, port=self._reserved.getsockname()[1],
                key=f"{self._launch.id} {turn}", interface=self._interface, timeout_s=timeout_s,
            )  # fmt: skip
            gpus = tuple(range(len(peers))) if case.device_kind == "cuda" else ()
            work[number] = Work(
                turn=turn, request=replace(request, seat=seat), limit_s=limit_s,
                sample=gpus if number in leads or (gpus and place == 0) else None,
                roots=self._roots(number) if number in leads else (),
            )  # fmt: skip
        before = self._offsets(hosts)
        answers = self._ask(work, timeout_s)
        after = self._offsets(hosts)
        if failures := [one.failure for one in answers.values() if one.failure]:
            return self._failed(request, failures)
        offsets = {rank: _between(before[rank], after[rank]) for host in hosts for rank in host.ranks}
        parts = [shifted(answers[rank].trials[0], -offsets[rank].seconds) for rank in range(size)]
        samples = [
            sample
            for number, host in enumerate(hosts)
            for rank in host.ranks
            for sample in self._sampled(number, rank, answers[rank], parts[rank], offsets[rank])
        ]
        merged = merge(parts, hosts)
        worst = max(offsets.values(), key=lambda one: one.error_s)
        return self._described(replace(merged, samples=(*merged.samples, *samples)), hosts, answers, worst)

    def _absent(self, size: int) -> str:
        """Return why the first `size` ranks cannot all take part, or an empty string."""
        if size > self.size:
            return f"the case needs {size} ranks, and the launch has {self.size}: start more processes"
        gone = [f"{rank} is lost: {rank.lost}" for rank in self._ranks[:size] if rank.lost]
        return f"the case needs ranks 0 to {size - 1}, and {'; '.join(gone)}" if gone else ""

    def _place(self, number: int) -> tuple[int, list[int]]:
        """Return a rank's position among the ranks that see the same cores and GPUs, and the numbers of these ranks."""
        mine = self._ranks[number].member
        assert mine is not None
        peers = [
            rank.number
            for rank in self._ranks
            if rank.member and (rank.member.machine, rank.member.sees) == (mine.machine, mine.sees)
        ]
        return peers.index(number), peers

    def _roots(self, number: int) -> tuple[int, ...]:
        """Return the process ids of the agents on a rank's machine."""
        mine = self._ranks[number].member
        members = [rank.member for rank in self._ranks if rank.member]
        return tuple(member.pid for member in members if mine and member.machine == mine.machine)

    def _sampled(self, host: int, rank: int, answer: Answer, part: Trial, offset: Offset) -> Iterator[Sample]:
        """Yield the samples that a rank's agent took during its timed steps, by rank and machine, on rank 0's clock.

        Those of the first machine's host are left out, because the run samples it.
        """
        timed = [step for step in part.steps if not step.warmup]
        _, peers = self._place(rank)
        for sample in answer.samples:
            at_s = sample.time_s - offset.seconds
            device = host_device(host) if sample.device == HOST else peers[sample.device]
            if timed and timed[0].start_s <= at_s <= timed[-1].end_s and device != HOST:
                yield replace(sample, time_s=at_s, device=device)

    def _described(self, trial: Trial, hosts: Sequence[Host], answers: Mapping[int, Answer], worst: Offset) -> Trial:
        """Return the trial with its machines, the largest error of their clocks, and the highest load of the others."""
        loads = [answer.load for answer in answers.values() if answer.load]
        load = max(loads, key=lambda one: one.taken, default=None)
        facts: dict[str, Any] = {HOSTS: [asdict(host) for host in hosts], "clock_error_s": worst.error_s}
        facts |= {foreign_load.FACT: asdict(load)} if load else {}
        return replace(trial, provenance={**trial.provenance, **facts})

    def _failed(self, request: Request, failures: Sequence[Failure]) -> Trial:
        """Return the trial of a case in which ranks failed, with the cause named first."""
        (case,), cause = request.cases, in_order(failures)[0]
        assert cause.rank is not None
        return Trial(
            case=case, status=cause.status, reason=f"{self._ranks[cause.rank]}: {cause.reason}", round=request.round,
            verified=cause.verified, started_s=time.time(),
            failed_device=cause.device if cause.status is Status.OOM else None,
        )  # fmt: skip

    # -- messages

    def _next(self) -> int:
        self._turn += 1
        return self._turn

    def _ask(self, work: Mapping[int, Work], timeout_s: float = 0.0) -> dict[int, Answer]:
        """Send work to ranks, and return their answers. If one fails, the others are ended, and answer with a failure.

        A rank waits for its peers for `timeout_s` seconds. If only such failures arrive after this time that another
        rank may have caused, the ranks without an answer are late, and their records of failure say so.
        """
        began_s, limit_s = time.perf_counter(), max(one.limit_s for one in work.values())
        ranks = [self._ranks[number] for number in work]
        for rank in ranks:
            rank.send("work", **work[rank.number].to_dict())

        def ends(answers: Mapping[int, Answer]) -> bool:
            return len(work) > 1 and any(one.failure for one in answers.values())

        answers = self._collect(ranks, limit_s + SILENT_S, ends)
        left = [rank for rank in ranks if rank.number not in answers]
        failures = [one.failure for one in answers.values() if one.failure]
        waited_s = time.perf_counter() - began_s
        self._end(left)
        if failures and waited_s >= timeout_s and all(one.perhaps_secondary for one in failures):
            reason = (
                f"it is late: when its peers stopped waiting, {waited_s:.0f} s after the start, it had sent no result"
            )
            return answers | {rank.number: self._obituary(rank, reason) for rank in left}
        return answers | {rank.number: self._obituary(rank, rank.lost) for rank in left if rank.lost}

    def _end(self, ranks: Sequence[Rank]) -> None:
        """End the work of ranks that have not answered; a rank that does not answer then either is lost."""
        for rank in ranks:
            rank.send("abort")
        ended = self._collect(ranks, SILENT_S, lambda answers: False)
        for rank in ranks:
            if rank.number not in ended:
                rank.lose(f"it did not answer within {SILENT_S:.0f} s when its work was ended")

    def _collect(
        self, ranks: Sequence[Rank], limit_s: float, ends: Callable[[Mapping[int, Answer]], bool]
    ) -> dict[int, Answer]:
        """Return the answers to the current turn; at the latest after `limit_s` seconds, or `SETTLE_S` after `ends`.

        A rank whose agent is lost answers with a failure.
        """
        answers: dict[int, Answer] = {}
        deadline_s, settling = time.perf_counter() + limit_s, False
        while True:
            for rank in ranks:
                if rank.lost and rank.number not in answers:
                    answers[rank.number] = self._obituary(rank, rank.lost)
            pending = [rank for rank in ranks if rank.number not in answers]
            if ends(answers) and not settling:
                found = [one.failure for one in answers.values() if one.failure]
                wait_s = SETTLE_S if all(one.perhaps_secondary for one in found) else 0.0
                deadline_s, settling = min(deadline_s, time.perf_counter() + wait_s), True
            left_s = deadline_s - time.perf_counter()
            if not pending or left_s <= 0:
                return answers
            ready = connection.wait([rank.fileno() for rank in pending], left_s)
            for rank in [rank for rank in pending if rank.fileno() in ready]:
                data = rank.receive("answer")
                if data and data["turn"] == self._turn:
                    answers[rank.number] = _received(rank, data)

    def _obituary(self, rank: Rank, reason: str) -> Answer:
        """Return the answer of a rank that cannot send one."""
        failure = Failure(status=Status.FAILED, reason=reason, rank=rank.number, at_s=time.perf_counter())
        return Answer(turn=self._turn, failure=failure)

    def _offsets(self, hosts: Sequence[Host]) -> dict[int, Offset]:
        """Return the offset of each rank's clock; ranks on rank 0's machine share its clock."""
        found: dict[int, Offset] = {}
        for host in hosts:
            same = host.machine == hosts[0].machine
            offset = Offset() if same else self._offset(self._ranks[host.ranks[0]])
            found |= dict.fromkeys(host.ranks, offset)
        return found

    def _offset(self, rank: Rank) -> Offset:
        """Return the offset of a machine's clock, from the message with the shortest delay."""
        found = []
        for _ in range(PINGS):
            sent_s = time.perf_counter()
            rank.send("ping")
            data = None if rank.lost else rank.receive("pong")
            now_s = time.perf_counter()
            if data:
                found.append(Offset(data["at_s"] - (sent_s + now_s) / 2, (now_s - sent_s) / 2))
        return min(found, key=lambda one: one.error_s, default=Offset(0.0, float("inf")))


def _between(before: Offset, after: Offset) -> Offset:
    """Return the mean of two offsets; the drift between them adds to the error."""
    mean = statistics.mean([before.seconds, after.seconds])
    return Offset(mean, max(before.error_s, after.error_s) + abs(after.seconds - before.seconds) / 2)


def _outcome(answer: Answer) -> list[Trial] | Failure:
    return answer.failure or list(answer.trials)


def _received(rank: Rank, data: Mapping[str, Any]) -> Answer:
    """Return an answer with the time of its arrival as the time of its failure: clocks of machines differ."""
    answer = Answer.from_dict(data)
    if answer.failure is None:
        return answer
    return replace(answer, failure=replace(answer.failure, rank=rank.number, at_s=time.perf_counter()))


def _gather(listener: socket.socket, launch: Launch) -> dict[int, tuple[Member, Channel]]:
    """Return the ranks that connect within `JOIN_S` seconds, with their connections."""
    found: dict[int, tuple[Member, Channel]] = {}
    secret, deadline_s = channel.key(), time.monotonic() + channel.JOIN_S
    while len(found) < launch.size and (left_s := deadline_s - time.monotonic()) > 0:
        listener.settimeout(left_s)
        with suppress(OSError, EOFError, AuthenticationError):  # someone else's connection, or no one's
            end, _ = listener.accept()
            with end:
                to = channel.prove(end, secret, first=True)
            kind, data = to.receive()
            if kind == "hello":
                member = Member(**data)
                found.setdefault(member.rank, (member, to))
    return found
