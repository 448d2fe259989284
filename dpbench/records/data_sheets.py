"""Data sheets: the stated figures of GPUs, and which of them are those of a GPU in a machine.

Figures are never those of a similar GPU. A GPU of a machine has a sheet only if the driver's name
of it has the words of the sheet's GPU and no others, but for the maker's, and if its memory has the
size that the sheet states. The names of parts of a GPU (MIG, vGPU) and of laptops' GPUs have more
words.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dpbench.records.gpu_names import SIZE, words

DATA = Path(__file__).parent / "data"
LEAST_MEMORY, MOST_MEMORY = 0.9, 1.02
"""The memory that a driver may report, as shares of the sheet's: ECC and the driver keep some."""
_MAKERS = frozenset(("nvidia", "tesla", "geforce", "generation"))
"""The words with which drivers' names begin or end, and sheets' do not."""


class DataSheet(msgspec.Struct, frozen=True, kw_only=True):
    """The dense peaks of a GPU in FLOP/s, by format (fp32, tf32, bf16, fp16), and their source.

    The sums of products have 32 bits. A format whose peak is not known for certain is absent.
    """

    gpu: str
    flop_per_s: dict[str, Annotated[float, msgspec.Meta(gt=0)]]
    source: str


@lru_cache(maxsize=1)
def table() -> Mapping[str, Any]:
    """Return the content of `data/gpus.toml`."""
    import tomllib  # every command imports this module

    return tomllib.loads((DATA / "gpus.toml").read_text(encoding="utf-8"))


def of_gpu(name: str, memory_bytes: float) -> DataSheet | None:
    """Return the data sheet of a GPU with a driver's name and memory; None if none is known."""
    found = [
        figures
        for figures in table()["gpu"].values()
        if figures.get("tflops")
        and any(_same(name, one) for one in (figures["name"], *figures.get("driver", ())))
        and LEAST_MEMORY <= memory_bytes / 2**30 / figures["memory_gib"] <= MOST_MEMORY
    ]
    if len(found) != 1:
        return None
    peaks = {key: peak * 1e12 for key, peak in found[0]["tflops"].items()}
    return DataSheet(gpu=found[0]["name"], flop_per_s=peaks, source=found[0]["source"])


def _same(name: str, known: str) -> bool:
    """Return whether two names have the same words; a size may be absent from one of them."""
    some, others = _words(name), _words(known)
    differing = some ^ others
    if any(map(SIZE.fullmatch, some)) and any(map(SIZE.fullmatch, others)):
        return not differing
    return all(map(SIZE.fullmatch, differing))


def _words(name: str) -> set[str]:
    return {*words(name)} - _MAKERS
