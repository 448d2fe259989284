"""Plan: turn the axes of a sweep into cases, checked, normalised and without duplicates."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dpbench.records import HABITS, Case, options, registry, schedule
from dpbench.records.case import TRAIN
from dpbench.records.errors import UsageError
from dpbench.records.grouping import grouped
from dpbench.records.registry import Role

LIMIT = (("role", "limit"),)
"""The options of the limit: the strategy `single` on one device's share of the batch.

Its step time is a lower bound for every schedule. Without these options, other comparisons would
use this case as their baseline.
"""


def sweep(
    *,
    models: Sequence[str],
    strategies: Sequence[str],
    devices: Sequence[int],
    batch_sizes: Sequence[int] = (),
    batch_per_device: Sequence[int] = (),
    schedules: Sequence[str] = ("reference",),
    device_kind: str = "cpu",
    device_ids: Sequence[int] = (),
    placement: str = "spread",
    size: str = "small",
    precision: str = "fp32",
    device_memory_bytes: int = 0,
    **habits: Sequence[Any],
) -> list[Case]:
    """Return a case for each combination of values of the axes, the arguments with several values.

    A strategy may name its schedule, as in "dp[cached]"; otherwise it runs under each of
    `schedules`. Exactly one of `batch_sizes` (global, strong scaling) and `batch_per_device` (weak
    scaling) must be given. `device_memory_bytes` limits the memory of each emulated device.
    `habits` are further axes, named as in `HABITS`. Raises LookupError for unknown names, and
    ValueError for other values with which no case can run.
    """
    if bool(batch_sizes) == bool(batch_per_device):
        raise UsageError(
            "give either batch sizes (strong scaling) or a batch per device (weak scaling), and not"
            " both"
        )
    loops = {name: habits.pop(name, (getattr(Case, name),)) for name in HABITS}
    if habits:
        known = ", ".join(HABITS)
        raise TypeError(
            f"a sweep has no axis {', '.join(habits)}; its axes for the training loop are {known}"
        )
    ways = [_way(text) for text in strategies]
    options.check_names(models, [strategy for strategy, _ in ways], devices)
    schedules = [_schedule(text) for text in schedules]
    scheduled = [(strategy, _own_schedule(strategy, text)) for strategy, text in ways]
    options.check_memory(device_kind, device_memory_bytes)
    options.check_precision(precision, device_kind)
    options.check_habits(device_kind, loops)
    cases = []
    for model, (strategy, own), count in itertools.product(models, scheduled, devices):
        for batch in batch_sizes or [each * count for each in batch_per_device]:
            for written, *loop in itertools.product(own or schedules, *loops.values()):
                case = Case(
                    model=model,
                    strategy=strategy,
                    devices=count,
                    batch_size=batch,
                    size=size,
                    schedule=written,
                    device_kind=device_kind,
                    device_ids=tuple(device_ids[: max(devices)]),
                    placement=placement,
                    precision=precision,
                    device_memory_bytes=device_memory_bytes,
                    declared=registry.declared(strategy),
                    **dict(zip(loops, loop, strict=True)),
                )
                cases.append(normalise(case, weak_batches=tuple(batch_per_device)))
    # a strategy for one device needs one GPU, whatever the other numbers of devices
    needed = [case.devices for case in cases]
    options.check_placement(needed, device_kind, device_ids, placement)
    return list(dict.fromkeys(cases))


def ladder(*, devices: Sequence[int], device_kind: str = "cpu", **axes: Any) -> list[Case]:
    """Return the cases of a ladder: all schedules, the default strategies, and the limits.

    `axes` are further axes of `sweep`. Raises ValueError if no number of devices is above one, and
    for a mode other than training, in which most schedules cannot run.
    """
    if {*axes.get("mode", ())} - {TRAIN}:
        raise UsageError(
            "{} compares schedules of a training step",
            option="ladder",
            value=True,
            remedy="leave out {mode}",
        )
    several = [count for count in devices if count != 1]
    if not several:
        raise UsageError(
            "{} needs at least two devices",
            option="ladder",
            value=True,
            remedy="give {devices:2} or more",
        )
    cases = sweep(
        strategies=default_strategies(device_kind),
        schedules=[*schedule.Schedule],
        devices=several,
        device_kind=device_kind,
        **axes,
    )
    limits = [found for case in cases if case.traits.scheduled and (found := limit(case))]
    return list(
        dict.fromkeys(
            [*cases, *(case for case in limits if replace(case, options=()) not in cases)]
        )
    )


def together(models: Sequence[str], **axes: Any) -> list[Case]:
    """Return the cases of two models, each of them alone and concurrent with the other.

    `axes` are further axes of `sweep`. Raises ValueError for another number of models.
    """
    if len(models) != 2:
        raise UsageError(
            "{} takes two models, but got {number}",
            option="together",
            remedy="give two, such as {together:mlp,resnet18}",
            number=len(models),
        )
    pairs = (models, models[::-1])
    found = [
        case for one, other in pairs for case in sweep(models=(one,), neighbour=("", other), **axes)
    ]
    return list(dict.fromkeys(found))


def limit(case: Case) -> Case | None:
    """Return the limit of a case: a device runs its share of the batch alone, without a wrapper.

    None if the shares are unequal, or if the devices share one GPU or are emulated.
    """
    share, rest = divmod(case.batch_size, case.devices)
    if rest or case.placement == "colocated" or case.device_kind == "emulated":
        return None
    return replace(alone(case, share), options=LIMIT)


@lru_cache(maxsize=4096)
def alone(case: Case, batch_size: int) -> Case:
    """Return a copy of a case with `batch_size` samples on one device without a wrapper."""
    baseline = registry.of_role(Role.BASELINE)
    return replace(
        case,
        strategy=baseline,
        schedule="",
        devices=1,
        hosts=1,
        batch_size=batch_size,
        placement="spread",
        options=(),
    )


def baseline(**axes: Any) -> Case:
    """Return a case on one device without a wrapper; `axes` are its other fields."""
    return Case(strategy=registry.of_role(Role.BASELINE), devices=1, **axes)


def model_check(case: Case) -> Case:
    """Return the case that checks the model of `case` before a run: one sample on one device.

    It is the same for all cases with the same model and model settings. For emulated devices, it
    runs on the CPU. For a DataLoader, it loads one batch without workers.
    """
    if case.traits.loads:
        return replace(case, batch_size=1, loader=0)
    return baseline(
        model=case.model,
        batch_size=1,
        size=case.size,
        precision=case.precision,
        seed=case.seed,
        optimizer=case.optimizer,
        device_ids=case.device_ids[:1],
        device_kind="cuda" if case.device_kind == "cuda" else "cpu",
    )


def normalise(case: Case, *, weak_batches: Sequence[int] = ()) -> Case:
    """Return the normal form of a case, so that two cases with equal work are equal.

    A strategy for one device gets `devices` 1 and, if there are `weak_batches` (batch sizes per
    device), one device's share of the batch. A case with one device gets the default placement.
    Only the engine keeps its schedule.
    """
    if case.traits.one_device and case.devices > 1:
        # in weak scaling, the baseline is one device with its share of the batch
        batch = case.batch_size // case.devices if weak_batches else case.batch_size
        case = replace(case, devices=1, batch_size=batch)
    if case.devices == 1 and case.placement == "colocated":
        case = replace(case, placement="spread")
    return case if case.traits.scheduled else replace(case, schedule="")


def by_need(cases: Iterable[Case], planned: Sequence[Case]) -> list[Case]:
    """Return the cases as answers need them, the most needed first.

    First come the `core` cases, model by model as `planned`, then the others. The baseline is the
    first of its model; DataParallel and the control follow, on most devices first. Others keep
    their order.
    """
    models = list(dict.fromkeys(case.model for case in planned))
    roles = [Role.BASELINE, Role.WRAPPER, Role.CONTROL]
    needed = core(planned)

    def need(case: Case) -> tuple[bool, int, bool, int, int]:
        role = case.traits.role
        place = roles.index(role) if role in roles else len(roles)
        model = models.index(case.model)
        return case not in needed, model, role is not Role.BASELINE, -case.devices, place

    return sorted(cases, key=need)


def core(planned: Iterable[Case]) -> frozenset[Case]:
    """Return the cases without which a model has no ranking on its largest number of devices.

    They are the baseline, its alternative with all cores, and on most devices the engine (or, in a
    plan without it, DataParallel) and the control: the first that is planned of each.
    """
    compared = (Role.ENGINE, Role.WRAPPER), (Role.CONTROL,)
    found = []
    for mine in grouped((case.model, case) for case in planned).values():
        most = max(case.devices for case in mine)
        widest = [case for case in mine if case.devices == most]
        for roles, among in (
            *(((role,), mine) for role in (Role.BASELINE, Role.ALL_CORES)),
            *((roles, widest) for roles in compared),
        ):
            found += [case for role in roles for case in among if case.traits.role is role][:1]
    return frozenset(found)


def units(cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Return the cases by need, in units that are of use only whole.

    They are the `core` of each model, and then each other case alone.
    """
    needed = core(cases)
    ordered = by_need(cases, cases)
    cores = grouped((case.model, case) for case in ordered if case in needed)
    return [*map(tuple, cores.values()), *((case,) for case in ordered if case not in needed)]


