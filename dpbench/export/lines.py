"""JSON lines: write one trial per line, with the ledger's phases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict

from dpbench.records import Trial, ledger, words


def jsonl(run_id: str, trials: Iterable[Trial]) -> Iterator[str]:
    """Yield one line per trial: its run, its case, its status, and each step's seconds by phase."""
    for trial in trials:
        steps = [
            {"seconds": step.seconds, "warmup": step.warmup, "phases": phases}
            for step, phases in zip(trial.steps, ledger.of_trial(trial), strict=True)
        ]
        line = words.dumps(
            {
                "run_id": run_id,
                "case": {**trial.case.to_dict(), "devices": trial.case.devices},
                "source": trial.source,
                "status": trial.status,
                "reason": trial.reason,
                "verified": trial.verified,
                "round": trial.round,
                "steps": steps,
                "memory": [asdict(peak) for peak in trial.memory],
                "failed_device": trial.failed_device,
                "setup": dict(trial.setup),
                "provenance": dict(trial.provenance),
            }
        )
        yield f"{line}\n"
