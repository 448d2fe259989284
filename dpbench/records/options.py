"""Options: the cases and the measurements of a run, and the checks of their values."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Self

from dpbench.records import registry
from dpbench.records.case import MODES, TRAIN, Case

DEVICE_KINDS = ("cpu", "cuda", "emulated")
PLACEMENTS = ("spread", "colocated")
OPTIMIZERS = ("sgd", "adam", "adamw", "own")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
SIZES = ("small", "full")
INPUTS = ("pageable", "pinned", "device")
ZERO_GRAD = ("none", "zero")
HABIT_VALUES = (
    ("inputs", "place of the inputs", INPUTS),
    ("zero_grad", "way to clear gradients", ZERO_GRAD),
    ("mode", "mode", MODES),
)
"""The fields of `HABITS` with a fixed set of values, as (field, description, values)."""
MOST_ROUNDS = 10_000
MOST = 10**9
"""The largest number of devices, and the largest batch size, of a sweep."""
AUTO = "auto"
"""The value of `rounds` with which a run adds rounds until its answers are settled."""
SCENARIOS = ("seeds",)
AXES = (
    "scenario",
    "together",
    "models",
    "model",
    "strategies",
    "strategy",
    "schedules",
    "ladder",
    "devices",
    "batch_sizes",
    "batch_per_device",
)
"""The options that select cases; without any, a run is short and uses default cases."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that select the cases and the measurements of a run.

    Each field has the name and the default of an option of `dpbench run`, whose --help explains it.
    An empty value means the default on this machine, which `measure.selection` inserts. `model` and
    `strategy` name the user's own models and strategies.
    """

    models: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    strategy: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    ladder: bool = False
    scenario: str = ""
    together: tuple[str, ...] = ()
    devices: tuple[int, ...] = ()
    device_ids: tuple[int | str, ...] = ()
    device_kind: str = ""
    placement: str = ""
    batch_sizes: tuple[int, ...] = ()
    batch_per_device: tuple[int, ...] = ()
    size: str = "small"
    precision: str = "fp32"
    optimizer: str = "sgd"
    unverified: bool = False
    inputs: tuple[str, ...] = ("pinned",)
    read_loss: tuple[int, ...] = (0,)
    zero_grad: tuple[str, ...] = ("none",)
    compile: tuple[bool, ...] = (False,)
    loader: tuple[int, ...] = (-1,)
    mode: tuple[str, ...] = (TRAIN,)
    rounds: int | str = AUTO
    paired: bool = False
    budget: float | None = None
    limit: float = 120.0
    patience: float | None = None
    retry: tuple[str, ...] = ()
    profile: bool = False
    device_memory: int = 0
    find_max_batch: bool = False
    name: str = ""
    tag: tuple[str, ...] = ()

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Return the options with these values, from the command line or from a caller in Python.

        None means the default. Lists become tuples, and one value becomes a tuple of one value.
        Raises ValueError for a value of a wrong type, and TypeError for an unknown option.
        """
        kinds = _kinds()
        named = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(named.keys() - kinds.keys()):
            raise TypeError(registry.unknown("option", unknown[0], [*kinds]))
        return cls(**{name: _typed(name, value, kinds[name]) for name, value in named.items()})

    def __post_init__(self) -> None:
        if self.optimizer == "own" and (self.models or not self.model):
            raise ValueError(
                "--optimizer own takes the optimizer of your model's file: give --model, and no"
                " --models"
            )
        if self.rounds != AUTO and (
            isinstance(self.rounds, str) or not 1 <= self.rounds <= MOST_ROUNDS
        ):
            raise ValueError(
                f"--rounds: {self.rounds!r} is neither a number of rounds from 1 to {MOST_ROUNDS}"
                " nor auto"
            )
        for name, least, most in (
            ("budget", 1.0, None),
            ("limit", 1.0, None),
            ("patience", 0.0, None),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= (float("inf") if most is None else most):
                bound = f"at least {least:g}" if most is None else f"from {least:g} to {most:g}"
                raise ValueError(f"--{name} must be {bound}, got {value:g}")
        for name, values in (
            ("scenario", SCENARIOS),
            ("device_kind", DEVICE_KINDS),
            ("placement", PLACEMENTS),
            ("optimizer", OPTIMIZERS),
        ):
            if getattr(self, name) not in ("", *values):
                raise ValueError(
                    registry.unknown(name.replace("_", " "), getattr(self, name), [*values])
                )

    @property
    def quick(self) -> bool:
        """Return whether no option selects cases; see `AXES`."""
        return not any(getattr(self, axis) for axis in AXES)

    def command(self, *more: str, config: bool = True) -> str:
        """Return these options, and the arguments `more`, as the text of a `dpbench run` command.

        With `config=False`, the command ignores the defaults in files.
        """
        words = ["dpbench", "run"] if config else ["dpbench", "--no-config", "run"]
        for field in fields(self):
            value = getattr(self, field.name)
            option = f"--{field.name.replace('_', '-')}"
            if value == field.default:
                continue
            if field.name in REPEATED:
                words += [part for item in value for part in (option, str(item))]
            else:
                words += [option] if value is True else [option, _text(value, field.name)]
        return shlex.join([*words, *more])


@lru_cache
def _kinds() -> dict[str, str]:
    return {one.name: str(one.type) for one in fields(Options)}


REPEATED = ("model", "strategy", "tag")
"""The options that are given once per value; any other list is one text with commas."""


def _text(value: object, name: str = "") -> str:
    if isinstance(value, tuple):
        return ",".join(_text(one, name) for one in value)
    if name == "loader" and value == Case.loader:
        return "off"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


KINDS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "float": (int, float),
}


