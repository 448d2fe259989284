"""Environment: the facts on which a measurement depends, and the differences between two of them.

Whatever puts measurements together, or side by side, asks `differences`.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from dpbench.records import words
from dpbench.records.errors import UnknownName
from dpbench.records.facts import Gpu, Surroundings
from dpbench.records.gpu_names import same_gpu
from dpbench.records.registry import unknown
from dpbench.records.trial import Trial
from dpbench.records.vendors import AMD, NVIDIA

UNKNOWN = "unknown"
FAKES = "fake GPUs"
"""The name of the fact whether a run is on fake GPUs."""
PYTHON, DEVICES = "python", "devices"
"""How comparisons name the facts on the interpreter, and on the kinds of devices."""
ALIKE = 0.05
"""The largest relative difference of memory at which two machines count as alike."""
ELSEWHERE = ("ASV_COMMIT", *AMD.hiding)
"""The variables whose effect is known otherwise: a key of the code, and the list of GPUs."""
IDLE = (
    "CUBLAS_LOGDEST_DBG",
    "CUDA_CACHE_PATH",
    "CUDA_COREDUMP_FILE",
    "CUDA_HOME",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_PATH",
    "CUDA_ROOT",
    "CUDNN_HOME",
    "CUDNN_LOGDEST_DBG",
    "CUDNN_PATH",
    "HIP_PATH",
    "MIOPEN_CUSTOM_CACHE_DIR",
    "NCCL_DEBUG_FILE",
    "NCCL_GRAPH_DUMP_FILE",
    "NCCL_HOME",
    "NCCL_TOPO_DUMP_FILE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCH_COMPILE_DEBUG_DIR",
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
)
"""The variables that decide no time of a step, such as the folder of a cache or of a compiler.

Their values differ between users and jobs, and torch sets some of them.
"""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""The variables that dpbench sets in the processes that measure, whatever the shell has."""
HIDDEN = "(not recorded)"
"""What stands for a variable's value that is not recorded; a hash of the value follows.

Earlier versions stored no hash, and such a value may be equal to any other that is not recorded.
"""
_FREE_THREADED = (3, 13)
"""The first Python that can run without a global interpreter lock."""


def _fact(
    name: str,
    *,
    of_amd: str = "",
    asked: str = "",
    forbids: bool = True,
    alike: Callable[[Any, Any], bool] = operator.eq,
    shown: Callable[[Any], str] = str,
) -> Any:
    """Return the field of a fact, which is unknown by default.

    Its name is `of_amd`, if given, where all GPUs are AMD's. `asked` is how a comparison across the
    fact names it, by default its name; facts that only change together have one. Measurements may
    not be mixed where values that are not `alike` differ, unless `forbids` is False.
    """
    told = {
        "name": name,
        "of_amd": of_amd,
        "asked": asked or _spelled(name),
        "forbids": forbids,
        "alike": alike,
        "shown": shown,
    }
    return field(default=None, metadata=told)


def _spelled(name: str) -> str:
    return name.lower().replace(" ", "-")


def _same_memory(one: int, other: int) -> bool:
    return abs(one - other) <= ALIKE * one


def _same_gpus(some: Sequence[str], others: Sequence[str]) -> bool:
    return len(some) == len(others) and all(map(same_gpu, some, others))


