"""Formats: select and name trials, write them as JSON lines or a pyperf suite, read JSON lines.

The commands `pyperf stats`, `hist`, `check` and `compare_to` read the suite.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dpbench.records import (
    HABITS,
    Case,
    Memory,
    Source,
    Status,
    Step,
    Trial,
    Verified,
    hidden,
    visible,
    words,
)
from dpbench.records.errors import UsageError
from dpbench.records.facts import RunFacts
from dpbench.records.files import BOM
from dpbench.records.ledger import Ledger
from dpbench.records.trial import in_schema
from dpbench.store.rows import checked

if TYPE_CHECKING:
    from dpbench.store import StoredRun


Labels = Callable[[Trial], tuple[str, ...]]
"""A function that returns the labels that must accompany a trial's numbers, such as MEASURED."""

IN_LABEL = frozenset(
    {
        "model",
        "size",
        "strategy",
        "schedule",
        "devices",
        "device_kind",
        "placement",
        "optimizer",
        "unverified",
        "declared",
        "batch_size",
        "precision",
        *HABITS,
    }
)
"""The fields that `name` does not append: the label has them, or the strategy implies them."""


def name(case: Case) -> str:
    """Return a unique name of a case: its label, then field=value for other fields."""
    rest = {field: value for field, value in case.to_dict().items() if field not in IN_LABEL}
    return " ".join(
        [case.label, *(f"{field}={_plain(value)}" for field, value in sorted(rest.items()))]
    )


def _plain(value: Any) -> str:
    """Join the elements of a tuple by commas, such as "1,0", those of a nested one by colons."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(":".join(part) if isinstance(part, tuple) else str(part) for part in value)


def title(trial: Trial, labels: Labels) -> str:
    """Return a trial's case, round and status unless `ok`, and in brackets its labels and fault."""
    marks = [*labels(trial), *([trial.fault.upper()] if trial.fault else [])]
    ended = "" if trial.status == "ok" else f" {trial.status}"
    return f"{name(trial.case)} round {trial.round}{ended} [{' '.join(marks)}]"


def pick(trials: Sequence[Trial], part: str | None = None, *, every: bool = False) -> list[Trial]:
    """Return one trial of each case that `part` selects; with `every`, all its trials.

    The one trial is the first that is trusted and has timed steps. `part` is the number of a case,
    counted from 1 in the order of start, its name, or a part of its name; None selects all cases.
    Raises ValueError if no case or no trial is selected.
    """
    names = list(dict.fromkeys(name(trial.case) for trial in trials))
    wanted = set(_named(names, part)) if part is not None else set(names)
    fitting = [trial for trial in trials if name(trial.case) in wanted]
    picked = [trial for trial in fitting if every or (trial.trusted and trial.timed)]
    if not every:
        first: dict[str, Trial] = {}
        for trial in picked:
            first.setdefault(name(trial.case), trial)
        picked = [first[one] for one in names if one in first]
    if not picked:
        ends = (
            ", ".join(f"{trial.case.label}: {trial.fault or trial.status}" for trial in fitting[:8])
            or "no trials"
        )
        raise UsageError(
            "the selected cases have no measured trial with usable step times (case and result of"
            " each: {ends})",
            option="case",
            remedy="choose other cases with {}, or another run with {run}",
            ends=ends,
        )
    return picked


def _named(names: Sequence[str], part: str) -> list[str]:
    if part.isdigit() and 1 <= int(part) <= len(names):
        return [names[int(part) - 1]]
    selected = [part] if part in names else [name for name in names if part in name]
    if not selected or part.isdigit():
        raise UsageError(
            "the run has no case {part}",
            option="case",
            remedy="give {} one of these numbers or names: {names}",
            part=part,
            names=numbered(names),
        )
    return selected


def numbered(names: Sequence[str]) -> str:
    """Return the names of cases with the numbers that `pick` accepts, such as "1 mlp; 2 lstm".

    The text is "none" if there are no names.
    """
    return "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)) or "none"


