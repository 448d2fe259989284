"""The worker server of a machine with simulated GPUs: the real server and its forked workers.

`python -m tests.simulated.server SCENARIO -m dpbench.measure.worker PARENT` is the command that
`executable` writes; the scenario is JSON with the arguments of `machine_of`. A worker opens the
simulated GPUs where it would open real ones, and stores the truth of its steps in the provenance of
the trial.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.simulated.machine import Machine
from tests.simulated.timeline import Gpu

TRUTH = "truth"
"""The key of a trial's provenance for the true step ends and busy seconds; see `truth_of`."""


def executable(folder: Path, **scenario: Any) -> Path:
    """Write a program that takes Python's arguments and runs the server with simulated GPUs."""
    command = [sys.executable, "-m", "tests.simulated.server", json.dumps(scenario)]
    path = folder / "python-with-gpus"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o700)
    return path


def machine_of(count: int, speeds: Sequence[float]) -> Machine:
    """Return a machine whose GPUs have these speeds, and whose event clocks all differ."""
    return Machine([Gpu(i, offset_s=10.0 * i, speeds=[(0.0, speeds[i])]) for i in range(count)])


def install(scenario: dict[str, Any]) -> None:
    """Let each worker that this process forks make a simulated machine and open its GPUs."""
    from dpbench.measure.worker import trial as worker
    from tests.simulated.backend import SimulatedDevice, Witness, running

    forever, machines, witnesses = ExitStack(), list[Machine](), list[Witness]()
    with_links, register = worker.with_links, Witness.__init__

    def open_devices(kind: str, count: int, **_: Any) -> list[SimulatedDevice]:
        assert kind == "cuda"
        machines.append(machine_of(**scenario))
        return forever.enter_context(running(machines[-1]))[:count]

    def noting(witness: Witness, devices: Sequence[SimulatedDevice]) -> None:
        register(witness, devices)
        witnesses.append(witness)

    def with_truth(trial: Any, devices: Sequence[SimulatedDevice]) -> Any:
        found = with_links(trial, devices)
        return replace(
            found, provenance={**found.provenance, TRUTH: truth_of(machines[-1], _of_steps())}
        )

    def _of_steps() -> Any:
        """Return the witness of the trial's steps: the clock of its marks has only two."""
        return max(witnesses, key=lambda one: len(one.true_ends))

    worker.open_devices, worker.with_links, Witness.__init__ = open_devices, with_truth, noting  # type: ignore
    worker.torch_facts = lambda case, device: {"gpu": device.name}  # type: ignore


def truth_of(machine: Machine, witness: Any) -> dict[str, Any]:
    """Return the steps' true ends, busy seconds by device and profiled step, and the process id."""
    busy = [
        [
            machine.busy_s(gpu.index, *window, kinds=("compute", "copy"))
            for window in machine.profiled
        ]
        for gpu in machine.timeline.gpus
    ]
    return {"ends_s": witness.true_ends, "busy_s": busy, "pid": os.getpid()}


if __name__ == "__main__":
    install(json.loads(sys.argv[1]))
    sys.argv = sys.argv[3:]  # without `-m`
    runpy.run_module("dpbench.measure.worker", run_name="__main__", alter_sys=True)
