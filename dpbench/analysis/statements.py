"""Statements: what limits the conclusions from a run, and remarks on its figures.

Each kind of statement is a row of `KINDS` or of a sibling, or a rule of `validity`. A statement
that `warns` may change what an answer says: it stands beside the answer. The others explain
figures: they stand in `dpbench explain` and in the details of a page.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from dpbench.analysis import hosts, sampled, uneven, validity
from dpbench.analysis.decision import questions
from dpbench.analysis.summary import FAKE_GPU, Row, baseline_in
from dpbench.records import Case, Status, Trial, fake, siblings, vendors, words
from dpbench.records.disturbance import NOISY
from dpbench.records.facts import RunFacts
from dpbench.records.grouping import grouped
from dpbench.records.trial import SPENT, by_key
from dpbench.store import FINISHED, OPEN, UnreadableRow

PARTS = (
    "the rounds of an observed loop are consecutive parts of one execution, so intervals leave out"
    " the variation between executions"
)
CLOCKS = 0.03
"""The largest difference of two cases' mean clocks, as a fraction, that is not stated."""
NAMES = 8
"""The largest number of cases that the text of one statement names."""
Cases = tuple[tuple[Case, str], ...]
"""Cases, each with a detail, which may be empty."""
Said = tuple[str, Cases]
"""The text of a statement, and its cases; none if it concerns the whole run."""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """One statement on a run: `key` is that of its kind, and `text` says it without its cases.

    `cases` maps cases to details, which may be empty; without cases, the statement concerns the
    whole run. `every` is True if the run has several cases, and it concerns all. `warns` is whether
    it may change what an answer says.
    """

    key: str
    text: str
    warns: bool
    cases: Cases = ()
    every: bool = False

    def __str__(self) -> str:
        """Return the statement in one line, as in "oom: out of memory: vgg16 dp x4"."""
        return self.line(NAMES)

    def line(self, most: int) -> str:
        """Return the statement and the names of at most `most` of its cases in one line."""
        if not self.cases:
            return self.text
        detailed = any(detail for _, detail in self.cases)
        if self.every and (len(self.cases) > most or not detailed):
            return f"{self.text}: all {words.count(len(self.cases), 'case')}"
        more = f" and {len(self.cases) - most} more" if len(self.cases) > most else ""
        return f"{self.text}: {', '.join(self.names[:most])}{more}"

    @property
    def names(self) -> list[str]:
        """Return the names of the cases, each with its detail, if any, in parentheses."""
        return [f"{case.label} ({detail})" if detail else case.label for case, detail in self.cases]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What statements are made from: a run's rows, trials, facts and status.

    `unreadable` are the store's unreadable rows.
    """

    rows: Sequence[Row]
    trials: Sequence[Trial]
    facts: RunFacts
    status: str = FINISHED
    unreadable: Sequence[UnreadableRow] = ()

    @property
    def cores(self) -> int:
        """Return the number of cores of the run, 0 if unknown."""
        return self.facts.host.cores or 0


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of statement: `when` says in words when it is made, and `find` makes it."""

    key: str
    when: str
    warns: bool
    find: Callable[[Observation], Iterable[Said]]


def made(
    rows: Sequence[Row],
    trials: Sequence[Trial],
    facts: RunFacts,
    status: str = FINISHED,
    unreadable: Sequence[UnreadableRow] = (),
) -> list[Statement]:
    """Return the statements on a run in the order of `kinds`, those of `validity` after them.

    `status` is that of the run in the store; `unreadable` are the store's unreadable rows.
    """
    seen = Observation(rows=rows, trials=trials, facts=facts, status=status, unreadable=unreadable)
    of_kinds = ((kind.key, kind.warns, said) for kind in kinds() for said in kind.find(seen))
    of_checks = (
        (rule.key, rule.warns, (rule.headline, tuple(details.items())))
        for rule, details in validity.troubles(trials, seen.cores).items()
    )
    found = [
        Statement(
            key=key,
            text=text,
            warns=warns,
            cases=cases,
            every=len({case for case, _ in cases}) == len(rows) > 1,
        )
        for key, warns, (text, cases) in chain(of_kinds, of_checks)
    ]
    return [*dict.fromkeys(found)]


def summary(some: Sequence[Statement]) -> str:
    """Return the numbers of statements and of their cases, such as "3 in 12 cases"."""
    cases = {case for one in some for case, _ in one.cases}
    among = f" in {words.count(len(cases), 'case')}" if cases else ""
    return f"{len(some)}{among}"


