"""Kineto: read a trace of torch.profiler in Chrome's JSON format, plain or compressed by gzip.

Torch has changed the names of the categories: `Operator`, `Runtime`, `Kernel`, `Memcpy` and
`Memset` became `cpu_op`, `cuda_runtime`, `kernel`, `gpu_memcpy` and `gpu_memset`. dpbench reads
both. Times stay in the microseconds of the file: in seconds since the epoch, a float would be exact
to 0.2 microseconds only.

msgspec decodes a file of 200,000 events in a second, into the few fields that are needed.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from dpbench.records import words
from dpbench.records.activity import (
    CALLS,
    Interval,
    Kind,
    Operator,
    Operators,
    kind_of,
    launches_kernels,
)
from dpbench.records.files import BOM, UnreadableFile
from dpbench.records.grouping import grouped
from dpbench.records.visible import visible

_HOST = {"cpu_op", "operator", "user_annotation"}
"""The categories of events of host threads."""
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_BACKWARD = re.compile(r"(?:struct |class )?(?:torch::)?autograd::|\w+Backward\d*$")
"""Matches the operators of a backward pass; torch 1.8 has no other mark of them."""
_RECORDING = {"trace"}
"""The category of the event that lasts as long as the profiler recorded."""
WAIT = "Synchronize"
"""The end of the names of calls that wait for a device."""
GRADIENT = "torch::autograd::AccumulateGrad"
_SHAPED = re.compile(rf"^(?:{GRADIENT}|aten::batch_norm|aten::\w+_loss)$")
"""Matches the operators whose shapes are needed: gradients, running statistics and outputs."""
_VALUE_BYTES = {"double": 8, "float": 4, "c10::Half": 2, "c10::BFloat16": 2}
MOST_BYTES = 256 * 1024**2
"""The most bytes to which any trace may decompress; one of 200,000 events has 100 MB."""
MOST_RATIO = 60
"""The most times its size to which a larger trace may decompress; real traces have 10 to 30."""
LEAST_OBJECT_BYTES = 64
"""The least bytes per object allowed in a compressed trace; real traces have over 140."""
_PART_BYTES = 1024**2
FIRST_US = 1e6
"""The time by which a trace has begun whose times count from 0."""
_NO_NUMBER = re.compile(rb"(?<=[:,\[\s])-?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)


class HostEvent(NamedTuple):
    """One operator or annotation of a host thread.

    `sequence` is autograd's sequence number, or -1 if autograd does not record the operator.
    `backward` is whether autograd runs it in a backward pass. `sizes_bytes` has the size of each
    input of the operators in `_SHAPED`, if the profiler recorded shapes. `collective` is the name
    of the collective that torch states for it, "" if none.
    """

    name: str
    thread: str
    start_us: float
    end_us: float
    sequence: int
    backward: bool
    sizes_bytes: tuple[int, ...] = ()
    collective: str = ""


class RuntimeCall(NamedTuple):
    """One call of the CUDA runtime, which may launch work on a device."""

    name: str
    thread: str
    start_us: float
    end_us: float


class DeviceEvent(NamedTuple):
    """One kernel, copy or fill on a device.

    `correlation` is the number of the call that launched it, or -1 if it is unknown. `size_bytes`
    is the size of a copy, 0 if it is unknown. `collective` is the name of the collective that torch
    states for it or that launched it, "" if none is known.
    """

    name: str
    device: int
    stream: int
    start_us: float
    end_us: float
    correlation: int
    size_bytes: int = 0
    collective: str = ""

    @property
    def kind(self) -> Kind:
        """Return the kind of the activity."""
        return kind_of(self.name, self.collective)


class TraceGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one GPU of the traced machine, as the trace gives them.

    `name` is empty if it is unknown: some AMD devices have none.
    """

    id: int
    name: str | None = ""
    memory_bytes: int = msgspec.field(name="totalGlobalMem", default=0)
    multiprocessors: int = msgspec.field(name="numSms", default=0)