def _typed(name: str, value: Any, kind: str) -> Any:
    """Return `value`, as a tuple if the annotation `kind` is one, such as "tuple[int, ...]".

    Raises ValueError for a value of another type.
    """
    several = kind.startswith("tuple[")
    allowed = [
        item
        for item in kind.removeprefix("tuple[").removesuffix(", ...]").split(" | ")
        if item in KINDS
    ]
    values = (
        tuple(value)
        if several and isinstance(value, Iterable) and not isinstance(value, str)
        else (value,)
    )
    for item in values:
        # True is an int in Python, but not a number of devices
        fits = any(
            isinstance(item, KINDS[each]) and isinstance(item, bool) <= (each == "bool")
            for each in allowed
        )
        if not fits:
            listed = f"a list of {' or '.join(allowed)}" if several else " or ".join(allowed)
            raise ValueError(
                f"--{name.replace('_', '-')} must be {listed}, got {item!r} ({type(item).__name__})"
            )
    if several and not values:
        raise ValueError(
            f"--{name.replace('_', '-')}: the list is empty; give at least one value, or leave"
            " it out"
        )
    return values if several else value


def check_names(
    models: Sequence[str], strategies: Sequence[str], devices: Sequence[int], batches: Sequence[int]
) -> None:
    """Raise LookupError for unknown models or strategies, ValueError for empty or invalid axes."""
    for model in models:
        check_model(model)
    for strategy in strategies:
        registry.check("strategies", strategy)
    for kind, values in (("number of devices", devices), ("batch size", batches)):
        for value in values:
            if not 1 <= value <= MOST:
                raise ValueError(
                    f"each {kind} of a sweep must be at least 1 and at most {MOST}, got {value}"
                )
    if not models:
        raise ValueError(
            f"no model given; --models takes any of: {', '.join(registry.names('models'))}"
        )
    if not strategies:
        raise ValueError(
            "no strategy given; --strategies takes any of:"
            f" {', '.join(registry.names('strategies'))}"
        )
    if not devices:
        raise ValueError("no device count given; --devices takes numbers, such as 1,2")


def check_model(name: str) -> None:
    """Raise LookupError if dpbench has no model `name`; a user's own, with a colon, may be any."""
    if ":" in name:
        return
    try:
        registry.check("models", name)
    except LookupError as error:
        raise LookupError(
            f"{error}; for your own model, give --model package.module:name"
        ) from None


