"""Environments: the facts of a run, and for each fact of `Environment` a change of it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from dpbench.records import Source, Trial
from dpbench.records.environment import Environment

GPU = {"name": "A100", "uuid": "u0", "power_limit_w": 400.0}
GPUS = {"driver": "550.54", "cuda": "13.0", "cudnn": "91002", "nccl": "2.27.3", "gpus": [GPU] * 2}
HOST = {"machine": "x86_64", "cpu": "EPYC", "cores": 8, "memory_bytes": 64 * 2**30}
PACKAGES = {"torch": "2.13.0", "numpy": "2.1.0"}
FACTS: dict[str, Any] = {
    "host": HOST,
    "gpus": GPUS,
    "python": "3.13.1",
    "python_build": "CPython, GCC 13.2.0",
    "gil": "on",
    "packages": PACKAGES,
    "variables": {"OMP_WAIT_POLICY": "PASSIVE"},
    "dpbench": {"version": "1"},
    "project": {},
}
"""The facts that a run, and each rank of a launch, stores about its environment."""


def _gpu(**changed: Any) -> dict[str, Any]:
    return {"gpus": {**GPUS, "gpus": [{**GPU, **changed}] * 2}}


CHANGED: dict[str, dict[str, Any]] = {
    "processor": {"host": {**HOST, "cpu": "Xeon"}},
    "cores": {"host": {**HOST, "cores": 4}},
    "memory_bytes": {"host": {**HOST, "memory_bytes": 32 * 2**30}},
    "gpus": _gpu(name="H100"),
    "gpu_count": {"gpus": {**GPUS, "gpus": [GPU] * 4}},
    "power_limits_w": _gpu(power_limit_w=250.0),
    "driver": {"gpus": {**GPUS, "driver": "610.11"}},
    "cuda": {"gpus": {**GPUS, "cuda": "12.6"}},
    "cudnn": {"gpus": {**GPUS, "cudnn": "90100"}},
    "nccl": {"gpus": {**GPUS, "nccl": "2.32.3"}},
    "python": {"python": "3.14.2"},
    "build": {"python_build": "CPython, Clang 18.1.3"},
    "gil": {"gil": "off"},
    "torch": {"packages": {**PACKAGES, "torch": "2.14.0"}},
    "numpy": {"packages": {**PACKAGES, "numpy": "1.26.0"}},
    "python_variables": {"variables": {"OMP_WAIT_POLICY": "PASSIVE", "PYTHON_GIL": "0"}},
    "variables": {"variables": {"OMP_WAIT_POLICY": "PASSIVE", "NCCL_P2P_DISABLE": "1"}},
}
"""Per field of `Environment` that a run knows, the facts that differ from `FACTS`."""
TOLD = {one.name: one.metadata["name"] for one in fields(Environment)}
"""The name in words of each field of `Environment`."""
ASKED = {one.name: one.metadata["asked"] for one in fields(Environment)}
"""How a comparison across each field of `Environment` names it."""
FORBIDS = [name for name in CHANGED if name != "memory_bytes"]


def _on_fakes(trial: Trial) -> Trial:
    cuda = _on_gpus(trial)
    return replace(cuda, provenance={**trial.provenance, "fake_gpus": True})


def _on_gpus(trial: Trial) -> Trial:
    return replace(trial, case=replace(trial.case, device_kind="cuda"))


OF_TRIALS: dict[str, Callable[[Trial], Trial]] = {
    "fakes": _on_fakes,
    "devices": _on_gpus,
    "trace": lambda trial: replace(trial, source=Source.IMPORTED),
}
"""Per field of `Environment` that only trials know, a change of a trial."""


def facts(name: str) -> dict[str, Any]:
    """Return the facts of a run in which only the fact `name` differs from `FACTS`."""
    return {**FACTS, **CHANGED[name]}
