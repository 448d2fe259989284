"""Cluster: rank 0 of a launch describes the machines and runs trials over their ranks.

Rank 0 plans, stores and reports. It gives each rank its part of a trial, and merges the answers. If
the worker of a rank fails, the trial fails, and the run goes on. If the process of a rank ends, the
trial fails and the run ends; the same command resumes it.
"""

from __future__ import annotations

import secrets
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from dpbench.measure.failures import together
from dpbench.measure.group import Answer, Crossing, Group, Member, Part, Task
from dpbench.measure.merging import merge, shifted
from dpbench.measure.request import RemoteRank, Request, WorkKind
from dpbench.measure.server import again_if_killed, as_trials
from dpbench.records import HOST, Case, Effort, Sample, Status, Trial, host_device
from dpbench.records.facts import TrialHost, stated
from dpbench.records.registry import Role
from dpbench.records.trial import ALONE, Failure, cause_of, in_order

TIMEOUT_S = 60.0
"""The longest wait of a rank for its peers in seconds, at most a third of the trial's limit."""


@dataclass(frozen=True)
class Offset:
    """The offset of a machine's clock from rank 0's, and its largest error, in seconds."""

    seconds: float = 0.0
    error_s: float = 0.0

    @classmethod
    def of(cls, own: Sequence[Crossing], other: Sequence[Crossing]) -> Offset:
        """Return the offset of a rank's clock from barriers that it and rank 0 (`own`) passed.

        It is the difference at the barrier with the smallest spread: two ranks leave a barrier at
        most as far apart as the longer of their waits.
        """
        offsets = [
            cls(there.left_s - here.left_s, max(here.waited_s, there.waited_s))
            for here, there in zip(own, other, strict=True)
        ]
        return min(offsets, key=lambda one: one.error_s)

    def between(self, later: Offset) -> Offset:
        """Return the mean of two offsets; half of their difference adds to the error."""
        mean = statistics.mean([self.seconds, later.seconds])
        return Offset(
            mean, max(self.error_s, later.error_s) + abs(later.seconds - self.seconds) / 2
        )


