"""Export: write the trials of the store in the formats of other tools.

jsonl            one line of JSON per trial, with the seconds of each phase in each step
trace            a Chrome trace for Perfetto and speedscope, with every span, step and sample
split            one trial as one trace file per device, for Holistic Trace Analysis (HTA)
pyperf           a pyperf suite, with one benchmark per case and one pyperf run per round, whose
                 only value is the median step

Text is returned in pieces, so that the text of a long run is never in memory as a whole. `labels`
returns the labels that must accompany a trial's numbers, such as `dpbench.analysis.summary.labels`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.records import files
from dpbench.records.errors import UsageError
from dpbench.store.export.formats import Labels, jsonl, name, numbered, pick, pyperf, read_run
from dpbench.store.export.traces import split as split_ranks
from dpbench.store.export.traces import trace

if TYPE_CHECKING:
    from dpbench.records import Trial
    from dpbench.store import StoredRun

__all__ = [
    "check",
    "jsonl",
    "name",
    "pick",
    "pieces",
    "pyperf",
    "read_run",
    "split_ranks",
    "trace",
    "write",
]


def check(
    format: str, *, every: bool, output: Path | None, part: str | None, split: Path | None
) -> None:
    """Raise ValueError if the options of the command `export` cannot be combined.

    `every`, `part` and `split` are the values of the options `all`, `case` and `split`.
    """
    if format != "trace" and (part is not None or split):
        raise UsageError(
            "{} can be used with the format trace only, not with {format}",
            option="split" if split else "case",
            remedy="leave out {}",
            format=format,
        )
    if split and (output or every):
        raise UsageError(
            "{} writes one trial into the folder {folder}",
            option="split",
            remedy="leave out {output}" if output else "leave out {all}",
            folder=split,
        )
    if format == "parquet" and not output:
        raise UsageError(
            "parquet is a binary format, which is not written to stdout",
            option="output",
            remedy="give a file with {}",
        )
    if format == "pyperf" and every:
        raise UsageError(
            "the format pyperf has one run per file",
            option="all",
            remedy="leave out {}, and export each run to a file with {run}",
        )


def pieces(
    format: str,
    runs: Sequence[tuple[StoredRun, Sequence[Trial]]],
    labels: Labels,
    *,
    every: bool = False,
    part: str | None = None,
    split: Path | None = None,
) -> Iterator[str]:
    """Return the text of an export in pieces; for `split`, write files instead.

    `runs` has pairs of a run and its trials; only jsonl accepts several runs. For a trace, `part`
    and `every` select trials as in `pick`. With `split`, one trace file per device is written into
    this folder, and the pieces are their paths, one per line.

    Raises ValueError if a trace, a split or a pyperf suite would contain no trial, or if several
    trials are selected for `split`.
    """
    if format == "jsonl":
        return chain.from_iterable(jsonl(run.id, trials, labels) for run, trials in runs)
    [(run, trials)] = runs
    if format == "pyperf":
        return iter([pyperf(run.id, run.provenance, trials, labels)])
    picked = pick(trials, part, every=every)
    if split is None:
        return trace(run.id, run.provenance, picked, labels)
    if len(picked) > 1:
        names = list(dict.fromkeys(name(trial.case) for trial in trials))
        raise UsageError(
            "{} writes one case, but {number} cases are selected",
            option="split",
            remedy="choose one by number or name with {case}: {names}",
            number=len(picked),
            names=numbered(names),
        )
    return (f"{path}\n" for path in split_ranks(run.id, run.provenance, picked[0], labels, split))


def write(text: Iterable[str], output: Path | None) -> None:
    """Write the pieces of `text` one by one to the file `output`, or to stdout."""
    if output is None:
        sys.stdout.writelines(text)
        sys.stdout.flush()
        return
    with files.replacing(output) as part, part.open("w", encoding="utf-8") as out:
        out.writelines(text)
