"""Templates: the files from which pages and the output of notebooks are made."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

FOLDER = Path(__file__).parent


@cache
def template(name: str, folder: Path = FOLDER) -> Template:
    """Return a template of a folder, which may use those here; it escapes all but markup."""
    environment = Environment(
        loader=FileSystemLoader([folder, FOLDER]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def text_of(name: str, folder: Path = FOLDER) -> str:
    """Return the text of a file in a folder of templates."""
    return (folder / name).read_text(encoding="utf-8")


def allowed(content: str) -> str:
    """Return the expression that allows this script or style sheet in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
