"""Findings: the rules about observed training loops, such as loading, copies, launches, evaluation.

Each rule judges one loop by itself, because a user's loop has no counterpart. The remedies are
lines of code or commands.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath

from dpbench.analysis import commands
from dpbench.analysis.findings.rule import (
    CaseContext,
    Evidence,
    FindingRule,
    Judgement,
    Missing,
    seconds_of,
)
from dpbench.records import UNATTRIBUTED, Case, Phase, Source, Trial, vendors
from dpbench.records.activity import EXPOSED, HOST_READS, HOST_WAITS, KERNELS, RANK_WAIT
from dpbench.records.estimate import Estimate
from dpbench.records.observed import WITHOUT_LOADER, Held, Observed
from dpbench.records.registry import Parallelism
from dpbench.records.words import about, count, exact, long_time, percent, size, time, verb

WORKERS = "num_workers={}, persistent_workers=True"
PINNED = "pin_memory=True"
LOADER = "loader = torch.utils.data.DataLoader(dataset, batch_size={}, {})"
SHARED_LOADER = (
    "sampler = torch.utils.data.DistributedSampler(dataset); "
    "loader = torch.utils.data.DataLoader(dataset, sampler=sampler, batch_size={}, {})"
    "  # and sampler.set_epoch(epoch) before each epoch"
)
"""A new DataLoader of one of several ranks, which share the dataset."""
KEPT = "  # with the sampler that it has"
"""What follows the line of a DataLoader that each of several ranks has already.

A second sampler would leave out rows if a library, such as accelerate, shares them out itself.
"""
TO_FILL_IN = "DATASET"
"""What stands in a command for the name of the user's dataset, which no observation tells."""
SELDOM = "if step % 10 == 0: print(step, loss.item())"
COMPILED = 'model = torch.compile(model, mode="reduce-overhead")'
SCALE = 'scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)'
BIND = (
    'local_rank = int(os.environ["LOCAL_RANK"]); torch.cuda.set_device(local_rank); '
    'checkpoint = torch.load(path, map_location=f"cuda:{local_rank}")'
)
EVALUATE = "if epoch % 5 == 0: evaluate(model)"
SAVE = "if step % 1000 == 0: torch.save(model.state_dict(), path)"
SAVE_ONCE = (
    "if step % 1000 == 0 and torch.distributed.get_rank() == 0: "
    "torch.save(model.state_dict(), path)"
)
"""The same on one of several ranks, which must not write one file."""
HOOK = (
    "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks; "
    "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
)
NO_SYNC = "with model.no_sync(): loss_fn(model(x), y).backward()  # all but the last of an update"
MOST_SYNCS = 1.5
"""The most times that gradients are added per update without a finding; one is needed."""
SLOWEST_LINK = 125e6
"""The bytes per second of the slowest link between ranks, 1 Gbit/s.

Gradients that are reduced more slowly wait for something else than their bytes.
"""
CODE = (
    *(loader.format(4, WORKERS.format(2)) for loader in (LOADER, LOADER + KEPT, SHARED_LOADER)),
    LOADER.format(4, PINNED),
    *(SELDOM, COMPILED, SCALE, EVALUATE, SAVE, SAVE_ONCE, HOOK, NO_SYNC),
)
"""The lines of code that remedy any loop, those of a DataLoader for 4 rows and 2 workers."""
MOST_WORKERS = 8
"""The largest number of workers in `WORKERS`; `dpbench loaders` measures how many are enough."""
ASIDE = 0.2
"""The least share of evaluation or checkpoints that is a finding, of their time and all steps'."""
PLACES = 3
"""The largest number of places in the script that a finding names."""


def _observing(
    judge: Callable[[CaseContext, Observed], Judgement],
) -> Callable[[CaseContext], Judgement]:
    """Return a `FindingRule.find` that calls `judge` for observed loops only."""
    return lambda context: judge(context, context.loop) if context.loop else None


