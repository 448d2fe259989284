"""Plan: sweep axes -> cases, without duplicates, each normalised and checked."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dpbench import registry, schedule
from dpbench.records import Case

DEVICE_KINDS = ("cpu", "cuda")
PLACEMENTS = ("spread", "colocated")
PRECISIONS = ("fp32", "bf16")
SIZES = ("small", "full")
SINGLE = ("single", "single_all_cores")
"""Strategies that know one device only."""


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
) -> list[Case]:
    """Return the product of the axes as cases.

    `batch_sizes` are global (strong scaling); `batch_per_device` multiplies with the devices (weak scaling), and
    exactly one of the two is given. Raises ValueError or LookupError for what cannot be run.
    """
    if bool(batch_sizes) == bool(batch_per_device):
        raise ValueError("give either batch sizes (strong scaling) or a batch per device (weak scaling), and not both")
    _check(models, strategies, devices, [*batch_sizes, *batch_per_device])
    schedules = [_schedule(text, device_kind) for text in schedules]
    _check_placement(devices, device_kind, device_ids, placement)
    _one_of("size", size, SIZES)
    _one_of("precision", precision, PRECISIONS)
    cases = []
    for model, strategy, count in itertools.product(models, strategies, devices):
        for batch in batch_sizes or [each * count for each in batch_per_device]:
            for written in schedules:
                case = Case(
                    model=model, strategy=strategy, devices=count, batch_size=batch, size=size, schedule=written,
                    device_kind=device_kind, device_ids=tuple(device_ids[: max(devices)]), placement=placement,
                    precision=precision,
                )  # fmt: skip
                cases.append(normalise(case, weak_batches=tuple(batch_per_device)))
    return list(dict.fromkeys(cases))


def normalise(case: Case, *, weak_batches: Sequence[int] = ()) -> Case:
    """Bring equal cases to one form: a single device has one device, only `dp` has a schedule."""
    if case.strategy in SINGLE and case.devices > 1:
        # in weak scaling the one device's share is the work of reference
        batch = case.batch_size // case.devices if weak_batches else case.batch_size
        case = replace(case, devices=1, batch_size=batch)
    if case.devices == 1 and case.placement == "colocated":
        case = replace(case, placement="spread")
    return case if case.strategy == "dp" else replace(case, schedule="")


def plan_hash(cases: Iterable[Case], rounds: int) -> str:
    """Name a plan: the same cases and rounds have the same hash, in whatever order."""
    text = json.dumps([rounds, sorted(case.fingerprint for case in cases)])
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


def _schedule(text: str, device_kind: str) -> str:
    """Return a schedule in the one way to write it; ValueError for one that cannot run on this kind of device."""
    if text == schedule.FASTEST:
        return text
    return str(schedule.parse(text).check(schedule.TRAIN_STEP, *([schedule.CUDA] if device_kind == "cuda" else [])))


def _check_placement(devices: Sequence[int], kind: str, ids: Sequence[int], placement: str) -> None:
    """Refuse a placement that the devices cannot have."""
    _one_of("device kind", kind, DEVICE_KINDS)
    _one_of("placement", placement, PLACEMENTS)
    if kind == "cpu" and ids:
        raise ValueError("--device-ids chooses GPUs; logical CPU devices have no ids: leave it out")
    if kind == "cpu" and placement == "colocated":
        raise ValueError("--placement colocated shares one GPU; logical CPU devices need --placement spread")
    if len(set(ids)) < len(ids):
        raise ValueError(f"--device-ids names a GPU twice: {list(ids)}; --placement colocated shares one GPU")
    if ids and placement == "spread" and max(devices) > len(ids):
        raise ValueError(f"{max(devices)} devices asked for, but --device-ids names {len(ids)}: {list(ids)}")


def _one_of(kind: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(registry.unknown(kind, value, list(known)))


def default_strategies(device_kind: str) -> tuple[str, ...]:
    """Return the strategies that are worth running on a kind of device."""
    return ("single", "single_all_cores", "dp", "ddp") if device_kind == "cpu" else ("single", "dp", "torch_dp", "ddp")


def default_devices(available: int, placement: str) -> tuple[int, ...]:
    """Return the device counts to sweep: powers of two up to what there is, and what a first look needs."""
    if placement == "colocated":
        return (1, 2)
    return tuple(count for count in (1, 2, 4, 8) if count <= available) or (1,)
