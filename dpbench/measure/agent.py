"""Agents: each process of a launch runs an agent, which connects to rank 0 and runs its requests in fresh workers."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from dpbench.hardware import foreign_load, provenance, samplers
from dpbench.hardware.nvml import describe
from dpbench.measure.launch import Channel, Launch, LaunchError, connect
from dpbench.measure.request import Request
from dpbench.measure.scratch import folder
from dpbench.measure.server import Server
from dpbench.records import Sample, Status, Trial
from dpbench.records.trial import Failure


@dataclass(frozen=True, kw_only=True)
class Member:
    """The facts about a rank that its agent sends to rank 0 when it connects.

    `node` is the index of the rank's machine. `machine` identifies the running system: equal values mean one machine.
    `sees` lists the cores and GPUs that the process may use, as JSON text. `version` is the version of dpbench. `facts`
    describe the machine and its software.
    """

    rank: int
    node: int
    host: str
    machine: str
    pid: int
    sees: str
    cores: tuple[int, ...]
    version: str
    facts: Mapping[str, Any]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the member that `asdict` converted to `data`.

        Another version of dpbench may have sent `data`: fields may be missing from it, and unknown ones are ignored.
        """
        known = {field.name: data.get(field.name) for field in fields(cls)}
        return cls(**known | {"cores": tuple(known["cores"] or ()), "version": known["version"] or "an older version"})

    @classmethod
    def of(cls, launch: Launch) -> Self:
        """Return the facts about this process, which is one rank of `launch`."""
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        software = {"dpbench": provenance.own_version(), "torch": provenance.version("torch")}
        return cls(
            rank=launch.rank, node=launch.node, host=launch.host, machine=_machine(), pid=os.getpid(),
            sees=json.dumps([cores, os.environ.get("CUDA_VISIBLE_DEVICES", "")]), cores=tuple(cores),
            version=provenance.own_version(),
            facts={"host": provenance.host_facts(), "gpus": describe(), "software": software},
        )  # fmt: skip


