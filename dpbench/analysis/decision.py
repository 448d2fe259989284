"""Decision: answer whether to train a model on several devices, and with which strategy.

`decide` is the rule. A question is one model at one setting: the cases that are compared with one
baseline, the strategy `single` on one device. A case on several devices is recommended only if it
is decidedly faster than the baseline, by at least `WORTH`; emulated devices, fake GPUs, and
replicas that share a GPU, never are. A result on a CPU holds for this CPU alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from dpbench.analysis import stats, uneven
from dpbench.analysis.summary import Row, homes
from dpbench.records import Case, Fault, Source, Status, plan, schedule
from dpbench.records.estimate import Doubt, Estimate
from dpbench.records.names import unusual
from dpbench.records.registry import Role

WORTH = 1.05
"""The least speed-up, over one device or over fewer devices, that is worth more devices."""


class Choice(StrEnum):
    """The answers: several devices or one; for an observed loop, change or keep it; or unknown.

    On a machine with one GPU, the answer is a prediction.
    """

    USE = "use"
    STAY = "stay with one device"
    CHANGE = "change the loop"
    KEEP = "nothing stands out"
    PREDICTED = "predicted from one GPU"
    UNKNOWN = "cannot tell"


class Basis(StrEnum):
    """The reason for a choice."""

    GAIN = auto()
    """A case is decidedly faster than the baseline, with a worthwhile gain."""
    ONLY_FITS = auto()
    """The baseline runs out of a GPU's memory, and a case on several GPUs does not."""
    NO_GAIN = auto()
    """Every case on several devices is decidedly without a worthwhile gain."""
    OPEN = auto()
    """It is undecided whether a case has a worthwhile gain."""
    UNEVEN = auto()
    """A case gains by the median step, and loses by the mean of all steps."""
    LOST = auto()
    """No case with a result has a gain, but other cases on several devices failed."""
    NO_BASELINE = auto()
    ONE_DEVICE = auto()
    """No case ran on several devices."""
    OTHER_VERSION = auto()
    """All cases on several devices ran under schedules that only another version has."""
    NO_RESULT = auto()
    """No case on several devices has a result."""
    COLOCATED = auto()
    EMULATED = auto()
    FAKE_GPU = auto()


