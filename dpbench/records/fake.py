"""Fake: whether facts describe fake GPUs, on which torch's CUDA build runs without a GPU.

A fake GPU computes on the host, or not at all. Runs on it show that the code works, and their times
mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FACT = "fake_gpus"
"""The key of a trial's facts that is true if the facts of its run describe fake GPUs."""
NAME = "Fake GPU"
"""The beginning of a fake GPU's name, unless its user has given it another one."""
DRIVER = "fake"
"""A part of the version of a fake GPU's driver."""
WHY = "the GPUs are fake, and the times on them mean nothing"
"""The reason, as a clause, why no question is answered from runs on fake GPUs."""


def fake_gpus(facts: Mapping[str, Any]) -> bool:
    """Return whether the GPUs in the provenance of a run or of a trial are fake.

    They are if the driver's version says so, or the names of all GPUs.
    """
    gpus = facts.get("gpus") or {}
    names = [gpu.get("name") for gpu in gpus.get("gpus") or ()] or [facts.get("gpu")]
    return (
        bool(facts.get(FACT))
        or DRIVER in str(gpus.get("driver"))
        or all(str(name).startswith(NAME) for name in names)
    )
