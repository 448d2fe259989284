"""Options: the types of command-line options, options of several commands, their defaults, and the exit codes.

Defaults come from `dpbench.toml`, or from [tool.dpbench] in `pyproject.toml`, in the working folder. A table such as
[run] has the defaults of one command; its keys are the long names of options. The keys `store` and `patience` outside
of these tables apply to all commands that have the option. The command line has precedence. The help of a command ends
with the defaults that come from a file, and with the command's exit codes.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from reprlib import repr as abridged
from typing import Any, NoReturn

import click
import msgspec
from click.core import ParameterSource

from dpbench.records.files import UnreadableFile, text_of
from dpbench.records.visible import everywhere

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE
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
MOST_BYTES = 1e18
OWN, PROJECT = "dpbench.toml", "pyproject.toml"
SHARED = ("store", "patience")
"""The options whose defaults a file may set for all commands at once, outside of the tables of the commands."""
Value = str | int | float | bool | list[str | int | float | bool]
EXITS = {0: "done", 2: "a file cannot be read or written", 64: "wrong usage"}
"""The meaning of the exit codes of most commands."""


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


class Detail(Enum):
    """The amount of progress that `dpbench run` prints."""

    QUIET = auto()
    """No progress."""
    USUAL = auto()
    """One line per trial, and a live display on a terminal."""
    VERBOSE = auto()
    """Also the stages, steps and memory of each trial."""


class Listed(click.ParamType[tuple[Any, ...]]):
    """The type of a comma-separated list.

    `part` converts one part of the list; it raises ValueError for a text that it does not accept. `expected` describes
    the list in the message for such a text.
    """

    def __init__(self, name: str, part: Callable[[str], Any], expected: str = "") -> None:
        self.name, self._part, self._expected = name, part, expected

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the values of all parts of a text; fail for an empty list, and for a part that is not accepted."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",") if part.strip()]
        try:
            return tuple(map(self._part, parts)) or self.fail(f"{value!r} is an empty list; {EMPTY}", param, ctx)
        except ValueError:
            self.fail(f"{value!r} is not {self._expected}", param, ctx)


def _natural(text: str) -> int:
    """Return the integer that a text of digits states. Raises ValueError if the text has any other character."""
    if not text.isdigit():
        raise ValueError(text)
    return int(text)


NAMES = Listed("a,b,...", str)
NUMBERS = Listed("1,2,...", int, "a comma-separated list of integers, such as 1,2,4")
SWITCHES = Listed(
    "off,on", lambda text: ("off", "on").index(text) == 1, "a list of the words off and on, such as off,on"
)
LOADERS = Listed(
    "off,0,...",
    lambda text: -1 if text == "off" else _natural(text),
    "a list in which each entry is off or a number of workers, such as off,0,2",
)
"""The type of a list of DataLoader settings: a number of workers, or -1 for off, which means no DataLoader."""
DEVICE_IDS = Listed(
    "0,1,...|GPU-...",
    lambda text: text if text.startswith("GPU-") else _natural(text),
    "a list of GPUs, such as 0,1 or GPU-8d3e,GPU-41fa",
)
"""The type of a list of GPUs: CUDA ordinals (int), or UUIDs (str), which may be abbreviated."""


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


class Tag(click.ParamType[tuple[str, str]]):
    """A tag, key=value, that the user gives to a run."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the key and the value; fail if one of them is missing."""
        if isinstance(value, tuple):
            return value
        key, _, text = value.partition("=")
        return (key, text) if key and text else self.fail(f"{value!r} is not key=value, such as driver=550", param, ctx)


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
        """Return the number of bytes; fail for a value that is not a number, is too large, or has an unknown unit."""
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", str(value), re.IGNORECASE)
        if not found:
            self.fail(f"{value!r} is not a number of bytes, such as 8GiB, 512MiB or 1000000", param, ctx)
        power = " KMGT".index((found[2] or " ").upper())
        size = float(found[1]) * (1024 if found[3] else 1000) ** power
        return int(size) if size < MOST_BYTES else self.fail(f"{value} is more than {MOST_BYTES:.0e} bytes", param, ctx)


@dataclass(frozen=True)
class Defaults:
    """Defaults of options from the file `path`.

    `words` gives, by command and option, the words that would set the option on the command line.
    """

    path: Path
    words: Mapping[str, Mapping[str, Sequence[str]]]
    values: Mapping[str, Mapping[str, Any]]
    """The defaults by command and parameter, in the form of click's `default_map`."""


