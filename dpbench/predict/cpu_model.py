"""Logical CPU devices: the phases of a step, from the profile of one device and the measurements of `dpbench probe`.

EXPERIMENTAL: this model was checked on one kind of host only. On that host, a step predicted from a single probe is
within 20 % of the measured step in four of five cases, and the largest error is 65 %.

Each phase starts when the previous phase has ended. The duration of a step is therefore the sum of the durations of its
phases. Within a phase, the replicas run one after the other, or concurrently with one thread each. Concurrent replicas
are slower by a ratio that the probe measured on nets of the same kind.

The model covers the strategies single, ddp (on gloo), and dp under the schedules `reference` and `fastest`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dpbench.records import UNATTRIBUTED, Case, Cost, Phase, Profile, Span
from dpbench.records.machine import UnknownMachine
from dpbench.records.registry import Role
from dpbench.records.schedule import FASTEST, REFERENCE
from dpbench.records.work import bucket_sizes

KIB = 2**10
MOST = 2
"""The largest number of devices in a prediction, because the probe measures at most two concurrent replicas."""
CHAIN_MODULES = 3
"""The number of modules that are not layers in each chain of tiny layers that the probe measures.

Each layer has two parameters.
"""
LONG_S = 2e-3
"""The total duration in seconds of a replica's forward and backward above which its kernels count as long.

Ranks that wait for long kernels go to sleep and take longer to wake up, so the reduction of ddp takes longer.
"""
OTHERS = "resnet18"
"""The net whose slowdown ratios are used for models that the probe did not measure."""


@dataclass(frozen=True)
class ProbedHost:
    """The values that `dpbench probe` measured on a host and wrote to a machine file, by name."""

    figures: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        if name not in self.figures:
            raise UnknownMachine(
                f"the machine file has no section [probe.{name}], which this prediction needs; write the file again: "
                "dpbench probe --output FILE.toml"
            )
        return self.figures[name]

    def beside(self, model: str, what: str) -> float:
        """Return the slowdown of a replica's work by a second replica that runs concurrently.

        The slowdown is the duration with the second replica divided by the duration without it, and at least 1. `what`
        is the kind of work and of workers, for example "forward_2_threads". For a model that the probe did not measure,
        the ratio of `OTHERS` is used.
        """
        name = f"{model}_{what}_ratio"
        return max(1.0, self[name if name in self.figures else f"{OTHERS}_{what}_ratio"])

    def engine_s(self, schedule: str, phase: str, tensors: int) -> float:
        """Return the seconds that the engine or DDP itself takes in a phase, for `tensors` parameter tensors.

        `schedule` (such as "fastest_pool", or "ddp" for DDP) and `phase` (such as "reduce") are parts of the names of
        measured values. With "_more" after the phase, the value is the time in addition to that of one device.
        """
        return self[f"{schedule}_{phase}_s"] + tensors * self[f"{schedule}_{phase}_tensor_s"]

    def copy_s(self, tensors: int, size_bytes: float) -> float:
        """Return the duration in seconds of copying `tensors` tensors with `size_bytes` bytes in total, one by one."""
        return tensors * self["tensor_copy_s"] + self.move_s(size_bytes)

    def move_s(self, size_bytes: float) -> float:
        """Return the duration in seconds of a copy of `size_bytes` bytes, without the fixed cost of a copy.

        The rate depends on the size, because small copies stay in caches. The rate is that of the smallest measured
        size of at least `size_bytes`; if all measured sizes are smaller, it is that of the largest.
        """
        sizes = sorted(
            int(name.split("_")[1]) * KIB for name in self.figures if name.startswith("copy_") and "_kib_" in name
        )
        at = min(bisect.bisect_left(sizes, size_bytes), len(sizes) - 1)
        return size_bytes / self[f"copy_{sizes[at] // KIB}_kib_bytes_per_s"]

    def moves_s(self, sizes: Iterable[float]) -> float:
        """Return the total duration in seconds of copies of these sizes in bytes, without the fixed costs of copies."""
        return sum(self.move_s(size) for size in sizes)

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the duration of an all-reduce in seconds, interpolated linearly between the measured sizes.

        Sizes above the largest are extrapolated. Sizes below the smallest take as long as the smallest. If the measured
        duration of one size exceeds that of a larger size, the measurement was disturbed. The duration of the larger
        size is then used for both sizes.
        """
        measured = sorted(
            (int(name.split("_")[2]) * KIB, value)
            for name, value in self.figures.items()
            if name.startswith("all_reduce_") and name.endswith("_kib_s")
        )
        points = [(size, min(seconds for _, seconds in measured[i:])) for i, (size, _) in enumerate(measured)]
        at = min(max(bisect.bisect_left([size for size, _ in points], size_bytes), 1), len(points) - 1)
        (low, first), (high, second) = points[at - 1], points[at]
        return max(0.0, first + (second - first) * (size_bytes - low) / (high - low)) if size_bytes > low else first


