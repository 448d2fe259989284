"""Comparison: the ratio of the speeds of two runs of the same cases, its verdict, and the cause.

Runs in unlike environments are compared only if the caller asks for it: across the facts that are
to differ, or whatever differs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from dpbench.analysis import stats, summary
from dpbench.analysis.summary import FAKE_GPU, all_labels, measured, order, shown
from dpbench.records import Case, Trial, words
from dpbench.records.environment import (
    DEVICES,
    FAKES,
    Difference,
    Environment,
    asked_for,
    differences,
)
from dpbench.records.errors import UsageError
from dpbench.records.estimate import Estimate
from dpbench.records.grouping import grouped
from dpbench.records.trial import by_case
from dpbench.store import PastRun, StoredRun

SURE = 0.99
"""The probability with which the intervals of all ratios of a comparison hold together.

It is higher than in one run, because two runs also differ in ways that no round of either shows.
"""
NAMED = 3
"""The most labels in a list of cases that only one run has."""
NEVER = 100
"""More rounds are not recommended if at least this number would be needed to decide a verdict."""
ORDER = ("slower", "faster", "undecided", "same")
"""The verdicts in the order in which cases are listed."""
VERDICTS = {"faster": "faster", "slower": "slower", "same": "the same", "undecided": "cannot tell"}
"""The verdicts in words."""


class Measured(Protocol):
    """A run with its trials: a `Report` or a `PastRun`."""

    @property
    def run(self) -> StoredRun:
        """Return the run, without its trials."""

    @property
    def trials(self) -> Sequence[Trial]:
        """Return the run's trials."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case compared between two runs.

    `before` and `after` are the median step times in seconds. `ratio` is above 1 if the second run
    is faster; `reason` explains the verdict. `phase` changed most, by `phase_s` seconds per step
    (negative if shorter), the fraction `share` of the absolute changes of all phases. `other` is
    the case in the second run; it differs from `case` only if unlike devices are compared.
    """

    case: Case
    other: Case
    before: Estimate
    after: Estimate
    ratio: Estimate
    verdict: str
    reason: str
    phase: str
    phase_s: float
    share: float
    labels: tuple[str, ...]

    @property
    def decided(self) -> bool:
        """Return True if the verdict is "faster" or "slower"."""
        return self.verdict in ("faster", "slower")

    @property
    def name(self) -> str:
        """Return the label of the case, with the kinds of devices if they differ."""
        kinds = f" ({self.case.device_kind}, then {self.other.device_kind})"
        return self.case.label + (kinds if self.case.device_kind != self.other.device_kind else "")


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """Two runs compared: common cases, by verdict, and the facts in which the environments differ.

    `lost` has the reason for each common case without a ratio, such as a missing result, and
    `alone` the cases that only the run "before" or only the run "after" has. `differing` also has
    facts that forbid no comparison, such as one that a run did not record. `asked` names the facts
    across which the runs are compared.
    """

    lines: Sequence[Comparison]
    lost: Mapping[Case, str]
    differing: Sequence[Difference]
    margin: float
    asked: Collection[str] = ()
    alone: Mapping[str, Sequence[Case]] = field(default_factory=dict)

    @property
    def across(self) -> Sequence[Difference]:
        """Return the differences that the comparison is about, because they were asked for."""
        return [one for one in self.differing if one.asked in self.asked and not one.unknown]

    @property
    def unlike(self) -> Sequence[Difference]:
        """Return the others for which runs are only compared if the caller allows any."""
        return [one for one in self.differing if one.forbids and one.asked not in self.asked]

    @property
    def notes(self) -> Sequence[str]:
        """Return the differences that forbid nothing, and each fact asked for that has none.

        If one of the runs has cases that the other lacks, the last one names them.
        """
        known = {one.asked for one in self.differing}
        return [
            *(str(one) for one in self.differing if one not in {*self.across, *self.unlike}),
            *(f"{one}: no recorded difference" for one in sorted({*self.asked} - known)),
            *self._of_one_run,
        ]

    @property
    def _of_one_run(self) -> Sequence[str]:
        found = [
            f'{words.count(len(cases), "case")} only in the run "{name}" ({_named(cases)})'
            for name, cases in self.alone.items()
            if cases
        ]
        return [f"not compared: {', and '.join(found)}"] if found else []

    @property
    def verdicts(self) -> Counter[str]:
        """Return the number of cases by verdict; cases without a result count as undecided."""
        return Counter([*(line.verdict for line in self.lines), *("undecided" for _ in self.lost)])


def between(
    before: Measured,
    after: Measured,
    *,
    margin: float = stats.MARGIN,
    across: str | Iterable[str] = (),
    unlike: bool = False,
) -> Comparisons:
    """Return the comparison of two runs.

    `margin` is the relative difference up to which two cases count as the same. `across` names the
    facts that may differ because their effect is the question; see `environment.asked_for`. Raises
    ValueError for a name that is none, without a common measured case, if only one run is on fake
    GPUs and, unless `unlike`, if the environments differ in another fact that forbids it.
    """
    found = Comparisons(
        lines=(),
        lost={},
        differing=unlikes(before, after),
        margin=margin,
        asked=asked_for(across),
    )
    if any(one.name == FAKES and one.forbids for one in found.differing):
        raise UsageError(
            f"one of the two runs is labelled {FAKE_GPU}: the times on fake GPUs mean nothing, and"
            " are not compared with those on real devices; give two runs on real devices"
        )
    if found.unlike and not unlike:
        asked = [*sorted(found.asked), *(one.asked for one in found.unlike)]
        names = ",".join(dict.fromkeys(asked))
        raise UsageError(
            "the two runs differ ({said})",
            option="unlike",
            value=True,
            remedy=f"give {{}} to compare them nevertheless, or {{across:{names}}} if the effect"
            " of these differences is the question",
            said="; ".join(map(str, found.unlike)),
        )
    elsewhere = bool(found.unlike) or any(one.asked == DEVICES for one in found.across)
    lines = compare(
        before.trials,
        after.trials,
        margin=margin,
        elsewhere=elsewhere,
        labels=[*["ACROSS"] * bool(found.across), *["UNLIKE"] * bool(found.unlike)],
    )
    lost = uncompared(before.trials, after.trials, elsewhere=elsewhere)
    alone = unmatched(before.trials, after.trials, elsewhere=elsewhere)
    if not lines:
        reasons = "".join(f"; {case.label}: {reason}" for case, reason in lost.items())
        raise UsageError(
            f"the runs {before.run.id[:8]} and {after.run.id[:8]} have no measured case in"
            f" common{reasons}"
        )
    return replace(found, lines=lines, lost=lost, alone=alone)


def unlikes(before: Measured, after: Measured) -> list[Difference]:
    """Return the facts in which the environments of two runs differ."""
    return differences(*(Environment.of(one.run.facts, one.trials) for one in (before, after)))


def compare(
    before: Sequence[Trial],
    after: Sequence[Trial],
    *,
    margin: float = stats.MARGIN,
    elsewhere: bool = False,
    labels: Sequence[str] = (),
) -> list[Comparison]:
    """Return the comparison of every case with results in both runs; above 1, `after` is faster.

    `margin` is the relative difference up to which two cases count as the same. The intervals of
    all ratios hold together with the probability `SURE`. With `elsewhere`, a case that only one
    run has is compared with the same case on another kind of device; emulated devices, whose time
    is host time only, never are. `labels` are added to those of each case. Cases that took only a
    few steps (`Trial.slow`) in one of the runs are left out.
    """
    pairs = [
        pair
        for pair in _pairs(before, after, elsewhere=elsewhere)
        if all(map(measured, pair)) and len(_modes(pair)) == 1
    ]
    level = stats.joint_level(len(pairs), SURE)
    lines = []
    for earlier, later in pairs:
        ratio = stats.ratio(measured(earlier), measured(later), paired=False, level=level)
        verdict = stats.verdict(ratio, margin=margin)
        changes = moved(earlier, later)
        phase, phase_s = summary.largest(changes)
        total_s = sum(map(abs, changes.values()))
        lines.append(
            Comparison(
                case=earlier[-1].case,
                other=later[-1].case,
                before=stats.median(measured(earlier)),
                after=stats.median(measured(later)),
                ratio=ratio,
                verdict=verdict,
                reason=_reason(ratio, verdict, len(pairs), margin),
                phase=phase,
                phase_s=phase_s,
                share=abs(phase_s) / total_s if total_s else 0.0,
                labels=(*all_labels([*shown(earlier), *shown(later)]), *labels),
            )
        )
    return sorted(lines, key=lambda line: (ORDER.index(line.verdict), order(line.case)))


def earlier(case: Case, run: Measured, past: Iterable[PastRun]) -> str:
    """Return a clause that compares a case of a run with the newest of `past` that is like it.

    "" if no such run measured the case, or if its times mean nothing. The verdict needs the margin
    and the interval of `compare`. The clause names the facts that only one of the runs recorded.
    """
    here = _timed(case, run)
    for before in sorted(past, key=lambda one: one.run.started, reverse=True):
        differing = unlikes(before, run)
        if any(one.forbids for one in differing):
            continue
        if not (found := compare(_timed(case, before), here)):
            continue
        line = found[0]
        unknown = ", ".join(one.name for one in differing if one.unknown)
        noted = f"; unknown in one of the two: {unknown}" if unknown else ""
        phase = (
            f", most of the change in {line.phase} ({words.signed_time(line.phase_s)})"
            if line.decided
            else ""
        )
        speed = "" if line.ratio.doubt else " the speed"
        return (
            f"against run {before.run.id[:8]} of {words.day(before.run.started)}:"
            f" {VERDICTS[line.verdict]} ({words.times(line.ratio)}{speed}){phase}{noted}"
        )
    return ""


def _timed(case: Case, run: Measured) -> list[Trial]:
    """Return a run's trials of a case on real devices, without predictions."""
    return [
        trial
        for trial in run.trials
        if trial.case == case and trial.source.timed and not trial.on_fake_gpus
    ]


