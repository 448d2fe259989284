"""Hosts: find slow machines of a launch, unlike machines, and hosts that share a machine.

In every round, all machines run the step of the baseline (`single`) at the same time, without
communication. A slow machine delays every rank at each collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dpbench.analysis import stats
from dpbench.records import Case, Trial, disturbance, host_device, words
from dpbench.records.environment import Difference, Environment, differences, forbidding
from dpbench.records.estimate import Estimate
from dpbench.records.facts import Machine
from dpbench.records.grouping import grouped
from dpbench.records.trial import ALONE, by_case

SLOW = 1.05
"""A machine is slow if the interval of its step time over the fastest machine's is above this."""


@dataclass(frozen=True)
class Pace:
    """A machine's median step time over that of the fastest machine, for the same case."""

    case: Case
    host: str
    fastest: str
    ratio: Estimate

    def __str__(self) -> str:
        return (
            f"{self.host} is slow: a step of {self.case.model} on one device takes"
            f" {words.times(self.ratio)} as long there as on {self.fastest}, and every rank"
            " waits for it"
        )

    @property
    def slow(self) -> bool:
        """Return whether the ratio has enough rounds, and its whole interval is above `SLOW`."""
        return not self.ratio.doubt and self.ratio.low > SLOW


def paces(trials: Sequence[Trial]) -> list[Pace]:
    """Return the pace of each machine but the fastest, per baseline that several machines ran."""
    found: list[Pace] = []
    for case, group in by_case(trials).items():
        steps = grouped(
            (name, (trial.round, seconds))
            for trial in group
            for name, seconds in _alone(trial).items()
        )
        if len(steps) > 1:
            loads = disturbance.by_round(group)
            machines = {name: stats.Timed(rounds, *loads) for name, rounds in steps.items()}
            found += _compared(case, machines)
    return found


def _alone(trial: Trial) -> dict[str, list[float]]:
    """Return each machine's step times in seconds in a trial of a launch's baseline, else {}."""
    readings = trial.readings(ALONE) if trial.trusted else {}
    steps = {
        host.name: readings.get(host_device(number), [])
        for number, host in enumerate(trial.facts.hosts)
    }
    return {name: seconds for name, seconds in steps.items() if seconds}


def _compared(case: Case, machines: Mapping[str, stats.Rounds]) -> Iterator[Pace]:
    medians = {name: stats.median(rounds).value for name, rounds in machines.items()}
    fastest = min(medians, key=lambda name: medians[name])
    # any of the machines could have been the fastest, and any other slow
    level = stats.joint_level(len(machines) * (len(machines) - 1))
    for name, rounds in machines.items():
        if name != fastest:
            yield Pace(case, name, fastest, stats.ratio(rounds, machines[fastest], level=level))


def sentences(trials: Sequence[Trial]) -> list[str]:
    """Return a sentence for each slow machine, the slowest first."""
    return [
        f"{pace}." for pace in sorted(paces(trials), key=lambda one: -one.ratio.value) if pace.slow
    ]


def warnings(machines: Sequence[Machine]) -> Iterator[str]:
    """Yield a sentence for each machine unlike the first, and for hosts that share a machine."""
    for machine, names in sorted(grouped((m.machine, m.name) for m in machines).items()):
        if len(names) > 1:
            yield (
                f"COLOCATED: {' and '.join(names)} are the same machine ({machine[:8]}), whose"
                " cores and memory their ranks share: the figures show that the launch works, not"
                " how it scales"
            )
    for other in machines[1:]:
        found = differences(*(Environment.of(one.facts) for one in (machines[0], other)))
        # a variable whose value neither recorded is no reason to call them unlike
        if unlike := [one for one in found if one.before != one.after]:
            facts = "; ".join(map(_instead, unlike))
            yield f"{other.name} is unlike {machines[0].name}: {facts}"


def failures(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a sentence for each machine that could not run the baseline, with its reason."""
    reasons = {
        host: reason for trial in trials for host, reason in trial.facts.failed_hosts.items()
    }
    for host, reason in reasons.items():
        yield (
            f"{host} could not run the baseline, so that it is not compared with the other"
            f" machines: {reason}"
        )


def unlike(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a sentence if trials were measured in unlike environments, as in a scheduler's jobs."""
    cases = grouped((Environment.of(trial.facts), trial.case) for trial in trials)
    for number, other in enumerate(cases):
        unlike = (forbidding(one, other) for one in [*cases][:number])
        if facts := next(filter(None, unlike), None):
            count = words.count(len({*cases[other]}), "case")
            yield (
                "cases were measured in unlike environments, so their ratios also compare these:"
                f" {count} with {'; '.join(map(_instead, facts))}"
            )


def _instead(fact: Difference) -> str:
    return f"{fact.name} {fact.after} instead of {fact.before}"
