"""Formats: select and name trials.

Write them as JSON lines or a pyperf suite. Read JSON lines back.

The commands `pyperf stats`, `hist`, `check` and `compare_to` read the suite.
"""

from __future__ import annotations

import gzip
import json
import math
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
    visible,
    words,
)
from dpbench.records.files import BOM
from dpbench.records.ledger import Ledger

if TYPE_CHECKING:
    from dpbench.store import StoredRun


Labels = Callable[[Trial], tuple[str, ...]]
"""A function that returns the labels that must accompany a trial's numbers, such as MEASURED and
CPU-ONLY.
"""

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
"""The fields that `name` does not append to the label: the label has them, and `declared` follows
from the strategy.
"""


def name(case: Case) -> str:
    """Return a unique name of a case: its label, then field=value for each other field that is not
    at its default.
    """
    rest = {field: value for field, value in case.to_dict().items() if field not in IN_LABEL}
    return " ".join(
        [case.label, *(f"{field}={_plain(value)}" for field, value in sorted(rest.items()))]
    )


def _plain(value: Any) -> str:
    """Return the value of a case's field as text, such as "1,0" for the tuple (1, 0).

    The elements of a tuple are joined by commas, and those of a nested tuple by colons.
    """
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(":".join(part) if isinstance(part, tuple) else str(part) for part in value)


def title(trial: Trial, labels: Labels) -> str:
    """Return the title of a trial: its case and its round, and in brackets its labels and its
    fault, if any.

    The status of the trial follows the round unless the status is `ok`.
    """
    said = [*labels(trial), *([trial.fault.upper()] if trial.fault else [])]
    ended = "" if trial.status == "ok" else f" {trial.status}"
    return f"{name(trial.case)} round {trial.round}{ended} [{' '.join(said)}]"


def pick(trials: Sequence[Trial], part: str | None = None, *, every: bool = False) -> list[Trial]:
    """Return one trial of each case that `part` selects.

    With `every`, return all trials of these cases.

    The one trial of a case is the first that is trusted and has timed steps. `part` is the number
    of a case, counted from 1 in the order in which the run started the cases, or a part of a case's
    name. A complete name selects only that case, and None selects all cases. Raises ValueError if
    no case or no trial is selected.
    """
    names = list(dict.fromkeys(name(trial.case) for trial in trials))
    wanted = set(_named(names, part)) if part is not None else set(names)
    fitting = [trial for trial in trials if name(trial.case) in wanted]
    found = [trial for trial in fitting if every or (trial.trusted and trial.timed)]
    if not every:
        first: dict[str, Trial] = {}
        for trial in found:
            first.setdefault(name(trial.case), trial)
        found = [first[one] for one in names if one in first]
    if not found:
        ends = (
            ", ".join(f"{trial.case.label}: {trial.fault or trial.status}" for trial in fitting[:8])
            or "no trials"
        )
        raise ValueError(
            "the selected cases have no measured trial with usable step times (case and result of"
            f" each: {ends}); choose other cases with --case, or another run with --run"
        )
    return found


def _named(names: Sequence[str], part: str) -> list[str]:
    """Return those of `names` that `part` selects, by the rules of `pick`.

    Raises ValueError if there are none.
    """
    if part.isdigit() and 1 <= int(part) <= len(names):
        return [names[int(part) - 1]]
    found = [part] if part in names else [name for name in names if part in name]
    if not found or part.isdigit():
        raise ValueError(
            f"the run has no case {part}; give --case one of these numbers or names:"
            f" {numbered(names)}"
        )
    return found


def numbered(names: Sequence[str]) -> str:
    """Return the names of cases, each after the number that `pick` accepts for it, as text such as
    "1 mlp; 2 lstm".

    The text is "none" if there are no names.
    """
    return "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)) or "none"


