"""The timeline of a simulated machine: streams, events and work with true start and end times.

The host calls are made in program order, and a call can only depend on calls before it. The true
times of a piece of work are therefore known when the host queues it, although the host's own time
is then much earlier. All times are true seconds. Rules, with their sources:

- Work of one stream runs in the order in which it was queued (CUDA C++ Programming Guide,
  "Streams").
- An event completes when all work queued in its stream before it has completed (CUDA Runtime API,
  cudaEventRecord). `cudaEventElapsedTime` returns float32 milliseconds, with a resolution of about
  0.5 microseconds.
- An event is recorded on a stream of its own device; otherwise cudaEventRecord returns an invalid
  handle (CUDA C++ Programming Guide, "Stream and Event Behavior"). torch.cuda.Event.record raises
  the same error.
- A copy between two GPUs runs on the current stream of the source; the source waits for the current
  stream of the target before, and the target waits for the source after it (torch,
  aten/src/ATen/native/cuda/Copy.cu).
- A GPU has separate engines for compute, and for copies out of and into its memory (CUDA C++
  Programming Guide, "Overlap of Data Transfer and Kernel Execution"). A copy between GPUs uses the
  outward engine of the source.
- A collective kernel of NCCL runs on a stream of each rank, and transfers nothing until all ranks
  have started theirs (NCCL User Guide, "Collective Operations"). It occupies a rank from the rank's
  own start.
- A CUDA context cannot be used in a forked child (torch, notes/multiprocessing).
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class CudaError(RuntimeError):
    """An error that CUDA or torch raises for a call that they refuse."""


@dataclass(frozen=True)
class Work:
    """A piece of work that a device does from `start_s` to `end_s`, in true seconds.

    `kind` is "compute", "copy" (from or to the host), "peer" (a copy to another GPU) or
    "collective". A collective moves data from `all_here_s` on, and waits before.
    """

    device: int
    kind: str
    name: str
    start_s: float
    end_s: float
    all_here_s: float


@dataclass
class Gpu:
    """The physical properties of a device, and the state of its engines.

    Its event clock shows `offset_s + (1 + drift) * true seconds`, rounded down to `resolution_s`.
    `speeds` has pairs (true second, speed): from that second on, kernels run `speed` times as fast
    as on the normal device.
    """

    index: int
    offset_s: float = 0.0
    drift: float = 0.0
    resolution_s: float = 0.5e-6
    speeds: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 1.0)])
    engines: dict[str, float] = field(
        default_factory=lambda: {"compute": 0.0, "in": 0.0, "out": 0.0}
    )

    def clock_s(self, true_s: float) -> float:
        """Return the seconds that this device's event clock shows at the true time `true_s`."""
        ticks = np.floor((self.offset_s + (1 + self.drift) * true_s) / self.resolution_s)
        return float(ticks) * self.resolution_s

    def speed(self, true_s: float) -> float:
        """Return the speed of kernels at the true time `true_s`, relative to a normal device."""
        return self.speeds[max(0, bisect_right([at for at, _ in self.speeds], true_s) - 1)][1]

    def finish(self, start_s: float, normal_s: float) -> float:
        """Return the true end of a kernel that needs `normal_s` seconds on a normal device."""
        at = start_s
        for change_s, _ in [*self.speeds, (float("inf"), 0.0)]:
            if change_s <= at:
                continue
            speed = self.speed(at)
            if at + normal_s / speed <= change_s:
                return at + normal_s / speed
            normal_s -= (change_s - at) * speed
            at = change_s
        raise AssertionError(
            "a kernel ends before the last change of the speed, which is at infinity"
        )


@dataclass
class Stream:
    """A queue of work on one device; all work that is queued so far ends at `end_s`."""

    device: int
    end_s: float = 0.0


