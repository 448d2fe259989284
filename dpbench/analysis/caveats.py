"""Caveats: the problems that limit the conclusions from a run, each with its kind and its cases."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpbench.analysis import hosts, sampled, uneven, validity
from dpbench.analysis.summary import FAKE_GPU, Row, baseline_in
from dpbench.hardware import foreign_load
from dpbench.records import Case, Source, Status, Trial, fake, words
from dpbench.records.grouping import grouped
from dpbench.records.observed import observed
from dpbench.store import UnreadableRow

FINISHED, OPEN = "finished", "open"
"""The status of a run that has measured all of its cases."""
PARTS = (
    "the rounds of an observed loop are consecutive parts of one execution, so intervals leave out"
    " the variation between executions"
)
CLOCKS = 0.03
"""The largest difference of two cases' mean clocks, as a fraction, that is not a caveat."""
NAMES = 8
"""The largest number of cases that the text of one caveat names."""


@dataclass(frozen=True, kw_only=True)
class Caveat:
    """One problem that limits the conclusions.

    `kind` is the outcome of a case, such as "oom", the name of a check, such as "drift", or the
    subject of the problem, such as "hosts". `cases` maps cases to details, which may be empty;
    without cases, the problem concerns the whole run. `every` is True if the run has several cases,
    and all have the problem.
    """

    kind: str
    text: str
    cases: tuple[tuple[Case, str], ...] = ()
    every: bool = False

    def __str__(self) -> str:
        """Return the problem and its cases in one line, as in "oom: out of memory: vgg16 dp x4"."""
        return self.line(NAMES)

    def line(self, most: int) -> str:
        """Return the problem and the names of at most `most` of its cases in one line."""
        if not self.cases:
            return self.text
        if self.every:
            return f"{self.text}: all {words.count(len(self.cases), 'case')}"
        more = f" and {len(self.cases) - most} more" if len(self.cases) > most else ""
        return f"{self.text}: {', '.join(self.names[:most])}{more}"

    @property
    def names(self) -> list[str]:
        """Return the names of the cases, each with its detail, if any, in parentheses."""
        return [f"{case.label} ({detail})" if detail else case.label for case, detail in self.cases]


def caveats(
    rows: Sequence[Row],
    trials: Sequence[Trial],
    provenance: Mapping[str, Any],
    status: str = FINISHED,
    unreadable: Sequence[UnreadableRow] = (),
) -> list[Caveat]:
    """Return the caveats of a run.

    `status` is that of the run in the store; `unreadable` are the store's unreadable rows.
    """
    cores = provenance.get("host", {}).get("cores", 0)
    machines = [*hosts.warnings(provenance), *hosts.unlike(trials), *hosts.failures(trials)]
    return list(
        dict.fromkeys(
            [
                *_of_run(status, provenance),
                *_of_rows(unreadable),
                *(Caveat(kind="hosts", text=text) for text in machines),
                *_of_cases(rows, trials, cores),
                *_of_steps(rows),
                *_of_clocks(rows, trials, cores),
                *_of_devices(rows),
                *_of_loops(rows, trials),
                *_of_code(provenance),
            ]
        )
    )


def summary(problems: Sequence[Caveat]) -> str:
    """Return the numbers of kinds of problems and of cases, such as "3 kinds in 12 cases"."""
    cases = {case for caveat in problems for case, _ in caveat.cases}
    among = f" in {words.count(len(cases), 'case')}" if cases else ""
    return words.count(len({caveat.kind for caveat in problems}), "kind") + among


def _of_run(status: str, provenance: Mapping[str, Any]) -> Iterator[Caveat]:
    if status not in (FINISHED, OPEN):
        again = "repeat the same `dpbench run` command to continue it"
        yield Caveat(
            kind="incomplete", text=f"incomplete: the status of this run is {status}; {again}"
        )
    if reason := provenance.get(foreign_load.FACT, {}).get("unknown"):
        yield Caveat(
            kind=foreign_load.FACT,
            text=f"it is unknown whether other processes used the cores: {reason}",
        )


def _of_rows(unreadable: Sequence[UnreadableRow]) -> Iterator[Caveat]:
    places = sorted({(one.table, one.row) for one in unreadable})
    if places:
        amount = len(places)
        where = " and ".join(
            f"{', '.join(map(str, rows))} of the table {name}"
            for name, rows in grouped(places).items()
        )
        yield Caveat(
            kind="unreadable",
            text=(
                f"{words.count(amount, 'row')} of the store could not be read, and"
                f" {words.verb(amount, 'is', 'are')} left out: {where}"
            ),
        )


def _of_cases(rows: Sequence[Row], trials: Sequence[Trial], cores: int) -> Iterator[Caveat]:
    """Yield the caveats on cases and their trials; `cores` is 0 if unknown."""
    by_problem = grouped((problem, (row.case, "")) for row in rows for problem in _of_row(row))
    for rule, details in validity.troubles(trials, cores).items():
        by_problem[rule.name, rule.headline] = list(details.items())
    if lacking := validity.unchecked(trials, cores):
        few = (
            f"{sampled.NOT_CHECKED}, because NVML gave fewer than {sampled.READINGS} readings in"
            " the timed steps"
        )
        by_problem[sampled.NOT_CHECKED, few] = list(lacking.items())
    for (kind, text), cases in by_problem.items():
        yield Caveat(kind=kind, text=text, cases=tuple(cases), every=len(cases) == len(rows) > 1)


