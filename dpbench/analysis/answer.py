"""Answer: a decision in words, with its reason, certainty, memory, and the command to run next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from dpbench.analysis import commands, outlook, stats, summary, uneven, validity
from dpbench.analysis.decision import (
    WORTH,
    Basis,
    Choice,
    Decision,
    First,
    Question,
    best_of,
    decide,
    of_first,
    questions,
    ranking,
    unsettled,
)
from dpbench.analysis.outlook import Outlook
from dpbench.analysis.summary import KERNELS, Row
from dpbench.records import (
    UNATTRIBUTED,
    Case,
    Fault,
    Source,
    Status,
    Trial,
    disturbance,
    fake,
    plan,
    registry,
    schedule,
    session,
    words,
)
from dpbench.records.estimate import Estimate
from dpbench.records.names import devices, in_words, unusual
from dpbench.records.registry import Role
from dpbench.records.resources import Resources
from dpbench.records.spelling import dashed

NOTABLE = 0.1
"""The least share of the lost time with which an answer names a phase after the first."""
TICK_S = 1e-9
"""A time below that of any clock, in seconds: what rounding leaves of equal times."""
MOSTLY = 0.5
"""The share of a step for which a GPU must be idle for an answer to begin with it."""
_OBSTACLES = {
    Basis.FAKE_GPU: fake.WHY,
    Basis.EMULATED: "emulated devices show host cost only, and no speed-up",
    Basis.COLOCATED: "the replicas share one GPU, so that no speed-up was possible",
    Basis.ONE_DEVICE: "no case ran on several devices",
    Basis.OTHER_VERSION: (
        "the cases on several devices ran under schedules that only another version of dpbench has"
    ),
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer:
    """The answer to one question, in words.

    `subject` names the model and, if a run has several, the settings. `ranking` has the compared
    cases, the fastest first; `ranked` is a clause with their speed-ups and whether the first is
    decidedly the fastest. `basis` is the reason for the choice (`decision.Basis`; for an observed
    loop, `Ground`), `headline` the choice with its speed-up, and `settled` whether further rounds
    could not change it. `problem` is the key of the finding that decides about an observed loop, ""
    without one, and `cost` the finding's cost as a fraction of the step. `reason` is a clause on
    DataParallel's speed-up and most costly phase, `certainty` on doubts and missing measurements,
    `memory` on the memory of the recommended case, `energy` on the joules of a sample by number of
    GPUs, `earlier` on the same case in an earlier run. `command` is the command to run next. A text
    is "" if there is nothing to say. `home` is the case on one device with which those in
    `compared` are compared, and `baseline` its row, None if not measured. `row` is the row of the
    recommended case, None without one.
    """

    subject: str
    choice: Choice
    basis: StrEnum
    problem: str = ""
    cost: Estimate | None = None
    headline: str
    settled: bool = True
    ranking: tuple[Row, ...] = ()
    ranked: str = ""
    reason: str = ""
    certainty: str = ""
    memory: str = ""
    energy: str = ""
    earlier: str = ""
    command: str = ""
    labels: tuple[str, ...] = ()
    home: Case
    source: Source
    compared: frozenset[Case] = frozenset()
    row: Row | None = None
    baseline: Row | None = None

    @property
    def recommended(self) -> str | None:
        """Return the label of the recommended case; None without one."""
        return self.row.case.label if self.row else None

    @property
    def text(self) -> str:
        """Return the whole answer as one paragraph."""
        return " ".join(self.lines)

    @property
    def standing(self) -> str:
        """Return what the ranking shows about its first case, as a clause; "" if nothing."""
        return self.ranked.partition("; ")[2]

    @property
    def verdict(self) -> list[str]:
        """Return the ranking and the choice, as one sentence each."""
        said = [self.ranked, self.headline] if self.ranked else [self.headline]
        return [f"{self.subject}: {said[0]}.", *map(_sentence, said[1:])]

    @property
    def lines(self) -> list[str]:
        """Return the whole answer as lines: the ranking, the choice, why, and the next command."""
        lines = [
            *self.verdict,
            " ".join(self.sentences),
            f"Next: {self.command}" if self.command else "",
        ]
        return [line for line in lines if line]

    @property
    def sentences(self) -> list[str]:
        """Return what explains the headline, and what else is known of the compared cases."""
        clauses = (self.reason, self.certainty, self.memory, self.energy, self.earlier)
        return [_sentence(clause) for clause in clauses if clause]

    def __repr__(self) -> str:
        """Return the whole answer as lines, the first with its labels, the others indented."""
        first, *others = self.lines
        return "\n  ".join([f"{first} [{' '.join(self.labels)}]", *others])

    def epoch(self, samples: int) -> str:
        """Return a clause on the time of an epoch and on what the answer saves of it."""
        amount = f"an epoch of {words.count(samples, 'sample')}"
        now, then = self.epoch_s(samples)
        if not self.home.traits.comparable:
            return (
                f"the steps of {amount} take {words.long_duration(now)}"
                if now
                else self._no_epoch(amount)
            )
        if then and not now:
            return (
                f"{amount} takes {words.long_duration(then)} with this choice{_by_steps(self.row)}"
            )
        if not now:
            return self._no_epoch(amount)
        takes = f"{amount} takes {words.long_duration(now)} on one device"
        if not then:
            takes += _by_steps(self.baseline)
        if not then:
            rate = self.row.throughput if self.row and self.row is not self.baseline else None
            why = f"; with this choice its time is unknown: {words.doubt(rate)}" if rate else ""
            return takes + why
        saved_s = now.value - then.value
        change = (
            f"saves {words.long_time(saved_s)}"
            if saved_s > 0
            else f"takes {words.long_time(-saved_s)} longer"
        )
        with_choice = f"{words.long_duration(then)} with this choice, which {change}"
        return f"{takes} and {with_choice}{_by_steps(self.row)}"

    def epoch_s(self, samples: int) -> tuple[Estimate | None, Estimate | None]:
        """Return the seconds of an epoch, from mean steps: now, and with the recommended case.

        Now means on one device or in the observed loop. Each is None if it is unknown or in doubt;
        the second also without another recommended case, and both for emulated devices and fake
        GPUs.
        """
        if self._timeless:
            return None, None
        start = self.baseline if self.home.traits.comparable else self.row
        now = _epoch_s(start, samples)
        other = self.row if self.row is not start else None
        return now, _epoch_s(other, samples)

    @property
    def _timeless(self) -> str:
        """The reason why steps on these devices say nothing about the time of training, or ""."""
        if summary.FAKE_GPU in self.labels:
            return fake.WHY
        host_only = self.home.device_kind == "emulated"
        return "emulated devices show host cost only" if host_only else ""

    def _no_epoch(self, amount: str) -> str:
        row = self.baseline if self.home.traits.comparable else self.row
        if self._timeless:
            why = self._timeless
        elif row is None:
            why = f"the strategy {self.home.strategy} was not measured"
        elif row.throughput:
            why = words.doubt(row.throughput)
        elif row.step:
            why = "the batch size is unknown"
        else:
            why = f"{row.case.label} has no result ({row.outcome})"
        return f"the time of {amount} is unknown, because {why}"


class Answers(tuple[Answer, ...]):
    """The answers of a run, which print as text: a blank line is between two answers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self)) or "Nothing was measured."


