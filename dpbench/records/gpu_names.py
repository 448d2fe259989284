"""GPU names: whether two names, of a driver or a described machine, mean the same model of GPU."""

from __future__ import annotations

import re

_LEFT_OUT = re.compile(r"nvidia|tesla|geforce|amd|instinct|generation|sxm\d*|hbm\d\w*|\d+gb")
"""Matches the words that one name of a GPU has and another one leaves out."""
SIZE = re.compile(r"\d+gb")
"""Matches a word that states a size of memory."""


def same_gpu(one: str, other: str) -> bool:
    """Return whether two names mean the same GPU, such as "Tesla T4" and "NVIDIA T4".

    Sizes of memory count only if both names state one.
    """
    sizes, others = _sizes(one), _sizes(other)
    return _model(one) == _model(other) and (not sizes or not others or sizes == others)


def _model(name: str) -> set[str]:
    return {word for word in words(name) if not _LEFT_OUT.fullmatch(word)}


def _sizes(name: str) -> set[str]:
    return {word for word in words(name) if SIZE.fullmatch(word)}


def words(name: str) -> list[str]:
    """Return the words of a name, in lower case."""
    return re.findall(r"[a-z0-9]+", name.lower())
