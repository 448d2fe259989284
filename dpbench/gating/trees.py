"""Trees: copies of the user's checkout, one of the base commit and one with what is there now.

A copy is a git worktree. It has the tracked files of its commit and, for the present state, the
uncommitted changes. What git ignores is in no copy, so that no step writes to the checkout; a path
that the steps need, such as a data set, is linked if the user asks for it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dpbench.hardware import checkout
from dpbench.measure import scratch
from dpbench.records import words
from dpbench.records.errors import UsageError
from dpbench.records.spelling import dashed

CACHES = frozenset(("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"))
"""Folders that belong to the files beside them: each copy makes its own."""
COMPILED = (".so", ".pyd", ".dylib")
"""How the names of compiled modules end."""
MOST_BYTES = 10**9
"""The most bytes of uncommitted files that are copied."""
SHOWN = 4
"""The most paths that a message names."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A copy of a checkout: its folder, and the folder in it that is the user's working folder.

    `name` says whose code it has. `origin` is the checkout, and `linked` are the paths that are
    links to it. `differing` are the paths of the files that differ between the copies.
    """

    name: str
    folder: Path
    working: Path
    origin: Path
    linked: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the folders in which Python looks for modules first."""
        return self.working, self.folder, self.folder / "src"

    def check(self, files: Sequence[str]) -> None:
        """Raise UsageError if a process has imported one of these files instead of its own.

        It then ran code of the checkout, or an installed copy of it, which is the same in both.
        """
        for file in files:
            if Path(file).is_relative_to(self.folder):
                continue
            if changed := self._installed(file):
                raise UsageError(
                    f"the copy of {self} imported {file}, an installed copy of {changed}, so that"
                    " both sides would run the same code: put the folder of the package first in"
                    " PYTHONPATH, as a path relative to the working folder, or uninstall it"
                )
            if not Path(file).is_relative_to(self.origin):
                continue
            inside = Path(file).relative_to(self.origin)
            shared = any(inside.is_relative_to(one) for one in self.linked)
            if (self.folder / inside).exists() and not shared:
                raise UsageError(
                    f"the copy of {self} imported {file}, which is in the checkout, so that both"
                    " sides would run the same code: import it from the project's top folder or"
                    " from src, or remove the path of the checkout from PYTHONPATH and from its"
                    " .pth file"
                )

    def _installed(self, file: str) -> str:
        """Return the differing file of a package of which a file is the installed copy, or ""."""
        place = re.split(r"/(?:site|dist)-packages/", file)[1:]
        return self._modules.get(place[-1], "") if place else ""

    @cached_property
    def _modules(self) -> dict[str, str]:
        """Return the differing files of packages by the ends of their paths."""
        modules = [path for path in self.differing if path.endswith(".py")]
        parts = {path: path.split("/") for path in modules}
        return {
            "/".join(each[place:]): path
            for path, each in parts.items()
            for place in range(len(each) - 1)
            # only the folder of a package's top is one in which Python looks
            if not any(
                (root.joinpath(*each[:place]) / "__init__.py").exists()
                for root in (self.folder, self.origin)
            )
        }

    def lacks(self) -> str:
        """Return a clause on what git ignores in the checkout and no copy has; "" if nothing."""
        missing = [one for one in _ignored(self.origin) if one not in self.linked]
        if not missing:
            return ""
        return (
            f"; the copies lack what git ignores here ({_named(missing)}): give"
            f" {dashed('link', 'PATH')} for each path that the step reads"
        )


@dataclass(frozen=True, kw_only=True)
class Trees:
    """The copies of both sides, and notes on what they have."""

    base: Tree
    head: Tree
    remarks: tuple[str, ...] = ()

    @property
    def differing(self) -> tuple[str, ...]:
        """Return the paths of the files that differ between the copies."""
        return self.head.differing

    @property
    def both(self) -> tuple[Tree, Tree]:
        """Return the base, and then the present state."""
        return self.base, self.head

    def notes(self, imported: Collection[str]) -> list[str]:
        """Return notes on the differences, from the files that the present side has imported."""
        return [*self.remarks, *self._unused(imported)]

    def _unused(self, imported: Collection[str]) -> list[str]:
        if not self.differing:
            return ["both sides have the same files"]
        own = {os.path.relpath(file, self.head.folder) for file in imported}
        code = [path for path in self.differing if path.endswith(".py")]
        if not own.isdisjoint(code):
            return []
        return [
            f"the step imported none of the files that differ ({_named(self.differing)}): unless it"
            " reads them otherwise, both sides ran the same code"
        ]


