"""Files: read the text files that a user gives, and refuse those that cannot be read."""

from __future__ import annotations

import codecs
from pathlib import Path

BOM = codecs.BOM_UTF8
"""The byte order mark with which some editors begin a file; it is no part of the text."""


class UnreadableFile(ValueError, LookupError):
    """The error that a file which the user gave does not exist, or is not of the kind that is read
    there.

    A command that raises it exits with the code of an OSError, as for a file that the system cannot
    read, and not with the code of a wrong argument.
    """


def text_of(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises OSError if the file cannot be read, and UnicodeDecodeError if it is not UTF-8.
    """
    return path.read_text(encoding="utf-8-sig")