def _by_steps(row: Row | None) -> str:
    """Return of how many steps of a process a mean is: a pause that comes later is not in it."""
    counts = sorted(len(steps) for steps in row.series.values()) if row else []
    if not counts:
        return ""
    least, most = counts[0], counts[-1]
    amount = words.count(most, "step") if least == most else f"{least} to {most} steps"
    return f", by the first {amount} of each process"


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _epoch_s(row: Row | None, samples: int) -> Estimate | None:
    rate = row.throughput if row else None
    return rate.inverse.scaled(samples) if rate and not rate.doubt else None


def answers(
    rows: Sequence[Row], machine: Resources, again: str = "", trials: Sequence[Trial] = ()
) -> list[Answer]:
    """Return one answer for each question of a run, those without unusual settings first.

    `again` is the command that goes on with the run; "" if it has ended. From `trials` on one GPU,
    the answer is predicted.
    """
    asked = questions(rows)
    return [_answer(one, asked, machine, again, trials) for one in asked]


def _subject(question: Question, all_questions: Sequence[Question]) -> str:
    alike = [one for one in all_questions if one.home.model == question.home.model]
    each = " per device" if question.weak else ""
    several = len({(one.home.batch_size, one.weak) for one in alike}) > 1
    batch = [f"batch {question.home.batch_size}{each}"] if several else []
    settings = (
        unusual(question.home) if len({tuple(unusual(one.home)) for one in alike}) > 1 else []
    )
    kind = [question.home.device_kind] if len({one.home.device_kind for one in alike}) > 1 else []
    source = [question.source.value] if len({one.source for one in alike}) > 1 else []
    details = [*batch, *settings, *kind, *source]
    return f"{question.home.model} ({', '.join(details)})" if details else question.home.model


