"""Validity: check a trial for conditions that distort its numbers.

Each check compares a value with a limit. The values are stored with the trial; the text of a
statement is written only when a report is shown. A check without data (no GPU, no sampler, too few
readings) is left out and does not count as passed. docs/measuring.md lists the checks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dpbench.analysis import sampled, stats
from dpbench.records import (
    HOST,
    UNATTRIBUTED,
    Case,
    Fault,
    Source,
    Status,
    Trial,
    Verified,
    disturbance,
    words,
)
from dpbench.records.facts import TrialHost
from dpbench.records.grouping import grouped
from dpbench.records.load import LIMIT

SIGNIFICANT = 0.01
"""The p-value of Spearman's test below which a trend counts as real."""
TREND_FROM = 10
"""The least number of timed steps for which a trend is computed."""
MEANS = "mean_hz"
"""The fact of the check `gpu_clock` for pairs of a device and its mean clock in a trial."""
BY_NVML = ("throttling", "gpu_clock")
"""The checks of every trial on GPUs that need readings of NVML in its timed steps."""
MARKS = 0.01
"""The largest part of a step that its marks may take."""
LONG_S = 1.0
"""The least seconds of timed steps for `foreign_gpu`; else a trial's worker may seem foreign."""

SLOWDOWNS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x10: "sync boost",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""NVML's bits for causes that lower a GPU's clocks under load, but idleness and users' settings.

The source is nvml.h: nvmlClocksThrottleReasons.
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check of one trial: its value, its limit, and whether it passed.

    `about` has further facts as plain data, such as the number of cores or the device.
    """

    key: str
    value: float
    limit: float
    ok: bool
    about: Mapping[str, Any] = field(default_factory=dict)


Deviation = tuple[float, Mapping[str, Any]]
"""The value that a check measured, and further facts about it as plain data."""


@dataclass(frozen=True, kw_only=True)
class ValidityRule:
    """The definition of one check: its measurement, its limit and its wording.

    `measure` takes a trial and the number of cores, and returns a value with further facts, or None
    without data; a fact `limit` replaces the limit. `headline` describes the problem, and `item`
    returns the value as text. The check fails if the absolute value exceeds `limit`, unless
    `doubted` returns True for the facts, because the value is insignificant. `when` says this in
    words. `warns` is whether a failed check may change what an answer says.
    """

    key: str
    when: str
    limit: float
    measure: Callable[[Trial, int], Deviation | None]
    headline: str
    item: Callable[[Check], str]
    doubted: Callable[[Mapping[str, Any]], bool] = lambda about: False
    warns: bool = False


def check(trial: Trial, cores: int) -> list[Check]:
    """Return the results of all checks for which the trial has data.

    It is empty if the trial failed, was predicted, or has an impossible step time, such as a
    negative one. `cores` is the number that the run may use, 0 for unknown.
    """
    if trial.status is not Status.OK or not trial.source.timed or trial.fault is Fault.CLOCK:
        return []
    checks = []
    for rule in RULES:
        measured = rule.measure(trial, cores)
        if measured is not None:
            value, about = measured
            limit = about.get("limit", rule.limit)
            ok = abs(value) <= limit or rule.doubted(about)
            checks.append(Check(key=rule.key, value=value, limit=limit, ok=ok, about=about))
    return checks


def facts(trial: Trial, cores: int) -> dict[str, dict[str, Any]]:
    """Return the results of `check` by name as plain data, as they are stored with the trial."""
    return {
        one.key: {"value": one.value, "limit": one.limit, "ok": one.ok, **one.about}
        for one in check(trial, cores)
    }


def of(trial: Trial, cores: int) -> list[Check]:
    """Return the stored check results of a trial; if none are stored, those of `check`."""
    stored = trial.facts.validity
    if stored is None:
        return check(trial, cores)
    known = {rule.key for rule in RULES}
    return [
        Check(key=key, value=one["value"], limit=one["limit"], ok=one["ok"], about=one)
        for key, one in stored.items()
        if key in known
    ]


def troubles(trials: Iterable[Trial], cores: int) -> dict[ValidityRule, dict[Case, str]]:
    """Return, by rule and case, the worst failed value and the number of failed rounds as text."""
    seen = grouped(
        ((result.key, trial.case), result) for trial in trials for result in of(trial, cores)
    )
    by_rule: dict[ValidityRule, dict[Case, str]] = {}
    for rule in RULES:
        for (name, case), checks in seen.items():
            bad = [result for result in checks if not result.ok]
            if name == rule.key and bad:
                item = rule.item(max(bad, key=lambda result: abs(result.value)))
                rounds = (
                    f", {len(bad)} of {words.count(len(checks), 'round')}"
                    if len(bad) < len(checks)
                    else ""
                )
                by_rule.setdefault(rule, {})[case] = item + rounds
    return by_rule


def unchecked(trials: Iterable[Trial], cores: int) -> dict[Case, str]:
    """Return which checks by NVML a case on GPUs lacks, and in how many rounds, as text."""
    lacking = grouped(
        (trial.case, _lacks(trial, cores))
        for trial in trials
        if trial.case.device_kind == "cuda"
        and trial.status is Status.OK
        and trial.source is Source.MEASURED
        and trial.timed
    )
    return {
        case: f"{max(lacks, key=len)}, {number} of {words.count(len(lacks), 'round')}"
        for case, lacks in lacking.items()
        if (number := sum(map(bool, lacks)))
    }


def _lacks(trial: Trial, cores: int) -> str:
    done = {result.key for result in of(trial, cores)}
    metered = trial.grouped.series(sampled.ENERGY).keys()
    energy = [sampled.ENERGY] if metered - sampled.energy_j(trial).keys() else []
    return " and ".join([*(name for name in BY_NVML if name not in done), *energy])


def mean_clock_hz(trial: Trial, cores: int) -> float | None:
    """Return the mean clock of a trial's GPUs in its timed steps, as stored; None if unknown."""
    means = [hz for one in of(trial, cores) for _, hz in one.about.get(MEANS, ())]
    return statistics.mean(means) if means else None


