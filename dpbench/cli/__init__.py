"""Command line: parse the options, call the library, print the result.

Commands compute nothing themselves. Each command imports the modules that it needs when it runs, so
that `dpbench --help` starts quickly.
"""

from __future__ import annotations

import io
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import click

from dpbench.cli import comparing, managing, options, own, reading, running
from dpbench.cli.options import EXIT_FAILED, EXIT_USAGE
from dpbench.cli.streams import last_words, open_streams
from dpbench.records import siblings
from dpbench.records.errors import UsageError, told
from dpbench.records.files import UnreadableFile
from dpbench.records.visible import visible


class _Found(UserDict[str, Any]):
    """Commands by name. Those of siblings are places until they are asked for."""

    def __getitem__(self, name: str) -> click.Command:
        found = self.data[name]
        command: click.Command = siblings.at(found) if isinstance(found, str) else found
        return command


class _Commands(click.Group):
    """The commands of dpbench."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and exit if the reader of its output has closed it.

        Click's own exit code is then 1, by which `dpbench compare` says that a case became slower.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            last_words("the output was closed")
        except RuntimeError as error:
            # Python raises this in place of an interrupt in the body of a class
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise


@click.group(
    cls=_Commands,
    commands=_Found(siblings.named("commands")),
    context_settings=options.HELP | {"max_content_width": 100},
)
@click.version_option(package_name="torch-dpbench", prog_name="dpbench")
@click.option(
    "--no-config", is_flag=True, help="Ignore dpbench.toml, and [tool.dpbench] in pyproject.toml."
)
@click.pass_context
def cli(context: click.Context, no_config: bool) -> None:
    """Measure data parallelism in PyTorch, phase by phase.

    Start with `dpbench run`: it measures this machine, prints an answer and writes a report.

    Files in the working folder can set defaults of options: dpbench.toml, or [tool.dpbench] in
    pyproject.toml. The table [run], for example, sets defaults of `dpbench run`. The command line
    has precedence.

    `eval "$(_DPBENCH_COMPLETE=bash_source dpbench)"` turns on completion in bash; for zsh and fish,
    replace bash_source by zsh_source or fish_source. The variable NO_COLOR turns off colours.
    """
    folder = _working_folder()
    if not no_config:
        context.obj, context.default_map = options.read(folder, cli.commands)


def _working_folder() -> Path:
    """Return the working folder; raise FileNotFoundError if it has been removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the working folder has been removed, so that no file can be read or written there;"
            " change to another folder with cd, and give the command again"
        ) from None


for command in (
    running.run,
    own.check,
    own.init,
    own.loaders,
    reading.report,
    reading.explain,
    comparing.compare,
    reading.list_,
    managing.show,
    managing.rm,
    managing.merge,
    reading.export,
):
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with `arguments`, or with those of the process for None.

    An error is printed to stderr, and the process exits with a code that states its kind.
    """
    open_streams()
    try:
        cli.main(arguments, prog_name="dpbench", standalone_mode=False)
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        text = shown.getvalue().expandtabs(2).removesuffix("\n") + options.origin(error)
        click.echo(visible(text, lines=True), err=True)
        sys.exit(EXIT_USAGE)
    except (OSError, UnreadableFile) as error:
        click.echo(f"error: {visible(told(error), lines=True)}", err=True)
        sys.exit(EXIT_FAILED)
    except UsageError as error:
        click.echo(f"error: {visible(told(error), lines=True)}", err=True)
        sys.exit(EXIT_USAGE)
    except Exception as error:
        import traceback

        from dpbench.store import StoreError

        if isinstance(error, StoreError):
            click.echo(f"error: {told(error)}", err=True)
        else:
            # Python's own exit code for an exception is 1
            traceback.print_exc()
        sys.exit(EXIT_FAILED)
