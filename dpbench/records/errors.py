"""Errors: what a caller of dpbench got wrong.

The command line exits with its code for a wrong usage for these alone, so that a bug inside dpbench
never looks like a wrong argument.
"""

from __future__ import annotations

import re
from typing import Any

from dpbench.records.spelling import Spelling, dashed, keyword

_FIELD = re.compile(r"\{(\w*)(?::([^{}]*))?\}")


class OptionError(Exception):
    """An error that may be about an option, which the command line and Python spell differently.

    `says` alone is the text. With an `option`, by its name in Python, `says` and `remedy`, what to
    do instead, are templates: {} is the option with its `value`, {name} is the fact of this name or
    else the option `name`, and {name:value} the option with a value. A flag has the value True.

    `str` is the text for a caller in Python.
    """

    def __init__(
        self, says: str, *, option: str = "", value: object = "", remedy: str = "", **facts: Any
    ) -> None:
        self.says = says
        self.option = option
        self.value = value
        self.remedy = remedy
        self.facts = facts
        super().__init__(self.told(keyword))

    def told(self, spelling: Spelling) -> str:
        """Return the text with all options in this spelling."""
        says, remedy = (self._filled(text, spelling) for text in (self.says, self.remedy))
        between = "; " if ": " in says else ": "
        return f"{says}{between}{remedy}" if remedy else says

    def _filled(self, template: str, spelling: Spelling) -> str:
        def part(found: re.Match[str]) -> str:
            name, value = found[1], found[2] or ""
            if not name:
                return spelling(self.option, self.value)
            if name in self.facts:
                return str(self.facts[name])
            return spelling(name, True if value == "True" else value)

        return _FIELD.sub(part, template) if self.option else template


class UsageError(OptionError, ValueError):
    """An argument, an option or a file's content is not what dpbench accepts.

    Its text says what is wrong, where, and what to give instead.
    """


class UnknownName(UsageError, LookupError):
    """A name is given that names nothing, such as a model, a run or a case that does not exist."""


class NotUnix(ImportError):
    """The system lacks what dpbench needs of Unix."""


def told(error: BaseException) -> str:
    """Return the text of any error, with options as on the command line."""
    return error.told(dashed) if isinstance(error, OptionError) else str(error)
