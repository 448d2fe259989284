"""Integrations: callbacks with which a library's trainer stores its steps as a run.

Each module has the callback of the library of its name, and alone imports this library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(package: str) -> Iterator[None]:
    """Return a context for the import of a package, which says how to install one that is missing.

    Raises ModuleNotFoundError; the name of the package is that of the extra with it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise ModuleNotFoundError(
            f"dpbench.integrations.{package} needs the package {package}, which is not installed;"
            f" install it with pip install 'torch-dpbench[{package}]'",
            name=package,
        ) from error
