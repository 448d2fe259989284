"""Sides: the two processes of a pair, each with the code of one tree, which take blocks in turn.

A process is either a worker that takes steps of a case, forked from a server of its tree, or a
command: a watched script, or a test of pytest. A process that does not have its turn is stopped
with all that it has started, such as the workers of a DataLoader.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from dpbench.gating.trees import Tree
from dpbench.hardware import processes
from dpbench.measure.request import Request
from dpbench.measure.server import Server, as_trials
from dpbench.measure.turns import VARIABLE
from dpbench.records import Case, Effort, Status, Trial, signals
from dpbench.records.errors import told
from dpbench.records.spelling import dashed
from dpbench.records.visible import visible
from dpbench.store import Store

START_LIMIT_S, BLOCK_LIMIT_S = 600.0, 600.0
"""The most seconds until a process begins to take steps, and those of a block."""
END_LIMIT_S = 30.0
"""The most seconds in which a process ends after its last block; then it is killed."""
WHOLE_LIMIT_S = 86_400.0
POLL_S = 0.2
TAIL = 2000
EFFORT = Effort(memory_by_phase=False, profile=False, marks=False, links=False)
OLD = "its own dpbench is older than the gate, and took steps without waiting for its turn"
EXTENSIONS = "TORCH_EXTENSIONS_DIR"
"""The variable with the folder of extensions that torch builds by name: each side has its own."""
PACKAGES = Path(__file__).parents[2]
"""The folder from which this process has imported dpbench."""


class SideFailed(RuntimeError):
    """A process has failed, or does not answer, before the gate let it end.

    `exit_status` is that of the program of the tree `tree`; None while it runs.
    """

    def __init__(self, tree: Tree, how: str, exit_status: int | None = None) -> None:
        super().__init__(f"{tree}: {how}")
        self.tree = tree
        self.exit_status = exit_status


class Finished(SideFailed):
    """A program came to its end, without an error, before the gate let it end."""


@dataclass(frozen=True)
class Block:
    """The wall seconds and the CPU seconds of a step: averages over a block of steps.

    `memory_bytes` is the peak of the process's memory up to the end of the block, which took
    `batches` from DataLoaders with workers. At its end, the workers had fetched `ready` batches of
    at most `ahead`.
    """

    wall_s: float
    cpu_s: float
    memory_bytes: int = 0
    batches: int = 0
    ahead: int = 0
    ready: int = 0


class Side:
    """One process, as the gate sees it.

    `check` raises SideFailed if the process has ended, and `finish` waits for its end and returns
    the trials with its steps, if it makes some.
    """

    def __init__(
        self,
        tree: Tree,
        listener: socket.socket,
        check: Callable[[], None],
        finish: Callable[[], Sequence[Trial]],
    ) -> None:
        self._tree = tree
        self._check_alive = check
        self._finish = finish
        self._listener = listener
        self._socket: socket.socket | None = None
        self._buffer = b""
        self._group = 0
        self.files: Sequence[str] = ()
        """The files of which the process had imported modules at the end of its first block."""

    def take(self, steps: int) -> Block:
        """Let the process take a block of steps.

        The first block waits until the process has connected. Raises SideFailed if the process
        ends, and UsageError if it runs the code of another tree.
        """
        connected = self._connected()
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # reading finds out how it has ended
            connected.sendall(f"{steps}\n".encode())
        answer = self._read(BLOCK_LIMIT_S)
        self._signal(signal.SIGSTOP)
        if answer["files"]:
            self.files = answer["files"]
            self._tree.check(self.files)
        fetched = {name: answer.get(name, 0) for name in ("batches", "ahead", "ready")}
        return Block(
            answer["wall_s"] / steps, answer["cpu_s"] / steps, answer["memory_bytes"], **fetched
        )

    def release(self) -> None:
        """Let the process end by itself: it gets no more blocks."""
        self._signal(signal.SIGCONT)
        self._connected().close()

    def trials(self) -> Sequence[Trial]:
        """Wait for the process's end, and return the trials with all its steps, if any."""
        return self._finish()

    def kill(self) -> None:
        """End the process and what it has started, whatever their state."""
        if self._socket is not None:
            self._socket.close()
        self._signal(signal.SIGKILL)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = self._accept()
            first = self._read(START_LIMIT_S)
            with suppress(ProcessLookupError):  # reading a block finds out how it has ended
                self._group = os.getpgid(int(first["pid"]))
        return self._socket

    def _signal(self, number: signal.Signals) -> None:
        if not self._group:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._group, number)

    def _accept(self) -> socket.socket:
        deadline = time.monotonic() + START_LIMIT_S
        while not signals.wait(self._listener.fileno(), POLL_S):
            self._check(deadline, "took no step")
        return self._listener.accept()[0]

    def _read(self, limit_s: float) -> Mapping[str, Any]:
        deadline = time.monotonic() + limit_s
        connected = self._connected()
        while b"\n" not in self._buffer:
            if not signals.wait(connected.fileno(), POLL_S):
                self._check(deadline, "did not finish a block of steps")
                continue
            try:
                piece = connected.recv(65536)
            except ConnectionResetError:
                piece = b""
            if piece:
                self._buffer += piece
            else:  # the process is about to end
                self._check(deadline, "closed its socket")
                time.sleep(POLL_S)
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _check(self, deadline: float, what: str) -> None:
        """Raise SideFailed if the process has ended, or if it is late."""
        self._check_alive()
        if time.monotonic() > deadline:
            raise SideFailed(self._tree, f"the process {what} within its time")


