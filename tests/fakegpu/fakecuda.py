"""Loads the arithmetic of the fake GPUs into torch, which calls `load` when it is imported."""

import ctypes
import os
import sys
from pathlib import Path


def load() -> None:
    """Register the operators, unless FAKECUDA_NUMERICS=0 asks for the clock alone."""
    if os.environ.get("FAKECUDA_NUMERICS", "1") == "0":
        return
    (library,) = Path(__file__).parent.glob("nvidia/cu*/lib/libfakenumerics.so")
    count = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL).fakecuda_numerics()
    if os.environ.get("FAKECUDA_TRACE"):
        print(f"fakecuda: {count} operators computed on the host", file=sys.stderr)
