"""Start-up time: seconds to start an interpreter and import the command line or print its help."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

from . import QUICK, names_of_the_commit, result, timing

PROGRAMS = {
    "nothing": ["-c", "pass"],  # the control: if it changes, the machine has changed
    "import dpbench.cli": ["-c", "import dpbench.cli"],
    "dpbench --help": ["-c", "from dpbench.cli import main; main()", "--help"],
}
SAMPLES = 5 if QUICK else 15


def setup(program: str) -> None:
    if "dpbench" not in program:
        return
    with names_of_the_commit():
        from importlib.util import find_spec

        if find_spec("dpbench.cli") is None:
            raise LookupError("dpbench has no cli")


@timing(params=(tuple(PROGRAMS),), param_names=("program",))
def track_import_seconds(program: str) -> dict[str, Any]:
    samples = []
    for _ in range(1 + SAMPLES):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, *PROGRAMS[program]],
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        samples.append(time.perf_counter() - began)
    return result(samples[1:])  # the first one may have compiled the bytecode