# -- measurements


@dataclass(frozen=True)
class Trend:
    """A series' trend: Spearman's `rho`, the `p`-value of its two-sided t test, Theil-Sen `slope`.

    The slope is the change from one value to the next, in the unit of the series.
    """

    rho: float
    p: float
    slope: float


def trend(series: Sequence[float]) -> Trend:
    """Return the trend of a series of at least three values that are not all equal.

    scipy.stats computes the same, but its import takes longer than any other of a run.
    """
    import numpy as np  # imported only if a trend is computed
    from scipy.special import stdtr

    values = np.asarray(series, dtype=float)
    times = np.arange(len(series))
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    # equal values share the mean of their ranks
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    rho = float(np.clip(np.corrcoef(times, ranks)[0, 1], -1, 1))
    freedom = len(series) - 2
    p = (
        2 * float(stdtr(freedom, -abs(rho) * math.sqrt(freedom / (1 - rho**2))))
        if abs(rho) < 1
        else 0.0
    )
    first, second = np.triu_indices(len(series), 1)
    return Trend(rho, p, float(np.median((values[second] - values[first]) / (second - first))))


def _worst(found: Iterable[Deviation]) -> Deviation | None:
    """Return the largest value that a check measured, with its facts; None without any."""
    return max(found, key=lambda one: one[0], default=None)


def _drift(trial: Trial, cores: int) -> Deviation | None:
    """Return the change from the first to the last timed step, as a fraction of the median step.

    It is computed from the Theil-Sen slope.
    """
    series = trial.timed
    if len(series) < TREND_FROM:
        return None
    if min(series) == max(series):
        return 0.0, {"rho": 0.0, "p": 1.0, "steps": len(series)}
    found = trend(series)
    change = found.slope * (len(series) - 1) / statistics.median(series)
    return change, {"rho": found.rho, "p": found.p, "steps": len(series)}


def _throttled(trial: Trial, cores: int) -> Deviation | None:
    """Return the fraction of the most throttled GPU's readings with throttling, and the causes."""
    found = []
    for device, readings in sampled.momentary(trial, "throttle_reasons").items():
        bits = [int(value) for value in readings]
        slowed = [one for one in bits if any(one & bit for bit in SLOWDOWNS)]
        causes = [cause for bit, cause in SLOWDOWNS.items() if any(one & bit for one in slowed)]
        about = {"device": device, "readings": len(bits), "causes": causes}
        found.append((len(slowed) / len(bits), about))
    return _worst(found)


def _clock(metric: str) -> Callable[[Trial, int], Deviation | None]:
    """Return a function that measures the largest fall of a clock, as a fraction of its highest.

    The lowest and the highest twentieth of each device's readings are left out.
    """

    def measure(trial: Trial, cores: int) -> Deviation | None:
        found = []
        for device, readings in sampled.momentary(trial, metric).items():
            ordered = sorted(readings)
            cut = len(readings) // 20
            low, high = ordered[cut], ordered[len(ordered) - 1 - cut]
            if high > 0:
                found.append((1 - low / high, {"device": device, "low_hz": low, "high_hz": high}))
        worst = _worst(found)
        if worst is None or metric != "sm_clock_hz":
            return worst
        return worst[0], {**worst[1], MEANS: sorted(sampled.mean_clock_hz(trial).items())}

    return measure


