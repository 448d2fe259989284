"""Answer: a decision in words, with its reason, certainty, memory, and the command to run next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpbench.analysis import commands, stats, summary, uneven, validity
from dpbench.analysis.decision import (
    WORTH,
    Basis,
    Choice,
    Decision,
    Question,
    best_of,
    decide,
    questions,
    ranking,
    sure_of_first,
    unsettled,
)
from dpbench.analysis.summary import KERNELS, Row
from dpbench.hardware import foreign_load
from dpbench.hardware.provenance import Resources
from dpbench.records import (
    UNATTRIBUTED,
    Case,
    Fault,
    Source,
    Status,
    fake,
    plan,
    registry,
    schedule,
    words,
)
from dpbench.records.names import devices, in_words, unusual
from dpbench.records.registry import Role
from dpbench.records.trial import Estimate

NOTABLE = 0.1
"""The least share of the lost time with which an answer names a phase after the first."""
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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to one question, in words.

    `subject` names the model and, if a run has several, the settings. `ranking` has the compared
    cases, the fastest first; `ranked` is a clause with their speed-ups and the probability that the
    first is the fastest. `headline` is the choice with its speed-up, and `settled` whether further
    rounds could not change it. `reason` is a clause on DataParallel's speed-up and most costly
    phase, `certainty` on doubts and missing measurements, `memory` on the memory of the recommended
    case, `earlier` on the same case in an earlier run. `command` is the command to run next. A text
    is "" if there is nothing to say. `home` is the case on one device with which those in
    `compared` are compared, and `baseline` its row, None if not measured. `row` is the row of the
    recommended case, None without one.
    """

    subject: str
    choice: Choice
    headline: str
    settled: bool = True
    ranking: tuple[Row, ...] = ()
    ranked: str = ""
    reason: str = ""
    certainty: str = ""
    memory: str = ""
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
    def lines(self) -> list[str]:
        """Return the whole answer as lines: the ranking, the choice, why, and the next command."""
        lines = [
            f"{self.subject}: {self.ranked or self.headline}.",
            _sentence(self.headline) if self.ranked else "",
            " ".join(self.sentences),
            f"Next: {self.command}" if self.command else "",
        ]
        return [line for line in lines if line]

    @property
    def sentences(self) -> list[str]:
        """Return what explains the headline: reason, certainty, memory and the earlier run."""
        clauses = (self.reason, self.certainty, self.memory, self.earlier)
        return [_sentence(clause) for clause in clauses if clause]

    def epoch(self, samples: int) -> str:
        """Return a clause on the time of an epoch and on what the answer saves of it."""
        amount = f"an epoch of {words.count(samples, 'sample')}"
        now, then = self.epoch_s(samples)
        if self.home.traits.observed:
            return (
                f"the steps of {amount} take {words.long_duration(now)}"
                if now
                else self._no_epoch(amount)
            )
        if then and not now:
            return f"{amount} takes {words.long_duration(then)} with this choice"
        if not now:
            return self._no_epoch(amount)
        takes = f"{amount} takes {words.long_duration(now)} on one device"
        if not then:
            return takes
        saved_s = now.value - then.value
        change = (
            f"saves {words.long_time(saved_s)}"
            if saved_s > 0
            else f"takes {words.long_time(-saved_s)} longer"
        )
        return f"{takes} and {words.long_duration(then)} with this choice, which {change}"

    def epoch_s(self, samples: int) -> tuple[Estimate | None, Estimate | None]:
        """Return the seconds of an epoch, from mean steps: now, and with the recommended case.

        Now means on one device or in the observed loop. Each is None if it is unknown or in doubt;
        the second also without another recommended case, and both for emulated devices and fake
        GPUs.
        """
        if self._timeless:
            return None, None
        start = self.row if self.home.traits.observed else self.baseline
        now = _epoch_s(start, samples)
        if self.row is None or self.row is start:
            return now, None
        if now is None:
            return None, _epoch_s(self.row, samples)
        # not from the row's throughput: the gain uses only the rounds that decide the answer
        gain = uneven.gain_of_means(self.row, start) or self.row.speedup
        return now, stats.quotient(now, gain) if gain and not gain.doubt else None

    @property
    def _timeless(self) -> str:
        """The reason why steps on these devices say nothing about the time of training, or ""."""
        if summary.FAKE_GPU in self.labels:
            return fake.WHY
        host_only = self.home.device_kind == "emulated"
        return "emulated devices show host cost only" if host_only else ""

    def _no_epoch(self, amount: str) -> str:
        row = self.row if self.home.traits.observed else self.baseline
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


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _epoch_s(row: Row | None, samples: int) -> Estimate | None:
    rate = row.throughput if row else None
    return summary.scaled(stats.inverse(rate), samples) if rate and not rate.doubt else None


