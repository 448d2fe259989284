"""How a command ends: its exit codes, and its last words where nobody reads on."""

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
    """End as a command does whose output was closed, with a word on stderr if that is still open."""
    with suppress(OSError):
        click.echo(text, err=True)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what is left in their buffers is for nobody
        with suppress(OSError, ValueError):
            os.dup2(nowhere, stream.fileno())
    sys.exit(EXIT_CLOSED)
