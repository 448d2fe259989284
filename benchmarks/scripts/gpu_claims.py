"""GPU claims: what convinces a sceptic of dpbench's figures on a GPU, as checks of measurements.

`gpu_truth.py` measures, and `gpu_check.py` prints the result of each check. A check without its
measurement has no result. docs/first-gpu-run.md has the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Evidence = Mapping[str, Any]
"""What gpu_truth.py has measured so far, by name."""
Found = tuple[bool | None, str]
"""Whether a claim is right, None if its numbers cannot tell, and the numbers."""
SAID = {True: "yes", False: "no", None: "cannot tell"}


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim about dpbench's figures.

    `evidence` and `right_if` say how it is checked. `judge` raises LookupError without the
    measurement. `timed` is whether it needs true times, which fake GPUs do not have.
    """

    key: str
    claim: str
    evidence: str
    right_if: str
    judge: Callable[[Evidence], Found]
    timed: bool = True

    def line(self, evidence: Evidence) -> tuple[bool | None, str]:
        """Return whether the claim is right, None if unknown, and a line that says so."""
        try:
            right, numbers = self.judge(evidence)
        except LookupError as absent:
            return None, f"{self.claim}: not checked, without {absent.args[0]}"
        said = f"{SAID[right]}, {numbers}"
        if self.timed and evidence.get("fake"):
            return None, f"{self.claim}: not checked, FAKE-GPU ({said})"
        return right, f"{self.claim}: {said}"


def table() -> str:
    """Return the table of docs/first-gpu-run.md."""
    rows = [f"| {one.claim} | {one.evidence} | {one.right_if} |" for one in CLAIMS]
    return "\n".join(["| claim | evidence | right if |", "|---|---|---|", *rows])


def _differ(value: float, by: float, low: float, high: float) -> Found:
    """Return whether the ratio of two values is within limits, and their difference."""
    return low <= value / by <= high, f"{value / by - 1:+.2%}"


def _trials(evidence: Evidence) -> Sequence[Mapping[str, Any]]:
    """Return the trials. Raises LookupError if one has failed."""
    found: Sequence[Mapping[str, Any]] = evidence["trials"]
    if failed := [one["label"] for one in found if one["status"] != "ok"]:
        raise LookupError(f"the failed {failed[0]}")
    return found


def _every(wrong: Iterator[str], numbers: str) -> Found:
    found = [*wrong]
    return not found, "; ".join(found) or numbers


def _alone(evidence: Evidence) -> Mapping[str, Any]:
    return next(one for one in _trials(evidence) if one["strategy"] == "single")


def _step_time(evidence: Evidence) -> Found:
    return _differ(evidence["events_s"], evidence["host_s"], 0.995, 1.005)


def _plain_loop(evidence: Evidence) -> Found:
    return _differ(_alone(evidence)["step_s"], evidence["bare_s"], 0.98, 1.02)


def _within(found: Mapping[str, float], most: float, least: float = -math.inf) -> Found:
    """Return whether an interval is within limits, None if it contains one of them."""
    low, high = found["low"], found["high"]
    outside = low > most or high < least
    right = (least <= low and high <= most) or (False if outside else None)
    return right, f"{found['value']:+.2%} ({low:+.2%} to {high:+.2%})"


def _marks(evidence: Evidence) -> Found:
    weighed = {one["label"]: one["marks"] for one in _trials(evidence) if one["marks"]}
    if absent := {one["label"] for one in _trials(evidence)} - {*weighed}:
        raise LookupError(f"the marks of {' and '.join(sorted(absent))}")
    found = {label: _within(one, 0.01) for label, one in weighed.items()}
    every = {right for right, _ in found.values()}
    right = next((one for one in (False, None) if one in every), True)
    return right, "; ".join(f"{label} {numbers}" for label, (_, numbers) in found.items())


def _sampler(evidence: Evidence) -> Found:
    return _within(evidence["sampler"], 0.005)


def _margins(evidence: Evidence) -> dict[str, float]:
    return {
        f"{phase} of {label}": one["span_s"] - one["kernels_s"]
        for label, phases in evidence["profiled"].items()
        for phase, one in phases.items()
    }


def _cover(evidence: Evidence) -> Found:
    margins = _margins(evidence)
    if not margins:
        raise LookupError("a profile")
    least = min(margins, key=margins.__getitem__)
    margin_s = margins[least]
    return margin_s >= -20e-6, f"least margin {margin_s * 1e6:+.1f} us in {least}"


def _full(evidence: Evidence) -> Found:
    phases, spans_s = evidence["profiled"]["single"], evidence["spans_s"]
    computing = ("forward", "backward", "optimizer")
    kernels_s = sum(phases[name]["kernels_s"] for name in computing)
    share = kernels_s / sum(spans_s[name] for name in computing)
    return 0.9 <= share <= 1.05, f"{share:.1%}"


def _ledger(evidence: Evidence) -> Found:
    own = _alone(evidence)["phases_s"]
    long = {name: seconds for name, seconds in evidence["spans_s"].items() if seconds > 1e-3}
    off = {name: own.get(name, 0.0) / seconds - 1 for name, seconds in long.items()}
    if not off:
        raise LookupError("a phase above 1 ms")
    most = max(off, key=lambda name: abs(off[name]))
    return abs(off[most]) <= 0.05, f"{off[most]:+.1%} in {most}"


