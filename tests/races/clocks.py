"""Vector clocks of streams and events: which work on simulated GPUs is ordered after which.

Each stream counts its operations. Its clock has, for each stream, the number of operations that are
done before its next operation starts. The rules are those of CUDA and of torch:

- Operations on one stream run in order (CUDA C++ Programming Guide, "Streams").
- An event captures the work that its stream has queued when the event is recorded; recording again
  replaces it. A wait for an event that was never recorded has no effect (CUDA Runtime API,
  `cudaEventRecord`, `cudaStreamWaitEvent`).
- `wait_stream` records an event on the other stream and waits for it (torch/cuda/streams.py).
- torch creates its streams with `cudaStreamNonBlocking` (c10/cuda/CUDAStream.cpp). They are
  therefore not ordered with the default stream, nor with each other.
- The current stream belongs to a thread and a device. In a new thread it is the default stream (the
  thread-local `current_streams` in c10/cuda/CUDAStream.cpp).
- Work starts after the host has queued it, hence after all the work for which the host has waited.

The host has one clock for all its threads: if one thread waits for a device, the later work of all
threads is ordered. This hides the races of a program whose threads synchronize; `Machine.waits`
counts the waits, so that tests can exclude them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

Clock = dict["Stream", int]
HOST = -1
"""The number of the host, in the place of a GPU's number."""


class Stream:
    """A queue of work on a GPU, or the work of the host; it replaces torch.cuda.Stream."""

    def __init__(self, machine: Machine, ordinal: int, name: str) -> None:
        self.machine, self.ordinal, self.name = machine, ordinal, name
        self.clock: Clock = {self: 0}
        machine.made.append(self)

    def merge(self, clock: Mapping[Stream, int]) -> None:
        """Order later work of this stream after the work in `clock`."""
        own = self.clock
        for stream, count in clock.items():
            if own.get(stream, 0) < count:
                own[stream] = count

    def tick(self) -> int:
        """Queue one operation, and return its number."""
        self.merge(self.machine.host.clock)
        self.clock[self] += 1
        return self.clock[self]

    def wait_stream(self, other: Stream) -> None:
        """Order later work of this stream after the work that `other` has queued."""
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        """Order later work of this stream after the work that `event` has captured."""
        self.merge(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """Record `event`, or a new event, on this stream, and return it."""
        event = event or Event(machine=self.machine)
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for the work of this stream."""
        self.machine.waits += 1
        self.machine.host.merge(self.clock)

    def __repr__(self) -> str:
        return self.name


class Event:
    """A point in a stream's work; it replaces torch.cuda.Event."""

    def __init__(self, *_: Any, machine: Machine, **__: Any) -> None:
        self.machine = machine
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Capture the work that `stream`, or the current stream, has queued."""
        stream = stream or self.machine.current(self.machine.ordinal)
        stream.merge(self.machine.host.clock)
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        """Order later work of `stream`, or of the current stream, after the captured work."""
        (stream or self.machine.current(self.machine.ordinal)).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for the captured work."""
        self.machine.waits += 1
        self.machine.host.merge(self.clock)


class Machine:
    """Simulated GPUs: their streams, and each thread's current streams and device.

    `waits` counts the times at which the host has waited for work.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        self._defaults: dict[int, Stream] = {}
        self.made: list[Stream] = []
        self.waits = 0
        self.host = Stream(self, HOST, "the host")

    @property
    def streams(self) -> dict[int, Stream]:
        """Return this thread's current stream by device.

        A device that is missing has its default stream.
        """
        if not hasattr(self._local, "streams"):
            self._local.streams, self._local.ordinal = {}, 0
        return self._local.streams  # type: ignore[no-any-return]

    @streams.setter
    def streams(self, value: dict[int, Stream]) -> None:
        self._local.streams, self._local.ordinal = value, self.ordinal

    @property
    def ordinal(self) -> int:
        """Return the number of this thread's current device."""
        return getattr(self._local, "ordinal", 0)

    def default(self, ordinal: int) -> Stream:
        """Return the default stream of a GPU, or the host's work for `HOST`."""
        if ordinal == HOST:
            return self.host
        if ordinal not in self._defaults:
            self._defaults[ordinal] = Stream(self, ordinal, f"the default stream of cuda:{ordinal}")
        return self._defaults[ordinal]

    def current(self, ordinal: int) -> Stream:
        """Return this thread's current stream of a GPU, or the host's work for `HOST`."""
        return self.streams.get(ordinal) or self.default(ordinal)

    def new_stream(self, ordinal: int) -> Stream:
        """Return a new stream of a GPU."""
        return Stream(self, ordinal, f"stream {len(self.made)} of cuda:{ordinal}")

    def entered(self, stream: Stream | None) -> Entered:
        """Return a context that makes a stream and its device current, as torch.cuda.stream does.

        None does nothing.
        """
        return Entered(self, stream, None if stream is None else stream.ordinal)

    def on(self, ordinal: int) -> Entered:
        """Return a context that makes a device current, as torch.cuda.device does.

        Its stream stays the same.
        """
        return Entered(self, None, ordinal)

    def select(self, stream: Stream | None, ordinal: int) -> None:
        """Make a device current in this thread, and a stream, if given, current on its device."""
        self.streams = self.streams if stream is None else {**self.streams, stream.ordinal: stream}
        self._local.ordinal = ordinal

    def restore(self, streams: dict[int, Stream], ordinal: int) -> None:
        """Make earlier streams and an earlier device current in this thread again."""
        self.streams = streams
        self._local.ordinal = ordinal

    def synchronize(self, ordinal: int) -> None:
        """Make the host wait for all streams of a GPU."""
        self.waits += 1
        for stream in self.made:
            if stream.ordinal == ordinal:
                self.host.merge(stream.clock)


class Entered:
    """A context of a thread that makes a stream or a device current.

    Like torch's, it can be entered several times.
    """

    def __init__(self, machine: Machine, stream: Stream | None, ordinal: int | None) -> None:
        self._machine, self._stream, self._ordinal = machine, stream, ordinal
        self._before: list[tuple[dict[int, Stream], int]] = []

    def __enter__(self) -> None:
        machine = self._machine
        self._before.append((machine.streams, machine.ordinal))
        machine.select(self._stream, machine.ordinal if self._ordinal is None else self._ordinal)

    def __exit__(self, *error: object) -> None:
        self._machine.restore(*self._before.pop())
