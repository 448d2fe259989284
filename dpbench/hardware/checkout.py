"""Checkout: the commit and the uncommitted changes of a folder, as git states them.

This is the only module that runs git, which fetches nothing here. A checkout may come from others,
and its configuration may name programs that git runs: `facts` runs none of them, and writes
nothing. The other functions serve a user who asks for a copy of a commit, with its filters.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dpbench.records.errors import UsageError

log = logging.getLogger(__name__)

TIMEOUT_S, COPY_LIMIT_S = 10, 600
ARCHIVED = "$Format:%H$"
"""The commit of dpbench, if this file comes from `git archive`, which fills it in."""
SETTINGS = ("core.fsmonitor=", f"core.hooksPath={os.devnull}")
"""Settings that have precedence over those of the checkout."""
PLAIN = ("--no-ext-diff", "--no-textconv", "--submodule=short")
"""The options with which `git diff` runs no programs."""
# git would run a command of its own in a submodule to compare the files there
SUBMODULES = "--ignore-submodules=dirty"
KEPT = ("GIT_CONFIG_", "GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
"""The beginnings of variables that are left to git; others would name another checkout."""


class GitFailed(OSError):
    """A command of git failed."""


def facts(folder: Path) -> dict[str, Any]:
    """Return facts about the checkout with this folder; empty without one.

    They are `commit`, `dirty` (tracked files have changed, but for those inside submodules), and
    `changes`, a hash of uncommitted changes of Python files, if there are any. Files are compared
    without the filters that the configuration names, such as that of LFS. Where git cannot be kept
    from running a filter, the result is empty.
    """
    try:
        settings = [*SETTINGS, *_without_filters(folder)]
        found = {
            "commit": _git(folder, settings, "rev-parse", "HEAD").decode(),
            "dirty": bool(_git(folder, settings, "status", "--porcelain", "-uno", SUBMODULES)),
        }
        changes = (
            _git(folder, settings, "diff", *PLAIN, SUBMODULES, "HEAD", "--", ":/*.py")
            if found["dirty"]
            else b""
        )
        return found | ({"changes": hashlib.sha256(changes).hexdigest()[:16]} if changes else {})
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def own(folder: Path) -> dict[str, Any]:
    """Return facts about dpbench's own checkout with this folder, or the commit of an archive."""
    return facts(folder) if ARCHIVED.startswith("$") else {"commit": ARCHIVED}


def root(folder: Path) -> Path:
    """Return the top folder of the checkout with this folder; raise UsageError without one."""
    try:
        return Path(_text(folder, "rev-parse", "--show-toplevel"))
    except FileNotFoundError:
        raise UsageError("the program git is not found: install it") from None
    except GitFailed as error:
        raise UsageError(f"{folder} is in no git checkout that can be read: {error}") from None


def commit_of(folder: Path, name: str) -> str:
    """Return the commit that a branch, a tag or the beginning of an id names.

    Raises UsageError for a name of no commit, such as one that a shallow clone lacks.
    """
    try:
        return _text(folder, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}")
    except GitFailed:
        shallow = _text(folder, "rev-parse", "--is-shallow-repository") == "true"
        remedy = (
            "this clone is shallow: fetch its history with git fetch --unshallow (in a workflow,"
            " fetch-depth: 0 of actions/checkout)"
            if shallow
            else "give a branch, a tag or a commit"
        )
        raise UsageError(f"git knows no commit {name!r}: {remedy}") from None


def contains(folder: Path, base: str, head: str) -> bool:
    """Return whether a commit contains all commits of another."""
    return not _text(folder, "rev-list", "-n1", base, f"^{head}")


@contextmanager
def copy_of(folder: Path, commit: str, into: Path) -> Iterator[None]:
    """Check out a commit of a checkout into a new folder, as a worktree, and remove it at the end.

    Raises GitFailed if git cannot write it.
    """
    try:
        _text(folder, "worktree", "add", "--detach", "--force", str(into), commit)
        yield
    finally:
        try:
            if into.exists():
                _text(folder, "worktree", "remove", "--force", "--force", str(into))
        except GitFailed as error:
            shutil.rmtree(into, ignore_errors=True)
            log.warning("git could not forget the worktree %s: %s", into, error)


def changed(folder: Path) -> list[str]:
    """Return the paths that differ from the commit: changed, removed, and untracked ones."""
    return [*differing(folder, "HEAD"), *untracked(folder)]


def untracked(folder: Path) -> list[str]:
    """Return the paths that git neither tracks nor ignores."""
    listing = ("ls-files", "--others", "--exclude-standard", "-z", ":/")
    return [*filter(None, _text(folder, *listing).split("\0"))]


def differing(folder: Path, *commits: str) -> list[str]:
    """Return the tracked paths that differ between two commits, or from one in the checkout."""
    options = (*PLAIN, SUBMODULES, "--no-renames", "--name-only", "-z")
    return [*filter(None, _text(folder, "diff", *options, *commits, "--", ":/").split("\0"))]


def clean(folder: Path) -> bool:
    """Return whether a checkout has no changes since its commit."""
    return not _text(folder, "status", "--porcelain")


def ignored(folder: Path) -> list[str]:
    """Return the ignored paths of a checkout; a folder stands for all that it contains."""
    listing = ("ls-files", "--others", "--ignored", "--exclude-standard", "--directory", "-z", ":/")
    return [path.rstrip("/") for path in _text(folder, *listing).split("\0") if path]


def submodules(folder: Path, commit: str) -> dict[str, str]:
    """Return the commit of each submodule that a commit of a checkout names, by its path."""
    entries = _text(folder, "ls-tree", "-r", "-z", "--full-tree", commit).split("\0")
    named = [entry.split(maxsplit=3) for entry in entries if entry.startswith("160000 ")]
    return {path: found for _, _, found, path in named}


def _text(folder: Path, *arguments: str) -> str:
    """Return the output of a command of git that may take longer, with the checkout's filters."""
    try:
        return os.fsdecode(_git(folder, SETTINGS, *arguments, limit_s=COPY_LIMIT_S))
    except subprocess.SubprocessError as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        raise GitFailed(f"git {arguments[0]} failed: {said or error}") from None


def _without_filters(folder: Path) -> list[str]:
    """Return the settings that turn off all filters of a checkout.

    Raises ValueError for a filter whose name has a "=", at which git would cut the setting.
    """
    listing = ("config", "-z", "--name-only", "--get-regexp", r"^filter\.")
    # git exits with 1 if there are none
    names = _git(folder, SETTINGS, *listing, exits=(0, 1)).decode().split("\0")
    keys = sorted({*filter(None, names)})
    for key in keys:
        if "=" in key:
            raise ValueError(f"the filter {key!r} cannot be turned off")
    return [f"{key}=" for key in keys]


def _git(
    folder: Path,
    settings: Sequence[str],
    *arguments: str,
    exits: Sequence[int] = (0,),
    limit_s: float = TIMEOUT_S,
) -> bytes:
    """Return the output of a command of git. Raises SubprocessError for other exit codes."""
    given = [word for setting in settings for word in ("-c", setting)]
    command = ["git", "--no-optional-locks", "-C", str(folder), *given, *arguments]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, timeout=limit_s, check=False
    )
    if done.returncode not in exits:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    """Return the variables for git, which may use no transport to fetch missing objects."""
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(KEPT)
    }
    return {**others, "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
