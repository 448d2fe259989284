"""Transfers: the bytes that one training step must move between devices, by phase, from shapes.

Only bytes that must cross a link count, without copies within a device, padding, losses and the
divisors of local losses (a few bytes each). Every all-reduce counts as a ring all-reduce.
docs/measuring.md lists the limits.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from dpbench.analysis import stats
from dpbench.analysis.moves import of_trial
from dpbench.records import HOST, Case, Phase, Trial
from dpbench.records.case import MOVING
from dpbench.records.estimate import Estimate
from dpbench.records.facts import stated
from dpbench.records.grouping import summed
from dpbench.records.registry import Parallelism, Reduction
from dpbench.records.schedule import known
from dpbench.records.trial import Key, by_key
from dpbench.records.words import number
from dpbench.records.work import (
    Move,
    Operations,
    fastest,
    received,
    times_links,
)

Floors = dict[tuple[Phase, int], float]
"""The least seconds of a phase on a device, by both."""
MOST_ROUNDS = 10_000
"""A number above that of every round, by which the passes over links in one round are apart."""


@dataclass(frozen=True, kw_only=True)
class PhaseTraffic:
    """The moves of bytes between devices in one phase of one step of a case.

    `seconds` has, by device that receives bytes, its seconds per step in the phase, without waits
    for other devices (`Ledger.moved`): the median over rounds of the median over each round's timed
    steps. `rate` is all bytes over the sum of `seconds`, per second: the mean rate of a device,
    because devices that receive at the same time each have their own seconds. `seconds` is empty
    and `rate` None if compute overlaps the moves (`hidden`), or if a device that receives bytes has
    no span.
    """

    case: Case
    phase: Phase
    moves: tuple[Move, ...]
    seconds: Mapping[int, float]
    rate: float | None
    hidden: bool

    @property
    def bytes(self) -> float:
        """Return the total bytes that the phase moves in one step."""
        return sum(move.bytes for move in self.moves)

    def rate_of(self, device: int) -> float | None:
        """Return the bytes per second that `device` receives in the phase; None if unknown."""
        seconds = self.seconds.get(device, 0.0)
        return (
            received(self.moves, device) / seconds
            if self.rate is not None and seconds > 0
            else None
        )


def flows(trials: Iterable[Trial]) -> list[PhaseTraffic]:
    """Return the traffic of each case in each phase that moves bytes, in order of the trials."""
    traffic = []
    for (case, _), group in _grouped(trials).items():
        moves = _moves(group)
        for phase in dict.fromkeys(move.phase for move in moves):
            of_phase = tuple(move for move in moves if move.phase is phase)
            hidden = not _separable(case, phase)
            seconds = {} if hidden else _seconds(group, phase, {move.target for move in of_phase})
            total = sum(seconds.values())
            rate = sum(move.bytes for move in of_phase) / total if total > 0 else None
            traffic.append(
                PhaseTraffic(
                    case=case,
                    phase=phase,
                    moves=of_phase,
                    seconds=seconds,
                    rate=rate,
                    hidden=hidden,
                )
            )
    return traffic


def _grouped(trials: Iterable[Trial]) -> dict[Key, list[Trial]]:
    return by_key(trial for trial in trials if trial.trusted and trial.timed)


def _moves(trials: Iterable[Trial]) -> list[Move]:
    """Return the moves of the case of all of `trials`; empty if no trial says what moves."""
    return next(filter(None, map(of_trial, trials)), [])


def _separable(case: Case, phase: Phase) -> bool:
    """Return whether the moves of `phase` do not overlap with compute."""
    if phase is Phase.REDUCE:
        if case.traits.scheduled:
            return known(case.schedule) is not None
        return case.traits.reduction is not Reduction.OVERLAPPED
    return phase in MOVING


def _seconds(trials: Sequence[Trial], phase: Phase, devices: Collection[int]) -> dict[int, float]:
    """Return the seconds per step in `phase` of each of `devices`; empty if one has none."""
    found = {}
    for device in sorted(devices):
        rounds = [trial.ledger.moved.get((phase, device)) for trial in trials]
        medians = [statistics.median(seconds) for seconds in rounds if seconds]
        if not any(medians):
            return {}
        found[device] = statistics.median(medians)
    return found


SLOW_LINK = 1.5
"""A link is slow if a copy takes more than this number of times as long as over the others."""


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A slow link between two devices, or between the host (-1) and a device.

    `ends` are the source and the target in the slower direction. If `one_way`, copies in the other
    direction are not slow. `rate` is the rate in the slower direction, and `others` the median rate
    of the other links, in bytes per second. `slower` is the time of a copy over the median time on
    the other links.
    """

    ends: tuple[int, int]
    one_way: bool
    rate: float
    others: float
    slower: Estimate

    def __str__(self) -> str:
        """Return a clause that names the link and both rates."""
        first, second = self.ends if self.one_way else sorted(self.ends)
        start = "the host" if first == HOST else f"device {first}"
        ends = (
            f"from {start} to device {second}"
            if self.one_way
            else f"between {start} and device {second}"
        )
        rate = number(self.rate / 1e9)
        others = number(self.others / 1e9)
        return f"the link {ends} is slow: {rate} GB/s, the others {others} GB/s"


def with_links(case: Case, trials_of: Mapping[Case, Sequence[Trial]]) -> list[Trial]:
    """Return the trials that timed the links between the GPUs of a case: its own, or another's.

    A run times the links only once, in a trial of a case with the most GPUs. `trials_of` has all
    trials of the run by case. The links of GPUs that the case does not use are left out.
    """

    def timed(other: Case) -> list[Trial]:
        return [trial for trial in trials_of.get(other, ()) if trial.facts.links is not None]

    def alike(other: Case) -> bool:
        known = times_links(other) and other.device_ids[:count] == case.device_ids[:count]
        return known and other.devices >= count

    count = case.devices
    on_gpus = case.device_kind == "cuda" and case.placement == "spread" and case.hosts == 1
    if (own := timed(case)) or not on_gpus:
        return own
    others = [trial for other in filter(alike, trials_of) for trial in timed(other)]
    return [_only(trial, count) for trial in others]


