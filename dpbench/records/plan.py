"""Plan: sweep axes -> cases, without duplicates, each normalised and checked."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpbench.records import Case, registry, schedule
from dpbench.records.traits import Role

DEVICE_KINDS = ("cpu", "cuda", "emulated")
PLACEMENTS = ("spread", "colocated")
PRECISIONS = ("fp32", "bf16")
SIZES = ("small", "full")
LIMIT = (("role", "limit"),)
"""The options of `single` on one device's share of the batch: what no schedule of several devices can be faster than.

It is a case of its own, so that no other comparison takes it for a baseline.
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
) -> list[Case]:
    """Return the product of the axes as cases.

    `batch_sizes` are global (strong scaling); `batch_per_device` multiplies with the devices (weak scaling), and
    exactly one of the two is given. `device_memory_bytes` bounds what an emulated device may hold. Raises ValueError
    or LookupError for what cannot be run.
    """
    if bool(batch_sizes) == bool(batch_per_device):
        raise ValueError("give either batch sizes (strong scaling) or a batch per device (weak scaling), and not both")
    _check(models, strategies, devices, [*batch_sizes, *batch_per_device])
    schedules = [_schedule(text, device_kind) for text in schedules]
    _check_placement(devices, device_kind, device_ids, placement)
    _check_memory(device_kind, device_memory_bytes)
    _one_of("size", size, SIZES)
    _one_of("precision", precision, PRECISIONS)
    cases = []
    for model, strategy, count in itertools.product(models, strategies, devices):
        for batch in batch_sizes or [each * count for each in batch_per_device]:
            for written in schedules:
                case = Case(
                    model=model, strategy=strategy, devices=count, batch_size=batch, size=size, schedule=written,
                    device_kind=device_kind, device_ids=tuple(device_ids[: max(devices)]), placement=placement,
                    precision=precision, device_memory_bytes=device_memory_bytes, declared=registry.declared(strategy),
                )  # fmt: skip
                cases.append(normalise(case, weak_batches=tuple(batch_per_device)))
    return list(dict.fromkeys(cases))


def ladder(*, devices: Sequence[int], device_kind: str = "cpu", **axes: Any) -> list[Case]:
    """Return what the ladder is drawn from: every rung, the ablations of the best, its rivals, and its limit.

    The axes are those of `sweep`; a single device has no ladder.
    """
    several = [count for count in devices if count != 1]
    if not several:
        raise ValueError("the ladder needs several devices; give --devices 2 or more")
    here = conditions(device_kind)
    best = schedule.best(*here)
    schedules = [*schedule.climb(*here), str(best), *map(str, schedule.ablations(best, *here).values())]
    rivals = default_strategies(device_kind)
    cases = sweep(strategies=rivals, schedules=schedules, devices=several, device_kind=device_kind, **axes)
    limits = [found for case in cases if case.traits.scheduled and (found := limit(case))]
    return list(dict.fromkeys([*cases, *(case for case in limits if replace(case, options=()) not in cases)]))


def limit(case: Case) -> Case | None:
    """Return one device's share of the work, computed alone; None where shares differ or share one processor."""
    share, rest = divmod(case.batch_size, case.devices)
    if rest or case.placement == "colocated" or case.device_kind == "emulated":
        return None
    return replace(alone(case, share), options=LIMIT)


def alone(case: Case, batch_size: int) -> Case:
    """Return the case of one device without a wrapper that takes `batch_size` samples and is otherwise alike."""
    baseline = registry.of_role(Role.BASELINE)
    return replace(
        case, strategy=baseline, schedule="", devices=1, batch_size=batch_size, placement="spread", options=()
    )


def baseline(**axes: Any) -> Case:
    """Return a case of one device without a wrapper."""
    return Case(strategy=registry.of_role(Role.BASELINE), devices=1, **axes)


def model_check(case: Case) -> Case:
    """Return what is checked of a case's model before a run: one device, one row; the same for all cases of it.

    Emulated devices compute on the CPU.
    """
    return baseline(
        model=case.model, batch_size=1, size=case.size, precision=case.precision, seed=case.seed,
        optimizer=case.optimizer, device_ids=case.device_ids[:1],
        device_kind="cuda" if case.device_kind == "cuda" else "cpu",
    )  # fmt: skip


def normalise(case: Case, *, weak_batches: Sequence[int] = ()) -> Case:
    """Bring equal cases to one form: a strategy of one device has one, and only the engine has a schedule."""
    if case.traits.one_device and case.devices > 1:
        # in weak scaling the one device's share is the work of reference
        batch = case.batch_size // case.devices if weak_batches else case.batch_size
        case = replace(case, devices=1, batch_size=batch)
    if case.devices == 1 and case.placement == "colocated":
        case = replace(case, placement="spread")
    return case if case.traits.scheduled else replace(case, schedule="")


