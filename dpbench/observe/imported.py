"""Imported: make trials of profiler traces, one case for each loop, and store them as a run.

Traces of different ranks of one process group belong to one case. The clocks of their machines may
differ. dpbench aligns them by the ends of the collectives: no rank leaves an all-reduce before the
last one has arrived, so its kernels end at almost the same moment on all ranks.

The busy times cover all work in the file, without rounding. Holistic Trace Analysis leaves out the
work launched after the last `ProfilerStep` has begun, and rounds the start of each kernel up and
its end down to whole microseconds, so its times are about 1 % lower for kernels of 100
microseconds.
"""

from __future__ import annotations

import gc
import hashlib
import re
import shlex
import statistics
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dpbench.hardware import provenance
from dpbench.measure.merging import arrivals, shifted
from dpbench.observe import kineto, parts, possible
from dpbench.observe.attribution import Attributed, attribute
from dpbench.observe.kineto import GRADIENT, DeviceEvent, TraceEvents
from dpbench.observe.possible import Doubt
from dpbench.observe.stretches import LOADER
from dpbench.records import HOST, Case, Phase, Sample, Source, Trial, words
from dpbench.records.activity import (
    HOST_READS,
    HOST_WAITS,
    Activity,
    Busy,
    Kind,
    busy,
)
from dpbench.records.errors import UsageError
from dpbench.records.facts import stated
from dpbench.records.observed import (
    SCRIPT,
    WITHOUT_LOADER,
    Observed,
    Unknown,
    traits,
)
from dpbench.records.registry import Parallelism, Reduction
from dpbench.records.trial import joined, only
from dpbench.store import Identity, Naming, Store

LEAST = 3
"""The least number of common collectives that suffices to align two clocks."""
WIDEST_S = 0.01
"""The largest accepted deviation of a collective from the clocks' median difference."""
_WAITS = (Phase.DATA, Phase.SCATTER, Phase.READ)
"""The phases in which a host waits: for a batch, for a blocking copy, or for a value."""
_WRAPPER = re.compile(r"^(?:(\w*DataParallel)\.forward$|(FSDP)::)")


@dataclass(frozen=True, kw_only=True)
class Aligned:
    """The correction of a rank's clock: `shift_s` is added to give times of the first rank's clock.

    `shift_s` is the median difference between the ranks' ends of `collectives` collectives.
    `uncertainty_s` is the largest deviation from it, which includes the time by which one rank
    leaves a collective after the other.
    """

    shift_s: float
    uncertainty_s: float
    collectives: int


@dataclass(frozen=True, kw_only=True)
class ImportedTrace:
    """One trace: its events (`profile`), and its steps and phases (`attributed`).

    `doubts` are those about its events. `indices` maps a device's number in the file to its index
    in the case. `aligned` corrects the clock to that of the first rank; None for the first rank,
    and if unknown.
    """

    profile: TraceEvents
    attributed: Attributed
    doubts: Sequence[Doubt]
    indices: Mapping[int, int]
    aligned: Aligned | None = None

    @property
    def hidden(self) -> bool:
        """Return whether no phase of the trace is known."""
        return any(doubt.hides_phases for doubt in self.doubts)