def _only(trial: Trial, devices: int) -> Trial:
    """Return the trial with the links between the host and its first `devices` devices."""
    copies = trial.facts.copies
    kept = tuple(one for one in copies if max(one.source, one.target) < devices)
    return trial.adding(stated(links=kept))


def slow_links(trials: Iterable[Trial], *, to_host: bool) -> list[SlowLink]:
    """Return the slow links between two GPUs or, if `to_host`, from the host; [] for a single link.

    A link is slow if, in one direction, its median copy takes more than `SLOW_LINK` times as long
    as that of the other links. The interval of this ratio may contain `SLOW_LINK` or be in doubt.
    """
    every = {
        ends: copies for ends, copies in _copies(trials).items() if (ends[0] == HOST) is to_host
    }
    typical_s = {ends: stats.median(copies).value for ends, copies in every.items()}
    links = []
    for pair in dict.fromkeys((min(ends), max(ends)) for ends in every):
        ways = [ends for ends in (pair, pair[::-1]) if ends in every]
        rest = [copies for ends, copies in every.items() if ends not in ways]
        if not rest:
            continue
        others = _median_of(rest)
        usual_s = stats.median(others).value
        slow = sorted(
            (ends for ends in ways if typical_s[ends] > SLOW_LINK * usual_s),
            key=lambda ends: -typical_s[ends],
        )
        for ends in slow[:1]:
            links.append(
                SlowLink(
                    ends=ends,
                    one_way=len(slow) < len(ways),
                    rate=_rate(every[ends]),
                    others=statistics.median(map(_rate, rest)),
                    slower=stats.ratio(every[ends], others),
                )
            )
    return links


def _copies(trials: Iterable[Trial]) -> dict[tuple[int, int], stats.Rounds]:
    """Return, by source and target, the seconds per byte of the timed copies, by pass."""
    by_ends: dict[tuple[int, int], dict[int, list[float]]] = {}
    for trial in trials:
        passes: Counter[tuple[int, int]] = Counter()
        for copies in trial.facts.copies if trial.trusted else ():
            ends = copies.source, copies.target
            seconds = [duration / copies.bytes for duration in copies.seconds]
            # the passes of one trial are rounds; older versions made one pass in each round
            number = trial.round + MOST_ROUNDS * passes[ends]
            by_ends.setdefault(ends, {})[number] = seconds
            passes[ends] += 1
    return dict(by_ends)


def _rate(copies: stats.Rounds) -> float:
    """Return the rate of a link in bytes per second."""
    return fastest(1.0, chain.from_iterable(copies.values()))


def floors(case: Case, trials_of: Mapping[Case, Sequence[Trial]]) -> Floors:
    """Return the least seconds of each phase on each device, by its bytes or its operations.

    The bytes go over the measured links, which may all copy at the same time: of a device's links,
    the one that takes longest counts. A phase is left out if one of its links was not measured.
    Forward and backward need at least their operations over the measured peak.
    """
    return {**_by_bytes(case, trials_of), **_by_operations(case, trials_of)}


def _by_operations(case: Case, trials_of: Mapping[Case, Sequence[Trial]]) -> Floors:
    """Return the least seconds by operations; the peak is the best of all cases on like devices.

    Without a peak above 0, none is known.
    """

    def counted(other: Case) -> Iterator[Operations]:
        for trial in trials_of.get(other, ()):
            if found := trial.facts.operations:
                yield found

    def device(of: Case) -> tuple[object, ...]:
        return of.device_kind, of.device_ids[:1], of.precision, of.traits.all_cores

    own = next(counted(case), None)
    if own is None or case.traits.parallelism is Parallelism.OTHER:
        return {}
    alike = [other for other in trials_of if device(other) == device(case)]
    peak_per_s = max(one.peak_per_s for other in alike for one in counted(other))
    if peak_per_s <= 0:
        return {}
    counts = {Phase.FORWARD: own.forward, Phase.BACKWARD: own.backward if case.trains else 0.0}
    return {
        (phase, number): rows * count / peak_per_s
        for phase, count in counts.items()
        for number, rows in enumerate(case.rows)
        if count
    }


def _by_bytes(case: Case, trials_of: Mapping[Case, Sequence[Trial]]) -> Floors:
    seconds_per_byte = {
        ends: 1 / _rate(copies) for ends, copies in _copies(with_links(case, trials_of)).items()
    }
    every = _moves(trials_of.get(case, ())) if seconds_per_byte else []
    unknown = {
        move.phase
        for move in every
        if (move.source, move.target) not in seconds_per_byte or not _separable(case, move.phase)
    }
    by_link = summed(
        ((move.phase, move.source, move.target), move.bytes)
        for move in every
        if move.phase not in unknown
    )
    found: Floors = {}
    for (phase, source, target), size in by_link.items():
        seconds = size * seconds_per_byte[source, target]
        for device in (source, target):
            found[phase, device] = max(seconds, found.get((phase, device), 0.0))
    return found


def _median_of(links: Sequence[stats.Rounds]) -> stats.Rounds:
    """Return the copy times of a typical link in each round that all links have.

    Its first copy takes the median of the links' first copies, its second that of their second, and
    so on.
    """
    common = set(links[0]).intersection(*links)
    return {
        number: [
            statistics.median(copies)
            for copies in zip(*(link[number] for link in links), strict=True)
        ]
        for number in sorted(common)
    }