@dataclass(frozen=True, kw_only=True)
class Question:
    """The rows that are compared with one baseline, which is `single` on one device.

    `home` is the case of the baseline, and `baseline` its row, None if not measured. `others` are
    all other rows. `weak` is True if cases on several devices have the batch size of `home` on each
    device.
    """

    home: Case
    source: Source
    baseline: Row | None
    others: tuple[Row, ...]
    weak: bool = False

    @property
    def several(self) -> tuple[Row, ...]:
        """Return the rows of cases on several devices."""
        return tuple(row for row in self.others if row.case.devices > 1)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return all rows, the baseline's first."""
        return (*([self.baseline] if self.baseline else []), *self.others)

    @property
    def candidates(self) -> tuple[Row, ...]:
        """Return the rows that may be recommended: several devices, or one with all CPU cores.

        Replicas that share a GPU are left out, and so are cases with wrong gradients in a round,
        schedules that only another version of dpbench has, and predictions for strategies whose
        predictions were never compared with measurements.
        """
        return tuple(
            row
            for row in self.others
            if row.step
            and (row.case.devices > 1 or row.case.traits.all_cores)
            and not row.colocated
            and Fault.UNVERIFIED not in row.lost
            and schedule.available(row.case.schedule)
            and (row.source.timed or row.case.traits.role is not Role.OTHER)
        )

    @property
    def failed(self) -> tuple[Row, ...]:
        """Return the rows on several devices without a result, or with wrong gradients in a round.

        Cases that ran out of memory or were skipped do not count: their outcome is a result.
        """
        return tuple(
            row
            for row in self.several
            if Fault.UNVERIFIED in row.lost or (not row.step and {*row.lost} - {Status.OOM})
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The decision on a question.

    `row` is the recommended case, None for `Choice.UNKNOWN`. `open` are candidates for which the
    measurements do not decide whether they are faster than it or, without it, have a worthwhile
    gain.
    """

    choice: Choice
    basis: Basis
    row: Row | None = None
    open: tuple[Row, ...] = ()


def decide(question: Question) -> Decision:
    """Return the decision on a question.

    The intervals of the speed-ups over the baseline decide; they hold together with 95 %. Of the
    candidates decidedly faster than the baseline, by at least `WORTH`, the fastest wins, or one
    that is slower by a factor below `WORTH` but has fewer devices or a better-known strategy. Stay
    with one device if no case on several devices failed, and the whole interval of each is below
    `WORTH`. A speed-up from too few or NOISY rounds decides nothing. A case that is
    slower than the baseline by the mean of all steps is never recommended.
    """
    obstacle = _timeless(question) or _obstacle(question)
    if obstacle is Basis.ONLY_FITS:
        # without a baseline there are no speed-ups of this question
        fitting = _simplest(question.candidates, _rate)
        return Decision(choice=Choice.USE, basis=obstacle, row=fitting)
    if obstacle:
        return Decision(choice=Choice.UNKNOWN, basis=obstacle)
    return _by_speed_ups(question)


def _by_speed_ups(question: Question) -> Decision:
    candidates = question.candidates
    gains = [row for row in candidates if _verdict(row) == "faster" and speed(row) >= WORTH]
    lasting = [row for row in gains if not _loses_by_all_steps(row, question.baseline)]
    if gains and not lasting:
        return Decision(choice=Choice.UNKNOWN, basis=Basis.UNEVEN, open=tuple(gains))
    if lasting:
        best = _simplest(lasting, speed)
        choice = Choice.STAY if best.case.traits.all_cores else Choice.USE
        return Decision(choice=choice, basis=Basis.GAIN, row=best, open=_rivals(best, candidates))
    unsure = tuple(row for row in candidates if not _without_gain(row))
    if any(row.case.devices > 1 for row in unsure):
        return Decision(choice=Choice.UNKNOWN, basis=Basis.OPEN, open=unsure)
    if question.failed:
        return Decision(choice=Choice.UNKNOWN, basis=Basis.LOST)
    return Decision(choice=Choice.STAY, basis=Basis.NO_GAIN, row=question.baseline, open=unsure)


def unsettled(question: Question, decision: Decision) -> frozenset[Case]:
    """Return the cases of which further rounds can settle a decision; empty if it is settled.

    A decision is settled if a choice is made, and no other candidate may be faster than the
    recommended case by more than `WORTH`. For the choice between one and several devices, one
    device with all cores does not matter. The baseline is always among the cases, because speed-ups
    use the rounds that both cases have.
    """
    if decision.basis in (Basis.OPEN, Basis.UNEVEN):
        several = (row.case for row in decision.open if row.case.devices > 1)
        return frozenset({question.home, *several})
    if decision.basis is Basis.GAIN and decision.row and decision.open:
        rivals = (row.case for row in (decision.row, *decision.open))
        return frozenset({question.home, *rivals})
    return frozenset()


def ranking(question: Question) -> tuple[Row, ...]:
    """Return the baseline and the candidates by their speed, the fastest first.

    Empty if the question has no speed-ups, or times that mean nothing.
    """
    if _timeless(question) or not question.baseline or not question.baseline.step:
        return ()
    compared = [row for row in question.candidates if row.speedup]
    return tuple(sorted((question.baseline, *compared), key=_of_baseline, reverse=True))


def _of_baseline(row: Row) -> float:
    return row.speedup.value if row.speedup else 1.0


class First(StrEnum):
    """What is decided about the first of a ranking, by intervals that hold together with 95 %."""

    FASTEST = auto()
    NEARLY = auto()
    """It is the fastest, or slower than the fastest by a factor of less than `WORTH`."""
    OPEN = auto()


def of_first(ranked: Sequence[Row]) -> First | None:
    """Return what is decided about the first of several rows; None if nothing can be.

    Ratios of too few or NOISY rounds decide nothing. The intervals hold together, at every look:
    their level is that of the speed-ups, raised for the number of rows that could have come first.
    """
    if len(ranked) < 2:
        return None
    first, *others = ranked
    of_speedups = max((row.speedup.level for row in ranked if row.speedup), default=0.0)
    level = stats.joint_level(len(ranked), of_speedups)
    ratios = [_over(first, row, level) for row in others]
    if not all(one.decides for one in ratios):
        return None
    if all(one.low > 1 for one in ratios):
        return First.FASTEST
    return First.NEARLY if all(one.low * WORTH > 1 for one in ratios) else First.OPEN


def _over(row: Row, other: Row, level: float) -> Estimate:
    """Return the ratio of the speeds of two rows of a ranking, of which one may be the baseline."""
    if row.series and other.series:
        return ratio_of(row, other, level=level)
    if row.speedup and other.speedup:
        return stats.quotient(row.speedup, other.speedup)
    if row.speedup:
        return row.speedup
    assert other.speedup
    return other.speedup.inverse


def _timeless(question: Question) -> Basis | None:
    """Return the reason why steps on these devices say nothing about time, if there is one."""
    if any(row.on_fake_gpus for row in question.rows):
        return Basis.FAKE_GPU
    return Basis.EMULATED if question.home.device_kind == "emulated" else None


def _obstacle(question: Question) -> Basis | None:
    several = question.several
    baseline = question.baseline
    if not several:
        return Basis.ONE_DEVICE
    if all(row.colocated for row in several):
        return Basis.COLOCATED if any(row.step for row in several) else Basis.NO_RESULT
    if not any(schedule.available(row.case.schedule) for row in several):
        return Basis.OTHER_VERSION
    if not any(row.case.devices > 1 for row in question.candidates):
        return Basis.NO_RESULT
    if baseline is None or baseline.step is None:
        # logical CPU devices share one memory: a case that fits on several of them fits on one
        out = (
            baseline is not None
            and baseline.status is Status.OOM
            and question.home.device_kind == "cuda"
        )
        return Basis.ONLY_FITS if out else Basis.NO_BASELINE
    return None


def _verdict(row: Row) -> str:
    return stats.verdict(row.speedup) if row.speedup else "undecided"


def _loses_by_all_steps(row: Row, baseline: Row | None) -> bool:
    gain = uneven.gain_of_means(row, baseline)
    return gain is not None and gain.value < 1


def _without_gain(row: Row) -> bool:
    return row.speedup is not None and row.speedup.decides and row.speedup.high < WORTH


def speed(row: Row) -> float:
    """Return the row's speed-up; without one, its samples per second."""
    return row.speedup.value if row.speedup else _rate(row)


def best_of(rows: Sequence[Row]) -> Row:
    """Return the fastest of one or more rows of a question."""
    return max(rows, key=speed)


def _rate(row: Row) -> float:
    return row.throughput.value if row.throughput else 0.0


def _simplest(rows: Sequence[Row], of: Callable[[Row], float]) -> Row:
    """Return, of the rows about as fast as the fastest, the one with the fewest devices.

    Among equals, the one with the best-known strategy. `of` returns the speed of a row.
    """
    most = max(map(of, rows))
    roles = [Role.ALL_CORES, Role.CONTROL, Role.WRAPPER, Role.ENGINE, Role.OTHER]
    return min(
        (row for row in rows if of(row) * WORTH > most),
        key=lambda row: (row.case.devices, roles.index(row.case.traits.role), -of(row)),
    )


def _rivals(best: Row, rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the rows that may be faster than `best` by more than `WORTH`."""
    level = best.speedup.level if best.speedup else stats.CONFIDENCE
    others = [row for row in rows if row is not best]
    return tuple(row for row in others if _may_gain(ratio_of(row, best, level=level)))


def _may_gain(ratio: Estimate) -> bool:
    return ratio.doubt is Doubt.NOISY or ratio.high >= WORTH


def ratio_of(row: Row, other: Row, *, level: float = stats.CONFIDENCE) -> Estimate:
    """Return the ratio of the speeds, from timed steps or, without them, from speed-ups.

    `level` is the probability with which the interval of a ratio from timed steps holds.
    """
    if row.series and other.series:
        found = stats.ratio(other.series, row.series, level=level)
        return found.scaled(row.case.batch_size / other.case.batch_size)
    assert row.speedup
    assert other.speedup
    return stats.quotient(row.speedup, other.speedup)


def questions(rows: Iterable[Row]) -> list[Question]:
    """Return the questions of a run, those without unusual settings first.

    Strong and weak scaling are separate questions. Left out are observed loops, DataLoaders, cases
    that share the machine with another model, emulated devices for models also measured on others,
    and batch sizes on one device only if the model has cases on several.
    """
    asks = (
        row
        for row in rows
        if row.case.options != plan.LIMIT and row.case.traits.comparable and not row.case.neighbour
    )
    table = {row.key: row for row in asks}
    groups: dict[tuple[Case, Source, bool], list[Row]] = {}
    for (case, source), row in table.items():
        home = next(
            (baseline for baseline in homes(case) if (baseline, source) in table), homes(case)[0]
        )
        groups.setdefault((home, source, home.batch_size != case.batch_size), []).append(row)
    grouped = []
    for (home, source, weak), group in groups.items():
        alone = (
            [row for row in groups.get((home, source, False), ()) if row.case.devices == 1]
            if weak
            else []
        )
        others = tuple(row for row in (*alone, *group) if row.case != home)
        grouped.append(
            Question(
                home=home,
                source=source,
                baseline=table.get((home, source)),
                others=others,
                weak=weak,
            )
        )
    several = {(question.home.model, question.source) for question in grouped if question.several}
    real = {question.home.model for question in grouped if question.home.device_kind != "emulated"}
    kept = [
        question
        for question in grouped
        if (question.several or (question.home.model, question.source) not in several)
        and (question.home.device_kind != "emulated" or question.home.model not in real)
    ]
    return sorted(kept, key=lambda question: bool(unusual(question.home)))