def _pairs(
    before: Sequence[Trial], after: Sequence[Trial], *, elsewhere: bool
) -> list[tuple[list[Trial], list[Trial]]]:
    """Return the trials in both runs of each case that both have, even without a result."""
    first, second = map(_by_case, (before, after))
    matches = _matches(first, second, elsewhere=elsewhere)
    return [(first[case], second[other]) for case, other in matches.items()]


def _by_case(trials: Iterable[Trial]) -> dict[Case, list[Trial]]:
    """Return the trials of each case, without predictions."""
    return by_case(trial for trial in trials if trial.source.timed)


def _matches(
    first: Collection[Case], second: Collection[Case], *, elsewhere: bool
) -> dict[Case, Case]:
    """Return, for each case of `first` that is compared, the case of `second`.

    If `elsewhere`, a case that only one of them has matches the same case on another kind of
    device, except an emulated one, so that GPUs match CPUs.
    """
    found = {case: case for case in first if case in second}
    if elsewhere:
        others = {_anywhere(case): case for case in [*second][::-1] if case not in found}
        for case in first:
            if case not in found and (key := _anywhere(case)) in others:
                found[case] = others.pop(key)
    return found


def _anywhere(case: Case) -> Case:
    """Return a key that is equal for the same case on all kinds of devices but emulated ones."""
    emulated = case.device_kind == "emulated"
    return case if emulated else replace(case, device_kind="cpu", device_ids=())


