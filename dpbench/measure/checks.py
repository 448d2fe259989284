"""Checks before the first trial: of each model, and of the cost of measuring. This module does not import torch.

A model that cannot be imported, built or stepped would fail in every trial, and each failure costs a trial's time. It
is therefore checked once, in a worker that does not measure.

The self-check answers three questions, each from pairs of measurements: the cost of recorded marks per step, the cost
of the sampler process in throughput, and the ratio of the step time of the engine's `reference` to that of
torch.nn.DataParallel. Both durations of each pair are stored; ratios, intervals and their wording are derived when they
are shown.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.hardware import samplers
from dpbench.measure.request import Arm, SelfCheck
from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Status, Trial, plan, registry
from dpbench.records.registry import Role
from dpbench.records.schedule import REFERENCE
from dpbench.records.trial import Estimate
from dpbench.records.words import count


class Models:
    """The models that have been checked so far, with their results."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._verdicts: dict[Case, Trial] = {}

    def check(self, cases: Sequence[Case], server: Server) -> Iterator[str]:
        """Check each model that has not been checked yet, with the largest batch of its cases.

        Yield one line of text per model that failed. A check is ended after `limit_s` seconds.
        """
        models: dict[Case, list[Case]] = {}
        for case in cases:
            models.setdefault(plan.model_check(case), []).append(case)
        for model, group in models.items():
            if model not in self._verdicts:
                largest = max(case.batch_size for case in group)
                found = server.check(replace(model, batch_size=largest), self._limit_s)
                self._verdicts[model] = found
                if found.status is not Status.OK:
                    yield _refusal(found, len(group))

    def failed(self, case: Case, number: int) -> Trial | None:
        """Return the failed trial of a case in round `number` if the check of its model failed, else None."""
        verdict = self._verdicts.get(plan.model_check(case))
        if verdict is None or verdict.status is Status.OK:
            return None
        return replace(verdict, case=case, round=number, reason=f"the check of the model failed: {verdict.reason}")


def _refusal(verdict: Trial, cases: int) -> str:
    """Return one line of text with the name of a model that failed its check, and the reason."""
    model, reason = f"{verdict.case.model} ({verdict.case.size})", verdict.reason.strip().partition(chr(10))[0]
    return f"{model} failed its check ({verdict.status}), so its {cases} case(s) will not be measured: {reason}"


STEP_S = 0.010
"""The duration in seconds of the step of which the cost of marks is given as a fraction."""
GOAL = 0.005
"""The fraction of a step, or of the throughput, that measuring may cost."""
ROUNDS = 5
"""The number of fresh processes in which each of the two engines is measured."""
LIMIT_S = 300.0
BUDGETS_S = {Arm.MARKS: (30.0, 0.01), Arm.SAMPLER: (20.0, 1.0)}
"""The total duration of the steps, and the duration of one block or part, in seconds. Short blocks cancel most drift; a
part must be long enough for several readings of the sampler, which reads every 0.2 s."""
GROUPS = 20
"""The number of groups of neighbouring pairs that the bootstrap treats as rounds, because neighbours are correlated."""
NAMES = {
    "marks": "recorded marks",
    "samplers": "the sampler process running during the steps",
    "engine": "the engine's reference over torch.nn.DataParallel, both in one process",
}


@dataclass(frozen=True, kw_only=True)
class MeasuringCost:
    """The cost of one part of measuring.

    `ratio` is the step time with the part divided by the step time without it, `cost_s` their difference in seconds.
    For marks, if the host computes, `cost_s` is CPU time, because other processes do not affect that. `share` is the
    fraction of a 10 ms step (marks) or of the throughput (samplers); None for the engine, for which no limit is set.
    `reason` explains a missing number.
    """

    name: str
    ratio: Estimate | None = None
    cost_s: Estimate | None = None
    share: Estimate | None = None
    detail: str = ""
    reason: str = ""