@dataclass
class Event:
    """A timing event of one device.

    It completes at the true time `at_s`, None before it is recorded.
    """

    timeline: Timeline
    device: int
    at_s: float | None = None

    def record(self, stream: Stream) -> None:
        """Queue this event in `stream`.

        Raises CudaError if the stream belongs to another device.
        """
        if stream.device != self.device:
            raise CudaError(
                f"an event of GPU {self.device} was recorded on a stream of GPU {stream.device}"
            )
        self.at_s = self.timeline.front(stream)

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`, as float32.

        Raises CudaError where CUDA does.
        """
        if self.at_s is None or end.at_s is None:
            raise CudaError("elapsed_time was called for an event that was never recorded")
        if self.device != end.device:
            raise CudaError(
                f"elapsed_time was called for events of GPU {self.device} and GPU {end.device}"
            )
        if max(self.at_s, end.at_s) > self.timeline.now():
            raise CudaError(
                "elapsed_time was called before both events had completed: device not ready"
            )
        clock_s = self.timeline.gpus[self.device].clock_s
        return float(np.float32((clock_s(end.at_s) - clock_s(self.at_s)) * 1e3))


class Timeline:
    """The true time of the host and of the work of all devices.

    `call_s` is the host's time for one call that queues work.
    """

    def __init__(self, gpus: Sequence[Gpu], call_s: float = 5e-6, start_s: float = 1000.0) -> None:
        self.gpus, self.call_s, self.work = list(gpus), call_s, list[Work]()
        self._now_s, self._lock, self._pid = start_s, threading.RLock(), os.getpid()

    def now(self) -> float:
        """Return the host's time in true seconds.

        This is the clock that replaces time.perf_counter.
        """
        return self._now_s

    def held(self) -> AbstractContextManager[Any]:
        """Return a context in which no other thread makes a call."""
        return self._lock

    def spend(self, seconds: float) -> None:
        """Let the host compute for `seconds`; the devices continue meanwhile."""
        with self._lock:
            self._now_s += seconds

    def front(self, stream: Stream) -> float:
        """Return the true time at which the work queued so far has completed, or now if later."""
        if os.getpid() != self._pid:
            raise CudaError("cannot re-initialize CUDA in a forked subprocess")
        return max(stream.end_s, self._now_s)

    def kernel(self, stream: Stream, normal_s: float, name: str) -> None:
        """Queue a kernel that takes `normal_s` seconds on a normal device."""
        with self._lock:
            self._now_s += self.call_s
            gpu = self.gpus[stream.device]
            start_s = max(self.front(stream), gpu.engines["compute"])
            stream.end_s = gpu.engines["compute"] = gpu.finish(start_s, normal_s)
            self.work.append(Work(gpu.index, "compute", name, start_s, stream.end_s, start_s))

    def copy(self, source: Stream | None, target: Stream, seconds: float, name: str) -> None:
        """Queue a copy of `seconds` into the device of `target`.

        None as the `source` is the host's memory.
        """
        with self._lock:
            self._now_s += self.call_s
            on, engine = (target, "in") if source is None else (source, "out")
            engines = self.gpus[on.device].engines
            start_s = max(self.front(on), self.front(target), engines[engine])
            on.end_s = target.end_s = engines[engine] = start_s + seconds
            kind = "copy" if source is None else "peer"
            self.work.append(Work(on.device, kind, name, start_s, start_s + seconds, start_s))

    def read(self, source: Stream, seconds: float) -> None:
        """Copy to the host's pageable memory and wait for the copy, as `tensor.item()` does."""
        with self._lock:
            self._now_s += self.call_s
            start_s = max(self.front(source), self.gpus[source.device].engines["out"])
            source.end_s = self._now_s = start_s + seconds
            self.work.append(
                Work(source.device, "copy", "Memcpy DtoH", start_s, source.end_s, start_s)
            )

    def collective(self, streams: Sequence[Stream], seconds: float, name: str) -> None:
        """Queue one collective on the streams of all ranks.

        Its transfer of `seconds` starts when all have arrived.
        """
        with self._lock:
            self._now_s += self.call_s
            starts = [self.front(stream) for stream in streams]
            for stream, start_s in zip(streams, starts, strict=True):
                stream.end_s = max(starts) + seconds
                self.work.append(
                    Work(stream.device, "collective", name, start_s, stream.end_s, max(starts))
                )

    def wait(self, stream: Stream, other: Stream) -> None:
        """Make later work of `stream` wait for the work queued so far in `other`."""
        with self._lock:
            stream.end_s = max(stream.end_s, other.end_s)

    def synchronize(self, streams: Sequence[Stream]) -> None:
        """Block the host until the work queued in `streams` has completed."""
        with self._lock:
            self._now_s = max(
                self._now_s + self.call_s, *(self.front(stream) for stream in streams)
            )
