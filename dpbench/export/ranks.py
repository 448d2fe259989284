"""Ranks: one trial as a folder of PyTorch-profiler-like traces, one pseudo-rank a device.

Holistic Trace Analysis reads one rank a file, and knows kernels, streams and the launches that caused them. A device's
spans become kernels, each with a launch:

* scatter, replicate, gather and reduce are named `ncclKernel_*`, because that is how HTA tells communication: no NCCL
  need have run. They have streams of their own, so that overlap with computation is seen.
* A phase of the host's clock was launched when it began. When a phase of CUDA events was launched nobody knows; its
  launch stands at the beginning of the step, so HTA's "host_wait" speaks of gaps between steps alone.
* Warm-up steps are left out. HTA drops the last step of a trace as incomplete: an empty one is put behind the last.
* Times are whole microseconds: HTA rounds fractions off, and would make short spans negative.
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
"""The first stream of each kind; spans that overlap are spread over the streams above."""
FIRST_CORRELATION = 1 << 20
"""A wide number from the first on: HTA 0.5 keeps rows' indices in the type that the correlations fit in."""
STEPS_TID, LAUNCH_TID, HOST_TID = 1, 2, 3
NOTE = (
    "pseudo-rank of one device, written by dpbench: kernels are phases; ncclKernel_* are its scatter, replicate, "
    "gather and reduce, whatever moved the data; launches stand at the start of a span (host clock) or of its step "
    "(CUDA events)"
)


def split(run_id: str, provenance: Mapping[str, Any], trial: Trial, labels: Labels, folder: Path) -> list[Path]:
    """Write one file a device into `folder`, made if need be; return their paths.

    ValueError where the trial has no span in a timed step, or where the folder holds traces already: HTA reads all
    that it finds there.
    """
    timed = {number for number, step in enumerate(trial.steps) if not step.warmup}
    spans = [span for span in trial.spans if span.step in timed]
    devices = sorted({span.device for span in spans} - {HOST})
    if not devices:
        raise ValueError(f"{trial.case.label} has no span in a timed step: there is nothing to split by device")
    folder.mkdir(parents=True, exist_ok=True)
    stale = sorted(path.name for path in folder.iterdir() if path.suffix in (".json", ".gz"))
    if stale:
        raise ValueError(f"{folder} holds {', '.join(stale[:3])} already; give --split a folder without traces")
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
            if device == devices[0]:  # which shares its process with the host
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
    """Yield the host's own spans as operators."""
    mine: list[Timed[Span]] = [(one.start_s, one.end_s, one) for one in spans if one.device == HOST]
    for lane, start, end, span in lanes(mine, zero_s):
        yield _complete(
            str(span.phase), "cpu_op", device, HOST_TID + lane, _whole(start), _whole(end), {"step": span.step}
        )


def _us(at_s: float, zero_s: float) -> int:
    """Return whole microseconds after `zero_s`, rounded as the spans' are."""
    return _whole(ticks(at_s - zero_s))


def _whole(found: int) -> int:
    """Return ticks as whole microseconds."""
    return round(found / TICKS)


def _complete(
    name: str, category: str, pid: int, tid: int, start_us: int, end_us: int, args: dict[str, int] | None = None
) -> str:
    """Return a complete event."""
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start_us}
    return json.dumps({**event, "dur": end_us - start_us, "args": args or {}})
