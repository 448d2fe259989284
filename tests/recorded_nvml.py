"""A stand-in for pynvml: it answers from a file, each call as slowly as the real NVML."""

import itertools
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

DATA = Path(__file__).parent / "data"
RECORDINGS = sorted(DATA.glob("nvml_*.json"))

NOT_SUPPORTED, NOT_FOUND, DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND = 3, 6, 9, 13


class NVMLError(Exception):
    """As pynvml's: its number is in `value`."""

    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


def recorded(name):
    return Recorded(json.loads((DATA / f"nvml_{name}.json").read_text()))


def from_environment():
    """The recording whose name a test passes to a process that it starts."""
    return recorded(os.environ["DPBENCH_TEST_NVML"])


class Recorded:
    """The functions of pynvml over a recording.

    `calls` counts the calls by name. A function that is not in the recording returns
    FUNCTION_NOT_FOUND; a name with an argument, "nvmlDeviceGetClockInfo(1)", is that call with that
    argument. Answers come in turn, again and again. `sleep` takes each call's latency: a test's own
    clock may jump instead.
    """

    NVMLError = NVMLError

    def __init__(self, recording, sleep=time.sleep):
        self.recording = recording
        self.sleep = sleep
        self.calls = Counter()
        self.open = 0
        self._turns = {}
        self._lock = threading.Lock()

    def nvmlInit(self):
        if "init_error" in self.recording:
            raise NVMLError(self.recording["init_error"])
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetCount(self):
        return len(self.recording["uuids"])

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.recording["uuids"][index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in self.recording.get("mig", {}):
            raise NVMLError(NOT_FOUND)
        return uuid

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def __getattr__(self, function):
        if not function.startswith("nvml"):
            raise AttributeError(function)
        if function.startswith("nvmlSystem"):
            return lambda: self._replay(function, "", self.recording["system"])
        return lambda handle, *arguments: self._replay(
            function + (f"({arguments[0]})" if arguments else ""), handle, self._device(handle)
        )

    def _device(self, handle):
        return self.recording.get("mig", {}).get(handle, self.recording["gpu"])

    def _replay(self, call, handle, answers):
        entry = answers.get(call, {"error": FUNCTION_NOT_FOUND, "latency_s": 0.0})
        with self._lock:
            self.calls[call, handle] += 1
            turn = self._turns.setdefault((call, handle), itertools.count())
            number = next(turn)
        self.sleep(entry["latency_s"])
        error = entry.get("error")
        if error is not None:
            raise NVMLError(error)
        return _as_struct(entry["answers"][number % len(entry["answers"])])


def _as_struct(answer):
    if isinstance(answer, dict):
        return SimpleNamespace(**answer)
    return [_as_struct(item) for item in answer] if isinstance(answer, list) else answer