def _of_row(row: Row) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each problem of a row."""
    first = row.reason.partition("\n")[0] or "no reason given"
    if row.outcome != Status.OK:
        yield row.outcome, f"{row.outcome}: {first}"
    elif row.reason:
        yield "rounds", f"some rounds gave no result: {first}"
    remedy = "more steps" if row.case.traits.observed else words.REMEDY
    for name, estimate in (("step time", row.step), ("speed-up", row.speedup)):
        if estimate and estimate.doubt:
            few = f"{words.withheld(estimate)} for the {name} ({estimate.doubt})"
            yield "doubt", f"{few}; {remedy} would help"


def _of_steps(rows: Sequence[Row]) -> Iterator[Caveat]:
    cases = []
    for row in filter(uneven.differs, rows):
        assert row.step
        assert row.mean
        averages = f"the mean is {words.duration(row.mean)}, the median {words.duration(row.step)}"
        cases.append((row.case, averages))
    if cases:
        yield Caveat(
            kind="uneven",
            cases=tuple(cases),
            text=(
                "the mean step differs from the median step: samples/s and times of epochs are"
                " those of all steps, but step times and their ratios are medians"
            ),
        )


def _of_clocks(rows: Sequence[Row], trials: Sequence[Trial], cores: int) -> Iterator[Caveat]:
    """Yield the caveat on cases whose GPUs ran at another clock than those of their baseline."""
    clocks: dict[Case, dict[int, float]] = {}
    for trial in trials:
        clock_hz = validity.mean_clock_hz(trial, cores)
        if clock_hz and trial.trusted:
            clocks.setdefault(trial.case, {})[trial.round] = clock_hz
    series = {row.case: row.series for row in rows if row.case in clocks}
    cases = []
    for case in series:
        base = baseline_in(case, series)
        if base is None:
            continue
        common = clocks[case].keys() & clocks[base].keys() or None
        mine, other = (
            statistics.median(hz for n, hz in clocks[one].items() if common is None or n in common)
            for one in (case, base)
        )
        if abs(mine / other - 1) > CLOCKS:
            apart = f"{mine / 1e6:.0f} MHz, and {base.label} at {other / 1e6:.0f} MHz"
            cases.append((case, apart))
    if cases:
        yield Caveat(
            kind="clocks",
            cases=tuple(cases),
            text=(
                f"the GPUs ran at clocks that differ by more than {CLOCKS:.0%} from those of the"
                " baseline, so a part of the speed-up is that of the clock"
            ),
        )


def _of_devices(rows: Sequence[Row]) -> Iterator[Caveat]:
    cpu = [row for row in rows if row.case.device_kind == "cpu" and row.step]
    if max((row.case.devices for row in cpu), default=0) > 1:
        yield Caveat(
            kind="cpu",
            text=(
                "CPU-ONLY: logical CPU devices show whether schedules are correct and how long"
                " schedules take on a CPU, not the gain on GPUs"
            ),
        )
        if not any(row.case.traits.all_cores or row.case.traits.observed for row in cpu):
            yield Caveat(
                kind="cpu",
                text=(
                    "each logical CPU device has one thread; add the strategy single_all_cores to"
                    " compare with one device that uses all cores of the machine"
                ),
            )
    if any(row.case.device_kind == "emulated" for row in rows):
        yield Caveat(
            kind="emulated",
            text=(
                "EMULATED devices run one at a time on the host: their steps show host cost only,"
                " and no speed-up is computed from them"
            ),
        )
    if any(row.on_fake_gpus for row in rows):
        yield Caveat(
            kind="fake",
            text=(
                f"{FAKE_GPU}: {fake.WHY}; the run shows that the code works with torch's CUDA build"
            ),
        )
    if any(row.case.placement == "colocated" for row in rows):
        yield Caveat(
            kind="colocated",
            text=(
                "COLOCATED replicas share one GPU: they show correctness and host cost, not"
                " speed-up"
            ),
        )


def _of_loops(rows: Sequence[Row], trials: Sequence[Trial]) -> Iterator[Caveat]:
    seen = tuple((row.case, "") for row in rows if row.case.traits.observed and row.step)
    if seen:
        yield Caveat(kind="parts", text=PARTS, cases=seen, every=len(seen) > 1)
    traced = tuple((row.case, "") for row in rows if row.source is Source.IMPORTED and row.step)
    if traced:
        yield Caveat(
            kind="profiler",
            cases=traced,
            every=len(traced) > 1,
            text=(
                f"{Source.IMPORTED.value.upper()}: the profiler that recorded the trace slows the"
                " host, so steps may be longer than without it"
            ),
        )
    unknown = {
        (trial.case, part): None
        for trial in trials
        if (loop := observed(trial))
        for part in loop.unknown
    }
    for case, part in unknown:
        yield Caveat(
            kind="not understood",
            text=str(part),
            cases=((case, f"in {words.count(part.steps, 'step')}" if part.steps else ""),),
        )


def _of_code(provenance: Mapping[str, Any]) -> Iterator[Caveat]:
    if provenance.get("dpbench", {}).get("dirty"):
        yield Caveat(
            kind="code",
            text=(
                "dpbench's checkout has uncommitted changes: the code that ran differs from the"
                " recorded commit"
            ),
        )