def _same_limits(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether GPUs have the same limits, each kind at least once if their numbers differ.

    The number is another fact.
    """
    return some == others or (len(some) != len(others) and {*some} == {*others})


def _listed(values: Sequence[str]) -> str:
    return ", ".join(values) or "none"


def _limits(values: Sequence[float]) -> str:
    """Return power limits as text, such as "2 x 400 W, 250 W"."""
    counted = Counter(values).items()
    return ", ".join(f"{f'{count} x ' * (count > 1)}{limit:.0f} W" for limit, count in counted)


def _set(values: frozenset[str]) -> str:
    return ", ".join(sorted(values)) or "not set"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The facts on which a measurement depends; a fact that is None is unknown.

    `gpus` are the different names of GPUs, and `power_limits_w` the limits of each GPU in watts.
    `cuda` is the version of CUDA, or "HIP" and its version, and `cudnn` and `nccl` are those of
    what AMD's torch has in their place.
    `build` is the build of Python, and `gil` says whether its global interpreter lock is "on" or
    "off". `python_variables` and `variables` are texts NAME=value, those of the interpreter and all
    others that decide times: those of `THREADS` do so in a watched loop only. The last three facts
    are of trials: whether GPUs are fake, the kinds of devices, and whether a trace was imported.
    """

    processor: str | None = _fact("processor")
    cores: int | None = _fact("cores")
    memory_bytes: int | None = _fact("memory", forbids=False, alike=_same_memory, shown=words.size)
    gpus: tuple[str, ...] | None = _fact("GPUs", alike=_same_gpus, shown=_listed)
    gpu_count: int | None = _fact("number of GPUs")
    power_limits_w: tuple[float, ...] | None = _fact(
        "power limits", alike=_same_limits, shown=_limits
    )
    driver: str | None = _fact("driver")
    cuda: str | None = _fact(NVIDIA.runtime, of_amd=AMD.runtime)
    cudnn: str | None = _fact(NVIDIA.convolutions, of_amd=AMD.convolutions)
    nccl: str | None = _fact(NVIDIA.collectives, of_amd=AMD.collectives)
    python: str | None = _fact("Python", asked=PYTHON)
    build: str | None = _fact("build of Python", asked=PYTHON)
    gil: str | None = _fact("GIL", asked=PYTHON)
    python_variables: frozenset[str] | None = _fact("variables of Python", asked=PYTHON, shown=_set)
    torch: str | None = _fact("torch")
    numpy: str | None = _fact("numpy")
    variables: frozenset[str] | None = _fact("variables", shown=_set)
    fakes: str | None = _fact(FAKES)
    devices: str | None = _fact("devices", asked=DEVICES)
    trace: str | None = _fact("trace")

    @classmethod
    def of(cls, facts: Surroundings, trials: Sequence[Trial] = ()) -> Self:
        """Return the environment that a run, a machine or a trial states.

        What the workers of `trials` have told counts more than what the run knew before it.
        """
        host, libraries, gpus = facts.host, facts.gpus, facts.gpus.gpus
        limits = tuple(gpu.power_limit_w for gpu in gpus or () if gpu.power_limit_w is not None)

        def told(name: str, known: Any = None) -> str | None:
            values = [getattr(one.facts, name) for one in trials]
            of_workers = {str(one) for one in values if one not in (None, "")}
            return ", ".join(sorted(of_workers)) or _text(getattr(facts, name)) or _text(known)

        python = told("python")
        watched = any(trial.facts.loop for trial in trials)
        of_python, variables = _variables(facts.variables, [*IDLE, *(() if watched else THREADS)])
        return cls(
            processor=_text(host.cpu),
            cores=host.cores,
            memory_bytes=host.memory_bytes,
            gpus=None if gpus is None else _names(gpus),
            gpu_count=None if gpus is None else len(gpus),
            power_limits_w=limits if limits and len(limits) == len(gpus or ()) else None,
            driver=_text(libraries.driver),
            cuda=told("cuda", libraries.cuda) or _of_amd(told("hip", libraries.hip)),
            cudnn=told("cudnn", libraries.cudnn),
            nccl=told("nccl", libraries.nccl),
            python=python,
            build=told("python_build"),
            gil=told("gil") or ("on" if python and _always_locked(python) else None),
            # launches of earlier versions list the packages of a rank as its software
            torch=told("torch", (facts.packages or facts.software).get("torch")),
            numpy=_text(facts.packages.get("numpy")),
            python_variables=of_python,
            variables=variables,
            **_of_trials(trials),
        )

    @property
    def on_amd(self) -> bool:
        """Return whether the GPUs are AMD's."""
        return (self.cuda or "").startswith(AMD.runtime)

    @property
    def key(self) -> str:
        """Return a hash of the facts, which differs if one differs that forbids to mix."""
        facts = [getattr(self, one.name) for one in fields(self) if one.metadata["forbids"]]
        plain = json.dumps(facts, default=sorted)
        return hashlib.sha256(plain.encode()).hexdigest()[:16]


def _of_amd(version: str | None) -> str | None:
    return None if version is None else f"{AMD.runtime} {version}"


def _text(value: Any) -> str | None:
    return None if value in (None, "") else str(value)


def _names(gpus: Sequence[Gpu]) -> tuple[str, ...]:
    return tuple(sorted({gpu.name or "without a name" for gpu in gpus}))


def _always_locked(python: str) -> bool:
    """Return whether this version of Python has a global interpreter lock in every build."""
    found = re.match(r"(\d+)\.(\d+)", python)
    return found is not None and (int(found[1]), int(found[2])) < _FREE_THREADED


def _variables(
    variables: Mapping[str, str] | None, idle: Collection[str]
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return the variables of Python, and the others, without `idle` ones."""
    if variables is None:
        return None, None
    known = {
        name: f"{name}={value}"
        for name, value in variables.items()
        if name not in ELSEWHERE and name not in idle
    }
    of_python = frozenset(text for name, text in known.items() if name.startswith("PYTHON"))
    return of_python, frozenset(known.values()) - of_python


def _of_trials(trials: Sequence[Trial]) -> dict[str, str]:
    if not trials:
        return {}
    profiled = any(trial.source.profiled for trial in trials)
    return {
        "fakes": "yes" if any(trial.on_fake_gpus for trial in trials) else "no",
        "devices": ", ".join(sorted({trial.case.device_kind for trial in trials})),
        "trace": "imported" if profiled else "none",
    }


ACROSS = tuple(
    dict.fromkeys(
        one.metadata["asked"] for one in fields(Environment) if one.metadata["name"] != FAKES
    )
)
"""The names of facts across which runs can be compared; "python" names four of them."""
_OF_AMD = {
    _spelled(one.metadata["of_amd"]): one.metadata["asked"]
    for one in fields(Environment)
    if one.metadata["of_amd"]
}


def asked_for(texts: str | Iterable[str]) -> frozenset[str]:
    """Return those of `ACROSS` that texts name, each one or several with commas.

    Raises UnknownName for another name. The names of AMD's libraries are known, too.
    """
    every = [texts] if isinstance(texts, str) else texts
    names = [part.strip().lower() for text in every for part in text.split(",") if part.strip()]
    for name in names:
        if name not in {*ACROSS, *_OF_AMD}:
            raise UnknownName(unknown("fact", name, [*ACROSS]))
    return frozenset(_OF_AMD.get(name, name) for name in names)


@dataclass(frozen=True)
class Difference:
    """A fact in which two environments differ, with both values as text.

    `asked` is one of `ACROSS`, or else the name of a fact across which nothing is compared.
    `forbids` says whether measurements in both may not be mixed, nor compared unless asked for. A
    fact that is unknown in one of them never forbids it.
    """

    name: str
    asked: str
    before: str
    after: str
    forbids: bool

    @property
    def unknown(self) -> bool:
        """Return whether one of the environments does not know the fact."""
        return UNKNOWN in (self.before, self.after)

    def __str__(self) -> str:
        return f"{self.name}: {self.before}, then {self.after}"


def differences(before: Environment, after: Environment) -> list[Difference]:
    """Return the facts in which two environments differ, or which only one of them knows.

    A variable whose values cannot be compared is told under its own name.
    """
    found = []
    for one in fields(Environment):
        first, second = getattr(before, one.name), getattr(after, one.name)
        told, asked, shown = (one.metadata[name] for name in ("name", "asked", "shown"))
        known = first is not None and second is not None
        if known and isinstance(first, frozenset):
            unsure = _unsure(first, second)
            for name, values in unsure.items():
                was, became = (UNKNOWN if value == HIDDEN else value for value in values)
                found.append(Difference(name, asked, was, became, forbids=False))
            settled = {f"{name}={value}" for name, values in unsure.items() for value in values}
            first, second = first - second - settled, second - first - settled
        if first == second or (known and one.metadata["alike"](first, second)):
            continue
        if before.on_amd and after.on_amd:
            told = one.metadata["of_amd"] or told
        was, became = (UNKNOWN if value is None else shown(value) for value in (first, second))
        forbids = known and one.metadata["forbids"]
        found.append(Difference(told, asked, was, became, forbids=forbids))
    return found


def _unsure(some: Iterable[str], others: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return both values of each variable that is hidden in both, and in one without a hash."""
    first, second = (
        {name: value for name, value in map(_parted, texts) if value.startswith(HIDDEN)}
        for texts in (some, others)
    )
    both = {name: (first[name], second[name]) for name in sorted(first.keys() & second.keys())}
    return {name: values for name, values in both.items() if HIDDEN in values}


def _parted(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def forbidding(before: Environment, after: Environment) -> list[Difference]:
    """Return those `differences` for which measurements may not be mixed."""
    return [one for one in differences(before, after) if one.forbids]
