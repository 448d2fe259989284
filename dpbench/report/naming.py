"""Naming: texts that the HTML page and the Markdown report share."""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpbench.analysis.answer import Answer
from dpbench.analysis.report import Report
from dpbench.analysis.summary import Row
from dpbench.records import Case, Trial, hidden, words
from dpbench.records.disturbance import NOISY
from dpbench.records.estimate import Estimate
from dpbench.records.facts import Code, Gpus, RunFacts
from dpbench.records.grouping import grouped
from dpbench.records.vendors import AMD, NVIDIA

OF_A_TRIAL = (
    "validity",
    "foreign_load",
    "foreign_gpus",
    "gpu_busy_s",
    "neighbour_steps",
    "mark_pairs",
    "mark_s",  # of an earlier version
)
"""The facts that `environment` leaves out because they differ between trials."""


def drawable(estimate: Estimate | None) -> bool:
    """Return whether an estimate is neither None nor in doubt, and has only finite numbers."""
    finite = estimate and all(map(math.isfinite, (estimate.value, estimate.low, estimate.high)))
    return bool(estimate and finite and not estimate.doubt)


def withheld(estimates: Iterable[Estimate | None]) -> str:
    """Return a sentence with the number of estimates that are in doubt and not drawn; "" for 0."""
    doubtful = [estimate for estimate in estimates if estimate and estimate.doubt]
    cases = f"{words.count(len(doubtful), 'case')} {words.verb(len(doubtful), 'is', 'are')}"
    return f"{cases} not drawn: {words.withheld(*doubtful)}." if doubtful else ""


def case_id(case: Case) -> str:
    """Return the id of a case on the page, which is the same in every run."""
    return case.fingerprint[:10]


def case_ids(cases: Iterable[Case]) -> str:
    """Return the ids of cases, separated by spaces and without duplicates."""
    return " ".join(dict.fromkeys(map(case_id, cases)))


def alike(answer: Answer, rows: Sequence[Row]) -> str:
    """Return the ids of the cases with an answer's model and one of its batch sizes."""
    batches = {answer.home.batch_size, *([answer.row.case.batch_size] if answer.row else [])}
    cases = (row.case for row in rows)
    return case_ids(
        one for one in cases if one.model == answer.home.model and one.batch_size in batches
    )


def labels(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the labels of all rows without duplicates, in the order in which they first occur."""
    return union(row.labels for row in rows)


def axes(cases: Sequence[Case]) -> list[tuple[str, str, list[str]]]:
    """Return the axes by which the page filters its cases, as (column, title, values).

    An axis on which all cases have the same value is left out.
    """
    names = (
        ("model", "Model"),
        ("strategy", "Strategy"),
        ("devices", "Devices"),
        ("batch_size", "Batch"),
    )
    candidates = [
        (name, title, sorted({getattr(case, name) for case in cases})) for name, title in names
    ]
    return [
        (name, title, list(map(str, values)))
        for name, title, values in candidates
        if len(values) > 1
    ]


def union(groups: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the labels of all groups without duplicates, in the order of their first place."""
    return tuple(dict.fromkeys(label for group in groups for label in group))


def common(groups: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the labels that all groups have, in the first group's order; empty without groups."""
    first, *rest = [*groups] or [()]
    return tuple(label for label in first if all(label in group for group in rest))


def rounds(rows: Sequence[Row]) -> str:
    """Return a sentence on the number of rounds behind the rows, or on predicted numbers."""
    counts = sorted({row.rounds for row in rows if row.source.timed})
    if not counts:
        return "The numbers are predicted, not measured; intervals are 80% intervals."
    least = f"{counts[0]}–" if len(counts) > 1 else ""
    of = " of one execution" if rows[0].case.traits.in_parts else ""
    predicted = not all(row.source.timed for row in rows)
    and_predictions = "; predictions with 80% intervals" if predicted else ""
    return (
        f"Medians with 95% intervals over {least}{words.count(counts[-1], unit(rows[0].case))}{of}"
        f"{and_predictions}."
    )


def unit(case: Case) -> str:
    """Return the noun for a series of steps: "part" of one execution, or "round"."""
    return "part" if case.traits.in_parts else "round"


def processes(rows: Sequence[Row]) -> str:
    """Return a sentence on the processes in which the rounds of the rows were measured."""
    if rows and all(row.case.traits.in_parts for row in rows):
        return "The rounds of an observed loop are consecutive parts of one execution."
    return "Each round ran in a fresh process."


def basis(row: Row) -> str:
    """Return the source of a row's numbers as text, such as "3 rounds with 90 steps"."""
    if not row.source.timed:
        return f"predicted, {row.source.level} interval"
    return f"{words.count(row.rounds, unit(row.case))} with {words.count(row.steps, 'step')}"


def plain(text: str) -> str:
    """Return the text as one line without the characters that SVG does not allow."""
    spaced = " ".join(text.split())
    return "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cs", "Cn", "Co"))


