"""Sources: the Python files behind the objects that a user names, such as `model.py:net`."""

from __future__ import annotations

import ast
import hashlib
import uuid
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from dpbench.records import session
from dpbench.records.case import Case


def names_of(cases: Iterable[Case]) -> set[str]:
    """Return the names of the user's objects among the models and strategies of cases."""
    return {name for case in cases for name in (case.model, case.strategy) if ":" in name}


def digest(names: Iterable[str]) -> str:
    """Return a hash of the files of the objects `names`, and of the files that these import.

    A name is `file.py:object` or `package.module:object`. Only files in the current folder, or
    beside a named file, count: those of installed packages have a version. "" without such files.
    A session's model has no file, so that its hash is another one at each call.
    """
    names = [*names]
    if any(map(session.is_of, names)):
        return uuid.uuid4().hex[:16]
    found: dict[Path, bytes] = {}
    todo = [path for name in names if (path := _file(name.rpartition(":")[0]))]
    while todo:
        path = todo.pop()
        if path not in found:
            found[path] = path.read_bytes()
            todo += _imported(path, found[path])
    text = b"\0".join(found[path] for path in sorted(found))
    return hashlib.sha256(text).hexdigest()[:16] if found else ""


def _file(place: str) -> Path | None:
    """Return the file of a module, given by its path or its name; None if it is not here."""
    if place.endswith(".py"):
        path = Path(place)
        return path.resolve() if path.is_file() else None
    return _module(Path.cwd(), place) if place else None


def _module(folder: Path, name: str) -> Path | None:
    path = folder.joinpath(*name.split("."))
    candidates = (path.with_name(f"{path.name}.py"), path / "__init__.py")
    return next((one.resolve() for one in candidates if one.is_file()), None)


def _imported(path: Path, text: bytes) -> Iterator[Path]:
    """Yield the files that a file imports from its folder or from the current folder."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [base, *(f"{base}.{one.name}".strip(".") for one in node.names)]
        else:
            continue
        for name, folder in product(filter(None, names), (path.parent, Path.cwd())):
            # an import of a.b also runs a/__init__.py
            parts = name.split(".")
            for count in range(1, len(parts) + 1):
                if found := _module(folder, ".".join(parts[:count])):
                    yield found