def _answer(
    question: Question,
    all_questions: Sequence[Question],
    machine: Resources,
    again: str,
    trials: Sequence[Trial],
) -> Answer:
    decision = decide(question)
    ranked = ranking(question)
    pending = bool(unsettled(question, decision))
    missing = _unmeasured(question, again if pending else "")
    settled = decision.choice is not Choice.UNKNOWN and not pending
    so_far = "" if settled or decision.choice is Choice.UNKNOWN else "so far, "
    measured = {
        one.home.batch_size for one in all_questions if one.home.model == question.home.model
    }
    shown = decision.row or (question.candidates or question.rows)[0]
    noisy = any(disturbance.NOISY in row.labels for row in question.rows)
    command = (
        again
        if again and (pending or missing)
        else commands.following(question, decision, machine, measured)
    )
    certainty = [
        *_certainty(question, decision, open_run=bool(again and pending)),
        *_of_gpus(question, machine, command),
        *missing,
    ]
    given = Answer(
        subject=_subject(question, all_questions),
        home=question.home,
        source=question.source,
        compared=frozenset(row.case for row in question.others),
        choice=decision.choice,
        basis=decision.basis,
        row=decision.row,
        baseline=question.baseline,
        settled=settled,
        headline=_too_small(question) + so_far + _headline(question, decision),
        ranking=ranked,
        ranked=_ranked(ranked, by_all_steps=decision.basis is not Basis.UNEVEN),
        reason=_reason(question, decision, machine),
        certainty="; ".join(certainty),
        memory="; ".join(_memory(question, decision, machine)),
        energy=_energy(decision, ranked),
        command=command,
        labels=tuple(dict.fromkeys([*shown.labels, *[disturbance.NOISY] * noisy])),
    )
    beyond = outlook.of_question(question, decision, trials, machine)
    return _predicted(question, decision, beyond, given) if beyond else given


def _predicted(question: Question, decision: Decision, beyond: Outlook, measured: Answer) -> Answer:
    """Return the answer of a run on one GPU, with what is predicted for several of them."""
    by_strategy: dict[str, list[Row]] = {}
    for row in beyond.rows:
        name = "DataParallel" if row.case.traits.role is Role.WRAPPER else in_words(row.case)
        by_strategy.setdefault(name, []).append(row)
    sizes = ", ".join(str(row.case.devices) for row in next(iter(by_strategy.values())))
    gains = [
        f"{name} would give {', '.join(words.times(row.speedup) for row in rows if row.speedup)}"
        for name, rows in by_strategy.items()
    ]
    says = f"on {sizes} of these GPUs {', and '.join(gains)}"
    home, base = question.home, question.baseline
    rounds = base.step.n if base and base.step else 0
    fakes = decision.basis is Basis.FAKE_GPU
    return replace(
        measured,
        choice=measured.choice if fakes else Choice.PREDICTED,
        settled=not fakes,
        headline=(
            f"{measured.headline}; from them, {says}" if fakes else _too_small(question) + says
        ),
        reason="" if fakes else _cost_of_schedule(question),
        certainty="; ".join(
            [
                f"predicted from the step of {words.count(rounds, 'round')}, with 80% intervals,"
                f" for {words.count(home.batch_size, 'sample')} on each GPU and the links of"
                f" {beyond.machine}, which are assumed",
                *_unmeasured(question),
            ]
        ),
        command=commands.predict(home, Resources(described=beyond.machine), step_s=beyond.step_s),
        labels=tuple(dict.fromkeys([*beyond.rows[0].labels, *measured.labels])),
    )


