"""Ranks: write one trial as a folder of traces like those of PyTorch's profiler, with one pseudo-rank per device.

Holistic Trace Analysis (HTA) reads one file per rank, with kernels, streams and the launches of the kernels. The spans
of a device become kernels, each with a launch:

* scatter, replicate, gather and reduce are named `ncclKernel_*`, by which HTA recognises communication, even if NCCL
  did not run. They have separate streams, so that their overlap with computation is visible.
* A span of the host's clock is launched when it begins. The launch time of a span of CUDA events is not known: it is
  set to the start of the step, so HTA's "host_wait" covers only the gaps between steps.
* Warm-up steps are left out. HTA drops the last step of a trace as incomplete, so an empty step is added.
* Times are whole microseconds, because HTA rounds fractions, which would make the duration of short spans negative.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpbench.export.choice import Labels, nameless, title
from dpbench.export.chrome import TICKS, Timed, lanes, meta, ticks
from dpbench.records import HOST, Phase, Span, Step, Trial

COMMUNICATION = frozenset({Phase.SCATTER, Phase.REPLICATE, Phase.GATHER, Phase.REDUCE})
COMPUTE_STREAM, COMMUNICATION_STREAM = 10, 20
"""The first stream of each kind; overlapping spans are spread over the streams above it."""
FIRST_CORRELATION = 1 << 20
"""A large number, because HTA 0.5 stores row indices in the smallest type that holds the correlations."""
STEPS_TID, LAUNCH_TID, HOST_TID = 1, 2, 3
NOTE = (
    "pseudo-rank of one device, written by dpbench: kernels are phases; ncclKernel_* are the device's scatter, "
    "replicate, gather and reduce, whatever moved the data; a kernel's launch is at the start of its span (host clock) "
    "or of its step (CUDA events)"
)


def split(run_id: str, provenance: Mapping[str, Any], trial: Trial, labels: Labels, folder: Path) -> list[Path]:
    """Write one file per device into `folder`, which is created if it does not exist; return the files' paths.

    Raises ValueError if the trial has no span in a timed step, or if the folder contains traces already, because HTA
    reads all traces in a folder.
    """
    timed = {number for number, step in enumerate(trial.steps) if not step.warmup}
    spans = [span for span in trial.spans if span.step in timed]
    devices = sorted({span.device for span in spans} - {HOST})
    if not devices:
        raise ValueError(f"{trial.case.label} has no span in a timed step, so it cannot be split by device")
    folder.mkdir(parents=True, exist_ok=True)
    stale = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".gz"))
    if stale:
        raise ValueError(f"{folder} already contains {', '.join(stale[:3])}; give --split a folder without traces")
    facts = {
        "run_id": run_id, "title": title(trial, labels), "labels": labels(trial), "case": trial.case.to_dict(),
        "note": NOTE, "provenance": {**nameless(provenance), **trial.provenance},
    }  # fmt: skip
    zero_s = min([trial.steps[number].start_s for number in timed] + [span.start_s for span in spans])
    paths = []
    for device in devices:
        mine = [span for span in spans if span.device == device]
        paths.append(folder / f"rank-{device}.json")
        with paths[-1].open("w") as out:
            # HTA looks for the rank in the first line that has one
            rank = {"backend": "dpbench", "rank": device, "world_size": len(devices)}
            out.write(
                f'{{"schemaVersion": 1,\n"distributedInfo": {json.dumps(rank)},\n"otherData": {json.dumps(facts)},'
            )
            out.write('\n"displayTimeUnit": "ms",\n"traceEvents": [\n')
            out.write(",\n".join(_events(device, trial.steps, mine, zero_s)))
            if device == devices[0]:  # the host's spans are written to the first device's file
                out.writelines(",\n" + event for event in _host(device, spans, zero_s))
            out.write("\n]}\n")
    return paths


def _events(device: int, steps: Sequence[Step], spans: Sequence[Span], zero_s: float) -> Iterator[str]:
    """Yield the steps, and each span as a kernel with its launch."""
    yield meta("process_name", device, 0, name=f"device {device}")
    ends = 0
    for number, step in enumerate(steps):
        if not step.warmup:
            start, ends = _us(step.start_s, zero_s), _us(step.end_s, zero_s)
            yield _complete(f"ProfilerStep#{number}", "user_annotation", device, STEPS_TID, start, ends)
    yield _complete(f"ProfilerStep#{len(steps)}", "user_annotation", device, STEPS_TID, ends, ends)
    correlation = FIRST_CORRELATION
    for first, communicates in ((COMPUTE_STREAM, False), (COMMUNICATION_STREAM, True)):
        chosen = [(one.start_s, one.end_s, one) for one in spans if (one.phase in COMMUNICATION) is communicates]
        for lane, start, end, span in lanes(chosen, zero_s, nested=False):
            correlation += 1
            cause = span.start_s if span.clock == "host" else steps[span.step].start_s
            at = _us(cause, zero_s)
            name = f"ncclKernel_{span.phase}" if communicates else str(span.phase)
            stream = first + lane
            args = {"device": device, "stream": stream, "correlation": correlation, "step": span.step}
            launch = {"correlation": correlation}
            yield _complete("cudaLaunchKernel", "cuda_runtime", device, LAUNCH_TID, at, at, launch)
            yield _complete(name, "kernel", device, stream, _whole(start), _whole(end), args)


def _host(device: int, spans: Sequence[Span], zero_s: float) -> Iterator[str]:
    """Yield the host's spans as operators."""
    mine: list[Timed[Span]] = [(one.start_s, one.end_s, one) for one in spans if one.device == HOST]
    for lane, start, end, span in lanes(mine, zero_s):
        yield _complete(
            str(span.phase), "cpu_op", device, HOST_TID + lane, _whole(start), _whole(end), {"step": span.step}
        )


def _us(at_s: float, zero_s: float) -> int:
    """Return a time as whole microseconds after `zero_s`, rounded in the same way as the spans."""
    return _whole(ticks(at_s - zero_s))


def _whole(found: int) -> int:
    """Return ticks as whole microseconds."""
    return round(found / TICKS)


def _complete(
    name: str, category: str, pid: int, tid: int, start_us: int, end_us: int, args: dict[str, int] | None = None
) -> str:
    """Return a complete event as JSON."""
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start_us}
    return json.dumps({**event, "dur": end_us - start_us, "args": args or {}})
