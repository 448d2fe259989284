"""Files: read the text files that a user gives, and refuse those that cannot be read."""

from __future__ import annotations

import codecs
from pathlib import Path

BOM = codecs.BOM_UTF8
"""The byte order mark with which some editors begin a file."""


class UnreadableFile(ValueError, LookupError):
    """A file that the user gave does not exist, or is not of the kind that is read there.

    Commands exit with the code of an OSError, and not with that of a wrong argument.
    """


def text_of(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises OSError if the file cannot be read, and UnicodeDecodeError if it is not UTF-8.
    """
    return path.read_text(encoding="utf-8-sig")
