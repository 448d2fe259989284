"""Group: the processes of a launch join one process group and carry out tasks together.

Rank 0 hands out tasks, every rank carries out its part of a task in fresh workers, and rank 0
gathers the answers. While workers run, the processes only wait. `measure.cluster` has the tasks.

The messages are pickled, so whoever can connect to the group can execute code in it. The same is
true of every program that torchrun starts.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

from dpbench.hardware import foreign_load, processes, provenance, samplers, torch_build
from dpbench.hardware.nvml import describe
from dpbench.measure.launch import Launch
from dpbench.measure.request import Request
from dpbench.measure.scratch import folder
from dpbench.measure.server import START_LIMIT_S, Server
from dpbench.records import Sample, Status, Trial
from dpbench.records.errors import UsageError
from dpbench.records.load import Load
from dpbench.records.trial import Failure
from dpbench.records.vendors import AMD

LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
"""The environment variable with torch's log level, which torch reads when it is imported."""
if LOG_LEVEL in os.environ:
    import torch
else:
    # the errors that torch would log in this process are raised too
    os.environ[LOG_LEVEL] = "FATAL"
    import torch

    del os.environ[LOG_LEVEL]  # workers log as usual
dist = torch.distributed

JOIN = timedelta(seconds=60)
"""The longest time that the ranks of a launch may take to join the process group."""
PATIENCE = timedelta(days=365)
"""The longest time that a rank waits for a task or its end.

It is no limit in practice, because a connection to a process that has ended closes at once.
"""
LATE_S = 30.0
"""The seconds by which a rank may exceed the time limit of a task before it counts as lost."""
BARRIERS = 20
"""The number of barriers before and after a task; the smallest spread relates the clocks."""
_MISSING = re.compile(r"Ranks ([\d, ]+) failed to pass monitoredBarrier")


class RanksLost(ConnectionError):
    """Processes of a launch have ended or do not answer, so that the launch cannot go on.

    `ranks` are their ranks; it is empty if they are unknown.
    """

    def __init__(self, reason: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)


@dataclass(frozen=True, kw_only=True)
class Member:
    """The facts about a rank that rank 0 needs.

    `node` is the index of the rank's machine. `machine` identifies the running system: equal values
    mean one machine. `sees` lists the cores and GPUs that the process may use, as JSON text.
    `facts` describe the machine and its software.
    """

    rank: int
    node: int
    host: str
    machine: str
    pid: int
    sees: str
    cores: tuple[int, ...]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, launch: Launch) -> Self:
        """Return the facts about this process, which is one rank of `launch`."""
        cores = sorted(processes.CORES)
        return cls(
            rank=launch.rank,
            node=launch.node,
            host=launch.host,
            machine=_machine(),
            pid=os.getpid(),
            sees=json.dumps([cores, *(os.environ.get(name, "") for name in AMD.hiding)]),
            cores=tuple(cores),
            facts={
                # NVML lists no GPU of another maker: which there are is then unknown
                **provenance.environment(describe() if torch_build.vendor().counters else None),
                "dpbench": {"version": provenance.own_version()},
            },
        )

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"


def _machine() -> str:
    """Return the machine's boot id, equal in all its containers, or else the host name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The part of one rank in a task: a request for a fresh worker.

    If this rank observes its cores and GPUs during the task, `roots` has the process ids of all
    ranks that see the same ones: it then measures the load of all processes outside the process
    trees of `roots`, and samples the host and the GPUs with the ordinals `gpus`.
    """

    request: Request
    roots: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """The parts of the ranks, by rank; a rank without a part only waits.

    `limit_s` is the time limit of each part. With `renew`, every rank starts a new server of
    workers instead.
    """

    parts: Mapping[int, Part] = field(default_factory=dict)
    limit_s: float = START_LIMIT_S
    renew: bool = False