def _modes(pair: tuple[list[Trial], list[Trial]]) -> set[bool]:
    """Return whether the trials behind a ratio took only a few steps; both if they differ."""
    return {trial.facts.slow for trials in pair for trial in shown(trials)}


def _reason(ratio: Estimate, verdict: str, count: int, margin: float) -> str:
    if ratio.doubt:
        return f"{words.withheld(ratio)}: {words.doubt(ratio)}; {words.REMEDY} would help"
    if verdict == "same":
        although = "" if ratio.low <= 1 <= ratio.high else ", although it excludes 1"
        return (
            f"the whole interval is within the margin of {words.percent(margin)} around 1{although}"
        )
    if verdict != "undecided":
        cases = f" for all of {count} cases together" if count > 1 else ""
        return (
            f"the whole interval is {'above' if verdict == 'faster' else 'below'} 1, at"
            f" {SURE:.0%}{cases}"
        )
    rounds = stats.rounds_to_decide(ratio, margin=margin, most=NEVER)
    hopeless = rounds >= NEVER
    enough = (
        f"about {words.count(rounds, 'round')} per run would lead to one with a probability of"
        f" {stats.POWER:.0%}"
    )
    more = "more rounds will hardly lead to a verdict" if hopeless else enough
    return (
        f"the interval includes 1 and extends beyond the margin of {words.percent(margin)}; {more}"
    )


