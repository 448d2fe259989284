"""Plan: turn the axes of a sweep into cases, without duplicates, each normalised and checked."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpbench.records import Case, registry, schedule
from dpbench.records.registry import Role

DEVICE_KINDS = ("cpu", "cuda", "emulated")
PLACEMENTS = ("spread", "colocated")
PRECISIONS = ("fp32", "bf16")
SIZES = ("small", "full")
INPUTS = ("pageable", "pinned", "device")
LIMIT = (("role", "limit"),)
"""The options of the limit: `single` on one device's share of the batch, a lower bound of every schedule's step time.

These options make the limit a separate case, which other comparisons do not use as a baseline.
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
    inputs: Sequence[str] = ("pinned",),
    read_loss: Sequence[int] = (0,),
) -> list[Case]:
    """Return the product of the axes as cases.

    Exactly one of `batch_sizes` and `batch_per_device` must be given: `batch_sizes` are global (strong scaling),
    `batch_per_device` is multiplied by the number of devices (weak scaling). `device_memory_bytes` limits the memory of
    an emulated device. Raises LookupError for unknown names, and ValueError for other values that cannot be run.
    """
    if bool(batch_sizes) == bool(batch_per_device):
        raise ValueError("give either batch sizes (strong scaling) or a batch per device (weak scaling), but not both")
    _check(models, strategies, devices, [*batch_sizes, *batch_per_device])
    schedules = [_schedule(text, device_kind) for text in schedules]
    _check_placement(devices, device_kind, device_ids, placement)
    _check_memory(device_kind, device_memory_bytes)
    _one_of("size", size, SIZES)
    _one_of("precision", precision, PRECISIONS)
    _check_habits(inputs, read_loss, device_kind)
    cases = []
    for model, strategy, count in itertools.product(models, strategies, devices):
        for batch in batch_sizes or [each * count for each in batch_per_device]:
            for written, where, every in itertools.product(schedules, inputs, read_loss):
                case = Case(
                    model=model, strategy=strategy, devices=count, batch_size=batch, size=size, schedule=written,
                    device_kind=device_kind, device_ids=tuple(device_ids[: max(devices)]), placement=placement,
                    precision=precision, device_memory_bytes=device_memory_bytes, inputs=where, read_loss=every,
                    declared=registry.declared(strategy),
                )  # fmt: skip
                cases.append(normalise(case, weak_batches=tuple(batch_per_device)))
    return list(dict.fromkeys(cases))


def ladder(*, devices: Sequence[int], device_kind: str = "cpu", **axes: Any) -> list[Case]:
    """Return the cases of the ladder: every rung, the ablations of the best rung, the other strategies, and the limits.

    The axes are those of `sweep`. Raises ValueError if no number of devices is above one.
    """
    several = [count for count in devices if count != 1]
    if not several:
        raise ValueError("--ladder needs at least two devices; give --devices 2 or more")
    here = conditions(device_kind)
    best = schedule.best(*here)
    schedules = [*schedule.climb(*here), str(best), *map(str, schedule.ablations(best, *here).values())]
    rivals = default_strategies(device_kind)
    cases = sweep(strategies=rivals, schedules=schedules, devices=several, device_kind=device_kind, **axes)
    limits = [found for case in cases if case.traits.scheduled and (found := limit(case))]
    return list(dict.fromkeys([*cases, *(case for case in limits if replace(case, options=()) not in cases)]))


def limit(case: Case) -> Case | None:
    """Return the case of one device's share of the work, run on one device.

    Return None if the shares are unequal, or if the devices share one GPU or are emulated.
    """
    share, rest = divmod(case.batch_size, case.devices)
    if rest or case.placement == "colocated" or case.device_kind == "emulated":
        return None
    return replace(alone(case, share), options=LIMIT)


def alone(case: Case, batch_size: int) -> Case:
    """Return the case that runs `batch_size` samples on one device without a wrapper; other fields do not change."""
    baseline = registry.of_role(Role.BASELINE)
    return replace(
        case, strategy=baseline, schedule="", devices=1, batch_size=batch_size, placement="spread", options=()
    )


def baseline(**axes: Any) -> Case:
    """Return a case of one device without a wrapper; `axes` are its other fields."""
    return Case(strategy=registry.of_role(Role.BASELINE), devices=1, **axes)


