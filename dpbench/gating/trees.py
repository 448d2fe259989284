"""Trees: copies of the user's checkout, one of the base commit and one with what is there now.

A copy is a git worktree. It has the tracked files of its commit and, for the present state, the
uncommitted changes. What git ignores, such as data sets and built files, is in both copies a link
to that of the checkout.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpbench.hardware import checkout
from dpbench.measure import scratch
from dpbench.records import words
from dpbench.records.errors import UsageError

CACHES = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"))
"""Folders that belong to the files beside them: each copy makes its own."""
SHOWN = 4
"""The most ignored paths that a note names."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A copy of a checkout: its folder, and the folder in it that is the user's working folder.

    `name` says whose code it has. `commit` is its commit, and `changes` the number of paths with
    uncommitted changes. `origin` is the checkout, and `linked` are the paths that are links to it.
    """

    name: str
    folder: Path
    working: Path
    commit: str
    origin: Path
    changes: int = 0
    linked: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the folders in which Python looks for modules first."""
        return self.working, self.folder, self.folder / "src"

    def check(self, files: list[str]) -> None:
        """Raise UsageError if a process has imported one of these files instead of its own.

        It then ran code of the checkout, which is the same in both copies.
        """
        for file in files:
            inside = os.path.relpath(file, self.origin)
            own = self.folder / inside
            foreign = not inside.startswith("..") and not Path(file).is_relative_to(self.folder)
            if foreign and own.exists() and not inside.startswith(self.linked):
                raise UsageError(
                    f"the copy of {self.commit[:12]} imported {file}, which is in the checkout, so"
                    " that both sides would run the same code: import it from the project's top"
                    " folder or from src, or remove the path of the checkout from PYTHONPATH and"
                    " from its .pth file"
                )


@contextmanager
def copies(base: str, folder: Path) -> Iterator[tuple[Tree, Tree]]:
    """Yield copies of the commit `base`, and of the checkout with `folder` as it is now.

    Both are removed at the end. Raises UsageError if there is no such checkout or commit, and if a
    submodule has another commit in the base.
    """
    origin = checkout.root(folder)
    commits = [checkout.commit_of(origin, name) for name in (base, "HEAD")]
    _check_submodules(origin, *commits)
    linked = tuple(path for path in checkout.ignored(origin) if not _made_by_tools(path))
    changed = [path for path in checkout.changed(origin) if not _made_by_tools(path)]
    inside = folder.resolve().relative_to(origin.resolve())
    with ExitStack() as stack:
        place = stack.enter_context(scratch.folder())
        made = []
        for name, commit in zip(("base", "head"), commits, strict=True):
            copy = place / name
            stack.enter_context(checkout.copy_of(origin, commit, copy))
            own = changed if name == "head" else []
            for path in own:
                _put(origin / path, copy / path)
            for path in (*linked, *checkout.submodules(origin, commit)):
                _link(origin / path, copy / path)
            if not (copy / inside).is_dir():
                raise UsageError(
                    f"{inside} does not exist in {commit[:12]}: change to the project's top folder"
                )
            made.append(
                Tree(
                    name=base if name == "base" else _present(len(own)),
                    folder=copy,
                    working=copy / inside,
                    commit=commit,
                    origin=origin,
                    changes=len(own),
                    linked=linked,
                )
            )
        base_tree, head_tree = made
        yield base_tree, head_tree


def _present(changes: int) -> str:
    return "HEAD" if not changes else f"HEAD with {words.count(changes, 'changed file')}"


def _made_by_tools(path: str) -> bool:
    return not CACHES.isdisjoint(Path(path).parts)


def _put(source: Path, target: Path) -> None:
    """Copy a changed file, or remove it where it has been removed."""
    if source.is_dir() and not source.is_symlink():  # another repository inside this one
        _link(source, target)
    elif os.path.lexists(source):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    else:
        target.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Make a link, unless the commit tracks a file that the checkout ignores."""
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()  # the place of a submodule
    if not os.path.lexists(target) and source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)


def _check_submodules(origin: Path, base: str, head: str) -> None:
    before, after = (checkout.submodules(origin, commit) for commit in (base, head))
    for path, commit in before.items():
        if after.get(path) != commit:
            raise UsageError(
                f"the submodule {path} has another commit in {base[:12]} than now: the gate"
                " compares one repository with the same submodules"
            )


def shared(tree: Tree) -> str:
    """Return a note on the ignored paths that both sides use; "" if there are none."""
    if not tree.linked:
        return ""
    more = len(tree.linked) - SHOWN
    named = ", ".join(tree.linked[:SHOWN]) + (f" and {more} more" if more > 0 else "")
    return f"both sides use what git ignores in this checkout: {named}"