def uncompared(
    before: Sequence[Trial], after: Sequence[Trial], *, elsewhere: bool = False
) -> dict[Case, str]:
    """Return the common cases without a comparison, each with the reason."""
    reasons = {}
    for earlier, later in _pairs(before, after, elsewhere=elsewhere):
        case = earlier[-1].case
        lacking = [
            f'no result in the run "{name}": {_refusal(side)}'
            for name, side in (("before", earlier), ("after", later))
            if not measured(side)
        ]
        if lacking:
            reasons[case] = "; ".join(lacking)
        elif len(_modes((earlier, later))) > 1:
            reasons[case] = _in_two_modes(earlier, later)
    return reasons


def unmatched(
    before: Sequence[Trial], after: Sequence[Trial], *, elsewhere: bool = False
) -> dict[str, list[Case]]:
    """Return the cases that only the run "before" or only the run "after" has."""
    first, second = map(_by_case, (before, after))
    matches = _matches(first, second, elsewhere=elsewhere)
    others = {*matches.values()}
    return {
        "before": [case for case in first if case not in matches],
        "after": [case for case in second if case not in others],
    }


def _named(cases: Sequence[Case]) -> str:
    """Return the labels of the first cases as text, and how many there are besides."""
    more = f" and {len(cases) - NAMED} more" if len(cases) > NAMED else ""
    return ", ".join(case.label for case in cases[:NAMED]) + more


def _refusal(trials: Sequence[Trial]) -> str:
    return trials[-1].refusal.partition("\n")[0]


def _in_two_modes(before: Sequence[Trial], after: Sequence[Trial]) -> str:
    steps = ", then ".join(words.duration(stats.median(measured(side))) for side in (before, after))
    return (
        "no ratio: some trials took few steps, because these are long, and other trials did not"
        f" ({steps} per step); measure both runs with a smaller batch"
    )


def moved(before: Sequence[Trial], after: Sequence[Trial]) -> dict[str, float]:
    """Return the change of each phase in seconds per step, negative if it became shorter."""
    return summary.changes(_phase_medians(before), _phase_medians(after))


def _phase_medians(trials: Sequence[Trial]) -> dict[str, float]:
    steps = [trial.by_column.timed(trial.ledger.phases) for trial in trials if trial.trusted]
    medians = grouped(
        (name, statistics.median(phases.get(name, 0.0) for phases in of_trial))
        for of_trial in steps
        for name in dict.fromkeys(name for phases in of_trial for name in phases)
    )
    return {name: statistics.median(values) for name, values in medians.items()}
