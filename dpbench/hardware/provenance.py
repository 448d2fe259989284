"""Provenance: the facts about host, software and code that are needed to repeat a measurement.

The worker process adds the facts for which torch must be loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from dpbench.hardware import checkout, interpreter
from dpbench.hardware.readings import reading
from dpbench.records import sources
from dpbench.records.environment import HIDDEN, Environment
from dpbench.records.facts import RunFacts, Surroundings
from dpbench.records.visible import visible

PACKAGES = ("torch", "numpy", "pandas", "matplotlib", "nvidia-ml-py", "asv", "scipy")
VARIABLES = (
    "ASV_COMMIT",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "DPBENCH_KEEP_MEMORY",
    "GOMP_",
    "HIPBLASLT_",
    "HIP_",
    "HSA_",
    "KMP_",
    "LD_PRELOAD",
    "MALLOC_",
    "MIOPEN_",
    "MKL_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "PYTHONMALLOC",
    "PYTHONOPTIMIZE",
    "PYTHON_GIL",
    "PYTHON_JIT",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_",
    "PYTORCH_HIP_",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
    "PYTORCH_TUNABLEOP_",
    "RCCL_",
    "ROCBLAS_",
    "ROCR_VISIBLE_DEVICES",
    "TORCHDYNAMO_",
    "TORCHINDUCTOR_",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_COMPILE_",
    "TORCH_CUDNN_",
    "TORCH_NCCL_",
)
"""The environment variables that change results; a name that ends in "_" is a prefix."""
BUILDS = (
    "--disable-gil",
    "--enable-experimental-jit",
    "--enable-optimizations",
    "--with-lto",
    "--with-pydebug",
)
"""The options of CPython's build that change its speed."""


def collect(gpus: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return facts about host, software and version control as plain data.

    `gpus` are the facts of `gpus.describe`.
    """
    return {
        **environment(gpus),
        "dpbench": {"version": own_version(), **checkout.own(Path(__file__).parent)},
        "project": checkout.facts(Path()),
        "command": visible(shlex.join(["dpbench", *sys.argv[1:]])),
    }


def environment(gpus: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the facts that `Environment.of` reads, as plain data; for `gpus`, see `collect`."""
    return {
        "host": host_facts(),
        "gpus": gpus or {},
        "python": platform.python_version(),
        "python_build": _build_of_python(),
        "gil": interpreter.gil(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "variables": variables(os.environ),
    }


def _build_of_python() -> str:
    """Return implementation, compiler and options of this interpreter, such as "CPython, GCC"."""
    options = shlex.split(sysconfig.get_config_var("CONFIG_ARGS") or "")
    known = [one for one in options if one.partition("=")[0] in BUILDS]
    compiler = " ".join(platform.python_compiler().split())
    return ", ".join([platform.python_implementation(), compiler, *sorted(known)])


def variables(environ: Mapping[str, str], known: Iterable[str] = VARIABLES) -> dict[str, str]:
    """Return those environment variables that change results, sorted by name.

    A name in `known` that ends in "_" is a prefix. A value with a path or with the name of the user
    is replaced by `HIDDEN` and a short hash, by which two such values differ.
    """
    users = {environ[name] for name in ("USER", "LOGNAME", "USERNAME") if environ.get(name)}

    def shown(value: str) -> str:
        personal = users & set(re.split(r"\W+", value))
        return _hidden(value) if "/" in value or "\\" in value or personal else value

    return {
        name: shown(value)
        for name, value in sorted(environ.items())
        if any(name.startswith(one) if one.endswith("_") else name == one for one in known)
    }


def _hidden(value: str) -> str:
    return f"{HIDDEN} sha256:{hashlib.sha256(os.fsencode(value)).hexdigest()[:8]}"


def host_facts() -> dict[str, Any]:
    """Return the facts about this machine that are the same in every run."""
    import psutil

    return {
        "name": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_key(facts: dict[str, Any]) -> str:
    """Return a hash that identifies a machine by its CPU, its cores and its GPUs.

    `facts` are the result of `collect`. The host name is not used, because it differs between
    containers. For a launch, the hash identifies each of its machines, with its ranks.
    """
    run = RunFacts.of(facts)
    others = run.hosts.machines
    # ids that change with each boot: only their equality counts below
    ids = [host.machine for host in others]
    stable = [
        _stable(run),
        *((_stable(host.facts), host.ranks, ids.index(host.machine)) for host in others),
    ]
    return hashlib.sha256(
        json.dumps(stable if others else stable[0], sort_keys=True).encode()
    ).hexdigest()[:16]


def _stable(facts: Surroundings) -> list[Any]:
    host = {key: getattr(facts.host, key) for key in ("machine", "cpu", "cores")}
    return [host, [gpu.uuid for gpu in facts.gpus.gpus or ()]]


def code_key(facts: dict[str, Any], names: Iterable[str] = ()) -> str:
    """Return a key of the code that ran, from `facts`, the result of `collect`.

    It consists of dpbench's version and commit, the project's commit, uncommitted changes of either
    checkout, the environment of each machine, and the files of the user's objects `names`.
    """
    run = RunFacts.of(facts)
    checkouts = [run.dpbench, run.project]
    machines = [run, *(host.facts for host in run.hosts.machines)]
    parts = [
        run.dpbench.version or "",
        *(one.commit or "" for one in checkouts),
        (run.variables or {}).get("ASV_COMMIT", ""),
        *dict.fromkeys(Environment.of(one).key for one in machines),
        *(one.changes for one in checkouts),
        sources.digest(names),
    ]
    return " ".join(parts).rstrip()


def version(name: str) -> str:
    """Return the version of an installed package; empty if it is not installed, or unknown."""
    absent = metadata.PackageNotFoundError
    return reading(f"the version of {name}", metadata.version, name, absent=absent) or ""


def own_version() -> str:
    """Return the version of dpbench; empty if it runs from a folder without being installed."""
    return version("torch-dpbench")


def _cpu_name() -> str:
    listed = reading("/proc/cpuinfo", Path("/proc/cpuinfo").read_bytes, absent=OSError) or b""
    for line in listed.decode(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
