"""Server: start the server process, request trials from it, and kill workers that hang.

The server process forks one worker per request. It runs `python -m dpbench.measure.worker`, which
documents the protocol.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from dpbench.hardware import processes
from dpbench.hardware.nvml import ORDER, PCI_ORDER
from dpbench.hardware.samplers.host import ROOT_PID
from dpbench.measure.request import UNWRITTEN, Request, WorkKind
from dpbench.measure.scratch import explained
from dpbench.records import Case, Effort, Status, Trial, signals
from dpbench.records.environment import THREADS
from dpbench.records.spelling import dashed
from dpbench.records.trial import Failure
from dpbench.records.visible import visible

log = logging.getLogger(__name__)

START_LIMIT_S = 120.0
STACKS_S = 0.5
"""The seconds that a hung worker gets to write its Python stacks."""
TAIL = 4000
PROBE_BYTES = 4096
"""The bytes that are written to find out whether a file system is full."""
_THREADS = dict.fromkeys(THREADS, "1")
"""Environment variables that limit each operation to one thread.

`torch.set_num_threads(1)` alone has no effect on MKL in threads that the engine starts: in each of
them, MKL would start a team of threads, which has cost 5-10 ms per step. For the strategy that uses
all cores, the worker sets the number of threads in torch.
"""


def again_if_killed(attempt: Callable[[], list[Trial]]) -> list[Trial]:
    """Return the results of `attempt()`, which is repeated once if a signal from outside ends it.

    The status of results that such a signal ended is `killed`.
    """
    results = attempt()
    killed = [one.reason for one in results if one.status is Status.KILLED]
    if not killed:
        return results
    log.warning("%s; it is tried once more", killed[0].partition("; its last output")[0])
    return attempt()


class Server:
    """The parent's view of the server process, which forks a fresh worker for each request.

    The first request starts the process, in `folder` (default: the working folder); it finds
    modules in `paths` first, and has the environment variables `own`. On exit, this context manager
    kills it.
    """

    def __init__(self, scratch: Path, folder: Path | None = None, *paths: Path, **own: str) -> None:
        self._scratch = scratch
        self._own = own
        self._folder = folder
        self._paths = paths
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run(self, case: Case, effort: Effort, number: int, limit_s: float) -> Trial:
        """Run one trial in round `number` in a fresh worker, and return it even if it fails.

        A worker that exceeds `limit_s` seconds is killed.
        """
        return self.run_together([case], effort, number, limit_s)[0]

    def check(self, case: Case, limit_s: float) -> Trial:
        """Check in a fresh worker whether the model of a case can take a step.

        Return a trial without steps, whose status and reason are the result. A check that exceeds
        `limit_s` seconds fails.
        """
        return self._ask([case], Effort(), 0, limit_s, job=WorkKind.CHECK_MODEL)[0]

    def run_together(
        self, cases: Sequence[Case], effort: Effort, number: int, limit_s: float
    ) -> list[Trial]:
        """Run blocks of all cases in turn in one fresh worker.

        Return one trial per case, even if the worker fails. If the worker exceeds `limit_s` seconds
        per case, it is killed together with its ranks, and the reason of each trial has their
        Python stacks.
        """
        return self._ask(cases, effort, number, limit_s * len(cases))

    def _ask(
        self,
        cases: Sequence[Case],
        effort: Effort,
        number: int,
        limit_s: float,
        *,
        job: WorkKind = WorkKind.MEASURE,
    ) -> list[Trial]:
        """Run a job, whose time limit is `limit_s`, and return one trial per case in any event."""
        request = Request(cases=tuple(cases), effort=effort, round=number, job=job)
        return again_if_killed(lambda: as_trials(self.answer(request, limit_s), request))

    def answer(self, request: Request, limit_s: float) -> list[Trial] | Failure:
        """Run a request in a fresh worker; return its trials, or the failure of the worker.

        Raises OSError if temporary files cannot be written.
        """
        with self.folder() as folder:
            end = self.attempt(replace(request, folder=folder), limit_s)
            finished, failed = folder / "trials.json", folder / "failure.json"
            # a worker past its limit may still finish while its stacks are requested: ignore its
            # trials
            if not end.late and finished.exists():
                return [
                    Trial.from_dict(one) for one in json.loads(finished.read_text(encoding="utf-8"))
                ]
            if not end.late and failed.exists():
                return Failure.from_json(failed.read_text(encoding="utf-8"))
            return end.failure(limit_s, folder)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield a folder for the files of one worker, and remove it at the end."""
        with explained():
            made = tempfile.TemporaryDirectory(
                prefix="trial-", dir=self._scratch, ignore_cleanup_errors=True
            )
        with made as name:
            yield Path(name)

    def prepare(self) -> None:
        """Start the server's process, so that the first request does not wait for it."""
        with suppress(_ServerDied):  # the next request tries again, and reports the reason
            self._started()

    def attempt(self, request: Request, limit_s: float) -> WorkerEnd:
        """Run a request in a fresh worker, and return how the worker ended.

        `limit_s` limits the whole request. If the server process has ended, the worker has ended
        too, and the next request starts a new server.
        """
        killed_before = processes.killed_for_memory()
        try:
            answer = self._attempt(request, limit_s)
        except _ServerDied as died:
            self.stop()
            return WorkerEnd(
                exit_status=died.exit_status, killed_before=killed_before, server=str(died)
            )
        if answer is None:
            return WorkerEnd(late=True)
        return WorkerEnd(
            exit_status=answer["exit"],
            killed_before=killed_before,
            peak_bytes=answer["peak_bytes"],
        )

    def _attempt(self, request: Request, limit_s: float) -> dict[str, Any] | None:
        """Return the server's answer about the worker's end, or None if it was too late."""
        process = self._started()
        request = replace(request, requested_s=time.perf_counter())
        assert process.stdin is not None
        try:
            process.stdin.write(request.to_json().encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            raise self._died() from error
        pid = int(self._soon()["pid"])
        try:
            answer = self._answer(limit_s)
            _kill_group(pid)  # also end processes that the model has started
            return answer
        except TimeoutError:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGUSR1)
                time.sleep(STACKS_S)
            _kill_group(pid)
            self._soon()
            return None
        except BaseException:  # such as Ctrl-C: the worker must not continue to run
            _kill_group(pid)
            raise

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the server process, started if necessary; _ServerDied if it does not start."""
        if self._process is None or self._process.poll() is not None:
            self.stop()
            with explained():
                self._log = (self._scratch / "server.log").open("ab")
            with signals.held():
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dpbench.measure.worker", str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    cwd=self._folder or Path.cwd(),
                    env=environment(*self._paths)
                    | self._own
                    | {"TMPDIR": str(self._scratch), ROOT_PID: str(os.getpid())},
                )
            self._buffer = b""
            self._soon()
        return self._process

    def _soon(self) -> dict[str, Any]:
        """Return the server's next answer, for which it needs no worker, or raise _ServerDied."""
        try:
            return self._answer(START_LIMIT_S)
        except TimeoutError as error:
            raise _ServerDied(
                f"the worker server did not answer within {START_LIMIT_S:.0f} s", None
            ) from error

    def _answer(self, limit_s: float) -> dict[str, Any]:
        """Return the server's next answer, decoded from JSON.

        Raises TimeoutError after `limit_s` seconds, and _ServerDied if the server process has
        ended.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            if not signals.wait(descriptor, left_s):
                continue
            chunk = os.read(descriptor, 65536)
            if not chunk:
                raise self._died()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> _ServerDied:
        """Return an exception that says how the server ended, and quotes the end of its log."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        status = self._process.returncode
        last = _tail(self._scratch / "server.log")
        text = (
            f"the worker server ended ({processes.ending(status)}); its last output:"
            f" {last or 'none'}"
        )
        return _ServerDied(text, status)

    def stop(self) -> None:
        """Kill the server process, if any, and wait for its end; a request starts a new one."""
        if self._process is not None:
            processes.end_tree(self._process.pid)
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._log):
                with suppress(OSError):
                    if pipe is not None:
                        pipe.close()
            self._process = None


