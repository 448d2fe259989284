"""Registry: plug-ins (models, strategies, samplers) by name, and the traits that a strategy
declares.

A model, strategy or sampler of dpbench is a file in one of its packages, and is named after this
file; the object in a strategy's file is called `strategy`. An external strategy comes from a file
(`file.py:name`), from an importable module (`package.module:name`), or from an installed
distribution that has an entry point in the group `dpbench.strategies`.

Plans, predictions and reports depend on the traits of a strategy, never on the strategy's name.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import pkgutil
import sys
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dpbench.records.files import UnreadableFile
from dpbench.records.visible import visible


class Role(StrEnum):
    """The role of a strategy in comparisons, in the order in which reports show the strategies.

    For each of the first five roles, dpbench has at most one strategy.
    """

    BASELINE = "baseline"
    """Training on one device without a wrapper; speed-ups are relative to this strategy."""
    ALL_CORES = "all cores"
    """Training on one CPU device that uses all cores.

    It shows the gain from more cores without data parallelism.
    """
    WRAPPER = "wrapper"
    """torch.nn.DataParallel itself."""
    ENGINE = "engine"
    """dpbench's engine, whose steps follow a schedule."""
    CONTROL = "control"
    """DistributedDataParallel: its ranks do equal work, so differences between its devices are due
    to the machine.
    """
    OTHER = "other"
    OBSERVED = "observed"
    """A training loop of the user, which dpbench watched, or whose trace dpbench imported."""
    LOADER = "loader"
    """A DataLoader alone: each step is the wait for a batch."""


class Parallelism(StrEnum):
    """The way in which a strategy uses several devices."""

    NONE = "none"
    THREADS = "threads"
    """One process runs all devices, and device 0 coordinates them."""
    RANKS = "ranks"
    """Each device has a separate process, which is a rank of one process group."""
    OTHER = "other"
    """One process runs all devices, and they are not replicas: for example, each has some of the
    layers.

    Also the parallelism of a stored case whose strategy is unknown here, or stored another value.
    """

    @classmethod
    def _missing_(cls, value: object) -> Parallelism:
        return cls.OTHER


class Reduction(StrEnum):
    """The phase that contains the time in which the gradients of all devices are added."""

    SEPARATE = "separate"
    """The `reduce` phase contains all the time in which gradients are added."""
    IN_BACKWARD = "in backward"
    """The `backward` phase contains all the time in which gradients are added."""
    OVERLAPPED = "overlapped"
    """Gradients are added during backward.

    The `reduce` phase contains only the adding that outlasts backward.
    """


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The properties of one strategy on which plans, predictions and reports depend.

    `strategy` is the strategy's name in cases; the registry sets it.
    """

    parallelism: Parallelism = Parallelism.THREADS
    reduction: Reduction = Reduction.SEPARATE
    role: Role = Role.OTHER
    devices_per_replica: int = 1
    """The number of devices that hold one replica of the module together."""
    shared_stream: bool = False
    """Whether replicas that share a GPU also share one CUDA stream."""
    rounds_gradients: bool = False
    """Whether gradients are rounded to 16 bits for transfers.

    If so, verification permits larger errors.
    """
    strategy: str = ""

    @property
    def one_device(self) -> bool:
        """Return whether the strategy uses only one device, even if a sweep asks for more
        devices.
        """
        return self.parallelism is Parallelism.NONE

    @property
    def ranks(self) -> bool:
        """Return whether the strategy runs each device in a separate process."""
        return self.parallelism is Parallelism.RANKS

    @property
    def threads(self) -> bool:
        """Return whether the strategy runs a replica on each device in one process, coordinated by
        device 0.
        """
        return self.parallelism is Parallelism.THREADS

    @property
    def replicated(self) -> bool:
        """Return whether each device has a whole replica of the module, so that equal rows are
        equal work.
        """
        return self.parallelism is not Parallelism.OTHER and self.devices_per_replica == 1

    @property
    def all_cores(self) -> bool:
        """Return whether each operator uses all cores of the CPU and not only one core."""
        return self.role is Role.ALL_CORES

    @property
    def observed(self) -> bool:
        """Return whether the case is a user's training loop that dpbench observed and did not run
        itself.
        """
        return self.role is Role.OBSERVED

    @property
    def loads(self) -> bool:
        """Return whether the case is a DataLoader alone, which trains nothing."""
        return self.role is Role.LOADER

    @property
    def scheduled(self) -> bool:
        """Return whether the strategy's steps follow one of the engine's schedules."""
        return self.role is Role.ENGINE

    @property
    def alone(self) -> bool:
        """Return whether a case of the strategy must be measured in a worker that measures no other
        case.
        """
        return self.ranks or self.all_cores

    def to_dict(self) -> dict[str, Any]:
        """Return the traits as plain data for JSON."""
        return asdict(self)


ROOT = Path(__file__).parents[1]
PACKAGES = {"models": "models", "strategies": "strategies", "samplers": "hardware.samplers"}
"""The package under `dpbench` that contains the plug-ins of each kind."""
LIBRARIES = {"transformers": "transformers", "torchvision": "vision", "timm": "vision"}
"""The libraries whose models a user can name, as in `transformers:gpt2`, and dpbench's extra that
installs each.
"""
GROUP = "dpbench.strategies"
"""The group of entry points with which installed distributions offer strategies."""


def folder_of(kind: str) -> Path:
    """Return the folder whose files are dpbench's own plug-ins of a kind, such as "models"."""
    return ROOT.joinpath(*PACKAGES[kind].split("."))


