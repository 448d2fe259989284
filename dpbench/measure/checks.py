"""Checks before the first trial: whether each model can take a step, and by how much measuring slows down a step.

A model that cannot be imported, built or run would fail in every trial, and each failure would cost the time of a
trial. Each model is therefore checked once, in a worker that does not measure.

The self-check answers three questions, each from pairs of measurements. How much time do recorded marks,
which time the phases of a step, add to the step? How much throughput is lost to the sampler process, which reads the
counters of GPUs and host? What is the ratio of the step time of the engine under the schedule `reference` to that of
torch.nn.DataParallel? Both step times of each pair are stored. Ratios, intervals and their wording are computed when
results are shown. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpbench.hardware import samplers
from dpbench.measure.request import Arm, SelfCheck
from dpbench.measure.scratch import folder
from dpbench.measure.server import Server, TrialRunner
from dpbench.records import Case, Effort, Status, Trial, plan, registry
from dpbench.records.registry import Role
from dpbench.records.schedule import REFERENCE
from dpbench.records.trial import Estimate
from dpbench.records.words import count


class Models:
    """The models that have been checked in this session of a run, with the results of the checks."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._verdicts: dict[Case, Trial] = {}

    def check(self, cases: Sequence[Case], server: TrialRunner) -> Iterator[str]:
        """Check each model of the cases that has not been checked yet, and yield one line of text per model that fails.

        Each model is checked with the largest batch size of its cases. A check that exceeds the time limit fails. A
        check that a signal from outside has ended says nothing about the model: the model's cases are measured.
        """
        models: dict[Case, list[Case]] = {}
        for case in cases:
            models.setdefault(plan.model_check(case), []).append(case)
        for model, group in models.items():
            if model not in self._verdicts:
                largest = max(case.batch_size for case in group)
                found = server.check(replace(model, batch_size=largest), self._limit_s)
                if found.status is Status.KILLED:
                    yield f"{_named(model)} is measured without its check, which had no result ({_why(found)})"
                    continue
                self._verdicts[model] = found
                if found.status is not Status.OK:
                    yield _refusal(found, len(group))

    def failed(self, case: Case, number: int) -> Trial | None:
        """Return a failed trial of a case in round `number` if the check of its model failed, otherwise None."""
        verdict = self._verdicts.get(plan.model_check(case))
        if verdict is None or verdict.status is Status.OK:
            return None
        return replace(verdict, case=case, round=number, reason=f"the check of the model failed: {verdict.reason}")


def _refusal(verdict: Trial, cases: int) -> str:
    """Return one line of text which says that a model failed its check, why, and how many cases will not be measured.

    `verdict` is the failed trial of the check. `cases` is the number of cases that use the model.
    """
    failed = f"{_named(verdict.case)} failed its check ({verdict.status})"
    return f"{failed}, so its {count(cases, 'case')} will not be measured; reason: {_first_line(verdict.reason)}"


def _named(case: Case) -> str:
    return f"{case.model} ({case.size})"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def model_words(found: Trial) -> list[str]:
    """Return the result of a model's check as lines of text: the verdict, the observed facts, then each note.

    If the check failed, return one line with the status and the reason.
    """
    if found.status is not Status.OK:
        return [f"{found.case.model}: {_why(found)}"]
    facts = found.provenance.get("model_check", {"seen": {}, "notes": []})
    seen = {name: f"{value:.2f} s" if name == "check_s" else value for name, value in facts["seen"].items()}
    width = max(map(len, seen), default=0)
    lines = [f"{name.removesuffix('_s'):<{width}}  {value}" for name, value in seen.items()]
    verdict = f"{_named(found.case)} can be measured"
    return [verdict, *lines, *(f"note: {note}" for note in facts["notes"])]


STEP_S = 0.010
"""A step duration in seconds; the cost of marks per step is shown as a fraction of this duration."""
GOAL = 0.005
"""The largest acceptable cost of marks as a fraction of a step, and of samplers as a fraction of the throughput."""
ROUNDS = 5
"""The number of rounds in which the engine is compared with torch.nn.DataParallel; each round has a fresh process."""
LIMIT_S = 300.0
BUDGETS_S = {Arm.MARKS: (30.0, 0.01), Arm.SAMPLER: (20.0, 1.0)}
"""For recorded marks and for the sampler, two durations in seconds: of the whole measurement, and of one part of it.

For marks, a part is a block of steps with or without marks. The blocks alternate and are short, so that slow drift
affects both kinds nearly equally. For the sampler, which reads every 0.2 s, a part must contain several readings.
"""
GROUPS = 20
"""The largest number of groups into which the pairs are divided.

Neighbouring pairs are correlated. The bootstrap therefore resamples groups of neighbouring pairs, not single pairs.
"""
NAMES = {
    "marks": "recorded marks",
    "samplers": "the sampler process running during the steps",
    "engine": "the engine (schedule: reference) compared with torch.nn.DataParallel, both in one process",
}


@dataclass(frozen=True, kw_only=True)
class MeasuringCost:
    """The result of the self-check for one component, whose `name` is `marks`, `samplers` or `engine`.

    `ratio` is the step time with the component divided by the step time without it; for `engine`, it is the engine's
    step time divided by that of torch.nn.DataParallel. `cost_s` is the difference of the two step times in seconds. For
    `marks` on CPU or emulated devices, `cost_s` is a difference of CPU time, which other processes do not affect.
    `share` is the cost as a fraction: of a 10 ms step for `marks`, of the throughput for `samplers`, and None for
    `engine`, for which no goal is set. `detail` is additional text. `reason` says why the numbers are missing; it is
    empty if they are known.
    """

    name: str
    ratio: Estimate | None = None
    cost_s: Estimate | None = None
    share: Estimate | None = None
    detail: str = ""
    reason: str = ""