@dataclass(frozen=True, kw_only=True)
class TraceEvents:
    """The events of one trace, and the facts about the process in which it was recorded.

    `launches` maps correlation numbers to launches, without those in `shared`, which several calls
    have. `gpus` is empty if the trace does not list them. `processes` are the ids of the processes
    whose host events it has, and `recorded_us` is the time in which the profiler recorded, if the
    trace says so. `left_out` is the share of events without a usable time; `notes` describe them.
    """

    path: Path
    host: Sequence[HostEvent]
    launches: Mapping[int, RuntimeCall]
    device: Sequence[DeviceEvent]
    gpus: Sequence[TraceGpu]
    rank: int
    world_size: int
    backend: str
    notes: tuple[str, ...]
    processes: tuple[str, ...] = ()
    shared: frozenset[int] = frozenset()
    recorded_us: Interval | None = None
    left_out: float = 0.0

    @property
    def on_gpus(self) -> bool:
        """Return whether the process worked on GPUs, even if the profiler recorded no work."""
        return bool(self.device) or any(
            launches_kernels(call.name) for call in self.launches.values()
        )

    @property
    def file(self) -> str:
        """Return the path as text; a file's name may have bytes that are no text."""
        return visible(str(self.path))

    @property
    def name(self) -> str:
        """Return the file's name as text."""
        return visible(self.path.name)

    @property
    def waits(self) -> Iterator[HostEvent]:
        """Yield the calls with which the host waits for a device, such as cudaDeviceSynchronize."""
        for call in self.launches.values():
            if call.name.endswith(WAIT):
                yield HostEvent(*call, sequence=-1, backward=False)

    @property
    def zero_us(self) -> float:
        """Return the time of the first event, to which the times in seconds are relative."""
        starts = [
            min(one.start_us for one in events) for events in (self.host, self.device) if events
        ]
        return min(starts)


_Value = int | str | float | None
"""A number in a trace, which may also be a text such as `stream 7`."""


class _Arguments(msgspec.Struct, gc=False):
    correlation: _Value = None
    device: _Value = None
    stream: _Value = None
    sequence: _Value = msgspec.field(name="Sequence number", default=None)
    forward: _Value = msgspec.field(name="Fwd thread id", default=None)
    size: _Value = msgspec.field(name="bytes", default=None)
    collective: _Value = msgspec.field(name="Collective name", default=None)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())


_NO_ARGUMENTS = _Arguments()


class _Event(msgspec.Struct, gc=False):
    ph: str = ""
    name: str = ""
    cat: str = ""
    pid: _Value = None
    tid: _Value = None
    ts: float | None = None
    dur: float | None = None
    args: _Arguments | None = None


class _Ranks(msgspec.Struct):
    rank: int = 0
    world_size: int = 1
    backend: str = ""