def _machine() -> str:
    """Return the machine's boot id, which is equal in all of its containers; if there is none, return the host name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class Work:
    """A request from rank 0 to an agent; `turn` is its number, and `limit_s` is its time limit in seconds.

    `sample` lists the ordinals of the GPUs to sample during the work, together with the host; None means no sampling.
    `roots` has process ids of agents on this machine. The foreign load is the load of all processes outside the process
    trees of these agents; if `roots` is empty, this load is not measured.
    """

    request: Request
    limit_s: float
    turn: int = 0
    sample: tuple[int, ...] | None = None
    roots: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the request as plain data for JSON."""
        plain = {name: getattr(self, name) for name in ("turn", "limit_s", "sample", "roots")}
        return plain | {"request": self.request.to_json()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the request that `to_dict` converted to `data`."""
        sample = data["sample"]
        return cls(
            turn=data["turn"], limit_s=data["limit_s"], request=Request.from_json(data["request"]),
            sample=None if sample is None else tuple(sample), roots=tuple(data["roots"]),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An agent's answer to the request with the number `turn`: the trials of its worker, or a failure.

    `samples` were taken on the agent's machine during the work. `load` is the foreign load on this machine during the
    work, or None if it was not measured.
    """

    turn: int = 0
    trials: tuple[Trial, ...] = ()
    failure: Failure | None = None
    samples: tuple[Sample, ...] = ()
    load: foreign_load.Load | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data for JSON."""
        return {
            "turn": self.turn, "trials": [trial.to_dict() for trial in self.trials],
            "failure": self.failure and self.failure.to_json(), "samples": [_plain(one) for one in self.samples],
            "load": self.load and asdict(self.load),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the answer that `to_dict` converted to `data`."""
        return cls(
            turn=data["turn"], trials=tuple(Trial.from_dict(one) for one in data["trials"]),
            failure=Failure.from_json(data["failure"]) if data["failure"] else None,
            samples=tuple(Sample(*one) for one in data["samples"]),
            load=foreign_load.Load(**data["load"]) if data["load"] else None,
        )  # fmt: skip


def _plain(sample: Sample) -> list[Any]:
    return [sample.time_s, sample.device, sample.metric, sample.value]


class Agent:
    """The part of a rank that stays alive during a run: it obeys rank 0's messages and runs work in fresh workers."""

    def __init__(self, launch: Launch, interface: str) -> None:
        self._launch, self._interface = launch, interface
        self._stack = ExitStack()
        """The resources of the thread that runs work. This thread must live as long as the server that it starts.

        Linux kills the server when the thread that started the server ends (see `processes.die_with_parent`).
        """
        self._server: Server | None = None
        self._series: samplers.SampleFile | None = None
        self._aborted = -1
        """The number of the last request that rank 0 has aborted; -1 if there is none."""

    def serve(self) -> None:
        """Serve requests until rank 0 ends the run.

        Raises LaunchError if rank 0 cannot be reached, refuses this rank, or is lost.
        """
        member = Member.of(self._launch)  # before connecting, because the driver of the GPUs may answer slowly
        rank_0 = connect(self._launch, self._interface)
        with ThreadPoolExecutor(1) as worker:
            try:
                rank_0.send("hello", **asdict(member))
                self._obey(rank_0, worker)
            except (EOFError, OSError) as error:
                raise LaunchError(f"{self._launch} lost the connection to rank 0, so the run has ended") from error
            finally:
                self._abort()
                worker.submit(self._stack.close).result()

    def _obey(self, rank_0: Channel, worker: ThreadPoolExecutor) -> None:
        """Handle rank 0's messages in order until the run ends; the thread of `worker` carries out the requests.

        Raises LaunchError if rank 0 refuses this rank.
        """
        while True:
            kind, data = rank_0.receive()
            match kind:
                case "ping":  # answered at once: the delay bounds the error of the clock's offset
                    rank_0.send("pong", at_s=time.perf_counter(), number=data["number"])
                case "renew":
                    worker.submit(self._answer, rank_0, data["turn"], self._renew)
                case "work":
                    work = Work.from_dict(data)
                    worker.submit(self._answer, rank_0, work.turn, partial(self._work, work))
                case "abort":
                    self._aborted = data["turn"]
                    self._abort()
                case "reject":
                    raise LaunchError(f"rank 0 has refused {self._launch}: {data['reason']}")
                case "end":
                    return

    def _abort(self) -> None:
        if self._server:
            self._server.end_worker()

    def _answer(self, rank_0: Channel, turn: int, do: Callable[[], Reply]) -> None:
        """Call `do`, and send its answer to the request `turn` to rank 0; if `do` raises, the answer is a failure."""
        try:
            answer = do()
        except OSError as error:  # such as a full disk, which is no fault of the case: the same command measures it
            answer = Reply(failure=Failure(status=Status.KILLED, reason=f"its agent failed: {error}"))
        except Exception as error:
            answer = Reply(failure=Failure(status=Status.FAILED, reason=f"its agent failed: {error!r}"))
        with suppress(OSError):  # rank 0 is lost; the thread that reads its messages reports this
            rank_0.send("answer", **replace(answer, turn=turn).to_dict())

    def _renew(self) -> Reply:
        """Start a new server of workers in place of the previous one; return an empty answer when it is ready."""
        server = self._opened()
        server.stop()
        server.prepare()
        return Reply()

    def _opened(self) -> Server:
        """Return this agent's server. Raises OSError, also for later work, if temporary files cannot be written."""
        if self._server is None:
            self._scratch = self._stack.enter_context(folder())
            self._server = self._stack.enter_context(Server(self._scratch))
        return self._server

    def _work(self, work: Work) -> Reply:
        """Run work in a fresh worker; return its trials or its failure, the machine's samples and the foreign load."""
        server = self._opened()
        if work.sample is not None and self._series is None:
            output = self._scratch / "samples.jsonl"
            self._series = self._stack.enter_context(samplers.sampling(work.sample, output))
        request, seat = work.request, work.request.seat
        if seat:  # the interface may have another name on this machine than on rank 0's
            request = replace(request, seat=replace(seat, interface=self._interface))
        before, began_s = foreign_load.snapshot(work.roots), time.perf_counter()
        found = server.answer(request, work.limit_s, cancelled=lambda: self._aborted >= work.turn)
        load = foreign_load.since(before, work.roots)
        samples = self._series.cut(began_s, time.perf_counter()) if work.sample is not None and self._series else ()
        failure, trials = (found, ()) if isinstance(found, Failure) else (None, tuple(found))
        known = load if work.roots and isinstance(load, foreign_load.Load) else None
        return Reply(trials=trials, failure=failure, samples=samples, load=known)


def serve(launch: Launch, interface: str) -> None:
    """Act as the agent of this rank until rank 0 ends the run.

    Raises LaunchError if rank 0 cannot be reached, refuses this rank, or is lost.
    """
    Agent(launch, interface).serve()