def measure(device_kind: str, devices: int, ordinals: Sequence[int] = (), *, scale: float = 1.0) -> dict[str, Any]:
    """Measure all three parts and return the facts to store; this takes about a minute, times `scale`.

    `devices` is the number of replicas (at most two are used), `ordinals` are the GPUs that the samplers read.
    """
    with tempfile.TemporaryDirectory(prefix="dpbench-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        found = {}
        with Server(scratch) as server:
            case = _case(device_kind, devices)
            found["marks"] = _of_worker(server, case, Arm.MARKS, scale)
            with samplers.sampling(ordinals, scratch / "samples.jsonl") as series:
                if series.pid is None:
                    found["samplers"] = {"reason": "the sampler process did not start"}
                else:
                    found["samplers"] = _of_worker(server, case, Arm.SAMPLER, scale, sampler_pid=series.pid)
            found["engine"] = _engines(server, device_kind, scale)
    return found


def _case(device_kind: str, devices: int) -> Case:
    """Return the case whose step is timed: it has many marks and little compute."""
    count = min(2, devices)
    placement = "colocated" if device_kind == "cuda" and count == 1 else "spread"
    return Case(
        model="mlp", strategy=registry.of_role(Role.ENGINE), schedule="reference", batch_size=64,
        devices=2 if placement == "colocated" else count, device_kind=device_kind, placement=placement,
    )  # fmt: skip


def _of_worker(server: Server, case: Case, arm: Arm, scale: float, sampler_pid: int = 0) -> dict[str, Any]:
    """Return the facts that a worker measured, or the reason why there are none."""
    budget_s, block_s = BUDGETS_S[arm]
    settings = SelfCheck(arm=arm, block_s=block_s, step_s=STEP_S, sampler_pid=sampler_pid)
    trial = server.self_check(case, Effort(budget_s=budget_s * scale), settings, LIMIT_S)
    return dict(trial.provenance["self_check"]) if trial.status is Status.OK else {"reason": _why(trial)}


def _engines(server: Server, device_kind: str, scale: float) -> dict[str, Any]:
    """Return the median steps of both engines by round, or the reason why there are none.

    In each round, a fresh process alternates between blocks of both engines, with another one first than in the round
    before. The replicas share one GPU; without a GPU, they run on emulated devices, and the ratio is one of host time.
    """
    from dpbench.analysis import stats

    cuda = device_kind == "cuda"
    ours = Case(
        model="resnet18" if cuda else "mlp", strategy=registry.of_role(Role.ENGINE), schedule=REFERENCE, devices=2,
        batch_size=64, device_kind="cuda" if cuda else "emulated", placement="colocated" if cuda else "spread",
    )  # fmt: skip
    theirs = plan.wrapped_as(ours)
    assert theirs is not None
    both = {"on_s": ours, "off_s": theirs}
    found: dict[str, Any] = {name: [] for name in both} | {"case": ours.label}
    for number in range(ROUNDS):
        names = list(both) if number % 2 == 0 else list(reversed(both))
        trials = server.run_together([both[name] for name in names], Effort(budget_s=1.5 * scale), number, LIMIT_S)
        for name, trial in zip(names, trials, strict=True):
            if trial.status is not Status.OK:
                return {"reason": f"{trial.case.label}: {_why(trial)}"}
            steps = [step.seconds for step in trial.steps if not step.warmup]
            found[name].append(stats.median({0: steps}).value)
    return found


def _why(trial: Trial) -> str:
    return f"{trial.status.value}: {trial.reason.strip().partition(chr(10))[0]}"


def costs(facts: Mapping[str, Any]) -> list[MeasuringCost]:
    """Return the costs: medians over the pairs of steps with and without the part, with confidence intervals."""
    return [_cost(name, facts[name]) for name in NAMES if name in facts]


def _cost(name: str, facts: Mapping[str, Any]) -> MeasuringCost:
    if "reason" in facts:
        return MeasuringCost(name=name, reason=facts["reason"])
    pairs = list(zip(facts["on_s"], facts["off_s"], strict=True))
    # take the ratio within each pair before the median, so that drift between pairs cancels
    ratio = _median([on / off for on, off in pairs])
    cost_s = _median([on - off for on, off in pairs])
    if name == "marks":
        if "on_cpu_s" in facts:
            cost_s = _median([on - off for on, off in zip(facts["on_cpu_s"], facts["off_cpu_s"], strict=True)])
        share = Estimate(cost_s.value / STEP_S, cost_s.low / STEP_S, cost_s.high / STEP_S, cost_s.n)
        detail = f"{count(round(facts['marks_per_step']), 'mark')} per step"
        return MeasuringCost(name=name, ratio=ratio, cost_s=cost_s, share=share, detail=detail)
    if name == "samplers":
        share = Estimate(1 - 1 / ratio.value, 1 - 1 / ratio.low, 1 - 1 / ratio.high, ratio.n)
        detail = f"the sampler keeps {facts['sampler_cpu_ratio']:.2%} of a core busy"
        if "steps_touched" in facts:  # absent in runs of earlier versions
            detail = f"{detail} and ran in {count(facts['steps_touched'], 'step')}"
        return MeasuringCost(name=name, ratio=ratio, cost_s=cost_s, share=share, detail=detail)
    return MeasuringCost(name=name, ratio=ratio, cost_s=cost_s)


def _median(values: Sequence[float]) -> Estimate:
    """Return the median over the pairs with its interval; `n` is the number of pairs."""
    from dpbench.analysis import stats

    size = -(-len(values) // GROUPS)
    groups = {start: values[start : start + size] for start in range(0, len(values), size)}
    return replace(stats.median(groups), n=len(values))


def _kind_of_time(name: str, facts: Mapping[str, Any]) -> str:
    """Return " of CPU time" if the cost was measured as CPU time, else an empty string."""
    return " of CPU time" if name == "marks" and "on_cpu_s" in facts[name] else ""


def words(provenance: Mapping[str, Any]) -> list[str]:
    """Return the results of a run's self-check as lines of text; empty if the run has none."""
    return [_said(cost, provenance["self_check"]) for cost in costs(provenance.get("self_check") or {})]


def _said(cost: MeasuringCost, facts: Mapping[str, Any]) -> str:
    name = NAMES[cost.name]
    if cost.ratio is None or cost.cost_s is None:
        return f"{name}: not runnable here: {cost.reason}"
    e, ratio, kind = cost.cost_s, cost.ratio, _kind_of_time(cost.name, facts)
    said = (
        f"{name}: ratio of step times {ratio.value:.4f}× ({ratio.low:.4f}–{ratio.high:.4f}), "
        f"{e.value * 1e6:+.0f} µs{kind} per step ({e.low * 1e6:+.0f} to {e.high * 1e6:+.0f}; {count(ratio.n, 'pair')})"
    )
    detail = f"; {cost.detail}" if cost.detail else ""
    if cost.share is None:
        return f"{said}{detail} [MEASURED: {facts[cost.name]['case']}]"
    of = "a 10 ms step" if cost.name == "marks" else "the throughput"
    s = cost.share
    verdict = "below" if s.high < GOAL else "above" if s.low > GOAL else "undecided against"
    share = f"{s.value:.2%} of {of} ({s.low:.2%} to {s.high:.2%}), {verdict} the goal of {GOAL:.1%}"
    return f"{said}: {share}{detail} [MEASURED: {facts[cost.name]['case']}]"