def clip(text: str, columns: int) -> str:
    """Return the text as one line of at most `columns` columns, cut off with "…".

    Wide characters take two columns.
    """
    text = plain(text)
    used = 0
    for index, character in enumerate(text):
        used += _columns(character)
        if used > columns:
            return text[: max(0, index - 1)].rstrip() + "…"
    return text


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def facts(report: Report) -> list[tuple[str, str]]:
    """Return facts on the run, the machine and the code, as pairs of a name and a value."""
    facts = report.run.facts
    name, tags, host = facts.name, facts.tags, facts.host
    cores = f", {words.count(host.cores, 'core')}" if host.cores is not None else ""
    return [
        ("run", f"{report.run.id[:12]} @{name}" if name else report.run.id[:12]),
        ("date", words.minute(report.run.started) if report.run.started else "unknown"),
        ("host", f"{host.cpu or 'unknown CPU'}{cores}"),
        ("GPUs", gpus(facts.gpus)),
        *([("other load", load)] if (load := _other_load(facts)) else []),
        ("torch", str(facts.packages.get("torch", "unknown"))),
        ("dpbench", _code(facts.dpbench)),
        *([("project", _code(facts.project))] if facts.project != Code() else []),
        *([("tags", " ".join(f"{key}={value}" for key, value in tags.items()))] if tags else []),
    ]


def _other_load(facts: RunFacts) -> str:
    """Return a text on the load of other processes; "" for a run that did not measure it."""
    if facts.noisy:
        return NOISY
    load = facts.foreign_load
    if load.foreign is None:
        return ""
    share = words.percent(load.foreign + load.steal)
    return f"{share} of the cores before the run"


def gpus(inventory: Gpus) -> str:
    """Return the number of GPUs by model and the driver's version as text; "none" without GPUs."""
    models = Counter(gpu.name or "unknown" for gpu in inventory.gpus or ())
    driver = f", driver {inventory.driver}" if inventory.driver is not None else ""
    return (
        ", ".join(f"{count} × {name}" for name, count in models.items()) + driver
        if models
        else "none"
    )


def _code(code: Code) -> str:
    commit = f"commit {code.commit[:12]}" if code.commit else ""
    dirty = "dirty" if code.dirty else ""
    return " ".join(filter(None, (code.version, commit, dirty))) or "unknown"


def badges(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return each label with a text such as "2 of 8 cases", which is empty if all cases have it."""
    counts = Counter(label for row in rows for label in row.labels)
    return [
        (label, "" if n == len(rows) else f"{n} of {len(rows)} cases")
        for label, n in counts.items()
    ]


def environment(provenance: Mapping[str, Any], trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Return facts on the environment of the run and its workers, as pairs of a name and a value.

    Commas separate the values of workers that differ.
    """
    # earlier versions stored long series of numbers under this name
    entries = [*_flat(_without(provenance, "self_check"), "")]
    same = (_without(trial.provenance, *OF_A_TRIAL) for trial in trials)
    workers = grouped(pair for facts in same for pair in _flat(facts, "worker."))
    every = entries + [(name, ", ".join(dict.fromkeys(found))) for name, found in workers.items()]
    amd = any(name.endswith(".hip") for name, _ in every)
    return [(_as_amd(name), value) for name, value in every] if amd else every


def _as_amd(name: str) -> str:
    """Return the name of a fact with AMD's word for what the last part of it names."""
    path, dot, last = name.rpartition(".")
    theirs = {
        NVIDIA.convolutions.lower(): AMD.convolutions,
        NVIDIA.collectives.lower(): AMD.collectives,
    }
    return f"{path}{dot}{theirs.get(last, last)}"


def _without(provenance: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    """Return the facts that a page shows, without those of the names `left_out`."""
    return {
        name: value for name, value in hidden.shared(provenance).items() if name not in left_out
    }


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{prefix}{name}.")
    elif isinstance(value, (list, tuple)) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(inner, f"{prefix}{index}.")
    elif value not in ([], (), None, ""):
        yield (
            prefix.rstrip("."),
            value if isinstance(value, str) else json.dumps(value, default=str),
        )