@dataclass(frozen=True, kw_only=True)
class ImportedLoop:
    """One training loop: its traces, one for each rank, and the trial of all its steps."""

    traces: tuple[ImportedTrace, ...]
    trial: Trial

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences about what the traces lack and what is not known of the loop."""
        first = self.traces[0].profile
        facts = self.trial.facts.loop
        missing = first.world_size - len(self.traces)
        return (
            *(
                [f"the traces of {missing} of {first.world_size} ranks were not given"]
                if missing > 0
                else []
            ),
            *(
                ["the trace does not contain the number of DataLoader workers"]
                if _workers(first) is None
                else []
            ),
            *(one.problem for one in (facts.unknown if facts else ())),
        )


def load(paths: Sequence[Path], batch_size: int = 0) -> list[ImportedLoop]:
    """Return the training loops that trace files describe.

    `batch_size` is the number of samples in a step of one process, 0 if it is unknown.
    Raises UnreadableFile if a file is not a trace, and ValueError if one is given twice, or if two
    are of the same rank of one group.
    """
    resolved = [path.resolve() for path in paths]
    for number, path in enumerate(paths):
        if resolved[number] in resolved[:number]:
            raise UsageError(f"{path} is given twice: give each trace once")
    collects = gc.isenabled()
    # hundreds of thousands of events without cycles: the collector would take a third of the time
    gc.disable()
    try:
        groups = _groups([kineto.read(path) for path in paths])
        return [_loop(profiles, batch_size) for profiles in groups]
    finally:
        if collects:
            gc.enable()


def _groups(profiles: Sequence[TraceEvents]) -> Iterator[list[TraceEvents]]:
    """Yield the traces of each training loop, sorted by rank.

    All traces with the same world size above 1 are one loop; every other trace is its own.
    """
    groups: dict[Any, list[TraceEvents]] = {}
    for number, profile in enumerate(profiles):
        groups.setdefault(
            ("world", profile.world_size) if profile.world_size > 1 else number, []
        ).append(profile)
    for group in groups.values():
        group.sort(key=lambda profile: profile.rank)
        for one, other in pairwise(group):
            if one.rank == other.rank:
                raise UsageError(
                    f"{one.file} and {other.file} are both of rank {one.rank} of {one.world_size}:"
                    " import the traces of each run with a separate command"
                )
        yield group


def _loop(profiles: Sequence[TraceEvents], batch_size: int) -> ImportedLoop:
    traces: list[ImportedTrace] = []
    taken = 0
    for profile in profiles:
        devices = sorted({event.device for event in profile.device}) or [0]
        indices = {device: taken + place for place, device in enumerate(devices)}
        attributed = attribute(profile)
        trace = ImportedTrace(
            profile=profile,
            attributed=attributed,
            doubts=possible.judged(profile, attributed),
            indices=indices,
            aligned=align(profiles[0], profile) if traces else None,
        )
        traces.append(trace)
        taken += len(devices)
    return ImportedLoop(traces=tuple(traces), trial=_trial(traces, batch_size))


def _trial(traces: Sequence[ImportedTrace], batch_size: int) -> Trial:
    names = [trace.attributed.names for trace in traces]
    everywhere = set(names[0]).intersection(*names[1:])
    common = [name for name in names[0] if name in everywhere]
    collectives = list(_matched(traces))
    late_us = _last_arrivals(collectives, traces[0])
    ranks = [_part(trace, traces[0], common, late_us) for trace in traces]
    steps, spans = joined(ranks) if len(ranks) > 1 else (ranks[0].steps, ranks[0].spans)
    return replace(
        ranks[0],
        case=replace(_case(traces), batch_size=batch_size * len(traces)),
        steps=steps,
        spans=() if any(trace.hidden for trace in traces) else spans,
        samples=(
            *(sample for rank in ranks for sample in rank.samples),
            *_arrivals(collectives, traces[0]),
        ),
        provenance={
            **stated(loop=_observed(traces, common)),
            "trace": _facts(traces),
            "gpus": _gpus(traces),
            **_model(traces[0], batch_size),
        },
        setup={"steps_s": sum(step.seconds for step in steps)},
    )


def _part(
    trace: ImportedTrace,
    first: ImportedTrace,
    common: Sequence[str],
    late_us: Mapping[int, float],
) -> Trial:
    """Return the trial of one rank, with the first rank's clock and the case's device indices.

    `late_us` is the result of `_last_arrivals`.
    """
    attributed = trace.attributed
    indices = {HOST: HOST, **trace.indices}
    kept = [number for number, name in enumerate(attributed.names) if name in common]
    part = Trial(
        case=_case([trace]),
        source=Source.IMPORTED,
        reason="the trace ended",
        steps=attributed.steps,
        spans=tuple(replace(span, device=indices[span.device]) for span in attributed.spans),
        samples=tuple(_samples(attributed, _working(trace, late_us), kept, trace.indices)),
        started_s=time.time(),
    )
    return shifted(only(part, kept), _on_first(trace.profile.zero_us, trace, first.profile))


def _working(trace: ImportedTrace, late_us: Mapping[int, float]) -> Iterator[Activity]:
    """Yield the activities of a trace; a collective begins when the last rank has arrived."""
    zero_us = trace.profile.zero_us
    for event, activity in zip(trace.profile.device, trace.attributed.activities, strict=True):
        start_s = (late_us.get(id(event), event.start_us) - zero_us) / 1e6
        yield activity._replace(start_s=min(activity.end_s, max(activity.start_s, start_s)))


def _samples(
    attributed: Attributed,
    activities: Iterable[Activity],
    numbers: Sequence[int],
    indices: Mapping[int, int],
) -> Iterator[Sample]:
    """Yield, for the steps `numbers`, each active device's metrics, and the waits of its host.

    A device that does nothing in a step has a reading of 0 there.
    """
    active = sorted({activity.device for activity in attributed.activities})
    steps = [attributed.steps[number] for number in numbers]
    ends = [step.end_s for step in steps]
    within: list[list[Activity]] = [[] for _ in steps]
    for activity in activities:
        for number in range(bisect_right(ends, activity.start_s), len(steps)):
            start_s, end_s = (
                max(activity.start_s, steps[number].start_s),
                min(activity.end_s, ends[number]),
            )
            if start_s < end_s:
                within[number].append(activity._replace(start_s=start_s, end_s=end_s))
            if activity.end_s <= ends[number]:
                break
    for step, number, inside in zip(steps, numbers, within, strict=True):
        waited = attributed.host[number]
        waits = {
            HOST_READS: waited.get(Phase.READ, 0.0),
            HOST_WAITS: sum(waited.get(phase, 0.0) for phase in _WAITS),
        }
        found = busy(inside)
        for device in active:
            for metric, seconds in {**found.get(device, Busy()).metrics, **waits}.items():
                yield Sample(step.end_s, indices[device], metric, seconds)


_Matched = Sequence[tuple[ImportedTrace, DeviceEvent]]
"""One collective: the event of each rank, with its trace."""


def _matched(traces: Sequence[ImportedTrace]) -> Iterator[_Matched]:
    """Yield the collectives of which the arrivals of all ranks are known.

    None if the trace of a rank is missing, or if a clock could not be aligned.
    """
    complete = len(traces) == traces[0].profile.world_size and len(traces) > 1
    if not complete or any(trace.aligned is None for trace in traces[1:]):
        return
    found = [_collectives(trace.profile) for trace in traces]
    for name in found[0]:
        if len({len(one.get(name, ())) for one in found}) > 1:
            continue
        for events in zip(*(one[name] for one in found), strict=True):
            yield list(zip(traces, events, strict=True))


def _arrivals(collectives: Iterable[_Matched], first: ImportedTrace) -> Iterator[Sample]:
    """Yield each rank's wait for the last one in each collective."""
    for matched in collectives:
        yield from arrivals(
            [
                (
                    trace.indices[event.device],
                    _on_first(event.start_us, trace, first.profile),
                    _on_first(event.end_us, trace, first.profile),
                )
                for trace, event in matched
            ]
        )


