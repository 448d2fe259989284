"""One pass of the probe in its own process, which prints part names and figures as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from dpbench.hardware import processes

if __name__ == "__main__":
    processes.die_with_parent(int(sys.argv[1]))
    from dpbench.doctor.probe import measure

    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # other output goes to stderr and is not read as a figure
    for found in measure():
        print(json.dumps(found, default=asdict), file=answers, flush=True)
