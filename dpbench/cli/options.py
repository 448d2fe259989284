"""Options: the types, the shared options, the defaults and the exit codes of the command line.

Defaults come from `dpbench.toml`, or from [tool.dpbench] in `pyproject.toml`, in the working
folder. A table such as [run] has the defaults of one command; its keys are the long names of
options. The keys `store` and `patience` outside of these tables apply to all commands that have the
option. The command line has precedence. The help of a command ends with the defaults that come from
a file, and with the command's exit codes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from reprlib import repr as abridged
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dpbench.api import LATEST, REPORTS, STORE
from dpbench.records.errors import UsageError, told
from dpbench.records.files import UnreadableFile, text_of
from dpbench.records.options import ALSO, OPTIONS, OUTPUT, Option
from dpbench.records.spelling import dashed
from dpbench.records.visible import everywhere

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE
report_option = click.option(
    "--report",
    type=click.Path(path_type=Path),
    help=f"The page to write.  [default: {LATEST}, and the run's page below {REPORTS}/runs/]",
)
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
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON; the module dpbench.cli.shapes has its form.",
)
OWN, PROJECT = "dpbench.toml", "pyproject.toml"
SHARED = ("store", "patience")
"""The options whose defaults a file may set for all commands, outside of their tables."""
EXITS = {0: "done", 2: "a file cannot be read or written", 64: "wrong usage"}
"""The meaning of the exit codes of most commands."""


if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # before click 8.4, it takes no type argument


class Value(ParamType):
    """The type of an option of a run; `Option.read` converts and checks its texts."""

    def __init__(self, option: Option) -> None:
        self.name = option.name
        self._option = option

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Return the form of the texts that the help shows."""
        option = self._option
        if option.form or option.choices:
            return option.form or f"[{'|'.join(option.choices)}]" + ",..." * option.listed
        if option.listed and not option.repeated:
            return "1,2,..." if "int" in option.kinds else "A,B,..."
        return "SECONDS" if "float" in option.kinds else "TEXT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value of a text; fail for a wrong text."""
        try:
            return self._option.read(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(told(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the choices that begin with the text."""
        from click.shell_completion import CompletionItem

        return [CompletionItem(one) for one in self._option.choices if one.startswith(incomplete)]


def option_of(name: str, *, required: bool = False, **changed: Any) -> Callable[[Any], Any]:
    """Return the decorator for an option of a run; `changed` are facts that a command changes."""
    option = replace(OPTIONS[name], **changed)
    if option.flag:
        return click.option(option.spelled, is_flag=True, help=option.help)
    more: dict[str, Any] = {"is_flag": False, "flag_value": "on"} if "on" in option.words else {}
    if option.also:
        more |= {"callback": _joined, "multiple": True}
    return click.option(
        option.name,
        option.spelled,
        *([dashed(option.also)] if option.also else []),
        type=Value(option),
        default=option.text(option.default) if option.default else () if option.listed else None,
        show_default=True,
        required=required,
        help=option.help,
        **{"multiple": option.repeated, **more},
    )


def _joined(
    context: click.Context, param: click.Parameter, lists: tuple[tuple[str, ...], ...]
) -> tuple[str, ...]:
    """Return the values of an option that was given several times, each time with a list."""
    return tuple(chain.from_iterable(lists))


def one_model(models: Sequence[str], command: str) -> str:
    """Return the only one of the models; raise UsageError if there are several."""
    if len(models) > 1:
        raise UsageError(
            "{} names {number} models, but dpbench {command} takes one",
            option="models",
            remedy="leave out the others",
            number=len(models),
            command=command,
        )
    return models[0]


HELP = {"help_option_names": ["-h", "--help"]}
"""The names of the help option, which a command keeps from the first context that asks for it."""


class Documented(click.Command):
    """A command whose help ends with the defaults from a file and with the command's exit codes."""

    def __init__(
        self,
        *args: Any,
        exits: Mapping[int, str] = EXITS,
        grouped: bool = False,
        **options: Any,
    ) -> None:
        options["context_settings"] = HELP | options.get("context_settings", {})
        super().__init__(*args, **options)
        self.exits = {**exits, EXIT_CLOSED: "the reader of the output closed it"}
        self.grouped = grouped

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Add the options to the help, in groups if they are those of a run."""
        if not self.grouped:
            super().format_options(ctx, formatter)
            return
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            option = OPTIONS.get(param.name or "")
            if record := param.get_help_record(ctx):
                sections.setdefault(option.group if option else OUTPUT, []).append(record)
        for group, records in sections.items():
            with formatter.section(group):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Add to the help the defaults that a file gives, and the exit codes."""
        given = ctx.default_map or {}
        if shown := [
            (max(option.opts, key=len), _shown(option, given[option.name]))
            for option in self.params
            if option.name in given
        ]:
            with formatter.section(f"Defaults from {ctx.find_root().obj}"):
                formatter.write_dl(shown)
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in self.exits.items()])


def _shown(option: click.Parameter, value: str | list[str]) -> str:
    if isinstance(value, str):
        return value
    # an option with two names takes lists, and is not repeated for each value
    return ("," if option.name in ALSO.values() else " ").join(value)


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
        defaults[name] = _texts((options[key], value) for key, value in given.items())
    return defaults


def _texts(given: Iterable[tuple[click.Option, Any]]) -> dict[str | None, str | list[str]]:
    """Return the texts of values by the option's name; those under both its names are joined."""
    texts: dict[str | None, str | list[str]] = {}
    for option, value in given:
        text, earlier = _given(option, value), texts.get(option.name)
        if isinstance(text, list) and isinstance(earlier, list):
            text = [*earlier, *text]
        texts[option.name] = text
    return texts


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
