"""Logical CPU devices: a step's phases from one device's profile and what the probe found out about the host.

On the host a phase is what Python and kernels do one after the other, or in one thread a replica, and every phase
waits for the one before it; so phases add up, and nothing runs beside anything but the replicas of one phase. A
replica beside others is slower by a ratio that the probe measured on nets of the same kind.

Known: the strategies single, ddp (on gloo) and dp on `reference` and on what `fastest` takes on the host.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dpbench.records import UNATTRIBUTED, Case, Cost, Phase, Profile, Span
from dpbench.records.machine import Unknown
from dpbench.records.schedule import FASTEST, REFERENCE
from dpbench.records.traits import Role

KIB = 2**10
MOST = 2
"""Devices: the probe measures one replica beside another, no more."""
CHAIN_MODULES = 3
"""What the chains that the engine was measured on have beside a module for every two parameters."""
LONG_S = 2e-3
"""Forward and backward of a replica from which its kernels count as long: ranks go to sleep while they wait."""
OTHERS = "resnet18"
"""The net whose ratios stand for models that the probe did not measure."""


@dataclass(frozen=True)
class ProbedHost:
    """The figures that `dpbench probe` wrote into a machine's file, by name."""

    figures: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        if name not in self.figures:
            raise Unknown(f"the machine file has no [probe.{name}]; write it anew: dpbench probe --output FILE.toml")
        return self.figures[name]

    def beside(self, model: str, what: str) -> float:
        """Return how much longer a model's replica takes beside another; never less than alone."""
        name = f"{model}_{what}_ratio"
        return max(1.0, self[name if name in self.figures else f"{OTHERS}_{what}_ratio"])

    def engine_s(self, schedule: str, phase: str, tensors: int) -> float:
        """Return what the engine's own work in a phase takes for a module of so many parameters."""
        return self[f"{schedule}_{phase}_s"] + tensors * self[f"{schedule}_{phase}_tensor_s"]

    def copy_s(self, tensors: int, size_bytes: float) -> float:
        """Return the seconds in which so many tensors of so many bytes together are copied."""
        return tensors * self["tensor_copy_s"] + self.move_s(size_bytes)

    def move_s(self, size_bytes: float) -> float:
        """Return the seconds of a copy's bytes alone, at the rate of the next size measured: caches hold small ones."""
        sizes = sorted(
            int(name.split("_")[1]) * KIB for name in self.figures if name.startswith("copy_") and "_kib_" in name
        )
        at = min(bisect.bisect_left(sizes, size_bytes), len(sizes) - 1)
        return size_bytes / self[f"copy_{sizes[at] // KIB}_kib_bytes_per_s"]

    def moves_s(self, sizes: Iterable[float]) -> float:
        """Return the seconds of copies of so many bytes each, one after the other."""
        return sum(self.move_s(size) for size in sizes)

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds of an all-reduce, between the sizes measured.

        A size that took longer than a larger one did was held up: the larger one's seconds bound it.
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
    """Return the seconds of each phase of one step, and of what no phase covers.

    ValueError for a case that this model does not know.
    """
    if case.device_kind != "cpu" or case.devices > MOST:
        raise ValueError(f"{case.label}: one or two logical CPU devices are known: the probe measures pairs")
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
    raise ValueError(f"{case.label}: known are single, ddp, and dp on {REFERENCE} and {FASTEST}")


def spans(phases: Mapping[str, float]) -> Iterator[Span]:
    """Yield a span for each phase, one after the other; what no phase covers is left open at the end."""
    at_s = 0.0
    for phase in Phase:
        if seconds := phases.get(phase.value, 0.0):
            yield Span(0, phase, 0, "predicted", at_s, at_s + seconds)
            at_s += seconds


def _at(cost: Cost | None, rows: float) -> float:
    if cost is None:
        raise ValueError("the profile has no seconds: measure the strategy single")
    return cost.at(rows)


def _engine(case: Case, profile: Profile, host: ProbedHost, schedule: str) -> dict[str, float]:
    """Return the engine's own work, by phase, with the bytes of inputs and buffers."""
    found = {phase: host.engine_s(schedule, phase, profile.parameter_tensors) for phase in ENGINE}
    # what no phase covers is replicas being looked after and let go: a matter of modules
    modules = max(profile.parameter_tensors, 2 * (profile.modules - CHAIN_MODULES))
    found[UNATTRIBUTED] = host.engine_s(schedule, UNATTRIBUTED, modules)
    # and what one device's own step does between its phases, such as letting go of what it made
    found[UNATTRIBUTED] += (profile.rest or Cost()).at(max(case.rows))
    found[Phase.SCATTER.value] += host.move_s(case.batch_size * profile.input_bytes)
    found[Phase.REPLICATE.value] += host.copy_s(profile.buffer_tensors, profile.buffer_bytes)
    return found


