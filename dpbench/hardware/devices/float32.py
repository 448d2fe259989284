"""Float32: the formats in which torch multiplies float32 values, under either of its settings.

Since torch 2.9 there are two: the older (`allow_tf32`, `set_float32_matmul_precision`) and the
newer (`fp32_precision`). A write to the older one also sets the newer one, but not the other way
round: the older one then raises when it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dpbench.records import vendors
from dpbench.records.facts import Products
from dpbench.records.vendors import Vendor

IEEE, TF32 = "ieee", "tf32"
OVERRIDE = "NVIDIA_TF32_OVERRIDE"
"""The environment variable that, if it is 0, keeps NVIDIA's libraries from using TF32."""


def products(kind: str, gpu: torch.device | None = None) -> Products:
    """Return the formats in force in this process on devices of a kind ("cuda", or another).

    `gpu` is the GPU if its capability counts. The function never raises: a format that this torch
    does not tell is None.
    """
    backends: Any = torch.backends
    if kind != "cuda":  # oneDNN runs the products of CPUs
        return Products(
            _first(lambda: backends.mkldnn.matmul.fp32_precision, _older_on_cpu),
            _first(lambda: backends.mkldnn.conv.fp32_precision, lambda: _older_on_cpu() and IEEE),
        )
    if gpu is not None and _first(lambda: impediment(gpu)):
        return Products(IEEE, IEEE)
    convolution = _first(
        lambda: backends.cudnn.conv.fp32_precision,
        lambda: TF32 if backends.cudnn.allow_tf32 else IEEE,
    )
    heeded = vendors.of(torch.version.hip).tf32_convolutions
    return Products(
        _first(
            lambda: backends.cuda.matmul.fp32_precision,
            lambda: TF32 if backends.cuda.matmul.allow_tf32 else IEEE,
        ),
        None if convolution == TF32 and not heeded else convolution,
    )


def _older_on_cpu() -> str:
    return "bf16" if torch.get_float32_matmul_precision() == "medium" else IEEE


def _first(*readings: Callable[[], str]) -> str | None:
    """Return the first reading that does not raise; "none" is torch's name for no rounding."""
    for read in readings:
        try:
            found = read()
        except Exception:  # another torch may raise any error, and this may be a user's process
            continue
        return IEEE if found == "none" else found
    return None


def impediment(gpu: torch.device) -> str:
    """Return why a GPU cannot use TF32; an empty text if it can."""
    vendor = vendors.of(torch.version.hip)
    if vendor is vendors.NVIDIA and os.environ.get(OVERRIDE) == "0":
        return f"the environment variable {OVERRIDE} is 0, which forbids it"
    facts = _facts(gpu, vendor)
    if vendor.has(TF32, facts):
        return ""
    found = facts["architecture"] or ".".join(map(str, facts["capability"]))
    return f"it needs a GPU of {vendor.needed(TF32)}, and {gpu} has {found}"


def _facts(gpu: torch.device, vendor: Vendor) -> dict[str, Any]:
    """Return the facts of a GPU on which its precisions depend, as `gpus.of_torch` has them."""
    named = torch.cuda.get_device_properties(gpu).gcnArchName if vendor is vendors.AMD else ""
    return {"capability": torch.cuda.get_device_capability(gpu), "architecture": named}


def allow_tf32() -> None:
    """Let GPUs round the factors of float32 products to TF32, under both of torch's settings."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True


@contextmanager
def tf32_allowed() -> Iterator[None]:
    """Call `allow_tf32`, and restore the older settings at the end of the `with` block.

    Raises RuntimeError, from torch, if a newer setting was written before.
    """
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    allow_tf32()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