def answers(rows: Sequence[Row], machine: Resources, again: str = "") -> list[Answer]:
    """Return one answer for each question of a run, those without unusual settings first.

    `again` is the command that goes on with the run; "" if it has ended.
    """
    asked = questions(rows)
    return [_answer(one, asked, machine, again) for one in asked]


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
    question: Question, all_questions: Sequence[Question], machine: Resources, again: str
) -> Answer:
    decision = decide(question)
    ranked = ranking(question)
    pending = bool(unsettled(question, decision))
    settled = decision.choice is not Choice.UNKNOWN and not pending
    so_far = "" if settled or decision.choice is Choice.UNKNOWN else "so far, "
    measured = {
        one.home.batch_size for one in all_questions if one.home.model == question.home.model
    }
    shown = decision.row or (question.candidates or question.rows)[0]
    noisy = any(foreign_load.NOISY in row.labels for row in question.rows)
    return Answer(
        subject=_subject(question, all_questions),
        home=question.home,
        source=question.source,
        compared=frozenset(row.case for row in question.others),
        choice=decision.choice,
        row=decision.row,
        baseline=question.baseline,
        settled=settled,
        headline=_too_small(question) + so_far + _headline(question, decision),
        ranking=ranked,
        ranked=_ranked(ranked),
        reason=_reason(question, decision, machine),
        certainty="; ".join(_certainty(question, decision, again if pending else "")),
        memory="; ".join(_memory(question, decision, machine)),
        command=(
            again
            if again and pending
            else commands.following(question, decision, machine, measured)
        ),
        labels=tuple(dict.fromkeys([*shown.labels, *[foreign_load.NOISY] * noisy])),
    )


def _name(row: Row) -> str:
    case = row.case
    if case.traits.all_cores:
        return in_words(case)
    hosts = f" on {case.hosts} hosts" if case.hosts > 1 else ""
    return f"{in_words(case)} on {devices(case)}{hosts}"


RANKED = 5
"""The number of cases of a ranking that a text names."""


def _ranked(rows: Sequence[Row]) -> str:
    """Return the speed-ups of a ranking as a clause, and how probable it is that it has the first.

    A speed-up whose interval must not be shown is marked with "~".
    """
    if len(rows) < 2:
        return ""
    first, *others = rows
    parts = [f"{place(first)} {_gain(first) if first.speedup and _shown(first) else about(first)}"]
    parts += [f"{place(row)} {about(row)}" for row in others[: RANKED - 1]]
    more = f", and {len(rows) - RANKED} more" if len(rows) > RANKED else ""
    sure = sure_of_first(rows)
    standing = ", ".join(parts) + more
    return standing if sure is None else f"{standing}; {_how_sure(sure)}"


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


