"""Traces: write trials in the Trace Event Format, which Perfetto and speedscope read.

`trace` writes several trials into one trace. `split` writes one trial for Holistic Trace Analysis
(HTA), in the style of PyTorch's profiler: one file per device, which HTA reads as a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dpbench.records import HOST, Phase, Sample, Span, Step, Trial, files, hidden, words
from dpbench.records.case import MOVING
from dpbench.records.errors import UsageError
from dpbench.store.export.formats import Labels, title

_T = TypeVar("_T")
Timed = tuple[float, float, _T]
"""An interval (start, end, content); start and end are in seconds."""
TICKS = 1024
"""Ticks per microsecond; times are rounded to whole ticks."""
LATEST_S = 1e12
"""Events from this time on are left out: monotonic clocks begin when a machine starts."""
ORDER = {phase: number for number, phase in enumerate(Phase)}


def trace(
    run_id: str, provenance: Mapping[str, Any], trials: Sequence[Trial], labels: Labels
) -> Iterator[str]:
    """Yield, one trial at a time, the JSON text of one trace with all `trials` of a run."""
    zero_s = min((at for trial in trials for at in _times(trial) if _shown(at)), default=0.0)
    facts = {
        "run_id": run_id,
        "zero_s": zero_s,
        "provenance": hidden.shared(provenance),
        "trials": [_facts(pid, trial, labels) for pid, trial in enumerate(trials, 1)],
    }
    yield f'{{"displayTimeUnit": "ms",\n"otherData": {words.dumps(facts)},\n"traceEvents": [\n'
    for pid, trial in enumerate(trials, 1):
        yield ",\n" * (pid > 1) + ",\n".join(_events(pid, trial, zero_s, title(trial, labels)))
    yield "\n]}\n"


def _times(trial: Trial) -> Iterator[float]:
    yield from (step.start_s for step in trial.steps)
    yield from (span.start_s for span in trial.spans)
    yield from (sample.time_s for sample in trial.samples if sample.time_s > 0.0)


def _facts(pid: int, trial: Trial, labels: Labels) -> dict[str, Any]:
    """Return the facts about a trial for the metadata of a trace; `pid` is its process there.

    `untimed` has the samples without a time, from the steps that are profiled after the timed
    steps.
    """
    untimed = [[s.device, s.metric, s.value] for s in trial.samples if s.time_s == 0.0]
    return {
        "pid": pid,
        "case": trial.case.to_dict(),
        "labels": labels(trial),
        "round": trial.round,
        "status": trial.status,
        "reason": trial.reason,
        "verified": trial.verified,
        "memory": [[m.device, m.peak_bytes, m.source] for m in trial.memory],
        "untimed": untimed,
        "provenance": hidden.shared(trial.provenance),
    }


def _events(pid: int, trial: Trial, zero_s: float, name: str) -> Iterator[str]:
    """Yield a trial's events as JSON; `pid` is its process, and `zero_s` is shown as 0."""
    yield meta("process_name", pid, 0, name=name)
    yield meta("process_sort_index", pid, 0, sort_index=pid)
    tid = 0
    for track, intervals in (("steps", _steps(trial.steps)), *_tracks(trial.spans)):
        first = tid
        for lane, start, end, members in lanes(intervals, zero_s):
            if first + lane == tid:
                tid += 1
                yield meta(
                    "thread_name", pid, tid, name=track if lane == 0 else f"{track} #{lane + 1}"
                )
                yield meta("thread_sort_index", pid, tid, sort_index=tid)
            yield _complete(pid, first + lane + 1, start, end, members)
    yield from _counters(pid, trial.samples, zero_s)


def _steps(steps: Iterable[Step]) -> Iterator[Timed[str]]:
    for number, step in enumerate(steps):
        args = words.dumps({"seconds": step.seconds, "warmup": step.warmup})
        yield step.start_s, step.end_s, f'"name":"step {number}","cat":"step","args":{args}'


def _tracks(spans: Iterable[Span]) -> list[tuple[str, list[Timed[str]]]]:
    """Return (name, spans) of each phase of a device or the host, by device, the host first."""
    tracks: dict[tuple[int, Phase], list[Timed[str]]] = {}
    for span in spans:
        members = f'"name":"{span.phase}","cat":"{span.clock}","args":{{"step":{span.step}}}'
        tracks.setdefault((span.device, span.phase), []).append((span.start_s, span.end_s, members))
    keys = sorted(tracks, key=lambda key: (key[0], ORDER[key[1]]))
    return [(f"{place(device)} {phase}", tracks[device, phase]) for device, phase in keys]


