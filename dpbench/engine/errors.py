"""Errors: what a replica raised, as the caller is to see it."""

from __future__ import annotations

import traceback
from typing import Any

from dpbench.hardware.device import Device

_REPLICA = "_dpbench_replica"


class Refused(ValueError):
    """A schedule cannot train this module with this loss and optimizer; raised before anything has changed.

    The message names the reason and the way out.
    """


def in_replica(error: BaseException, replica: int, device: Device) -> BaseException:
    """Return the exception to raise in the caller, with a note "in replica i on device NAME".

    Type and message are torch's, the original is its `__cause__`. An exception that cannot be built from a message
    becomes a RuntimeError; an exit or an interrupt stays itself.
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
    """Return the replica that raised an exception which `in_replica` returned; None for any other exception."""
    replica: int | None = error.__dict__.get(_REPLICA)
    return replica


def _rebuilt(error: Exception, message: str) -> Exception:
    """Return an exception of the same type with another message, where the type can be built from one."""
    kind: Any = type(error)
    text = _Plain(message) if kind is KeyError else message
    try:
        built: Exception = kind(message=text) if getattr(kind, "message", None) else kind(text)
    except Exception:
        return RuntimeError(message)
    return built


class _Plain(str):
    """A text that shows its line breaks even where Python prints the repr of it, as for a KeyError."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