def _foreign_gpu(trial: Trial, cores: int) -> Deviation | None:
    """Return the median bytes of other processes on the GPU where they are most.

    None without readings, or if the timed steps took less than `LONG_S` seconds.
    """
    if sum(trial.timed) < LONG_S:
        return None
    held = sampled.momentary(trial, "foreign_memory_bytes")
    return _worst(
        (statistics.median(values), {"device": device}) for device, values in held.items()
    )


def _foreign_cpu(trial: Trial, cores: int) -> Deviation | None:
    """Return the mean number of cores that other processes and the hypervisor used."""
    load = trial.facts.foreign_load
    if load is None:
        return None
    about: dict[str, Any] = {
        "cores": load.cores,
        "steal": load.steal * load.cores,
        "limit": disturbance.tolerated_in(trial, load.cores),
    }
    if trial.case.device_kind == "cuda":
        about["by"] = _depends_on(trial, load.cores)
    return load.taken * load.cores, about


def _depends_on(trial: Trial, cores: int) -> str:
    """Return, as text, what decides whether the cores matter to a trial on GPUs."""
    share = disturbance.gpu_share(trial)
    if share is not None:
        return f"the GPU computes for {words.percent(share)} of the step"
    needed = math.ceil(disturbance.needed_cores(trial.case, cores))
    return f"the case needs {words.count(needed, 'core')}"


def _gpu_in_use(trial: Trial, cores: int) -> Deviation | None:
    """Return the share of the time in which others used a GPU before the round, where it is most.

    None without an answer of NVML.
    """
    return _worst(
        (gpu.share, {"use": str(gpu)}) for gpu in trial.facts.foreign_gpus if gpu.share is not None
    )


def _oversubscribed(trial: Trial, cores: int) -> Deviation | None:
    """Return the excess of devices over cores, at least 0, on the machine where it is largest."""
    found = sharing(trial.case, cores, trial.facts.hosts)
    if found is None:
        return None
    devices, cores = found
    return max(0.0, float(devices - cores)), {"devices": devices, "cores": cores}


def oversubscribed(case: Case, cores: int) -> bool:
    """Return whether the devices of a case on one machine must take turns on its cores."""
    devices, cores = sharing(case, cores) or (0, 0)
    return devices > cores


def sharing(case: Case, cores: int, hosts: Sequence[TrialHost] = ()) -> tuple[int, int] | None:
    """Return the numbers of devices and of cores where most devices have to share cores.

    `hosts` are the machines of a launch, `cores` is the number of cores of others; 0 means unknown.
    None if it is unknown, and for devices other than logical CPU devices: GPUs compute without a
    core, and emulated devices take turns by design.
    """
    if not cores or case.device_kind != "cpu":
        return None
    each = case.traits.devices_per_replica
    ranks = Counter(host.machine for host in hosts for _ in host.ranks)
    cores_of = {host.machine: host.cores or cores for host in hosts}
    by_machine = [(count * each, cores_of[machine]) for machine, count in ranks.items()]
    return max(by_machine or [(case.working, cores)], key=lambda pair: pair[0] - pair[1])


def _clocks(trial: Trial, cores: int) -> Deviation | None:
    """Return the largest error of two machines' clock offset, as a fraction of the median step."""
    error_s = trial.facts.clock_error_s
    return (error_s / statistics.median(trial.timed), {}) if error_s and trial.timed else None


def _peers(trial: Trial, cores: int) -> Deviation | None:
    """Return the number of pairs of GPUs without peer access, whose copies go through the host."""
    pairs = trial.facts.no_peer_access
    return None if pairs is None else (float(len(pairs)), {"pairs": pairs})


def _closure(trial: Trial, cores: int) -> Deviation | None:
    """Return the median fraction of a timed step that no phase covers."""
    shares = [
        phases[UNATTRIBUTED] / step.seconds
        for step, phases in zip(trial.steps, trial.ledger.phases, strict=True)
        if not step.warmup and step.seconds > 0
    ]
    return (statistics.median(shares), {}) if shares else None


def _marks(trial: Trial, cores: int) -> Deviation | None:
    """Return by which fraction steps with marks last longer than those beside them without.

    None if no pairs of blocks were measured.
    """
    pairs = dict(enumerate(trial.facts.mark_pairs))
    if not pairs:
        return None
    marked, bare = ({i: [pair[side]] for i, pair in pairs.items()} for side in (0, 1))
    found = stats.ratio(marked, bare)
    return found.value - 1, {"low": found.low - 1, "high": found.high - 1, "pairs": len(pairs)}


