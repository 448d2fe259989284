"""Predicted against measured steps on this machine's CPU: dpbench's own engine, and DistributedDataParallel on gloo.

    python benchmarks/scripts/cpu_truth.py [--machine FILE.toml] [--rounds 7] [--batch 64] [--into reports/cpu-truth]

Predictions see two things alone: the strategy `single` at the batch and at half of it, and the file that `dpbench
probe` writes (made first, if none is given). They are compared with medians of interleaved rounds: steps are to be
within 10 %, phases above 5 % of a step within 20 %. Takes about five minutes; let nothing else run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = ("mlp", "resnet18", "transformer")
STEP, STEP_GOAL, PHASE_GOAL, PHASE_SHARE = "step", 0.10, 0.20, 0.05


@dataclass(frozen=True)
class Row:
    """One step, or one phase of it: predicted, and the median and the quartiles of the rounds' medians."""

    model: str
    case: str
    part: str
    predicted_s: float
    measured_s: float
    low_s: float
    high_s: float
    share: float
    counts: bool

    @property
    def error(self) -> float:
        """Return the relative error."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else 0.0

    @property
    def goal(self) -> float:
        """Return the relative error that is allowed."""
        return STEP_GOAL if self.part == STEP else PHASE_GOAL

    @property
    def verdict(self) -> str:
        """Tell whether the goal is met, or the middle half of the rounds differs by too much to tell."""
        if self.high_s - self.low_s > 2 * self.goal * self.measured_s:
            return "undecided"
        return "met" if abs(self.error) <= self.goal else "MISSED"


def cases(models: Sequence[str], batch: int) -> list[Any]:
    """Return what is measured: the two profiles of each model, and what is predicted from them."""
    from dpbench.records import Case

    found = []
    for model in models:
        found += [Case(model=model, strategy="single", batch_size=size) for size in (batch // 2, batch)]
        found += [
            Case(model=model, strategy="dp", schedule=name, batch_size=batch, devices=2)
            for name in ("reference", "fastest")
        ]
        found.append(Case(model=model, strategy="ddp", batch_size=batch, devices=2))
    return found


def measure(planned: Sequence[Any], store: Path, rounds: int) -> list[Any]:
    """Return the trials of all rounds, interleaved; a store that has them already is read."""
    from dpbench import run
    from dpbench.store import Store

    with Store.create(store) as opened:
        outcome = run.run(planned, opened, rounds=rounds)
        return opened.trials(outcome.run_id)


def parts_of(trials: Iterable[Any]) -> dict[str, list[float]]:
    """Return the median of each phase, and of the step, of every round."""
    from dpbench import ledger

    found: dict[str, list[float]] = {}
    for trial in trials:
        table = [
            {STEP: step.seconds, **seconds}
            for step, seconds in zip(trial.steps, ledger.of_trial(trial), strict=True)
            if not step.warmup
        ]
        for part in {name for row in table for name in row}:
            found.setdefault(part, []).append(statistics.median(row.get(part, 0.0) for row in table))
    return found


def compare(trials: Sequence[Any], store: Path, machine: Path) -> Iterator[Row]:
    """Yield every prediction beside what was measured."""
    from dpbench import ledger
    from dpbench import machine as machines
    from dpbench.predict import stored
    from dpbench.predict.cases import Predictor

    described = machines.load(str(machine))
    good = [trial for trial in trials if trial.status == "ok"]
    asked = sorted({trial.case for trial in good if trial.case.strategy != "single"}, key=lambda case: case.label)
    steps = stored.read(store, asked, described)
    predictor = Predictor(described, measured={key: one.profile for key, one in steps.items()})
    for case in asked:
        (phases,) = ledger.of_trial(predictor.predict(case).trial())
        yield from _rows(case, phases, parts_of(trial for trial in good if trial.case == case))


def _rows(case: Any, predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]]) -> Iterator[Row]:
    whole = statistics.median(measured[STEP])
    name = f"{case.strategy}[{case.schedule}]" if case.schedule else case.strategy
    for part in (STEP, *(part for part in measured if part != STEP)):
        seconds = measured[part]
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        mine = sum(predicted.values()) if part == STEP else predicted.get(part, 0.0)
        share = middle / whole
        yield Row(case.model, name, part, mine, middle, low, high, share, part == STEP or share > PHASE_SHARE)


def write(rows: Sequence[Row], into: Path, trials: Sequence[Any], rounds: int, command: str) -> None:
    """Write results.jsonl and README.md."""
    lines = [json.dumps({**vars(row), "error": row.error, "verdict": row.verdict}) for row in rows]
    (into / "results.jsonl").write_text("\n".join(lines) + "\n")
    counted = [row for row in rows if row.counts]
    steps, phases = [r for r in counted if r.part == STEP], [r for r in counted if r.part != STEP]
    facts: Mapping[str, Any] = trials[0].provenance if trials else {}
    busy = [s.value for t in trials for s in t.samples if s.metric == "foreign_cpu_ratio"]
    text = [
        "# Predicted against measured on two CPU cores",
        "",
        f"PREDICTED and MEASURED, CPU-ONLY: two logical CPU devices, one intra-op thread each, gloo for ddp; {rounds} "
        f"interleaved rounds, torch {facts.get('torch', '?')}"
        + (f", other processes on {statistics.median(busy):.1f} cores." if busy else "."),
        "Predictions see the strategy `single` at the batch and at half of it, and the file of `dpbench probe`.",
        "",
        f"    {command}",
        "",
        f"Steps within {STEP_GOAL:.0%}: {_count(steps)}. Phases above {PHASE_SHARE:.0%} of their step within "
        f"{PHASE_GOAL:.0%}: {_count(phases)}. Undecided: the middle half of the rounds spans more than the goal.",
        "",
        "| model | case | part | predicted, ms | measured, ms | middle rounds, ms | error | goal |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {r.model} | {r.case} | {r.part} | {r.predicted_s * 1e3:.3f} | {r.measured_s * 1e3:.3f} "
            f"| {r.low_s * 1e3:.3f} - {r.high_s * 1e3:.3f} | {r.error:+.0%} | {r.verdict} |"
            for r in counted
        ),
        "",
    ]
    (into / "README.md").write_text("\n".join(text))


def _count(rows: Sequence[Row]) -> str:
    """Return how many goals are met, missed and undecided."""
    counts = {name: sum(row.verdict == name for row in rows) for name in ("met", "MISSED", "undecided")}
    return f"{counts['met']} of {len(rows)} met, {counts['MISSED']} missed, {counts['undecided']} undecided"


def main() -> None:
    """Probe, measure, predict, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, help="a file of `dpbench probe`; measured first if there is none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--into", type=Path, default=Path("reports/cpu-truth"))
    parser.add_argument(
        "--store", type=Path, help="where trials are kept  [default: INTO/trials.db, deleted at the end]"
    )
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # this process counts models, and measures nothing
    given.into.mkdir(parents=True, exist_ok=True)
    machine = given.machine or given.into / "machine.toml"
    if not machine.exists():
        subprocess.run([sys.executable, "-m", "dpbench.cli", "probe", "--output", str(machine)], check=True)
    store = given.store or given.into / "trials.db"
    trials = measure(cases(given.models.split(","), given.batch), store, given.rounds)
    for trial in trials:
        if trial.status != "ok":
            print(f"{trial.case.label}: {trial.status}: {trial.reason}", file=sys.stderr)
    rows = list(compare(trials, store, machine))
    write(
        rows,
        given.into,
        trials,
        given.rounds,
        f"python benchmarks/scripts/cpu_truth.py {' '.join(sys.argv[1:])}".strip(),
    )
    if given.store is None:
        for path in given.into.glob("trials.db*"):
            path.unlink()
    print((given.into / "README.md").read_text())


if __name__ == "__main__":
    main()