def side_by_side(cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Return groups of cases that one worker can measure: the same model, settings and devices.

    Models from the same user module count as one model. A case is a group by itself if its strategy
    needs a separate worker, or if it has a neighbour.
    """
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        apart = case if case.traits.alone or case.neighbour else None
        where = (
            case.model.partition(":")[0],
            case.size,
            case.precision,
            case.optimizer,
            case.device_kind,
            case.device_ids,
        )
        groups.setdefault((*where, apart), []).append(case)
    return [tuple(group) for group in groups.values()]


def plan_hash(cases: Iterable[Case], rounds: object, *how: str) -> str:
    """Return a hash of a plan: its set of cases, the rounds, and the measurement settings `how`."""
    return Parts.of(cases, rounds, *how).whole


@dataclass(frozen=True)
class Parts:
    """A plan whose smaller plans can be recognised by their hashes.

    `cases` has the fingerprints of its cases; `rounds` and `how` are as for `plan_hash`.
    """

    cases: frozenset[str]
    rounds: object
    how: tuple[str, ...]

    @classmethod
    def of(cls, cases: Iterable[Case], rounds: object, *how: str) -> Parts:
        """Return the plan with these cases."""
        return cls(frozenset(case.fingerprint for case in cases), rounds, how)

    @property
    def whole(self) -> str:
        """Return the hash of the whole plan."""
        text = json.dumps([self.rounds, sorted(self.cases), *self.how])
        return hashlib.sha256(text.encode()).hexdigest()

    def smaller(self, cases: Collection[str], rounds: int) -> str | None:
        """Return the hash of the plan of some cases and fewer rounds; None if it is no smaller one.

        `rounds` is 0 if a rule adds rounds.
        """
        fixed = rounds or self.rounds
        fewer = isinstance(self.rounds, int) and isinstance(fixed, int) and fixed > self.rounds
        part = replace(self, cases=frozenset(cases), rounds=fixed)
        return (
            part.whole
            if cases and part.cases <= self.cases and part != self and not fewer
            else None
        )


def _schedule(text: str) -> str:
    return text if text in schedule.SELECTED else str(schedule.parse(text))


def _way(text: str) -> tuple[str, str]:
    """Return a strategy and its schedule as `Case.label` writes them; "" without a schedule.

    Raises ValueError for empty brackets.
    """
    strategy, bracket, written = text.removesuffix("]").rpartition("[")
    if not bracket or not text.endswith("]"):
        return text, ""
    if not written.strip():
        raise UsageError(
            "{} names no schedule in its brackets",
            option="strategies",
            value=text,
            remedy="give {strategy}, or a schedule in the brackets, such as dp[cached]",
            strategy=strategy,
        )
    return strategy, written


def _own_schedule(strategy: str, text: str) -> tuple[str, ...]:
    """Return the schedule `text` that a strategy names; empty if it names none.

    Raises ValueError for an unknown schedule, and for a strategy without schedules.
    """
    if not text:
        return ()
    if not registry.traits(strategy).scheduled:
        raise UsageError(
            "{} names a schedule, but {strategy} has none",
            option="strategies",
            value=f"{strategy}[{text}]",
            remedy="give {strategy} alone",
            strategy=strategy,
        )
    return (_schedule(text),)


def default_strategies(device_kind: str) -> tuple[str, ...]:
    """Return the default strategies for a kind of device, for a launch ("launch"), or "one GPU"."""
    by_kind = {
        "launch": ("single", "ddp", "fsdp"),
        "cpu": ("single", "single_all_cores", "dp", "ddp"),
        "cuda": ("single", "dp", "torch_dp", "ddp"),
        "one GPU": ("single", "dp"),
        "emulated": ("single", "dp", "torch_dp"),
    }
    return by_kind.get(device_kind, by_kind["cpu"])


def default_devices(available: int, placement: str) -> tuple[int, ...]:
    """Return the default numbers of devices of a sweep: 1, 2 and `available`; colocated: 1 and 2.

    A sweep of 1, 2, 4 and 8 GPUs would exceed the default budget, because each trial creates a
    context on each GPU.
    """
    return (
        (1, 2)
        if placement == "colocated"
        else tuple(sorted({1, min(2, available), available} - {0}))
    )


def place(text: str) -> tuple[int, str]:
    """Return the sort key of a schedule's text: in ladder order, then texts that name none."""
    ladder = [*schedule.Schedule]
    known = schedule.known(text)
    return (ladder.index(known), "") if known else (len(ladder), text)
