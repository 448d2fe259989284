"""Doctor: find out why this machine is slow for several GPUs, and what would help."""

from __future__ import annotations

from dpbench.records.siblings import Sibling

SIBLING = Sibling(commands="dpbench.doctor.commands:COMMANDS")
