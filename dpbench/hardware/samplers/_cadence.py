"""Cadence: call an action at fixed intervals, in a thread.

start     +1 interval     +2            +3            +4
  |action|    .   |action, late ........|.|action|     |action|      tick 3 keeps its time, tick 2 is skipped
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


def ticks(
    interval_s: float, wait: Callable[[float], bool], now: Callable[[], float] = time.perf_counter
) -> Iterator[int]:
    """Yield k at the time start + k * interval; skip ticks whose time has passed.

    Stop when `wait(seconds)` returns true.
    """
    start_s = now()
    k = 0
    while not wait(max(0.0, start_s + k * interval_s - now())):
        yield k
        k = max(k + 1, math.ceil((now() - start_s) / interval_s))


@contextmanager
def every(interval_s: float, action: Callable[[], None]) -> Iterator[None]:
    """Call `action` every `interval_s` seconds in a separate thread until the `with` ends."""
    if not interval_s > 0:
        raise ValueError(f"interval_s must be positive, not {interval_s}")
    stop = threading.Event()

    def run() -> None:
        try:
            for _ in ticks(interval_s, stop.wait):
                action()
        except Exception:  # an error ends this series, never the run
            log.exception("a series of samples ended early")

    # a daemon thread, so that a driver call that never returns cannot keep the sampler process alive
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
