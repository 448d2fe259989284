"""Streams: output that fails never ends a command, whose results are stored and written anyway.

The disk of a redirected stream may be full, and a terminal may be closed while a command that
ignores SIGHUP goes on. A closed pipe does end a command: its reader, such as `head`, has enough.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

from dpbench.cli.options import EXIT_CLOSED, EXIT_FAILED


class _Lasting(io.FileIO):
    """A stream that discards what it cannot write, and keeps the error in `fault`."""

    fault: OSError | None = None
    name: Any

    def write(self, data: Any) -> int:
        """Write bytes; return their number also if they are discarded."""
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.fault = error
            return len(memoryview(data).cast("B"))


class _State:
    """The stream of stdout once it is replaced, and what to do if it lost some of the output.

    `replaced` has the streams with which Python has begun, by name.
    """

    output: _Lasting | None = None
    replaced: ClassVar[dict[str, Any]] = {}
    remedy = "nothing that is stored is lost; give the command again with another output"


def install() -> None:
    """Replace stdout and stderr by streams whose errors end no command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        stream.flush()
        raw = _Lasting(stream.fileno(), "w", closefd=False)
        raw.name = stream.name
        lasting = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        _State.replaced[name] = stream
        setattr(sys, name, lasting)
        if name == "stdout":
            _State.output = raw


def hand_over() -> None:
    """Give a script that runs in this process the streams with which Python has begun."""
    for name, stream in _State.replaced.items():
        getattr(sys, name).flush()
        setattr(sys, name, stream)


def remedy(text: str) -> None:
    """Set what the command will say to do if stdout has lost some of its output."""
    _State.remedy = text


def finish() -> None:
    """Say that stdout has lost some of its output, and exit; else do nothing."""
    with suppress(BrokenPipeError, ValueError):  # ValueError: a watched script has closed it
        sys.stdout.flush()
    if _State.output is None or _State.output.fault is None:
        return
    why = _State.output.fault.strerror
    with suppress(BrokenPipeError):
        click.echo(f"error: the output could not be written: {why}; {_State.remedy}", err=True)
    sys.exit(EXIT_FAILED)


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
