"""Checkout: the commit and the uncommitted changes of a folder, as git states them.

This is the only module that runs git. A checkout may come from others, and its configuration may
name programs that git runs: here git runs none of them, and writes and fetches nothing.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TIMEOUT_S = 10
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
    folder: Path, settings: Sequence[str], *arguments: str, exits: Sequence[int] = (0,)
) -> bytes:
    """Return the output of a command of git. Raises SubprocessError for other exit codes."""
    given = [word for setting in settings for word in ("-c", setting)]
    command = ["git", "--no-optional-locks", "-C", str(folder), *given, *arguments]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode not in exits:
        raise subprocess.CalledProcessError(done.returncode, command)
    return done.stdout.strip()


def _environment() -> dict[str, str]:
    """Return the variables for git, which may use no transport to fetch missing objects."""
    others = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(KEPT)
    }
    return {**others, "GIT_ALLOW_PROTOCOL": "", "GIT_NO_LAZY_FETCH": "1"}