class Cluster:
    """The ranks of a launch, to which rank 0 gives tasks; they have joined `group`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._members = group.members

    # -- the machines and the ranks

    def hosts(self, count: int | None = None) -> list[TrialHost]:
        """Return the machines of the first `count` ranks (None: of all), ordered by first rank."""
        members = self._members[:count]
        called = names(members)
        hosts = []
        for node in dict.fromkeys(member.node for member in members):
            on_node = [member for member in members if member.node == node]
            cores = {core for member in on_node for core in member.cores}
            hosts.append(
                TrialHost(
                    name=called[node],
                    machine=on_node[0].machine,
                    ranks=tuple(member.rank for member in on_node),
                    cores=len(cores),
                )
            )
        return hosts

    def facts(self) -> dict[str, Any]:
        """Return the machines, with the facts of each, as plain data for the run's provenance."""
        described = []
        for host in self.hosts():
            described.append(asdict(host) | {"facts": self._members[host.ranks[0]].facts})
        return {"machines": described}

    def placed(self, case: Case) -> Case:
        """Return the case with the number of machines that its ranks use in `hosts`."""
        hosts = len(self.hosts(len(case.rows))) if case.traits.ranks else 1
        return replace(case, hosts=max(1, hosts))

    def counts(self) -> tuple[int, ...]:
        """Return default device counts: 1, and the ranks on 1, 2, 4, ... and all machines."""
        sizes = [len(host.ranks) for host in self.hosts()]
        machines = [number for number in (1, 2, 4, 8, 16, 32, 64) if number < len(sizes)]
        return tuple(dict.fromkeys([1, *(sum(sizes[:number]) for number in machines), sum(sizes)]))

    # -- the interface of a server

    @contextmanager
    def workers(self) -> Iterator[Self]:
        """Start a new server at every rank, and yield this object, which uses the servers."""
        self._group.ask(Task(renew=True))
        yield self

    def check(self, case: Case, limit_s: float) -> Trial:
        """Check the model of a case in a worker of rank 0; return a trial without steps."""
        request = Request(cases=(case,), effort=Effort(), round=0, job=WorkKind.CHECK_MODEL)
        return again_if_killed(lambda: self._by_rank_0(request, limit_s))[0]

    def run_together(
        self, cases: Sequence[Case], effort: Effort, number: int, limit_s: float
    ) -> list[Trial]:
        """Run the cases in round `number`, and return a trial for each of them.

        A single case whose strategy uses ranks runs over its ranks. A single baseline case runs on
        each machine at the same time, which shows how much the machines differ; its trial is that
        of rank 0's machine, with the step times of all machines as samples. All other cases run in
        one worker of rank 0. If a signal from outside ends a worker, the cases are run once more.
        """
        request = Request(cases=tuple(cases), effort=effort, round=number)
        return [*again_if_killed(lambda: self._run(request, limit_s))]

    def _run(self, request: Request, limit_s: float) -> list[Trial]:
        first, *others = request.cases
        if not others and first.traits.ranks:
            return [self._over_ranks(request, limit_s)]
        if not others and first.traits.role is Role.BASELINE:
            return [self._everywhere(request, limit_s)]
        return self._by_rank_0(request, limit_s * len(request.cases))

    def _by_rank_0(self, request: Request, limit_s: float) -> list[Trial]:
        return as_trials(_outcome(self._ask({0: request}, limit_s)[0]), request)

    def _ask(self, requests: Mapping[int, Request], limit_s: float) -> dict[int, Answer]:
        """Let ranks carry out requests, and return their answers, both by rank.

        Of the ranks that see the same cores and GPUs, the first observes these during the task.
        """
        parts = {}
        for rank, request in requests.items():
            case = request.cases[0]
            peers = self._peers(rank)
            own_gpus = range(len(peers) * case.traits.devices_per_replica)
            parts[rank] = Part(
                request=request,
                roots=tuple(self._members[peer].pid for peer in peers) if rank == peers[0] else (),
                gpus=case.device_ids or tuple(own_gpus) if case.device_kind == "cuda" else (),
            )
        answers = self._group.ask(Task(parts=parts, limit_s=limit_s))
        return {rank: answers[rank] for rank in requests}

    def _peers(self, rank: int) -> list[int]:
        """Return the ranks, in order, that see the same cores and GPUs as `rank`."""
        own = self._members[rank]
        return [
            one.rank for one in self._members if (one.machine, one.sees) == (own.machine, own.sees)
        ]

    def _everywhere(self, request: Request, limit_s: float) -> Trial:
        """Run a case on each machine at the same time, each in a worker of its first rank.

        Return rank 0's trial with all machines' step times as samples.
        """
        hosts = [replace(host, ranks=host.ranks[:1]) for host in self.hosts()]
        answers = self._ask(dict.fromkeys([host.ranks[0] for host in hosts], request), limit_s)
        (trial,) = as_trials(_outcome(answers[0]), request)
        steps = [
            Sample(step.end_s, host_device(number), ALONE, step.seconds)
            for number, host in enumerate(hosts)
            for part in answers[host.ranks[0]].trials
            for step in part.steps
            if not step.warmup
        ]
        failed = {
            host.name: failure.reason
            for host in hosts[1:]
            if (failure := answers[host.ranks[0]].failure)
        }
        trial = replace(trial.adding(stated(failed_hosts=failed)), samples=(*trial.samples, *steps))
        return _described(trial, hosts, answers, Offset())

    def _over_ranks(self, request: Request, limit_s: float) -> Trial:
        (case,) = request.cases
        size = len(case.rows)
        if size > len(self._members):
            reason = (
                f"the case needs {size} ranks, and the launch has {len(self._members)}: start more"
                " processes"
            )
            return Trial(
                case=case,
                status=Status.FAILED,
                reason=reason,
                round=request.round,
                started_s=time.time(),
            )
        hosts = self.hosts(size)
        key = secrets.token_hex(8)
        requests = {}
        for rank in range(size):
            seat = RemoteRank(
                rank=rank,
                size=size,
                place=self._peers(rank).index(rank),
                key=key,
                timeout_s=min(TIMEOUT_S, limit_s / 3),
            )
            requests[rank] = replace(request, seat=seat)
        answers = self._ask(requests, limit_s)
        if failures := [one.failure for one in answers.values() if one.failure]:
            return self._failed(request, failures)
        offsets = _offsets(hosts, answers)
        parts = [shifted(answers[rank].trials[0], -offsets[rank].seconds) for rank in range(size)]
        samples = [
            sample
            for number, host in enumerate(hosts)
            for rank in host.ranks
            for sample in self._sampled(number, rank, answers[rank], parts[rank], offsets[rank])
        ]
        merged = merge(parts, hosts)
        worst = max(offsets.values(), key=lambda one: one.error_s)
        return _described(
            replace(merged, samples=(*merged.samples, *samples)), hosts, answers, worst
        )

    def _devices_of(self, case: Case, rank: int) -> dict[int, int]:
        """Return the case's device indices by CUDA ordinal.

        It has the devices of all ranks that see the same cores and GPUs as `rank`.
        """
        each = case.traits.devices_per_replica
        indices = {}
        for place, peer in enumerate(self._peers(rank)):
            for position in range(place * each, (place + 1) * each):
                if peer < len(case.rows) and position < len(case.device_ids or range(position + 1)):
                    ordinal = case.device_ids[position] if case.device_ids else position
                    indices[ordinal] = peer * each + position - place * each
        return indices

    def _sampled(
        self, host: int, rank: int, answer: Answer, part: Trial, offset: Offset
    ) -> Iterator[Sample]:
        """Yield the samples that a rank has taken of its GPUs, and of the host in timed steps.

        `host` is the index of the rank's machine. Times are converted to rank 0's clock, and GPUs
        to the case's device indices. Left out are the host's counters on rank 0's machine, which
        the run itself samples, and GPUs that the case does not use.
        """
        start_s, end_s = part.window
        devices = {HOST: host_device(host)} if host else {}
        devices |= self._devices_of(part.case, rank) if part.case.device_kind == "cuda" else {}
        for sample in answer.samples:
            at_s = sample.time_s - offset.seconds
            timed = part.timed and start_s <= at_s <= end_s
            if sample.device in devices and (timed or sample.device != HOST):
                yield replace(sample, time_s=at_s, device=devices[sample.device])

    def _failed(self, request: Request, failures: Sequence[Failure]) -> Trial:
        (case,) = request.cases
        cause = cause_of(failures, case)
        return Trial(
            case=case,
            status=cause.status,
            reason=together(in_order(failures), lambda rank: str(self._members[rank])),
            round=request.round,
            verified=cause.verified,
            started_s=time.time(),
            failed_device=cause.device if cause.status is Status.OOM else None,
        )


