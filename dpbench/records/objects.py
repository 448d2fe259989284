"""Objects: check that a user's object such as model.py:net exists, without importing its code.

The syntax tree of a file shows its names. Code that makes names in ways that no tree shows is
trusted.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from dpbench.records import session
from dpbench.records.errors import UnknownName
from dpbench.records.registry import LIBRARIES, UNPRINTABLE, near
from dpbench.records.visible import visible

FORMS = "file.py:name or package.module:name"
"""The ways to name a user's object."""
_DYNAMIC = ("__path__", "__getattr__", "sys.modules", "globals()", "import *")
"""Code with which a module has names, or a package modules, that its syntax tree does not show."""
_LISTED = 12
"""The largest number of names that an error lists."""


def is_own(name: str) -> bool:
    """Return whether a name is that of a user's object, or of a file, and not one of dpbench's."""
    return ":" in name or name.endswith(".py")


def check(name: str, option: str) -> None:
    """Raise UnknownName if the user's object `name` cannot be found.

    `name` is `file.py:object`, `package.module:object`, or a library's model, such as
    `transformers:gpt2`. `option` is the option that gives the name.
    """
    sought = _Sought(visible(name), option)
    if visible(name) != name:
        raise sought.unknown(UNPRINTABLE, "rename the file")
    if session.is_of(name):
        session.file_of(name)
        return
    place, _, attribute = name.rpartition(":")
    in_file = place.endswith(".py")
    if not attribute or not (in_file or all(place.split("."))):
        like = f", such as {sought.example(name)}" if name.endswith(".py") else ""
        raise sought.unknown(remedy=f"give {FORMS}{{like}}", like=like)
    if in_file:
        sought.check_file(place)
        sought.check_name(place, place, attribute)
    else:
        sought.check_module(place, attribute)


@dataclass(frozen=True)
class _Sought:
    """The name of a user's object, and the option that gives it."""

    name: str
    option: str

    def unknown(self, says: str = "", remedy: str = "", **facts: Any) -> UnknownName:
        """Return the error of this name; the texts are templates."""
        template = f"{{}}: {says}" if says else "{}"
        return UnknownName(template, option=self.option, value=self.name, remedy=remedy, **facts)

    def check_file(self, path: str) -> None:
        if Path(path).is_file():
            return
        folder = Path(path).parent
        beside = [one.stem for one in folder.glob("*.py")] if folder.is_dir() else []
        raise self.unknown(
            "there is no file {file}{where}",
            _meant(Path(path).stem, sorted(beside)) or "correct the path",
            file=path,
            where="" if Path(path).is_absolute() else f" in the folder {Path.cwd()}",
        )

    def example(self, path: str) -> str:
        """Return the name of the last object that a file makes, or "file.py:name"."""
        self.check_file(path)
        made = [
            node
            for node in self._tree(path).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        ]
        names = [one.id for node in made for one in node.targets if isinstance(one, ast.Name)]
        return f"{path}:{names[-1] if names else 'name'}"

    def check_module(self, place: str, attribute: str) -> None:
        importlib.invalidate_caches()
        path = [str(Path.cwd()), *sys.path]
        above: list[str] = []
        file = ""
        for part in place.split("."):
            if file and _is_dynamic(file):
                return
            spec = PathFinder.find_spec(part, path)
            if spec is None and not above:
                self._check_installed(part)
                return
            if spec is None:
                raise self.unknown(
                    "the package {package} has no module {part}",
                    "correct the name before ':'",
                    package=".".join(above),
                    part=part,
                )
            above.append(part)
            path = [*(spec.submodule_search_locations or ())]
            file = spec.origin if spec.origin and spec.origin.endswith(".py") else ""
        first = attribute.partition(".")[0]
        if file and place not in LIBRARIES and not PathFinder.find_spec(first, path):
            self.check_name(file, place, first)

    def _check_installed(self, top: str) -> None:
        """Raise UnknownName unless a finder of an installed package knows the module."""
        if top in sys.modules or importlib.util.find_spec(top):
            return
        if top in LIBRARIES:
            raise UnknownName(
                "{} needs {top}, which is not installed",
                option=self.option,
                value=self.name,
                remedy="pip install 'torch-dpbench[{extra}]'",
                top=top,
                extra=LIBRARIES[top],
            )
        raise self.unknown(
            "cannot find the module {top} in the folder {here} or on Python's path",
            top=repr(top),
            here=Path.cwd(),
        )

    def check_name(self, file: str, place: str, attribute: str) -> None:
        """Raise UnknownName if a file lacks a name on its top level, or has only a class of it.

        `place` is the file as the user names it.
        """
        tree = self._tree(file)
        if not _is_dynamic(file) and attribute not in _assigned(ast.walk(tree)):
            known = _names(tree)
            raise self.unknown(
                "{place} has {known}, but no {attribute}" if known else "{place} has no names",
                _meant(attribute, known) or "correct the name after ':'",
                place=place,
                known=", ".join([*known[:_LISTED], *(["…"] if known[_LISTED:] else [])]),
                attribute=attribute,
            )
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        if self.option == "models" and any(
            node.name == attribute and not _is_usable(node) for node in classes
        ):
            raise self.unknown(
                "{attribute} is a class, and dpbench needs an object with build, batch and loss",
                "add `model = {attribute}()` to the file, and give {place}:model",
                attribute=attribute,
                place=place,
            )

    def _tree(self, file: str) -> ast.Module:
        try:
            return ast.parse(Path(file).read_bytes(), file)
        except (SyntaxError, ValueError) as error:
            where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise self.unknown(
                "{where}: {kind}: {why}",
                "correct the file",
                where=f"{file}{where}",
                kind=type(error).__name__,
                why=error,
            ) from error


def _is_usable(node: ast.ClassDef) -> bool:
    """Return whether a class may serve as an object, because it has functions of its own."""
    return any(kind in ast.unparse(node) for kind in ("staticmethod", "classmethod"))


def _meant(name: str, known: Sequence[str]) -> str:
    return near(name, known).removeprefix("; ")


def _is_dynamic(file: str) -> bool:
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    return any(code in text for code in _DYNAMIC)


def _names(tree: ast.Module) -> list[str]:
    """Return the public names that a module itself makes: objects, then classes and functions."""
    made, defined = (ast.Assign, ast.AnnAssign), (ast.ClassDef, ast.FunctionDef)
    nodes = (node for kind in (made, defined) for node in tree.body if isinstance(node, kind))
    parts = (
        part for node in nodes for part in (ast.walk(node) if isinstance(node, made) else (node,))
    )
    return [name for name in dict.fromkeys(_assigned(parts)) if not name.startswith("_")]


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that these parts of a module define, assign or import."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (one.asname or one.name.partition(".")[0] for one in node.names)