def _incomplete(seen: Observation) -> Iterator[Said]:
    if seen.status not in (FINISHED, OPEN):
        loop = any(row.case.traits.in_parts for row in seen.rows)
        then = (
            "its figures are those of the steps before"
            if loop
            else "repeat the same `dpbench run` command to continue it"
        )
        yield f"incomplete: the status of this run is {seen.status}; {then}", ()


def _unknown_load(seen: Observation) -> Iterator[Said]:
    if reason := seen.facts.foreign_load.unknown:
        yield f"it is unknown whether other processes used the cores: {reason}", ()


def _noisy(seen: Observation) -> Iterator[Said]:
    if reasons := seen.facts.noisy:
        yield f"{NOISY}: {'; '.join(reasons.values())}", ()


def _unreadable(seen: Observation) -> Iterator[Said]:
    places = sorted({(one.table, one.row) for one in seen.unreadable})
    if places:
        amount = len(places)
        where = " and ".join(
            f"{', '.join(map(str, rows))} of the table {name}"
            for name, rows in grouped(places).items()
        )
        yield (
            f"{words.count(amount, 'row')} of the store could not be read, and"
            f" {words.verb(amount, 'is', 'are')} left out: {where}",
            (),
        )


def _machines(seen: Observation) -> Iterator[Said]:
    machines = hosts.warnings(seen.facts.hosts.machines)
    for text in chain(machines, hosts.unlike(seen.trials), hosts.failures(seen.trials)):
        yield text, ()


def _slow_machines(seen: Observation) -> Iterator[Said]:
    for text in hosts.sentences(seen.trials):
        yield text, ()


def _no_result(seen: Observation) -> Iterator[Said]:
    failed = [row for row in _unanswered(seen.rows) if row.outcome != Status.OK]
    yield from _by_text((f"{row.outcome}: {_first_line(row)}", row.case) for row in failed)


def _lost_rounds(seen: Observation) -> Iterator[Said]:
    lost = [row for row in _unanswered(seen.rows) if row.outcome == Status.OK and row.reason]
    yield from _by_text(
        (f"some rounds gave no result: {_first_line(row)}", row.case) for row in lost
    )


def _unanswered(rows: Sequence[Row]) -> list[Row]:
    """Return the rows but those for which there was no time, which an answer says."""
    asked = {row.key for question in questions(rows) for row in question.rows}
    return [row for row in rows if not (row.reason.startswith(SPENT) and row.key in asked)]


def _first_line(row: Row) -> str:
    return row.reason.partition("\n")[0] or "no reason given"


def _doubts(seen: Observation) -> Iterator[Said]:
    yield from _by_text((text, row.case) for row in seen.rows for text in _doubts_of(row))


def _doubts_of(row: Row) -> Iterator[str]:
    remedy = "more steps" if row.case.traits.in_parts else words.REMEDY
    if row.case.traits.loads:
        remedy = "more rounds"
    if NOISY in row.labels:
        remedy = "an idle machine"
    for name, estimate in (("step time", row.step), ("speed-up", row.speedup)):
        if estimate and estimate.doubt:
            few = f"{words.withheld(estimate)} for the {name} ({estimate.doubt})"
            yield f"{few}; {remedy} would help"


def _by_text(found: Iterable[tuple[str, Case]]) -> Iterator[Said]:
    for text, cases in grouped(found).items():
        yield text, tuple((case, "") for case in cases)


def _not_checked(seen: Observation) -> Iterator[Said]:
    if lacking := validity.unchecked(seen.trials, seen.cores):
        stated = (seen.facts.gpus.hip, *(trial.facts.hip for trial in seen.trials))
        unread = vendors.of(next(filter(None, stated), None)).unread
        few = (
            f"NVML gave fewer than {sampled.READINGS} readings in the timed steps, none before or"
            " after them, or impossible ones"
        )
        yield f"{sampled.NOT_CHECKED}, because {unread or few}", tuple(lacking.items())


