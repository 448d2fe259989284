"""Registry: plug-ins (models, strategies, samplers) by name, and the traits of strategies.

A plug-in of dpbench is a file in one of its packages, and is named after this file; the object in a
strategy's file is called `strategy`. An external strategy comes from a file (`file.py:name`), from
an importable module (`package.module:name`), or from an installed distribution that has an entry
point in the group `dpbench.strategies`.

Plans, predictions and reports depend on the traits of a strategy, never on the strategy's name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dpbench.records.errors import UnknownName
from dpbench.records.visible import visible


class Role(StrEnum):
    """The role of a strategy in comparisons, in the order of reports.

    For each of the first five roles, dpbench has at most one strategy.
    """

    BASELINE = "baseline"
    """Training on one device without a wrapper; speed-ups are relative to it."""
    ALL_CORES = "all cores"
    """One CPU device with all cores: the gain from cores without data parallelism."""
    WRAPPER = "wrapper"
    """torch.nn.DataParallel itself."""
    ENGINE = "engine"
    """dpbench's engine, whose steps follow a schedule."""
    CONTROL = "control"
    """DistributedDataParallel: its ranks do equal work, so its devices differ by the machine alone.
    """
    OTHER = "other"
    OBSERVED = "observed"
    """A training loop of the user that dpbench watched or imported as a trace."""
    LOADER = "loader"
    """A DataLoader alone: each step is the wait for a batch."""


class Parallelism(StrEnum):
    """The way in which a strategy uses several devices."""

    NONE = "none"
    THREADS = "threads"
    """One process runs all devices, and device 0 coordinates them."""
    RANKS = "ranks"
    """Each device has a process, which is a rank of one process group."""
    OTHER = "other"
    """One process runs all devices, which are not replicas: for example, each has some layers.

    Also for a stored case whose strategy or parallelism is unknown here.
    """

    @classmethod
    def _missing_(cls, value: object) -> Parallelism:
        return cls.OTHER


class Reduction(StrEnum):
    """The phase with the time in which the gradients of all devices are added."""

    SEPARATE = "separate"
    """The `reduce` phase has all of it."""
    IN_BACKWARD = "in backward"
    """The `backward` phase has all of it."""
    OVERLAPPED = "overlapped"
    """The `reduce` phase has only the part that outlasts backward."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of a strategy on which plans, predictions and reports depend.

    `strategy` is the strategy's name in cases; the registry sets it.
    """

    parallelism: Parallelism = Parallelism.THREADS
    reduction: Reduction = Reduction.SEPARATE
    role: Role = Role.OTHER
    devices_per_replica: int = 1
    """The number of devices that together hold one replica of the module."""
    shared_stream: bool = False
    """Whether replicas that share a GPU also share one CUDA stream."""
    rounds_gradients: bool = False
    """Whether gradients are rounded to 16 bits for transfers, so that larger errors pass."""
    strategy: str = ""

    @property
    def one_device(self) -> bool:
        """Return whether the strategy uses one device, however many a sweep asks for."""
        return self.parallelism is Parallelism.NONE

    @property
    def ranks(self) -> bool:
        """Return whether each device has a separate process."""
        return self.parallelism is Parallelism.RANKS

    @property
    def threads(self) -> bool:
        """Return whether one process runs a replica on each device, coordinated by device 0."""
        return self.parallelism is Parallelism.THREADS

    @property
    def replicated(self) -> bool:
        """Return whether each device has a whole replica, so that equal rows are equal work."""
        return self.parallelism is not Parallelism.OTHER and self.devices_per_replica == 1

    @property
    def all_cores(self) -> bool:
        """Return whether each operator uses all cores of the CPU."""
        return self.role is Role.ALL_CORES

    @property
    def comparable(self) -> bool:
        """Return whether the case can have a baseline, and a reference for its gradients."""
        return self.role not in (Role.OBSERVED, Role.LOADER)

    @property
    def in_parts(self) -> bool:
        """Return whether the rounds are consecutive parts of one execution."""
        return self.role is Role.OBSERVED

    @property
    def judged_alone(self) -> bool:
        """Return whether findings and the answer are on the case itself, and compare no others."""
        return self.role is Role.OBSERVED

    @property
    def cores_known(self) -> bool:
        """Return whether dpbench knows how many cores a step keeps busy, because it runs it."""
        return self.role is not Role.OBSERVED

    @property
    def loads(self) -> bool:
        """Return whether the case is a DataLoader alone, which trains nothing."""
        return self.role is Role.LOADER

    @property
    def scheduled(self) -> bool:
        """Return whether the steps follow one of the engine's schedules."""
        return self.role is Role.ENGINE

    @property
    def alone(self) -> bool:
        """Return whether a case needs a worker that measures no other case."""
        return self.ranks or self.all_cores


ROOT = Path(__file__).parents[1]
PACKAGES = {"models": "models", "strategies": "strategies", "samplers": "hardware.samplers"}
"""The package under `dpbench` with the plug-ins of each kind."""
LIBRARIES = {"transformers": "transformers", "torchvision": "vision", "timm": "vision"}
"""Libraries with models, such as `transformers:gpt2`, and the extra of dpbench that installs each.
"""
UNPRINTABLE = "the name has control characters or bytes that are not UTF-8"
"""The fault of a name that stored cases and the terminal would show with escapes."""
GROUP = "dpbench.strategies"
"""The group of entry points with which installed distributions offer strategies."""


def folder_of(kind: str) -> Path:
    """Return the folder of dpbench's own plug-ins of a kind, such as "models"."""
    return ROOT.joinpath(*PACKAGES[kind].split("."))


