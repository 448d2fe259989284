"""Self-check: what measuring costs, measured on this machine. Knows no torch.

Three questions, each with its own pairs: what marks that are listened to cost a step, what the sampler process costs
the throughput beside it, and how the engine's `reference` compares with torch.nn.DataParallel itself. What is stored
is the seconds of each arm, pair by pair; ratios, intervals and words are made of them when somebody reads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpbench.analysis import stats
from dpbench.hardware import samplers
from dpbench.measure.request import Arm, SelfCheck
from dpbench.measure.server import Server
from dpbench.records import Case, Effort, Status, Trial, registry
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Role
from dpbench.records.words import count

STEP_S = 0.010
"""The step that costs are held against."""
GOAL = 0.005
"""The share of a step, or of the throughput, that measuring may cost."""
ROUNDS = 5
"""Fresh processes of each engine that are held against each other."""
LIMIT_S = 300.0
BUDGETS_S = {Arm.MARKS: (30.0, 0.01), Arm.SAMPLER: (20.0, 1.0)}
"""Seconds of steps, and of a block or part: short ones cancel most of a drift; the sampler reads every 0.2 s."""
GROUPS = 20
"""Parts that a series of pairs is cut into, as if they were rounds: neighbours are alike."""
NEEDS_GPU = "torch.nn.DataParallel needs an accelerator; on the CPU it passes its input through to the module"
NAMES = {
    "marks": "marks that are listened to",
    "samplers": "the sampler process beside the steps",
    "engine": "the engine's reference over torch.nn.DataParallel, both with replicas on one GPU",
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one part of measuring costs: the step with it over the step without, and the difference.

    `cost_s` is CPU time where the host computes: other processes that take turns with the step do not enter it.
    `share` is of a 10 ms step (marks), or of the throughput (samplers); None for the engine, which has no goal.
    `reason` says why there is no number.
    """

    name: str
    ratio: Estimate | None = None
    cost_s: Estimate | None = None
    share: Estimate | None = None
    detail: str = ""
    reason: str = ""