ENGINE = (
    Phase.SCATTER.value, Phase.REPLICATE.value, Phase.GATHER.value, Phase.REDUCE.value, Phase.OPTIMIZER.value,
    UNATTRIBUTED,
)  # fmt: skip


def _reference(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """A new thread a replica in forward; backward of all replicas in the calling thread, one after the other."""
    rows = case.rows
    forward = max(_at(profile.forward, n) for n in rows)
    found = _engine(case, profile, host, REFERENCE)
    moved = host.moves_s(_sizes(profile))
    more = max(0.0, profile.modules - CHAIN_MODULES - profile.parameter_tensors / 2) * host["module_replica_s"]
    found[Phase.REPLICATE.value] += len(rows) * more + moved
    found[Phase.FORWARD.value] = forward * host.beside(case.model, "forward_2_new_threads")
    found[Phase.GATHER.value] += host.move_s(case.batch_size * profile.output_bytes)
    found[Phase.LOSS.value] = _at(profile.loss, case.batch_size)
    backward = host.engine_s(REFERENCE, "backward_more", profile.parameter_tensors)
    found[Phase.BACKWARD.value] = sum(_at(profile.backward, n) for n in rows) + backward
    found[Phase.REDUCE.value] += 1.5 * moved  # two tensors read, a new one written
    more = host.engine_s(REFERENCE, "optimizer_more", profile.parameter_tensors)
    found[Phase.OPTIMIZER.value] = _at(profile.optimizer, case.batch_size) + more
    return found


def _fastest(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """What `fastest` settles for: a kept thread a replica, or one thread for all, whichever takes less."""
    ways = [_kept(case, profile, host, pool=True), _kept(case, profile, host, pool=False)]
    return min(ways, key=lambda phases: sum(phases.values()))


def _kept(case: Case, profile: Profile, host: ProbedHost, *, pool: bool) -> dict[str, float]:
    """Weights stay; each device sums and steps its share of one buffer. In threads together, or one after the other."""
    rows, schedule = case.rows, "fastest_pool" if pool else "fastest_serial"
    share = profile.parameter_bytes / (len(rows) if pool else 1)
    found = _engine(case, profile, host, schedule)
    found[Phase.REPLICATE.value] += host.move_s(share)
    # the tiny nets' gradients are shared out evenly; large ones leave most of the small ones to one device
    pieces = _pieces(profile, len(rows))
    most = len(rows) * max(pieces) if pool else sum(pieces)
    found[Phase.REDUCE.value] = host.engine_s(schedule, Phase.REDUCE.value, most)
    found[Phase.REDUCE.value] += 1.5 * host.moves_s(_sizes(profile)) / (len(rows) if pool else 1)
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
    """Return how many parameters lie, whole or in part, in each share."""
    counts, at = [0] * owners, 0.0
    share = max(1.0, profile.parameter_bytes / owners)
    for size in _sizes(profile):
        first, last = int(at / share), int((at + size - 1) / share)
        for owner in range(first, min(last, owners - 1) + 1):
            counts[owner] += 1
        at += size
    return counts


def _sizes(profile: Profile) -> tuple[float, ...]:
    """Return the sizes of the parameters in the order of readiness; equal ones where nobody knows them."""
    count = max(1, profile.parameter_tensors)
    return profile.gradient_bytes or (profile.parameter_bytes / count,) * count


OPTIMIZER_PASSES = {"sgd": 8, "adam": 18}
"""How often the host's ops go over the weights' bytes: SGD with momentum in three ops, Adam in seven."""


def _ddp(case: Case, profile: Profile, host: ProbedHost) -> dict[str, float]:
    """A process a rank; gradients are copied to buckets, reduced, and copied back, what backward does not cover."""
    rows, tensors = case.rows, profile.parameter_tensors
    forward, backward = (max(_at(cost, n) for n in rows) for cost in (profile.forward, profile.backward))
    late, later = (host.beside(case.model, f"{what}_2_processes") for what in ("forward", "training"))
    reduction = "ddp_long" if forward + backward > LONG_S else "ddp"
    bucket = host.all_reduce_s(_last_bucket(profile))  # in the place of the chains' own, which has a few bytes
    if len(rows) == 1:
        late, later, reduction, bucket = 1.0, 1.0, "ddp", 0.0
    # a hook a parameter copies its gradient into a bucket, and what was reduced is copied back
    move = host.moves_s(_sizes(profile))
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
    if len(rows) > 1 and profile.buffer_bytes:  # from rank 0, before forward
        found[Phase.FORWARD.value] += host.all_reduce_s(profile.buffer_bytes) / 2
    return found


def _last_bucket(profile: Profile) -> float:
    """Return the bytes that are ready only when backward ends: the last bucket's, which nothing can hide."""
    last, limit = 0.0, 2.0**20
    for size in _sizes(profile):
        if last >= limit:
            last, limit = 0.0, 25 * 2.0**20
        last += size
    return last