def model_check(case: Case) -> Case:
    """Return the case that checks a case's model before a run: one device and one row, equal for all cases of a model.

    For emulated devices, the check runs on the CPU.
    """
    return baseline(
        model=case.model, batch_size=1, size=case.size, precision=case.precision, seed=case.seed,
        optimizer=case.optimizer, device_ids=case.device_ids[:1],
        device_kind="cuda" if case.device_kind == "cuda" else "cpu",
    )  # fmt: skip


def normalise(case: Case, *, weak_batches: Sequence[int] = ()) -> Case:
    """Return the normal form of a case, so that equal work has equal cases.

    A one-device strategy has one device, and only the engine has a schedule.
    """
    if case.traits.one_device and case.devices > 1:
        # in weak scaling, the baseline is one device with its share of the batch
        batch = case.batch_size // case.devices if weak_batches else case.batch_size
        case = replace(case, devices=1, batch_size=batch)
    if case.devices == 1 and case.placement == "colocated":
        case = replace(case, placement="spread")
    return case if case.traits.scheduled else replace(case, schedule="")


def groups(cases: Sequence[Case], number: int, *, paired: bool) -> list[tuple[Case, ...]]:
    """Return the cases of round `number` in groups, each of which one worker measures with alternating blocks of steps.

    With `paired`, these are the groups of `side_by_side`. Otherwise, on emulated devices, the engine's `reference` and
    torch.nn.DataParallel on equal work form a group, in an order that changes with every round; each other case is
    alone. Emulated devices show host time only, whose ratio varies too much between processes.
    """
    if paired:
        return side_by_side(cases)
    found: list[tuple[Case, ...]] = []
    for case in cases:
        wrapped = wrapped_as(case) if case.device_kind == "emulated" else None
        if wrapped and wrapped in cases:
            found.append((case, wrapped) if number % 2 else (wrapped, case))
    grouped = {case for group in found for case in group}
    return [*found, *((case,) for case in cases if case not in grouped)]


def wrapped_as(case: Case) -> Case | None:
    """Return the case of torch.nn.DataParallel on the same work and devices; None unless `case` is `reference`."""
    if case.traits.role is not Role.ENGINE or case.schedule != schedule.REFERENCE:
        return None
    return replace(case, strategy=registry.of_role(Role.WRAPPER), schedule="", options=())


def engine_cost(*, devices: Sequence[int], batch_sizes: Sequence[int] = (), **axes: Any) -> list[Case]:
    """Return the cases that compare the engine with torch.nn.DataParallel on emulated devices.

    The axes are those of `sweep`, of which the most devices and the first batch size are used. Return no cases for one
    device, without a global batch size, and for other precisions than fp32.
    """
    count = max(devices)
    if count == 1 or not batch_sizes or axes.get("precision", "fp32") != "fp32":
        return []
    kept = {name: axes[name] for name in ("models", "size") if name in axes}
    both = (registry.of_role(Role.ENGINE), registry.of_role(Role.WRAPPER))
    return sweep(strategies=both, devices=[count], batch_sizes=batch_sizes[:1], device_kind="emulated", **kept)


