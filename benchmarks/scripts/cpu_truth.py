"""CPU truth: compare predicted with measured steps of dpbench's engine and DistributedDataParallel on this CPU.

    python benchmarks/scripts/cpu_truth.py [--blocks 10] [--rounds 3] [--batch 64] [--into reports/cpu-truth]

A block is a `dpbench probe`, followed by interleaved rounds. The block's predictions use only its machine file and its
steps of the strategy `single`, at the batch and at half of it. The script compares the median prediction of the blocks
with the median of the rounds' typical steps. The goals are 10 % for steps, and 20 % for phases that take more than 5 %
of a step. The error's interval comes from resampling the blocks. A block takes about two and a half minutes; other
processes disturb the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

MODELS = ("mlp", "resnet18", "transformer")
DERIVED = ("predicted_s", "measured_s", "error", "interval", "verdict")
RESAMPLES = 2000
STEP, STEP_GOAL, PHASE_GOAL, PHASE_SHARE = "step", 0.10, 0.20, 0.05


@dataclass(frozen=True)
class Row:
    """One step, or one phase of it: each block's prediction, and the seconds of each block's rounds."""

    model: str
    case: str
    part: str
    predicted: tuple[float, ...]
    measured: tuple[tuple[float, ...], ...]
    counts: bool

    @cached_property
    def predicted_s(self) -> float:
        """Return the median of the blocks' predictions, in seconds."""
        return statistics.median(self.predicted)

    @cached_property
    def measured_s(self) -> float:
        """Return the median of all rounds, in seconds."""
        return statistics.median(chain.from_iterable(self.measured))

    @cached_property
    def error(self) -> float:
        """Return the relative error of the prediction."""
        return self._of(range(len(self.predicted)))

    @cached_property
    def interval(self) -> tuple[float, float]:
        """Return the central 90 % interval of the error over resampled blocks.

        For a single block, both ends are the error.
        """
        blocks = range(len(self.predicted))
        if len(blocks) < 2:
            return self.error, self.error
        generator = random.Random(0)
        errors = sorted(self._of(generator.choices(blocks, k=len(blocks))) for _ in range(RESAMPLES))
        aside = RESAMPLES // 20
        return errors[aside], errors[-aside - 1]

    def _of(self, blocks: Sequence[int]) -> float:
        drawn = replace(
            self, predicted=tuple(self.predicted[i] for i in blocks), measured=tuple(self.measured[i] for i in blocks)
        )
        return drawn.predicted_s / drawn.measured_s - 1 if drawn.measured_s else 0.0

    @property
    def goal(self) -> float:
        """Return the largest relative error that meets the goal."""
        return STEP_GOAL if self.part == STEP else PHASE_GOAL

    @property
    def met(self) -> bool:
        """Return whether the error meets the goal."""
        return abs(self.error) <= self.goal

    @property
    def sure(self) -> bool:
        """Return whether the whole interval is on the same side of the goal as the error."""
        low, high = self.interval
        return (-self.goal <= low and high <= self.goal) if self.met else (low > self.goal or high < -self.goal)

    @property
    def verdict(self) -> str:
        """Return "met" or "MISSED", followed by "?" if that is uncertain."""
        return ("met" if self.met else "MISSED") + ("" if self.sure else "?")


def cases(models: Sequence[str], batch: int) -> list[Any]:
    """Return the cases to measure: two one-device cases per model, and the cases predicted from them."""
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
    """Return the trials of a block's interleaved rounds; reuse rounds that an earlier run of this code has stored."""
    from dpbench.measure import run
    from dpbench.store import Store

    with Store.create(store) as opened:
        outcome = run.run(planned, opened, rounds=rounds)
        return opened.trials(outcome.run_id)


def parts_of(trials: Iterable[Any]) -> dict[str, list[float]]:
    """Return the seconds of each phase in every round's typical step, and their sum."""
    rounds = [trial.ledger.typical() for trial in trials]
    names = dict.fromkeys(name for parts in rounds for name in parts)
    return {
        STEP: [sum(parts.values()) for parts in rounds],
        **{name: [parts.get(name, 0.0) for parts in rounds] for name in names},
    }


def predict(asked: Sequence[Any], store: Path, machine: Path) -> dict[Any, dict[str, float]]:
    """Return each case's predicted phases and their sum in seconds, from one block's probe and one-device steps."""
    from dpbench.predict import stored
    from dpbench.predict.cases import Predictor
    from dpbench.records import machine as machines

    described = machines.load(str(machine))
    steps = stored.read(store, asked, described)
    predictor = Predictor(described, measured={key: one.profile for key, one in steps.items()})
    found = {}
    for case in asked:
        (phases,) = predictor.predict(case).trial().ledger.phases
        found[case] = {STEP: sum(phases.values()), **phases}
    return found


def compare(blocks: Sequence[tuple[Path, Path, Sequence[Any]]]) -> Iterator[Row]:
    """Yield every prediction with its measurement; a block is its machine file, its store and its trials."""
    good = [[trial for trial in trials if trial.status == "ok"] for _, _, trials in blocks]
    asked = sorted(
        {trial.case for trials in good for trial in trials if trial.case.strategy != "single"},
        key=lambda case: str(case.label),
    )
    predicted = [predict(asked, store, machine) for machine, store, _ in blocks]
    for case in asked:
        measured = [parts_of(trial for trial in trials if trial.case == case) for trials in good]
        yield from _rows(case, [one[case] for one in predicted], measured)


