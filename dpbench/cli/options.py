"""Options: the types of command-line options, options that several commands have, and the exit codes."""

from __future__ import annotations

import os
import re
import signal
import sys
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import Any, NoReturn

import click

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


def open_streams() -> None:
    """Open the null device for each standard stream that is closed, so that no other file gets its descriptor."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w" if number else "r", encoding="utf-8"))  # noqa: SIM115  # for good


REPORTS = Path("reports")
LATEST = REPORTS / "latest" / "index.html"
PAGE = f"The page to write.  [default: {LATEST}, and the run's page below {REPORTS}/runs/]"
"""The help of the options that name the report page."""
STORE = Path("dpbench.db")
store_option = click.option(
    "--store", type=click.Path(path_type=Path), default=STORE, show_default=True, help="The results file."
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

EMPTY = "give at least one value, or leave the option out"


class Detail(Enum):
    """The amount of progress that `dpbench run` prints."""

    QUIET = auto()
    """No progress."""
    USUAL = auto()
    """One line per trial, and a live display on a terminal."""
    VERBOSE = auto()
    """Also the stages, steps and memory of each trial."""


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
    """A tag, key=value, that the user gives to a run."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the key and the value; fail if one of them is missing."""
        if isinstance(value, tuple):
            return value
        key, _, text = value.partition("=")
        return (key, text) if key and text else self.fail(f"{value!r} is not key=value, such as driver=550", param, ctx)


class Switches(click.ParamType[tuple[bool, ...]]):
    """A comma-separated list of off and on."""

    name = "off,on"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return True for each on and False for each off in a text; fail for an empty list, and for other words."""
        if isinstance(value, tuple):
            return value
        known = {"off": False, "on": True}
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts or not {*parts} <= {*known}:
            self.fail(f"{value!r} is not a list of off and on, such as off,on", param, ctx)
        return tuple(known[part] for part in parts)


class Loaders(click.ParamType[tuple[int, ...]]):
    """A comma-separated list, each part of which is a DataLoader's number of workers, or off."""

    name = "off,0,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the numbers in a text, with -1 for off; fail for an empty list, and for other parts."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts or not all(part == "off" or part.isdigit() for part in parts):
            self.fail(f"{value!r} is not a list of off and numbers of workers, such as off,0,2", param, ctx)
        return tuple(-1 if part == "off" else int(part) for part in parts)


class DeviceIds(click.ParamType["tuple[int | str, ...]"]):
    """A comma-separated list of GPUs: CUDA ordinals, or UUIDs, which may be abbreviated."""

    name = "0,1,...|GPU-..."

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the GPUs in a text, each as an ordinal (int) or a UUID (str).

        Fail for an empty list, and for a part that is not an integer and does not begin with GPU-.
        """
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


MOST_BYTES = 1e18


class Bytes(click.ParamType[int]):
    """A number of bytes, with or without a unit."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the number of bytes; fail for a value that is not a number, is too large, or has an unknown unit."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", str(value), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is not a number of bytes, such as 8GiB, 512MiB or 1000000", param, ctx)
        power = " KMGT".index((found[2] or " ").upper())
        size = float(found[1]) * (1024 if found[3] else 1000) ** power
        return int(size) if size < MOST_BYTES else self.fail(f"{value} is more than {MOST_BYTES:.0e} bytes", param, ctx)
