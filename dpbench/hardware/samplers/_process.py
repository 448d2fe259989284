"""Sampler process: starts all samplers, writes their samples to a file, and ends with its parent.

Never loads torch. Its arguments are the ids of its parent and of the root of the watched process
tree, the seconds between readings, the output file, and the CUDA ordinals of the GPUs to watch.

Protocol: the process prints `ready` on stdout when all samplers run. It answers each line on stdin
with the same line, after writing all samples so far to the file. It ends at the end of stdin, on
SIGTERM, or when its parent dies.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from dpbench.hardware.processes import die_with_parent
from dpbench.hardware.samplers.host import ROOT_PID
from dpbench.records import Sample, registry, signals

log = logging.getLogger(__name__)

WRITE_INTERVAL_S = 1.0
"""The maximum seconds between two writes to the file.

It limits the memory use, and the samples that are lost if the process is killed.
"""


def main(parent_pid: str, root_pid: str, interval_s: str, output: str, *devices: str) -> int:
    """Write samples to the file until stdin or the parent process ends, or SIGTERM arrives.

    Return the exit status: 1, after an error message, if the file cannot be written.
    """
    logging.basicConfig(level=logging.WARNING, format="dpbench samplers: %(message)s")
    # the parent handles them, and then ends this process
    signals.ignore((signal.SIGINT, signal.SIGHUP))
    stopped = _stop_signal()
    signals.release()
    die_with_parent(int(parent_pid), signal.SIGTERM)
    os.environ[ROOT_PID] = root_pid
    try:
        _sample(Path(output), [*map(int, devices)], float(interval_s), stopped)
    except OSError as error:
        log.error("samples cannot be written to %s: %s", output, error)
        return 1
    return 0


def _sample(output: Path, devices: Sequence[int], interval_s: float, stopped: int) -> None:
    series: list[list[Sample]] = []
    with output.open("ab") as file:
        with suppress(BrokenPipeError), ExitStack() as samplers:
            series += _start_all(samplers, devices, interval_s)
            _answer(b"ready\n")
            for request in _requests(stopped):
                file.write(_lines(series))
                file.flush()
                _answer(request)
        file.write(_lines(series))  # the samples taken while the samplers stopped


def _stop_signal() -> int:
    """Return a file descriptor that becomes readable on SIGTERM, for `select`."""
    heard, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    return heard


def _start_all(
    samplers: ExitStack, devices: Sequence[int], interval_s: float
) -> list[list[Sample]]:
    """A sampler that fails to start is logged, and has no list."""
    series = []
    for name in registry.names("samplers"):
        try:
            series.append(
                samplers.enter_context(registry.load("samplers", name).start(devices, interval_s))
            )
        except Exception:
            log.exception("the sampler %s did not start, so this run lacks its samples", name)
    return series


def _requests(stopped: int) -> Iterator[bytes]:
    """Yield data from stdin as it arrives, and b"" after `WRITE_INTERVAL_S` seconds without data.

    Stop at the end of stdin, or when the file descriptor `stopped` is readable.
    """
    stdin = sys.stdin.fileno()
    while True:
        readable, _, _ = select.select([stdin, stopped], [], [], WRITE_INTERVAL_S)
        if stopped in readable:
            return
        request = os.read(stdin, 4096) if readable else b""
        if readable and not request:
            return
        yield request


def _lines(series: Sequence[list[Sample]]) -> bytes:
    """Remove all samples; return them as lines of JSON, each [time_s, device, metric, value]."""
    taken: list[Sample] = []
    for samples in series:
        count = len(samples)  # a sampler's thread may append at the same time, but only at the end
        taken += samples[:count]
        del samples[:count]
    rows = ([round(s.time_s, 6), s.device, s.metric, s.value] for s in taken)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _answer(line: bytes) -> None:
    if line:
        os.write(sys.stdout.fileno(), line)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