def _rows(
    case: Any, predicted: Sequence[Mapping[str, float]], measured: Sequence[Mapping[str, Sequence[float]]]
) -> Iterator[Row]:
    name = f"{case.strategy}[{case.schedule}]" if case.schedule else case.strategy
    pairs = [(one, found) for one, found in zip(predicted, measured, strict=True) if found[STEP]]  # skip failed blocks
    predicted, measured = [one for one, _ in pairs], [found for _, found in pairs]
    whole_s = 0.0
    for part in dict.fromkeys(part for one in measured for part in one):
        seconds = tuple(tuple(one.get(part, [0.0] * len(one[STEP]))) for one in measured)
        row = Row(case.model, name, part, tuple(one.get(part, 0.0) for one in predicted), seconds, part == STEP)
        whole_s = whole_s or row.measured_s
        yield replace(row, counts=row.counts or row.measured_s > PHASE_SHARE * whole_s)


def write(rows: Sequence[Row], into: Path, trials: Sequence[Any], blocks: int, rounds: int, command: str) -> None:
    """Write results.jsonl and README.md."""
    lines = [
        json.dumps({name: getattr(row, name) for name in (*(field.name for field in fields(row)), *DERIVED)})
        for row in rows
    ]
    (into / "results.jsonl").write_text("\n".join(lines) + "\n")
    counted = [row for row in rows if row.counts]
    steps, phases = [r for r in counted if r.part == STEP], [r for r in counted if r.part != STEP]
    facts: Mapping[str, Any] = trials[0].provenance if trials else {}
    busy = [s.value for t in trials for s in t.samples if s.metric == "foreign_cpu_ratio"]
    text = [
        "# Predicted against measured on two CPU cores",
        "",
        f"PREDICTED and MEASURED, CPU-ONLY: two logical CPU devices, one intra-op thread each, gloo for ddp; {blocks} "
        f"blocks of a probe and {rounds} interleaved rounds, torch {facts.get('torch', '?')}"
        + (f", other processes on {statistics.median(busy):.1f} cores." if busy else "."),
        "A block's predictions use only its steps of `single`, at the batch and at half of it, and its probe's file.",
        "The figure of a round is its typical step: the mean of the middle half of its steps.",
        "",
        f"    {command}",
        "",
        f"Steps within {STEP_GOAL:.0%}: {_count(steps)}. Phases above {PHASE_SHARE:.0%} of their step within "
        f"{PHASE_GOAL:.0%}: {_count(phases)}. A question mark means that the 90 % interval over resampled blocks "
        "extends to both sides of the goal.",
        "",
        "| model | case | part | predicted, ms | blocks, ms | measured, ms | rounds, ms | error | 90 % | goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(row) for row in counted),
        "",
    ]
    (into / "README.md").write_text("\n".join(text))


def _line(row: Row) -> str:
    """Return a row of the table as Markdown."""
    low, high = row.interval
    rounds = [seconds * 1e3 for seconds in chain.from_iterable(row.measured)]
    each = [seconds * 1e3 for seconds in row.predicted]
    return (
        f"| {row.model} | {row.case} | {row.part} | {row.predicted_s * 1e3:.3f} | {min(each):.3f} - {max(each):.3f} "
        f"| {row.measured_s * 1e3:.3f} | {min(rounds):.3f} - {max(rounds):.3f} "
        f"| {row.error:+.1%} | {low:+.0%} to {high:+.0%} | {row.verdict} |"
    )


def _count(rows: Sequence[Row]) -> str:
    """Return the number of goals that are met and missed, and how many of each are certain."""
    met = [row for row in rows if row.met]
    missed = len(rows) - len(met)
    return (
        f"{len(met)} of {len(rows)} met, {sum(row.sure for row in met)} with certainty; {missed} missed, "
        f"{sum(row.sure for row in rows if not row.met)} with certainty"
    )


def main() -> None:
    """Measure the blocks, compare predictions with measurements, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per block, at least 2")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--into", type=Path, default=Path("reports/cpu-truth"))
    parser.add_argument("--keep", action="store_true", help="keep the stores of the trials")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for this process, which measures nothing itself
    given.into.mkdir(parents=True, exist_ok=True)
    blocks = []
    for number in range(1, given.blocks + 1):
        machine, store = given.into / f"machine-{number}.toml", given.into / f"trials-{number}.db"
        if not (machine.exists() and store.exists()):  # a file without its store is from a finished run
            subprocess.run([sys.executable, "-m", "dpbench", "probe", "--anyway", "--output", str(machine)], check=True)
        blocks.append((machine, store, measure(cases(given.models.split(","), given.batch), store, given.rounds)))
    trials = [trial for _, _, found in blocks for trial in found]
    for trial in trials:
        if trial.status != "ok":
            print(f"{trial.case.label}: {trial.status}: {trial.reason}", file=sys.stderr)
    command = f"python benchmarks/scripts/cpu_truth.py {' '.join(sys.argv[1:])}".strip()
    write(list(compare(blocks)), given.into, trials, given.blocks, given.rounds, command)
    if not given.keep:
        for path in given.into.glob("trials-*.db*"):
            path.unlink()
    print((given.into / "README.md").read_text())


if __name__ == "__main__":
    main()
