"""Entry point of the command `dpbench`, and of `python -m dpbench`."""

from __future__ import annotations

import sys
from contextlib import suppress

from dpbench.hardware import interpreter


def main(arguments: list[str] | None = None) -> None:
    """Run the command `dpbench` with `arguments`; None means the arguments of the process.

    If a signal ends the command, the exit code is 128 plus the number of the signal, as in a shell.
    Raises KeyboardInterrupt if one ended a script: the process then ends as that of the script.
    """
    interpreter.watch_gil()  # before any package is imported
    from dpbench.records.errors import NotUnix

    try:
        from dpbench.records import signals
    except NotUnix as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    signals.install()
    try:
        from dpbench import cli
        from dpbench.cli import streams

        streams.install()
        try:
            cli.main(arguments)
        finally:
            streams.finish()
    except signals.ScriptInterrupted:
        sys.excepthook = lambda *_: None
        raise KeyboardInterrupt from None
    except BaseException as error:
        if not (number := signals.received()):
            raise
        # with SystemExit, the command has printed how it ended
        if not isinstance(error, SystemExit):
            with suppress(OSError):  # the terminal may be the one that has been closed
                print("interrupted", file=sys.stderr)
        sys.exit(128 + number)


if __name__ == "__main__":
    main()