def names(members: Sequence[Member]) -> dict[int, str]:
    """Return a distinct name for each machine, by its index.

    Machines with equal host names get names such as "host#0" and "host#1".
    """
    hosts = {member.node: member.host for member in members}
    called = Counter(hosts.values())
    return {
        node: f"{host}#{node}" if called[host] > 1 else host for node, host in sorted(hosts.items())
    }


def _offsets(hosts: Sequence[TrialHost], answers: Mapping[int, Answer]) -> dict[int, Offset]:
    """Return, by rank, the clock's offset from rank 0's; it is 0 on rank 0's machine."""
    answer_0 = answers[0]
    offsets: dict[int, Offset] = {}
    for host in hosts:
        offset = Offset()
        if host.machine != hosts[0].machine:
            answer = answers[host.ranks[0]]
            before = Offset.of(answer_0.before, answer.before)
            offset = before.between(Offset.of(answer_0.after, answer.after))
        offsets |= dict.fromkeys(host.ranks, offset)
    return offsets


def _described(
    trial: Trial, hosts: Sequence[TrialHost], answers: Mapping[int, Answer], worst: Offset
) -> Trial:
    """Add the machines, the largest clock error and the highest foreign load to the provenance."""
    loads = [answer.load for answer in answers.values() if answer.load]
    load = max(loads, key=lambda one: one.taken, default=None)
    facts = stated(hosts=tuple(hosts), clock_error_s=worst.error_s)
    return trial.adding(facts | (stated(foreign_load=load) if load else {}))


def _outcome(answer: Answer) -> list[Trial] | Failure:
    return answer.failure or list(answer.trials)
