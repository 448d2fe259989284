"""Session: the model of a caller in Python that has no file, such as one of a notebook's cell."""

from __future__ import annotations

import os
from pathlib import Path

from dpbench.records.errors import UnknownName

PLACE = "__main__"
"""What stands before ':' in the name of such a model."""
VARIABLE = "DPBENCH_SESSION_MODEL"
"""The environment variable with the path of the model's file, for the processes that measure it."""


def is_of(name: str) -> bool:
    """Return whether a name is that of a model of a session."""
    return name.partition(":")[0] == PLACE


def file_of(name: str) -> Path:
    """Return the file of a session's model; raise UnknownName if the run that made it has ended."""
    path = Path(os.environ.get(VARIABLE, ""))
    if not path.is_file():
        raise UnknownName(
            "{} exists only while the dpbench.run measures it to which a session has given it",
            option="models",
            value=name,
            remedy="write the model to a file, and give {models:file.py:name}",
        )
    return path
