"""Garbage: what a step frees at once, and a free-threaded build of Python later."""

from __future__ import annotations

import sysconfig

import pytest

COUNTED = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="a free-threaded Python, with its lock on too, leaves to its collector what waits for"
    " the thread that made it",
)
"""The mark of tests that count what the collector finds, or each byte that is in use."""
