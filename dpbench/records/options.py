"""Options: the only list of the options of a run, with the checks of their values.

The command line and `dpbench.run` make their options from the fields of `Options`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from reprlib import repr as abridged
from typing import Any, Self

from dpbench.records import objects, registry
from dpbench.records.case import MODES, TRAIN, Case
from dpbench.records.errors import UnknownName, UsageError
from dpbench.records.spelling import dashed
from dpbench.records.trial import FINAL

DEVICE_KINDS = ("cpu", "cuda", "emulated")
PLACEMENTS = ("spread", "colocated")
OPTIMIZERS = ("sgd", "adam", "adamw", "own")
"""The optimizers of a step; the last one is that of the user's model."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PREDICTABLE = ("fp32", "tf32", "bf16")
"""The precisions that `dpbench predict` knows."""
SIZES = ("small", "full")
INPUTS = ("pageable", "pinned", "device")
MOST = 10**9
"""The largest number of devices, and the largest batch size, of a sweep."""
AUTO = "auto"
"""The value of `rounds` with which a run adds rounds until its answers are settled."""
CASES = "What to measure"
"""The group of the options that select cases; without any, a run is short, with default cases."""
PLACE, TIME, STEP = "Where", "How long", "Settings of the step"
ADVANCED, OUTPUT = "Advanced", "Output"
"""The groups of the options that few users need, and of those for the results."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a run: its name, its default, its values and its help.

    A text must be among `choices` and match `pattern`, if given; a number lies between `least` and
    `most`. `expected` describes the values in an error, and `form` their texts in the help; if
    empty, both follow from the other facts. `words` and `parse` convert texts that are neither
    numbers nor names. A `repeated` option is given once per value; the text of any other list has
    commas. An option with `also`, a second name, may be given several times, and each text has
    commas. `kinds` has the names of the types of a value, or of those in its list.
    """

    group: str
    help: str
    choices: tuple[str, ...] = ()
    pattern: str = ".*"
    least: float = 0
    most: float = math.inf
    expected: str = ""
    form: str = ""
    words: Mapping[str, int] = field(default_factory=dict)
    parse: Callable[[str], Any] | None = None
    repeated: bool = False
    also: str = ""
    name: str = ""
    default: Any = None
    listed: bool = False
    kinds: Sequence[str] = ()

    @property
    def flag(self) -> bool:
        """Return whether the option has no value on the command line."""
        return self.kinds == ["bool"] and not self.listed

    @property
    def spelled(self) -> str:
        """Return the option as on the command line, such as --batch-sizes."""
        return dashed(self.name)

    def text(self, value: Any) -> str:
        """Return the text that gives `value` on the command line."""
        if isinstance(value, tuple):
            return ",".join(map(self.text, value))
        named = (word for word, meaning in self.words.items() if meaning == value)
        return next(named, str(value))

    def read(self, text: str) -> Any:
        """Return the value that a text gives, or one of the values of a repeated option.

        Raises ValueError for a wrong text; the message does not name the option.
        """
        value: Any = self._word(text)
        if self.listed and not self.repeated:
            value = _several(self._word(part.strip()) for part in text.split(",") if part.strip())
        self.check(value)
        return value

    def _word(self, text: str) -> Any:
        """Return the value of a text, or the text itself, which `check` then refuses."""
        if self.parse:
            return self.parse(text)
        if text in self.words:
            return self.words[text]
        for kind in (int, float):
            if kind.__name__ in self.kinds:
                with suppress(ValueError):
                    return kind(text)
        return text

    def check(self, value: Any) -> None:
        """Raise ValueError for a wrong value; the message does not name the option."""
        for item in value if isinstance(value, tuple) else (value,):
            if not self._fits(item):
                plain = isinstance(item, str | int | float)
                got = abridged(item) if plain else f"a value of the type {type(item).__name__}"
                near = registry.near(str(item), self.choices)
                raise UsageError(f"must be {self._expected}, got {got}{near}")

    def _fits(self, item: Any) -> bool:
        if isinstance(item, str):
            known = not self.choices or item in self.choices
            return "str" in self.kinds and known and bool(re.fullmatch(self.pattern, item, re.S))
        if isinstance(item, bool):  # True is an int in Python, but not a number of devices
            return "bool" in self.kinds
        types = {"int": (int,), "float": (int, float)}
        number = any(isinstance(item, types.get(kind, ())) for kind in self.kinds)
        return number and self.least <= item <= self.most

    @property
    def _expected(self) -> str:
        if self.expected or self.kinds == ["bool"]:
            return self.expected or "off (False) or on (True)"
        least, most = f"of at least {self.least:g}", f"from {self.least:g} to {self.most:.12g}"
        bounds = least if self.most == math.inf else most
        integer = f"integers (such as 1,2,4) {bounds}" if self.listed else f"an integer {bounds}"
        number = {"int": [integer], "float": [f"a number {bounds}"]}.get(self.kinds[0], [])
        return " or ".join([*number, *self.choices]) or "a text"