def _last_arrivals(collectives: Iterable[_Matched], first: ImportedTrace) -> dict[int, float]:
    """Return when the last rank arrives at a collective, by the id of each rank's event.

    The times are microseconds on the clock of the event, earlier by what the clocks may differ:
    a collective is not made shorter than it is.
    """
    found = {}
    for matched in collectives:
        begins_s = [_on_first(event.start_us, trace, first.profile) for trace, event in matched]
        unsure_s = max(trace.aligned.uncertainty_s for trace, _ in matched if trace.aligned)
        for (_, event), begin_s in zip(matched, begins_s, strict=True):
            wait_s = max(begins_s) - begin_s - unsure_s
            found[id(event)] = event.start_us + 1e6 * wait_s
    return found


def _on_first(at_us: float, trace: ImportedTrace, first: TraceEvents) -> float:
    """Return a moment of a trace in seconds on the clock of the first rank's trial."""
    return (at_us - first.zero_us) / 1e6 + (trace.aligned.shift_s if trace.aligned else 0.0)


def _case(traces: Sequence[ImportedTrace]) -> Case:
    """Return the case of a loop, with the batch size 0, which means unknown."""
    first = traces[0].profile
    devices = sum(len(trace.indices) for trace in traces)
    ranks = first.world_size > 1
    parallelism = (
        Parallelism.RANKS if ranks else Parallelism.THREADS if devices > 1 else Parallelism.NONE
    )
    reduction = Reduction.SEPARATE if parallelism is Parallelism.THREADS else Reduction.OVERLAPPED
    numbers = tuple(device for trace in traces for device in sorted(trace.indices))
    on_gpus = any(trace.profile.on_gpus for trace in traces)
    named = on_gpus and len({*numbers}) == len(numbers) and numbers != tuple(range(devices))
    workers = _workers(first)
    return Case(
        model=re.sub(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$|\.gz$", "", first.name) or first.name,
        strategy=SCRIPT,
        batch_size=0,
        devices=devices,
        device_kind="cuda" if on_gpus else "cpu",
        device_ids=numbers if named else (),
        loader=0 if workers == 0 else -1,
        optimizer="+".join(sorted(traces[0].attributed.updates)).lower() or "none",
        declared=traits(parallelism, reduction),
    )


def _workers(profile: TraceEvents) -> int | None:
    """Return the number of DataLoader workers in the form of `Observed.loader_workers`.

    A trace shows whether there are workers, but not how many.
    """
    kinds = {found["kind"] for event in profile.host if (found := LOADER.match(event.name))}
    if not kinds:
        return WITHOUT_LOADER
    return 0 if "_SingleProcessDataLoaderIter" in kinds else None


def _observed(traces: Sequence[ImportedTrace], common: Sequence[str]) -> Observed:
    first = traces[0]
    copies = [
        event.name
        for trace in traces
        for event in trace.profile.device
        if event.name.startswith("Memcpy HtoD")
    ]
    pinned = not any("Pageable" in name for name in copies) if copies else None
    reads = sum(1 for phases in first.attributed.host if phases.get(Phase.READ.value))
    named = (found for event in first.profile.host if (found := _WRAPPER.search(event.name)))
    wrapper = next((found[1] or found[2] for found in named), "")
    return Observed(
        command=shlex.join(trace.profile.file for trace in traces),
        wrapper=wrapper,
        batches=_passes(first),
        updates=_passes(first),
        loader_workers=_workers(first.profile),
        pinned=pinned,
        reads=(
            {"a wait for a device (the trace does not give its line in the script)": reads}
            if reads
            else {}
        ),
        unknown=(
            *_problems(traces, common),
            *(
                Unknown(problem=note, steps=0)
                for trace in traces
                for note in trace.attributed.notes
            ),
        ),
    )


def _passes(trace: ImportedTrace) -> int:
    """Return the usual number of backward passes of a step."""
    backwards = trace.attributed.backwards
    return max(1, round(statistics.median(backwards))) if backwards else 1


def _problems(traces: Sequence[ImportedTrace], common: Sequence[str]) -> Iterator[Unknown]:
    first = traces[0].profile
    steps = len(common)
    if not common:
        problem = (
            "no step is in all traces: call the profiler's `step()` after each step, and record the"
            " same steps in all"
        )
        yield Unknown(problem=problem, steps=steps)
    for trace in traces:
        for doubt in trace.doubts:
            unknown = "; its phases are unknown" if doubt.hides_phases else ""
            problem = f"{trace.profile.name}: {doubt.says}{unknown}"
            yield Unknown(problem=problem, steps=steps, hides_phases=doubt.hides_phases)
    for trace in traces[1:]:
        if trace.aligned is None:
            problem = (
                f"the clock of rank {trace.profile.rank} could not be aligned with the clock of"
                f" rank {first.rank}: fewer than {LEAST} collectives match, or their ends deviate"
                f" by more than {WIDEST_S * 1e3:g} ms; the times of the two ranks are compared"
                " without a correction"
            )
            yield Unknown(problem=problem, steps=steps)


def _facts(traces: Sequence[ImportedTrace]) -> dict[str, Any]:
    files = [
        {
            "path": trace.profile.file,
            "rank": trace.profile.rank,
            "backend": trace.profile.backend,
            "clock": asdict(trace.aligned) if trace.aligned else None,
            "updates": dict(trace.attributed.updates),
            "steps": "devices" if trace.attributed.ahead_s else "host",
        }
        for trace in traces
    ]
    return {"world_size": traces[0].profile.world_size, "files": files}


def _model(trace: ImportedTrace, batch_size: int) -> dict[str, Any]:
    """Return the sizes of the model that a prediction needs, as a trial's fact.

    The gradients of a backward pass, the loss and the copies from the host give them. Empty without
    a batch size, or if the profiler did not record shapes.
    """
    host, attributed = trace.profile.host, trace.attributed
    gradients = [one.sizes_bytes[0] for one in host if one.name == GRADIENT and one.sizes_bytes]
    losses = [one.sizes_bytes[0] for one in host if one.name.endswith("_loss") and one.sizes_bytes]
    passes = sum(attributed.backwards)
    if not (batch_size and losses and passes and gradients) or len(gradients) % passes:
        return {}
    # with accumulated gradients, each backward pass has a part of the step's samples
    samples = batch_size / _passes(trace)
    norms = [one.sizes_bytes for one in host if one.name == "aten::batch_norm"]
    # the running mean and variance are as large as the weight, and a counter has 8 bytes
    buffers = sum(2 * sizes[1] + 8 for sizes in norms if len(sizes) > 1)
    copies = [one for one in trace.profile.device if one.name.startswith("Memcpy HtoD")]
    return {
        "model": {
            "parameter_tensors": len(gradients) // passes,
            "parameter_bytes": sum(gradients) // passes,
            "buffer_tensors": 3 * len(norms) // passes,
            "buffer_bytes": buffers // passes,
            "input_bytes": sum(one.size_bytes for one in copies) / passes / samples,
            "output_bytes": losses[0] / samples,
        }
    }


def _gpus(traces: Sequence[ImportedTrace]) -> dict[str, Any]:
    """Return the GPUs of the first trace's machine in the form of `nvml.describe`."""
    gpus = [
        {
            "index": gpu.id,
            **({"name": gpu.name} if gpu.name else {}),
            "memory_bytes": gpu.memory_bytes,
            "multiprocessors": gpu.multiprocessors,
        }
        for gpu in traces[0].profile.gpus
    ]
    return {"physical_gpus": len(gpus), "gpus": gpus}


def store(path: Path, loops: Sequence[ImportedLoop], naming: Naming) -> str:
    """Add a run with the loops to the store at `path`, and return the id of the run.

    It lists the GPUs of the first trace and not those of this machine, which measured nothing.
    """
    here = provenance.collect()
    facts = {
        **{name: here[name] for name in ("dpbench", "project", "command")},
        "host": {},
        "packages": {},
        "gpus": loops[0].trial.provenance["gpus"],
    }
    files = [trace.profile.file for loop in loops for trace in loop.traces]
    plan = hashlib.sha256("\n".join(["import", *files, str(time.time_ns())]).encode()).hexdigest()
    rounds = [part for loop in loops for part in parts(loop.trial)]
    with Store.create(path, naming) as opened:
        return opened.add(
            rounds, Identity(plan, "imported", here["dpbench"]["version"]), provenance=facts
        )


def described(loop: ImportedLoop) -> str:
    """Return a line on a loop: its files, steps and devices."""
    files = ", ".join(trace.profile.name for trace in loop.traces)
    steps = words.count(len(loop.trial.steps), "step")
    return f"{files}: {steps} on {words.count(loop.trial.case.devices, 'device')}"


def align(first: TraceEvents, other: TraceEvents) -> Aligned | None:
    """Return the correction of the clock of `other` to that of `first`; None if unreliable.

    It is unreliable if fewer than `LEAST` collectives match, or if one deviates from the median by
    more than `WIDEST_S`. A kind of collective that occurs a different number of times in the two
    traces, as in sampled traces, is ignored.
    """
    mine, theirs = _collectives(first), _collectives(other)
    differences = [
        (a.end_us - b.end_us) / 1e6
        for name in mine.keys() & theirs.keys()
        if len(mine[name]) == len(theirs[name])
        for a, b in zip(mine[name], theirs[name], strict=True)
    ]
    if len(differences) < LEAST:
        return None
    shift_s = statistics.median(differences)
    uncertainty_s = max(abs(one - shift_s) for one in differences)
    if uncertainty_s > WIDEST_S:
        return None
    return Aligned(shift_s=shift_s, uncertainty_s=uncertainty_s, collectives=len(differences))


def _collectives(profile: TraceEvents) -> dict[str, list[DeviceEvent]]:
    """Return the kernels of each kind of collective, in the order of their ends."""
    found: dict[str, list[DeviceEvent]] = {}
    for event in sorted(profile.device, key=lambda event: event.end_us):
        if event.kind is Kind.COMMUNICATION and not event.name.startswith("Memcpy"):
            name = event.collective or event.name.partition("(")[0]
            found.setdefault(name, []).append(event)
    return found
