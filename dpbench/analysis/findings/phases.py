"""Phases: the rules about single phases of DataParallel's step, such as moving data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dpbench.analysis.findings.rule import (
    CaseContext,
    Evidence,
    FindingRule,
    Judgement,
    Missing,
    overlap,
)
from dpbench.records import UNATTRIBUTED, Phase
from dpbench.records.environment import Environment
from dpbench.records.estimate import Estimate
from dpbench.records.facts import RunFacts
from dpbench.records.registry import Reduction, Role
from dpbench.records.schedule import Schedule
from dpbench.records.words import count, percent, size, time, verb
from dpbench.records.work import Sizes

SERIAL = 1.25
"""Devices count as taking turns if on average fewer than this number run a phase concurrently."""


def _heavy(
    phase: Phase, detail: Callable[[CaseContext, Estimate], str]
) -> Callable[[CaseContext], Judgement]:
    """Return a `FindingRule.find` whose evidence is the time of DataParallel's `phase`.

    `detail` returns a breakdown of this time in seconds as text.
    """

    def find(context: CaseContext) -> Judgement:
        if not context.engine or not context.row.phases.get(phase.value):
            return None
        seconds = context.phase(phase.value)
        says = f"{phase.value} takes {percent(seconds.value / context.step_s)} of the step"
        if context.loop:  # the headline of an observed loop has the share
            says = f"the phase {phase.value} of data parallelism in one process"
        share = context.share(phase.value) if context.loop else None
        return Evidence(says=says, numbers=detail(context, seconds), size_s=seconds, share=share)

    return find


def _loading(context: CaseContext) -> Judgement:
    if not context.row.phases.get(Phase.DATA.value):
        return None
    seconds = context.phase(Phase.DATA.value)
    return Evidence(
        says=(
            f"the wait for the DataLoader takes {percent(seconds.value / context.step_s)} of the"
            " step"
        ),
        numbers=(
            f"{time(seconds.value)} for a batch of {context.case.batch_size}:"
            f" {context.case.habit('loader')}"
        ),
        size_s=seconds,
    )


def _per_tensor(context: CaseContext, seconds: Estimate) -> str:
    """Return the time of replication as text: in total, per tensor and module, with bytes copied.

    The time depends mainly on the number of tensors; without it, the text has only the total.
    """
    model = context.model
    if not model.parameter_tensors:
        return time(seconds.value)
    tensors = model.parameter_tensors + (model.buffer_tensors or 0)
    copies = len(context.case.rows) - 1
    bytes_of_copy = (model.parameter_bytes or 0) + (model.buffer_bytes or 0)
    per_module = ""
    if model.modules:
        modules = count(int(model.modules), "module")
        per_module = f", or {time(seconds.value / model.modules)} for each of {modules}"
    return (
        f"{_by_tensors(model, seconds)}{per_module}; replication copies {copies} ×"
        f" {size(bytes_of_copy)}, each copy in"
        f" {count(int(tensors), 'tensor')}"
    )


def _per_gradient(context: CaseContext, seconds: Estimate) -> str:
    model = context.model
    copies = len(context.case.rows) - 1
    if not model.parameter_tensors:
        return time(seconds.value)
    added = f"{copies} × {size(model.parameter_bytes or 0)}"
    by_tensors = _by_tensors(model, seconds)
    return f"{by_tensors}; the reduction adds {added} of gradients on device 0"


def _by_tensors(model: Sizes, seconds: Estimate) -> str:
    tensors = int(model.parameter_tensors or 0)
    each = time(seconds.value / tensors)
    return f"{time(seconds.value)} = {count(tensors, 'parameter tensor')} × {each}"


def _of_batch(name: str) -> Callable[[CaseContext, Estimate], str]:
    """Return a function that formats a phase's time, its bytes, and the pieces of the batch.

    `name` is the model's fact with the bytes per sample: "input_bytes" or "output_bytes".
    """

    def detail(context: CaseContext, seconds: Estimate) -> str:
        sample = getattr(context.model, name)
        moved = f" for {size(sample * context.case.batch_size)}" if sample else ""
        return f"{time(seconds.value)}{moved} in {count(len(context.case.rows), 'piece')}"

    return detail


def _optimizer(context: CaseContext) -> Judgement:
    """Return evidence if device 0 alone updates all weights; equal shares would save its cost."""
    if (
        not context.schedule
        or context.schedule.updates_everywhere
        or not context.row.phases.get(Phase.OPTIMIZER.value)
    ):
        return None
    seconds = context.phase(Phase.OPTIMIZER.value)
    idle = len(context.case.rows) - 1
    others = 1 - 1 / len(context.case.rows)
    return Evidence(
        says=(
            "the optimizer runs on device 0 alone and takes"
            f" {percent(seconds.value / context.step_s)} of the step"
        ),
        numbers=(
            f"{time(seconds.value)} while {count(idle, 'device')} {verb(idle, 'waits', 'wait')};"
            " with equal shares, the update would take"
            f" {time(seconds.value - seconds.value * others)}"
        ),
        size_s=seconds.scaled(others),
    )


def _unattributed(context: CaseContext) -> Judgement:
    seconds = context.phase(UNATTRIBUTED)
    taken = (
        f"{percent(seconds.value / context.step_s)} of the step is spent in Python code between the"
        " phases"
    )
    return Evidence(
        says="the loop runs code that belongs to no phase" if context.loop else taken,
        numbers=f"no phase covers {time(seconds.value)}",
        size_s=seconds,
        share=context.share(UNATTRIBUTED) if context.loop else None,
    )


def _serial(phase: Phase) -> Callable[[CaseContext], Judgement]:
    """Return a `FindingRule.find` on the time of `phase` in excess of perfect scaling."""

    def find(context: CaseContext) -> Judgement:
        # torch's backward includes the reduction, which has no counterpart on one device
        mixed = phase is Phase.BACKWARD and context.case.traits.reduction is Reduction.IN_BACKWARD
        if not context.engine or mixed or context.case.device_kind == "emulated":
            return None
        lost = context.excess(phase.value)
        ideal = context.ideal()
        if lost is None or ideal is None:
            return Missing(
                "whether devices compute concurrently (needs the strategy single at the same batch"
                " size)"
            )
        at_once = _at_once(context, phase)
        took = context.row.phases.get(phase.value, 0.0)
        alone = ideal[0].phases.get(phase.value, 0.0) / ideal[1]
        devices = count(len(context.case.rows), "device")
        return Evidence(
            says=(
                f"{phase.value} takes {time(took)} on {devices}; with perfect scaling, it would"
                f" take {time(alone)}"
            ),
            numbers=(
                f"one device would take {time(alone)} for its share of the batch; "
                f"{_cause(context, phase, at_once)}"
            ),
            size_s=lost,
        )

    return find


def _at_once(context: CaseContext, phase: Phase) -> float | None:
    """Return the mean number of devices that run `phase`, while at least one does; None if unknown.

    A joint backward is open on all devices at once. On CPU devices, autograd computes it in the
    calling thread, one device after the other. On GPUs, its spans do not show when each device
    computed. Trials from before dpbench knew joint spans show several devices in both cases, so the
    schedule decides.
    """
    joint = context.schedule is not None and not context.schedule.keeps_replicas
    if phase is Phase.BACKWARD and joint:
        return 1.0 if context.case.device_kind == "cpu" else None
    return overlap(context.trials, phase)


def _cause(context: CaseContext, phase: Phase, at_once: float | None) -> str:
    devices = count(len(context.case.rows), "device")
    if context.oversubscribed:
        return f"{devices} take turns on {count(context.cores, 'core')}"
    if at_once is None:
        return f"how many of {devices} run this phase concurrently is unknown"
    if at_once < SERIAL:
        return (
            f"on average, only {at_once:.1f} of {devices} are in this phase at a time: most run it"
            " one after another"
        )
    concurrent = (
        f"on average, {at_once:.1f} of {devices} run this phase concurrently, each more slowly than"
        " one device"
    )
    if phase is Phase.BACKWARD:  # autograd runs in C++, without the GIL
        return f"{concurrent} alone"
    if Environment.of(RunFacts(), context.trials).gil == "off":
        cores = "" if context.case.device_kind == "cpu" else "the cores that launch operations, "
        return (
            f"{concurrent} alone: no interpreter lock is held, but threads still share, among"
            f" others, {cores}the memory allocator, and the reference counts of objects that all"
            " replicas use"
        )
    return (
        f"{concurrent} alone: the threads share memory, caches and, to launch operations, Python's"
        " global interpreter lock (GIL), which matters if the operations are small"
    )


RULES = (
    FindingRule(
        key="data",
        when="steps wait for a DataLoader",
        find=_loading,
        remedy=(
            "load batches ahead of the step in more workers; dpbench loaders measures how many are"
            " enough for a dataset"
        ),
        others=lambda case: [replace(case, loader=workers) for workers in (0, 2, 4)],
    ),
    FindingRule(
        key="replicate",
        when="one process copies weights and buffers to all devices in each step",
        find=_heavy(Phase.REPLICATE, _per_tensor),
        remedy=(
            "keep the replicas between steps: the schedule cached keeps their module trees, and"
            " allreduce also their weights, which every device updates; ddp never replicates"
        ),
        schedules=(Schedule.CACHED, Schedule.LOCAL, Schedule.ALLREDUCE),
        roles=(Role.CONTROL,),
        alone=True,
    ),
    FindingRule(
        key="reduce",
        when="one process adds the gradients of all devices",
        find=_heavy(Phase.REDUCE, _per_gradient),
        remedy=(
            "add the gradients on all devices instead of device 0 (allreduce), in one buffer and in"
            " shares, one on each device (sharded), or during backward (ddp)"
        ),
        schedules=(Schedule.ALLREDUCE, Schedule.SHARDED),
        roles=(Role.CONTROL,),
        alone=True,
    ),
    FindingRule(
        key="scatter",
        when="one process copies the rows of the batch to all devices",
        find=_heavy(Phase.SCATTER, _of_batch("input_bytes")),
        remedy=(
            "send fewer bytes (smaller data types, augmentation on the device), use pinned memory,"
            " and send the bytes before the step needs them; with ddp, each rank loads its own rows"
        ),
        roles=(Role.CONTROL,),
    ),
    FindingRule(
        key="gather",
        when="one process copies the outputs of all devices to device 0",
        find=_heavy(Phase.GATHER, _of_batch("output_bytes")),
        remedy="leave the outputs on their devices and compute the loss there: local, or ddp",
        schedules=(Schedule.LOCAL,),
        roles=(Role.CONTROL,),
        alone=True,
    ),
    FindingRule(
        key="optimizer",
        when="device 0 alone updates all weights",
        find=_optimizer,
        remedy="let every device update its share of the weights, in one buffer (sharded)",
        schedules=(Schedule.SHARDED,),
    ),
    FindingRule(
        key="unattributed",
        when="a part of the step belongs to no phase",
        find=_unattributed,
        remedy=(
            "profile the Python code of the step: hooks, logging and other code run between the"
            " phases that dpbench marks"
        ),
        alone=True,
    ),
    FindingRule(
        key="serial forward",
        when="one process runs all devices, and forward takes longer than with perfect scaling",
        find=_serial(Phase.FORWARD),
        remedy=(
            "give each device more work at once (a bigger batch, fewer and larger operators), keep"
            " the threads of forward between steps (pool), or use one process per device (ddp)"
        ),
        schedules=(Schedule.POOL,),
        roles=(Role.CONTROL,),
    ),
    FindingRule(
        key="serial backward",
        when="one process runs all devices, and backward takes longer than with perfect scaling",
        find=_serial(Phase.BACKWARD),
        remedy=(
            "run each device's backward in a separate thread (local) or a separate process (ddp)"
        ),
        schedules=(Schedule.LOCAL,),
        roles=(Role.CONTROL,),
    ),
)
