"""Scale: the rules about imbalance, the number of devices, and the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dpbench.analysis import arrivals, commands, stats, transfers
from dpbench.analysis.findings.rule import (
    COMPUTE,
    CaseContext,
    Evidence,
    FindingRule,
    Judgement,
    Missing,
    remedial,
)
from dpbench.analysis.summary import busy_of
from dpbench.analysis.transfers import SlowLink
from dpbench.records import HOST, Case, Phase, registry, siblings
from dpbench.records.estimate import Estimate
from dpbench.records.names import devices, in_words
from dpbench.records.registry import Parallelism, Role
from dpbench.records.schedule import Schedule
from dpbench.records.spelling import dashed
from dpbench.records.words import (
    REMEDY,
    count,
    exact,
    number,
    percent,
    size,
    time,
    times,
    verb,
    withheld,
)

LEVEL = 1.1
"""The largest ratio of a device's memory or busy time to the others' mean in balance."""
SHOWN_RANKS = 3
"""The number of late ranks that a finding names; of more, it says how many they are."""
SHOWN_LINKS = 3
"""The number of slow links that a finding names, the slowest first."""


def _busy(context: CaseContext) -> Judgement:
    """Return evidence on the additional busy time of device 0; None without busy times.

    None also for ranks, because device 0 of these has no additional work: see `_slow_device`.
    The cost is the time that an equal split of the additional work over all devices would save.
    """
    row = context.row
    if row.imbalance is None or len(row.busy) < 2 or context.case.traits.ranks:
        return None
    others = [seconds for device, seconds in row.busy.items() if 0 < device < context.case.working]
    others_s = sum(others) / len(others)
    # the upper bound: all the extra work of device 0 is shared equally
    factor = 1 - 1 / (1 + len(others))
    e = row.imbalance
    if e.doubt:
        return _doubted("whether device 0 is busier than the others", e)
    return Evidence(
        says=f"device 0 is busy {times(row.imbalance)} as long as the others on average",
        numbers=(
            f"device 0 is busy for {time(row.busy.get(0, 0.0))} per step, the others for"
            f" {time(others_s)} on average ({row.busy_source})"
        ),
        size_s=_beyond(e, others_s).scaled(factor),
    )


def _beyond(ratio: Estimate, others_s: float) -> Estimate:
    """Return the seconds by which a device is busy longer than others, by the ratio of both."""
    value, low, high = ((one - 1) * others_s for one in (ratio.value, ratio.low, ratio.high))
    return Estimate(value, low, high, ratio.n, signed=True)


def _slow_device(context: CaseContext) -> Judgement:
    """Return evidence if a device is busy clearly longer than the others for as many rows.

    Where one process runs all devices, device 0 has additional work: it is never called slow, and
    another is compared with it only if no third has as many rows. None if the devices are not
    replicas, or if each has its own part of the update, because these may differ.
    """
    row = context.row
    case = context.case
    chosen = context.schedule
    # `fastest` may share out the update
    shared = chosen is Schedule.SHARDED if chosen else case.traits.scheduled
    devices, vectors = busy_of(
        [trial for trial in context.trials if trial.trusted], row.busy_source
    )
    alike = [
        device
        for device in devices
        if device < len(case.rows) and case.rows[device] == case.rows[0]
    ]
    suspects = [device for device in alike if device or not context.engine]
    if shared or not case.traits.replicated or len(alike) < 2 or not suspects:
        return None
    slow = max(suspects, key=lambda device: row.busy[device])
    peers = [device for device in suspects if device != slow] or [
        device for device in alike if device != slow
    ]
    columns = [devices.index(device) for device in (slow, *peers)]
    e = stats.balance({n: each[:, columns] for n, each in vectors.items()}).first
    if e.doubt:
        question = "whether one device is slower than the others"
        return _doubted(question, e) if e.value > LEVEL else None
    if e.low <= LEVEL:
        return None
    peers_s = sum(row.busy[device] for device in peers) / len(peers)
    named = "the others" if len(peers) > 1 else f"device {peers[0]}"
    return Evidence(
        says=(
            f"device {slow} is slow: it is busy {times(e)} as long as {named} with the same number"
            " of rows"
        ),
        numbers=(
            f"device {slow} is busy for {time(row.busy[slow])} per step, {named} for"
            f" {time(peers_s)} ({row.busy_source})"
        ),
        size_s=_beyond(e, peers_s),
    )


def _late(context: CaseContext) -> Judgement:
    """Return evidence if most of the wait is for ranks that are late on average."""
    return _waits(context, in_turn=False)


def _late_in_turn(context: CaseContext) -> Judgement:
    """Return evidence if ranks wait, but not most of it for ranks that are late on average."""
    return _waits(context, in_turn=True)


def _waits(context: CaseContext, *, in_turn: bool) -> Judgement:
    trusted = [trial for trial in context.trials if trial.trusted]
    every = [one for trial in trusted for one in arrivals.of_trial(trial)]
    if not every:
        return None
    order = arrivals.Order.of(every)
    wait, apart = context.mean(arrivals.waiting), context.mean(order.apart)
    if in_turn is (apart.low > wait.value / 2):
        return None
    often = sum(one.last == order.last for one in every)
    return Evidence(
        says=f"ranks wait {'for each other in turn' if in_turn else _for_ranks(order.late)}",
        numbers=(
            f"rank {order.last} arrives last at {often} of {count(len(every), 'collective')}; the"
            f" rank that arrives first waits {time(wait.value)} per step; on average, rank"
            f" {order.first} waits {time(max(0.0, apart.value))} longer than rank {order.last}"
        ),
        size_s=wait,
    )


def _for_ranks(late: Sequence[int]) -> str:
    if len(late) == 1:
        return f"for rank {late[0]}"
    if len(late) > SHOWN_RANKS:
        return f"for {count(len(late), 'late rank')}"
    return f"for ranks {', '.join(map(str, late[:-1]))} and {late[-1]}"


def _slow_link(phases: Sequence[Phase], *, to_host: bool) -> Callable[[CaseContext], Judgement]:
    """Return a `FindingRule.find` whose evidence is that copies over a link are slower than others.

    If `to_host`, copies from the host are compared. The cost is the time that the slowest link can
    add to `phases`.
    """

    def find(context: CaseContext) -> Judgement:
        timed = transfers.with_links(context.case, context.trials_of)
        found = transfers.slow_links(timed, to_host=to_host)
        if any(one.slower.doubt for one in found):
            links = [one.slower for one in found]
            return _doubted("whether one link is slower than the others", *links)
        slow = [one for one in found if one.slower.low > transfers.SLOW_LINK]
        if not slow:
            return None
        slow.sort(key=lambda one: -one.slower.value)
        moving = context.phase(*phases)
        copied = min(copy.bytes for trial in timed for copy in trial.facts.copies)
        shown = slow[:SHOWN_LINKS]
        more = (
            [f"and {count(len(slow) - len(shown), 'more link')}"] if len(slow) > len(shown) else []
        )
        return Evidence(
            says="; ".join([*map(str, shown), *more]),
            numbers=(
                f"a copy of {size(copied)} takes"
                f" {', '.join(times(one.slower) for one in shown)} as long as over"
                f" other links; {', '.join(phases)} {verb(len(phases), 'takes', 'take')}"
                f" {time(moving.value)} of the step{_found_before(context, shown)}"
            ),
            size_s=moving.scaled(1 - 1 / slow[0].slower.value),
        )

    return find


def _found_before(context: CaseContext, links: Sequence[SlowLink]) -> str:
    """Return what siblings found about the links on this machine; "" if nothing."""
    gpus = [frozenset(context.case.gpu(end) for end in link.ends if end != HOST) for link in links]
    stored = context.machine_result
    clauses = [about(stored, gpus) for about in (siblings.added("links") if stored else [])]
    return "".join(f"; {clause}" for clause in clauses if clause)


def _memory(context: CaseContext) -> Judgement:
    """Return evidence if device 0 uses clearly more memory, which limits the batch size."""
    row = context.row
    if row.memory_imbalance is None or row.memory_imbalance <= LEVEL:
        return None
    others = [held for device, held in row.memory.items() if device > 0]
    lighter = [
        f"{in_words(one.case)} {number(one.memory_imbalance)}×"
        for one in context.rivals
        if one.memory_imbalance is not None and one.memory_imbalance < row.memory_imbalance - 0.05
    ]
    measured = f"; lower ratios measured in this run: {', '.join(lighter)}" if lighter else ""
    return Evidence(
        says=(
            f"device 0 uses {number(row.memory_imbalance)}× the memory of the others, so it runs"
            " out of memory first"
        ),
        numbers=(
            f"{size(row.memory[0])} on device 0, {size(sum(others) / len(others))} on average on"
            f" the others ({row.memory_source}){measured}"
        ),
        size_s=None,
    )


def _oversubscribed(context: CaseContext) -> Judgement:
    if not context.oversubscribed:
        return None
    most = len(context.case.rows)
    lost = 1 - context.cores / most
    compute = context.phase(*COMPUTE)
    return Evidence(
        says=f"oversubscribed: {count(most, 'device')} share {count(context.cores, 'core')}",
        numbers=(
            f"forward and backward take {time(compute.value)}; with one core per device, they would"
            f" take at least {time(compute.value * (1 - lost))}"
        ),
        size_s=compute.scaled(lost),
    )


def _doubted(question: str, *numbers: Estimate) -> Missing:
    """Return `Missing` for a question, as "whether ddp is faster", that more rounds would answer.

    One of the `numbers` is in doubt.
    """
    return Missing(f"{question} ({withheld(*numbers)}: {REMEDY} would help)")


def _small(context: CaseContext) -> Judgement:
    """Return evidence on whether one device's share of the batch is too small to use it well.

    With n devices, the cost is the step time of one device on its share, minus 1/n of its step time
    on the whole batch. None if the batch does not split evenly, or if the replicas share a GPU.
    """
    share, rest = divmod(context.case.batch_size, context.case.devices)
    whole = context.single()
    part = None if rest else context.single(share)
    if context.case.placement == "colocated" or rest:
        return None
    if whole is None or part is None or whole.step is None or part.step is None:
        lacking = context.case.batch_size if whole is None else share
        few = f"{count(share, 'sample')} per device {verb(share, 'is', 'are')} too few"
        alone = registry.of_role(Role.BASELINE)
        return Missing(
            f"whether {few} (measure it with {dashed('strategies', alone)}"
            f" {dashed('batch_sizes', lacking)})"
        )
    most = context.case.devices
    ideal = whole.step.value / most
    samples = f"{count(share, 'sample')} per device {verb(share, 'is', 'are')} too few"
    if whole.step.doubt or part.step.doubt:
        return _doubted(f"whether {samples}", whole.step, part.step)
    return Evidence(
        says=(
            f"{samples}: one device takes {time(part.step.value)} for {verb(share, 'it', 'them')}; "
            f"with perfect scaling it would take {time(ideal)}"
        ),
        numbers=(
            f"one device takes {time(whole.step.value)} for"
            f" {count(context.case.batch_size, 'sample')}; with 1/{most} of the batch, its step is"
            f" faster by a factor of only {number(whole.step.value / part.step.value)}"
        ),
        size_s=stats.difference(part.series, whole.series.scaled(1 / most)),
    )


def _bigger(context: CaseContext) -> Judgement:
    """Return evidence on the time per sample with the best bigger batch on the same devices."""
    sizes = sorted({case.batch_size for case in context.rows})
    others = [
        row
        for size in sizes
        if size > context.case.batch_size and (row := context.other(batch_size=size)) is not None
    ]
    if not others:
        return Missing(
            "whether a bigger batch scales better (measure it with"
            f" {dashed('batch_per_device')}, or with more {dashed('batch_sizes')})"
        )
    best = max(others, key=lambda row: row.throughput.value if row.throughput else 0.0)
    assert best.step is not None
    if best.step.doubt:
        return _doubted(f"whether batch {best.case.batch_size} scales better", best.step)
    work = context.case.batch_size / best.case.batch_size
    speedup, bigger_speedup = (
        f"{times(r.speedup)} ({r.scaling} scaling)" if r.speedup else "unknown"
        for r in (context.row, best)
    )
    return Evidence(
        says=(
            f"with a batch of {best.case.batch_size}, the time per"
            f" {count(context.case.batch_size, 'sample')} is {time(best.step.value * work)}"
        ),
        numbers=(
            f"with a batch of {context.case.batch_size}, a step takes {time(context.step_s)}; the"
            f" speed-up over one device is {bigger_speedup} at batch"
            f" {best.case.batch_size} and {speedup} at batch {context.case.batch_size}"
        ),
        size_s=stats.difference(
            context.row.series, best.series.scaled(work), level=stats.joint_level(len(others))
        ),
        measured=True,
    )


def _uneven(context: CaseContext) -> Judgement:
    """Return evidence if shares of the batch differ, so that all devices wait for the largest."""
    rows = context.case.rows
    batch = context.case.batch_size
    most = context.case.devices // context.case.traits.devices_per_replica
    if context.case.traits.parallelism is Parallelism.OTHER or (
        len(rows) == most and len(set(rows)) == 1
    ):
        return None
    lost = 1 - batch / (max(rows) * most)
    compute = context.phase(*COMPUTE)
    without = most - len(rows)
    idle = (
        f"; {without} of {count(most, 'device')} {verb(without, 'gets', 'get')} no sample"
        if without
        else ""
    )
    multiples = _multiples(batch, most)
    samples = f"{count(batch, 'sample')} {verb(batch, 'does', 'do')}"
    return Evidence(
        says=f"{samples} not split evenly over {count(most, 'device')}{idle}",
        numbers=(
            f"samples by device: {', '.join(map(str, rows))}; a multiple of {most} such as "
            f"{' or '.join(map(str, multiples))} splits evenly"
        ),
        size_s=compute.scaled(lost),
    )


def _diminishing(context: CaseContext) -> Judgement:
    """Return evidence on the speed-up over the next smaller measured number of devices.

    The cost is the step time minus the step time that the ideal speed-up would give. None for up to
    two devices, replicas that share a GPU, and emulated devices.
    """
    if (
        context.case.devices <= 2
        or context.case.placement == "colocated"
        or context.case.device_kind == "emulated"
    ):
        return None
    fewer = context.fewer()
    if fewer is None or fewer.step is None:
        return Missing(
            f"the gain over fewer devices (measure it with {dashed('devices')} and several"
            " numbers, such as 2,4)"
        )
    most = context.case.devices
    before = fewer.case.devices
    work = context.case.batch_size / fewer.case.batch_size
    gained = stats.ratio(fewer.series.scaled(work), context.row.series)
    if gained.doubt:
        return _doubted(f"the gain from more than {before} devices", gained)
    serial = sum(seconds for name, seconds in context.row.phases.items() if name not in COMPUTE)
    single = context.single()
    bound = (
        f"; even if forward and backward took no time, {devices(context.case)} would give only "
        f"{number(single.step.value / serial)}× over one device"
        if single and single.step and not single.step.doubt and serial
        else ""
    )
    return Evidence(
        says=(
            f"going from {before} to {most} devices gave a speed-up of {times(gained)}; the ideal"
            f" is {exact(most / before)}×"
        ),
        numbers=(
            f"phases that more devices do not shorten take {percent(serial / context.step_s)} of"
            f" the step{bound}"
        ),
        size_s=stats.difference(context.row.series, fewer.series.scaled(work * before / most)),
    )


def _balanced(case: Case) -> list[Case]:
    return remedial(case, [Schedule.LOCAL, Schedule.SHARDED], [Role.CONTROL])


def _fewer(case: Case) -> list[Case]:
    return [replace(case, devices=case.devices // 2)] if case.devices > 3 else []


def _even(case: Case) -> list[Case]:
    replicas = case.devices // case.traits.devices_per_replica
    return [replace(case, batch_size=size) for size in _multiples(case.batch_size, replicas)]


def _multiples(batch: int, devices: int) -> list[int]:
    return [*dict.fromkeys((batch // devices * devices or devices, -(-batch // devices) * devices))]


RULES = (
    FindingRule(
        key="imbalance",
        when="one process runs all devices, and device 0 is busy longer than the others on average",
        find=_busy,
        remedy=(
            "move work from device 0 to the others: the loss (local), the update (sharded), or"
            " rows of the batch (TrainStep's chunk_sizes)"
        ),
        schedules=(Schedule.LOCAL, Schedule.SHARDED),
        roles=(Role.CONTROL,),
        alone=True,
    ),
    FindingRule(
        key="slow device",
        when=f"a device is busy over {LEVEL} times as long as others with as many rows",
        find=_slow_device,
        remedy=(
            "look at the clock, temperature and other processes of the slow device; leave it out,"
            " or give it fewer rows of the batch (chunk_sizes=[...] of TrainStep)"
        ),
    ),
    FindingRule(
        key="late rank",
        when="ranks wait at collectives, most of it for ranks that are late on average",
        find=_late,
        remedy=(
            "give all ranks equal work: rows, lengths of samples, loading; look at clock, cores and"
            " other processes of the ranks that are late"
        ),
        alone=True,
    ),
    FindingRule(
        key="late in turn",
        when="ranks wait at collectives, but not most of it for ranks that are late on average",
        find=_late_in_turn,
        remedy=(
            "give all ranks equal work in each step: batches of samples of similar length; look for"
            " other processes on the cores of the ranks"
        ),
        alone=True,
    ),
    FindingRule(
        key="slow link",
        when=f"copies between two devices take over {transfers.SLOW_LINK} times as long as others",
        find=_slow_link((Phase.REPLICATE, Phase.GATHER, Phase.REDUCE), to_host=False),
        remedy=(
            "let dpbench doctor find out why, or use fewer devices, without the slow link"
            f" ({dashed('device_ids')})"
        ),
        others=_fewer,
    ),
    FindingRule(
        key="slow host link",
        when=f"copies from the host take over {transfers.SLOW_LINK} times as long as to other GPUs",
        find=_slow_link((Phase.SCATTER,), to_host=True),
        remedy=(
            "let dpbench doctor compare the PCIe links of the devices, or leave the device out"
            f" ({dashed('device_ids')})"
        ),
        others=_fewer,
    ),
    FindingRule(
        key="memory",
        when=f"device 0 uses over {LEVEL} times the memory of the others",
        find=_memory,
        remedy=(
            "leave outputs and loss on their devices (local), shard the optimizer's state"
            " (sharded), or use ddp"
        ),
        others=_balanced,
        alone=True,
    ),
    FindingRule(
        key="oversubscribed",
        when="there are more logical CPU devices than usable cores",
        find=_oversubscribed,
        remedy=(
            "use at most one device per core, or another machine: these numbers do not show the"
            " gain from more devices"
        ),
        others=_fewer,
    ),
    FindingRule(
        key="small share",
        when="one device takes longer for its share of the batch than that part of the batch takes",
        find=_small,
        remedy="give each device more samples: a bigger batch, or fewer devices",
        others=lambda case: [*commands.at_batch([case], 2), *_fewer(case)],
    ),
    FindingRule(
        key="bigger batch",
        when="a bigger batch of the same run takes less time per sample",
        find=_bigger,
        remedy="use the bigger batch, if the training converges with it",
    ),
    FindingRule(
        key="uneven",
        when="shares of the batch differ, or a device has none",
        find=_uneven,
        remedy="choose a batch size that is a multiple of the number of devices",
        others=_even,
    ),
    FindingRule(
        key="diminishing",
        when="the gain over the next smaller number of devices is below the ideal one",
        find=_diminishing,
        remedy="use fewer devices, or first shorten the phases that more devices do not shorten",
        others=_fewer,
    ),
)
