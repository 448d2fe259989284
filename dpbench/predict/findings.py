"""Findings: the rule that predicts one process per GPU for an observed loop with several in one."""

from __future__ import annotations

from dpbench.analysis.findings import DDP
from dpbench.analysis.findings.rule import CaseContext, Evidence, FindingRule, Judgement, Missing
from dpbench.analysis.stats import quotient
from dpbench.predict import counts, machine, observed_loop
from dpbench.predict.cases import Prediction, Predictor
from dpbench.predict.machine import UnknownMachine
from dpbench.records import Case, Source, registry
from dpbench.records.errors import told
from dpbench.records.estimate import Estimate
from dpbench.records.gpu_names import same_gpu
from dpbench.records.registry import Role
from dpbench.records.words import duration, interval, number, time


def _ddp(context: CaseContext) -> Judgement:
    """Return evidence on the predicted gain from DistributedDataParallel, a process per device."""
    traits, step = context.case.traits, context.row.step
    several = traits.role is Role.OBSERVED and traits.threads and context.case.devices > 1
    if not several or context.case.device_kind != "cuda" or step is None:
        return None
    loop = observed_loop.of_run(context.trials, context.machine.gpu)
    if loop is None or not loop.trials:
        return None
    try:
        found = alternative(loop)
    except UnknownMachine as error:
        return Missing(f"whether DistributedDataParallel is faster ({told(error)})")
    other = found.step
    saved = Estimate(
        step.value - other.value,
        step.low - other.high,
        step.high - other.low,
        step.n,
        signed=True,
    )
    ratio = quotient(step, other)
    return Evidence(
        says=(
            f"DistributedDataParallel would be {number(ratio.value)}× ({interval(ratio)}) as fast,"
            " PREDICTED from the phases of this loop"
        ),
        numbers=(
            f"{time(other.value)} ({interval(other, 1e3)} ms, 80% interval) per step"
            f" instead of {duration(step)}, on {found.machine}, the slowest described machine with"
            " this GPU"
        ),
        size_s=saved,
        source=Source.PREDICTED,
        code=DDP,
    )


def alternative(loop: observed_loop.ObservedLoop) -> Prediction:
    """Return the prediction of one process per GPU for a loop on several GPUs.

    The links of the loop's machine are unknown. Therefore, all described machines with enough GPUs
    of the same model are predicted, and the slowest prediction is returned. Raises UnknownMachine
    if there is no such machine, or if the loop cannot be predicted.
    """
    described = [machine.load(name) for name in machine.names()]
    fitting = [
        candidate
        for candidate in described
        if loop.case.devices <= candidate.gpu.count and same_gpu(candidate.gpu.name, loop.gpu)
    ]
    if not fitting:
        raise UnknownMachine(
            "no described machine has {count} GPUs of the model {gpu}",
            option="machine",
            remedy=(
                "describe your machine in a file, and run dpbench predict {machine:FILE.toml}"
                " {from:RUN}"
            ),
            count=loop.case.devices,
            gpu=loop.gpu,
        )
    observed = loop.case
    case = Case(
        model=observed.model,
        strategy=registry.of_role(Role.CONTROL),
        batch_size=observed.batch_size,
        devices=observed.devices,
        device_kind=observed.device_kind,
        precision=observed.precision,
    )
    predicted = [
        Predictor(candidate, measured={counts.key(case): loop.on(candidate).profile}).predict(case)
        for candidate in fitting
    ]
    return max(predicted, key=lambda prediction: prediction.seconds)


RULES = (
    FindingRule(
        key="predicted ddp",
        when="one process drives several GPUs, and ddp is predicted to be faster",
        find=_ddp,
        remedy=(
            "start one process per device with torchrun, use"
            " torch.nn.parallel.DistributedDataParallel, and give each process its own rows: a"
            " DistributedSampler, and the batch size divided by the number of processes"
        ),
    ),
)
