"""Options are spelled in one place: texts name them, and a template names only what there is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dpbench
from dpbench.cli import cli

ROOT = Path(dpbench.__file__).parent
KNOWN = {
    spelling
    for command in cli.commands.values()
    for param in command.params
    for spelling in param.opts
    if spelling.startswith("--")
}
FIELD = re.compile(r"\{(\w*)(?::[^{}]*)?\}")
FACES = ("cli", "api")
"""The packages that spell options."""
COMMANDS = {"commands.py", "_template.py"}
"""Files with commands, and the example of a user's file."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT), ast.parse(path.read_text())


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts in a part of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def documented(tree: ast.Module) -> set[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return {ast.get_docstring(node, clean=False) or "" for node in nodes}


def test_only_the_faces_and_the_lists_of_options_and_commands_spell_an_option() -> None:
    spelled = [
        (str(path), option, text)
        for path, tree in trees()
        if path.parts[0] not in FACES and path.name not in COMMANDS
        if str(path) not in ("records/options.py", "records/spelling.py")
        for text in {*texts(tree)} - documented(tree)
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
        if option in KNOWN
    ]
    assert spelled == []


def test_the_templates_of_errors_name_options_and_facts() -> None:
    names = {one.removeprefix("--").replace("-", "_") for one in KNOWN}
    wrong = []
    found = 0
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            given = {one.arg: one.value for one in node.keywords if one.arg}
            if "option" not in given:
                continue
            found += 1
            templates = [*node.args[:1], *filter(None, [given.get("remedy")])]
            parts = [text for template in templates for text in texts(template)]
            named = {one for text in parts for one in FIELD.findall(text)} - given.keys() - {""}
            option = given["option"]
            named |= {option.value} if isinstance(option, ast.Constant) else set()
            wrong += [(str(path), one) for one in named - names]
    assert found > 40
    assert wrong == []