def measure(device_kind: str, devices: int, ordinals: Sequence[int] = (), *, scale: float = 1.0) -> dict[str, Any]:
    """Measure the costs of the marks, the samplers and the engine, and return the facts to store, by component.

    The measurement takes about `scale` minutes. `devices` is the number of replicas, of which at most two are used.
    `ordinals` are the ordinals of the GPUs that the samplers read.
    """
    with folder() as scratch:
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
    """Return the case whose steps the self-check times; its step has many marks and little compute.

    `devices` is the number of devices that are available; the case uses at most two replicas.
    """
    count = min(2, devices)
    placement = "colocated" if device_kind == "cuda" and count == 1 else "spread"
    return Case(
        model="mlp", strategy=registry.of_role(Role.ENGINE), schedule="reference", batch_size=64,
        devices=2 if placement == "colocated" else count, device_kind=device_kind, placement=placement,
    )  # fmt: skip


def _of_worker(server: Server, case: Case, arm: Arm, scale: float, sampler_pid: int = 0) -> dict[str, Any]:
    """Run the self-check of the component `arm` in a worker; return its facts, or {"reason": text} after a failure.

    `scale` multiplies the duration of the measurement. `sampler_pid` is the sampler's process id; 0 for other
    components.
    """
    budget_s, block_s = BUDGETS_S[arm]
    settings = SelfCheck(arm=arm, block_s=block_s, step_s=STEP_S, sampler_pid=sampler_pid)
    trial = server.self_check(case, Effort(budget_s=budget_s * scale), settings, LIMIT_S)
    return dict(trial.provenance["self_check"]) if trial.status is Status.OK else {"reason": _why(trial)}


def _engines(server: Server, device_kind: str, scale: float) -> dict[str, Any]:
    """Return the median step times in seconds of dpbench's engine and of torch.nn.DataParallel, one value per round.

    The keys are "on_s" (engine) and "off_s" (torch). If a trial fails, the result is {"reason": text}. In each round, a
    fresh process runs blocks of steps of the engine and of torch alternately; which of the two runs first changes from
    round to round. With GPUs, all replicas share one GPU. Without GPUs, the replicas run on emulated devices, and the
    ratio compares only time on the host.
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
    return f"{trial.status.value}: {_first_line(trial.reason)}"


def costs(facts: Mapping[str, Any]) -> list[MeasuringCost]:
    """Return the cost of each component in `facts`: medians over the stored pairs of step times, with intervals."""
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
        detail = f"the sampler uses {facts['sampler_cpu_ratio']:.2%} of one core"
        if "steps_touched" in facts:  # absent in runs of earlier versions
            detail = f"{detail} and ran during {count(facts['steps_touched'], 'step')}"
        return MeasuringCost(name=name, ratio=ratio, cost_s=cost_s, share=share, detail=detail)
    return MeasuringCost(name=name, ratio=ratio, cost_s=cost_s)


def _median(values: Sequence[float]) -> Estimate:
    """Return the median of `values`, which has one value per pair, with its interval; `n` is the number of pairs."""
    from dpbench.analysis import stats

    size = -(-len(values) // GROUPS)
    groups = {start: values[start : start + size] for start in range(0, len(values), size)}
    return replace(stats.median(groups), n=len(values))


def _kind_of_time(name: str, facts: Mapping[str, Any]) -> str:
    """Return the text " of CPU time" if the cost of the component `name` was measured as CPU time, otherwise ""."""
    return " of CPU time" if name == "marks" and "on_cpu_s" in facts[name] else ""


def words(provenance: Mapping[str, Any]) -> list[str]:
    """Return the self-check in a run's provenance as lines of text; an empty list if the run has no self-check."""
    return [_said(cost, provenance["self_check"]) for cost in costs(provenance.get("self_check") or {})]


def _said(cost: MeasuringCost, facts: Mapping[str, Any]) -> str:
    name = NAMES[cost.name]
    if cost.ratio is None or cost.cost_s is None:
        return f"{name}: not measured: {cost.reason}"
    e, ratio, kind = cost.cost_s, cost.ratio, _kind_of_time(cost.name, facts)
    said = (
        f"{name}: ratio of step times {ratio.value:.4f}× ({ratio.low:.4f}–{ratio.high:.4f}), "
        f"difference {e.value * 1e6:+.0f} µs{kind} per step ({e.low * 1e6:+.0f} to {e.high * 1e6:+.0f}; "
        f"{count(ratio.n, 'pair')})"
    )
    detail = f"; {cost.detail}" if cost.detail else ""
    if cost.share is None:
        return f"{said}{detail} [MEASURED: {facts[cost.name]['case']}]"
    of = "a 10 ms step" if cost.name == "marks" else "the throughput"
    s = cost.share
    verdict = "below" if s.high < GOAL else "above" if s.low > GOAL else "not clearly below or above"
    share = f"cost {s.value:.2%} of {of} ({s.low:.2%} to {s.high:.2%}), {verdict} the goal of {GOAL:.1%}"
    return f"{said}: {share}{detail} [MEASURED: {facts[cost.name]['case']}]"
