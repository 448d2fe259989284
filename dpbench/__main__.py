"""Entry point of the command `dpbench`, and of `python -m dpbench`."""

from __future__ import annotations

import sys

from dpbench.hardware import signals


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with these arguments, by default those of the process, until it ends or a signal ends it.

    After a signal, the exit code is 128 plus the number of the signal, as in a shell.
    """
    signals.install()
    try:
        from dpbench import cli

        cli.main(arguments)
    except BaseException as error:
        if not (number := signals.received()):
            raise
        if not isinstance(error, SystemExit):  # a command that has said how it ended exits
            print("interrupted", file=sys.stderr)
        sys.exit(128 + number)


if __name__ == "__main__":
    main()