def _cost_of_schedule(question: Question) -> str:
    """Return a clause on the replicas that shared one GPU; "" without a certain ratio."""
    shared = [row for row in question.several if row.colocated and row.speedup]
    if not shared or not _shown(shared[0]):
        return ""
    return (
        f"{in_words(shared[0].case)} on {devices(shared[0].case)} gives {_gain(shared[0])}, which"
        " is what its schedule costs"
    )


def _name(row: Row) -> str:
    case = row.case
    if case.traits.all_cores:
        return in_words(case)
    hosts = f" on {case.hosts} hosts" if case.hosts > 1 else ""
    return f"{in_words(case)} on {devices(case)}{hosts}"


RANKED = 5
"""The number of cases of a ranking that a text names."""


def _ranked(rows: Sequence[Row], *, by_all_steps: bool) -> str:
    """Return the speed-ups of a ranking as a clause, and whether its first is the fastest.

    A speed-up whose interval must not be shown is marked with "~". Unless `by_all_steps`, the means
    of all steps contradict the ranking, which says nothing about the first then.
    """
    if len(rows) < 2:
        return ""
    first, *others = rows
    parts = [f"{place(first)} {_gain(first) if first.speedup and _shown(first) else about(first)}"]
    parts += [f"{place(row)} {about(row)}" for row in others[: RANKED - 1]]
    more = f", and {len(rows) - RANKED} more" if len(rows) > RANKED else ""
    sure = of_first(rows) if by_all_steps else None
    standing = ", ".join(parts) + more
    rough = "; a rough ranking, beside other processes" if any(map(commands.noisy, rows)) else ""
    return f"{standing}{rough}" if sure is None else f"{standing}; {_OF_FIRST[sure]}"


def place(row: Row) -> str:
    """Return how a ranking names a row: its strategy and devices, or "one device"."""
    return _one(row.case) if row.case.traits.role is Role.BASELINE else _name(row)


def _shown(row: Row) -> bool:
    return row.speedup is not None and not row.speedup.doubt


def about(row: Row) -> str:
    """Return a row's speed-up as in a ranking; "~" marks one whose interval must not be shown."""
    if row.speedup is None:
        return "1×"
    return f"{'' if _shown(row) else '~'}{words.number(row.speedup.value)}×"


_OF_FIRST = {
    First.FASTEST: "the first is the fastest",
    First.NEARLY: f"the first is the fastest, or within {WORTH - 1:.0%} of it",
    First.OPEN: "it is not clear which is the fastest",
}


def _one(case: Case) -> str:
    return "one GPU" if case.device_kind == "cuda" else "one device"


def _too_small(question: Question) -> str:
    """Return the start of an answer for a model that leaves one GPU idle for most of a step."""
    row = question.baseline
    measured = row and row.busy_source == KERNELS and row.step and not row.step.doubt
    if not row or not row.step or not measured or row.source is not Source.MEASURED:
        return ""
    idle = 1 - max(row.busy.values()) / row.step.value
    if idle <= MOSTLY:
        return ""
    return f"one GPU is idle for {words.percent(idle)} of a step, which is too short for it; "


def _headline(question: Question, decision: Decision) -> str:
    if decision.choice is Choice.UNKNOWN:
        return f"{Choice.UNKNOWN}: {_unknown(question, decision)}"
    lost = [row for row in question.failed if row.case.traits.role is Role.CONTROL]
    without = f"; without a result: {_failures(lost)}" if lost else ""
    return _chosen(question, decision) + without


def _chosen(question: Question, decision: Decision) -> str:
    here = question.home.device_kind == "cpu" and question.source is Source.MEASURED
    row = decision.row
    where = "on this CPU, " if here else ""
    assert row
    if decision.basis is Basis.ONLY_FITS:
        return f"use {_name(row)}, because {_one(question.home)} runs out of memory"
    if decision.basis is Basis.NO_GAIN:
        best = best_of([one for one in question.candidates if one.case.devices > 1])
        gives = f"the best case on several devices, {_name(best)}, gives only {_gain(best)}"
        return f"{where}stay with {_one(question.home)}: {gives}"
    if row.case.traits.all_cores:
        return f"{where}stay with {in_words(row.case)}: {_gain(row)}"
    tool = (
        " (dpbench.TrainStep)" if row.case.schedule not in ("", schedule.Schedule.REFERENCE) else ""
    )
    return f"{where}use {_name(row)}{tool}: {_gain(row)}"