class _File(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents", default_factory=list)
    gpus: list[TraceGpu] = msgspec.field(name="deviceProperties", default_factory=list)
    ranks: _Ranks = msgspec.field(name="distributedInfo", default_factory=_Ranks)
    schema: _Value = msgspec.field(name="schemaVersion", default=None)


def read(path: Path) -> TraceEvents:
    """Return the events of a trace file.

    Raises UnreadableFile, with the path and the place in the file, if it is not a trace or has no
    usable event, and OSError if it cannot be read.
    """
    file = _decoded(path, _content(path))
    host: list[HostEvent] = []
    calls: list[tuple[int, RuntimeCall]] = []
    device: list[DeviceEvent] = []
    recorded_us = None
    processes: dict[str, None] = {}
    broken: list[int] = []
    timed = 0
    begins_us = min((one.ts for one in file.events if one.ts and one.ts > 0), default=0.0)
    for place, event in enumerate(file.events):
        category = event.cat.lower()
        if event.ph != "X" or category not in _HOST | CALLS | _DEVICE | _RECORDING:
            continue
        if not _is_time(event.ts, event.dur, begins_us):
            broken.append(place)
            continue
        timed += 1
        if category in _HOST | CALLS and event.pid is not None:
            processes[str(event.pid)] = None
        if category in _HOST:
            host.append(_host_event(event))
        elif category in CALLS:
            calls.append(_call(event))
        elif category in _DEVICE:
            device.append(_device_event(event))
        else:
            recorded_us = _times_us(event)
    launches, shared = _launches(calls)
    notes = _notes(path, file.events, broken)
    if not (host or device):
        remedy = (
            "give a file that `export_chrome_trace` or `tensorboard_trace_handler` wrote"
            if file.schema is None
            else "torch.profiler wrote this file, but recorded no work: train while it records (of"
            " a schedule, in its active steps), and give it ProfilerActivity.CPU"
        )
        raise UnreadableFile(
            f"{path}: none of its {len(file.events)} events is a usable operator, annotation or"
            f" kernel of torch.profiler{''.join(f'; {note}' for note in notes)}; {remedy}"
        )
    ranks = file.ranks
    gpus = [msgspec.structs.replace(gpu, name=visible(gpu.name or "")) for gpu in file.gpus]
    return TraceEvents(
        path=path,
        host=host,
        launches=launches,
        device=list(_with_collectives(device, launches, host)),
        gpus=gpus,
        rank=ranks.rank,
        world_size=ranks.world_size,
        backend=visible(ranks.backend),
        notes=notes,
        processes=tuple(processes),
        shared=shared,
        recorded_us=recorded_us,
        left_out=len(broken) / (len(broken) + timed),
    )


def _is_time(start_us: float | None, dur_us: float | None, begins_us: float) -> bool:
    """Return whether an event has a time; `begins_us` is the first start after 0 in its file.

    Where the profiler has lost the time of an event, it writes 0.
    """
    if start_us is None or dur_us is None:
        return False
    lost = start_us == 0 and (dur_us == 0 or begins_us > FIRST_US)
    return math.isfinite(start_us + dur_us) and dur_us >= 0 and not lost


def _times_us(event: _Event) -> Interval:
    start_us = event.ts or 0.0
    return start_us, start_us + (event.dur or 0.0)


def _host_event(event: _Event) -> HostEvent:
    extra = event.args or _NO_ARGUMENTS
    name = visible(event.name)
    return HostEvent(
        name,
        str(event.tid),
        *_times_us(event),
        sequence=_number(extra.sequence, -1),
        backward=_number(extra.forward, 0) > 0 or bool(_BACKWARD.match(name)),
        sizes_bytes=_sizes(extra) if _SHAPED.match(name) else (),
        collective=visible(str(extra.collective or "")),
    )


def _call(event: _Event) -> tuple[int, RuntimeCall]:
    """Return a call with its correlation number, -1 if that is unknown."""
    extra = event.args or _NO_ARGUMENTS
    call = RuntimeCall(visible(event.name), str(event.tid), *_times_us(event))
    return _number(extra.correlation, -1), call


def _device_event(event: _Event) -> DeviceEvent:
    extra = event.args or _NO_ARGUMENTS
    return DeviceEvent(
        visible(event.name),
        _number(extra.device, _number(event.pid, 0)),
        _number(extra.stream, _number(event.tid, 0)),
        *_times_us(event),
        correlation=_number(extra.correlation, -1),
        size_bytes=_number(extra.size, 0),
        collective=visible(str(extra.collective or "")),
    )


def _with_collectives(
    device: Iterable[DeviceEvent], launches: Mapping[int, RuntimeCall], host: Iterable[HostEvent]
) -> Iterator[DeviceEvent]:
    """Yield the events of devices, with the collective around its launch if torch states none."""
    by_thread = grouped(
        (one.thread, Operator(one.start_us, one.end_us, f"{one.name} {one.collective}".strip()))
        for one in host
    )
    operators = {thread: Operators(own) for thread, own in by_thread.items()}
    for event in device:
        launch = launches.get(event.correlation)
        own = operators.get(launch.thread) if launch else None
        if event.collective or launch is None or own is None:
            yield event
        else:
            yield event._replace(collective=own.collective(launch.start_us))


def _launches(
    calls: Iterable[tuple[int, RuntimeCall]],
) -> tuple[dict[int, RuntimeCall], frozenset[int]]:
    """Return the call of each correlation number, and the numbers that several calls have.

    A call within another one of its thread is a part of it.
    """
    launches: dict[int, RuntimeCall] = {}
    shared: set[int] = set()
    for correlation, call in calls:
        if correlation < 0:
            continue
        known = launches.setdefault(correlation, call)
        apart = call.start_us >= known.end_us or call.end_us <= known.start_us
        if known is not call and (apart or call.thread != known.thread):
            shared.add(correlation)
    return {n: call for n, call in launches.items() if n not in shared}, frozenset(shared)


def _sizes(extra: _Arguments) -> tuple[int, ...]:
    """Return the bytes of each input of an operator; 0 for a type that is not floating-point."""
    try:
        shapes = msgspec.json.decode(extra.shapes, type=list[list[int]])
        types = msgspec.json.decode(extra.types, type=list[str])
    except msgspec.DecodeError:  # no shapes, or those of a list of tensors
        return ()
    return tuple(
        math.prod(shape) * _VALUE_BYTES.get(kind, 0)
        for shape, kind in zip(shapes, types, strict=False)
    )


def _number(value: _Value, default: int) -> int:
    """Return the whole number in a value such as 7 or `stream 7`; `default` if it has none."""
    if isinstance(value, str):
        digits = value.rpartition(" ")[2]
        return int(digits) if digits.isdecimal() else default
    return int(value) if value is not None and math.isfinite(value) else default


def _content(path: Path) -> bytes:
    if path.is_dir():
        raise UnreadableFile(f"{path} is a folder; give the traces in it, such as {path}/*.json.gz")
    content = path.read_bytes()
    if content.startswith(b"\x1f\x8b"):
        content = _decompressed(path, content)
    return content.removeprefix(BOM)


def _decompressed(path: Path, content: bytes) -> bytes:
    """Return the JSON in the content of a compressed file.

    Raises UnreadableFile if it is damaged, and if it decompresses to more than a trace does: a few
    megabytes could otherwise take all of the memory.
    """
    limit = max(MOST_BYTES, MOST_RATIO * len(content))
    parts: list[bytes] = []
    size = 0
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            while size <= limit and (part := file.read(_PART_BYTES)):
                parts.append(part)
                size += len(part)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableFile(
            f"{path}: the compressed file is damaged or incomplete ({len(content)} bytes: {error});"
            " copy it again"
        ) from error
    objects = sum(part.count(b"{") for part in parts)  # also those in names, such as {lambda()#1}
    if size > limit or objects > limit // LEAST_OBJECT_BYTES:
        amount = f"{objects:,} JSON objects" if size <= limit else f"more than {words.size(limit)}"
        raise UnreadableFile(
            f"{path}: its {words.size(len(content))} decompress to {amount};"
            f" a trace may have {words.size(limit)} and {limit // LEAST_OBJECT_BYTES:,} objects;"
            " record fewer steps, or if the file is to be trusted, decompress it with gunzip and"
            " import the JSON"
        )
    return b"".join(parts)


def _decoded(path: Path, content: bytes) -> _File:
    if not content.strip():
        raise UnreadableFile(f"{path} is empty")
    try:
        try:
            return _parsed(content)
        except msgspec.ValidationError:
            raise
        # old Kineto wrote a rate over 0 seconds as `inf` or `nan`, which is not JSON; names, such
        # as those of files, may be bytes that are no text
        except (msgspec.DecodeError, UnicodeDecodeError):
            text = content.decode(errors="replace").encode()
            return _parsed(_NO_NUMBER.sub(b"null", text))
    except msgspec.ValidationError as error:
        raise UnreadableFile(f"{path}: {error}; this is not a trace of torch.profiler") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnreadableFile(
            f"{path} is not JSON, or is cut off ({len(content)} bytes): {error}"
        ) from error


def _parsed(content: bytes) -> _File:
    if content.lstrip()[:1] == b"[":
        return _File(events=msgspec.json.decode(content, type=list[_Event]))
    return msgspec.json.decode(content, type=_File)


def _notes(path: Path, events: Sequence[_Event], broken: Sequence[int]) -> tuple[str, ...]:
    if not broken:
        return ()
    first = events[broken[0]]
    return (
        (
            f"{visible(path.name)}: dpbench left out {len(broken)} of {len(events)} events with a"
            " ts or dur that is missing, 0, negative or not finite; the first is event"
            f" {broken[0]}, {first.name!r} (ts {first.ts}, dur {first.dur})"
        ),
    )
