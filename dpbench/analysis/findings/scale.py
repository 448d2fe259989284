"""Findings between cases: what more devices gave, what the work's size and its split cost, and what was faster."""

from __future__ import annotations

from dpbench.analysis import stats
from dpbench.analysis.findings.bench import COMPUTE, Bench, scaled, share_of
from dpbench.analysis.findings.rule import Evidence, Judgement, Missing, Rule
from dpbench.analysis.findings.text import devices, strategy
from dpbench.analysis.summary import Row
from dpbench.records import schedule
from dpbench.records.estimate import Estimate
from dpbench.records.traits import Role
from dpbench.records.words import NOT_ENOUGH, REMEDY, count, duration, exact, number, percent, size, time, times, verb

LEVEL = 1.1
"""Device 0's memory over the others', up to which they are alike."""


def _busy(bench: Bench) -> Judgement:
    """Find device 0 working while the others are done."""
    row = bench.row
    if row.imbalance is None or len(row.busy) < 2:
        return None
    others = [seconds for device, seconds in row.busy.items() if device > 0]
    rest = sum(others) / len(others)
    # no more can be gained than by sharing what device 0 has more
    factor = 1 - 1 / len(row.busy)
    e = row.imbalance
    if e.doubt:
        return _doubted("whether device 0 is busier than the others")
    value, low, high = ((ratio - 1) * rest * factor for ratio in (e.value, e.low, e.high))
    return Evidence(
        says=f"device 0 is busy {times(row.imbalance)} as long as the others",
        numbers=f"{time(row.busy.get(0, 0.0))} of a step against {time(rest)} ({row.busy_source})",
        size_s=Estimate(value, low, high, e.n, signed=True),
    )


def _memory(bench: Bench) -> Judgement:
    """Find device 0's memory filling first: it costs no time, it bounds the batch."""
    row = bench.row
    if row.memory_imbalance is None or row.memory_imbalance <= LEVEL:
        return None
    others = [held for device, held in row.memory.items() if device > 0]
    lighter = [
        f"{strategy(one.case)} {number(one.memory_imbalance)}×"
        for one in bench.rivals()
        if one.memory_imbalance is not None and one.memory_imbalance < row.memory_imbalance - 0.05
    ]
    measured = f"; measured here: {', '.join(lighter)}" if lighter else ""
    return Evidence(
        says=f"device 0 holds {number(row.memory_imbalance)}× the memory of the others: it fills first",
        numbers=f"{size(row.memory[0])} against {size(sum(others) / len(others))} ({row.memory_source}){measured}",
        size_s=None,
    )


def _oversubscribed(bench: Bench) -> Judgement:
    """Find more logical devices than cores: they take turns."""
    if not bench.oversubscribed:
        return None
    most = len(bench.case.rows)
    lost, compute = 1 - bench.cores / most, bench.phase(*COMPUTE)
    return Evidence(
        says=f"oversubscribed: {count(most, 'device')} share {count(bench.cores, 'core')}",
        numbers=f"forward and backward take {time(compute.value)}; with a core for each device at best "
        f"{time(compute.value * (1 - lost))}",
        size_s=share_of(compute, lost),
    )


def _all_cores(bench: Bench) -> Judgement:
    """Find that one device with all cores does the same work faster."""
    if bench.case.device_kind != "cpu":
        return None
    rival = bench.all_cores()
    if rival is None:
        return Missing("whether one device with all cores is faster (--strategies single_all_cores)")
    return _against(bench, rival, "without data parallelism, one device with all cores")


def _doubted(question: str) -> Missing:
    """Leave a question open for lack of rounds."""
    return Missing(f"{question} ({NOT_ENOUGH}: {REMEDY} would help)")