def _kept(evidence: Evidence) -> Found:
    off_s = evidence["off_s"]
    reasons = [one["no_profile"] for one in _trials(evidence) if one["no_profile"]]
    reasons += [evidence["withheld"]] if evidence["withheld"] else []
    if reasons or off_s is None:
        return False, "; ".join(dict.fromkeys(reasons)) or "no kernel has a launch"
    tolerated = f"dpbench tolerates {evidence['tolerance_s'] * 1e6:.0f} us"
    return off_s <= 5e-6, f"kernels are at most {off_s * 1e6:+.1f} us outside; {tolerated}"


def _data_parallel(evidence: Evidence) -> Found:
    return _within(evidence["paired"], 0.05, -0.05)


def _energy(evidence: Evidence) -> Found:
    found = evidence["energy"]
    right, numbers = _differ(found["counter_j"], found["integral_j"], 0.95, 1.05)
    return right, f"{numbers} of {found['integral_j']:.0f} J in {found['seconds']:.1f} s"


def _memory(evidence: Evidence) -> Found:
    above = dict[str, float]()
    for one in _trials(evidence):
        whole = {(device, kind): peak for device, phase, kind, peak in one["memory"] if not phase}
        for device, phase, kind, peak in one["memory"]:
            if phase and (device, kind) in whole:
                above[f"{phase} of {one['label']}"] = peak / whole[device, kind] - 1
    if not above:
        raise LookupError("memory by phase")
    most = max(above, key=above.__getitem__)
    return above[most] <= 0.02, f"at most {above[most]:+.1%}, in {most}"


def _labels(evidence: Evidence) -> Found:
    def wrong() -> Iterator[str]:
        for one in _trials(evidence):
            if (one["devices"] > 1) != ("COLOCATED" in one["labels"]):
                yield f"{one['label']} is labelled {' '.join(one['labels'])}"
            if bool(evidence["fake"]) != ("FAKE-GPU" in one["labels"]):
                yield f"{one['label']}: FAKE-GPU does not fit the driver"
            if not one["gpu"] or one["gpu"] != evidence["gpu"]:
                yield f"{one['label']}: the GPU is {one['gpu']}, not {evidence['gpu']}"

    return _every(wrong(), f"{len(_trials(evidence))} trials on {evidence['gpu']}")


def _clocks(evidence: Evidence) -> Found:
    def wrong() -> Iterator[str]:
        for one in _trials(evidence):
            if lacking := {"gpu_clock", "throttling"} - {*one["checks"]}:
                yield f"{one['label']}, round {one['round'] + 1}: no {' and '.join(lacking)}"

    return _every(wrong(), f"{len(_trials(evidence))} trials")


CLAIMS: Sequence[Claim] = (
    Claim(
        key="step_time",
        claim="a step's time is true within 0.5 %",
        evidence="40 steps by CUDA events and by the host's clock",
        right_if="at most 0.5 % apart",
        judge=_step_time,
    ),
    Claim(
        key="plain_loop",
        claim="`single` is a plain loop",
        evidence="its step in a trial, and a plain loop in another process",
        right_if="at most 2 % apart",
        judge=_plain_loop,
    ),
    Claim(
        key="marks",
        claim="marks cost at most 1 %",
        evidence="steps with and without marks in turn, for each strategy",
        right_if="at most 1 % longer, with 95 %",
        judge=_marks,
    ),
    Claim(
        key="sampler",
        claim="the sampler costs at most 0.5 %",
        evidence="steps beside it and without it in turn",
        right_if="at most 0.5 % longer, with 95 %",
        judge=_sampler,
    ),
    Claim(
        key="phases_cover",
        claim="phases cover their kernels within 20 us",
        evidence="phases by CUDA events, their kernels by CUPTI",
        right_if="none is 20 us shorter",
        judge=_cover,
    ),
    Claim(
        key="phases_full",
        claim="kernels fill the phases that compute",
        evidence="these kernels, and phases without the profiler",
        right_if="90 to 105 % of the phases",
        judge=_full,
    ),
    Claim(
        key="ledger",
        claim="phases are no artefact",
        evidence="phases in a trial, and by events in another process",
        right_if="at most 5 % apart above 1 ms",
        judge=_ledger,
    ),
    Claim(
        key="profile",
        claim="the profiler's figures are kept",
        evidence="why not; how far kernels are outside launch and step",
        right_if="no reason; at most 5 us",
        judge=_kept,
        timed=False,
    ),
    Claim(
        key="data_parallel",
        claim="`dp[reference]` is as fast as nn.DataParallel",
        evidence="their steps in one process",
        right_if="0.95 to 1.05, with 95 %",
        judge=_data_parallel,
    ),
    Claim(
        key="energy",
        claim="the energy is true within 5 %",
        evidence="NVML's counter, and the integral of its power readings",
        right_if="at most 5 % apart",
        judge=_energy,
    ),
    Claim(
        key="memory",
        claim="no phase needs more memory than its step",
        evidence="peaks of phases and of whole steps",
        right_if="at most 2 % above",
        judge=_memory,
        timed=False,
    ),
    Claim(
        key="labels",
        claim="trials are labelled as what they are",
        evidence="COLOCATED, FAKE-GPU and the GPU of each trial",
        right_if="each fits the trial",
        judge=_labels,
        timed=False,
    ),
    Claim(
        key="clocks",
        claim="clock and throttling of the GPU are checked",
        evidence="the checks of each trial",
        right_if="both are made",
        judge=_clocks,
        timed=False,
    ),
)
