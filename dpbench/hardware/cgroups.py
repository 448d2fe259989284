"""Control groups: where the kernel limits and counts what this process may use."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control group with a controller, such as "memory".

    The groups above it follow, whose limits hold for this process, too. Version 2 of control groups
    has one tree for all controllers, and version 1 has one for each; the folders may not exist.
    `root` is the folder with the kernel's file systems `proc` and `sys`.
    """
    groups = dict[str, str]()
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            groups |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    found = []
    for tree, name in (("sys/fs/cgroup", ""), (f"sys/fs/cgroup/{controller}", controller)):
        top = root / tree
        own = top / groups.get(name, "")
        found += [own, *(one for one in own.parents if one.is_relative_to(top))]
    return found