Starter = Callable[[Tree, int], AbstractContextManager[Side]]
"""Starts a side of a tree for the pair of a number."""


class Work(Protocol):
    """What the gate compares between trees."""

    @property
    def name(self) -> str:
        """Return the name of the work in results."""

    def starting(self, trees: Sequence[Tree], folder: Path) -> AbstractContextManager[Starter]:
        """Return a context with the function that starts sides; `folder` is for their files."""


@contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Yield a socket to which one process connects; only this user can."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        try:
            yield listener
        finally:
            path.unlink()


@dataclass(frozen=True)
class CaseWork:
    """The steps of a case, in workers of dpbench."""

    case: Case

    @property
    def name(self) -> str:
        """Return the label of the case; that no reference verifies its steps says nothing here."""
        return replace(self.case, unverified=False).label

    @contextmanager
    def starting(self, trees: Sequence[Tree], folder: Path) -> Iterator[Starter]:
        """Start a server for each tree, and yield the function that starts their workers."""
        with ExitStack() as stack:
            servers = {}
            for tree in trees:
                own = folder / tree.folder.name
                own.mkdir(exist_ok=True)
                variables = {EXTENSIONS: str(own / "extensions")}
                server = stack.enter_context(Server(own, tree.working, *tree.paths, **variables))
                server.prepare()  # in this thread, because its process dies with the thread
                servers[tree] = server
            yield lambda tree, number: self._side(servers[tree], tree, folder, number)

    @contextmanager
    def _side(self, server: Server, tree: Tree, folder: Path, number: int) -> Iterator[Side]:
        path = folder / f"{tree.folder.name}.socket"
        request = Request(cases=(self.case,), effort=EFFORT, round=number, turns=str(path))
        trials: list[Trial] = []
        failures: list[str] = []

        def work() -> None:
            try:
                trials.extend(as_trials(server.answer(request, WHOLE_LIMIT_S), request))
            except Exception as error:  # also that of a server that the gate stops
                failures.append(f"{type(error).__name__}: {told(error)}")

        def check() -> None:
            if not thread.is_alive():
                if trials and trials[0].status is Status.OK:
                    raise SideFailed(tree, OLD)
                why = trials[0].reason if trials else " ".join(failures)
                raise SideFailed(tree, f"{why}{tree.lacks()}")

        def finish() -> Sequence[Trial]:
            thread.join(END_LIMIT_S)
            if not trials or trials[0].status is not Status.OK:
                check()
                raise SideFailed(tree, "the process does not end")
            return trials

        thread = Thread(target=work, daemon=True)
        with _listening(path) as listener:
            thread.start()
            side = Side(tree, listener, check, finish)
            try:
                yield side
            finally:
                side.kill()


@dataclass(frozen=True)
class CommandWork:
    """The steps of a program that joins the gate by itself, such as a watched script.

    `command` returns the words of its command, from the path at which it may store its trials.
    """

    name: str
    command: Callable[[Path], Sequence[str]]

    @contextmanager
    def starting(self, trees: Sequence[Tree], folder: Path) -> Iterator[Starter]:
        """Yield the function that starts the program in a tree."""
        for tree in trees:
            (folder / tree.folder.name).mkdir(exist_ok=True)
        yield lambda tree, number: self._side(tree, folder)

    @contextmanager
    def _side(self, tree: Tree, folder: Path) -> Iterator[Side]:
        path, log, store = (
            folder / f"{tree.folder.name}.{kind}" for kind in ("socket", "log", "db")
        )
        store.unlink(missing_ok=True)
        modules = [*map(str, tree.paths), os.environ.get("PYTHONPATH", ""), str(PACKAGES)]
        own = {
            VARIABLE: str(path),
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
            "PYTEST_ADDOPTS": "",
            EXTENSIONS: str(folder / tree.folder.name / "extensions"),
        }

        def check() -> None:
            if process.poll() is None:
                return
            last = visible(
                log.read_text(encoding="utf-8", errors="replace")[-TAIL:].strip(), lines=True
            )
            if not process.returncode:
                raise Finished(
                    tree,
                    "the program ended before it had taken the steps of a pair, which last about"
                    " a second after the first step: let it train longer",
                    0,
                )
            how = processes.ending(process.returncode)
            said = f"the process ended ({how}); its last output: {last or 'none'}{tree.lacks()}"
            raise SideFailed(tree, said, process.returncode)

        def finish() -> Sequence[Trial]:
            # a program that handles SIGTERM itself may go on: then its phases are unknown
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
            if process.poll() is None or not store.exists():
                return ()
            with Store.read(store) as opened:
                return opened.trials()

        with _listening(path) as listener, log.open("wb") as output:
            process = subprocess.Popen(
                self.command(store),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=tree.working,
                env={**os.environ, **own},
                start_new_session=True,
            )
            try:
                yield Side(tree, listener, check, finish)
            finally:
                processes.end_tree(process.pid)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def watched(script: str, arguments: Sequence[str]) -> CommandWork:
    """Return the updates of a training script, which `dpbench watch` records."""

    def command(store: Path) -> list[str]:
        words = ["-m", "dpbench", "--no-config", "watch", dashed("store"), str(store), script]
        return [sys.executable, *words, *arguments]

    return CommandWork(Path(script).name, command)
