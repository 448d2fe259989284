"""CPU seconds and peak memory of the commands that read a store, each in a fresh process on one core.

The store has 60 cases of 3 rounds and 300 steps, and 100,000 samples; `scripts/big_store.py` measures larger ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from .scripts import big_store


class Reading:
    """The commands that read a whole run."""

    params: ClassVar[list[str]] = list(big_store.TARGETS)
    param_names: ClassVar[tuple[str, ...]] = ("command",)
    timeout = 300.0

    def setup_cache(self) -> str:
        """Make the store; asv keeps the working folder until all benchmarks of the class have ended."""
        store = Path("big.db").absolute()
        big_store.fill(store, 60, 3, 300, 100_000)
        return str(store)

    def track_cpu_s(self, store: str, command: str) -> float:
        return self._measured(store, command)["cpu_s"]

    track_cpu_s.unit = "seconds"  # type: ignore[attr-defined]

    def track_peak_memory(self, store: str, command: str) -> float:
        return self._measured(store, command)["peak_mb"]

    track_peak_memory.unit = "MB"  # type: ignore[attr-defined]

    def _measured(self, store: str, command: str) -> dict[str, float]:
        _, more = big_store.TARGETS[command]
        found = big_store.measured(command, more, Path(store))
        if found["code"]:
            raise RuntimeError(f"dpbench {command} ended with {found['code']}")
        return found