def jsonl(run_id: str, trials: Iterable[Trial], labels: Labels = lambda trial: ()) -> Iterator[str]:
    """Yield one line of JSON per trial."""
    for trial in trials:
        steps = [
            {"seconds": step.seconds, "warmup": step.warmup, "phases": phases}
            for step, phases in zip(trial.steps, trial.ledger.phases, strict=True)
        ]
        line = words.dumps(
            {
                "run_id": run_id,
                "schema": trial.schema,
                "case": {**trial.case.to_dict(), "devices": trial.case.devices},
                "source": trial.source,
                "status": trial.status,
                "labels": labels(trial),
                "reason": trial.reason,
                "verified": trial.verified,
                "round": trial.round,
                "steps": steps,
                "memory": [asdict(peak) for peak in trial.memory],
                "failed_device": trial.failed_device,
                "setup": dict(trial.setup),
                "provenance": hidden.shared(trial.provenance),
            }
        )
        yield f"{line}\n"


VERSION = "1.0"
Metadata = dict[str, str | int | float]


class ExportedStep(msgspec.Struct):
    """One step in a line of an exported file; non-finite `seconds` are None."""

    seconds: float | None
    warmup: bool
    phases: dict[str, float | None]


class ExportedTrial(msgspec.Struct):
    """One line of a file that `jsonl` wrote; older versions lack the fields with a default."""

    run_id: str
    case: dict[str, Any]
    source: Source
    status: Status
    reason: str
    verified: Verified
    steps: list[ExportedStep]
    memory: list[Memory]
    provenance: dict[str, Any]
    round: int = 0
    failed_device: int | None = None
    setup: dict[str, float] = {}
    schema: int = 2

    def trial(self) -> Trial:
        """Return the trial with its ledger, without spans and samples.

        Each step begins when the previous one ends.
        """
        seconds = [math.nan if step.seconds is None else step.seconds for step in self.steps]
        trial = Trial(
            case=in_schema(Case.from_dict(self.case), self.schema),
            schema=self.schema,
            source=self.source,
            status=self.status,
            reason=hidden.text(visible.visible(self.reason, lines=True)),
            verified=self.verified,
            memory=tuple(Memory(**visible.everywhere(asdict(peak))) for peak in self.memory),
            setup=visible.everywhere(self.setup),
            provenance=hidden.everywhere(visible.everywhere(self.provenance)),
            round=self.round,
            failed_device=self.failed_device,
            steps=tuple(
                map(Step, seconds, [step.warmup for step in self.steps], accumulate(seconds))
            ),
        )
        phases = [
            {visible.visible(name): s or 0.0 for name, s in step.phases.items()}
            for step in self.steps
        ]
        return checked(trial).with_ledger(Ledger.recorded(trial.steps, phases))


def read_jsonl(path: Path) -> dict[str, list[Trial]]:
    """Return the trials of a file that `jsonl` wrote, by run id; one ending in .gz is decompressed.

    Raises ValueError, which names the line, if a line is not a trial.
    """
    by_run: dict[str, list[Trial]] = {}
    number = 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                exported = msgspec.json.decode(line.removeprefix(BOM), type=ExportedTrial)
                by_run.setdefault(visible.visible(exported.run_id), []).append(exported.trial())
                number += 1
    except (msgspec.MsgspecError, ValueError, EOFError, gzip.BadGzipFile) as error:
        raise UsageError(
            f"{path}, line {number}: this is not an export by `dpbench export jsonl`: {error}"
        ) from None
    return by_run


