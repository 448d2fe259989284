"""Seconds between two readings of the NVML sampler (nominally 100 Hz), with recorded latencies."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import QUICK, module, names_of_the_commit, result, timing

RECORDING = Path(__file__).parent.parent / "tests" / "data" / "nvml_h100_x4.json"
INTERVAL_S = 0.01
LOOKS = 5 if QUICK else 10
LOOK_S = 0.5 if QUICK else 1.0


class Replay:
    """A replacement for pynvml that returns recorded answers after their recorded latencies."""

    class NVMLError(Exception):
        value = 3

    def __init__(self) -> None:
        self._recording = json.loads(RECORDING.read_text())
        self._turns: dict[str, Any] = {}

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802  NVIDIA's names
        return len(self._recording["uuids"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return str(self._recording["uuids"][index])

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle

    def __getattr__(self, function: str) -> Any:
        if not function.startswith("nvml"):
            raise AttributeError(function)

        def call(*arguments: Any) -> Any:
            name = function + "".join(f"({argument})" for argument in arguments[1:2])
            entry = self._recording["gpu"].get(name, {})
            time.sleep(entry.get("latency_s", 0.0))
            if "answers" not in entry:
                if function in ("nvmlInit", "nvmlShutdown"):
                    return None
                raise self.NVMLError(function)
            turn = self._turns.setdefault(name, itertools.cycle(entry["answers"]))
            return _struct(next(turn))

        return call


def _struct(answer: Any) -> Any:
    if isinstance(answer, dict):
        return SimpleNamespace(**answer)
    return [_struct(item) for item in answer] if isinstance(answer, list) else answer


def setup_devices(devices: int) -> None:
    with names_of_the_commit():
        module("hardware.samplers.nvml")


@timing(
    params=((1, 4),),
    param_names=("devices",),
    setup=setup_devices,
)
def track_fast_tick_seconds(devices: int) -> dict[str, Any]:
    """Return the mean seconds between two readings of the fast counters in each of `LOOKS` periods.

    Goal: 10 ms.
    """
    nvml = module("hardware.samplers.nvml")
    ticks = []
    for _ in range(LOOKS):
        with nvml.start(range(devices), INTERVAL_S, Replay()) as samples:
            time.sleep(LOOK_S)
        at_s = [s.time_s for s in samples if s.metric == "power_w" and s.device == devices - 1]
        ticks.append((at_s[-1] - at_s[0]) / (len(at_s) - 1))
    return result(ticks)