def _gain(row: Row) -> str:
    weak = ", weak scaling" if row.scaling == "weak" else ""
    return f"{words.times(row.speedup)}{weak}" if row.speedup else words.MISSING


def _unknown(question: Question, decision: Decision) -> str:
    baseline = plan.baseline(model="", batch_size=1).strategy
    if decision.basis in _OBSTACLES:
        hosts = any(row.case.hosts > 1 for row in question.several)
        return (
            "the hosts are one machine, so that no speed-up was possible"
            if hosts and decision.basis is Basis.COLOCATED
            else _OBSTACLES[decision.basis]
        )
    if decision.basis is Basis.NO_RESULT:
        return f"no case on several devices has a result: {_failures(question.several)}"
    if decision.basis is Basis.LOST:
        return (
            "the cases with a result have no gain, but other cases have no result:"
            f" {_failures(question.failed)}"
        )
    if decision.basis is Basis.NO_BASELINE:
        why = (
            f"has no result ({_failure(question.baseline)})"
            if question.baseline
            else "was not measured"
        )
        batch = question.home.batch_size
        return f"the strategy {baseline} {why} at batch {batch}, so that speed-ups are unknown"
    return _undecided(question, decision)


def _undecided(question: Question, decision: Decision) -> str:
    several = [row for row in decision.open if row.case.devices > 1]
    best = best_of(several or decision.open)
    if decision.basis is Basis.UNEVEN:
        gain = uneven.gain_of_means(best, question.baseline)
        assert gain
        return (
            f"{_name(best)} gives {_gain(best)} by the median step, but only"
            f" {words.about_times(gain)} by the mean of all steps, because some are much longer"
        )
    if best.speedup and not best.speedup.decides:
        return f"{words.doubt(best.speedup)} ({_name(best)})"
    return (
        f"{_name(best)} gives {_gain(best)}, which may or may not be a gain of {WORTH - 1:.0%} or"
        " more"
    )


def _failures(rows: Sequence[Row]) -> str:
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return ", ".join(f"{_name(row)} ({_failure(row)})" for row in rows[:3]) + more


def _failure(row: Row) -> str:
    if row.status is Status.OOM and not row.step:
        return "out of memory"
    if row.step and not row.source.timed:
        return "its predictions were never compared with measurements"
    return "wrong gradients" if Fault.UNVERIFIED in row.lost else row.outcome


def _reason(question: Question, decision: Decision, machine: Resources) -> str:
    """Return a clause on DataParallel's memory error, or on its speed-up and most costly phase.

    "" if DataParallel was not measured, or without a speed-up.
    """
    dp = _data_parallel(question, decision.row)
    if dp is None or decision.basis in _OBSTACLES:
        return ""
    if dp.step is None:
        return (
            f"DataParallel runs out of memory on {devices(dp.case)}"
            if dp.status is Status.OOM
            else ""
        )
    # without a baseline of this question, a speed-up is one over another batch size
    base = question.baseline
    if base is None or base.step is None or dp.speedup is None or dp.speedup.doubt:
        return ""
    subject = (
        "it"
        if dp is decision.row
        else f"DataParallel gives {words.times(dp.speedup)} on {devices(dp.case)} and"
    )
    share = (
        f"; {words.count(len(dp.case.rows), 'device')} share {words.count(machine.cores, 'core')}"
    )
    shared = validity.oversubscribed(dp.case, machine.cores)
    return f"{subject} {_loses(dp, base)}{share if shared else ''}"


def _data_parallel(question: Question, chosen: Row | None) -> Row | None:
    """Return the row of torch.nn.DataParallel or of the engine's `reference`; None without one.

    Rows on as many devices as `chosen` are preferred, then those on more devices, then
    DataParallel's.
    """
    wrappers = [
        row
        for row in question.several
        if not row.colocated
        and (
            row.case.traits.role is Role.WRAPPER
            or (
                row.case.traits.role is Role.ENGINE
                and row.case.schedule == schedule.Schedule.REFERENCE
            )
        )
    ]
    count = chosen.case.devices if chosen else 0
    return min(
        wrappers,
        default=None,
        key=lambda row: (
            row.case.devices != count,
            -row.case.devices,
            row.case.traits.role is not Role.WRAPPER,
        ),
    )


