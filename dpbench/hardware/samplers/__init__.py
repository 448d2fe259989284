"""Samplers: read the counters of GPUs and host during a run, in a separate process.

A sampling thread inside the run would compete with DataParallel's threads for the GIL. Each sampler
is a plug-in: a module in this folder with `start(devices, interval_s)`, a context manager that
yields a growing list of samples. The caller may remove samples from the front of the list.
`sampling` runs all samplers in a separate process, and `SampleFile.cut` returns the samples of a
period. Times are those of time.perf_counter(), which is the same in all processes of a machine.
`every` calls an action at fixed intervals, in a thread. If an action takes longer than an interval,
the calls that it delays are skipped:

intervals since the start   0         1         2         3         4
calls of the action         |action|  |slow action .....| |action|  |action|

Call 2 is skipped, and call 3 is on time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dpbench.records import Sample, signals


def ticks(
    interval_s: float, wait: Callable[[float], bool], now: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Yield k = 0, 1, 2, ... at k * `interval_s` seconds after the start; skip each k that is past.

    `wait(seconds)` waits for the next time; the iteration stops when it returns True. `now` is the
    clock, in seconds.
    """
    start_s = now()
    k = 0
    while not wait(max(0.0, start_s + k * interval_s - now())):
        yield k
        k = max(k + 1, math.ceil((now() - start_s) / interval_s))


@contextmanager
def every(interval_s: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` every `interval_s` seconds in a separate thread until the `with` block ends.

    An exception in `action` is logged and ends the calls. Raises ValueError if `interval_s` is not
    positive.
    """
    if not interval_s > 0:
        raise ValueError(f"interval_s must be positive, not {interval_s}")
    stop = threading.Event()

    def run() -> None:
        try:
            for _ in ticks(interval_s, stop.wait):
                action()
        except Exception:  # an error ends this series, but not the run
            log.exception("a series of samples ended early, because its sampler raised an error")

    # a daemon thread, so that a driver call that never returns cannot keep the sampler process
    # alive
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 2.0
SETTLE_S = 1.0
"""The longest wait until the sampler process has written its buffered samples."""
MOST_BYTES = 1 << 24
"""If more bytes were added to the file since the last reading, only some samples are kept."""
GOLDEN = 0.6180339887498949
"""The fractional part of the golden ratio.

Its multiples modulo 1 spread evenly, so what is kept of a series has no period.
"""


class SampleFile:
    """The samples of a sampler process, read on demand from the file that the process writes."""

    def __init__(self, output: Path, offset: int, process: subprocess.Popen[bytes] | None) -> None:
        self._output = output
        self._offset = offset
        self._process = process
        self._kept: list[Sample] = []
        self._requests = 0

    @property
    def pid(self) -> int | None:
        """Return the process id of the sampler; None if it is not known to run."""
        return self._process.pid if self._process else None

    def cut(self, start_s: float, end_s: float) -> tuple[Sample, ...]:
        """Return the samples from `start_s` to `end_s` in order, and discard those before.

        The sampler process is first asked to write its buffered samples, which takes about a
        millisecond.
        """
        self._settle()
        self._kept = [sample for sample in (*self._kept, *self._read()) if sample.time_s >= start_s]
        within = [sample for sample in self._kept if sample.time_s <= end_s]
        return tuple(sorted(within, key=lambda sample: sample.time_s))

    def _settle(self) -> None:
        """If the sampler process has ended, warn once and do not ask again."""
        if self._process is None or _closed(self._process):
            return
        self._requests += 1
        request = b"%d" % self._requests
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + b"\n")
            _hears(self._process, request, SETTLE_S)  # sent back when the samples are written
        except (EOFError, OSError) as error:
            log.warning(
                "the sampler process has ended, so this run gets no more samples: %s", error
            )
            self._process = None

    def _read(self) -> list[Sample]:
        """Return the samples in the complete lines added to the file since the last read.

        If these lines have more than `MOST_BYTES`, return only the samples of some seconds, which
        are spread evenly over the time; all metrics are kept.
        """
        samples = []
        with (
            suppress(OSError),
            self._output.open("rb") as file,
        ):  # no file if no samples have been written
            share = MOST_BYTES / max(MOST_BYTES, os.fstat(file.fileno()).st_size - self._offset)
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                with suppress(ValueError, TypeError):  # a line truncated by a full disk
                    sample = Sample(*json.loads(line))
                    if share == 1.0 or int(sample.time_s) * GOLDEN % 1.0 < share:
                        samples.append(sample)
        return samples


@contextmanager
def sampling(
    devices: Sequence[int], output: Path, interval_s: float = 0.1, root_pid: int | None = None
) -> Iterator[SampleFile]:
    """Sample the host and the GPUs with CUDA ordinals `devices` in a process inside the context.

    The process reads the counters every `interval_s` seconds, slow counters less often, and appends
    the samples to the file `output`. If the process fails, samples are lost, but the run continues.
    `root_pid` is the root of the process tree to watch, by default this process. Linux ends the
    sampler when the *thread* that entered the context ends: enter it from a thread that lives as
    long as the run.
    """
    offset = output.stat().st_size if output.exists() else 0
    process = _start(devices, output, interval_s, os.getpid() if root_pid is None else root_pid)
    try:
        yield SampleFile(output, offset, process)
    finally:
        if process is not None:
            _end(process)


def _start(
    devices: Sequence[int], output: Path, interval_s: float, root_pid: int
) -> subprocess.Popen[bytes] | None:
    """Wait until the sampler takes samples; return None, after a warning, if it fails."""
    arguments = map(str, (os.getpid(), root_pid, interval_s, output, *devices))
    command = [sys.executable, "-P", "-m", "dpbench.hardware.samplers._process", *arguments]
    # the child must import the same modules as this process
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    process = None
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": path}
    try:
        with signals.held():
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=env)
        if _hears(process, b"ready", START_TIMEOUT_S):
            return process
        why = f"the process did not answer within {START_TIMEOUT_S:g} s"
    except EOFError:
        why = "the process ended at once"
    except OSError as error:
        why = str(error)
    except BaseException:  # such as Ctrl-C
        if process is not None:
            _end(process)
        raise
    log.warning("the sampler process did not start, so this run has no samples: %s", why)
    if process is not None:
        _end(process)
    return None


def _hears(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bool:
    """Return whether the sampler sends `line` within `timeout_s` seconds.

    Raises EOFError if the sampler has ended.
    """
    assert process.stdout is not None
    deadline_s = time.perf_counter() + timeout_s
    heard = b""
    while line not in heard.split(b"\n")[:-1]:
        left_s = deadline_s - time.perf_counter()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            return False
        news = process.stdout.read(4096)
        if not news:
            raise EOFError("the output of the sampler process is closed")
        heard += news
    return True


def _closed(process: subprocess.Popen[bytes]) -> bool:
    return process.stdin is None or process.stdin.closed


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    # a process that was forked meanwhile, such as a worker of a DataLoader, keeps the stdin open
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    process.wait()
    process.stdout.close()
