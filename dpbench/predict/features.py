"""Features: the counts of a model, looked up by its name as published tables write it.

The counts of torchvision's and Hugging Face's models are traced without weights (tests/data/trace_models.py); those of
other models come from public figures. The counts of an unknown model are estimated from its number of parameters, and
marked as estimated.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpbench.records import Profile

DATA = Path(__file__).parent / "data"
PARAMETERS = 30e6
"""The assumed number of parameters of an unknown model for which a table gives none."""
TENSORS, MODULES, LAUNCHES, BACKWARD = 160, 1.2, 1.5, 1.0
"""Medians over the traced models: parameter tensors, modules per tensor, forward kernels per tensor, and backward
kernels per forward kernel."""


@dataclass(frozen=True)
class Features:
    """A model's counts, as a profile without timings. `known` is their origin: traced, public or estimated."""

    profile: Profile
    known: str
    tokens: float = 0.0
    """The number of tokens in one sample, for throughputs in tokens per second; 0 for a model without tokens."""
    overlap: bool = False
    """Whether the model's well-known training script overlaps the reduction of gradients with backward."""
    update_samples: int = 0
    """The samples of one update in that script if it accumulates gradients over several backward passes; else 0."""


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in ("models.json", "figures.json"):
        for key, row in json.loads((DATA / name).read_text()).items():
            found[plain(key)] = row
    return found


@lru_cache(maxsize=1)
def _aliases() -> list[tuple[str, str]]:
    """Return pairs of a pattern and the name of a model; the first pattern that matches applies."""
    return [(pattern, name) for pattern, name in json.loads((DATA / "aliases.json").read_text())]


def plain(name: str) -> str:
    """Return a name in lower case without hyphens, underscores, dots and spaces."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def names() -> list[str]:
    """Return the names of all models whose counts are known."""
    return [key for name in ("models.json", "figures.json") for key in json.loads((DATA / name).read_text())]


def exact(name: str) -> bool:
    """Return whether a model is known by exactly this name, not by a pattern."""
    return plain(name) in _table()


@lru_cache(maxsize=4096)
def find(name: str, parameters: float | None = None, precision: str = "fp32") -> Features:
    """Return a model's features; `parameters` is the published number of parameters, used for unknown models."""
    table, key = _table(), plain(name)
    row = table.get(key)
    if row is None:
        row = next((table.get(plain(to)) for pattern, to in _aliases() if re.search(pattern, name.lower())), None)
    if row is not None and parameters and not 0.7 < parameters / row["parameters"] < 1.4:
        row = None  # a model of another size under the same name
    known = row.get("known", "traced") if row else "estimated"
    row = row or {}
    return Features(
        _profile(name, row, parameters, precision), known, row.get("tokens", 0.0),
        row.get("overlap") == "on", row.get("update_samples", 0),
    )  # fmt: skip


def _profile(name: str, row: dict[str, Any], parameters: float | None, precision: str) -> Profile:
    count = int(row.get("parameters") or parameters or PARAMETERS)
    size = value_bytes(precision)
    tensors = int(row.get("parameter_tensors") or TENSORS)
    forward = int(row.get("forward_launches") or LAUNCHES * tensors)
    return Profile(
        model=name,
        parameter_tensors=tensors,
        parameter_bytes=count * size,
        buffer_bytes=int(row.get("buffer_bytes", 0)),
        buffer_tensors=int(row.get("buffer_tensors", 0)),
        modules=int(row.get("modules") or MODULES * tensors),
        input_bytes=float(row.get("inputs", 0)) * (size if row.get("inputs", 0) > 4096 else 8),
        output_bytes=float(row.get("outputs", 0)) * size,
        forward_flop=float(row.get("forward_flop", 1e9)),
        backward_flop=2 * float(row.get("forward_flop", 1e9)),
        forward_bytes=float(row.get("forward_bytes", 0)) * size / 4,
        backward_bytes=float(row.get("backward_bytes", 0)) * size / 4,
        forward_launches=forward,
        backward_launches=int(row.get("backward_launches") or BACKWARD * forward),
        gradient_bytes=tuple(b * size // 4 for b in row.get("bucket_bytes", ())),
        source="given",
    )


def value_bytes(precision: str) -> int:
    """Return the bytes of one gradient element: 4 in fp32 and mixed precision, 2 in a model converted to half."""
    return 2 if re.search(r"pure|\.half|^fp16|^bf16|^half", precision.lower()) else 4
