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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from dpbench.records import words
from dpbench.records.files import BOM, UnreadableFile
from dpbench.records.visible import visible

_HOST = {"cpu_op": False, "operator": False, "user_annotation": True}
"""The categories of events of host threads; True if a category has only annotations."""
_LAUNCH = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime", "mtia_runtime"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_ENGINE = "autograd::engine::"
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
_NO_NUMBER = re.compile(rb"(?<=[:,\[\s])-?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)


class HostEvent(NamedTuple):
    """One operator or annotation of a host thread.

    `sequence` is autograd's sequence number, or -1 if autograd does not record the operator.
    `backward` is whether autograd runs it in a backward pass. `sizes_bytes` has the size of each
    input of the operators in `_SHAPED`, if the profiler recorded shapes.
    """

    name: str
    thread: str
    start_us: float
    end_us: float
    sequence: int
    backward: bool
    sizes_bytes: tuple[int, ...] = ()


class RuntimeCall(NamedTuple):
    """One call of the CUDA runtime, which may launch work on a device."""

    name: str
    thread: str
    start_us: float
    end_us: float


class DeviceEvent(NamedTuple):
    """One kernel, copy or fill on a device.

    `correlation` is the number of the call that launched it, or -1 if it is unknown. `size_bytes`
    is the size of a copy, 0 if it is unknown.
    """

    name: str
    device: int
    stream: int
    start_us: float
    end_us: float
    correlation: int
    size_bytes: int = 0


class TraceGpu(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of one GPU of the traced machine, as the trace gives them."""

    id: int
    name: str = ""
    memory_bytes: int = msgspec.field(name="totalGlobalMem", default=0)
    multiprocessors: int = msgspec.field(name="numSms", default=0)


@dataclass(frozen=True, kw_only=True)
class TraceEvents:
    """The events of one trace, and the facts about the process in which it was recorded.

    `launches` maps correlation numbers to launches. `gpus` is empty if the trace does not list
    them. `notes` are sentences about events that were left out.
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


def read(path: Path) -> TraceEvents:
    """Return the events of a trace file.

    Raises UnreadableFile, with the path and the place in the file, if it is not a trace or has no
    usable event, and OSError if it cannot be read.
    """
    file = _decoded(path, _content(path))
    host: list[HostEvent] = []
    launches: dict[int, RuntimeCall] = {}
    device: list[DeviceEvent] = []
    broken: list[int] = []
    for place, event in enumerate(file.events):
        if event.ph != "X":
            continue
        category = event.cat.lower()
        on_host = category in _HOST
        if not (on_host or category in _LAUNCH or category in _DEVICE):
            continue
        start_us = event.ts
        dur_us = event.dur
        extra = event.args or _NO_ARGUMENTS
        if start_us is None or dur_us is None or not math.isfinite(start_us + dur_us) or dur_us < 0:
            broken.append(place)
            continue
        end_us = start_us + dur_us
        thread = str(event.tid)
        name = visible(event.name)
        if on_host:
            sequence = _number(extra.sequence, -1)
            backward = _number(extra.forward, 0) > 0 or name.startswith(_ENGINE)
            sizes = _sizes(extra) if _SHAPED.match(name) else ()
            host.append(HostEvent(name, thread, start_us, end_us, sequence, backward, sizes))
        elif category in _LAUNCH:
            correlation = _number(extra.correlation, -1)
            if correlation >= 0:
                launches[correlation] = RuntimeCall(name, thread, start_us, end_us)
        else:
            number = _number(extra.device, _number(event.pid, 0))
            stream = _number(extra.stream, 0)
            correlation = _number(extra.correlation, -1)
            size = _number(extra.size, 0)
            device.append(DeviceEvent(name, number, stream, start_us, end_us, correlation, size))
    notes = _notes(path, file.events, broken)
    if not (host or device):
        raise UnreadableFile(
            f"{path}: none of its {len(file.events)} events is a usable operator, annotation or"
            f" kernel of torch.profiler{''.join(f'; {note}' for note in notes)}; give a file that"
            " `export_chrome_trace` or `tensorboard_trace_handler` wrote"
        )
    ranks = file.ranks
    gpus = [msgspec.structs.replace(gpu, name=visible(gpu.name)) for gpu in file.gpus]
    return TraceEvents(
        path=path,
        host=host,
        launches=launches,
        device=device,
        gpus=gpus,
        rank=ranks.rank,
        world_size=ranks.world_size,
        backend=visible(ranks.backend),
        notes=notes,
    )


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
        # old Kineto wrote a rate over 0 seconds as `inf` or `nan`, which is not JSON
        except msgspec.DecodeError:
            return _parsed(_NO_NUMBER.sub(b"null", content))
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
            f"{path.name}: dpbench left out {len(broken)} of {len(events)} events with a ts or dur"
            f" that is missing, negative or not finite; the first is event {broken[0]},"
            f" {first.name!r} (ts {first.ts}, dur {first.dur})"
        ),
    )