def names(kind: str) -> list[str]:
    """Return the sorted names of all plug-ins of a kind: dpbench's own, and strategies of installed
    distributions.
    """
    return sorted({*own(kind), *(_installed() if kind == "strategies" else ())})


def own(kind: str) -> list[str]:
    """Return the sorted names of dpbench's own plug-ins of a kind.

    A file whose name begins with `_` is not a plug-in.
    """
    return list(_modules(folder_of(kind)))


@lru_cache(maxsize=16)
def _modules(folder: Path) -> tuple[str, ...]:
    return tuple(
        sorted(m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))
    )


def load(kind: str, name: str) -> Any:
    """Import one of dpbench's own plug-ins and return its module.

    Raises LookupError for an unknown name.
    """
    check(kind, name)
    return importlib.import_module(f"dpbench.{PACKAGES[kind]}.{name}")


def check(kind: str, name: str) -> None:
    """Raise LookupError, with the known names, if no plug-in of the kind `kind` has the name
    `name`.

    Only a strategy named `file.py:name` or `package.module:name` is imported.
    """
    if kind == "strategies" and ":" in name:
        strategy(name)
        return
    known = names(kind)
    if name not in known:
        singular = kind[:-3] + "y" if kind.endswith("ies") else kind[:-1]
        raise LookupError(unknown(singular, name, known))


def strategy(name: str) -> Any:
    """Return the strategy with the name `name`, an object with the interface of
    `dpbench.strategies.Strategy`.

    Raises LookupError if no strategy has this name, or if the object lacks a part of the interface.
    """
    if ":" not in name:
        check("strategies", name)
    instance = outside("strategy", name) if ":" in name else _named(name)
    missing = [part for part, there in _parts(instance) if not there]
    if missing:
        raise LookupError(
            f"strategy {name}: this {type(instance).__name__} has no {' and no '.join(missing)};"
            " write a subclass of dpbench.strategies.Strategy and give the name of an instance of"
            " that class"
        )
    return instance


def _parts(found: Any) -> list[tuple[str, bool]]:
    return [
        ("attribute `traits` of type Traits", isinstance(getattr(found, "traits", None), Traits)),
        ("method start(case, model, devices, mark)", callable(getattr(found, "start", None))),
    ]


def _named(name: str) -> Any:
    return (
        load("strategies", name).strategy
        if name in own("strategies")
        else _installed()[name].load()
    )


@lru_cache(maxsize=1)
def _installed() -> dict[str, Any]:
    """Return the entry points of strategies from installed distributions, by the strategy's
    name.
    """
    from importlib.metadata import entry_points  # imported late, because it takes 30 ms

    return {one.name: one for one in entry_points(group=GROUP)}