def _how_sure(chance: float) -> str:
    if chance < 0.5:
        return "it is not clear which is the fastest"
    least = "more than 99%" if chance > 0.99 else f"at least {chance:.0%}"
    return f"the first is the fastest with a probability of {least}"


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
    best = best_of(decision.open)
    if best.speedup and best.speedup.doubt:
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
    if row.step and row.source is Source.PREDICTED:
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
    assert row.step
    assert base.step
    divisor = row.case.devices * base.case.batch_size / row.case.batch_size
    lost_s = row.step.value - base.step.value / divisor
    if lost_s <= 0:
        return "loses no time against perfect scaling"
    ideal = {name: seconds / divisor for name, seconds in base.phases.items()}
    phases = summary.changes(ideal, row.phases)
    clause = (
        f"loses {words.time(lost_s)} of {words.time(row.step.value)} per step against perfect"
        " scaling"
    )
    if not {*phases} - {UNATTRIBUTED}:  # a prediction by formulas has no phases
        return clause
    most, *others = sorted(sorted(phases), key=lambda name: -phases[name])
    then = [name for name in others[:2] if phases[name] >= NOTABLE * lost_s]
    parts = [f"{_part(most)} adds most, {words.time(phases[most])}"]
    parts += [f"then {_part(name)}, {words.time(phases[name])}" for name in then]
    return f"{clause}; {', '.join(parts)}"


def _part(phase: str) -> str:
    return "Python code between the phases" if phase == UNATTRIBUTED else phase


def _certainty(question: Question, decision: Decision, again: str) -> Iterator[str]:
    if question.source is Source.PREDICTED:
        yield "predicted, with an 80% interval"
    elif any(map(commands.noisy, decision.open)) and decision.basis is Basis.OPEN:
        yield "no verdict is given on such rounds"
    elif again:
        yield "the time was used up before this was decided; the same command goes on"
    elif decision.basis is Basis.OPEN:
        rounds = commands.rounds_needed(decision.open)
        more = (
            f"about {rounds} rounds"
            if rounds <= commands.ROUNDS_MOST
            else f"more than {commands.ROUNDS_MOST} rounds"
        )
        yield f"{more} should decide this"
    elif decision.basis in (Basis.GAIN, Basis.NO_GAIN):
        judged = [decision.row] if decision.basis is Basis.GAIN else question.candidates
        rounds = min(row.speedup.n for row in judged if row and row.speedup)
        yield (
            "compared with one device, decided at the 95% level from"
            f" {words.count(rounds, 'round')}"
        )
    if decision.row:
        yield from _of_all_steps(question, decision.row)
        yield from _gaps(question, decision.row)
    if decision.row and decision.open:
        names = ", ".join(map(_name, decision.open[:3]))
        yield (
            f"it is undecided whether {names} {words.verb(len(decision.open), 'is', 'are')} faster"
            f" than this choice by {WORTH - 1:.0%} or more"
        )
    if any(foreign_load.NOISY in row.labels for row in question.rows):
        then = ", and the comparison leaves these rounds out"
        if decision.row is None:
            then = ": end them, or let dpbench wait (--patience)"
        elif decision.basis is Basis.ONLY_FITS:  # it compares nothing
            then = ""
        yield (
            f"other processes used {foreign_load.shared(question.home)} in some rounds"
            f" ({foreign_load.NOISY}){then}"
        )
    if question.home.device_kind == "cpu":
        yield "this says nothing about GPUs"


def _of_all_steps(question: Question, row: Row) -> Iterator[str]:
    if row is not question.baseline and any(
        map(uneven.differs, filter(None, (row, question.baseline)))
    ):
        gain = uneven.gain_of_means(row, question.baseline)
        if gain and not gain.doubt:
            yield (
                "some steps are much longer: by the mean of all steps, it gives"
                f" {words.times(gain)}"
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


def highest_peak(row: Row, machine: Resources, fits: str = "") -> str:
    """Return a clause on the row's device with the highest peak of memory.

    `fits` ends the clause if the peak is below the device's known capacity.
    """
    device, peak = max(row.memory.items(), key=lambda pair: pair[1])
    capacity = machine.memory_of(row.case, device) if row.source is Source.MEASURED else 0
    of = f" of {words.size(capacity)}{fits}" if capacity > peak else ""
    return f"device {device} uses up to {words.size(peak)}{of}"