class Documented(click.Command):
    """A command whose help ends with the defaults from a file and with the command's exit codes."""

    def __init__(self, *args: Any, exits: Mapping[int, str] = EXITS, **options: Any) -> None:
        super().__init__(*args, **options)
        self.exits = exits

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Add to the help the defaults that a file gives, and the exit codes."""
        found = ctx.find_root().obj
        if isinstance(found, Defaults) and (words := found.words.get(self.name or "")):
            with formatter.section(f"Defaults from {found.path.name}"):
                formatter.write_dl([(f"--{name}", _shown(given)) for name, given in words.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in self.exits.items()])


def _shown(words: Sequence[str]) -> str:
    """Return the value that the words of an option set, as text; "on" or "off" for an option without a value."""
    return shlex.join(words[1:]) or ("on" if words else "off")


def read(folder: Path, commands: Mapping[str, click.Command]) -> Defaults | None:
    """Return the defaults that a file in `folder` has for the options of `commands`; None without such a file.

    Raises UnreadableFile if a file is not TOML. Raises UsageError if two files have defaults, if a key is unknown, or
    if an option does not accept its value. The message names the files, or the file and the key.
    """
    found = [(path, where, table) for path, where in _sources(folder) if (table := _table(path, where)) is not None]
    if not found:
        return None
    if len(found) > 1:
        raise click.UsageError(f"{OWN} and [tool.dpbench] in {PROJECT} both have defaults: remove one of them")
    path, where, table = found[0]
    words: dict[str, dict[str, Sequence[str]]] = {name: {} for name in commands}
    values: dict[str, dict[str, Any]] = {name: {} for name in commands}
    for command, name, value in _entries(table, path, where, commands):
        at = f"{path.name}: {'.'.join(filter(None, [where, command if command in table else '']))}"
        option = _options(commands[command])[name]
        words[command][name] = _words(option, name, value, at)
        values[command][option.name or ""] = _checked(option, value, commands[command], f"{at} {name}")
    return Defaults(path, words, values)


def command_of(context: click.Context, repeated: str) -> str:
    """Return `repeated` with the option --no-config; "" if the current command took no default from a file.

    `context` is the click context of the current command. `repeated` is a `dpbench run` command that sets every option
    whose value is not dpbench's own default, including those from the file. It therefore works without the file.
    """
    given = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP]
    return _ignoring(repeated) if given else ""


def command_in(folder: Path, repeated: str) -> str:
    """Return the command `repeated`, with the option --no-config if `folder` has a file that may set defaults.

    Runs that Python starts do not read such a file, so the command that repeats them must not read it either.
    """
    return _ignoring(repeated) if any(path.is_file() for path, _ in _sources(folder)) else repeated


def _ignoring(command: str) -> str:
    """Return `command`, which begins with `dpbench`, with the option --no-config."""
    return f"dpbench --no-config {command.removeprefix('dpbench ')}"


def _sources(folder: Path) -> Iterator[tuple[Path, str]]:
    yield folder / OWN, ""
    yield folder / PROJECT, "tool.dpbench"


def _table(path: Path, where: str) -> Mapping[str, Any] | None:
    """Return the table `where`, such as "tool.dpbench", of a TOML file; None if there is no such file or table.

    If `where` is empty, the whole file is the table. Raises UnreadableFile if the file is not TOML, and UsageError if
    the table has values of a wrong type.
    """
    import tomllib

    if not path.is_file():
        return None
    try:
        table: Any = everywhere(tomllib.loads(text_of(path)))
    except (ValueError, RecursionError) as error:  # also for invalid UTF-8, and for numbers with too many digits
        raise UnreadableFile(f"{path.name} is not valid TOML: {error}") from None
    for key in where.split(".") if where else ():
        if not isinstance(table, dict):
            raise click.UsageError(f"{path.name}: `tool` is {abridged(table)}; it must be a table")
        table = table.get(key)
        if table is None:
            return None
    try:
        return msgspec.convert(table, dict[str, Value | dict[str, Value]])
    except msgspec.ValidationError as error:
        raise click.UsageError(f"{path.name}: {where or 'the file'}: {error}") from None


def _entries(
    table: Mapping[str, Any], path: Path, where: str, commands: Mapping[str, click.Command]
) -> Iterator[tuple[str, str, Any]]:
    """Yield the command, the option and the value of each entry of a table of defaults.

    First come the entries that apply to all commands, then those of one command, which replace them.
    """
    for key, value in table.items():
        if key in SHARED and not isinstance(value, dict):
            yield from ((name, key, value) for name, command in commands.items() if key in _options(command))
        elif key not in commands or not isinstance(value, dict):
            raise _unknown(f"{path.name}: {where or 'the file'}", key, [*SHARED, *(f"[{name}]" for name in commands)])
    for command, entries in table.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            known = _options(commands[command])
            if key not in known:
                raise _unknown(f"{path.name}: {'.'.join(filter(None, [where, command]))}", key, [*known])
            yield command, key, value


def _options(command: click.Command) -> dict[str, click.Option]:
    """Return the options of a command by their long names without dashes, such as `batch-sizes`."""
    return {
        long.removeprefix("--"): one
        for one in command.params
        if isinstance(one, click.Option)
        for long in one.opts
        if long.startswith("--")
    }


def _unknown(where: str, key: str, known: Sequence[str]) -> click.UsageError:
    near = difflib.get_close_matches(key, [one.strip("[]") for one in known], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return click.UsageError(f"{where} has the unknown key {key!r}; known: {', '.join(known)}{hint}")


def _words(option: click.Option, name: str, value: Any, where: str) -> Sequence[str]:
    """Return the words of a command line that give an option this value. Raises UsageError for a wrong type."""
    if option.is_flag and not isinstance(value, bool):
        raise click.UsageError(f"{where} {name}: {value!r} is neither true nor false")
    if option.is_flag:
        return [f"--{name}"] if value else []
    texts = [_text(one) for one in value] if isinstance(value, list) else [_text(value)]
    return [word for text in (texts if option.multiple else [",".join(texts)]) for word in (f"--{name}", text)]


def _text(value: str | float) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _checked(option: click.Option, value: Any, command: click.Command, where: str) -> Any:
    """Return the value in the form of click's `default_map`: a bool, a text, or a list of texts.

    Raises UsageError, with a message that begins with `where`, if the option does not accept the value.
    """
    if option.is_flag:
        return value
    texts = [_text(one) for one in value] if isinstance(value, list) else [_text(value)]
    given = texts if option.multiple else ",".join(texts)
    try:
        option.type_cast_value(click.Context(command), given)
    except click.BadParameter as error:
        raise click.UsageError(f"{where}: {error.message}") from None
    return given
