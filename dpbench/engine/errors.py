"""Errors: the exception `Refused`, and the exception raised in the caller if a replica fails."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dpbench.hardware.device import Device

_REPLICA = "_dpbench_replica"


class Refused(ValueError):
    """The engine cannot run this module, loss or optimizer on these devices under the schedule.

    It is raised before the step changes any weights. Its message gives the reason and, if there is
    one, an alternative.
    """


def in_replica(error: BaseException, replica: int, device: Device) -> BaseException:
    """Return the exception to raise in the caller for `error`, which a replica has raised.

    It has the type and message that torch.nn.DataParallel would give it, and `error` as its
    `__cause__`. If an exception of that type cannot be constructed from a message, it is a
    RuntimeError. For an exit or interrupt it is `error` itself. In all cases it has the note "in
    replica i on device NAME".
    """
    if isinstance(error, Exception):
        number = device.torch_device.index
        where = f"in replica {replica} on device {device.index if number is None else number}"
        trace = "".join(traceback.format_exception(error))
        cause = error
        error = _rebuilt(error, f"Caught {type(error).__name__} {where}.\nOriginal {trace}")
        error.__cause__ = cause
    error.add_note(f"in replica {replica} on device {device.name}")
    error.__dict__[_REPLICA] = replica
    return error


def call_on(
    device: Device, module: Any, arguments: Iterable[Any], keywords: Mapping[str, Any]
) -> Any:
    """Call a replica on `device`, and return its output; a RuntimeError gets hints as notes."""
    try:
        return module(*arguments, **keywords)
    except RuntimeError as error:
        for hint in _left_behind(module, device):
            error.add_note(hint)
        raise


def _left_behind(module: Any, device: Device) -> Iterator[str]:
    """Yield a hint for each tensor that is a plain attribute and therefore not on `device`."""
    for name, part in module.named_modules() if isinstance(module, nn.Module) else ():
        for key, value in vars(part).items():
            if isinstance(value, torch.Tensor) and value.device != device.torch_device:
                where = f"{name}.{key}" if name else key
                yield (
                    f"hint: the attribute {where} is a tensor on {value.device}, and neither a"
                    " parameter nor a buffer, so it stays there; if forward needs it on"
                    f" {device.torch_device}, register it: module.register_buffer({key!r}, tensor)"
                )


def replica_of(error: BaseException) -> int | None:
    """Return the index of the replica that raised `error`, or None for any other error."""
    replica: int | None = error.__dict__.get(_REPLICA)
    return replica


def without_closure(error: Exception, optimizer: str) -> Exception:
    """Return the error of an optimizer's step, with what to do if the step needs a closure."""
    return _rebuilt(
        error,
        f"{error}\nTrainStep gives {optimizer}.step() no closure; if it needs one, to evaluate the"
        " loss again, write the loop yourself, around a dpbench.DataParallel(module, device_ids)",
    )


def _rebuilt(error: Exception, message: str) -> Exception:
    kind: Any = type(error)
    text = _Plain(message) if kind is KeyError else message
    try:
        built: Exception = kind(message=text) if getattr(kind, "message", None) else kind(text)
    except Exception:
        return RuntimeError(message)
    return built


class _Plain(str):
    """A string that is its own repr, because a KeyError is printed as the repr of its message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
