"""The command line: parse, call, print. Computes nothing, and imports what it needs when it needs it."""

from __future__ import annotations

import signal
import sys

import click

from dpbench import __version__
from dpbench.cli import predicting, reading, running
from dpbench.cli.ending import EXIT_FAILED, EXIT_USAGE


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dpbench")
def cli() -> None:
    """Measure single-machine data parallelism in PyTorch, phase by phase.

    Start with `dpbench run`: it measures what this machine can do, prints a verdict and leaves a report.
    """


for command in (
    running.run, reading.report, reading.explain, reading.compare, reading.list_, reading.export, predicting.predict,
    predicting.probe,
):  # fmt: skip
    cli.add_command(command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors say what, where and the way out; `ending` has the exit codes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is tidied up on the way out
    try:
        cli.main(arguments, prog_name="dpbench", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except (ValueError, LookupError) as error:
        click.echo(f"error: {error.args[0] if error.args else error}", err=True)
        sys.exit(EXIT_USAGE)
    except RuntimeError as error:
        from dpbench.store import StoreError

        if not isinstance(error, StoreError):
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