@contextmanager
def copies(base: str, folder: Path, link: Sequence[str] = ()) -> Iterator[Trees]:
    """Yield copies of the commit `base`, and of the checkout with `folder` as it is now.

    `link` are paths, relative to `folder`, of files or folders that both copies share with the
    checkout. The copies are removed at the end. Raises UsageError if there is no such checkout,
    commit or path, and if a submodule differs from that of the base.
    """
    origin = checkout.root(folder).resolve()
    commits = [checkout.commit_of(origin, name) for name in (base, "HEAD")]
    changed = [path for path in checkout.changed(origin) if CACHES.isdisjoint(Path(path).parts)]
    _check_submodules(origin, *commits)
    inside = folder.resolve().relative_to(origin)
    linked = tuple(_inside(origin, folder, path) for path in link)
    changed = [
        path for path in changed if not any(Path(path).is_relative_to(one) for one in linked)
    ]
    _check_size(origin, changed)
    differing = dict.fromkeys([*checkout.differing(origin, *commits), *changed])
    with ExitStack() as stack:
        place = stack.enter_context(scratch.folder()).resolve()
        made = []
        for name, commit in zip(("base", "head"), commits, strict=True):
            copy = place / name
            stack.enter_context(checkout.copy_of(origin, commit, copy))
            if name == "head":
                _apply(changed, origin, copy)
            for path in linked:
                if os.path.lexists(copy / path):
                    raise UsageError(
                        "{} has files that git tracks, and a copy has them already",
                        option="link",
                        value=path,
                        remedy="give the ignored paths in it",
                    )
            shared = (*linked, *checkout.submodules(origin, commit))
            for path in shared:
                _link(origin / path, copy / path)
            if not (copy / inside).is_dir():
                raise UsageError(
                    f"{inside} does not exist in {commit[:12]}: change to the project's top folder"
                )
            made.append(
                Tree(
                    name=base if name == "base" else _present(len(changed)),
                    folder=copy,
                    working=copy / inside,
                    origin=origin,
                    linked=shared,
                    differing=tuple(differing),
                )
            )
        remarks = tuple(_remarks(origin, base, commits, linked))
        yield Trees(base=made[0], head=made[1], remarks=remarks)


def _remarks(
    origin: Path, base: str, commits: Sequence[str], linked: Sequence[str]
) -> Iterator[str]:
    if not checkout.contains(origin, *commits):
        yield (
            f"{base} has commits that this checkout lacks, and the answer is on these, too:"
            f" {dashed('base', f'$(git merge-base {base} HEAD)')} leaves them out"
        )
    built = [one for one in checkout.untracked(origin) if one.endswith(COMPILED)]
    if built:
        yield f"only the present side has {_named(built)}, which git does not track"
    built = [one for one in _ignored(origin) if one.endswith(COMPILED) and one not in linked]
    if built:
        yield (
            f"the copies lack {_named(built)}, which git ignores: without it, a step may be slower"
            " on both sides"
        )


def _inside(origin: Path, folder: Path, path: str) -> str:
    """Return the path of something to link, relative to the checkout."""
    whole = Path(os.path.normpath(folder.resolve() / path))
    if not whole.exists() or not whole.is_relative_to(origin) or whole == origin:
        raise UsageError(
            "{} names no file or folder in the checkout",
            option="link",
            value=path,
            remedy="give a path that git ignores, such as {link:data}",
        )
    return str(whole.relative_to(origin))


def _present(changes: int) -> str:
    return "HEAD" if not changes else f"HEAD with {words.count(changes, 'changed file')}"


def _named(paths: Sequence[str]) -> str:
    more = len(paths) - SHOWN
    return ", ".join(paths[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _ignored(origin: Path) -> list[str]:
    return [one for one in checkout.ignored(origin) if CACHES.isdisjoint(Path(one).parts)]


def _apply(changed: Sequence[str], origin: Path, copy: Path) -> None:
    """Bring the uncommitted changes of a checkout into a copy of its commit.

    All changed paths are removed first, so that a file can take the place of a folder or of a link.
    """
    for path in changed:
        target = copy / path
        if any(parent.is_symlink() for parent in target.parents if parent.is_relative_to(copy)):
            continue  # what a link of the commit names is no part of the copy
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
    for path in changed:
        source, target = origin / path, copy / path
        if path.endswith("/"):  # another repository inside this one
            _link(source, target)
        elif source.is_symlink() or source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def _link(source: Path, target: Path) -> None:
    """Make a link, unless the commit tracks what is there."""
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()  # the place of a submodule
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(source)


def _check_size(origin: Path, changed: Sequence[str]) -> None:
    sizes = {path: (origin / path).lstat().st_size for path in changed if (origin / path).is_file()}
    if sum(sizes.values()) > MOST_BYTES:
        largest = sorted(sizes, key=lambda path: -sizes[path])
        raise UsageError(
            f"the uncommitted files have {sum(sizes.values()) / 1e9:.1f} GB, the largest in"
            f" {_named(largest)}: add data to .gitignore, and give {dashed('link', 'PATH')} for"
            " what the step reads"
        )


def _check_submodules(origin: Path, base: str, head: str) -> None:
    before, after = (checkout.submodules(origin, commit) for commit in (base, head))
    for path, commit in after.items():
        here = origin / path
        present = (here / ".git").exists()
        if before.get(path) != commit:
            why = f"has another commit in {base[:12]}"
        elif present and checkout.commit_of(here, "HEAD") != commit:
            why = "has another commit than the checkout names"
        elif present and not checkout.clean(here):
            why = "has uncommitted changes"
        else:
            continue
        raise UsageError(
            f"the submodule {path} {why}: the gate compares one repository, with the same"
            " submodules on both sides"
        )
