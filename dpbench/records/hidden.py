"""Hidden: passwords and keys, which dpbench neither stores nor shows, and what no page shows.

Command lines and errors may contain secrets. The texts of a run pass through `everywhere` where
they are stored, and where they are read, because earlier versions stored them. `shared` leaves out
what pages and exports, which are passed on to others, must not reveal besides.

A text is a secret if its option, variable or key speaks of one, or if it looks like a token.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MARK = "***"
"""The text in place of a secret."""
COMMAND = "command"
"""The key of a command line in facts."""

_STRONG = "passw|passphrase|secret|credential|apikey|accesskey|privatekey|authoriz|webhook"
"""Parts of a name that speak of a secret wherever they are."""
_LAST = "token|key|auth|pwd|pass|creds?|cookie|jwt|sig|signature|bearer"
"""Ends of the last word of a name that speak of a secret."""
_MANY = "tokens|keys"
"""Plurals of these, which may also name a number, as in --max-tokens."""
_OF_TEXT = {"pad", "eos", "bos", "unk", "mask", "sep", "cls"}
"""Words before "token" that speak of a text's tokens."""
_WHERE = {"file", "path", "dir", "env"}
"""Last words of a name that speak of the place of a secret."""
_REVISIONS = {"revision", "rev", "ref", "commit", "sha", "hash", "digest", "checksum", "version"}
"""Last words of a name whose value may look like a token of 40 hexadecimal digits."""

_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:"
    r"hf_[A-Za-z0-9]{16,}"
    r"|sk-(?=[\w-]*\d)[\w-]{20,}|[prs]k_(?:live|test)_\w{10,}"
    r"|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl[a-z]{1,4}-[\w-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}"
    r"|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|wandb_v1_\w{20,}"
    r"|eyJ[\w-]{6,}\.[\w-]{6,}(?:\.[\w-]*)?"
    r")"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
"""Tokens of well-known services, JSON web tokens, and private keys."""
_HEX = re.compile("[0-9a-f]{40}")
"""Keys of Weights & Biases; also a commit of git, so that it counts as a whole word alone."""
_LOGIN = re.compile(r"(?<=://)([^\s/@:'\"]*):[^\s/@'\"]+(?=@)")
"""The user and password of a URL."""
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}")
_VALUE = r"'[^'\n]*'|\"(?:\\.|[^\"\\\n])*\""
_ASSIGNED = re.compile(rf"(?<![\w.+-])([\w.+-]+)(=)({_VALUE}|[^\s'\"&;,)\]}}]+)")
"""NAME=VALUE in a text or in the query of a URL."""
_ITEM = re.compile(rf"(['\"][\w.-]+['\"])(\s*:\s*)({_VALUE})")
"""'NAME': 'VALUE' in JSON or in the text of a dictionary."""
_OPTION = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w.-]*)(\s+)({_VALUE}|(?!--|-\w(?:\s|$))[^\s'\"]+)")
"""--NAME VALUE in a text; another option is no value."""


def everywhere(data: Any) -> Any:
    """Return a copy of plain data in which `MARK` replaces all secrets."""
    if isinstance(data, str):
        return text(data)
    if isinstance(data, Mapping):
        return {name: _fact(name, value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return type(data)(map(everywhere, data))
    return data


def _fact(name: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return everywhere(value)
    if name == COMMAND:
        return command(value)
    return MARK if _speaks(str(name), value) else text(value)


def text(given: str) -> str:
    """Return a text, such as an error's, in which `MARK` replaces all secrets."""
    found = _TOKEN.sub(MARK, given)
    found = _LOGIN.sub(rf"\1:{MARK}", found)
    found = _BEARER.sub(rf"\1 {MARK}", found)
    for pattern in (_ASSIGNED, _ITEM, _OPTION):
        found = pattern.sub(_named, found)
    return found


def _named(match: re.Match[str]) -> str:
    """Return a match of a name, a separator and a value, without a secret value."""
    name, between, value = match.groups()
    quote = value[0] if value[0] in "'\"" else ""
    if not _speaks(name, value.strip("'\"")):
        return match[0]
    return f"{name}{between}{quote}{MARK}{quote}"


def command(given: str) -> str:
    """Return a command line in which `MARK` replaces all secrets.

    It is unchanged if it has none.
    """
    try:
        words = shlex.split(given)
    except ValueError:  # no shell could run it: it was cut, or another program wrote it
        return text(given)
    shown = [*_shown(words)]
    return given if shown == words else shlex.join(shown)


def _shown(words: Sequence[str]) -> Iterator[str]:
    option = ""
    for word in words:
        name, equals, value = word.partition("=")
        if equals and re.fullmatch(r"[\w.+-]+", name):
            yield f"{name}={_value(name, value)}"
        else:
            yield text(word) if _is_option(word) else _value(option, word)
        option = word if _is_option(word) and not equals else ""


def _is_option(word: str) -> bool:
    return word.startswith("--") or (word.startswith("-") and len(word) == 2)


def _value(name: str, value: str) -> str:
    """Return the value of an option or a variable, or `MARK` for a secret one."""
    key = _HEX.fullmatch(value) and not _REVISIONS & {*_parts(name)[-1:]}
    return MARK if key or _speaks(name, value) else text(value)


def _parts(name: str) -> list[str]:
    """Return the words of a name, such as hf and token of --hf-token, hfToken and HF_TOKEN."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return re.findall("[a-z0-9]+", spaced.lower())


def _speaks(name: str, value: str) -> bool:
    """Return whether a name speaks of a secret, and its value may be one."""
    parts = _parts(name)
    if not parts or not value or value == MARK or parts[-1] in _WHERE:
        return False
    if re.search(_STRONG, "".join(parts)):
        return True
    if re.search(f"(?:{_MANY})$", parts[-1]):
        return not re.fullmatch(r"[\d.,_-]+", value)
    return bool(re.search(f"(?:{_LAST})$", parts[-1])) and not _OF_TEXT & {*parts[-2:-1]}


def to_fill_in(given: str) -> str:
    """Return a command line to run, with a comment of the shell that says what to fill in."""
    if MARK not in given:
        return given
    words = shlex.split(given)
    names = dict.fromkeys(_unfilled(words))
    of = f" of {', '.join(names)}" if names else ""
    return f"{given}  # fill in: {MARK} stands for the value{of}, which dpbench does not store"


def _unfilled(words: Sequence[str]) -> Iterator[str]:
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if equals and MARK in value:
            yield name
        elif word == MARK and _is_option(before):
            yield before


def shared(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run or of a trial that pages and exports show: without the host name.

    The machines of a launch keep their names, by which a report says which of them is slow.
    """
    host = {key: value for key, value in provenance.get("host", {}).items() if key != "name"}
    return {**provenance, **({"host": host} if host else {})}
