"""Findings in the phases of DataParallel's step: what moves data, updates, or is in no phase at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dpbench.analysis.findings.bench import Bench, overlap, share_of
from dpbench.analysis.findings.rule import Evidence, Judgement, Missing, Rule
from dpbench.records import UNATTRIBUTED, Phase
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Reduction, Role
from dpbench.records.words import count, percent, size, time, verb

SERIAL = 1.25
"""Devices in a phase at once, below which they count as taking turns."""


def _heavy(phase: Phase, detail: Callable[[Bench, Estimate], str]) -> Callable[[Bench], Judgement]:
    """Return a rule's condition: DataParallel spends time in this phase; `detail` breaks the time down."""

    def when(bench: Bench) -> Judgement:
        if not bench.engine or not bench.row.phases.get(phase.value):
            return None
        seconds = bench.phase(phase.value)
        says = f"{phase.value} takes {percent(seconds.value / bench.step_s)} of the step"
        return Evidence(says=says, numbers=detail(bench, seconds), size_s=seconds)

    return when


def _per_tensor(bench: Bench, seconds: Estimate) -> str:
    """Break time down by parameter tensors, which cost DataParallel more than their bytes do."""
    model = bench.model
    if not model.get("parameter_tensors"):
        return time(seconds.value)
    tensors = model["parameter_tensors"] + model["buffer_tensors"]
    copies = len(bench.case.rows) - 1
    each = f"{_tensors(model)} × {time(seconds.value / model['parameter_tensors'])}"
    modules = count(int(model["modules"]), "module")
    return (
        f"{time(seconds.value)} = {each}, or {time(seconds.value / model['modules'])} for each of {modules}; it makes "
        f"{copies} × {size(model['parameter_bytes'] + model['buffer_bytes'])} of copies, each in "
        f"{count(int(tensors), 'tensor')}"
    )


def _per_gradient(bench: Bench, seconds: Estimate) -> str:
    model, copies = bench.model, len(bench.case.rows) - 1
    if not model.get("parameter_tensors"):
        return time(seconds.value)
    each = f"{_tensors(model)} × {time(seconds.value / model['parameter_tensors'])}"
    return (
        f"{time(seconds.value)} = {each}; it adds {copies} × {size(model['parameter_bytes'])} of gradients on device 0"
    )


def _tensors(model: Mapping[str, float]) -> str:
    return count(int(model["parameter_tensors"]), "parameter tensor")


def _of_batch(name: str) -> Callable[[Bench, Estimate], str]:
    """Return how many bytes of the batch a phase moves."""

    def detail(bench: Bench, seconds: Estimate) -> str:
        sample = bench.model.get(name)
        moved = f" for {size(sample * bench.case.batch_size)}" if sample else ""
        return f"{time(seconds.value)}{moved} in {count(len(bench.case.rows), 'piece')}"

    return detail


def _optimizer(bench: Bench) -> Judgement:
    """Find device 0 updating alone: n devices could each update their share."""
    if not bench.schedule or bench.schedule.update != "root" or not bench.row.phases.get(Phase.OPTIMIZER.value):
        return None
    seconds, idle = bench.phase(Phase.OPTIMIZER.value), len(bench.case.rows) - 1
    others = 1 - 1 / len(bench.case.rows)
    return Evidence(
        says=f"the optimizer runs on device 0 alone, {percent(seconds.value / bench.step_s)} of the step",
        numbers=f"{time(seconds.value)} while {count(idle, 'device')} {verb(idle, 'waits', 'wait')}; in equal shares "
        f"{time(seconds.value - seconds.value * others)}",
        size_s=share_of(seconds, others),
    )


def _unattributed(bench: Bench) -> Judgement:
    seconds = bench.phase(UNATTRIBUTED)
    return Evidence(
        says=f"{percent(seconds.value / bench.step_s)} of the step is in no phase: Python between the phases",
        numbers=f"{time(seconds.value)} that no mark covers",
        size_s=seconds,
    )