def place(device: int) -> str:
    """Return "device i", or "host" for the index -1."""
    return "host" if device == HOST else f"device {device}"


def lanes(
    intervals: Iterable[Timed[_T]], zero_s: float, *, nested: bool = True
) -> list[tuple[int, int, int, _T]]:
    """Return (lane, start, end, content) of each interval, by start, on the lowest fitting lane.

    Lanes are numbered from 0; start and end are in ticks after `zero_s`. An interval fits if no
    interval of the lane overlaps it or, with `nested`, if it lies within each that does. Intervals
    with an infinite or NaN start or end, or one above `LATEST_S`, are left out.
    """
    placed = [interval for interval in intervals if _shown(interval[0]) and _shown(interval[1])]
    timed = [(ticks(start - zero_s), ticks(end - zero_s), what) for start, end, what in placed]
    laid = []
    open_ends: list[list[int]] = []
    for start, end, what in sorted(timed, key=lambda one: (one[0], -one[1])):
        for lane, ends in enumerate(open_ends):  # noqa: B007
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or (nested and end <= ends[-1]):
                break
        else:
            lane, ends = len(open_ends), []
            open_ends.append(ends)
        ends.append(end)
        laid.append((lane, start, end, what))
    return laid


def _shown(at_s: float) -> bool:
    return abs(at_s) < LATEST_S


def ticks(seconds: float) -> int:
    """Return a duration in seconds as whole ticks of 1/1024 µs."""
    return round(seconds * 1e6 * TICKS)


def _complete(pid: int, tid: int, start: int, end: int, members: str) -> str:
    """Return the event of an interval as JSON; `members` is its name, category and arguments."""
    times = f'"ts":{start / TICKS!r},"dur":{(end - start) / TICKS!r}'
    return f'{{"ph":"X","pid":{pid},"tid":{tid},{times},{members}}}'


def meta(kind: str, pid: int, tid: int, **args: Any) -> str:
    """Return, as JSON, a metadata event of type `kind`, which names or orders a process or track.

    `args` are its arguments, such as `name` or `sort_index`.
    """
    return words.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})


def _counters(pid: int, samples: Iterable[Sample], zero_s: float) -> Iterator[str]:
    for sample in samples:
        if 0.0 < sample.time_s < LATEST_S:
            counter = words.dumps(f"{place(sample.device)} {sample.metric}")
            microseconds = ticks(sample.time_s - zero_s) / TICKS
            value = f'{{"{sample.metric}":{sample.value!r}}}'
            yield f'{{"ph":"C","pid":{pid},"ts":{microseconds!r},"name":{counter},"args":{value}}}'


COMPUTE_STREAM, COMMUNICATION_STREAM = 10, 20
"""The first streams of compute and of communication; overlapping spans use the next ones."""
FIRST_CORRELATION = 1 << 20
"""The first id that links a kernel to its launch.

HTA 0.5 stores row indices in the smallest integer type that fits these ids; with small ids, they
overflow.
"""
STEPS_TID, LAUNCH_TID, HOST_TID = 1, 2, 3
NOTE = (
    "dpbench wrote this file for one device, which is shown as a rank. Each kernel is one phase of"
    " a step. Kernels named ncclKernel_* are the phases scatter, replicate, gather and reduce, even"
    " if NCCL did not move the data. The launch of a kernel is shown at the start of its phase if"
    " the host's clock timed the phase, and at the start of its step if CUDA events timed the"
    " phase."
)


def split(
    run_id: str, provenance: Mapping[str, Any], trial: Trial, labels: Labels, folder: Path
) -> list[Path]:
    """Write the timed steps of a trial as one trace file per device, and return the paths.

    Creates the folder. Raises ValueError if no device has a span in a timed step, or if the folder
    already contains traces, because HTA reads all traces in a folder.
    """
    timed = {number for number, step in enumerate(trial.steps) if not step.warmup}
    spans = [span for span in trial.spans if span.step in timed]
    devices = sorted({span.device for span in spans} - {HOST})
    if not devices:
        raise UsageError(
            "the trial of {label} has no span of a device in a timed step and cannot be split by"
            " device",
            option="case",
            remedy="choose another case with {}",
            label=trial.case.label,
        )
    folder.mkdir(parents=True, exist_ok=True)
    stale = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".gz"))
    if stale:
        raise UsageError(
            "the folder {folder} already contains traces, such as {stale}",
            option="split",
            remedy="give {} another folder",
            folder=folder,
            stale=", ".join(stale[:3]),
        )
    facts = {
        "run_id": run_id,
        "title": title(trial, labels),
        "labels": labels(trial),
        "case": trial.case.to_dict(),
        "note": NOTE,
        "provenance": {**hidden.shared(provenance), **hidden.shared(trial.provenance)},
    }
    zero_s = min(
        [trial.steps[number].start_s for number in timed] + [span.start_s for span in spans]
    )
    paths = [folder / f"rank-{device}.json" for device in devices]
    try:
        for path, device in zip(paths, devices, strict=True):
            with files.replacing(path) as part, part.open("w", encoding="utf-8") as out:
                out.writelines(_rank(device, devices, trial.steps, spans, facts, zero_s))
    except OSError:
        for path in paths:  # HTA would read a part of the ranks as all of them
            path.unlink(missing_ok=True)
        raise
    return paths


