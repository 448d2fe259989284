"""Choices: the values that the axes of a sweep may have, and the checks of given values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.records import registry
from dpbench.records.case import MODES, TRAIN, Case

DEVICE_KINDS = ("cpu", "cuda", "emulated")
PLACEMENTS = ("spread", "colocated")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SIZES = ("small", "full")
INPUTS = ("pageable", "pinned", "device")
ZERO_GRAD = ("none", "zero")
HABIT_VALUES = (
    ("inputs", "place of the inputs", INPUTS),
    ("zero_grad", "way to clear gradients", ZERO_GRAD),
    ("mode", "mode", MODES),
)
"""The habits with a fixed set of values, as (the name of the field, its description, the values)."""


def check_names(
    models: Sequence[str], strategies: Sequence[str], devices: Sequence[int], batches: Sequence[int]
) -> None:
    """Raise LookupError for an unknown model or strategy, and ValueError for an empty axis or a number below one."""
    for model in models:
        check_model(model)
    for strategy in strategies:
        registry.check("strategies", strategy)
    for kind, values in (("number of devices", devices), ("batch size", batches)):
        for value in values:
            if value < 1:
                raise ValueError(f"each {kind} of a sweep must be at least 1, got {value}")
    if not models:
        raise ValueError(f"no model given; --models takes any of: {', '.join(registry.names('models'))}")
    if not strategies:
        raise ValueError(f"no strategy given; --strategies takes any of: {', '.join(registry.names('strategies'))}")
    if not devices:
        raise ValueError("no device count given; --devices takes numbers, such as 1,2")


def check_model(name: str) -> None:
    """Raise LookupError if dpbench has no model with this name; the model of a user has a colon in its name."""
    if ":" in name:
        return
    try:
        registry.check("models", name)
    except LookupError as error:
        raise LookupError(f"{error}; for your own model, give --model package.module:name") from None


def check_placement(devices: Sequence[int], kind: str, ids: Sequence[int], placement: str) -> None:
    """Raise ValueError if the placement or the device ids do not suit the kind and the number of the devices."""
    one_of("device kind", kind, DEVICE_KINDS)
    one_of("placement", placement, PLACEMENTS)
    others = {"cpu": "logical CPU devices", "emulated": "emulated devices"}.get(kind)
    if others and ids:
        raise ValueError(f"--device-ids selects GPUs, but {others} have no ids: leave out --device-ids")
    if others and placement == "colocated":
        raise ValueError(f"--placement colocated puts all replicas on one GPU: for {others}, give --placement spread")
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"--device-ids names a GPU twice: {list(ids)}; to put all replicas on one GPU, give --placement colocated"
        )
    if ids and placement == "spread" and max(devices) > len(ids):
        raise ValueError(
            f"{max(devices)} devices are requested, but --device-ids names {len(ids)} GPUs: {list(ids)}; give more ids "
            "or fewer devices"
        )


def check_memory(kind: str, size: int) -> None:
    """Raise ValueError if the memory limit `size` is negative, or if it is given for devices that are not emulated."""
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


def check_precision(precision: str, kind: str) -> None:
    """Raise ValueError if a precision is unknown, or has no effect on this kind of device."""
    one_of("precision", precision, PRECISIONS)
    if precision == "tf32" and kind != "cuda":
        raise ValueError(
            f"--precision tf32 is for GPUs, and the devices are {kind} devices: give --precision fp32 or bf16"
        )
    if precision != "fp32" and kind == "emulated":
        raise ValueError(
            f"emulated devices have no autocast: leave out --precision {precision}, or give --device-kind cpu or cuda"
        )


def check_habits(kind: str, habits: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError if a habit is unknown, or has no effect on this kind of device or with another habit.

    `habits` has the values of each habit, by the name of its field in `Case`.
    """
    for name, axis, known in HABIT_VALUES:
        for value in habits[name]:
            one_of(axis, value, known)
    others = {*habits["inputs"]} - {"pinned"}
    if kind == "cpu" and others:
        raise ValueError(
            f"--inputs {others.pop()} has no effect on logical CPU devices, which read the host's memory: leave out "
            "--inputs"
        )
    if kind == "emulated" and "pageable" in others:
        raise ValueError("--inputs pageable has no effect on emulated devices: give --inputs pinned or device")
    if (every := min(habits["read_loss"])) < 0:
        raise ValueError(f"--read-loss must be 0 (never) or a number of steps, got {every}")
    if (workers := min(habits["loader"])) < -1:
        raise ValueError(f"--loader must be off or a number of workers from 0, got {workers}")
    if any(habits["compile"]) and kind == "emulated":
        raise ValueError("torch.compile cannot trace the tensors of emulated devices: leave out --compile")
    if any(habits["neighbour"]) and kind == "emulated":
        raise ValueError("emulated devices run one at a time, so two models cannot run concurrently on them: give GPUs")
    for model in filter(None, habits["neighbour"]):
        check_model(model)
    _check_combined(habits)


def _check_combined(habits: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError if a habit has no effect because of another habit."""
    if max(habits["loader"]) >= 0 and "device" in habits["inputs"]:
        raise ValueError("a DataLoader gives batches on the host: leave out --loader, or --inputs device")
    for name, option in (("read_loss", "--read-loss"), ("zero_grad", "--zero-grad")):
        if {*habits["mode"]} - {TRAIN} and {*habits[name]} - {getattr(Case, name)}:
            raise ValueError(
                f"{option} has no effect on a forward alone, which has no loss and no gradients: leave out {option}, "
                f"or give --mode {TRAIN}"
            )


def one_of(kind: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError, with the known values, if a value of an axis is unknown; `kind` names the axis."""
    if value not in known:
        raise ValueError(registry.unknown(kind, value, list(known)))