def environment(*first: Path) -> dict[str, str]:
    """Return the environment variables for a measuring process.

    They limit each operation to one thread, make the process import the same copy of dpbench as
    this process, unless one of the folders `first` has another, and let CUDA number GPUs as NVML
    does, unless the user chose another order.
    """
    paths = [*map(str, first), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    own = {**_THREADS, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
    return {ORDER: PCI_ORDER, **os.environ, **own}


class _ServerDied(RuntimeError):
    """The server process has ended, or (`exit_status` is None) did not answer in time."""

    def __init__(self, reason: str, exit_status: int | None) -> None:
        super().__init__(reason)
        self.exit_status = exit_status


def as_trials(answer: list[Trial] | Failure, request: Request) -> list[Trial]:
    """Return the trials of an answer; for a failure, one failed trial per case of the request."""
    if not isinstance(answer, Failure):
        return answer
    now = time.time()
    reason = visible(answer.reason, lines=True)
    return [
        Trial(case=case, status=answer.status, reason=reason, round=request.round, started_s=now)
        for case in request.cases
    ]


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """The end of a worker.

    `late` is True if the worker was killed because it exceeded its time limit. Otherwise,
    `exit_status` is that of the worker or, if `server` says how the server process has ended, of
    the server; it is negative for a signal. `peak_bytes` is the peak of the worker's resident set,
    and `killed_before` the number of processes that the kernel had killed for lack of memory before
    the worker started. None means unknown.
    """

    late: bool = False
    exit_status: int | None = None
    peak_bytes: int | None = None
    killed_before: int | None = None
    server: str = ""

    def failure(self, limit_s: float, folder: Path) -> Failure:
        """Return the record of the failure of a worker that has ended without a result.

        Its status is `timeout` if the worker exceeded its limit of `limit_s` seconds; the reason
        then has the Python stacks. The status is `killed` if a signal from outside ended the worker
        or the server, or if the worker could for a time not write its files; otherwise it is
        `failed`. `folder` has the files that the worker wrote. Raises OSError if no files can be
        written to it.
        """
        stacks, output = _stacks(folder), _tail(folder / "log")
        if self.late:
            limit = (
                f"the worker exceeded the limit of {limit_s:g} s ({dashed('limit')} seconds for"
                " each of its cases)"
            )
            reason = f"{limit}; its Python stacks at that time:\n{stacks or 'none received'}"
            return Failure(status=Status.TIMEOUT, reason=reason)
        if self.exit_status == UNWRITTEN and not self.server:
            with explained():
                (folder / "probe").write_bytes(bytes(PROBE_BYTES))
        end_facts = self.exit_status, self.killed_before, self.peak_bytes
        killed = self.exit_status == UNWRITTEN or processes.killed_from_outside(*end_facts)
        end = processes.ending(self.exit_status)
        if self.exit_status == UNWRITTEN:
            end = f"{end}, which means that it could not write its files"
        how = f"the worker ended without a result ({end}){processes.advice(*end_facts)}"
        return Failure(
            status=Status.KILLED if killed else Status.FAILED,
            exit_status=self.exit_status,
            reason=self.server or f"{how}; its last output: {output or stacks or 'none'}",
        )


def _stacks(folder: Path) -> str:
    """Return the stacks of the worker and its ranks in `folder`, cut to the innermost calls."""
    files = [
        (file.name, file.read_text(errors="replace", encoding="utf-8").strip())
        for file in sorted(folder.glob("stacks*"))
    ]
    written = [(name, text) for name, text in files if text]
    return "\n".join(f"[{name}]\n{text[: TAIL // len(written)]}" for name, text in written)


def _tail(path: Path) -> str:
    return (
        path.read_text(errors="replace", encoding="utf-8")[-TAIL:].strip() if path.exists() else ""
    )


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
