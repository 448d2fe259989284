"""Unix: what dpbench's commands need of the system; importing it elsewhere raises `NotUnix`."""

from __future__ import annotations

from dpbench.records.errors import NotUnix

__all__ = ["fcntl"]

try:
    import fcntl
except ImportError as error:
    raise NotUnix(
        "dpbench measures on Unix systems, such as Linux; on Windows, run it in WSL"
    ) from error