@lru_cache(maxsize=64)
def outside(kind: str, name: str) -> Any:
    """Return the object that `name` denotes in the form `file.py:name` or `package.module:name`.

    Modules are also searched for in the current folder. Raises LookupError, which names the `kind`
    of object, if the file or module cannot be imported, or has no such object.
    """
    _check_visible(kind, name)
    place, _, attribute = name.rpartition(":")
    here = str(Path.cwd())
    if place.endswith(".py"):
        _check_exists(kind, name, place)
    try:
        if place.endswith(".py"):
            module = _executed(Path(place))
        else:
            if here not in sys.path:
                sys.path.insert(0, here)
            module = importlib.import_module(place)
    except Exception as error:  # the user's code may raise any error
        told = f"{type(error).__name__}: {error}"
        raise LookupError(
            f"{kind} {name}: cannot import {place} in the folder {here}: {told}"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise LookupError(
            f"{kind} {name}: {place} has no object {attribute!r}; correct the name after ':'"
        )
    return found


def _check_exists(kind: str, name: str, path: str) -> None:
    """Raise UnreadableFile if the file of the user's object `name` does not exist.

    `kind` is the kind of object.
    """
    if not Path(path).is_file():
        raise UnreadableFile(
            f"{kind} {name}: the file {path} does not exist in the folder {Path.cwd()}"
        )


def _executed(path: Path) -> Any:
    """Execute the Python file `path` and return it as a module of a package that stands for the
    file's folder.

    The name of the package is unique to the folder. The file can import its neighbours with
    `from .neighbour import name`.
    """
    folder = str(path.resolve().parent)
    package = f"dpbench_outside_{hashlib.sha256(folder.encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package)
        sys.modules[package].__path__ = [folder]
    spec = importlib.util.spec_from_file_location(f"{package}.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@lru_cache(maxsize=256)
def traits(name: str) -> Traits:
    """Return the traits of the strategy with the name `name`.

    If the strategy cannot be loaded, its parallelism is OTHER, because it is unknown. Stored cases
    of external strategies contain the traits of their strategy; see `Case.traits`.
    """
    try:
        declared: Traits = strategy(name).traits
    except LookupError:
        return Traits(parallelism=Parallelism.OTHER, strategy=name)
    return replace(declared, strategy=name)


def declared(name: str) -> Traits | None:
    """Return the traits to store in the cases of an external strategy.

    None for one of dpbench's own strategies.
    """
    return None if name in own("strategies") else traits(name)


@lru_cache(maxsize=8)
def of_role(role: Role) -> str:
    """Return the name of dpbench's own strategy with the role `role`."""
    return next(name for name in own("strategies") if traits(name).role is role)


def check_module(name: str, option: str = "--model") -> None:
    """Raise LookupError if the top-level module of the user's object `name` cannot be found.

    Raise UnreadableFile, which is a LookupError, if its file does not exist.

    `name` is `file.py:object`, `package.module:object`, or a library's model, such as
    `transformers:gpt2`. `option` is the option that gives the name. Nothing is imported.
    """
    _check_visible(option, name)
    place, colon, _ = name.rpartition(":")
    if not colon:
        raise LookupError(f"{option} {name}: give file.py:name or package.module:name")
    if place.endswith(".py"):
        _check_exists(option, name, place)
        return
    top = place.partition(".")[0]
    here = str(Path.cwd())
    missing = importlib.machinery.PathFinder.find_spec(top, [here, *sys.path]) is None
    if missing and top in LIBRARIES:
        raise LookupError(
            f"{option} {name} needs {top}, which is not installed: pip install"
            f" 'torch-dpbench[{LIBRARIES[top]}]'"
        )
    if missing:
        raise LookupError(
            f"{option} {name}: cannot find the module {top!r} in the folder {here} or on Python's"
            " path"
        )


def _check_visible(kind: str, name: str) -> None:
    """Raise LookupError if `name` has characters that a stored case would escape.

    The message begins with `kind`.
    """
    if visible(name) != name:
        raise LookupError(
            f"{kind} {visible(name)}: the name has control characters or bytes that are not UTF-8;"
            " rename the file"
        )


def unknown(kind: str, name: str, known: list[str]) -> str:
    """Return a message that reports an unknown name, lists the known names and suggests the most
    similar one.

    `kind` is the kind of the named thing in words, such as "model".
    """
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}"