def nameless(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's provenance without the host name, so that exported files do not reveal the
    host name.
    """
    host = {key: value for key, value in provenance.get("host", {}).items() if key != "name"}
    return {**provenance, **({"host": host} if host else {})}


def jsonl(run_id: str, trials: Iterable[Trial], labels: Labels = lambda trial: ()) -> Iterator[str]:
    """Yield one line of JSON per trial: run id, case, status, labels, memory, provenance, and
    seconds by phase.
    """
    for trial in trials:
        steps = [
            {"seconds": step.seconds, "warmup": step.warmup, "phases": phases}
            for step, phases in zip(trial.steps, trial.ledger.phases, strict=True)
        ]
        line = words.dumps(
            {
                "run_id": run_id,
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
                "provenance": dict(trial.provenance),
            }
        )
        yield f"{line}\n"


VERSION = "1.0"
Metadata = dict[str, str | int | float]


class ExportedStep(msgspec.Struct):
    """One step in a line of an exported file: its seconds (None if they were not finite), and its
    seconds by phase.
    """

    seconds: float | None
    warmup: bool
    phases: dict[str, float | None]


class ExportedTrial(msgspec.Struct):
    """One line of a file that `jsonl` wrote.

    Files of older versions lack the fields with a default.
    """

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

    def trial(self) -> Trial:
        """Return the trial with its ledger, without spans and samples.

        Each step begins when the previous one ends.
        """
        seconds = [math.nan if step.seconds is None else step.seconds for step in self.steps]
        found = Trial(
            case=Case.from_dict(self.case),
            source=self.source,
            status=self.status,
            reason=visible.visible(self.reason, lines=True),
            verified=self.verified,
            memory=tuple(Memory(**visible.everywhere(asdict(peak))) for peak in self.memory),
            setup=visible.everywhere(self.setup),
            provenance=visible.everywhere(self.provenance),
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
        return found.with_ledger(Ledger.recorded(found.steps, phases))


def read_jsonl(path: Path) -> dict[str, list[Trial]]:
    """Return the trials of a file that `jsonl` wrote, by run id.

    A file whose name ends in .gz is decompressed.

    Raises ValueError, which names the line, if a line is not a trial.
    """
    found: dict[str, list[Trial]] = {}
    number = 1
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for line in file:
                one = msgspec.json.decode(line.removeprefix(BOM), type=ExportedTrial)
                found.setdefault(visible.visible(one.run_id), []).append(one.trial())
                number += 1
    except (msgspec.MsgspecError, ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}, line {number}: this is not an export by `dpbench export jsonl`: {error}"
        ) from None
    return found


def read_run(path: Path, run: str = "") -> tuple[StoredRun, list[Trial]]:
    """Return the run whose id begins with `run` in a file that `jsonl` wrote, and its trials.

    The run has no start time and no provenance, because the file lacks them. Raises ValueError if
    `run` matches none or several of the runs in the file.
    """
    from dpbench.store import FINISHED, StoredRun

    found = read_jsonl(path)
    fitting = {name: trials for name, trials in found.items() if name.startswith(run)}
    if len(fitting) != 1:
        known = ", ".join(name[:12] for name in found) or "none"
        raise ValueError(
            f"{path} has {len(fitting)} runs whose id begins with {run!r}; give the beginning of an"
            f" id: {known}"
        )
    [(run_id, trials)] = fitting.items()
    return StoredRun(run_id, FINISHED, 0.0, 0, {}), trials


def pyperf(
    run_id: str, provenance: Mapping[str, Any], trials: Iterable[Trial], labels: Labels
) -> str:
    """Return a pyperf suite, as JSON text, of those trials of one run that are trusted and have
    timed steps.

    If a case has several such trials in a round, the last one counts. Raises ValueError if there is
    no such trial.
    """
    rounds: dict[str, dict[int, Trial]] = {}
    for trial in trials:
        if trial.trusted and trial.timed:
            measured = "" if trial.source is Source.MEASURED else f" {trial.source}"
            rounds.setdefault(f"{name(trial.case)}{measured}", {})[trial.round] = trial
    if not rounds:
        raise ValueError(
            f"run {run_id[:8]} has no measured trial with usable step times, and pyperf cannot read"
            " an empty suite; choose another run with --run"
        )
    benchmarks = [
        {
            "metadata": {
                "name": title,
                "unit": "second",
                "loops": 1,
                "labels": " ".join(
                    dict.fromkeys(label for trial in found.values() for label in labels(trial))
                ),
            },
            "runs": [_run(number, trial) for number, trial in sorted(found.items())],
        }
        for title, found in rounds.items()
    ]
    facts = _facts(provenance, {"dpbench_run": run_id})
    return json.dumps({"version": VERSION, "metadata": facts, "benchmarks": benchmarks}) + "\n"


def _run(number: int, trial: Trial) -> dict[str, Any]:
    """Return the trial of round `number` as a run of pyperf.

    `values` are the durations of the timed steps in seconds; `warmups` are pairs of the loop count,
    1, and the duration of a warm-up step in seconds.
    """
    metadata: Metadata = {"round": number, "verified": str(trial.verified)}
    if trial.setup:
        metadata["duration"] = sum(trial.setup.values())
    if trial.started_s:
        metadata["date"] = (
            datetime.fromtimestamp(trial.started_s, UTC).replace(tzinfo=None).isoformat(" ")
        )
    run: dict[str, Any] = {"metadata": metadata, "values": list(trial.timed)}
    warmups = [(1, step.seconds) for step in trial.steps if step.warmup]
    return run | ({"warmups": warmups} if warmups else {})


def _facts(provenance: Mapping[str, Any], first: Metadata) -> Metadata:
    """Return the metadata of a suite: the entries of `first`, then the run's provenance without the
    host name.

    Facts that pyperf defines have pyperf's names. Empty facts are left out.
    """
    host, gpus = provenance.get("host", {}), provenance.get("gpus", {})
    packages, code = provenance.get("packages", {}), provenance.get("dpbench", {})
    facts = {
        "platform": f"{host.get('system', '')} {host.get('machine', '')}",
        "cpu_model_name": host.get("cpu"),
        "cpu_count": host.get("cores"),
        "python_version": provenance.get("python"),
        "gpus": _counted([gpu.get("name", "") for gpu in gpus.get("gpus", [])]),
        "gpu_driver": gpus.get("driver"),
        **{f"{package}_version": version for package, version in packages.items()},
        "dpbench_version": code.get("version"),
        "dpbench_commit": f"{code.get('commit', '')}{' (dirty)' if code.get('dirty') else ''}",
    }
    # pyperf rejects values that are empty or have several lines
    plain = {
        key: " ".join(value.split()) if isinstance(value, str) else value
        for key, value in facts.items()
    }
    return first | {key: value for key, value in plain.items() if value}


def _counted(names: Sequence[str]) -> str:
    """Return the distinct names, each after its count, as text such as "2x A100, 1x T4"."""
    return ", ".join(f"{names.count(one)}x {one}" for one in dict.fromkeys(names))
