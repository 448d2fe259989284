"""Errors: the exceptions that the engine raises, and how an exception of a replica reaches the caller."""

from __future__ import annotations

import traceback
from typing import Any

from dpbench.hardware.device import Device

_REPLICA = "_dpbench_replica"


class Refused(ValueError):
    """The engine cannot train this module with this schedule, loss and optimizer; raised before weights change.

    The message gives the reason, and an alternative if there is one.
    """


def in_replica(error: BaseException, replica: int, device: Device) -> BaseException:
    """Return the exception to raise in the caller, with a note "in replica i on device NAME".

    The returned exception has the type and message that torch.nn.DataParallel would give it, and the original exception
    as its `__cause__`. An exception that cannot be constructed from a message is replaced by a RuntimeError. Exits and
    interrupts are returned unchanged.
    """
    if isinstance(error, Exception):
        number = device.torch_device.index
        where = f"in replica {replica} on device {device.index if number is None else number}"
        trace = "".join(traceback.format_exception(error))
        cause, error = error, _rebuilt(error, f"Caught {type(error).__name__} {where}.\nOriginal {trace}")
        error.__cause__ = cause
    error.add_note(f"in replica {replica} on device {device.name}")
    error.__dict__[_REPLICA] = replica
    return error


def replica_of(error: BaseException) -> int | None:
    """Return the index of the failed replica if `in_replica` returned this exception; otherwise None."""
    replica: int | None = error.__dict__.get(_REPLICA)
    return replica


def _rebuilt(error: Exception, message: str) -> Exception:
    """Return an exception of the same type with another message.

    Return a RuntimeError if an exception of this type cannot be constructed from a message.
    """
    kind: Any = type(error)
    text = _Plain(message) if kind is KeyError else message
    try:
        built: Exception = kind(message=text) if getattr(kind, "message", None) else kind(text)
    except Exception:
        return RuntimeError(message)
    return built


class _Plain(str):
    """A string whose repr keeps line breaks, because Python prints the repr of a KeyError's message."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
