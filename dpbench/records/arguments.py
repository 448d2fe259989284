"""Arguments: which of a batch's inputs forward gets by position, and which by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from dpbench.records.errors import UsageError

T = TypeVar("T")


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that forward gets for `inputs`.

    A tuple has positional arguments, and a plain dict keyword arguments. Any other value, such as
    an object of a subclass of dict, is the only positional argument.
    """
    if type(inputs) is dict:
        return (), inputs
    return inputs if isinstance(inputs, tuple) else (inputs,), {}


def call(forward: Callable[..., T], inputs: Any) -> T:
    """Return what `forward` returns for `inputs`."""
    arguments, named = arguments_of(inputs)
    return forward(*arguments, **named)


def check_names(module: Any, inputs: Any) -> None:
    """Raise UsageError if `inputs` is a plain dict whose keys forward does not accept as names."""
    if type(inputs) is not dict:
        return
    try:
        signature = inspect.signature(module.forward)
    except ValueError:  # a forward that is not written in Python
        return
    try:
        signature.bind(**inputs)
    except TypeError as error:
        raise UsageError(
            "a dict of inputs has the arguments of forward by name, but the forward of"
            f" {type(module).__name__} does not accept these names ({error}); to pass the dict"
            " itself, give a tuple with the dict, (inputs,)"
        ) from None
