"""Fake: whether facts describe fake GPUs, on which torch's CUDA build runs without a GPU.

A fake GPU computes on the host, or not at all. Runs on it show that the code works, and their times
mean nothing.
"""

from __future__ import annotations

from dpbench.records.facts import Surroundings, TrialFacts

NAME = "Fake GPU"
"""The beginning of a fake GPU's name, unless its user has given it another one."""
DRIVER = "fake"
"""A part of the version of a fake GPU's driver."""
WHY = "the GPUs are fake, and the times on them mean nothing"
"""The reason, as a clause, why no question is answered from runs on fake GPUs."""


def fake_gpus(facts: Surroundings) -> bool:
    """Return whether the GPUs of a run or of a trial are fake.

    They are if the driver's version says so, or the names of all GPUs.
    """
    names = [gpu.name for gpu in facts.gpus.gpus or ()] or [facts.gpu]
    return (
        (isinstance(facts, TrialFacts) and facts.fake_gpus)
        or DRIVER in str(facts.gpus.driver)
        or all(str(name).startswith(NAME) for name in names)
    )
