"""Interrupts at any place of a step: Python delivers a signal when a call returns or begins."""

from __future__ import annotations

import contextlib
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Self

from torch.autograd import grad_mode

import dpbench.engine

ENGINE = str(Path(dpbench.engine.__file__).parent)
OTHERS = {contextlib.__file__, threading.__file__, grad_mode.__file__}
"""Files outside the engine whose functions leave something behind if an interrupt ends them."""


class Interrupted:
    """A context that raises KeyboardInterrupt in this thread at the n-th place.

    Without `n` it only counts the places. `raised` says whether there were so many places.
    """

    def __init__(self, n: int | None = None) -> None:
        self._n, self.places, self.raised = n, 0, False

    def __enter__(self) -> Self:
        self._before = sys.getprofile()
        sys.setprofile(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "c_return") and (file.startswith(ENGINE) or file in OTHERS):
            self.places += 1
            if self.places == self._n:
                self.raised = True
                raise KeyboardInterrupt