def _uneven(seen: Observation) -> Iterator[Said]:
    groups = by_key(seen.trials)
    cases = []
    for row in filter(uneven.differs, seen.rows):
        assert row.step
        assert row.mean
        averages = f"the mean is {words.duration(row.mean)}, the median {words.duration(row.step)}"
        where = uneven.where(groups[row.key])
        cases.append((row.case, "; ".join(filter(None, (averages, where)))))
    if cases:
        yield (
            "the mean step differs from the median step: phases, samples/s and times of epochs are"
            " those of all steps, but step times and their ratios are medians",
            tuple(cases),
        )


def _peak(seen: Observation) -> Iterator[Said]:
    cases = []
    for row in seen.rows:
        if row.impossible_share:
            assert row.step
            assert row.at_peak
            one = row.at_peak
            reached = one.operations / row.step.value / one.gpus / 1e12
            said = (
                f"{words.number(reached)} TFLOP/s on each GPU, whose peak for these operations is"
                f" {words.number(one.flop_per_s / 1e12)} TFLOP/s: {one.source}"
            )
            cases.append((row.case, f"{words.percent(row.impossible_share.value)}: {said}"))
    if cases:
        yield (
            "a step would reach more than 100% of the peak of its GPUs, so the library has used"
            " fewer operations than torch counts, or the GPUs are faster than their data sheet; the"
            " share is not shown",
            tuple(cases),
        )


def _clocks(seen: Observation) -> Iterator[Said]:
    clocks: dict[Case, dict[int, float]] = {}
    for trial in seen.trials:
        clock_hz = validity.mean_clock_hz(trial, seen.cores)
        if clock_hz and trial.trusted:
            clocks.setdefault(trial.case, {})[trial.round] = clock_hz
    series = {row.case: row.series for row in seen.rows if row.case in clocks}
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
        yield (
            f"the GPUs ran at clocks that differ by more than {CLOCKS:.0%} from those of the"
            " baseline, so a part of the speed-up is that of the clock",
            tuple(cases),
        )


def _on_cpus(seen: Observation) -> list[Row]:
    """Return the rows with a step time of a run that has logical CPU devices beside each other."""
    cpu = [row for row in seen.rows if row.case.device_kind == "cpu" and row.step]
    return cpu if max((row.case.devices for row in cpu), default=0) > 1 else []


def _cpu_only(seen: Observation) -> Iterator[Said]:
    if _on_cpus(seen):
        yield (
            "CPU-ONLY: logical CPU devices show whether schedules are correct and how long"
            " schedules take on a CPU, not the gain on GPUs",
            (),
        )


def _one_thread(seen: Observation) -> Iterator[Said]:
    cpu = _on_cpus(seen)
    if cpu and not any(row.case.traits.all_cores or row.case.traits.in_parts for row in cpu):
        yield (
            "each logical CPU device has one thread; add the strategy single_all_cores to compare"
            " with one device that uses all cores of the machine",
            (),
        )


def _emulated(seen: Observation) -> Iterator[Said]:
    if any(row.case.device_kind == "emulated" for row in seen.rows):
        yield (
            "EMULATED devices run one at a time on the host: their steps show host cost only, and"
            " no speed-up is computed from them",
            (),
        )


def _fake(seen: Observation) -> Iterator[Said]:
    if any(row.on_fake_gpus for row in seen.rows):
        shows = "the run shows that the code works with torch's CUDA build"
        yield f"{FAKE_GPU}: {fake.WHY}; {shows}", ()


def _switched(seen: Observation) -> Iterator[Said]:
    yield from _by_text(
        (
            f"the import of {module} switched Python's global interpreter lock on, although this"
            " Python began without it, so that threads run Python code one at a time; PYTHON_GIL=0"
            " keeps it off, also where a module is not safe without it",
            case,
        )
        for case, module in dict.fromkeys(
            (trial.case, trial.facts.gil_switched_on_by) for trial in seen.trials
        )
        if module
    )


def _colocated(seen: Observation) -> Iterator[Said]:
    if any(row.case.placement == "colocated" for row in seen.rows):
        yield (
            "COLOCATED replicas share one GPU: they show correctness and host cost, not speed-up",
            (),
        )


def _parts(seen: Observation) -> Iterator[Said]:
    loops = tuple((row.case, "") for row in seen.rows if row.case.traits.in_parts and row.step)
    if loops:
        yield PARTS, loops


def _profiler(seen: Observation) -> Iterator[Said]:
    yield from _by_text(
        (
            f"{row.source.upper()}: the profiler that recorded the trace slows the host, so steps"
            " may be longer than without it",
            row.case,
        )
        for row in seen.rows
        if row.source.profiled and row.step
    )