def check_placement(devices: Sequence[int], kind: str, ids: Sequence[int], placement: str) -> None:
    """Raise ValueError if the placement or the device ids do not suit the devices."""
    one_of("device kind", kind, DEVICE_KINDS)
    one_of("placement", placement, PLACEMENTS)
    others = {"cpu": "logical CPU devices", "emulated": "emulated devices"}.get(kind)
    if others and ids:
        raise ValueError(
            f"--device-ids selects GPUs, but {others} have no ids: leave out --device-ids"
        )
    if others and placement == "colocated":
        raise ValueError(
            f"--placement colocated puts all replicas on one GPU: for {others}, give --placement"
            " spread"
        )
    if len(set(ids)) < len(ids):
        raise ValueError(
            f"--device-ids names a GPU twice: {list(ids)}; to put all replicas on one GPU, give"
            " --placement colocated"
        )
    if ids and placement == "spread" and max(devices) > len(ids):
        raise ValueError(
            f"{max(devices)} devices are requested, but --device-ids names only {list(ids)}; give"
            " more ids or fewer devices"
        )


def check_memory(kind: str, size: int) -> None:
    """Raise ValueError for a negative memory limit, or one of devices that are not emulated."""
    if size < 0:
        raise ValueError(f"--device-memory must be at least 1 byte, got {size}")
    if size and kind == "cpu":
        raise ValueError(
            "--device-memory limits emulated devices; logical CPU devices share the host's memory:"
            " give --device-kind emulated"
        )
    if size and kind == "cuda":
        raise ValueError(
            "the memory of a GPU is fixed, and --device-memory limits only emulated devices: leave"
            " out --device-memory"
        )


def check_precision(precision: str, kind: str) -> None:
    """Raise ValueError if a precision is unknown, or has no effect on this kind of device."""
    one_of("precision", precision, PRECISIONS)
    if precision == "tf32" and kind != "cuda":
        raise ValueError(
            f"--precision tf32 is for GPUs, and the devices are {kind} devices: give --precision"
            " fp32 or bf16"
        )
    if precision != "fp32" and kind == "emulated":
        raise ValueError(
            f"emulated devices have no autocast: leave out --precision {precision}, or give"
            " --device-kind cpu or cuda"
        )


def check_habits(kind: str, habits: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError if a habit's value is unknown, or unfit for the devices or another habit.

    `habits` maps each name in `HABITS` to the values of that axis.
    """
    for name, axis, allowed in HABIT_VALUES:
        for value in habits[name]:
            one_of(axis, value, allowed)
    others = {*habits["inputs"]} - {"pinned"}
    if kind == "cpu" and others:
        raise ValueError(
            f"--inputs {others.pop()} has no effect on logical CPU devices, which read the host's"
            " memory: leave out --inputs"
        )
    if kind == "emulated" and "pageable" in others:
        raise ValueError(
            "--inputs pageable has no effect on emulated devices: give --inputs pinned or device"
        )
    if (every := min(habits["read_loss"])) < 0:
        raise ValueError(f"--read-loss must be 0 (never) or a number of steps, got {every}")
    if (workers := min(habits["loader"])) < -1:
        raise ValueError(f"--loader must be off or a number of workers, 0 or more, got {workers}")
    if any(habits["compile"]) and kind == "emulated":
        raise ValueError(
            "torch.compile cannot trace the tensors of emulated devices: leave out --compile"
        )
    if any(habits["neighbour"]) and kind == "emulated":
        raise ValueError(
            "emulated devices run one at a time, so two models cannot run concurrently on them:"
            " give --device-kind cpu or cuda"
        )
    for model in filter(None, habits["neighbour"]):
        check_model(model)
    _check_combined(habits)


def _check_combined(habits: Mapping[str, Sequence[Any]]) -> None:
    if max(habits["loader"]) >= 0 and "device" in habits["inputs"]:
        raise ValueError(
            "a DataLoader puts batches in the host's memory, so --inputs device has no effect:"
            " leave out --loader or --inputs"
        )
    for name, option in (("read_loss", "--read-loss"), ("zero_grad", "--zero-grad")):
        if {*habits["mode"]} - {TRAIN} and {*habits[name]} - {getattr(Case, name)}:
            raise ValueError(
                f"{option} has no effect on a forward alone, which has no loss and no gradients:"
                f" leave out {option}, or give --mode {TRAIN}"
            )


def one_of(kind: str, value: str, known: Sequence[str]) -> None:
    """Raise ValueError, with the known values, if a value of the axis `kind` is unknown."""
    if value not in known:
        raise ValueError(registry.unknown(kind, value, list(known)))