def _against(bench: Bench, rival: Row, name: str) -> Evidence | Missing:
    """Return what a case of the same work saves."""
    assert rival.step is not None
    ratio = stats.ratio(bench.row.series, rival.series)
    if ratio.doubt or rival.step.doubt:
        return _doubted(f"whether {name} is faster")
    speedup = f"; {times(rival.speedup)} over one device" if rival.speedup else ""
    return Evidence(
        says=f"{name} is {times(ratio)} as fast",
        numbers=f"{duration(rival.step)} a step against {time(bench.step_s)}{speedup}",
        size_s=stats.difference(bench.row.series, rival.series),
        measured=True,
    )


def _ddp(bench: Bench) -> Judgement:
    if not bench.engine:
        return None
    rival = next((row for row in bench.rivals() if row.case.traits.role is Role.CONTROL), None)
    if rival is None:
        return Missing("whether DistributedDataParallel is faster (--strategies ddp)")
    return _against(bench, rival, "DistributedDataParallel")


def _schedules(bench: Bench) -> Judgement:
    """Find the fastest schedule that needs no tolerance."""
    if not bench.engine:
        return None
    rivals = [row for row in bench.rivals() if row.case.traits.scheduled and _exact(row.case.schedule)]
    if not rivals:
        return Missing("whether another schedule is faster (--schedules fastest, or --ladder)")
    best = min(rivals, key=lambda row: (row.doubt is not None, row.step.value if row.step else 0.0))
    return _against(bench, best, f"the schedule {strategy(best.case)}")


def _exact(text: str) -> bool:
    return text in ("", schedule.FASTEST) or schedule.parse(text).exact


def _small(bench: Bench) -> Judgement:
    """Find that one device's share is too small: alone, it takes longer than its part of the whole."""
    share, rest = divmod(bench.case.batch_size, bench.case.devices)
    whole, part = bench.single(), None if rest else bench.single(share)
    if bench.case.placement == "colocated" or rest:
        return None
    if whole is None or part is None or whole.step is None or part.step is None:
        lacking = bench.case.batch_size if whole is None else share
        few = f"{count(share, 'sample')} a device {verb(share, 'is', 'are')} too few"
        return Missing(f"whether {few} (--strategies single --batch-sizes {lacking})")
    most = bench.case.devices
    ideal = whole.step.value / most
    if whole.step.doubt or part.step.doubt:
        return _doubted(f"whether {count(share, 'sample')} a device {verb(share, 'is', 'are')} too few")
    samples = f"{count(share, 'sample')} {verb(share, 'is', 'are')} too few for a device"
    return Evidence(
        says=f"{samples}: alone {verb(share, 'it takes', 'they take')} {time(part.step.value)}, not {time(ideal)}",
        numbers=f"one device takes {time(whole.step.value)} for {count(bench.case.batch_size, 'sample')}: cutting the "
        f"batch by {most} cuts its step by {number(whole.step.value / part.step.value)}",
        size_s=stats.difference(part.series, scaled(whole.series, 1 / most)),
    )


def _bigger(bench: Bench) -> Judgement:
    """Find that a bigger batch on the same devices costs less a sample: weak against strong scaling."""
    others = [
        row
        for row in bench.rows.values()
        if row.case.batch_size > bench.case.batch_size and row is bench.other(batch_size=row.case.batch_size)
    ]
    if not others:
        return Missing("whether a bigger batch scales better (--batch-per-device, or more --batch-sizes)")
    best = max(others, key=lambda row: row.throughput.value if row.throughput else 0.0)
    assert best.step is not None
    if best.step.doubt:
        return _doubted(f"whether batch {best.case.batch_size} scales better")
    work = bench.case.batch_size / best.case.batch_size
    mine, its = (f"{times(row.speedup)} {row.scaling}" if row.speedup else "unknown" for row in (bench.row, best))
    return Evidence(
        says=f"at batch {best.case.batch_size}, {count(bench.case.batch_size, 'sample')} "
        f"{verb(bench.case.batch_size, 'takes', 'take')} {time(best.step.value * work)}",
        numbers=f"against {time(bench.step_s)}; the speed-up over one device is {its} there, {mine} here",
        size_s=stats.difference(bench.row.series, scaled(best.series, work)),
        measured=True,
    )


