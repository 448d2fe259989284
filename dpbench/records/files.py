"""Files: read the text files that a user gives, and write files whole or not at all."""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpbench.records.errors import UsageError

BOM = codecs.BOM_UTF8
"""The byte order mark with which some editors begin a file."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""The errors of a disk, a quota or a limit that leaves no room for a file."""
_LINKS = 40
"""The largest number of links that Linux follows."""


class UnreadableFile(UsageError, LookupError):
    """A file that the user gave does not exist, or is not of the kind that is read there.

    Commands exit with the code of an OSError, and not with that of a wrong argument.
    """


class UnwritableFile(OSError):
    """A file cannot be written; the message names it, says why, and what to do."""

    def __init__(self, path: Path, error: OSError) -> None:
        remedy = "give another file"
        if error.errno in _FULL:
            remedy = "free space there, or give a file on another disk"
        kept = "; the earlier file is unchanged" if path.is_file() else ""
        why = error.strerror or str(error)
        super().__init__(f"cannot write {path}: {why}{kept}; {remedy}")
        self.errno = error.errno


def text_of(path: Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises OSError if the file cannot be read, and UnicodeDecodeError if it is not UTF-8.
    """
    return path.read_text(encoding="utf-8-sig")


def write(path: Path, text: str) -> Path:
    """Write a text file and the folders above it as `replacing` does, and return its path."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file in the same folder, which replaces the file `path` after the block.

    No reader finds a part of the file, and an error, a full disk or a kill leaves an earlier file
    as it was. The folders above are made, a link stays a link to the file that is replaced, and the
    mode of an earlier file is kept. For a pipe or a device, such as /dev/stdout, the path itself is
    yielded. Raises UnwritableFile.
    """
    try:
        target = _target(path)
        if target is None:
            yield path
            return
        part = _beside(target)
        try:
            yield part
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except (BrokenPipeError, UnwritableFile):
        raise
    except OSError as error:
        raise UnwritableFile(path, error) from error


def check_writable(path: Path) -> None:
    """Raise UnwritableFile if `replacing` could not write the file `path`; leave it as it is."""
    try:
        target = _target(path)
        if target is None:
            path.open("ab").close()
        else:
            _beside(target).unlink()
    except OSError as error:
        raise UnwritableFile(path, error) from error


def _target(path: Path) -> Path | None:
    """Return the file that `path` names, after all links; None if it can only be written in place.

    The link /dev/stdout leads to the file to which a shell sends the output, which must not be
    replaced.
    """
    target = path.absolute()
    for _ in range(_LINKS):
        if target.is_relative_to("/dev") or target.is_relative_to("/proc"):
            return None
        if not target.is_symlink():
            regular = not target.exists() or stat.S_ISREG(target.stat().st_mode)
            return target if regular else None
        target = target.parent / target.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _beside(target: Path) -> Path:
    """Create an empty file in the folder of `target`, with the mode of `target` if it exists."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".dpbench-{os.urandom(6).hex()}.part")
    # the mode that every new file has, which is limited by the process's umask
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        if target.exists():
            if not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            part.chmod(stat.S_IMODE(target.stat().st_mode))
    except BaseException:
        part.unlink()
        raise
    return part
