"""Hosts: find slow machines of a launch, unlike machines, and hosts that share a machine.

In every round, all machines run the step of the baseline (`single`) at the same time, without
communication. A slow machine delays every rank at each collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpbench.analysis import stats
from dpbench.hardware import foreign_load
from dpbench.records import Case, Trial, host_device, words
from dpbench.records.grouping import grouped
from dpbench.records.trial import ALONE, FAILED_HOSTS, HOSTS, Estimate, by_case

SLOW = 1.05
"""A machine is slow if the interval of its step time over the fastest machine's is above this."""
ALIKE = 0.05
"""The largest relative difference of memory at which two machines count as alike."""


@dataclass(frozen=True)
class Pace:
    """A machine's median step time over that of the fastest machine, for the same case."""

    case: Case
    host: str
    fastest: str
    ratio: Estimate

    def __str__(self) -> str:
        interval = f"{words.number(self.ratio.value)}x ({words.interval(self.ratio)})"
        return (
            f"{self.host} is slow: a step of {self.case.model} on one device takes {interval} as"
            f" long there as on {self.fastest}, and every rank waits for it"
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
            noisy = [trial.round for trial in group if foreign_load.noisy(trial)]
            machines = {name: stats.Timed(rounds, noisy) for name, rounds in steps.items()}
            found += _compared(case, machines)
    return found


def _alone(trial: Trial) -> dict[str, list[float]]:
    """Return each machine's step times in seconds in a trial of a launch's baseline, else {}."""
    readings = trial.readings(ALONE) if trial.trusted else {}
    steps = {
        host.name: readings.get(host_device(number), []) for number, host in enumerate(trial.hosts)
    }
    return {name: seconds for name, seconds in steps.items() if seconds}


def _compared(case: Case, machines: Mapping[str, stats.Rounds]) -> Iterator[Pace]:
    medians = {name: stats.median(rounds).value for name, rounds in machines.items()}
    fastest = min(medians, key=lambda name: medians[name])
    for name, rounds in machines.items():
        if name != fastest:
            yield Pace(case, name, fastest, stats.ratio(rounds, machines[fastest]))


def sentences(trials: Sequence[Trial]) -> list[str]:
    """Return a sentence for each slow machine, the slowest first."""
    return [
        f"{pace}." for pace in sorted(paces(trials), key=lambda one: -one.ratio.value) if pace.slow
    ]


def warnings(provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each machine unlike the first, and for hosts that share a machine."""
    machines: Sequence[Mapping[str, Any]] = provenance.get(HOSTS, {}).get("machines", ())
    for machine, names in sorted(grouped((m["machine"], m["name"]) for m in machines).items()):
        if len(names) > 1:
            yield (
                f"COLOCATED: {' and '.join(names)} are the same machine ({machine[:8]}), whose"
                " cores and memory their ranks share: the figures show that the launch works, not"
                " how it scales"
            )
    for other in machines[1:]:
        if unlike := list(_differences(machines[0]["facts"], other["facts"])):
            yield f"{other['name']} is unlike {machines[0]['name']}: {'; '.join(unlike)}"


def failures(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a warning for each machine that could not run the baseline, with its reason."""
    reasons = {
        host: reason
        for trial in trials
        for host, reason in trial.provenance.get(FAILED_HOSTS, {}).items()
    }
    for host, reason in reasons.items():
        yield (
            f"{host} could not run the baseline, so that it is not compared with the other"
            f" machines: {reason}"
        )


def unlike(trials: Sequence[Trial]) -> Iterator[str]:
    """Yield a warning if cases were measured on unlike machines, as in a scheduler's jobs."""
    kinds = grouped(
        (_machine(host, _gpus(trial.provenance)), trial.case)
        for trial in trials
        if (host := trial.provenance.get("host"))
    )
    if len(kinds) > 1:
        where = "; ".join(
            f"{words.count(len({*cases}), 'case')} on {kind}" for kind, cases in kinds.items()
        )
        yield (
            "cases were measured on unlike machines, so their ratios also compare the machines:"
            f" {where}"
        )


def _machine(host: Mapping[str, Any], gpus: str) -> str:
    processor = f"{host.get('cpu', 'unknown CPU')}, {host.get('cores', 0)} cores"
    return f"{processor}, {gpus}" if gpus else processor


def _differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name, expected, actual in (
        ("processor", first["host"]["cpu"], other["host"]["cpu"]),
        ("cores", first["host"]["cores"], other["host"]["cores"]),
        ("GPUs", _gpus(first), _gpus(other)),
        ("torch", first["software"]["torch"], other["software"]["torch"]),
    ):
        if expected != actual:
            yield f"{name} {actual or 'none'} instead of {expected or 'none'}"
    expected = first["host"]["memory_bytes"]
    actual = other["host"]["memory_bytes"]
    if abs(actual - expected) > ALIKE * expected:
        yield f"memory {words.size(actual)} instead of {words.size(expected)}"


def _gpus(facts: Mapping[str, Any]) -> str:
    return ", ".join(gpu.get("name", "unknown") for gpu in facts.get("gpus", {}).get("gpus", []))
