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
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from dpbench.records import Case, sources

PACKAGES = ("torch", "numpy", "pandas", "matplotlib", "nvidia-ml-py", "asv", "scipy")
VARIABLES = (
    "ASV_COMMIT",
    "CUBLAS_",
    "CUDA_",
    "CUDNN_",
    "MKL_NUM_THREADS",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_CUDNN_",
    "TORCH_NCCL_",
)
"""The environment variables that change results; a name that ends in "_" is a prefix."""
HIDDEN = "(not recorded)"
"""The text in place of the value of a variable, if it has a path or the name of the user."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The cores that a run may use, the name of its GPUs, and the memory of each in bytes.

    Unknown numbers are 0, and the name of unknown GPUs is "a GPU".

    `described` is the name or the file of the machine for which a run is predicted; it is empty for
    a machine that is measured.
    """

    described: str = ""
    cores: int = 0
    gpu_memory_bytes: tuple[int, ...] = ()
    gpu: str = "a GPU"

    @property
    def device_kind(self) -> str:
        """Return the kind of devices that a run on this machine uses by default."""
        return "cuda" if self.gpu_memory_bytes else "cpu"

    def memory_of(self, case: Case, device: int) -> int:
        """Return the memory in bytes of the GPU that `case` uses as `device`; 0 if unknown."""
        gpu = case.gpu(device)
        local = case.device_kind == "cuda" and case.hosts == 1
        return self.gpu_memory_bytes[gpu] if local and gpu < len(self.gpu_memory_bytes) else 0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Self:
        """Return the resources in the result of `collect` or a run's stored provenance."""
        gpus = (facts.get("gpus") or {}).get("gpus") or ()
        sizes = tuple(gpu.get("memory_bytes") or 0 for gpu in gpus)
        return cls(
            cores=(facts.get("host") or {}).get("cores", 0),
            gpu_memory_bytes=sizes,
            gpu=str(next((gpu.get("name") for gpu in gpus), cls.gpu)),
        )


def collect(gpus: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return facts about host, software and version control as plain data.

    `gpus` are the facts of `gpus.describe`.
    """
    return {
        "host": host_facts(),
        "gpus": gpus or {},
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := version(name))},
        "dpbench": {"version": own_version(), **_git(Path(__file__).parent)},
        "project": _git(Path.cwd()),
        "variables": variables(os.environ),
        "command": shlex.join(["dpbench", *sys.argv[1:]]),
    }


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those environment variables that change results, sorted by name.

    A value with a path or with the name of the user is replaced by `HIDDEN`.
    """
    users = {environ[name] for name in ("USER", "LOGNAME", "USERNAME") if environ.get(name)}

    def shown(value: str) -> str:
        personal = users & set(re.split(r"\W+", value))
        return HIDDEN if "/" in value or "\\" in value or personal else value

    return {
        name: shown(value)
        for name, value in sorted(environ.items())
        if any(
            name.startswith(known) if known.endswith("_") else name == known for known in VARIABLES
        )
    }


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
    containers. For a launch, the hash identifies each of its machines, with its ranks and software.
    """
    others = facts.get("hosts", {}).get("machines", ())
    # ids that change with each boot: only their equality counts below
    ids = [host["machine"] for host in others]
    stable = [
        _stable(facts),
        *(
            (
                _stable(host["facts"]),
                host["ranks"],
                host["facts"]["software"],
                ids.index(host["machine"]),
            )
            for host in others
        ),
    ]
    return hashlib.sha256(
        json.dumps(stable if others else stable[0], sort_keys=True).encode()
    ).hexdigest()[:16]


def _stable(facts: dict[str, Any]) -> list[Any]:
    host = {key: facts["host"][key] for key in ("machine", "cpu", "cores")}
    return [host, [gpu.get("uuid") for gpu in facts["gpus"].get("gpus", [])]]


def code_key(facts: dict[str, Any], names: Iterable[str] = ()) -> str:
    """Return a key of the code that ran, from `facts`, the result of `collect`.

    It consists of dpbench's version and commit, the project's commit, uncommitted changes of either
    checkout, torch's version, and the files of the user's objects `names`.
    """
    checkouts = [facts["dpbench"], facts["project"]]
    parts = [
        facts["dpbench"]["version"],
        *(one.get("commit", "") for one in checkouts),
        facts["packages"].get("torch", ""),
        *(one.get("changes", "") for one in checkouts),
        sources.digest(names),
    ]
    return " ".join(parts).rstrip()


def version(name: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def own_version() -> str:
    """Return the version of dpbench; empty if it runs from a folder without being installed."""
    return version("torch-dpbench")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(folder: Path) -> dict[str, Any]:
    """Return facts about a checkout; empty without one.

    They are `commit`, `dirty` (tracked files have changed), and `changes`, a hash of uncommitted
    changes of Python files, if there are any.
    """

    def git(*arguments: str) -> bytes:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=10, check=True
        ).stdout.strip()

    try:
        found = {
            "commit": git("rev-parse", "HEAD").decode(),
            "dirty": bool(git("status", "--porcelain", "-uno")),
        }
        changes = git("diff", "HEAD", "--", ":/*.py") if found["dirty"] else b""
        return found | ({"changes": hashlib.sha256(changes).hexdigest()[:16]} if changes else {})
    except (OSError, subprocess.SubprocessError):
        return {}