def side_by_side(cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Group cases that one worker can measure in turn: those of one model on the same kind of devices.

    Models of one module of the user's are taken for variants of one model.
    """
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        apart = case if case.traits.alone else None
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
    """Name a plan: the same cases, rounds and ways to measure have the same hash, in whatever order."""
    text = json.dumps([rounds, sorted(case.fingerprint for case in cases), *how])
    return hashlib.sha256(text.encode()).hexdigest()


def _check(models: Sequence[str], strategies: Sequence[str], devices: Sequence[int], batches: Sequence[int]) -> None:
    """Refuse unknown names and counts below one."""
    for model in models:
        if ":" not in model:
            try:
                registry.check("models", model)
            except LookupError as error:
                raise LookupError(f"{error}; your own is --model package.module:name") from None
    for strategy in strategies:
        registry.check("strategies", strategy)
    for kind, values in (("devices", devices), ("batch size", batches)):
        for value in values:
            if value < 1:
                raise ValueError(f"{kind} must be at least 1, got {value}")
    if not models:
        raise ValueError(f"no model given; --models takes any of: {', '.join(registry.names('models'))}")
    if not strategies:
        raise ValueError(f"no strategy given; --strategies takes any of: {', '.join(registry.names('strategies'))}")
    if not devices:
        raise ValueError("no device count given; --devices takes numbers, such as 1,2")


def split_schedules(text: str) -> list[str]:
    """Cut a list of schedules at its commas; neighbours such as workers=pool,replicas=cached are one, up to a `;`."""
    found: list[str] = []
    for group in text.split(";"):
        switches: list[str] = []
        for item in [*filter(None, map(str.strip, group.split(","))), ""]:
            if "=" in item:
                switches.append(item)
                continue
            found += [_together(switches), item]
            switches = []
    return [one for one in found if one]


def _together(switches: Sequence[str]) -> str:
    """Join the switches of one schedule; ValueError when they must be meant for two."""
    names = [item.partition("=")[0].strip() for item in switches]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(
            f"--schedules turns {twice} twice in {','.join(switches)!r}; put a ';' between two schedules, "
            "or give the option twice"
        )
    return ",".join(switches)


def conditions(device_kind: str) -> tuple[str, ...]:
    """Return what a schedule finds on a kind of device."""
    return (schedule.TRAIN_STEP, schedule.CUDA) if device_kind == "cuda" else (schedule.TRAIN_STEP,)


def _schedule(text: str, device_kind: str) -> str:
    """Return a schedule in the one way to write it; ValueError for one that cannot run on this kind of device."""
    return text if text == schedule.FASTEST else str(schedule.parse(text).check(*conditions(device_kind)))


def _check_placement(devices: Sequence[int], kind: str, ids: Sequence[int], placement: str) -> None:
    """Refuse a placement that the devices cannot have."""
    _one_of("device kind", kind, DEVICE_KINDS)
    _one_of("placement", placement, PLACEMENTS)
    others = {"cpu": "logical CPU devices", "emulated": "emulated devices"}.get(kind)
    if others and ids:
        raise ValueError(f"--device-ids chooses GPUs; {others} have no ids: leave it out")
    if others and placement == "colocated":
        raise ValueError(f"--placement colocated shares one GPU; {others} need --placement spread")
    if len(set(ids)) < len(ids):
        raise ValueError(f"--device-ids names a GPU twice: {list(ids)}; --placement colocated shares one GPU")
    if ids and placement == "spread" and max(devices) > len(ids):
        raise ValueError(f"{max(devices)} devices asked for, but --device-ids names {len(ids)}: {list(ids)}")


def _check_memory(kind: str, size: int) -> None:
    """Refuse a bound on memory that nothing here could hold."""
    if size < 0:
        raise ValueError(f"--device-memory must be at least 1 byte, got {size}")
    if size and kind == "cpu":
        raise ValueError(
            "--device-memory bounds emulated devices; logical CPU devices share the host's memory: give "
            "--device-kind emulated"
        )
    if size and kind == "cuda":
        raise ValueError("--device-memory bounds emulated devices; a GPU has the memory that it has: leave it out")


def _one_of(kind: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(registry.unknown(kind, value, list(known)))


def default_strategies(device_kind: str) -> tuple[str, ...]:
    """Return the strategies that are worth running on a kind of device."""
    known = {
        "cpu": ("single", "single_all_cores", "dp", "ddp"),
        "cuda": ("single", "dp", "torch_dp", "ddp"),
        "emulated": ("single", "dp"),
    }
    return known.get(device_kind, known["cpu"])


def default_devices(available: int, placement: str) -> tuple[int, ...]:
    """Return the device counts to sweep: powers of two up to what there is, and what a first look needs."""
    if placement == "colocated":
        return (1, 2)
    return tuple(count for count in (1, 2, 4, 8) if count <= available) or (1,)


def place(text: str) -> tuple[int, str]:
    """Return a schedule's place in lists: rungs in the order of the ladder, then all others."""
    return ([*schedule.RUNGS].index(text), "") if text in schedule.RUNGS else (len(schedule.RUNGS), text)
