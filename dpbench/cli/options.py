"""Options: the types, the shared options, the defaults and the exit codes of the command line.

Defaults come from `dpbench.toml`, or from [tool.dpbench] in `pyproject.toml`, in the working
folder. A table such as [run] has the defaults of one command; its keys are the long names of
options. The keys `store` and `patience` outside of these tables apply to all commands that have the
option. The command line has precedence. The help of a command ends with the defaults that come from
a file, and with the command's exit codes.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from reprlib import repr as abridged
from typing import Any, NoReturn

import click
from click.core import ParameterSource

from dpbench.api import LATEST, REPORTS, STORE
from dpbench.records.files import UnreadableFile, text_of
from dpbench.records.visible import everywhere

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE
PAGE = f"The page to write.  [default: {LATEST}, and the run's page below {REPORTS}/runs/]"
"""The help of the options that name the report page."""
store_option = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=STORE,
    show_default=True,
    help="The results file.",
)
RUN = "@last, @NAME, or the beginning of an id"
"""The ways to name a run of a store."""
run_option = click.option("--run", "run_id", help=f"The run: {RUN}.  [default: the newest]")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, which cli/shapes.py describes."
)
patience_option = click.option(
    "--patience",
    type=click.FloatRange(0),
    help=(
        "Maximum seconds to wait until other processes leave the cores idle.  [default:"
        " $DPBENCH_PATIENCE, or 30]"
    ),
)
EMPTY = "give at least one value, or leave the option out"
MOST_BYTES = 1e18
OWN, PROJECT = "dpbench.toml", "pyproject.toml"
SHARED = ("store", "patience")
"""The options whose defaults a file may set for all commands, outside of their tables."""
EXITS = {0: "done", 2: "a file cannot be read or written", 64: "wrong usage"}
"""The meaning of the exit codes of most commands."""


def last_words(text: str) -> NoReturn:
    """Print `text` to stderr, discard further output, and exit with the code for SIGPIPE.

    Nothing is printed if stderr is closed.
    """
    with suppress(OSError):
        click.echo(text, err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # flushing their buffers at exit must not fail
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(EXIT_CLOSED)


def open_streams() -> None:
    """Open the null device for closed standard streams: no other file may get their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            # for good
            setattr(sys, name, Path(os.devnull).open("w" if number else "r", encoding="utf-8"))  # noqa: SIM115


class Listed(click.ParamType[tuple[Any, ...]]):
    """The type of a comma-separated list.

    `part` converts one part; it raises ValueError for a text that it does not accept. `expected`
    describes the list in the message for such a text.
    """

    def __init__(self, name: str, part: Callable[[str], Any], expected: str = "") -> None:
        self.name = name
        self._part = part
        self._expected = expected

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the values of all parts; fail for an empty list or a part that is not accepted."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        try:
            return tuple(map(self._part, parts)) or self.fail(
                f"{value!r} is an empty list; {EMPTY}", param, ctx
            )
        except ValueError:
            self.fail(f"{value!r} is not {self._expected}", param, ctx)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


NAMES = Listed("a,b,...", str)
NUMBERS = Listed("1,2,...", int, "a comma-separated list of integers, such as 1,2,4")
SWITCHES = Listed(
    "off,on",
    lambda text: ("off", "on").index(text) == 1,
    "a list of the words off and on, such as off,on",
)
LOADERS = Listed(
    "off,0,...",
    lambda text: -1 if text == "off" else _natural(text),
    "a list in which each entry is off or a number of workers, such as off,0,2",
)
"""The type of a list of DataLoader settings: a number of workers, or -1 for no DataLoader."""
DEVICE_IDS = Listed(
    "0,1,...|GPU-...",
    lambda text: text if text.startswith("GPU-") else _natural(text),
    "a list of GPUs, such as 0,1 or GPU-8d3e,GPU-41fa",
)
"""The type of a list of GPUs: CUDA ordinals (int), or UUIDs (str), which may be abbreviated."""


