"""Checkpoints: load weights whose names have the prefix "module." of a wrapper, or lack it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from dpbench.records.words import count

PREFIX = "module."


def check_prefix(expected: Sequence[str], given: Sequence[str], *, strict: bool) -> None:
    """Raise RuntimeError if none of the given names is among the expected names.

    The message states whether the prefix "module." is the reason. Without this check, torch would
    silently load nothing with `strict=False`. With `strict=True`, names that differ in more than
    the prefix are left to torch's own error, which lists them.
    """
    if not expected or set(expected) & set(given):
        return
    if {PREFIX + name for name in given} & set(expected):
        problem = (
            f'the names lack the prefix "{PREFIX}", because the state dict is from an unwrapped'
            " module"
        )
        remedy = (
            "load the state dict into the unwrapped module: wrapped.module.load_state_dict(state)"
        )
    elif set(given) & {PREFIX + name for name in expected}:
        problem = (
            f'the names have the prefix "{PREFIX}" once too often, because the state dict is from a'
            " wrapped module"
        )
        remedy = (
            "strip the prefix:"
            " torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state, 'module.')"
        )
    elif not strict and given:
        problem = f'the names differ in more than the prefix "{PREFIX}"'
        remedy = "load a state dict that was saved from a module of this class"
    else:
        return  # torch's own message lists the missing names
    silent = (
        " (with strict=False, torch would raise no error and load nothing)" if not strict else ""
    )
    raise RuntimeError(
        f"none of the names in the state dict ({count(len(given), 'name')}, such as {given[0]!r})"
        f" is among the names of this module ({count(len(expected), 'name')}, such as"
        f" {expected[0]!r}): {problem}{silent}; {remedy}"
    )


def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> Any:
    """Load a state dict into a module, whether or not the names in it have the prefix "module.".

    DataParallel and DistributedDataParallel put this prefix before the wrapped module's names. It
    is added or removed, repeatedly if necessary, until names match; `state_dict` itself stays
    unchanged. `strict`, `assign` and the returned value are those of torch's
    `Module.load_state_dict`. Raises RuntimeError if none of the names match.
    """
    expected = set(module.state_dict())
    given = OrderedDict(state_dict)
    given._metadata = dict(getattr(state_dict, "_metadata", None) or {})  # type: ignore[attr-defined]
    fitting = given
    while (
        given and not expected & set(fitting) and all(name.startswith(PREFIX) for name in fitting)
    ):
        consume_prefix_in_state_dict_if_present(fitting, PREFIX)
    while not expected & set(fitting) and _below(expected, fitting):
        fitting = _prefixed(fitting)
    check_prefix(list(expected), list(fitting), strict=False)
    return module.load_state_dict(fitting, strict=strict, assign=assign)


def _below(expected: set[str], given: Mapping[str, Any]) -> bool:
    """Return whether the names may match with the prefix "module." before them.

    An expected name must start with the prefix and end with one of the given names.
    """
    return any(
        name.startswith(PREFIX) and name.removeprefix(PREFIX).endswith(tuple(given))
        for name in expected
    )


def _prefixed(given: Any) -> Any:
    prefixed = OrderedDict((PREFIX + name, value) for name, value in given.items())
    versions = {
        PREFIX + name if name else PREFIX[:-1]: facts for name, facts in given._metadata.items()
    }
    prefixed._metadata = versions  # type: ignore[attr-defined]
    return prefixed