def names(kind: str) -> list[str]:
    """Return the sorted names of a kind's plug-ins, with strategies of installed distributions."""
    return sorted({*own(kind), *(_installed() if kind == "strategies" else ())})


def own(kind: str) -> list[str]:
    """Return the sorted names of dpbench's own plug-ins: files that do not begin with `_`."""
    return list(_modules(folder_of(kind)))


@lru_cache(maxsize=16)
def _modules(folder: Path) -> tuple[str, ...]:
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))
    )


def load(kind: str, name: str) -> Any:
    """Import one of dpbench's own plug-ins. Raises LookupError for an unknown name."""
    check(kind, name)
    return importlib.import_module(f"dpbench.{PACKAGES[kind]}.{name}")


def check(kind: str, name: str) -> None:
    """Raise LookupError, with the known names, if a kind has no plug-in `name`.

    Only a strategy named `file.py:name` or `package.module:name` is imported.
    """
    if kind == "strategies" and ":" in name:
        strategy(name)
        return
    known = names(kind)
    if name not in known:
        singular = kind[:-3] + "y" if kind.endswith("ies") else kind[:-1]
        raise UnknownName(unknown(singular, name, known))


def strategy(name: str) -> Any:
    """Return the strategy `name`, an object with the interface of `dpbench.strategies.Strategy`.

    Raises LookupError if no strategy has this name, or if the object lacks a part of the interface.
    """
    if ":" in name:
        instance = outside("strategy", name)
    else:
        check("strategies", name)
        mine = name in own("strategies")
        instance = load("strategies", name).strategy if mine else _installed()[name].load()
    parts = {
        "attribute `traits` of type Traits": isinstance(getattr(instance, "traits", None), Traits),
        "method start(case, model, devices, mark)": callable(getattr(instance, "start", None)),
    }
    if missing := [part for part, there in parts.items() if not there]:
        raise UnknownName(
            f"strategy {name}: this {type(instance).__name__} has no {' and no '.join(missing)};"
            " write a subclass of dpbench.strategies.Strategy and give the name of an instance of"
            " that class"
        )
    return instance


def imported(name: str) -> Any:
    """Return the strategy `name` without importing code of a user; None if that is impossible.

    The code of a file, module or distribution is imported once the user has named it to this
    process. A stored case may name any other.
    """
    place = name.rpartition(":")[0]
    try:
        if place:
            module = _module_of(Path(place)) if place.endswith(".py") else place
        else:
            module = "dpbench" if name in own("strategies") else _installed()[name].module
        return strategy(name) if module in sys.modules else None
    except (LookupError, ValueError):  # ValueError: no file can have the name of a stored case
        return None


@lru_cache(maxsize=1)
def _installed() -> dict[str, Any]:
    from importlib.metadata import entry_points  # imported late, because it takes 30 ms

    return {one.name: one for one in entry_points(group=GROUP)}


@lru_cache(maxsize=64)
def outside(kind: str, name: str) -> Any:
    """Return the object that `name` denotes: `file.py:name` or `package.module:name`.

    Modules are also searched for in the current folder. Raises LookupError, which names the `kind`
    of object, if the file or module cannot be imported, or has no such object.
    """
    if visible(name) != name:
        raise UnknownName(f"{kind} {visible(name)}: {UNPRINTABLE}; rename the file")
    place, _, attribute = name.rpartition(":")
    here = str(Path.cwd())
    try:
        if place.endswith(".py"):
            module = _executed(Path(place))
        else:
            if here not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(place)
    except Exception as error:  # the user's code may raise any error
        told = f"{type(error).__name__}: {error}"
        raise UnknownName(
            f"{kind} {name}: cannot import {place} in the folder {here}: {told}"
        ) from error
    instance = getattr(module, attribute, None)
    if instance is None:
        raise UnknownName(
            f"{kind} {name}: {place} has no object {attribute!r}; correct the name after ':'"
        )
    return instance


def _module_of(path: Path) -> str:
    """Return the full name of the module of a Python file, in a package for its folder."""
    folder = str(path.resolve().parent)
    digest = hashlib.sha256(folder.encode()).hexdigest()[:12]
    return f"dpbench_outside_{digest}.{path.stem}"


def _executed(path: Path) -> Any:
    """Execute a Python file as a module of a package that stands for, and is unique to, its folder.

    The file can import its neighbours with `from .neighbour import name` and, as a script can, with
    `import neighbour`.
    """
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # processes that this one spawns get the same path
    name = _module_of(path)
    package = name.rpartition(".")[0]
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [folder]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=256)
def traits(name: str) -> Traits:
    """Return the traits of the strategy `name`.

    The parallelism of a strategy that cannot be loaded is OTHER. Stored cases of external
    strategies contain their traits; see `Case.traits`.
    """
    try:
        declared: Traits = strategy(name).traits
    except LookupError:
        return Traits(parallelism=Parallelism.OTHER, strategy=name)
    return replace(declared, strategy=name)


def declared(name: str) -> Traits | None:
    """Return the traits to store in the cases of an external strategy; None for dpbench's own."""
    return None if name in own("strategies") else traits(name)


@lru_cache(maxsize=8)
def of_role(role: Role) -> str:
    """Return the name of dpbench's own strategy with this role."""
    return next(name for name in own("strategies") if traits(name).role is role)


def unknown(kind: str, name: str, known: list[str]) -> str:
    """Return a message with an unknown name, the known names and the most similar one.

    `kind` is the kind of the named thing in words, such as "model".
    """
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{near(name, known)}"


def near(name: str, known: Sequence[str]) -> str:
    """Return a question for the known name that is most similar to `name`; "" if none is."""
    import difflib  # for errors only

    found = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{found[0]}'?" if found else ""