def _outlasting(trial: Trial, cores: int) -> Deviation | None:
    """Return how long GPUs still work after a block of steps, as a fraction of its duration.

    It is the median over the blocks, for the rank with the largest. None without readings, as on
    CPUs.
    """
    found = [
        statistics.median(values)
        for values in trial.readings("outlasting_ratio", timed=True).values()
    ]
    return (max(found), {}) if found else None


def _verification(trial: Trial, cores: int) -> Deviation | None:
    """Return the index of the verification's result in `Verified`: 0 is bitwise, higher is worse.

    None for an observed loop or a DataLoader, in which dpbench computes nothing that could be
    wrong.
    """
    if not trial.case.traits.comparable:
        return None
    return float(list(Verified).index(trial.verified)), {"verified": trial.verified.value}


def _averaging(trial: Trial, cores: int) -> Deviation | None:
    """Return by how much the ranks' mean gradients differed from the whole batch's, if they did."""
    found = trial.facts.averaging
    return (found.high, asdict(found)) if found else None


def _float32(trial: Trial, cores: int) -> Deviation | None:
    """Return how many kinds of float32 products use another format than the case's precision.

    None for other precisions, and for trials without the fact.
    """
    named = NAMED.get(trial.case.precision)
    products = trial.facts.float32
    if named is None or products is None:
        return None
    formats = (products.matmul, products.convolution)
    matmul, convolution = (FORMATS.get(one or "", "an unknown format") for one in formats)
    said = f"{trial.case.precision}: matrix products in {matmul}, convolutions in {convolution}"
    return float(sum(one != named for one in formats)), {"said": said}


def _unprofiled(trial: Trial, cores: int) -> Deviation | None:
    """Return 1 if the figures of profiled steps are withheld; None without profiled steps."""
    if "profile_s" not in trial.setup:
        return None
    reason = trial.facts.no_profile
    return float(bool(reason)), {"reason": reason}


# -- limits and wording

NAMED = {"fp32": "ieee", "tf32": "tf32"}
"""The format that the name of a precision promises for float32 products, see `Products`."""
FORMATS = {"ieee": "float32", "tf32": "TF32", "bf16": "bfloat16"}
"""The formats of `Products` in words."""


def _percent(check: Check) -> str:
    return f"{check.value:.0%}"


def _on(check: Check) -> str:
    device = check.about.get("device", HOST)
    return "" if device <= HOST else f" on GPU {device}"


def _cores(check: Check) -> str:
    cores = int(check.about["cores"])
    return words.count(cores, "core") if cores else "? cores"


def _foreign_cores(check: Check) -> str:
    """Return the cores that others took and, for GPUs, why they matter."""
    by = check.about.get("by", "")
    return f"{check.value:.1f} of {check.about['cores'] or '?'} cores" + (f", {by}" if by else "")


def _fell(check: Check) -> str:
    low, high = (check.about[name] / 1e6 for name in ("low_hz", "high_hz"))
    return f"{check.value:.0%}{_on(check)}: {low:.0f} to {high:.0f} MHz"