def _serial(phase: Phase) -> Callable[[Bench], Judgement]:
    """Return a rule's condition: n devices do not divide the time of a phase by n."""

    def when(bench: Bench) -> Judgement:
        # torch's own backward holds the reduction, which has no counterpart on one device
        mixed = phase is Phase.BACKWARD and bench.case.traits.reduction is Reduction.IN_BACKWARD
        if not bench.engine or mixed or bench.case.device_kind == "emulated":
            return None
        lost, ideal = bench.excess(phase.value), bench.ideal()
        if lost is None or ideal is None:
            return Missing("whether devices compute at once (needs the strategy single at the same batch)")
        at_once = overlap(bench.trials, phase)
        took, alone = bench.row.phases.get(phase.value, 0.0), ideal[0].phases.get(phase.value, 0.0) / ideal[1]
        devices = count(len(bench.case.rows), "device")
        return Evidence(
            says=f"{phase.value} does not run on {devices} at once: it takes {time(took)}, not {time(alone)}",
            numbers=f"one device's share would take {time(alone)}; {_cause(bench, at_once)}",
            size_s=lost,
        )

    return when


def _cause(bench: Bench, at_once: float) -> str:
    devices = count(len(bench.case.rows), "device")
    if bench.oversubscribed:
        return f"{devices} take turns on {count(bench.cores, 'core')}"
    if at_once < SERIAL:
        return f"{at_once:.1f} of {devices} are in it at once: one waits for the other"
    return (
        f"{at_once:.1f} of {devices} are in it at once, each slower than alone: small pieces, and Python, whose "
        "lock one thread holds at a time, launches them"
    )


RULES = (
    Rule(
        name="replicate", when=_heavy(Phase.REPLICATE, _per_tensor),
        remedy="keep the replicas: cached keeps their module trees, flat_storage copies one buffer instead of many "
        "tensors, persistent keeps the weights too; ddp never replicates",
        switches={"replicas": ("cached", "persistent"), "storage": ("flat",)}, roles=(Role.CONTROL,),
        needs="--schedules cached,flat_storage,persistent --strategies dp,ddp",
    ),
    Rule(
        name="reduce", when=_heavy(Phase.REDUCE, _per_gradient),
        remedy="add the gradients in one buffer (flat_storage), while backward still runs (overlap; ddp does so too), "
        "or on every device its share (zero1)",
        switches={"storage": ("flat",), "reduce": ("overlap",), "update": ("each", "sharded")}, roles=(Role.CONTROL,),
        needs="--schedules flat_storage,overlap,zero1 --strategies dp,ddp",
    ),
    Rule(
        name="scatter", when=_heavy(Phase.SCATTER, _of_batch("input_bytes")),
        remedy="send less (smaller types, augmentation on the device), from pinned memory and in good time; ddp's "
        "ranks each load their own rows",
        roles=(Role.CONTROL,), needs="--strategies dp,ddp",
    ),
    Rule(
        name="gather", when=_heavy(Phase.GATHER, _of_batch("output_bytes")),
        remedy="leave the outputs where they are and compute the loss there: local_loss, or ddp",
        switches={"loss": ("local",)}, roles=(Role.CONTROL,), needs="--schedules local_loss --strategies dp,ddp",
    ),
    Rule(
        name="optimizer", when=_optimizer,
        remedy="let every device update its share of the weights (zero1), or go through them in one buffer "
        "(flat_optimizer)",
        switches={"update": ("sharded",), "optimizer": ("flat",)},
        needs="--schedules flat_optimizer,zero1 --strategies dp",
    ),
    Rule(
        name="unattributed", when=_unattributed,
        remedy="profile the step in Python (dpbench marks every phase of its own): hooks, the loss, logging and "
        "whatever else runs between the phases",
    ),
    Rule(
        name="serial forward", when=_serial(Phase.FORWARD),
        remedy="give each device more work at once (a bigger batch, fewer and larger operators), or a process of its "
        "own: ddp",
        switches={"workers": ("pool",)}, roles=(Role.CONTROL,), needs="--schedules pool --strategies dp,ddp",
    ),
    Rule(
        name="serial backward", when=_serial(Phase.BACKWARD),
        remedy="let each device run its own backward in its own thread (local_backward), or its own process (ddp)",
        switches={"backward": ("local",)}, roles=(Role.CONTROL,),
        needs="--schedules local_backward --strategies dp,ddp",
    ),
)  # fmt: skip
