"""Options: the types and defaults of command-line options, the cases that options select, and the exit codes."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from dpbench.measure.cluster import Cluster
    from dpbench.records import Case

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE


def last_words(text: str) -> NoReturn:
    """Print `text` to stderr unless stderr is closed, discard further output, and exit with the code for SIGPIPE."""
    with suppress(OSError):
        click.echo(text, err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # flushing their buffers at exit must not fail
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(EXIT_CLOSED)


REPORT = Path("reports/latest/index.html")
store_option = click.option(
    "--store", type=click.Path(path_type=Path), default=Path("dpbench.db"), show_default=True, help="The results file."
)
RUN = "@last, @NAME, or the beginning of an id"
"""The ways to name a run of a store."""
run_option = click.option("--run", "run_id", help=f"The run: {RUN}.  [default: the newest]")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, which cli/shapes.py describes.")
patience_option = click.option(
    "--patience",
    type=click.FloatRange(0),
    help="Maximum seconds to wait until other processes leave the cores idle.  [default: $DPBENCH_PATIENCE, or 30]",
)

QUICK_BUDGET_S = {"cpu": 80.0, "cuda": 180.0, "emulated": 80.0}
"""The budget in seconds of `dpbench run` without arguments, by device kind; on two cores the command ends within 120 s.

The budget for GPUs is larger, because each trial creates a CUDA context and loads libraries.
"""
AUTO_BUDGET_S = 300.0


AXES = (
    "scenario", "models", "own", "strategies", "own_strategies", "schedules", "ladder", "devices", "batch_sizes",
    "batch_per_device",
)  # fmt: skip
"""The options that select cases. If none of them is given, a run is short and uses default cases."""
EMPTY = "give at least one value, or leave the option out"


class Names(click.ParamType[tuple[str, ...]]):
    """A comma-separated list of names."""

    name = "a,b,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the names in a comma-separated text; fail for an empty list."""
        return value if isinstance(value, tuple) else self._parts(value, param, ctx)

    def _parts(self, value: str, param: Any, ctx: Any) -> tuple[str, ...]:
        parts = tuple(part.strip() for part in value.split(",") if part.strip())
        return parts or self.fail(f"{value!r} is an empty list; {EMPTY}", param, ctx)