def _rows(context: CaseContext) -> int:
    """Return the rows of a step in one process, 0 if they are unknown."""
    case = context.case
    return case.rows[0] if case.traits.ranks else case.batch_size


def _loader(context: CaseContext, loop: Observed, settings: str) -> str:
    """Return the line that makes the DataLoader of one process with these settings."""
    ranks = context.case.traits.ranks
    new = loop.loader_workers == WITHOUT_LOADER
    line = (SHARED_LOADER if new else LOADER + KEPT) if ranks else LOADER
    return line.format(_rows(context) // loop.batches or "batch_size", settings)


@_observing
def _loading(context: CaseContext, loop: Observed) -> Judgement:
    present = loop.loader_workers
    if not context.row.phases.get(Phase.DATA.value) or present == WITHOUT_LOADER:
        return None
    seconds = context.phase(Phase.DATA.value)
    batch = _rows(context) // loop.batches
    workers = "an unknown number of workers" if present is None else count(present, "worker")
    rest_s = max(context.step_s - seconds.value, 1e-5)
    # twice the present number, but at least 2
    more = min(MOST_WORKERS, max(2, 2 * (present or 0)))
    return Evidence(
        says="the loop waits for its DataLoader",
        numbers=(
            f"{about(seconds)} per step with {workers}; without this wait, a step would take"
            f" {time(rest_s)}"
        ),
        size_s=seconds,
        share=context.share(Phase.DATA.value),
        code=_loader(context, loop, WORKERS.format(more)) if (present or 0) < more else "",
        command=commands.loaders(
            f"{_script(context.case, loop)}:{TO_FILL_IN}",
            batch_size=batch or 32,
            step_s=rest_s / loop.batches,
        ),
    )


@_observing
def _between(context: CaseContext, loop: Observed) -> Judgement:
    """Return evidence on the phase `data` of a loop without a DataLoader.

    In a watched script, dpbench cannot observe what happens there; in a trace, the user has named
    it. Traces that an earlier version imported do not say whether there is a DataLoader.
    """
    if not context.row.phases.get(Phase.DATA.value) or loop.loader_workers != WITHOUT_LOADER:
        return None
    seconds = context.phase(Phase.DATA.value)
    rest_s = max(context.step_s - seconds.value, 1e-5)
    watched = context.trials[0].source is not Source.IMPORTED
    where = (
        " between the end of a step, a backward or a read and the next transfer or forward, where"
        " the script reads a batch or does other work"
        if watched
        else ""
    )
    says = (
        "the loop has no DataLoader, and works between its steps"
        if watched
        else "the loop waits for data"
    )
    return Evidence(
        says=says,
        numbers=(f"{about(seconds)} per step{where}; without it, a step would take {time(rest_s)}"),
        size_s=seconds,
        share=context.share(Phase.DATA.value),
        code=_loader(context, loop, WORKERS.format(2)),
    )


def _script(case: Case, loop: Observed) -> str:
    """Return the path of the script in the command that ran it; "train.py" without one."""
    named = [word for word in loop.words if PurePath(word).name == case.model]
    return next((word for word in [*named, case.model] if word.endswith(".py")), "train.py")


@_observing
def _reads(context: CaseContext, loop: Observed) -> Judgement:
    seconds = context.phase(Phase.READ.value)
    if _profiled(context):
        # after a wait, the device is idle until the host has launched its next work
        waited = context.mean(
            lambda trial: _over_devices(min, trial, _idle_by_reads, KERNELS, HOST_READS)
        )
        seconds = max(seconds, waited, key=lambda one: one.value)
    if not seconds.value:
        return None
    steps = context.row.steps
    places = sorted(loop.reads.items(), key=lambda pair: (-pair[1], pair[0]))
    named = ", ".join(
        f"{place} in {number} of {count(steps, 'step')}" for place, number in places[:PLACES]
    )
    more = f" and {count(len(places) - PLACES, 'more place')}" if len(places) > PLACES else ""
    return Evidence(
        says="the host waits for values from a device",
        numbers=(
            f"{about(seconds)} per step; read at {named or 'an unknown place'}{more}; on a GPU,"
            " part of this time is computation that the host would have to wait for later"
        ),
        size_s=seconds,
        share=None if _profiled(context) else context.share(Phase.READ.value),
        code=SELDOM,
    )


@_observing
def _pageable(context: CaseContext, loop: Observed) -> Judgement:
    if loop.pinned is not False or not context.row.phases.get(Phase.SCATTER.value):
        return None
    seconds = context.phase(Phase.SCATTER.value)
    rows = _rows(context)
    sample = context.model.input_bytes
    moved = f" for {size(sample * rows)}" if sample and rows else ""
    return Evidence(
        says="batches are copied to the GPU from pageable memory",
        numbers=(
            f"{about(seconds)} per step{moved}; a copy from pinned memory is faster, and with"
            " non_blocking=True the host does not wait for it"
        ),
        size_s=seconds,
        share=context.share(Phase.SCATTER.value),
        code=_loader(context, loop, PINNED),
    )


def _devices(context: CaseContext, metric: str) -> set[int]:
    """Return the devices with readings of a metric."""
    return {device for trial in context.trials for device in trial.grouped.series(metric)}


def _profiled(context: CaseContext) -> bool:
    """Return whether the loop has the metrics of a trace on GPUs."""
    return all(HOST_WAITS in trial.grouped.metrics for trial in context.trials)


def _over_devices(
    choose: Callable[[Iterable[float]], float],
    trial: Trial,
    cost: Callable[..., float],
    *metrics: str,
) -> list[float]:
    """Return the cost in each timed step of the device that `choose` (min or max) selects.

    `cost` takes the seconds of the step, those of exposed communication, and those of `metrics`. A
    profiled device without readings of one of these spent no time on it.
    """
    tables = [_by_step(trial, metric) for metric in (EXPOSED, *metrics)]
    nothing = [0.0] * len(trial.timed)
    return [
        choose(
            cost(step_s, *(table.get(device, nothing)[at] for table in tables))
            for device in trial.grouped.series(KERNELS)
        )
        for at, step_s in enumerate(trial.timed)
    ]


def _by_step(trial: Trial, metric: str) -> dict[int, list[float]]:
    """Return each device's readings of a metric, one for each timed step; 0 without one."""
    steps = trial.by_column
    found = {}
    for device, series in trial.grouped.series(metric).items():
        values = [0.0] * len(steps)
        for time_s, value in zip(*series, strict=True):
            values[bisect_left(steps.ends, time_s)] = value
        found[device] = steps.timed(values)
    return found


def _idle_by_reads(step_s: float, exposed_s: float, kernels_s: float, reads_s: float) -> float:
    return min(reads_s, max(0.0, step_s - kernels_s - exposed_s))


def _idle_by_launches(step_s: float, exposed_s: float, kernels_s: float, waits_s: float) -> float:
    return step_s - waits_s - kernels_s - exposed_s


def _working(step_s: float, exposed_s: float, kernels_s: float) -> float:
    return exposed_s + kernels_s


@_observing
def _launches(context: CaseContext, loop: Observed) -> Judgement:
    """Return evidence on a host that launches a step for longer than the GPUs work on it.

    A host that waits, for a batch, a blocking copy or a value, does not launch, nor does one that
    runs code outside all phases. None without the busy times of GPUs, which only a profiler
    records.
    """
    row = context.row
    if context.case.device_kind != "cuda" or not _profiled(context) or row.step is None:
        return None

    def idle_s(trial: Trial) -> list[float]:
        idle = _over_devices(min, trial, _idle_by_launches, KERNELS, HOST_WAITS)
        return [*map(operator.sub, idle, seconds_of(trial, [UNATTRIBUTED]))]

    idle = context.mean(idle_s)
    works = context.mean(lambda trial: _over_devices(max, trial, _working, KERNELS))
    rows = context.case.rows[0] // loop.batches
    batch = f"the batch of {rows}" if rows else "the batch"
    return Evidence(
        says="the GPU is idle while the host launches its work",
        numbers=(
            f"the host takes {time(works.value + idle.value)} to launch the work of a step, for"
            f" which the GPU needs {time(works.value)} ({row.busy_source}): {batch} is too small"
            " for this GPU and this host"
        ),
        size_s=replace(idle, signed=True),
        code=COMPILED,
    )


def _reducing(*, few_bytes: bool) -> Callable[[CaseContext], Judgement]:
    """Return a function that judges reductions whose bytes are too few for their time, or not."""

    @_observing
    def judge(context: CaseContext, loop: Observed) -> Judgement:
        found = _reduction(context)
        if not isinstance(found, Evidence) or found.size_s is None:
            return None if few_bytes else found
        gradients = context.model.parameter_bytes
        few = gradients is not None and gradients < SLOWEST_LINK * found.size_s.value
        if few is not few_bytes:
            return None
        return replace(found, code=NO_SYNC) if few else found

    return judge


def _reduction(context: CaseContext) -> Judgement:
    if context.case.traits.parallelism is not Parallelism.RANKS:
        return None
    if _profiled(context):
        return _exposed(context)
    if not context.row.phases.get(Phase.REDUCE.value):
        return None
    seconds = context.phase(Phase.REDUCE.value)
    gradients = context.model.parameter_bytes
    moved = f" of {size(gradients)} of gradients" if gradients else ""
    return Evidence(
        says="backward does not hide the reduction of gradients",
        numbers=(
            f"the reduction{moved} on {count(context.case.devices, 'device')} takes"
            f" {about(seconds)} per step after the end of backward"
        ),
        size_s=seconds,
        share=context.share(Phase.REDUCE.value),
        code=HOOK,
    )


@_observing
def _accumulated(context: CaseContext, loop: Observed) -> Judgement:
    """Return evidence on gradients that are added in more than one backward of an update."""
    added = (loop.synchronized or 0.0) * loop.updates
    if loop.updates < 2 or added <= MOST_SYNCS:
        return None
    says = (
        f"the ranks add their gradients in {exact(added)} of the {loop.updates} calls of backward"
        " per update"
    )
    if not context.row.phases.get(Phase.REDUCE.value):
        return Missing(f"what it costs that {says}: import a trace of torch.profiler")
    seconds = context.phase(Phase.REDUCE.value)
    needless = seconds.scaled(1 - 1 / added)
    return Evidence(
        says=says,
        numbers=(
            f"adding them takes {about(seconds)} per step after the end of backward; once per"
            f" update would take {time(seconds.value - needless.value)}"
        ),
        size_s=needless,
        code=NO_SYNC,
    )


def _exposed(context: CaseContext) -> Judgement:
    """Return evidence on collectives beside which no kernel computes, from a trace.

    Where the arrivals of all ranks are known, their waits do not count. The seconds are those of
    the rank that has the fewest. `Missing` if the trace of a rank shows no collective: it may have
    one that dpbench does not recognise.
    """
    silent = _devices(context, KERNELS) - _devices(context, EXPOSED)
    if silent:
        named = f"{verb(len(silent), 'device', 'devices')} {', '.join(map(str, sorted(silent)))}"
        return Missing(
            "whether computation hides the communication between ranks: the trace of"
            f" {named} shows no collective that dpbench recognises"
        )
    seconds = context.mean(lambda trial: _over_devices(min, trial, lambda _, exposed_s: exposed_s))
    if not seconds.value:
        return None
    reduction = context.row.phases.get(Phase.REDUCE.value, 0.0)
    alone = " of the only rank whose trace is known" if context.case.devices == 1 else ""
    known = all(RANK_WAIT in trial.grouped.metrics for trial in context.trials)
    waits = "after the last rank has arrived" if known else "in which waits for other ranks count"
    return Evidence(
        says="computation does not hide the communication between ranks",
        numbers=(
            f"collectives run while no kernel computes for {about(seconds)} per step{alone},"
            f" {waits}; the reduction of gradients takes {time(reduction)} of the step"
        ),
        size_s=seconds,
        code=HOOK,
    )


@_observing
def _foreign(context: CaseContext, loop: Observed) -> Judgement:
    """Return evidence on ranks that hold memory on GPUs on which they do not train.

    Without such memory, `Missing` if NVML did not list every rank on its own GPU: a rank that is
    not listed may hold some.
    """
    if (
        not context.case.traits.ranks
        or context.case.device_kind != "cuda"
        or context.row.source is Source.IMPORTED
    ):
        return None
    homes = {one.rank for one in loop.held if one.own}
    stray = [one for one in loop.held if not one.own and one.rank in homes]
    if not stray:
        silent = context.case.devices - len(homes)
        ranks = f"{silent} of {count(context.case.devices, 'rank')}"
        built = (trial.facts.hip for trial in context.trials)
        unread = vendors.of(next(filter(None, built), None)).unread
        question = (
            "whether ranks hold memory on GPUs other than their own:"
            f" {unread or f'NVML did not list {ranks}'}"
        )
        return Missing(question) if silent > 0 else None
    gpus = {one.uuid: [other for other in stray if other.uuid == one.uuid] for one in stray}
    most = sorted(gpus.values(), key=lambda held: -sum(one.held_bytes for one in held))
    others = f", and on {count(len(most) - 1, 'more GPU')}" if len(most) > 1 else ""
    places = (f"GPU {held[0].gpu}: {', '.join(map(_amount, held))}" for held in most[:PLACES])
    return Evidence(
        says=f"{_strays(most[0], loop)}{others}",
        numbers="; ".join(
            [
                f"{'; '.join(places)} (CUDA contexts or tensors, from NVML at the end of the loop)",
                *loop.binding,
            ]
        ),
        size_s=None,
        code=BIND,
    )


def _amount(one: Held) -> str:
    return f"rank {one.rank} {size(one.held_bytes)}"


def _strays(held: Sequence[Held], loop: Observed) -> str:
    *before, last = [str(one.rank) for one in held]
    subject = f"ranks {', '.join(before)} and {last} hold" if before else f"rank {last} holds"
    home = next((one.rank for one in loop.held if one.own and one.uuid == held[0].uuid), None)
    place = f"GPU {held[0].gpu}, on which {'no rank' if home is None else f'rank {home}'} trains"
    return f"{subject} {size(sum(one.held_bytes for one in held))} on {place}"


def _aside(
    name: str, activity: str, code: str, on_ranks: str = ""
) -> Callable[[CaseContext], Judgement]:
    """Return a function that judges an activity outside the steps.

    `name` is the field of `Observed` with its seconds, `code` the remedy, and `on_ranks` that of a
    loop with several ranks, if it is another one.
    """

    @_observing
    def judge(context: CaseContext, loop: Observed) -> Judgement:
        aside_s: float = getattr(loop, name)
        steps_s = sum(step.seconds for trial in context.trials for step in trial.steps)
        if aside_s < ASIDE * (aside_s + steps_s) or not steps_s:
            return None
        return Evidence(
            says=f"{activity} takes {long_time(aside_s)}, all steps together {long_time(steps_s)}",
            numbers=(
                f"{activity} takes {percent(aside_s / (aside_s + steps_s))} of the time that"
                f" {activity} and all steps take together; the step times do not include it"
            ),
            size_s=None,
            aside=aside_s / (aside_s + steps_s),
            code=on_ranks if on_ranks and context.case.traits.ranks else code,
        )

    return judge


@_observing
def _skipped(context: CaseContext, loop: Observed) -> Judgement:
    steps = sum(len(trial.steps) for trial in context.trials)
    if not steps or not loop.skipped_updates or context.row.mean is None:
        return None
    lost = min(1.0, loop.skipped_updates / steps)
    return Evidence(
        says=f"the update was skipped in {loop.skipped_updates} of {count(steps, 'step')}",
        numbers=(
            "a GradScaler skips the update of a step whose gradients are not finite:"
            f" {percent(lost)} of the work has no effect"
        ),
        size_s=context.row.mean.scaled(lost),
        share=Estimate(lost, lost, lost, context.row.mean.n),
        code=SCALE,
    )


RULES = (
    FindingRule(
        key="loading",
        when="the loop waits for its DataLoader",
        find=_loading,
        remedy=(
            "load batches in more worker processes; the command measures how many are enough: put"
            " the file and the name of your dataset into it"
        ),
    ),
    FindingRule(
        key="between",
        when="a loop without a DataLoader spends time between its steps",
        find=_between,
        remedy=(
            "if this time reads or prepares batches, let the worker processes of a DataLoader do it"
            " meanwhile"
        ),
    ),
    FindingRule(
        key="reads",
        when="the host waits for values from a device",
        find=_reads,
        remedy=(
            "read values such as the loss only every 10 steps, and keep tensors on the device in"
            " between"
        ),
    ),
    FindingRule(
        key="pageable",
        when="batches are copied to a GPU from memory that is not pinned",
        find=_pageable,
        remedy=(
            "let the DataLoader pin its batches, and copy them with .to(device, non_blocking=True)"
        ),
    ),
    FindingRule(
        key="launches",
        when="a profile shows an idle GPU while the host launches its work",
        find=_launches,
        remedy=(
            "use a bigger batch, or launch fewer and larger kernels: torch.compile or"
            " torch.cuda.graph"
        ),
    ),
    FindingRule(
        key="reduction",
        when="ranks add their gradients after the end of backward",
        find=_reducing(few_bytes=False),
        remedy=(
            "send fewer bytes (bf16 gradients), or reduce less often (no_sync while gradients"
            " accumulate)"
        ),
    ),
    FindingRule(
        key="reduction of few bytes",
        when=f"the same, at less than {8 * SLOWEST_LINK / 1e9:g} Gbit/s",
        find=_reducing(few_bytes=True),
        remedy=(
            "reduce less often (no_sync while gradients accumulate), or look for a rank that"
            " arrives late: any link carries these bytes in less time"
        ),
    ),
    FindingRule(
        key="accumulation",
        when=f"ranks add their gradients over {MOST_SYNCS} times per update",
        find=_accumulated,
        remedy=(
            "run all but the last forward and backward of an update inside no_sync() of the"
            " DistributedDataParallel"
        ),
    ),
    FindingRule(
        key="memory of other ranks",
        when="a rank holds memory on a GPU on which it does not train",
        find=_foreign,
        remedy=(
            "call torch.cuda.set_device(local_rank) before the first CUDA call, and load"
            " checkpoints with map_location"
        ),
    ),
    FindingRule(
        key="evaluation",
        when=f"evaluation takes {percent(ASIDE)} or more of its time and that of all steps",
        find=_aside("evaluation_s", "evaluation", EVALUATE),
        remedy="evaluate less often, on fewer samples, or under torch.inference_mode()",
    ),
    FindingRule(
        key="checkpoints",
        when=f"saving takes {percent(ASIDE)} or more of its time and that of all steps",
        find=_aside("checkpoint_s", "saving checkpoints", SAVE, on_ranks=SAVE_ONCE),
        remedy="save checkpoints less often, or from a copy in another thread",
    ),
    FindingRule(
        key="skipped updates",
        when="a GradScaler skipped updates after the optimizer's first step",
        find=_skipped,
        remedy=(
            "begin with a lower scale, use bf16, which needs no scale, or look for the cause of"
            " infinite gradients"
        ),
    ),
)