def _code(seen: Observation) -> Iterator[Said]:
    if seen.facts.dpbench.dirty:
        yield (
            "dpbench's checkout has uncommitted changes: the code that ran differs from the"
            " recorded commit",
            (),
        )


KINDS = (
    Kind(
        key="incomplete",
        when="the run was interrupted, or still runs",
        warns=True,
        find=_incomplete,
    ),
    Kind(
        key="unknown_load",
        when="the load of the cores before the run could not be measured",
        warns=True,
        find=_unknown_load,
    ),
    Kind(
        key="unreadable",
        when="rows of the store are damaged",
        warns=True,
        find=_unreadable,
    ),
    Kind(
        key="hosts",
        when="machines of a launch are one or unlike, or lack the baseline; or environments are"
        " unlike",
        warns=True,
        find=_machines,
    ),
    Kind(
        key="gil",
        when="an import switched the interpreter lock on in a Python that began without it",
        warns=True,
        find=_switched,
    ),
    Kind(
        key="slow_host",
        when=f"the interval of a machine's step over the fastest machine's is above {hosts.SLOW:g}",
        warns=True,
        find=_slow_machines,
    ),
    Kind(
        key="no_result",
        when="no round of a case has a result, although there was time",
        warns=True,
        find=_no_result,
    ),
    Kind(
        key="clocks",
        when=f"the mean clock of a case's GPUs differs from its baseline's by more than"
        f" {100 * CLOCKS:.0f} %",
        warns=True,
        find=_clocks,
    ),
    Kind(
        key="noisy",
        when="other programs used much of the cores or a GPU before or during the run",
        warns=False,
        find=_noisy,
    ),
    Kind(
        key="lost_rounds",
        when="some rounds of a case have no result, although there was time",
        warns=False,
        find=_lost_rounds,
    ),
    Kind(
        key="doubt",
        when="a step time or a speed-up is in doubt",
        warns=False,
        find=_doubts,
    ),
    Kind(
        key="not_checked",
        when="NVML gave too few readings for a check",
        warns=False,
        find=_not_checked,
    ),
    Kind(
        key="uneven",
        when=f"mean and median step decidedly differ by {100 * uneven.LEAST:.0f} % or more",
        warns=False,
        find=_uneven,
    ),
    Kind(
        key="peak",
        when="operations and step time would give more than 100 % of the peak of the GPUs",
        warns=False,
        find=_peak,
    ),
    Kind(
        key="cpu_only",
        when="several logical CPU devices were measured",
        warns=False,
        find=_cpu_only,
    ),
    Kind(
        key="one_thread",
        when="several logical CPU devices were measured, and not one device with all cores",
        warns=False,
        find=_one_thread,
    ),
    Kind(
        key="emulated",
        when="emulated devices were measured",
        warns=False,
        find=_emulated,
    ),
    Kind(
        key="fake",
        when="the GPUs are fake",
        warns=False,
        find=_fake,
    ),
    Kind(
        key="colocated",
        when="replicas share a GPU",
        warns=False,
        find=_colocated,
    ),
    Kind(
        key="parts",
        when="a loop was watched or imported",
        warns=False,
        find=_parts,
    ),
    Kind(
        key="profiler",
        when="a loop was imported from a profiler's trace",
        warns=False,
        find=_profiler,
    ),
    Kind(
        key="code",
        when="dpbench's checkout has uncommitted changes",
        warns=False,
        find=_code,
    ),
)
"""The kinds of statements but those of `validity.RULES` and of siblings; those that warn are first.
"""


def kinds() -> list[Kind]:
    """Return the kinds of statements, with those of siblings; those that warn are first."""
    theirs = chain.from_iterable(siblings.added("statements"))
    return sorted((*KINDS, *theirs), key=lambda kind: not kind.warns)


def definitions() -> str:
    """Return all kinds of statements as a Markdown table, which docs/measuring.md contains."""
    lines = ["| statement | is made if | beside the answer |", "|---|---|---|"]
    of_checks = ((rule.key, rule.when, rule.warns) for rule in validity.RULES)
    of_kinds = ((kind.key, kind.when, kind.warns) for kind in kinds())
    lines += [
        f"| {key} | {when} | {'yes' if warns else ''} |"
        for key, when, warns in (*of_kinds, *of_checks)
    ]
    return "\n".join(lines)