class Schedules(click.ParamType[tuple[str, ...]]):
    """A list of schedules, each of which is the name of a rung or a combination of switches."""

    name = "rung,switch=position,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the schedules in a text; fail for an empty list.

        Commas separate rungs and switches. Adjacent switches form one schedule; `;` separates two such schedules.
        """
        from dpbench.records import plan

        if isinstance(value, tuple):
            return value
        return tuple(plan.split_schedules(value)) or self.fail(f"{value!r} is an empty list; {EMPTY}", param, ctx)


class Numbers(click.ParamType[tuple[int, ...]]):
    """A comma-separated list of integers."""

    name = "1,2,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the integers in a comma-separated text; fail for an empty list, and for other parts."""
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in value.split(",") if part.strip())
            return found or self.fail(f"{value!r} is an empty list; {EMPTY}", param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not a comma-separated list of integers, such as 1,2,4", param, ctx)


class Tag(click.ParamType[tuple[str, str]]):
    """A key and a value that the user gives to a run."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the key and the value; fail if one of them is missing."""
        if isinstance(value, tuple):
            return value
        key, _, text = value.partition("=")
        return (key, text) if key and text else self.fail(f"{value!r} is not a tag, such as driver=550", param, ctx)


class Switches(click.ParamType[tuple[bool, ...]]):
    """A comma-separated list of off and on."""

    name = "off,on"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas; fail on an empty list and on any other word."""
        if isinstance(value, tuple):
            return value
        known = {"off": False, "on": True}
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts or not {*parts} <= {*known}:
            self.fail(f"{value!r} is neither off, on, nor off,on", param, ctx)
        return tuple(known[part] for part in parts)


class DeviceIds(click.ParamType["tuple[int | str, ...]"]):
    """A comma-separated list of GPUs: CUDA ordinals, or UUIDs, which may be abbreviated."""

    name = "0,1,...|GPU-..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Split at commas; fail on an empty list and on a part that is neither an integer nor begins with GPU-."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail(f"{value!r} is an empty list; {EMPTY}", param, ctx)
        if not all(part.isdigit() or part.startswith("GPU-") for part in parts):
            self.fail(f"{value!r} is not a list of GPUs, such as 0,1 or GPU-8d3e,GPU-41fa", param, ctx)
        return tuple(int(part) if part.isdigit() else part for part in parts)


class Rounds(click.ParamType["int | str"]):
    """A number of rounds, or `auto`."""

    name = "n|auto"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return `auto` or a positive integer; fail for any other value."""
        if value != "auto" and not (str(value).isdigit() and int(value) > 0):
            self.fail(f"{value!r} is neither a number of rounds (1 or more) nor auto", param, ctx)
        return value if value == "auto" else int(value)


class Bytes(click.ParamType[int]):
    """A number of bytes, with or without a unit."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number of bytes; fail for a value that is not a number, or has an unknown unit."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", str(value), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is not a number of bytes, such as 8GiB, 512MiB or 1000000", param, ctx)
        power = " KMGT".index((found[2] or " ").upper())
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def cases_of(options: dict[str, Any], cluster: Cluster | None = None) -> tuple[list[Case], float | None]:
    """Return the cases that the options select, and the time budget of the run in seconds, or None for no budget.

    Options that are not given have defaults for this machine.
    `cluster` has the ranks of a launch by torchrun or srun, whose numbers are then the default numbers of devices.
    """
    from dpbench.hardware.nvml import cuda_device_count, cuda_ordinals
    from dpbench.hardware.provenance import torch_has_cuda, usable_cores
    from dpbench.records import plan, registry

    if options["profile"] and options["paired"]:
        raise click.UsageError("--profile needs one case per process: leave out --paired")
    quick = not any(options[axis] for axis in AXES)
    for option in ("launcher", "ladder", "paired", "profile", "self_check", "find_max_batch") if cluster else ():
        if options[option]:
            raise click.UsageError(
                f"--{option.replace('_', '-')} is for one machine: leave it out of a launch by ranks"
            )
    for axis, option in (("strategies", "strategies"), ("own_strategies", "strategy"), ("schedules", "schedules")):
        if options["ladder"] and options[axis]:
            raise click.UsageError(f"--ladder selects the strategies and the schedules: leave out --{option}")
    ids = tuple(cuda_ordinals([one])[0] if isinstance(one, str) else one for one in options["device_ids"])
    gpus = len(ids) or cuda_device_count()
    kind = options["device_kind"] or ("cuda" if gpus and torch_has_cuda() else "cpu")
    # the default sweep has four devices at most: its time grows with their number
    available = {"cuda": gpus, "cpu": min(usable_cores(), 4), "emulated": 4}[kind]
    placement = options["placement"] or ("colocated" if kind == "cuda" and gpus == 1 and not cluster else "spread")
    for name in options["own"]:
        registry.check_module(name)
    devices = options["devices"] or (cluster.counts() if cluster else plan.default_devices(available, placement))
    swept = {
        "models": (*(options["models"] or (() if options["own"] else ("mlp", "resnet18"))), *options["own"]),
        "devices": devices, "device_ids": ids, "device_kind": kind, "placement": placement,
        "batch_sizes": options["batch_sizes"] or (() if options["batch_per_device"] else (64,)),
        "batch_per_device": options["batch_per_device"] or (), "size": options["size"],
        "precision": options["precision"], "device_memory_bytes": options["device_memory"],
        "inputs": options["inputs"], "read_loss": options["read_loss"], "zero_grad": options["zero_grad"],
        "compile": options["compile"],
    }  # fmt: skip
    if options["scenario"]:
        plain = {
            "precision": "fp32",
            "inputs": ("pinned",),
            "read_loss": (0,),
            "zero_grad": ("none",),
            "compile": (False,),
        }
        selecting = ("strategies", "schedules", "ladder", "devices", "device_ids", "batch_per_device")
        for axis in (*selecting, *plain):
            if options[axis] and options[axis] != plain.get(axis):
                name = axis.replace("_", "-")
                raise click.UsageError(f"--scenario selects the cases: leave out --{name}")
        chosen = {"models": swept["models"] if options["models"] or options["own"] else ("mlp",)}
        cases = plan.seeds(kind, **chosen, batch_sizes=swept["batch_sizes"], size=options["size"])
    elif options["ladder"]:
        swept["devices"] = options["devices"] or (max(2, *devices),)
        cases = plan.ladder(**swept)
        cases += plan.engine_cost(**swept) if kind == "cpu" else []
    else:
        schedules = tuple(one for given in options["schedules"] for one in given)
        usual = plan.default_strategies("launch" if cluster else kind)
        strategies = (*(options["strategies"] or usual), *options["own_strategies"])
        cases = plan.sweep(strategies=strategies, schedules=schedules or ("reference",), **swept)
        cases += plan.engine_cost(**swept) if quick and kind == "cpu" and not cluster else []
    if cluster:
        cases = list(dict.fromkeys(cluster.placed(case) for case in cases))
    return cases, options["budget"] or (QUICK_BUDGET_S[kind] if quick else None)