def read_run(path: Path, run: str = "") -> tuple[StoredRun, list[Trial]]:
    """Return the run whose id begins with `run` in a file that `jsonl` wrote, and its trials.

    The file has no start time and no provenance of the run. Raises ValueError if `run` matches none
    or several of its runs.
    """
    from dpbench.store import FINISHED, StoredRun

    by_run = read_jsonl(path)
    fitting = {name: trials for name, trials in by_run.items() if name.startswith(run)}
    if len(fitting) != 1:
        ids = ", ".join(name[:12] for name in by_run) or "none"
        raise UsageError(
            f"{path} has {len(fitting)} runs whose id begins with {run!r}; give the beginning of an"
            f" id: {ids}"
        )
    [(run_id, trials)] = fitting.items()
    return StoredRun(run_id, FINISHED, 0.0, 0, {}), trials


def pyperf(
    run_id: str, provenance: Mapping[str, Any], trials: Iterable[Trial], labels: Labels
) -> str:
    """Return a pyperf suite, as JSON, of a run's trials that are trusted and have timed steps.

    If a case has several such trials in a round, the last one counts. Raises ValueError if there is
    none.
    """
    rounds: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        if trial.trusted and trial.timed:
            measured = "" if trial.source is Source.MEASURED else f" {trial.source}"
            rounds.setdefault(f"{name(trial.case)}{measured}", {})[trial.round] = trial
    if not rounds:
        raise UsageError(
            "run {id} has no measured trial with usable step times, and pyperf cannot read an empty"
            " suite",
            option="run",
            remedy="choose another run with {}",
            id=run_id[:8],
        )
    benchmarks = [
        {
            "metadata": {
                "name": title,
                "unit": "second",
                "loops": 1,
                "labels": " ".join(
                    dict.fromkeys(label for trial in by_round.values() for label in labels(trial))
                ),
            },
            "runs": [_run(number, trial) for number, trial in sorted(by_round.items())],
        }
        for title, by_round in rounds.items()
    ]
    facts = _facts(provenance, {"dpbench_run": run_id})
    return json.dumps({"version": VERSION, "metadata": facts, "benchmarks": benchmarks}) + "\n"


def _run(number: int, trial: Trial) -> dict[str, Any]:
    """Return a trial as a run of pyperf: one value in seconds, and `warmups` as (loops, seconds).

    The value is the median of the timed steps. They are no values of their own, because pyperf
    takes all values of a benchmark for independent, and the steps of a process are not.
    """
    metadata: Metadata = {
        "round": number,
        "steps": len(trial.timed),
        "verified": str(trial.verified),
    }
    if trial.setup:
        metadata["duration"] = sum(trial.setup.values())
    if trial.started_s:
        metadata["date"] = (
            datetime.fromtimestamp(trial.started_s, UTC).replace(tzinfo=None).isoformat(" ")
        )
    run: dict[str, Any] = {"metadata": metadata, "values": [statistics.median(trial.timed)]}
    warmups = [(1, step.seconds) for step in trial.steps if step.warmup]
    return run | ({"warmups": warmups} if warmups else {})


def _facts(provenance: Mapping[str, Any], first: Metadata) -> Metadata:
    """Return the metadata of a suite: `first`, then the run's facts, with pyperf's names if any."""
    stated = RunFacts.of(provenance)
    host, code = stated.host, stated.dpbench
    facts = {
        "platform": f"{host.system} {host.machine}",
        "cpu_model_name": host.cpu,
        "cpu_count": host.cores,
        "python_version": stated.python,
        "gpus": _counted([gpu.name or "" for gpu in stated.gpus.gpus or ()]),
        "gpu_driver": stated.gpus.driver,
        **{f"{package}_version": version for package, version in stated.packages.items()},
        "dpbench_version": code.version,
        "dpbench_commit": f"{code.commit or ''}{' (dirty)' if code.dirty else ''}",
    }
    # pyperf rejects values that are empty or have several lines
    plain = {
        key: " ".join(value.split()) if isinstance(value, str) else value
        for key, value in facts.items()
    }
    return first | {key: value for key, value in plain.items() if value}


def _counted(names: Sequence[str]) -> str:
    """Return the distinct names after their counts, such as "2x A100, 1x T4"."""
    return ", ".join(f"{names.count(one)}x {one}" for one in dict.fromkeys(names))
