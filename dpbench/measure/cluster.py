"""Cluster: rank 0's side of a launch by torchrun or srun: it describes the machines and runs trials over their ranks.

Every process of the launch, rank 0 included, has an agent (`measure.agent`). Rank 0 plans, stores and reports. It sends
each rank its part of a trial, and merges the answers. If a rank fails, its trial fails. If the agent of a rank is lost,
the later cases that need this rank fail too, and all other cases are measured. (torchrun then ends all ranks on that
machine. If rank 0 is one of them, the run ends, and the finished trials stay stored.)
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, Self

from dpbench.hardware import foreign_load
from dpbench.measure import agent, launch
from dpbench.measure.agent import Reply, Work
from dpbench.measure.failures import together
from dpbench.measure.launch import Launch, LaunchError, leader_address, names
from dpbench.measure.merging import merge, shifted
from dpbench.measure.peers import Offset, Peers, gather
from dpbench.measure.request import RemoteRank, Request, WorkKind
from dpbench.measure.server import START_LIMIT_S, again_if_killed, as_trials
from dpbench.records import HOST, Case, Effort, Sample, Status, Trial, host_device
from dpbench.records.registry import Role
from dpbench.records.trial import ALONE, FAILED_HOSTS, HOSTS, Failure, TrialHost, cause_of, in_order
from dpbench.records.words import count

TIMEOUT_S = 60.0
"""The longest time in seconds that a rank waits for its peers; a third of the trial's time limit if that is shorter."""


