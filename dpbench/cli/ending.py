"""Ending: the commands' exit codes, and how a command exits when the reader of its output has closed the pipe."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn

import click

EXIT_WORSE, EXIT_FAILED, EXIT_UNDECIDED, EXIT_USAGE = 1, 2, 3, 64
EXIT_CLOSED = 128 + signal.SIGPIPE


def last_words(text: str) -> NoReturn:
    """Print `text` to stderr if stderr is still open, discard all further output, and exit as after SIGPIPE."""
    with suppress(OSError):
        click.echo(text, err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # flushing their buffers at exit must not fail
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(EXIT_CLOSED)
