"""Entry point of the command `dpbench`, and of `python -m dpbench`."""

from __future__ import annotations

import sys

from dpbench.hardware import signals


def main(arguments: list[str] | None = None) -> None:
    """Run the command `dpbench` with `arguments`; None means the arguments of the process.

    If a signal ends the command, the exit code is 128 plus the number of the signal, as in a shell.
    """
    signals.install()
    try:
        from dpbench import cli

        cli.main(arguments)
    except BaseException as error:
        if not (number := signals.received()):
            raise
        # with SystemExit, the command has printed how it ended
        if not isinstance(error, SystemExit):
            print("interrupted", file=sys.stderr)
        sys.exit(128 + number)


if __name__ == "__main__":
    main()