def _several(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the values of a list; raise UsageError if there are none."""
    found = tuple(values)
    if not found:
        raise UsageError("is an empty list: give at least one value, or leave the option out")
    return found


def _option(default: Any, group: str, help: str, **facts: Any) -> Any:
    return field(default=default, metadata={"option": Option(group=group, help=help, **facts)})


def _bytes(text: str) -> int | str:
    """Return the number of bytes of a text such as 8GiB, and any other text unchanged."""
    match = re.fullmatch(r"(\d{1,30}(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text, re.IGNORECASE)
    if not match:
        return text
    power = " KMGT".index((match[2] or " ").upper())
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run: each field is one, with its default and what the help says about it.

    An empty value means the default on this machine, which `measure.selection` inserts. Raises
    ValueError for a wrong value.
    """

    models: tuple[str, ...] = _option(
        (),
        CASES,
        "Models: reference models, and your own as file.py:name or package.module:name; a library's"
        " as library:name.  [default: mlp,resnet18]",
        expected="names of models, such as mlp, file.py:name or package.module:name",
        form="NAME,...",
        also="model",
    )
    strategies: tuple[str, ...] = _option(
        (),
        CASES,
        "Training strategies: dpbench's, such as ddp or dp[cached], and your own as file.py:name or"
        " package.module:name. If all are your own, the default ones are measured beside them."
        "  [default: all that this machine can run]",
        expected="names of strategies, such as dp, dp[cached], file.py:name or package.module:name",
        form="NAME,...",
        also="strategy",
    )
    schedules: tuple[str, ...] = _option(
        (),
        CASES,
        "Schedules of the strategy dp where --strategies gives none in brackets; see dpbench list"
        " schedules.  [default: reference]",
    )
    ladder: bool = _option(
        False,
        CASES,
        "Measure the ladder: all schedules of dp, and the strategies single and ddp. Uses all"
        " available devices unless --devices is given; two models take about three minutes.",
    )
    together: tuple[str, ...] = _option(
        (),
        CASES,
        "Two models, such as mlp,resnet18: measure each alone, and while the other runs beside it"
        " on as many other devices.",
    )
    devices: tuple[int, ...] = _option(
        (),
        CASES,
        "Numbers of devices.  [default: 1, 2 and all equal GPUs; without GPUs, 1, 2 and at most 4;"
        " colocated: 1,2]",
        least=1,
        most=MOST,
    )
    batch_sizes: tuple[int, ...] = _option(
        (), CASES, "Global batch sizes (strong scaling).  [default: 64]", least=1, most=MOST
    )
    batch_per_device: tuple[int, ...] = _option(
        (), CASES, "Batch sizes per device (weak scaling).", least=1, most=MOST
    )
    device_kind: str = _option(
        "",
        PLACE,
        "cuda: GPUs, those of AMD too.  [default: cuda if there is a GPU]",
        choices=DEVICE_KINDS,
    )
    device_ids: tuple[int | str, ...] = _option(
        (),
        PLACE,
        "The GPUs to use, in order, by index or by UUID, which may be abbreviated.  [default: from"
        " 0]",
        pattern="GPU-.*",
        expected="a list of GPUs, such as 0,1 or GPU-8d3e,GPU-41fa",
        form="0,1,...|GPU-...",
    )
    placement: str = _option("", PLACE, "colocated: replicas share one GPU.", choices=PLACEMENTS)
    rounds: int | str = _option(
        AUTO,
        TIME,
        "Number of rounds, each of which measures every case in a fresh process. auto: four, and"
        " then more of the cases on which an answer still depends.",
        choices=(AUTO,),
        least=1,
        most=10_000,
        form="N|auto",
    )
    budget: float | None = _option(
        None,
        TIME,
        "Maximum seconds for the whole run, at most half of them for --patience.  [default: 110, or"
        " 600 on GPUs, for default cases; otherwise none, and no round for undecided answers begins"
        " after 300 s]",
        least=1,
    )
    limit: float = _option(120.0, TIME, "Maximum seconds per trial.", least=1, most=1e6)
    patience: float | None = _option(
        None,
        TIME,
        "Maximum seconds to wait until other processes leave the cores idle.  [default:"
        " $DPBENCH_PATIENCE, or 30]",
    )
    size: str = _option("small", STEP, "Model size.", choices=SIZES)
    precision: str = _option(
        "fp32",
        STEP,
        "fp32: torch's defaults; tf32: float32 products in TF32; bf16, fp16: autocast, in fp16 with"
        " a GradScaler.",
        choices=PRECISIONS,
    )
    optimizer: str = _option(
        "sgd",
        STEP,
        "sgd (momentum), adam, adamw, or own: the optimizer, the scheduler and the clip_norm of"
        " your own model.",
        choices=OPTIMIZERS,
    )
    compile: tuple[bool, ...] = _option(
        (False,),
        STEP,
        "Compile the module with torch.compile; off,on measures both.",
        words={"off": False, "on": True},
        form="off,on",
    )
    mode: tuple[str, ...] = _option(
        (TRAIN,),
        STEP,
        "The work of a step: train; or the forward alone, with autograd (forward), under no_grad"
        " (no_grad), or under inference_mode (inference).",
        choices=MODES,
    )
    loader: tuple[int, ...] = _option(
        (Case.loader,),
        STEP,
        "Take each batch from a DataLoader with this number of workers; 0 loads in the loop, off"
        " makes the batches before the loop. The wait for a batch is the phase data.",
        least=Case.loader,
        words={"off": Case.loader},
        expected=f"off ({Case.loader}) or a number of workers",
        form="off,0,...",
    )
    inputs: tuple[str, ...] = _option(
        ("pinned",),
        STEP,
        "Place of the batch before each step: pageable or pinned for host memory, device for device"
        " 0.",
        choices=INPUTS,
    )
    read_loss: tuple[int, ...] = _option(
        (0,),
        STEP,
        "Read the loss as a number every N steps, as loops that print the loss do; 0: never.",
    )
    zero_grad: tuple[str, ...] = _option(
        ("none",),
        STEP,
        "How the loop clears gradients: none drops them, zero fills them with zeros in place.",
        choices=("none", "zero"),
    )
    paired: bool = _option(
        False,
        ADVANCED,
        "Measure the cases of a model in one process, with alternating blocks of steps: ratios are"
        " far more stable, but the memory of each case is unknown. ddp still runs in separate"
        " processes.",
    )
    unverified: bool = _option(
        False,
        ADVANCED,
        "Time steps without comparing their gradients with the reference; every figure is labelled"
        " UNVERIFIED.",
    )
    retry: tuple[str, ...] = _option(
        (), ADVANCED, "Measure trials with these statuses again.", choices=FINAL
    )
    profile: bool = _option(
        False, ADVANCED, "Profile one additional step of each trial; write Chrome traces."
    )
    find_max_batch: bool = _option(
        False, ADVANCED, "Search for the largest batch of each case that fits in memory."
    )
    device_memory: int = _option(
        0,
        ADVANCED,
        "Memory of each emulated device, such as 8GiB.",
        most=1e18,
        expected="a number of bytes, such as 8GiB, 512MiB or 1000000",
        form="BYTES",
        parse=_bytes,
    )
    name: str = _option("", OUTPUT, "A name for the run, with which other commands find it: @NAME.")
    tag: tuple[str, ...] = _option(
        (),
        OUTPUT,
        "A tag that is stored with the run; may be repeated.",
        pattern="[^=]+=.+",
        expected="key=value, such as driver=550",
        form="KEY=VALUE",
        repeated=True,
    )

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Return the options with these values from a caller in Python.

        None and () mean the default. Lists become tuples, and one value becomes a tuple of one
        value. Values under both names of an option are joined. Raises ValueError for a wrong value,
        and TypeError for an unknown option.
        """
        named: dict[str, Any] = {}
        for name, value in given.items():
            if value in (None, ()):
                continue
            option = OPTIONS.get(ALSO.get(name, name))
            if option is None:
                raise TypeError(registry.unknown("argument", name, [*OPTIONS]))
            if not option.listed:
                named[option.name] = value
                continue
            one = isinstance(value, str) or not isinstance(value, Iterable)
            with _naming(option):
                several = (value,) if one else _several(value)
            named[option.name] = (*named.get(option.name, ()), *several)
        return cls(**named)

    def __post_init__(self) -> None:
        for option in self._given():
            with _naming(option):
                option.check(getattr(self, option.name))
        if self.optimizer == "own" and not (self.models and all(map(objects.is_own, self.models))):
            raise UsageError(
                "{} takes the optimizer of your model's file",
                option="optimizer",
                value="own",
                remedy="give {models:FILE.py:NAME}, and no reference model",
            )

    def _given(self) -> list[Option]:
        return [one for one in OPTIONS.values() if getattr(self, one.name) != one.default]

    @property
    def quick(self) -> bool:
        """Return whether no option of the group `CASES` is given."""
        return not any(option.group == CASES for option in self._given())

    def refuse(self, names: Iterable[str], why: str, *, by: str = "") -> None:
        """Raise UsageError if one of the options `names` is given.

        {} in `why` is the option `by`, which excludes them, or else the given option.
        """
        given = {option.name: option for option in self._given()}
        for option in (given[name] for name in names if name in given):
            about = OPTIONS.get(by, option)
            raise UsageError(
                why,
                option=about.name,
                value=True if about.flag else "",
                remedy=f"leave out {{{option.name}{':True' if option.flag else ''}}}",
            )

    def command(self, *more: str, config: bool = True) -> str:
        """Return these options, and the arguments `more`, as the text of a `dpbench run` command.

        With `config=False`, the command ignores the defaults in files.
        """
        words = ["dpbench", "run"] if config else ["dpbench", "--no-config", "run"]
        for option in self._given():
            value = getattr(self, option.name)
            for item in value if option.repeated else (value,):
                words += [option.spelled, *([] if item is True else [option.text(item)])]
        return shlex.join([*words, *more])


@contextmanager
def _naming(option: Option) -> Iterator[None]:
    """Name the option in an error of a check."""
    try:
        yield
    except ValueError as error:
        raise UsageError("{} {why}", option=option.name, why=error) from None


OPTIONS: dict[str, Option] = {
    one.name: replace(
        one.metadata["option"],
        name=one.name,
        default=one.default,
        listed=str(one.type).startswith("tuple"),
        kinds=re.findall("int|float|str|bool", str(one.type)),
    )
    for one in fields(Options)
}
"""The options by name, in the order of the help."""
ALSO = {one.also: one.name for one in OPTIONS.values() if one.also}
"""The options' names by their second names."""


def tags(texts: Iterable[str]) -> dict[str, str]:
    """Return the tags that texts such as "driver=550" give; raise UsageError for a repeated key."""
    found: dict[str, str] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key in found:
            raise UsageError(
                "{} gives the tag {key} twice",
                option="tag",
                remedy="leave out one of its values",
                key=key,
            )
        found[key] = value
    return found


def check_names(models: Sequence[str], strategies: Sequence[str], devices: Sequence[int]) -> None:
    """Raise LookupError for unknown models or strategies, ValueError for an empty axis."""
    for model in models:
        check_model(model)
    for strategy in strategies:
        if objects.is_own(strategy):
            _check_own("strategies", strategy)
        _check_known("strategies", strategy)
    for name, found in (("models", models), ("strategies", strategies)):
        if not found:
            raise UsageError(
                "{} is empty",
                option=name,
                remedy="give any of {known}",
                known=", ".join(registry.names(name)),
            )
    if not devices:
        raise UsageError("{} is empty", option="devices", remedy="give numbers, such as 1,2")


def check_model(name: str) -> None:
    """Raise LookupError if there is no model `name`, of dpbench or of the user."""
    if objects.is_own(name):
        _check_own("models", name)
        return
    _check_known("models", name, "; for your own model, give {models:file.py:name}")


def _check_own(option: str, name: str) -> None:
    """Raise UnknownName if there is no object of the user `name`, or if a list cannot name it."""
    if "," in name:
        raise UnknownName(
            "{} has a comma, which separates names in a list",
            option=option,
            value=name,
            remedy="rename the file or its folder, or give package.module:NAME",
        )
    objects.check(name, option)


def _check_known(option: str, name: str, more: str = "") -> None:
    """Raise UnknownName, which has the option, if a name is not that of a plug-in."""
    try:
        registry.check(option, name)
    except LookupError as error:
        raise UnknownName("{why}" + more, option=option, value=name, why=error) from error


def check_placement(devices: Sequence[int], kind: str, ids: Sequence[int], placement: str) -> None:
    """Raise ValueError if the placement or the device ids do not suit the devices."""
    others = {"cpu": "logical CPU devices", "emulated": "emulated devices"}.get(kind)
    if others and ids:
        raise UsageError(
            "{} selects GPUs, but {others} have no ids",
            option="device_ids",
            remedy="leave out {}",
            others=others,
        )
    if others and placement == "colocated":
        raise UsageError(
            "{} puts all replicas on one GPU: for {others}, give {placement:spread}",
            option="placement",
            value="colocated",
            others=others,
        )
    if len(set(ids)) < len(ids):
        raise UsageError(
            "{} names a GPU twice: {ids}",
            option="device_ids",
            remedy="to put all replicas on one GPU, give {placement:colocated}",
            ids=[*ids],
        )
    most = max(devices, default=0)
    if ids and placement == "spread" and most > len(ids):
        raise UsageError(
            "{most} devices are requested, but {} names only {ids}",
            option="device_ids",
            remedy="give more ids or fewer devices",
            most=most,
            ids=[*ids],
        )


def check_memory(kind: str, size: int) -> None:
    """Raise ValueError for a memory limit of devices that are not emulated."""
    if size and kind == "cpu":
        raise UsageError(
            "{} limits emulated devices; logical CPU devices share the host's memory",
            option="device_memory",
            remedy="give {device_kind:emulated}",
        )
    if size and kind == "cuda":
        raise UsageError(
            "the memory of a GPU is fixed, and {} limits only emulated devices",
            option="device_memory",
            remedy="leave out {}",
        )


def check_precision(precision: str, kind: str) -> None:
    """Raise ValueError if a precision has no effect on this kind of device."""
    if precision == "tf32" and kind != "cuda":
        raise UsageError(
            "{} is for GPUs, and the devices are {kind} devices",
            option="precision",
            value=precision,
            remedy="give {precision:fp32} or bf16",
            kind=kind,
        )
    if precision != "fp32" and kind == "emulated":
        raise UsageError(
            "emulated devices have no autocast",
            option="precision",
            value=precision,
            remedy="leave out {}, or give {device_kind:cpu} or cuda",
        )


def check_habits(kind: str, habits: Mapping[str, Sequence[Any]]) -> None:
    """Raise ValueError if a habit's value is unfit for the devices or another habit.

    `habits` maps each name in `HABITS` to the values of that axis.
    """
    others = {*habits["inputs"]} - {"pinned"}
    if kind == "cpu" and others:
        raise UsageError(
            "{} has no effect on logical CPU devices, which read the host's memory",
            option="inputs",
            value=others.pop(),
            remedy="leave out {inputs}",
        )
    if kind == "emulated" and "pageable" in others:
        raise UsageError(
            "{} has no effect on emulated devices",
            option="inputs",
            value="pageable",
            remedy="give {inputs:pinned} or device",
        )
    if any(habits["compile"]) and kind == "emulated":
        raise UsageError(
            "torch.compile cannot trace the tensors of emulated devices",
            option="compile",
            remedy="leave out {}",
        )
    if any(habits["neighbour"]) and kind == "emulated":
        raise UsageError(
            "emulated devices run one at a time, so two models cannot run concurrently on them",
            option="together",
            remedy="give {device_kind:cpu} or cuda",
        )
    for model in filter(None, habits["neighbour"]):
        check_model(model)
    _check_combined(habits)


def _check_combined(habits: Mapping[str, Sequence[Any]]) -> None:
    if max(habits["loader"]) >= 0 and "device" in habits["inputs"]:
        raise UsageError(
            "a DataLoader puts batches in the host's memory, so {} has no effect",
            option="inputs",
            value="device",
            remedy="leave out {loader} or {inputs}",
        )
    for name in ("read_loss", "zero_grad"):
        if {*habits["mode"]} - {TRAIN} and {*habits[name]} - {getattr(Case, name)}:
            raise UsageError(
                "{} has no effect on a forward alone, which has no loss and no gradients",
                option=name,
                remedy="leave out {}, or give {mode:train}",
            )