def _loses(row: Row, base: Row) -> str:
    assert row.mean
    assert base.mean
    divisor = row.case.devices * base.case.batch_size / row.case.batch_size
    lost_s = row.mean.value - base.mean.value / divisor
    if lost_s < TICK_S:
        return "loses no time against perfect scaling"
    if row.series and base.series:
        lost = stats.mean_difference(row.series, base.series.scaled(1 / divisor))
        if lost.low <= 0:
            return "shows no certain loss against perfect scaling"
    ideal = {name: seconds / divisor for name, seconds in base.phases.items()}
    phases = summary.changes(ideal, row.phases)
    clause = (
        f"loses {words.time(lost_s)} of a mean step of {words.time(row.mean.value)} against"
        " perfect scaling"
    )
    if not {*phases} - {UNATTRIBUTED}:  # a prediction by formulas has no phases
        return clause
    most, *others = sorted(sorted(phases), key=lambda name: -phases[name])
    then = [name for name in others[:2] if phases[name] >= NOTABLE * lost_s]
    parts = [f"{words.part(most)} adds most, {words.time(phases[most])}"]
    parts += [f"then {words.part(name)}, {words.time(phases[name])}" for name in then]
    return f"{clause}; {', '.join(parts)}"


def _certainty(question: Question, decision: Decision, *, open_run: bool) -> Iterator[str]:
    if not question.source.timed:
        yield "predicted, with an 80% interval"
    elif any(map(commands.noisy, decision.open)) and decision.basis is Basis.OPEN:
        yield f"rounds with the label {disturbance.NOISY} give no verdict"
    elif decision.basis is Basis.OPEN and not open_run:
        rounds = commands.rounds_needed(decision.open)
        more = (
            f"about {rounds} rounds"
            if rounds <= commands.ROUNDS_MOST
            else f"more than {commands.ROUNDS_MOST} rounds"
        )
        yield f"{more} would decide this with a probability of {stats.POWER:.0%}"
    elif decision.basis in (Basis.GAIN, Basis.NO_GAIN) and not open_run:
        judged = [decision.row] if decision.basis is Basis.GAIN else question.candidates
        rounds = min(row.speedup.n for row in judged if row and row.speedup)
        yield (
            "compared with one device, decided at the 95% level from"
            f" {words.count(rounds, 'round')}"
        )
        if decision.basis is Basis.GAIN and _may_be_small(decision.row):
            yield f"that it is faster by {WORTH - 1:.0%} or more is not decided"
    if decision.row:
        yield from _of_all_steps(question, decision.row)
        yield from _gaps(question, decision.row)
    if decision.row and decision.open:
        names = ", ".join(map(_name, decision.open[:3]))
        yield (
            f"it is undecided whether {names} {words.verb(len(decision.open), 'is', 'are')} faster"
            f" than this choice by {WORTH - 1:.0%} or more"
        )
    yield from _foreign(question, decision)


def _of_gpus(question: Question, machine: Resources, command: str) -> Iterator[str]:
    """Yield that a run on CPUs says nothing about GPUs, and how the next command does."""
    if question.home.device_kind != "cpu":
        return
    named = command.startswith("dpbench predict") and not machine.gpu_memory_bytes
    then = ": name yours in the next command" if named else ""
    yield f"this says nothing about GPUs{then}"


def _unmeasured(question: Question, again: str = "") -> list[str]:
    """Return clauses on what the run had no time for; none if it had time for all.

    These are cases and, with `again`, the command that goes on, the rounds that would decide. A run
    of a session's model does not go on.
    """
    names = [_name(row) for row in question.rows if row.left_out]
    spent = ["the time was used up before this was decided"] if again else []
    if not names:
        return [f"{one}; the same command goes on" for one in spent]
    more = f" and {len(names) - RANKED} more" if len(names) > RANKED else ""
    goes_on = "; the same command goes on with them"
    then = "" if session.is_of(question.home.model) else goes_on
    return [*spent, f"left out for lack of time: {', '.join(names[:RANKED])}{more}{then}"]


