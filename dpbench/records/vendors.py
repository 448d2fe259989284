"""Vendors: what the GPUs of each maker run on, by name, and the precisions that they have.

torch has one interface for both makers: AMD's GPUs are "cuda" devices, RCCL is the backend "nccl",
and MIOpen is asked as cuDNN is. Only texts and precisions tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

AMPERE = (8, 0)
"""The compute capability of NVIDIA's first GPUs with TF32 and bf16."""
_AMD_ARCHITECTURES = {
    # hipBLASLt multiplies so, by MI300 in hardware: PyTorch's notes on HIP semantics ("TensorFloat-
    # 32(TF32) on ROCm"); torch.cuda.is_tf32_supported names these two
    "tf32": ("gfx94", "gfx95"),
    # those with matrix instructions: rocWMMA's API reference guide, "Supported GPU architectures"
    "bf16": ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12"),
}


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """A maker of GPUs: how its things are called that another maker calls otherwise.

    `platform` is what a build of torch is for, and `runtime` whose events and contexts it uses.
    `counters` is the library of the GPUs' counters, "" if dpbench reads none. `hiding` are the
    variables that hide GPUs, and `files` the patterns of the files in /dev that show one.
    `tf32_convolutions` is False if torch's convolutions ignore the permission to use TF32.
    """

    maker: str
    platform: str
    runtime: str
    collectives: str
    convolutions: str
    counters: str
    hiding: tuple[str, ...]
    files: tuple[str, ...]
    tf32_convolutions: bool
    _architectures: Mapping[str, tuple[str, ...]] | None = field(default=None, repr=False)

    @property
    def unread(self) -> str:
        """Return a clause that the counters of the GPUs are not read; "" if they are."""
        return "" if self.counters else f"dpbench reads no counters of {self.maker}'s GPUs"

    def has(self, precision: str, gpu: Mapping[str, Any]) -> bool:
        """Return whether a GPU multiplies in a precision; all have fp32 and fp16.

        `gpu` has the `capability` that torch tells, and for AMD's its `architecture`, such as
        "gfx942:sramecc+:xnack-".
        """
        if precision not in _AMD_ARCHITECTURES:
            return True
        if self._architectures is None:
            return tuple(gpu["capability"]) >= AMPERE
        return str(gpu.get("architecture", "")).startswith(self._architectures[precision])

    def trains_in(self, precision: str, gpu: Mapping[str, Any]) -> bool:
        """Return whether a GPU computes all products of a precision so, convolutions too."""
        return self.has(precision, gpu) and (precision != "tf32" or self.tf32_convolutions)

    def needed(self, precision: str) -> str:
        """Return, as text, which GPUs have a precision that not all have."""
        if self._architectures is None:
            return f"compute capability {AMPERE[0]}.{AMPERE[1]} or higher"
        return f"an architecture {' or '.join(self._architectures[precision])}"


NVIDIA = Vendor(
    maker="NVIDIA",
    platform="CUDA",
    runtime="CUDA",
    collectives="NCCL",
    convolutions="cuDNN",
    counters="NVML",
    hiding=("CUDA_VISIBLE_DEVICES",),
    files=("nvidia[0-9]*",),
    tf32_convolutions=True,
)
AMD = Vendor(
    maker="AMD",
    platform="ROCm",
    runtime="HIP",
    collectives="RCCL",
    convolutions="MIOpen",
    counters="",
    hiding=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", *NVIDIA.hiding),
    files=("kfd",),
    # in torch 2.13, MIOpen's convolutions are never asked for TF32; a later torch may ask
    tf32_convolutions=False,
    _architectures=_AMD_ARCHITECTURES,
)
ALL = (NVIDIA, AMD)


def of(hip: object) -> Vendor:
    """Return the maker of the GPUs of a torch with this `torch.version.hip`; NVIDIA without one."""
    return AMD if hip else NVIDIA