class Cluster:
    """The ranks of a launch, which rank 0 controls.

    On entry, the context manager waits until the agents of all ranks have connected; on exit, it ends the agents.
    `interface` is the name of the network interface that the ranks use.
    """

    def __init__(self, launch: Launch, interface: str) -> None:
        self._launch, self._interface = launch, interface
        self._address = leader_address(launch, interface)
        self._peers = Peers(())

    def __enter__(self) -> Self:
        with launch.listen(self._address, self._launch) as listener:
            own = threading.Thread(target=self._be_agent, name="agent of rank 0", daemon=True)
            own.start()
            self._peers = Peers(gather(listener, self._launch))
        # reserve a port at which every worker of rank 0 can listen, but no process of another user
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind((self._address, 0))
        self._own = own
        return self

    def __exit__(self, *error: object) -> None:
        for rank in self._peers:
            rank.send("abort", turn=self._peers.turn)
            rank.send("end")
        self._reserved.close()
        self._own.join(START_LIMIT_S)

    def _be_agent(self) -> None:
        with suppress(LaunchError):  # rank 0 sees that its own agent is missing
            agent.serve(self._launch, self._interface)

    # -- the machines and the ranks

    @property
    def opened(self) -> str:
        """Return a text that says at which address rank 0 listens, and how the messages are protected."""
        return (
            f"rank 0 listens at {self._address} (interface {self._interface}) for the agents and for torch's store. "
            "The agents' messages are authenticated but not encrypted. The ranks' collectives use the same interface "
            "without protection: use a private network"
        )

    @property
    def size(self) -> int:
        """Return the number of ranks, including lost ranks."""
        return len(self._peers)

    def hosts(self, count: int | None = None) -> list[TrialHost]:
        """Return the machines of the first `count` ranks (None: of all), in the order of their first ranks."""
        members = [rank.member for rank in self._peers[:count]]
        called = names([(member.node, member.host) for member in members])
        found = []
        for node in dict.fromkeys(member.node for member in members):
            own = [member for member in members if member.node == node]
            cores = {core for member in own for core in member.cores}
            found.append(TrialHost(called[node], own[0].machine, tuple(member.rank for member in own), len(cores)))
        return found

    def facts(self) -> dict[str, Any]:
        """Return the machines, with the facts of each, as plain data for the run's provenance."""
        described = []
        for host in self.hosts():
            described.append(asdict(host) | {"facts": self._peers[host.ranks[0]].member.facts})
        return {"by": self._launch.by, "interface": self._interface, "machines": described}

    def placed(self, case: Case) -> Case:
        """Return the case with its field `hosts` set to the number of machines that its ranks use."""
        hosts = len(self.hosts(len(case.rows))) if case.traits.ranks else 1
        return replace(case, hosts=max(1, hosts))

    def counts(self) -> tuple[int, ...]:
        """Return default device counts: 1, and the total of ranks on the first 1, 2, 4, ... machines and on all."""
        sizes = [len(host.ranks) for host in self.hosts()]
        machines = [number for number in (1, 2, 4, 8, 16, 32, 64) if number < len(sizes)]
        return tuple(dict.fromkeys([1, *(sum(sizes[:number]) for number in machines), sum(sizes)]))

    # -- the interface of a server

    @contextmanager
    def workers(self) -> Iterator[Self]:
        """Start a new server process at every rank, and yield this object, which runs trials through these servers."""
        self._peers.renew()
        yield self

    def check(self, case: Case, limit_s: float) -> Trial:
        """Check the model of a case in a worker of rank 0; return a trial without steps."""
        request = Request(cases=(case,), effort=Effort(), round=0, job=WorkKind.CHECK_MODEL)
        return again_if_killed(lambda: self._by_rank_0(request, limit_s))[0]

    def run_together(self, cases: Sequence[Case], effort: Effort, number: int, limit_s: float) -> list[Trial]:
        """Run the cases in round `number`, and return a trial for each of them.

        A single case whose strategy uses ranks runs over its ranks. A single baseline case runs on each machine at the
        same time, which shows how much the machines differ; its trial is that of rank 0's machine, with the step times
        of all machines as samples. All other cases run in one worker of rank 0. If a signal from outside ends a worker,
        the cases are run once more.
        """
        request = Request(cases=tuple(cases), effort=effort, round=number)
        return [*again_if_killed(lambda: self._run(request, limit_s))]

    def _run(self, request: Request, limit_s: float) -> list[Trial]:
        (first, *others) = request.cases
        if not others and first.traits.ranks:
            return [self._over_ranks(request, limit_s)]
        if not others and first.traits.role is Role.BASELINE:
            return [self._everywhere(request, limit_s)]
        return self._by_rank_0(request, limit_s * len(request.cases))

    def _by_rank_0(self, request: Request, limit_s: float) -> list[Trial]:
        answers = self._peers.ask({0: Work(request=request, limit_s=limit_s, roots=self._roots(0))})
        return as_trials(_outcome(answers[0]), request)

    def _everywhere(self, request: Request, limit_s: float) -> Trial:
        """Run a case on each machine at the same time; return rank 0's trial with all machines' step times as samples.

        Each machine runs the whole case by itself, in a worker of the first of its ranks.
        """
        if reason := self._absent(1):
            (case,) = request.cases
            return Trial(case=case, status=Status.FAILED, reason=reason, round=request.round, started_s=time.time())
        hosts = [replace(host, ranks=host.ranks[:1]) for host in self.hosts()]
        leads = [lead for host in hosts for lead in host.ranks if not self._peers[lead].lost]
        answers = self._peers.ask({
            lead: Work(request=request, limit_s=limit_s, roots=self._roots(lead)) for lead in leads
        })  # fmt: skip
        (trial,) = as_trials(_outcome(answers[0]), request)
        steps = [
            Sample(step.end_s, host_device(number), ALONE, step.seconds)
            for number, host in enumerate(hosts)
            for one in (answers[host.ranks[0]].trials if host.ranks[0] in answers else ())
            for step in one.steps
            if not step.warmup
        ]
        failed = {}
        for host in hosts[1:]:
            answer = answers.get(host.ranks[0])
            if answer is None or answer.failure:
                failed[host.name] = (
                    answer.failure.reason if answer and answer.failure else self._peers[host.ranks[0]].lost
                )
        trial = replace(trial, samples=(*trial.samples, *steps), provenance={**trial.provenance, FAILED_HOSTS: failed})
        return self._described(trial, hosts, answers, Offset())

    def _over_ranks(self, request: Request, limit_s: float) -> Trial:
        """Run a case over its ranks, and return one trial that is merged from the trials of the ranks."""
        (case,) = request.cases
        size = len(case.rows)
        if reason := self._absent(size):
            return Trial(case=case, status=Status.FAILED, reason=reason, round=request.round, started_s=time.time())
        timeout_s, hosts = min(TIMEOUT_S, limit_s / 3), self.hosts(size)
        leads = {host.ranks[0] for host in hosts}
        secret = secrets.token_hex(16)  # another user cannot guess the keys of the trial's store
        work = {}
        for number in range(size):
            place, peers = self._place(number)
            seat = RemoteRank(
                rank=number, size=size, place=place, address=self._address, port=self._reserved.getsockname()[1],
                key=secret, interface=self._interface, timeout_s=timeout_s,
            )  # fmt: skip
            gpus = case.device_ids or tuple(range(len(peers) * case.traits.devices_per_replica))
            work[number] = Work(
                request=replace(request, seat=seat), limit_s=limit_s, roots=self._roots(number),
                sample=(gpus if case.device_kind == "cuda" else ()) if place == 0 or number in leads else None,
            )  # fmt: skip
        before = self._offsets(hosts)
        answers = self._peers.ask(work, timeout_s=timeout_s)
        after = self._offsets(hosts)
        if failures := [one.failure for one in answers.values() if one.failure]:
            return self._failed(request, failures)
        offsets = {rank: before[rank].between(after[rank]) for host in hosts for rank in host.ranks}
        if gone := [str(self._peers[rank]) for rank, one in offsets.items() if one.error_s == float("inf")]:
            reason = f"lost: {', '.join(gone)}; times of a lost rank cannot be compared with those of the other ranks"
            return Trial(case=case, status=Status.FAILED, reason=reason, round=request.round, started_s=time.time())
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
        """Return the reason why not all of the first `size` ranks can take part, or an empty string if they can."""
        if size > self.size:
            return f"the case needs {size} ranks, and the launch has {self.size}: start more processes"
        gone = [f"{rank} is lost: {rank.lost}" for rank in self._peers[:size] if rank.lost]
        return f"the case needs {count(size, 'rank')}, but {'; '.join(gone)}" if gone else ""

    def _place(self, number: int) -> tuple[int, list[int]]:
        """Return the position of rank `number` among the ranks that see the same cores and GPUs, and their list."""
        mine = self._peers[number].member
        peers = [
            rank.number for rank in self._peers if (rank.member.machine, rank.member.sees) == (mine.machine, mine.sees)
        ]
        return peers.index(number), peers

    def _roots(self, number: int) -> tuple[int, ...]:
        """Return the process ids of the agents of all ranks that see the same cores and GPUs as rank `number`.

        Return an empty tuple unless `number` is the lowest of these ranks: only its agent measures the foreign load.
        """
        place, peers = self._place(number)
        return tuple(self._peers[peer].member.pid for peer in peers) if place == 0 else ()

    def _devices_of(self, case: Case, number: int) -> dict[int, int]:
        """Return a dictionary from the CUDA ordinal of each device to the index of this device in the case.

        It has the devices of all ranks that see the same cores and GPUs as rank `number`.
        """
        each, found = case.traits.devices_per_replica, {}
        for place, peer in enumerate(self._place(number)[1]):
            for position in range(place * each, (place + 1) * each):
                if peer < len(case.rows) and position < len(case.device_ids or range(position + 1)):
                    ordinal = case.device_ids[position] if case.device_ids else position
                    found[ordinal] = peer * each + position - place * each
        return found

    def _sampled(self, host: int, rank: int, answer: Reply, part: Trial, offset: Offset) -> Iterator[Sample]:
        """Yield the samples that a rank's agent took during the rank's timed steps.

        `host` is the index of the rank's machine. Times are converted to rank 0's clock, and GPUs to the case's device
        indices. Samples of the host's counters on rank 0's machine are left out, because the run itself takes them.
        Samples of GPUs that the case does not use are left out too.
        """
        timed = [step for step in part.steps if not step.warmup]
        devices = {HOST: host_device(host)} if host else {}
        devices |= self._devices_of(part.case, rank) if part.case.device_kind == "cuda" else {}
        for sample in answer.samples:
            at_s = sample.time_s - offset.seconds
            if timed and timed[0].start_s <= at_s <= timed[-1].end_s and sample.device in devices:
                yield replace(sample, time_s=at_s, device=devices[sample.device])

    def _described(
        self, trial: Trial, hosts: Sequence[TrialHost], answers: Mapping[int, Reply], worst: Offset
    ) -> Trial:
        """Add three facts to the trial's provenance, and return the trial.

        They are its machines, the largest error of the offsets between their clocks, and the highest foreign load.
        """
        loads = [answer.load for answer in answers.values() if answer.load]
        load = max(loads, key=lambda one: one.taken, default=None)
        facts: dict[str, Any] = {HOSTS: [asdict(host) for host in hosts], "clock_error_s": worst.error_s}
        facts |= {foreign_load.FACT: asdict(load)} if load else {}
        return replace(trial, provenance={**trial.provenance, **facts})

    def _failed(self, request: Request, failures: Sequence[Failure]) -> Trial:
        """Return the trial of a case in which ranks failed; its reason begins with the likely cause."""
        (case,), cause = request.cases, cause_of(failures, request.cases[0])
        reason = together(in_order(failures), lambda rank: str(self._peers[rank]))
        return Trial(
            case=case, status=cause.status, reason=reason, round=request.round,
            verified=cause.verified, started_s=time.time(),
            failed_device=cause.device if cause.status is Status.OOM else None,
        )  # fmt: skip

    def _offsets(self, hosts: Sequence[TrialHost]) -> dict[int, Offset]:
        """Return, by rank, the offset of the rank's clock from rank 0's clock; it is 0 on rank 0's machine."""
        found: dict[int, Offset] = {}
        for host in hosts:
            same = host.machine == hosts[0].machine
            found |= dict.fromkeys(host.ranks, Offset() if same else self._peers.offset(self._peers[host.ranks[0]]))
        return found


def _outcome(answer: Reply) -> list[Trial] | Failure:
    return answer.failure or list(answer.trials)
