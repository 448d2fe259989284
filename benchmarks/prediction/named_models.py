"""Named models: the counts of the models that published tables name, stored or estimated."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dpbench.predict import counts
from dpbench.predict.work import Profile

PARAMETERS = 30e6
"""The assumed number of parameters of an unknown model if the published table does not state the
number.
"""


@dataclass(frozen=True)
class Features:
    """The counts of a model, as a profile without timings.

    `known` is their origin: traced, public or estimated.
    """

    profile: Profile
    known: str
    tokens: float = 0.0
    """The number of tokens in one sample, for throughputs in tokens per second; 0 for a model
    without tokens.
    """
    update_samples: int = 0
    """The number of samples per optimizer step if the model's public training script accumulates
    gradients over several backward passes; else 0.
    """


@lru_cache(maxsize=1)
def _aliases() -> list[tuple[str, str]]:
    """Return pairs of a regular expression and the name of a stored model.

    The first expression that matches a model's name determines the stored model.
    """
    text = (Path(__file__).parent / "aliases.json").read_text(encoding="utf-8")
    return [(pattern, name) for pattern, name in json.loads(text)]


@lru_cache(maxsize=4096)
def find(name: str, parameters: float | None = None, precision: str = "fp32") -> Features:
    """Return the counts of the model with this name, and their origin.

    `parameters` is the published number of parameters, or None if it was not published. The counts
    are estimated if no model is stored under this name, or if the stored model has a very different
    number of parameters. The estimate uses `parameters`, or `PARAMETERS` if `parameters` is None.
    `precision` determines the number of bytes per value: 2 if it converts the whole model to 16
    bits, else 4.
    """
    row = counts.row_of(name)
    if row is None:
        alias = next((to for pattern, to in _aliases() if re.search(pattern, name.lower())), "")
        row = counts.row_of(alias)
    if row is not None and parameters and not 0.7 < parameters / row["parameters"] < 1.4:
        row = None  # a model of another size under the same name
    known = row.get("known", "traced") if row else "estimated"
    row = row or {"parameters": parameters or PARAMETERS}
    size = 2 if re.search(r"pure|\.half|^fp16|^bf16|^half", precision.lower()) else 4
    return Features(
        counts.of_row(name, row, size), known, row.get("tokens", 0.0), row.get("update_samples", 0)
    )
