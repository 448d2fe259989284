"""Handing: give the model of a session to the processes of a run, through a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from dpbench.measure import scratch
from dpbench.records import session
from dpbench.records.errors import UnknownName, UsageError

PARTS = ("build", "batch", "loss")
OTHERWISE = "write the model to a file, and give model='file.py:name'"


@contextmanager
def named(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the options of a run with a name in place of a `model` that is an object.

    Raises UsageError if the object lacks one of `PARTS`, or cannot be pickled, and UnknownName
    without cloudpickle.
    """
    model = options.get("model")
    if model is None or isinstance(model, str | list | tuple):
        yield {**options}
        return
    pickled = _pickled(model)
    with scratch.folder() as folder:
        path = folder / "model.pickle"
        with scratch.explained():
            # a pickle runs code, so that no other user may write or read it
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(pickled)
        os.environ[session.VARIABLE] = str(path)
        try:
            yield {**options, "model": f"{session.PLACE}:{_name(model)}"}
        finally:
            del os.environ[session.VARIABLE]


def _name(model: object) -> str:
    kind = model if isinstance(model, type) else type(model)
    return kind.__name__


def _pickled(model: object) -> bytes:
    missing = [part for part in PARTS if not hasattr(model, part)]
    if missing:
        raise UsageError(
            f"model must be a name, or an object with build(size), batch(n, seed, size) and"
            f" loss(output, target); this {_name(model)} lacks {', '.join(missing)}: give an object"
            " whose build returns the module"
        )
    try:
        import cloudpickle
    except ImportError as error:
        raise UnknownName(
            "a model that is an object needs the package cloudpickle, which is not installed:"
            f" install it with pip install 'torch-dpbench[notebook]', or {OTHERWISE}"
        ) from error
    try:
        pickled: bytes = cloudpickle.dumps(model)
    except Exception as error:  # any object may be part of the model
        why = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"this {_name(model)} cannot be sent to the measuring processes ({why}): {OTHERWISE}"
        ) from error
    return pickled