def _may_be_small(row: Row | None) -> bool:
    return row is not None and row.speedup is not None and row.speedup.low < WORTH


def _foreign(question: Question, decision: Decision) -> Iterator[str]:
    """Yield what other processes used, and what follows."""
    taken = [part for row in question.rows for part in row.series.quiet.taken.values()]
    most = max(taken, default=0.0)
    if NOTABLE <= most < stats.ROUGH:
        yield (
            f"other processes can have taken up to {words.number(most)} of a core from a case, and"
            " the intervals include this"
        )
    if any(disturbance.NOISY in row.labels for row in question.rows):
        then = "" if most else ", and the comparison leaves these rounds out"
        if decision.row is None:
            then = f": end them, or let dpbench wait ({dashed('patience')})"
        elif decision.basis is Basis.ONLY_FITS:  # it compares nothing
            then = ""
        yield (
            f"other processes used {disturbance.shared(question.home)} in some rounds"
            f" ({disturbance.NOISY}){then}"
        )


def _of_all_steps(question: Question, row: Row) -> Iterator[str]:
    gain = uneven.gain_of_means(row, question.baseline)
    if gain is None or row is question.baseline:
        return
    if gain.doubt or any(map(uneven.differs, filter(None, (row, question.baseline)))):
        yield (
            "some steps are much longer: by the mean of all steps, it gives"
            f" {words.about_times(gain)}"
        )


def _gaps(question: Question, row: Row) -> Iterator[str]:
    lost = [row for row in question.failed if row.case.traits.role is not Role.CONTROL]
    if lost:
        yield f"without a result: {_failures(lost)}"
    for reported in [
        row,
        *([question.baseline] if question.baseline and question.baseline is not row else []),
    ]:
        if reported.lost:
            outcomes = ", ".join(dict.fromkeys(reported.lost))
            rounds = f"{len(reported.lost)} of {reported.rounds + len(reported.lost)} rounds"
            yield f"no result in {rounds} of {_name(reported)} ({outcomes})"
    if row.case.working < row.case.devices:
        idle = row.case.devices - row.case.working
        yield f"{idle} of {devices(row.case)} {words.verb(idle, 'gets', 'get')} no sample"
    if question.source is Source.MEASURED and not commands.has_control(question):
        yield f"{registry.of_role(Role.CONTROL)} was not measured"


def _memory(question: Question, decision: Decision, machine: Resources) -> Iterator[str]:
    row = decision.row
    if row and row.memory:
        yield highest_peak(row, machine, fits=", so it fits")
    told = _data_parallel(question, decision.row)  # the reason names it already
    out = [
        _name(one)
        for one in question.several
        if one.status is Status.OOM and not one.step and one is not told
    ]
    if out and decision.basis is not Basis.NO_RESULT:
        yield f"out of memory: {', '.join(out[:3])}"


def _energy(decision: Decision, ranked: Sequence[Row]) -> str:
    """Return a clause on the joules of a sample, for each number of GPUs; "" without any.

    Of several cases on as many GPUs, it is on the recommended one, or else on the fastest.
    """
    by_count: dict[int, Row] = {}
    for row in [*filter(None, [decision.row]), *ranked]:
        if row.energy:
            by_count.setdefault(row.case.gpu_count, row)
    parts = [
        f"{words.joules(row.energy)} with {place(row)}"
        for _, row in sorted(by_count.items())
        if row.energy and not row.energy.doubt
    ]
    return f"energy of a sample, by NVML's counters: {', '.join(parts)}" if parts else ""


def highest_peak(row: Row, machine: Resources, fits: str = "") -> str:
    """Return a clause on the row's device with the highest peak of memory.

    `fits` ends the clause if the peak is below the device's known capacity.
    """
    device, peak = max(row.memory.items(), key=lambda pair: pair[1])
    capacity = machine.memory_of(row.case, device) if row.source is Source.MEASURED else 0
    of = f" of {words.size(capacity)}{fits}" if capacity > peak else ""
    return f"device {device} uses up to {words.size(peak)}{of}"