def _rank(
    device: int,
    devices: Sequence[int],
    steps: Sequence[Step],
    spans: Sequence[Span],
    facts: Mapping[str, Any],
    zero_s: float,
) -> Iterator[str]:
    """Yield the text of a device's file; that of the first device has the host's spans."""
    device_spans = [span for span in spans if span.device == device]
    # HTA reads the rank from the first line that contains one
    rank = {"backend": "dpbench", "rank": device, "world_size": len(devices)}
    yield f'{{"schemaVersion": 1,\n"distributedInfo": {json.dumps(rank)},\n"otherData":'
    yield f" {json.dumps(facts)},"
    yield '\n"displayTimeUnit": "ms",\n"traceEvents": [\n'
    yield ",\n".join(_rank_events(device, steps, device_spans, zero_s))
    if device == devices[0]:
        yield from (",\n" + event for event in _host(device, spans, zero_s))
    yield "\n]}\n"


def _rank_events(
    device: int, steps: Sequence[Step], spans: Sequence[Span], zero_s: float
) -> Iterator[str]:
    """Yield a device's timed steps, and each span as a kernel with its launch, as JSON."""
    yield meta("process_name", device, 0, name=f"device {device}")
    ends = 0
    for number, step in enumerate(steps):
        if not step.warmup:
            start, ends = _us(step.start_s, zero_s), _us(step.end_s, zero_s)
            yield _rank_complete(
                f"ProfilerStep#{number}", "user_annotation", device, STEPS_TID, start, ends
            )
    yield _rank_complete(
        f"ProfilerStep#{len(steps)}", "user_annotation", device, STEPS_TID, ends, ends
    )
    correlation = FIRST_CORRELATION
    for first, communicates in ((COMPUTE_STREAM, False), (COMMUNICATION_STREAM, True)):
        chosen = [
            (one.start_s, one.end_s, one) for one in spans if (one.phase in MOVING) is communicates
        ]
        for lane, start, end, span in lanes(chosen, zero_s, nested=False):
            correlation += 1
            cause = span.start_s if span.on_host else steps[span.step].start_s
            launched_us = _us(cause, zero_s)
            name = f"ncclKernel_{span.phase}" if communicates else str(span.phase)
            stream = first + lane
            args = {
                "device": device,
                "stream": stream,
                "correlation": correlation,
                "step": span.step,
            }
            launch = {"correlation": correlation}
            yield _rank_complete(
                "cudaLaunchKernel",
                "cuda_runtime",
                device,
                LAUNCH_TID,
                launched_us,
                launched_us,
                launch,
            )
            yield _rank_complete(name, "kernel", device, stream, _whole(start), _whole(end), args)


def _host(device: int, spans: Sequence[Span], zero_s: float) -> Iterator[str]:
    host_spans: list[Timed[Span]] = [
        (one.start_s, one.end_s, one) for one in spans if one.device == HOST
    ]
    for lane, start, end, span in lanes(host_spans, zero_s):
        yield _rank_complete(
            str(span.phase),
            "cpu_op",
            device,
            HOST_TID + lane,
            _whole(start),
            _whole(end),
            {"step": span.step},
        )


def _us(at_s: float, zero_s: float) -> int:
    """Return `at_s` as whole microseconds after `zero_s`, rounded to ticks first like spans."""
    return _whole(ticks(at_s - zero_s))


def _whole(count: int) -> int:
    """Return ticks as whole microseconds."""
    return round(count / TICKS)


def _rank_complete(
    name: str,
    category: str,
    pid: int,
    tid: int,
    start_us: int,
    end_us: int,
    args: dict[str, int] | None = None,
) -> str:
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start_us}
    return json.dumps({**event, "dur": end_us - start_us, "args": args or {}})
