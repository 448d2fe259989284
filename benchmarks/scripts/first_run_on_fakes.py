"""Show how far a run with default options gets on GPUs that are only described.

    python benchmarks/scripts/first_run_on_fakes.py MACHINE [START_UP_S] [BUDGET_S]

The GPUs are fake (tests/fakegpu/README.md) and compute no numbers: their operations last what the
rates of `MACHINES` say, which are rough figures from data sheets. START_UP_S is added to each
trial, because fake GPUs start sooner than real ones. Printed are the rounds that were completed,
those that were left out, and what `dpbench.analysis.decision` would decide. A run on fake GPUs
itself gives no decision, and none of its times is the time of a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpbench.analysis import decision, summary
from dpbench.measure import selection
from dpbench.measure.run import Ended, Note, Started
from dpbench.measure.server import Server
from dpbench.records import Status
from dpbench.records.options import Options
from dpbench.store import Store

RATES = (
    "DEVICES MEMORY CC SMS HBM_GBPS TFLOPS H2D_GBPS D2H_GBPS PEER P2P_GBPS STAGED_GBPS KERNEL_US"
)
MACHINES = {
    "rtx3090": "2 24G 8.6 82 900 30 12 12 0 12 6 4",
    "a100": "4 40G 8.0 108 1500 80 20 20 1 200 10 4",
    "h100": "8 80G 8.9 132 3000 250 40 40 1 350 20 3",
}
"""The values of the variables in `RATES`, by machine.

The compute capability of an H100 is 9.0, with which torch prefers cuDNN's attention, which the fake
cuDNN does not have.
"""
NO_NUMBERS = {"FAKECUDA_NUMERICS": "0", "FAKECUDA_DATA": "0"}


def main(machine: str, start_up_s: float, budget_s: float | None) -> None:
    """Run with default options, and print what became of it."""
    names = [f"FAKECUDA_{name}" for name in RATES.split()]
    os.environ.update(zip(names, MACHINES[machine].split(), strict=True))
    os.environ.update(NO_NUMBERS, FAKECUDA_MACHINE=f"first-{machine}-{os.getpid()}")
    _start_slowly(start_up_s)
    options = Options(device_kind="cuda", budget=budget_s, patience=0.0)
    cases, budget_s = selection.cases_of(options)
    # there are no numbers to verify
    cases = [replace(case, unverified=True) for case in cases]
    print(f"{machine}: {len(cases)} cases, {options.rounds} rounds, budget {budget_s:.0f} s")
    with tempfile.TemporaryDirectory() as folder, Store.create(Path(folder) / "first.db") as store:
        began = time.perf_counter()
        outcome = selection.measure(options, cases, store, budget_s=budget_s, listen=_print)
        seconds = time.perf_counter() - began
        trials = list(store.trials(outcome.run_id))
    measured = [trial for trial in trials if trial.status is Status.OK]
    able = len({trial.case for trial in measured})
    done = Counter(trial.round for trial in measured).values()
    print(f"{outcome.counts}; {able} cases with a result; {list(done)} by round; {seconds:.0f} s")
    rows = [replace(row, labels=()) for row in summary.rows(trials)]  # without FAKE-GPU
    for question in decision.questions(rows):
        found = decision.decide(question)
        row = found.row.case.label if found.row else ""
        print(f"{question.home.model}: {found.choice.value} ({found.basis.value}) {row}")


def _start_slowly(seconds: float) -> None:
    run_together = Server.run_together

    def later(self: Server, *arguments: Any) -> Any:
        trials = run_together(self, *arguments)
        if any(trial.steps for trial in trials):
            time.sleep(seconds)
        return trials

    Server.run_together = later  # type: ignore[method-assign]


def _print(event: Started | Ended | Note) -> None:
    if isinstance(event, Note):
        print(f"note: {event.text}", flush=True)
    if isinstance(event, Ended):
        trial = event.trial
        steps = len(trial.timed)
        print(
            f"{event.done}/{event.total} {event.seconds:5.1f} s  round {trial.round + 1}"
            f" {trial.case.label} {trial.status.value} {trial.refusal[:300]}; {steps} steps"
            f"{' slow' * trial.slow}",
            flush=True,
        )


if __name__ == "__main__":
    given = sys.argv[2:]
    main(
        sys.argv[1],
        float(given[0]) if given else 0.0,
        float(given[1]) if given[1:] else None,
    )
