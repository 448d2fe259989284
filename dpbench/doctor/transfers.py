"""Transfers: copies between GPUs and to the host, whose bytes are compared on arrival, and timed.

A copy may hang, or end the process. A child process therefore makes the copies and announces each
before it begins; the parent ends a child that is silent for too long, names its copy, and starts
another one for the rest.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import permutations
from typing import IO, TYPE_CHECKING

from dpbench.doctor.examination import DIRECT, HANGS, PAGEABLE, PINNED, STAGED
from dpbench.hardware import processes
from dpbench.measure.server import environment
from dpbench.records import HOST

if TYPE_CHECKING:
    import torch

Say = Callable[[str], None]
"""Takes a line of progress or a warning."""
LIMIT_S = 15.0
"""The seconds of silence after which a copy counts as hanging."""
MOST_HANGS = 2
"""The number of copies that hang after which no other is tried."""
END_S = 5.0
"""The seconds in which a killed child must end; one that hangs in the driver does not."""
START_S = 60.0
"""The seconds in which the child must load torch and start CUDA."""


@dataclass(frozen=True)
class Copy:
    """A copy to make, from a GPU or the host (`HOST`) to another, by one of the ways."""

    source: int
    target: int
    way: str

    def __str__(self) -> str:
        ends = [f"GPU {end}" if end != HOST else f"{self.way} host memory" for end in self.ends]
        how = f" {self.way}" if self.between_gpus else ""
        return f"{ends[0]} -> {ends[1]}{how}"

    @property
    def ends(self) -> tuple[int, int]:
        """Return the source and the target."""
        return self.source, self.target

    @property
    def between_gpus(self) -> bool:
        """Return whether both ends are GPUs."""
        return HOST not in self.ends


@dataclass(frozen=True)
class Transfer:
    """The result of a copy.

    `bytes_per_s` is the best rate of `REPEATS` copies, 0 without one. `wrong` is the number of
    bytes that differ on arrival. `failure` is "" for a copy that ended, and otherwise says what
    happened: it hangs, or the error.
    """

    copy: Copy
    bytes_per_s: float = 0.0
    wrong: int = 0
    failure: str = ""

    @property
    def hangs(self) -> bool:
        """Return whether the copy did not end within `LIMIT_S`."""
        return self.failure == SILENCE


SILENCE = f"{HANGS} within {LIMIT_S:g} s"


def copies(gpus: int) -> list[Copy]:
    """Return all copies for a number of GPUs: from and to the host, then between all pairs."""
    ends = [
        Copy(*pair, way)
        for way in (PINNED, PAGEABLE)
        for gpu in range(gpus)
        for pair in ((HOST, gpu), (gpu, HOST))
    ]
    between = [
        Copy(*pair, way) for way in (DIRECT, STAGED) for pair in permutations(range(gpus), 2)
    ]
    return [*ends, *between]


def measured(
    wanted: Sequence[Copy], say: Say = lambda _: None, limit_s: float = LIMIT_S
) -> list[Transfer]:
    """Return the result of each copy, in order; those that hang or fail say so.

    After `MOST_HANGS` copies that hang, the others are not tried. If the child does not start, the
    first copy has the reason, and the others are not tried.
    """
    results: list[Transfer] = []
    while len(results) < len(wanted) and sum(one.hangs for one in results) < MOST_HANGS:
        try:
            results += _child(wanted[len(results) :], say, limit_s)
        except NotStarted as failed:
            return [*results, Transfer(wanted[len(results)], failure=str(failed))]
    return results


class NotStarted(RuntimeError):
    """The child could not load torch, or not start CUDA."""


def _child(rest: Sequence[Copy], say: Say, limit_s: float) -> list[Transfer]:
    """Return the results of the first of the copies, up to one at which the child ends.

    Raises NotStarted if it makes none.
    """
    found: list[Transfer] = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            _command(),
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            answers = _answers(process, json.dumps([asdict(one) for one in rest]))
            try:
                if not answers.get(timeout=START_S):
                    raise NotStarted(_last_line(errors))
            except queue.Empty:
                raise NotStarted(f"torch does not start within {START_S:g} s") from None
            for copy in rest:
                say(f"copying {copy} ...")
                try:
                    line = answers.get(timeout=limit_s)
                except queue.Empty:
                    return [*found, Transfer(copy, failure=SILENCE)]
                if not line:
                    return [*found, Transfer(copy, failure=_last_line(errors))]
                found.append(Transfer(copy, **json.loads(line)))
        finally:
            _end(process)
    return found


def _answers(process: subprocess.Popen[str], question: str) -> queue.Queue[str]:
    """Send a question, and return the queue of the answer's lines; the last one is empty."""
    lines: queue.Queue[str] = queue.Queue()

    def forward() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=forward, daemon=True).start()
    assert process.stdin
    with suppress(BrokenPipeError):  # it has ended; the queue says so
        process.stdin.write(question)
        process.stdin.close()
    return lines


def _end(process: subprocess.Popen[str]) -> None:
    """End a process; one that hangs in the driver may not end, and is not waited for."""
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)


def _last_line(errors: IO[str]) -> str:
    errors.seek(0)
    return processes.last_line(errors.read())


def _command() -> list[str]:
    return [sys.executable, "-m", "dpbench.doctor.transfers", str(os.getpid())]


def _results(wanted: Sequence[Copy]) -> Iterator[dict[str, object]]:
    """Yield {} once CUDA has started, then the rate and the number of wrong bytes of each copy."""
    import torch

    from dpbench.hardware.rates import LINK_BYTES

    pattern = torch.randint(0, 256, (LINK_BYTES,), dtype=torch.uint8)
    pinned = pattern.pin_memory()
    yield {}
    for copy in wanted:
        yield _result(copy, pattern, pinned)


def _result(copy: Copy, pattern: torch.Tensor, pinned: torch.Tensor) -> dict[str, object]:
    import torch

    from dpbench.hardware import rates
    from dpbench.hardware.devices import open_devices
    from dpbench.records.work import fastest

    host = pinned if copy.way != PAGEABLE else pattern

    def place(end: int) -> torch.Tensor:
        if end == HOST:
            return torch.empty_like(pattern, pin_memory=copy.way == PINNED)
        return torch.empty_like(pattern, device=f"cuda:{end}")

    source = host if copy.source == HOST else place(copy.source).copy_(pinned)
    target = place(copy.target).zero_()
    between = torch.empty_like(pattern, pin_memory=True)

    def by_host() -> None:
        if copy.way == STAGED:
            target.copy_(between.copy_(source))
        else:
            target.copy_(source)
        for end in copy.ends:
            if end != HOST:
                torch.cuda.synchronize(end)

    if copy.way in (PINNED, DIRECT):
        # torch queues a copy between two GPUs on the stream of its source
        gpu = copy.target if copy.source == HOST else copy.source
        (queue,) = open_devices("cuda", 1, ids=[gpu])
        seconds = rates.copy_times(queue, target, source, pinned)
    else:
        (host_device,) = open_devices("cpu", 1)
        seconds = rates.times(host_device, by_host, rates.COPIES)
    wrong = int((target.cpu() != pattern).sum())
    return {"bytes_per_s": fastest(pattern.nbytes, seconds), "wrong": wrong}


def _main(parent: str) -> None:
    processes.die_with_parent(int(parent))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output is no answer
    wanted = [Copy(**one) for one in json.load(sys.stdin)]
    for result in _results(wanted):
        print(json.dumps(result), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