def step(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """Return the seconds of each phase of a case's step, by name; `UNATTRIBUTED` names the time outside all phases.

    Raises ValueError for a case that this model does not cover.
    """
    if case.device_kind != "cpu" or case.devices > MOST:
        raise ValueError(
            f"{case.label}: only steps on one or two logical CPU devices can be predicted, because dpbench probe "
            "measures at most two concurrent replicas; give --devices 1,2"
        )
    role = case.traits.role
    if role is Role.BASELINE or (role is Role.ENGINE and len(case.rows) == 1):
        phases = (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
        found = {phase.value: _at(getattr(profile, phase.value), case.batch_size) for phase in phases}
        return found | {UNATTRIBUTED: _at(profile.rest or Cost(), case.batch_size)}
    if role is Role.CONTROL:
        return _ddp(case, profile, host)
    if role is Role.ENGINE and case.schedule in ("", REFERENCE):
        return _reference(case, profile, host)
    if role is Role.ENGINE and case.schedule == FASTEST:
        return _fastest(case, profile, host)
    raise ValueError(
        f"{case.label}: on logical CPU devices, only the strategies single, ddp, and dp under the schedule {REFERENCE} "
        f"or {FASTEST} can be predicted; choose them with --strategies and --schedules"
    )


def spans(phases: Mapping[str, float]) -> Iterator[Span]:
    """Yield a span for each phase with a duration above 0; each span begins at the end of the previous span.

    `phases` maps names of phases to seconds. Unattributed time has no span.
    """
    at_s = 0.0
    for phase in Phase:
        if seconds := phases.get(phase.value, 0.0):
            yield Span(0, phase, 0, "predicted", at_s, at_s + seconds)
            at_s += seconds


def _at(cost: Cost | None, rows: float) -> float:
    if cost is None:
        raise ValueError(
            "the profile has no duration for one of the phases of a step; measure the model with dpbench run "
            "--strategies single"
        )
    return cost.at(rows)


def _engine(case: Case, profile: Profile, host: ProbedHost, schedule: str) -> dict[str, float]:
    """Return the seconds of the engine's own work in each phase of `ENGINE`, with the copies of inputs and buffers."""
    found = {phase: host.engine_s(schedule, phase, profile.parameter_tensors) for phase in ENGINE}
    # the engine manages and frees replicas in unattributed time, which therefore grows with the number of modules
    modules = max(profile.parameter_tensors, 2 * (profile.modules - CHAIN_MODULES))
    found[UNATTRIBUTED] = host.engine_s(schedule, UNATTRIBUTED, modules)
    # unattributed time also contains the work of a single device between phases, such as freeing tensors
    found[UNATTRIBUTED] += (profile.rest or Cost()).at(max(case.rows))
    found[Phase.SCATTER.value] += host.move_s(case.batch_size * profile.input_bytes)
    found[Phase.REPLICATE.value] += host.copy_s(profile.buffer_tensors, profile.buffer_bytes)
    return found


ENGINE = (
    Phase.SCATTER.value, Phase.REPLICATE.value, Phase.GATHER.value, Phase.REDUCE.value, Phase.OPTIMIZER.value,
    UNATTRIBUTED,
)  # fmt: skip


def _reference(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """Return the seconds of each phase of a step under the schedule `reference`.

    Forward runs in one new thread per replica. The backward passes of all replicas run in the calling thread.
    """
    rows = case.rows
    forward = max(_at(profile.forward, n) for n in rows)
    found = _engine(case, profile, host, REFERENCE)
    moved = host.moves_s(profile.gradient_sizes)
    more = max(0.0, profile.modules - CHAIN_MODULES - profile.parameter_tensors / 2) * host["module_replica_s"]
    found[Phase.REPLICATE.value] += len(rows) * more + moved
    found[Phase.FORWARD.value] = forward * host.beside(case.model, "forward_2_new_threads")
    found[Phase.GATHER.value] += host.move_s(case.batch_size * profile.output_bytes)
    found[Phase.LOSS.value] = _at(profile.loss, case.batch_size)
    backward = host.engine_s(REFERENCE, "backward_more", profile.parameter_tensors)
    found[Phase.BACKWARD.value] = sum(_at(profile.backward, n) for n in rows) + backward
    found[Phase.REDUCE.value] += 1.5 * moved  # an addition reads two tensors and writes one; a copy reads only one
    more = host.engine_s(REFERENCE, "optimizer_more", profile.parameter_tensors)
    found[Phase.OPTIMIZER.value] = _at(profile.optimizer, case.batch_size) + more
    return found


def _fastest(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """Return the seconds of each phase of a step under the schedule `fastest`.

    Either each replica runs in a persistent thread, or all replicas run in one thread. The seconds of the faster
    variant are returned.
    """
    ways = [_kept(case, profile, host, pool=True), _kept(case, profile, host, pool=False)]
    return min(ways, key=lambda phases: sum(phases.values()))


def _kept(case: Case, profile: Profile, host: ProbedHost, *, pool: bool) -> dict[str, float]:
    """Return the seconds of each phase of a step under the schedule `fastest` with one kind of workers.

    With `pool`, the replicas run concurrently in persistent threads, and each updates a share of the weights, which are
    in a flat buffer. Without `pool`, the replicas run one after another in one thread, which updates all weights.
    """
    rows, schedule = case.rows, "fastest_pool" if pool else "fastest_serial"
    share = profile.parameter_bytes / (len(rows) if pool else 1)
    found = _engine(case, profile, host, schedule)
    found[Phase.REPLICATE.value] += host.move_s(share)
    # shares are equal in bytes: if one share contains a few large gradients, another contains most of the small ones
    pieces = _pieces(profile, len(rows))
    most = len(rows) * max(pieces) if pool else sum(pieces)
    found[Phase.REDUCE.value] = host.engine_s(schedule, Phase.REDUCE.value, most)
    found[Phase.REDUCE.value] += 1.5 * host.moves_s(profile.gradient_sizes) / (len(rows) if pool else 1)
    forward, loss, backward = (
        [_at(cost, n) for n in rows] for cost in (profile.forward, profile.loss, profile.backward)
    )
    found[Phase.LOSS.value] = max(loss) if pool else sum(loss)
    found[Phase.LOSS.value] += host.engine_s(schedule, "loss_more", profile.parameter_tensors)
    if pool:
        found[Phase.FORWARD.value] = max(forward) * host.beside(case.model, "forward_2_threads")
        whole = (max(forward) + max(backward)) * host.beside(case.model, "training_2_threads")
        found[Phase.BACKWARD.value] = max(*backward, whole - found[Phase.FORWARD.value])
    else:
        found[Phase.FORWARD.value], found[Phase.BACKWARD.value] = sum(forward), sum(backward)
    found[Phase.BACKWARD.value] += host.engine_s(schedule, "backward_more", profile.parameter_tensors)
    found[Phase.OPTIMIZER.value] += host.move_s(OPTIMIZER_PASSES.get(case.optimizer, 8) / 2 * share)
    return found


def _pieces(profile: Profile, owners: int) -> list[int]:
    """Return the number of parameters in each share of the flat buffer, which is split into `owners` equal shares.

    A parameter that extends over several shares counts in each of them.
    """
    counts, at = [0] * owners, 0.0
    share = max(1.0, profile.parameter_bytes / owners)
    for size in profile.gradient_sizes:
        first, last = int(at / share), int((at + size - 1) / share)
        for owner in range(first, min(last, owners - 1) + 1):
            counts[owner] += 1
        at += size
    return counts


OPTIMIZER_PASSES = {"sgd": 8, "adam": 18, "adamw": 20}
"""For each optimizer: the bytes that a step on the host reads and writes, divided by the bytes of the weights.

A step of SGD with momentum consists of three ops, a step of Adam of seven, and a step of AdamW of eight.
"""


def _ddp(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """Return the seconds of each phase of a step with DistributedDataParallel on gloo, with one process per rank.

    `backward` contains the copies of gradients into buckets. `reduce` contains the part of the reduction that continues
    after backward has ended, and the copies of the sums back into the gradients.
    """
    rows, tensors = case.rows, profile.parameter_tensors
    forward, backward = (max(_at(cost, n) for n in rows) for cost in (profile.forward, profile.backward))
    late, later = (host.beside(case.model, f"{what}_2_processes") for what in ("forward", "training"))
    reduction = "ddp_long" if forward + backward > LONG_S else "ddp"
    bucket = host.all_reduce_s(_last_bucket(profile))  # replaces that of the probe's chains, whose bucket has few bytes
    if len(rows) == 1:
        late, later, reduction, bucket = 1.0, 1.0, "ddp", 0.0
    # a hook per parameter copies its gradient into a bucket, and the sum is copied back
    move = host.moves_s(profile.gradient_sizes)
    found = {
        Phase.SCATTER.value: host.engine_s("ddp", "scatter", tensors) + host.move_s(max(rows) * profile.input_bytes),
        Phase.FORWARD.value: forward * late,
        Phase.LOSS.value: max(_at(profile.loss, n) for n in rows),
        Phase.BACKWARD.value: max(backward, (forward + backward) * later - forward * late) + move,
        Phase.REDUCE.value: max(0.0, host.engine_s(reduction, "reduce", tensors) + bucket - host.all_reduce_s(0))
        + move,
        Phase.OPTIMIZER.value: _at(profile.optimizer, case.batch_size),
        UNATTRIBUTED: host.engine_s("ddp", UNATTRIBUTED, tensors) + (profile.rest or Cost()).at(max(rows)),
    }
    for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER):
        found[phase.value] += host.engine_s("ddp", f"{phase.value}_more", tensors)
    if len(rows) > 1 and profile.buffer_bytes:  # rank 0 broadcasts its buffers before forward
        found[Phase.FORWARD.value] += host.all_reduce_s(profile.buffer_bytes) / 2
    return found


def _last_bucket(profile: Profile) -> float:
    """Return the bytes of the last bucket, whose all-reduce starts only when backward ends."""
    return sum(bucket_sizes(profile.gradient_sizes)[-1])