def side_by_side(cases: Sequence[Case]) -> list[tuple[Case, ...]]:
    """Return the cases in groups that one worker can measure together: the same model, settings and kind of devices.

    Models from the same user module count as variants of one model.
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
    """Return the hash of a plan, which depends on the set of cases, the rounds and the way to measure."""
    text = json.dumps([rounds, sorted(case.fingerprint for case in cases), *how])
    return hashlib.sha256(text.encode()).hexdigest()


def _check(models: Sequence[str], strategies: Sequence[str], devices: Sequence[int], batches: Sequence[int]) -> None:
    """Check the axes. Raises LookupError for unknown names, and ValueError for empty axes and for values below one."""
    for model in models:
        if ":" not in model:
            try:
                registry.check("models", model)
            except LookupError as error:
                raise LookupError(f"{error}; for your own model, give --model package.module:name") from None
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
    """Return the schedules in a comma-separated list.

    Neighbouring switches, such as workers=pool,replicas=cached, form one schedule; a `;` ends it.
    """
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
    """Return the switches of one schedule, joined by commas. Raises ValueError if a switch occurs twice."""
    names = [item.partition("=")[0].strip() for item in switches]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ValueError(
            f"--schedules sets {twice} twice in {','.join(switches)!r}; put a ';' between two schedules, "
            "or give the option twice"
        )
    return ",".join(switches)


def conditions(device_kind: str) -> tuple[str, ...]:
    """Return the conditions for `Schedule.needs` that hold on a kind of device: TRAIN_STEP, and on GPUs also CUDA."""
    return (schedule.TRAIN_STEP, schedule.CUDA) if device_kind == "cuda" else (schedule.TRAIN_STEP,)


def _schedule(text: str, device_kind: str) -> str:
    """Return the canonical text of a schedule. Raises ValueError if it cannot run on this kind of device."""
    return text if text == schedule.FASTEST else str(schedule.parse(text).check(*conditions(device_kind)))


def _check_placement(devices: Sequence[int], kind: str, ids: Sequence[int], placement: str) -> None:
    """Check placement and ids. Raises ValueError if this kind of device does not support them."""
    _one_of("device kind", kind, DEVICE_KINDS)
    _one_of("placement", placement, PLACEMENTS)
    others = {"cpu": "logical CPU devices", "emulated": "emulated devices"}.get(kind)
    if others and ids:
        raise ValueError(f"--device-ids chooses GPUs, and {others} have no ids: leave out --device-ids")
    if others and placement == "colocated":
        raise ValueError(f"--placement colocated puts all replicas on one GPU; {others} need --placement spread")
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"--device-ids names a GPU twice: {list(ids)}; to put all replicas on one GPU, give --placement colocated"
        )
    if ids and placement == "spread" and max(devices) > len(ids):
        raise ValueError(f"{max(devices)} devices requested, but --device-ids names {len(ids)}: {list(ids)}")


def _check_memory(kind: str, size: int) -> None:
    """Check the memory limit. Raises ValueError if it is negative, or if the devices are not emulated."""
    if size < 0:
        raise ValueError(f"--device-memory must be at least 1 byte, got {size}")
    if size and kind == "cpu":
        raise ValueError(
            "--device-memory limits emulated devices; logical CPU devices share the host's memory: give "
            "--device-kind emulated"
        )
    if size and kind == "cuda":
        raise ValueError(
            "the memory of a GPU is fixed, and --device-memory limits only emulated devices: leave out --device-memory"
        )


def _check_habits(inputs: Sequence[str], read_loss: Sequence[int], kind: str) -> None:
    """Check the habits of the training loop. Raises ValueError for unknown ones, and for those without effect."""
    for where in inputs:
        _one_of("place of the inputs", where, INPUTS)
        if kind == "cpu" and where != "pinned":
            raise ValueError(
                f"--inputs {where} has no effect on logical CPU devices, which read the host's memory: leave it out"
            )
        if kind == "emulated" and where == "pageable":
            raise ValueError("--inputs pageable has no effect on emulated devices: give --inputs pinned or device")
    for every in read_loss:
        if every < 0:
            raise ValueError(f"--read-loss must be 0 (never) or a number of steps, got {every}")


def _one_of(kind: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(registry.unknown(kind, value, list(known)))


def default_strategies(device_kind: str) -> tuple[str, ...]:
    """Return the strategies that are run by default on a kind of device."""
    known = {
        "cpu": ("single", "single_all_cores", "dp", "ddp"),
        "cuda": ("single", "dp", "torch_dp", "ddp"),
        "emulated": ("single", "dp", "torch_dp"),
    }
    return known.get(device_kind, known["cpu"])


def default_devices(available: int, placement: str) -> tuple[int, ...]:
    """Return the default device counts of a sweep: powers of two up to `available`, at most eight."""
    if placement == "colocated":
        return (1, 2)
    return tuple(count for count in (1, 2, 4, 8) if count <= available) or (1,)


def place(text: str) -> tuple[int, str]:
    """Return the sort key of a schedule: rungs in ladder order, then all other schedules."""
    return ([*schedule.RUNGS].index(text), "") if text in schedule.RUNGS else (len(schedule.RUNGS), text)