def measure(device_kind: str, devices: int, ordinals: Sequence[int] = (), *, scale: float = 1.0) -> dict[str, Any]:
    """Measure all three and return the facts to store; takes about a minute, times `scale`.

    `devices` is how many replicas step (two at most), `ordinals` the GPUs that the samplers watch.
    """
    with tempfile.TemporaryDirectory(prefix="dpbench-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        found = {}
        with Server(scratch) as server:
            case = _case(device_kind, devices)
            found["marks"] = _of_worker(server, case, Arm.MARKS, scale)
            with samplers.sampling(ordinals, scratch / "samples.jsonl") as series:
                if series.pid is None:
                    found["samplers"] = {"reason": "the sampler process does not start"}
                else:
                    found["samplers"] = _of_worker(server, case, Arm.SAMPLER, scale, sampler_pid=series.pid)
            found["engine"] = _engines(server, device_kind, scale)
    return found


def _case(device_kind: str, devices: int) -> Case:
    """Return the step that is checked: many marks, little else."""
    count = min(2, devices)
    placement = "colocated" if device_kind == "cuda" and count == 1 else "spread"
    return Case(
        model="mlp", strategy=registry.of_role(Role.ENGINE), schedule="reference", batch_size=64,
        devices=2 if placement == "colocated" else count, device_kind=device_kind, placement=placement,
    )  # fmt: skip


def _of_worker(server: Server, case: Case, arm: Arm, scale: float, sampler_pid: int = 0) -> dict[str, Any]:
    """Return what a worker measured, or why it did not."""
    budget_s, block_s = BUDGETS_S[arm]
    settings = SelfCheck(arm=arm, block_s=block_s, step_s=STEP_S, sampler_pid=sampler_pid)
    trial = server.self_check(case, Effort(budget_s=budget_s * scale), settings, LIMIT_S)
    return dict(trial.provenance["self_check"]) if trial.status is Status.OK else {"reason": _why(trial)}


def _engines(server: Server, device_kind: str, scale: float) -> dict[str, Any]:
    """Return both engines' median steps, round by round, in turns; or why not."""
    if device_kind != "cuda":
        return {"reason": NEEDS_GPU}
    both = {"on_s": registry.of_role(Role.ENGINE), "off_s": registry.of_role(Role.WRAPPER)}
    found: dict[str, Any] = {name: [] for name in both}
    for number in range(ROUNDS):
        for name, strategy in both.items() if number % 2 == 0 else reversed(both.items()):
            case = Case(
                model="resnet18", strategy=strategy, schedule="reference" if name == "on_s" else "", devices=2,
                batch_size=64, device_kind=device_kind, placement="colocated",
            )  # fmt: skip
            trial = server.run(case, Effort(budget_s=1.5 * scale), number, LIMIT_S)
            if trial.status is not Status.OK:
                return {"reason": f"{case.label}: {_why(trial)}"}
            steps = [step.seconds for step in trial.steps if not step.warmup]
            found[name].append(stats.median({0: steps}).value)
            found["case"] = case.label
    return found


def _why(trial: Trial) -> str:
    return f"{trial.status.value}: {trial.reason.strip().partition(chr(10))[0]}"


def costs(facts: Mapping[str, Any]) -> list[Cost]:
    """Return what the stored facts come to; medians over pairs, with their intervals."""
    return [_cost(name, facts[name]) for name in NAMES if name in facts]


def _cost(name: str, facts: Mapping[str, Any]) -> Cost:
    if "reason" in facts:
        return Cost(name=name, reason=facts["reason"])
    pairs = list(zip(facts["on_s"], facts["off_s"], strict=True))
    # a ratio of each pair, and then the median: what drifts from pair to pair cancels before, not after
    ratio = _median([on / off for on, off in pairs])
    cost_s = _median([on - off for on, off in pairs])
    if name == "marks":
        if "on_cpu_s" in facts:
            cost_s = _median([on - off for on, off in zip(facts["on_cpu_s"], facts["off_cpu_s"], strict=True)])
        share = Estimate(cost_s.value / STEP_S, cost_s.low / STEP_S, cost_s.high / STEP_S, cost_s.n)
        detail = f"{count(round(facts['marks_per_step']), 'mark')} a step"
        return Cost(name=name, ratio=ratio, cost_s=cost_s, share=share, detail=detail)
    if name == "samplers":
        share = Estimate(1 - 1 / ratio.value, 1 - 1 / ratio.low, 1 - 1 / ratio.high, ratio.n)
        detail = f"it keeps {facts['sampler_cpu_ratio']:.2%} of a core busy"
        if "steps_touched" in facts:  # a run of an earlier dpbench has none
            detail = f"at work in {count(facts['steps_touched'], 'step')}, {detail}"
        return Cost(name=name, ratio=ratio, cost_s=cost_s, share=share, detail=detail)
    return Cost(name=name, ratio=ratio, cost_s=cost_s)


def _median(values: Sequence[float]) -> Estimate:
    """Return the median over the pairs; `n` counts them."""
    size = -(-len(values) // GROUPS)
    groups = {start: values[start : start + size] for start in range(0, len(values), size)}
    return replace(stats.median(groups), n=len(values))


def _of_what(name: str, facts: Mapping[str, Any]) -> str:
    """Say what a difference is of, where it is not the clock's."""
    return " of CPU time" if name == "marks" and "on_cpu_s" in facts[name] else ""


def words(provenance: Mapping[str, Any]) -> list[str]:
    """Say what a run's self-check found, a line each; nothing where there was none."""
    return [_said(cost, provenance["self_check"]) for cost in costs(provenance.get("self_check") or {})]


def _said(cost: Cost, facts: Mapping[str, Any]) -> str:
    name = NAMES[cost.name]
    if cost.ratio is None or cost.cost_s is None:
        return f"{name}: not runnable here: {cost.reason}"
    e, ratio, of_what = cost.cost_s, cost.ratio, _of_what(cost.name, facts)
    said = (
        f"{name}: {ratio.value:.4f}× ({ratio.low:.4f}–{ratio.high:.4f}) the step without, "
        f"{e.value * 1e6:+.0f} µs{of_what} a step ({e.low * 1e6:+.0f} to {e.high * 1e6:+.0f}; {count(ratio.n, 'pair')})"
    )
    detail = f"; {cost.detail}" if cost.detail else ""
    if cost.share is None:
        return f"{said}{detail} [MEASURED: {facts[cost.name]['case']}]"
    of = "a 10 ms step" if cost.name == "marks" else "the throughput"
    s = cost.share
    verdict = "below" if s.high < GOAL else "above" if s.low > GOAL else "undecided against"
    share = f"{s.value:.2%} of {of} ({s.low:.2%} to {s.high:.2%}), {verdict} the goal of {GOAL:.1%}"
    return f"{said}: {share}{detail} [MEASURED: {facts[cost.name]['case']}]"