class Tag(click.ParamType[tuple[str, str]]):
    """A tag, key=value, that the user gives to a run."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the key and the value; fail if one of them is missing."""
        if isinstance(value, tuple):
            return value
        key, _, text = value.partition("=")
        return (
            (key, text)
            if key and text
            else self.fail(f"{value!r} is not key=value, such as driver=550", param, ctx)
        )


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
        """Return the number of bytes; fail for no number, a too large one, or an unknown unit."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", str(value), re.IGNORECASE)
        if not match:
            self.fail(
                f"{value!r} is not a number of bytes, such as 8GiB, 512MiB or 1000000", param, ctx
            )
        power = " KMGT".index((match[2] or " ").upper())
        size = float(match[1]) * (1024 if match[3] else 1000) ** power
        return (
            int(size)
            if size < MOST_BYTES
            else self.fail(f"{value} is more than {MOST_BYTES:.0e} bytes", param, ctx)
        )


class Documented(click.Command):
    """A command whose help ends with the defaults from a file and with the command's exit codes."""

    def __init__(self, *args: Any, exits: Mapping[int, str] = EXITS, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exits = exits

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Add to the help the defaults that a file gives, and the exit codes."""
        given = ctx.default_map or {}
        if shown := [
            (max(option.opts, key=len), _shown(given[option.name]))
            for option in self.params
            if option.name in given
        ]:
            with formatter.section(f"Defaults from {ctx.find_root().obj}"):
                formatter.write_dl(shown)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in self.exits.items()])


def _shown(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)


def read(folder: Path, commands: Mapping[str, click.Command]) -> tuple[str, dict[str, Any]]:
    """Return the name of the file in `folder` with defaults, and these as click's `default_map`.

    Both are empty without such a file. Raises UnreadableFile if a file is not TOML, and UsageError
    if two files have defaults, or if a key is unknown.
    """
    own_table, project = (_toml(folder / name) for name in (OWN, PROJECT))
    ours = _table(_table(project, "tool", PROJECT), "dpbench", PROJECT)
    if own_table and ours:
        raise click.UsageError(
            f"{OWN} and [tool.dpbench] in {PROJECT} both have defaults: remove one of them"
        )
    if own_table:
        return OWN, _default_map(own_table, OWN, commands)
    return (PROJECT, _default_map(ours, PROJECT, commands)) if ours else ("", {})


def _toml(path: Path) -> dict[str, Any]:
    import tomllib

    if not path.is_file():
        return {}
    try:
        content: dict[str, Any] = everywhere(tomllib.loads(text_of(path)))
    # ValueError also for invalid UTF-8, and for numbers with too many digits
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"{path.name} is not valid TOML: {error}") from None
    return content


def _table(outer: Mapping[str, Any], key: str, file: str) -> dict[str, Any]:
    value = outer.get(key, {})
    if not isinstance(value, dict):
        raise click.UsageError(f"{file}: {key!r} is {abridged(value)}; it must be a table")
    return value


def _default_map(
    table: Mapping[str, Any], file: str, commands: Mapping[str, click.Command]
) -> dict[str, Any]:
    _refuse_unknown(table, file, [*SHARED, *commands])
    shared = {key: value for key, value in table.items() if key in SHARED}
    defaults = {}
    for name, command in commands.items():
        options = {
            long.removeprefix("--"): option
            for option in command.params
            if isinstance(option, click.Option)
            for long in option.opts
            if long.startswith("--")
        }
        of_command = _table(table, name, file)
        _refuse_unknown(of_command, f"{file}: [{name}]", [*options])
        given = {key: value for key, value in shared.items() if key in options} | of_command
        defaults[name] = {
            options[key].name: _given(options[key], value) for key, value in given.items()
        }
    return defaults


def _refuse_unknown(table: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    for key in table:
        if key not in known:
            raise click.UsageError(
                f"{where} has the unknown key {key!r}; known: {', '.join(known)}"
            )


def _given(option: click.Option, value: Any) -> str | list[str]:
    """Return the text that would set an option on the command line, or texts if it is repeated."""
    texts = [
        {True: "on", False: "off"}[one] if isinstance(one, bool) else str(one)
        for one in (value if isinstance(value, list) else [value])
    ]
    return texts if option.multiple else ",".join(texts)


def origin(error: click.ClickException) -> str:
    """Return a clause that names the file whose default `error` is about; "" if none is."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return ""
    source = error.ctx.get_parameter_source(error.param.name or "")
    file = error.ctx.find_root().obj
    return f" (a default from {file})" if source is ParameterSource.DEFAULT_MAP else ""


def has_defaults(context: click.Context) -> bool:
    """Return whether the current command took a default from a file."""
    sources = map(context.get_parameter_source, context.params)
    return ParameterSource.DEFAULT_MAP in sources
