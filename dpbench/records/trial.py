"""Trial: the measurements of one case.

Times are seconds on the machine's monotonic clock; sizes are bytes. Version 2 of the schema added
the memory by phase and by kind, and the device that failed. In version 3, the schedule "allreduce"
keeps parameters apart and adds gradients after backward; before, it had flat storage and added them
during backward.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import compress
from typing import Any, Self, get_type_hints

import msgspec

from dpbench.records import hidden, visible
from dpbench.records.case import Case, Phase
from dpbench.records.errors import UsageError
from dpbench.records.facts import TrialFacts
from dpbench.records.fake import fake_gpus
from dpbench.records.grouping import grouped
from dpbench.records.ledger import Ledger
from dpbench.records.series import Sample, Samples, Series, Span, Step, Steps

SCHEMA = 3
EARLIER_ALLREDUCE = "allreduce (flat, overlap)"
"""The name under which the schedule "allreduce" of schemas below 3 is shown."""
LONGEST_S = 1e9
"""The duration of a step, about 32 years, from which on the clock must be wrong."""


CHECK_FAILED = "the check of the"
"""The beginning of the reason of a trial that did not run because its model failed the check."""
SPENT = "not measured, because the run's budget"
"""The beginning of the reason of a round of a case that was left out for lack of time."""
ALONE = "step_alone_s"
"""The seconds of a baseline step that all machines of a launch run at once, without communication.
"""


class Source(StrEnum):
    """The origin of a trial: a measurement, a prediction, or an imported profiler trace.

    `timed` is whether the steps were timed on a machine, `profiled` whether a profiler, which slows
    the host, ran beside them, and `level` that of the step time's interval.
    """

    timed: bool
    profiled: bool
    level: str

    MEASURED = "measured", True, False, "95%"
    PREDICTED = "predicted", False, False, "80%"
    IMPORTED = "imported", True, True, "95%"

    def __new__(cls, name: str, timed: bool, profiled: bool, level: str) -> Self:  # noqa: D102
        source = str.__new__(cls, name)
        source._value_ = name
        source.timed, source.profiled, source.level = timed, profiled, level
        return source


Key = tuple[Case, Source]
"""A case, and the source of its trials."""


class Status(StrEnum):
    """The status of a trial that ended.

    It is `killed` if the run ended before the trial, or if a fault that has nothing to do with the
    case, such as a signal of another process, ended both attempts, and `skipped` if the case cannot
    run here, or if the run's budget was spent before. A resumed run repeats these trials, and
    others only if the option `retry` lists their status.
    """

    OK = "ok"
    OOM = "oom"
    FAILED = "failed"
    TIMEOUT = "timeout"
    KILLED = "killed"
    SKIPPED = "skipped"


FINAL = (Status.OK, Status.OOM, Status.FAILED, Status.TIMEOUT, Status.SKIPPED)
"""The statuses of trials that ended by themselves."""


class Fault(StrEnum):
    """The reason why a trial of status `ok` has no usable step times."""

    UNVERIFIED = "unverified"
    CLOCK = "bad clock"
    UNTIMED = "untimed"


class Verified(StrEnum):
    """The comparison of a step's gradients, or a forward's outputs, with the chunked reference.

    This reference runs copies of the model on the chunks of the batch, one after the other. The
    best result is the first member.
    """

    BITWISE = "bitwise"
    WITHIN_TOLERANCE = "within_tolerance"
    NOT_APPLICABLE = "not_applicable"
    NO = "no"


@dataclass(frozen=True)
class Memory:
    """The peak memory of one device, in one phase or, if `phase` is empty, in whole steps.

    `source` is allocator (torch's statistics), rss (the resident memory of the process) or ledger
    (the byte count of emulated devices). `kind` is allocated (by tensors, or by the process) or
    reserved (by the allocator from the driver).
    """

    device: int
    peak_bytes: int
    source: str
    phase: str = ""
    kind: str = "allocated"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One measurement or prediction of a case: recorded data only.

    `round` is the index of the round. `reason` explains a status other than `ok`. `setup` maps the
    stages of the trial, such as verification, to seconds. `provenance` has the facts that are
    needed to reproduce the numbers, as plain data; `facts` has those that dpbench reads.
    `failed_device` is the index of the device that failed first, if any.
    """

    case: Case
    source: Source = Source.MEASURED
    status: Status = Status.OK
    reason: str = ""
    verified: Verified = Verified.NOT_APPLICABLE
    steps: Sequence[Step] = ()
    spans: tuple[Span, ...] = ()
    samples: Sequence[Sample] = ()
    memory: tuple[Memory, ...] = ()
    setup: Mapping[str, float] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    round: int = 0
    started_s: float = 0.0
    """Seconds since the epoch."""
    failed_device: int | None = None

    @cached_property
    def facts(self) -> TrialFacts:
        """Return what the trial states. Raises ValueError for a fact of a wrong type."""
        return TrialFacts.of(self.provenance)

    @cached_property
    def ledger(self) -> Ledger:
        """Return the seconds of each step by phase."""
        return Ledger(self.steps, self.spans)

    def summary(self) -> Trial:
        """Return the trial with its computed ledger, and only the spans of the median step.

        Do not pass it to `dataclasses.replace`: the new trial would compute its ledger from no
        spans.
        """
        return replace(self, spans=()).with_ledger(self.ledger.close())

    def with_ledger(self, ledger: Ledger) -> Trial:
        """Set the ledger, which cannot be computed without spans, and return the trial."""
        self.__dict__["ledger"] = ledger
        return self

    def adding(self, facts: Mapping[str, Any], **seconds: float) -> Trial:
        """Return the trial with further facts in its provenance, and stages in its setup."""
        setup = {**self.setup, **seconds}
        return replace(self, provenance={**self.provenance, **facts}, setup=setup)

    def readings(self, metric: str, *, timed: bool = False) -> dict[int, list[float]]:
        """Return the values of a metric by device, in the order of the readings.

        With `timed`, readings before the end of warm-up are left out.
        """
        steps = self.by_column
        warm_s = max(compress(steps.ends, steps.warmup) if timed else (), default=float("-inf"))
        # readings of a profiled step, which is outside the series, have time 0
        by_device = {
            device: [
                value
                for time_s, value in zip(*series, strict=True)
                if time_s > warm_s or time_s == 0.0
            ]
            for device, series in self.grouped.series(metric).items()
        }
        return {device: values for device, values in by_device.items() if values}

    def within(self, metric: str) -> dict[int, Series]:
        """Return the readings of a metric by device that were taken while steps were timed.

        Counters of GPUs are sampled during the whole trial. Without timed steps, all readings are
        returned.
        """
        start_s, end_s = self.window
        found = {}
        for device, series in self.grouped.series(metric).items():
            inside = [start_s <= time_s <= end_s for time_s in series.times]
            if any(inside):
                columns = (list(compress(column, inside)) for column in series)
                found[device] = Series(*columns)
        return found

    @property
    def key(self) -> Key:
        """Return what the trials of one row of a table have in common."""
        return self.case, self.source

    @cached_property
    def window(self) -> tuple[float, float]:
        """Return the start and the end of the timed steps in seconds; unlimited without any."""
        steps = self.by_column
        ends = steps.timed(steps.ends)
        if not ends:
            return float("-inf"), float("inf")
        return ends[0] - steps.timed(steps.seconds)[0], ends[-1]

    @cached_property
    def by_column(self) -> Steps:
        """Return the trial's steps by column."""
        return Steps.of(self.steps)

    @cached_property
    def grouped(self) -> Samples:
        """Return the samples, grouped by device and metric."""
        return Samples.of(self.samples)

    @property
    def on_fake_gpus(self) -> bool:
        """Return whether the trial ran on fake GPUs, or was predicted for them."""
        return self.case.device_kind == "cuda" and fake_gpus(self.facts)

    @cached_property
    def timed(self) -> tuple[float, ...]:
        """Return the seconds of the steps that are not warm-up."""
        steps = self.by_column
        return tuple(steps.timed(steps.seconds))

    @cached_property
    def fault(self) -> Fault | None:
        """Return the reason why a trial of status `ok` has no usable step times, if any."""
        if self.status is not Status.OK:
            return None
        if self.verified is Verified.NO:
            return Fault.UNVERIFIED
        if self._impossible_s is not None:
            return Fault.CLOCK
        return None if self.timed else Fault.UNTIMED

    @property
    def refusal(self) -> str:
        """Return, as text, the reason why the trial has no usable step times; "" if it has them."""
        if self.status is Status.OK and self.fault is None:
            return ""
        reasons = {
            Fault.CLOCK: (
                f"the clock is wrong: a timed step took {self._impossible_s} s; a duration must be"
                f" above 0 and below {LONGEST_S:.0e} s"
            ),
            Fault.UNTIMED: "no step was timed",
        }
        return reasons.get(self.fault or Fault.UNVERIFIED) or self.reason or "no reason given"

    @property
    def _impossible_s(self) -> float | None:
        return next((seconds for seconds in self.timed if not 0 < seconds < LONGEST_S), None)

    @property
    def trusted(self) -> bool:
        """Return whether the trial's numbers may be shown.

        A trial without timed steps may have other numbers, such as memory peaks.
        """
        return self.status is Status.OK and self.fault in (None, Fault.UNTIMED)

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as plain data for JSON, with series by column."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain["case"] = self.case.to_dict()
        plain["setup"] = dict(self.setup)
        plain["provenance"] = dict(self.provenance)
        for name, kind in _SERIES.items():
            rows = getattr(self, name)
            plain[name] = {f.name: [getattr(row, f.name) for row in rows] for f in fields(kind)}
        return plain

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """Return the trial from the data that `to_dict` returned, also after JSON.

        Control characters in the texts are escaped, and the schedule has the name of `in_schema`.
        Raises ValueError for a schema newer than `SCHEMA`, and for a value of a wrong type.
        """
        values = dict(data)
        values["case"] = in_schema(Case.from_dict(values["case"]), values.get("schema", SCHEMA))
        values["reason"] = hidden.text(visible.visible(values.get("reason", ""), lines=True))
        values["setup"] = visible.everywhere(values.get("setup", {}))
        values["provenance"] = hidden.everywhere(visible.everywhere(values.get("provenance", {})))
        for name, kind in _SCALARS.items():
            if name in values:
                values[name] = msgspec.convert(values[name], kind)
        for name, record in _SERIES.items():
            kinds = get_type_hints(record)
            columns = {
                field: msgspec.convert(column, list[kinds[field]])  # type: ignore[valid-type]
                for field, column in (values.get(name) or {}).items()
            }
            # records of an older schema lack the last fields, which have defaults
            known = [f.name for f in fields(record) if f.name in columns or f.default is MISSING]
            rows = zip(*(visible.column(columns.get(field, ())) for field in known), strict=True)
            values[name] = tuple(record(*row) for row in rows)
        return cls(**values)


def by_key(trials: Iterable[Trial]) -> dict[Key, list[Trial]]:
    """Return the trials of each case and source, in their order."""
    return grouped((trial.key, trial) for trial in trials)


def by_case(trials: Iterable[Trial]) -> dict[Case, list[Trial]]:
    """Return the trials of each case, in their order."""
    return grouped((trial.case, trial) for trial in trials)


def in_schema(case: Case, schema: int) -> Case:
    """Return the case of a trial of `schema`, with a schedule that means the same in this version.

    Only "allreduce" has changed its meaning: the earlier one gets another name, so that no
    comparison mixes the two. Raises ValueError for a schema newer than `SCHEMA`.
    """
    if schema > SCHEMA:
        raise UsageError(
            f"the trial has schema {schema}, but dpbench reads only schemas up to {SCHEMA}: update"
            " dpbench"
        )
    changed = schema < 3 and case.schedule == "allreduce"
    return replace(case, schedule=EARLIER_ALLREDUCE) if changed else case


def only(trial: Trial, kept: Sequence[int]) -> Trial:
    """Return a trial with the spans and the steps of `kept` only, which are numbered from 0."""
    numbers = {old: new for new, old in enumerate(kept)}
    return replace(
        trial,
        steps=tuple(trial.steps[old] for old in kept),
        spans=tuple(
            replace(span, step=numbers[span.step]) for span in trial.spans if span.step in numbers
        ),
    )


def joined(parts: Sequence[Trial]) -> tuple[tuple[Step, ...], tuple[Span, ...]]:
    """Return the steps and the spans of all ranks, merged as if they came from one process.

    `parts` are the trials of the ranks. Each step is that of the rank that finished it last. A
    reduction starts only when the last rank arrives (`matched_reductions`): each rank's reduce span
    is cut to begin at that time, and a backward span that contains the beginning of a reduce span
    of its rank is cut to end there. The time in which ranks wait for the last rank is thus charged
    to the last rank's spans.
    """
    steps = tuple(
        max(row, key=lambda step: step.end_s)
        for row in zip(*(part.steps for part in parts), strict=False)
    )
    spans = [span for part in parts for span in part.spans]
    arrived: dict[int, float] = {}
    for alike in matched_reductions(spans):
        last_s = max(span.start_s for span in alike)
        arrived |= {id(span): last_s for span in alike}
    starts: dict[tuple[int, int], list[float]] = {}
    for span in spans:
        if span.phase is Phase.REDUCE:
            starts.setdefault((span.step, span.device), []).append(span.start_s)

    def cut(span: Span) -> Span:
        if span.phase is Phase.REDUCE:
            return replace(span, start_s=min(span.end_s, arrived.get(id(span), span.start_s)))
        if span.phase is not Phase.BACKWARD:
            return span
        own = starts.get((span.step, span.device), ())
        inside = [start_s for start_s in own if span.start_s <= start_s < span.end_s]
        return replace(span, end_s=min(inside, default=span.end_s))

    return steps, tuple(map(cut, spans))


def matched_reductions(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the reduce spans of each reduction, one per device.

    The first of a step on each device belong together, then the second, and so on. A step in which
    devices have different numbers of them has none. A span on a GPU's clock is an exposed part of a
    reduction: such spans belong together only if all overlap, because parts may be hidden.
    """
    steps: dict[int, dict[int, list[Span]]] = {}
    for span in spans:
        if span.phase is Phase.REDUCE:
            steps.setdefault(span.step, {}).setdefault(span.device, []).append(span)
    for by_device in steps.values():
        ranks = [sorted(own, key=lambda span: span.start_s) for own in by_device.values()]
        if len({len(own) for own in ranks}) == 1:
            for alike in zip(*ranks, strict=True):
                overlap = max(one.start_s for one in alike) <= min(one.end_s for one in alike)
                if overlap or alike[0].clock != "cuda_event":
                    yield [*alike]


_SCALARS: dict[str, Any] = {
    "source": Source,
    "status": Status,
    "verified": Verified,
    "reason": str,
    "schema": int,
    "round": int,
    "started_s": float,
    "setup": dict[str, float],
    "failed_device": int | None,
}
"""The types of fields for which `Trial` itself states more general ones."""
_SERIES: dict[str, Any] = {"steps": Step, "spans": Span, "samples": Sample, "memory": Memory}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure of a case, or of one rank of the case.

    `reason` is a message for the user; no decision depends on its text. `device` is the index of
    the case's device that failed first, if known. `verified` is NO if the gradients were wrong.
    `at_s` is the time at which the rank raised an exception, or at which its process was found
    dead, in seconds on a clock that all ranks share: `time.perf_counter` or, in a launch, the time
    since a barrier. `exception` is the name of the exception's class, and `traceback` is Python's
    traceback. If the process ended without an exception, both are empty, and `exit_status` is that
    of the process, negative for a signal. `perhaps_secondary` is True for a RuntimeError other than
    lack of memory: torch raises this type also in a rank whose peer has died.
    """

    status: Status
    reason: str
    device: int | None = None
    rank: int | None = None
    verified: Verified = Verified.NOT_APPLICABLE
    at_s: float = 0.0
    exception: str = ""
    traceback: str = ""
    perhaps_secondary: bool = False
    exit_status: int | None = None

    def to_json(self) -> str:
        """Return this record as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record from the text that `to_json` returned."""
        return msgspec.convert(json.loads(text), cls)


def in_order(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    """Return the failures in order of time, except that the likely cause comes first.

    When a process dies, its connections close before its parent detects the death, and other ranks
    may report a lost connection first. If the earliest failure may be such a report, the earliest
    record of a rank that died or ran out of memory is moved to the front.
    """
    by_time = sorted(failures, key=lambda failure: failure.at_s)
    causes = [one for one in by_time if not one.exception or one.status is Status.OOM]
    if by_time and by_time[0].perhaps_secondary and causes:
        return causes[0], *(one for one in by_time if one is not causes[0])
    return tuple(by_time)


def cause_of(failures: Sequence[Failure], case: Case) -> Failure:
    """Return the failure of a case's ranks that likely caused the others.

    Its `device` is None if each rank has several devices, because a rank does not report which of
    them ran out of memory.
    """
    first = in_order(failures)[0]
    return first if case.traits.devices_per_replica == 1 else replace(first, device=None)
