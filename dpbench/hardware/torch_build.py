"""The build of the installed torch, from the file of its versions: torch is not loaded."""

from __future__ import annotations

import runpy
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from dpbench.records import vendors
from dpbench.records.vendors import Vendor


@cache
def versions() -> dict[str, Any] | None:
    """Return `__version__` and the names in torch/version.py, such as `cuda` and `hip`.

    The file may be missing, as in a build that runs from its sources: only torch itself knows then.
    None without torch.
    """
    try:
        installed = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return None
    facts = Path(str(installed.locate_file("torch/version.py")))
    named = runpy.run_path(str(facts)) if facts.exists() else {}
    return {"__version__": installed.version, **named}


def vendor() -> Vendor:
    """Return the maker of the GPUs that the installed torch is built for; NVIDIA if unknown."""
    return vendors.of((versions() or {}).get("hip"))