@dataclass(frozen=True)
class Crossing:
    """A rank's passage through a barrier, left at `left_s` after a wait of `waited_s` seconds.

    Every rank leaves a barrier at most `waited_s` seconds after the last rank has entered it.
    """

    left_s: float
    waited_s: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A rank's answer to a task: the trials of its worker, or a failure.

    `samples` and `load` (None: not measured) are those of the rank's machine during the task.
    `before` and `after` are the rank's passages through the barriers before and after the task.
    """

    trials: tuple[Trial, ...] = ()
    failure: Failure | None = None
    samples: tuple[Sample, ...] = ()
    load: Load | None = None
    before: Sequence[Crossing] = ()
    after: Sequence[Crossing] = ()


# -- the process group

Message = TypeVar("Message")


class Group:
    """The process group of a launch, as one of its processes sees it.

    On entry, the context manager waits until all ranks have joined the group. It raises
    ConnectionError if a rank is missing, and ValueError if a rank has another version of dpbench.
    `members` are then the facts about all ranks on rank 0, and empty on the others. On exit, rank 0
    ends the run of all ranks. `lost` is the reason why the group can no longer be used, or None.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.members: Sequence[Member] = ()
        self.lost: RanksLost | None = None
        self._between_tasks = True
        self._series: samplers.SampleFile | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._scratch = opened.enter_context(folder())
            self._server = opened.enter_context(Server(self._scratch))
            self._join()
            self.members = self._gathered(Member.of(self.launch))
            own = provenance.own_version()
            found = [(one, one.facts["dpbench"]["version"]) for one in self.members]
            if others := [f"{one} has {version}" for one, version in found if version != own]:
                raise UsageError(
                    f"rank 0 has dpbench {own}, but {', '.join(others)}: install the same version"
                )
            self._stack = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        # after an interrupted task, the other ranks end when this process has ended
        if self.launch.rank == 0 and self._between_tasks:
            with suppress(RanksLost):
                self._received(None)
        self._stack.close()

    def _join(self) -> None:
        os.environ.update(self.launch.variables)
        try:
            dist.init_process_group("gloo", timeout=JOIN)
            # another group, because a trial may take longer than the ranks may take to join
            self._group = dist.new_group(timeout=PATIENCE)
        except RuntimeError as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ConnectionError(
                f"{self.launch} could not join the {self.launch.size} ranks that meet at {where}"
                f" ({_first_line(error)}): all ranks must run, and every machine must reach this"
                " address. The variables MASTER_ADDR and MASTER_PORT choose another one, and"
                " GLOO_SOCKET_IFNAME the network interface of each machine"
            ) from error

    def serve(self) -> None:
        """Carry out the tasks of rank 0 until it ends the run.

        Raises RanksLost if rank 0's process has ended without that.
        """
        while (task := self._received(None)) is not None:
            self._carried_out(task)

    def ask(self, task: Task) -> dict[int, Answer]:
        """Let all ranks carry out a task, and return the answers by rank; for rank 0 only.

        If a rank has ended or does not answer, the answers of all ranks but rank 0 are failures
        that say so, and further calls raise RanksLost.
        """
        if self.lost:
            raise self.lost
        self._between_tasks = False
        self._received(task)
        answers = self._carried_out(task)
        self._between_tasks = self.lost is None
        return dict(enumerate(answers))

    def _received(self, task: Task | None) -> Task | None:
        """Return rank 0's task on every rank, or None at the end of the run."""
        self._meet(JOIN.total_seconds())
        box = [task]
        with self._connected():
            dist.broadcast_object_list(box, group=self._group)
        return box[0]

    def _carried_out(self, task: Task) -> Sequence[Answer]:
        """Carry out this rank's part; return all answers on rank 0, and none on other ranks."""
        before = self._crossings()
        answer = replace(self._answer(task), before=before)
        try:
            self._meet(task.limit_s + LATE_S)
            return self._gathered(replace(answer, after=self._crossings()))
        except RanksLost as lost:
            if self.launch.rank:
                raise
            return [answer, *(_unanswered(rank, lost) for rank in range(1, self.launch.size))]

    def _answer(self, task: Task) -> Answer:
        """Carry out this rank's part of a task; an error of this process is a failure."""
        began_s = time.perf_counter()
        try:
            if task.renew:
                self._server.stop()
                self._server.prepare()
            part = task.parts.get(self.launch.rank)
            answer = self._worked(part, task.limit_s) if part else Answer()
        except OSError as error:
            # such as a full disk, which is no fault of the case: the same command measures it
            answer = Answer(
                failure=Failure(status=Status.KILLED, reason=f"its process failed: {error}")
            )
        except Exception as error:
            answer = Answer(
                failure=Failure(status=Status.FAILED, reason=f"its process failed: {error!r}")
            )
        if answer.failure is None:
            return answer
        # ranks on several machines compare the time since the barriers before the task
        at_s = time.perf_counter() - began_s
        return replace(answer, failure=replace(answer.failure, rank=self.launch.rank, at_s=at_s))

    def _worked(self, part: Part, limit_s: float) -> Answer:
        if part.roots and self._series is None:
            output = self._scratch / "samples.jsonl"
            self._series = self._stack.enter_context(samplers.sampling(part.gpus, output))
        began_s = time.perf_counter()
        before = foreign_load.snapshot(part.roots)
        result = self._server.answer(part.request, limit_s)
        load = foreign_load.since(before, part.roots)
        answer = (
            Answer(failure=result) if isinstance(result, Failure) else Answer(trials=tuple(result))
        )
        if not part.roots or self._series is None:
            return answer
        return replace(
            answer,
            samples=self._series.cut(began_s, time.perf_counter()),
            load=load if isinstance(load, Load) else None,
        )

    def _meet(self, limit_s: float) -> None:
        """Wait until all ranks have called this function.

        Raises RanksLost, on rank 0 with the ranks that have ended or are later than `limit_s`
        seconds, and on the other ranks if rank 0 has ended.
        """
        with self._connected():
            dist.monitored_barrier(self._group, timedelta(seconds=limit_s), wait_all_ranks=True)

    def _crossings(self) -> list[Crossing]:
        crossings = []
        with self._connected():
            for _ in range(BARRIERS):
                entered_s = time.perf_counter()
                dist.barrier(self._group)
                left_s = time.perf_counter()
                crossings.append(Crossing(left_s, left_s - entered_s))
        return crossings

    def _gathered(self, message: Message) -> Sequence[Message]:
        """Return the messages of all ranks on rank 0, and none on the others."""
        messages: list[Any] = [None] * self.launch.size
        with self._connected():
            dist.gather_object(message, None if self.launch.rank else messages, group=self._group)
        return () if self.launch.rank else messages

    @contextmanager
    def _connected(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.launch.rank:
                text = (
                    f"{self.launch} has lost the connection to rank 0, whose output may show the"
                    " cause"
                )
                raise RanksLost(text, (0,)) from error
            missing = _MISSING.search(str(error))
            ranks = [int(number) for number in missing[1].split(",")] if missing else self._ended()
            hosts = [str(one) for one in self.members if one.rank in ranks]
            who = ", ".join(hosts) or f"a rank ({_first_line(error)})"
            text = (
                f"{who} has ended or does not answer, so that the launch cannot go on; to resume"
                " the run, give the same command again"
            )
            self.lost = RanksLost(text, ranks)
            raise self.lost from error

    def _ended(self) -> list[int]:
        """Return the ranks whose connection is closed; the group cannot be used afterwards."""
        ended = []
        for rank in range(1, self.launch.size):
            try:
                dist.irecv(torch.empty(1), rank, group=self._group)
            except RuntimeError:
                ended.append(rank)
        return ended


def _unanswered(rank: int, lost: RanksLost) -> Answer:
    """Return a failure: of the rank itself if it was lost, otherwise caused by another rank."""
    if rank in lost.ranks:
        failure = Failure(
            status=Status.FAILED, reason="its process has ended or does not answer", rank=rank
        )
    else:
        failure = Failure(
            status=Status.FAILED,
            reason=f"its answer was lost: {lost}",
            rank=rank,
            exception=type(lost).__name__,
            perhaps_secondary=True,
        )
    return Answer(failure=failure)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