RULES: Sequence[ValidityRule] = (
    ValidityRule(
        key="verification",
        when="the gradients differ from the chunked reference by more than the tolerance",
        warns=True,
        limit=float(list(Verified).index(Verified.WITHIN_TOLERANCE)),
        measure=_verification,
        headline="gradients not verified",
        item=lambda check: str(check.about["verified"]).replace("_", " "),
    ),
    ValidityRule(
        key="averaging",
        when="a gradient of ranks' own losses differs from that of the whole batch",
        warns=True,
        limit=0.0,
        measure=_averaging,
        headline=(
            "the gradient is the mean over ranks or micro-batches, as DistributedDataParallel"
            " defines it, and differs from that of the whole batch: the loss is no mean over"
            " samples, as with ignore_index or a mask"
        ),
        item=lambda check: (
            f"by {words.percent(check.about['low'])} to {words.percent(check.about['high'])} with "
            f"{words.count(check.about['rows'], 'sample')}"
        ),
    ),
    ValidityRule(
        key="float32",
        when="products have another format than the precision names",
        limit=0.0,
        measure=_float32,
        headline=(
            "float32 products have another format than the name of the precision says: torch's"
            " default is TF32 in convolutions, and float32 in matrix products"
        ),
        item=lambda check: str(check.about["said"]),
    ),
    ValidityRule(
        key="no_profile",
        when="the figures of profiled steps are withheld",
        limit=0.0,
        measure=_unprofiled,
        headline=(
            "the busy times of the GPUs, exposed communication and overlapped reductions are"
            " withheld, because the profile of the steps is incomplete or wrong"
        ),
        item=lambda check: str(check.about["reason"]),
    ),
    ValidityRule(
        key="closure",
        when="the median share of a step without a phase is above 5 %",
        limit=0.05,
        measure=_closure,
        headline="more than 5% of the step is not covered by any phase",
        item=_percent,
    ),
    ValidityRule(
        key="marks",
        when="steps with marks are decidedly more than 1 % longer than those beside them without",
        limit=MARKS,
        measure=_marks,
        doubted=lambda about: about["low"] <= MARKS,
        headline="timing the phases takes more than 1% of the step, which is so much too long",
        item=_percent,
    ),
    ValidityRule(
        key="outlasting",
        when="GPU work beyond a block's steps is above 5 % of them",
        warns=True,
        limit=0.05,
        measure=_outlasting,
        headline=(
            "GPUs have work for which the steps do not wait, so step times are more than 5% too"
            " short"
        ),
        item=_percent,
    ),
    ValidityRule(
        key="drift",
        when="first to last timed step differ by more than 5 % (Theil-Sen slope; Spearman's p"
        " < 0.01)",
        limit=0.05,
        measure=_drift,
        doubted=lambda about: bool(about["p"] >= SIGNIFICANT),
        headline=(
            "the step time drifted by more than 5% in a trial, so its median depends on which steps"
            " were timed"
        ),
        item=lambda check: f"{check.value:+.0%} over {words.count(check.about['steps'], 'step')}",
    ),
    ValidityRule(
        key="throttling",
        when="a GPU was slowed down in more than 5 % of the readings",
        warns=True,
        limit=0.05,
        measure=_throttled,
        headline="a GPU was throttled in more than 5% of the readings",
        item=lambda check: f"{check.value:.0%}{_on(check)}, {' and '.join(check.about['causes'])}",
    ),
    ValidityRule(
        key="gpu_clock",
        when="a GPU's clock fell by more than 10 % below its highest, without extreme twentieths",
        warns=True,
        limit=0.10,
        measure=_clock("sm_clock_hz"),
        headline="the clock of a GPU changed by more than 10% while steps were timed",
        item=_fell,
    ),
    ValidityRule(
        key="cpu_clock",
        when="the CPU's clock fell by more than 10 % below its highest, without extreme twentieths",
        limit=0.10,
        measure=_clock("cpu_clock_hz"),
        headline="the clock of the CPU changed by more than 10% while steps were timed",
        item=_fell,
    ),
    ValidityRule(
        key="foreign_gpu",
        when="other processes held memory of a GPU",
        limit=0.0,
        measure=_foreign_gpu,
        headline="other processes were using a GPU",
        item=lambda check: f"{words.size(check.value)}{_on(check)}",
    ),
    ValidityRule(
        key="foreign_cpu",
        when="others took more than a tenth of the cores, or than the free cores + 0.25",
        limit=LIMIT,
        measure=_foreign_cpu,
        headline=(
            f"{disturbance.NOISY}: other processes took more than {LIMIT:.0%} of the"
            " cores, or cores that the case needs, while a trial ran"
        ),
        item=_foreign_cores,
    ),
    ValidityRule(
        key="gpu_in_use",
        when="others used a GPU for more than 10 % of a second before the round",
        limit=LIMIT,
        measure=_gpu_in_use,
        headline=(
            f"{disturbance.NOISY}: other processes used a GPU for more than"
            f" {LIMIT:.0%} of the time before a round"
        ),
        item=lambda check: str(check.about["use"]),
    ),
    ValidityRule(
        key="oversubscribed",
        when="there are more logical CPU devices than usable cores",
        warns=True,
        limit=0.0,
        measure=_oversubscribed,
        headline=(
            "oversubscribed: there are more devices than cores, so devices take turns and speed-ups"
            " are too low"
        ),
        item=lambda check: f"{words.count(check.about['devices'], 'device')} on {_cores(check)}",
    ),
    ValidityRule(
        key="clock_error",
        when="another machine's clock error is above 5 % of the median step",
        limit=0.05,
        measure=_clocks,
        headline=(
            "the offset between the machines' clocks may be wrong by more than 5% of the step, so"
            " phases are uncertain"
        ),
        item=_percent,
    ),
    ValidityRule(
        key="peer_access",
        when="pairs of GPUs have no peer access",
        warns=True,
        limit=0.0,
        measure=_peers,
        headline="GPUs without peer access: copies between them go through the host's memory",
        item=lambda check: ", ".join(f"{a} and {b}" for a, b in check.about["pairs"]),
    ),
)