def _uneven(bench: Bench) -> Judgement:
    """Find that the batch does not split evenly: all wait for the fullest device."""
    rows, most, batch = bench.case.rows, bench.case.devices, bench.case.batch_size
    if len(rows) == most and len(set(rows)) == 1:
        return None
    lost, compute = 1 - batch / (max(rows) * most), bench.phase(*COMPUTE)
    without = most - len(rows)
    idle = f", {without} of {count(most, 'device')} {verb(without, 'gets', 'get')} nothing" if without else ""
    multiples = dict.fromkeys((batch // most * most or most, -(-batch // most) * most))
    samples = f"{count(batch, 'sample')} {verb(batch, 'does', 'do')}"
    return Evidence(
        says=f"{samples} not split evenly over {count(most, 'device')}{idle}",
        numbers=f"samples by device: {', '.join(map(str, rows))}; a multiple of {most} such as "
        f"{' or '.join(map(str, multiples))} does",
        size_s=share_of(compute, lost),
    )


def _diminishing(bench: Bench) -> Judgement:
    """Find that the last devices added little."""
    if bench.case.devices <= 2 or bench.case.placement == "colocated" or bench.case.device_kind == "emulated":
        return None
    fewer = bench.fewer()
    if fewer is None or fewer.step is None:
        return Missing("what the last devices added (--devices 2,4 and so on)")
    most, before = bench.case.devices, fewer.case.devices
    work = bench.case.batch_size / fewer.case.batch_size
    gained = stats.ratio(scaled(fewer.series, work), bench.row.series)
    if gained.doubt:
        return _doubted(f"how much the devices beyond {before} added")
    serial = sum(seconds for name, seconds in bench.row.phases.items() if name not in COMPUTE)
    single = bench.single()
    bound = (
        f"; even if forward and backward took no time, {devices(bench.case)} would give "
        f"{number(single.step.value / serial)}×"
        if single and single.step and not single.step.doubt and serial
        else ""
    )
    return Evidence(
        says=f"going from {before} to {most} devices gained {times(gained)}, of an ideal {exact(most / before)}×",
        numbers=f"phases that more devices do not shorten are {percent(serial / bench.step_s)} of the step{bound}",
        size_s=stats.difference(bench.row.series, scaled(fewer.series, work * before / most)),
    )


RULES = (
    Rule(
        name="imbalance", when=_busy,
        remedy="take work off device 0: the loss (local_loss), the update (zero1), or rows of the batch (TrainStep's "
        "chunk_sizes)",
        switches={"loss": ("local",), "update": ("each", "sharded")}, roles=(Role.CONTROL,),
        needs="--schedules local_loss,zero1 --strategies dp,ddp",
    ),
    Rule(
        name="memory", when=_memory,
        remedy="leave outputs and loss on their devices (local_loss), cut the optimizer's state (zero1), or use ddp",
    ),
    Rule(
        name="oversubscribed", when=_oversubscribed,
        remedy="use no more devices than cores, or another machine: these numbers say nothing of more",
    ),
    Rule(
        name="all cores", when=_all_cores, roles=(Role.ALL_CORES,),
        remedy="on this CPU, leave data parallelism out and give one device all cores",
    ),
    Rule(
        name="small share", when=_small, remedy="give each device more: a bigger batch, or fewer devices",
        needs="--batch-per-device",
    ),
    Rule(name="bigger batch", when=_bigger, remedy="train with the bigger batch, where the training allows it"),
    Rule(name="uneven", when=_uneven, remedy="choose a batch that is a multiple of the devices"),
    Rule(
        name="diminishing", when=_diminishing,
        remedy="stay with fewer devices, or take away first what does not divide",
    ),
    Rule(name="ddp", when=_ddp, remedy="use torch.nn.parallel.DistributedDataParallel", roles=(Role.CONTROL,)),
    Rule(name="schedule", when=_schedules, remedy="use dpbench.TrainStep with that schedule"),
)  # fmt: skip
