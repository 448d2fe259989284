"""Export: write the trials of the store in the formats of other tools.

jsonl            one trial per line, with the ledger's phases
trace            a Chrome trace, for Perfetto and speedscope: every span, step and sample
split            one trial as one file per rank, for Holistic Trace Analysis
pyperf           a pyperf suite: one benchmark per case, one run per round
parquet          a flat table of steps

Text is returned as an iterator of pieces, so that a long run is never held as one string. `labels` is a function that
returns the labels that must accompany a trial's numbers, such as `dpbench.analysis.summary.labels`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.export.formats import Labels, jsonl, name, numbered, parquet, pick, pyperf
from dpbench.export.traces import split as split_ranks
from dpbench.export.traces import trace

if TYPE_CHECKING:
    from dpbench.records import Trial
    from dpbench.store import StoredRun

__all__ = ["check", "jsonl", "name", "parquet", "pick", "pieces", "pyperf", "split_ranks", "trace", "write"]


def check(format: str, *, every: bool, output: Path | None, part: str | None, split: Path | None) -> None:
    """Check that the options can be combined, before a run is read. Raises ValueError if they cannot."""
    if format != "trace" and (part is not None or split):
        option = "--split" if split else "--case"
        raise ValueError(f"{option} applies to trace only, not to {format}: leave out {option}")
    if split and (output or every):
        raise ValueError(f"--split writes one trial into {split}: leave out {'--output' if output else '--all'}")
    if format == "parquet" and not output:
        raise ValueError("parquet is a binary format: give a file with --output")
    if format == "pyperf" and every:
        raise ValueError("pyperf compares files: export each run to a separate file with --run, and leave out --all")


def pieces(
    format: str, runs: Sequence[tuple[StoredRun, Sequence[Trial]]], labels: Labels, *, every: bool = False,
    output: Path | None = None, part: str | None = None, split: Path | None = None,
) -> Iterator[str]:  # fmt: skip
    """Return the text of an export in pieces; with parquet or `split`, write files instead.

    With `split`, the text lists the files that were written; for parquet, the text is empty. Raises ValueError if a
    trace, a split or a suite would have no trial, or if several trials are selected for `split`.
    """
    if format == "jsonl":
        return chain.from_iterable(jsonl(run.id, trials) for run, trials in runs)
    if format == "parquet":
        assert output is not None
        parquet(((run.id, trials) for run, trials in runs), labels, output)
        return iter(())
    [(run, trials)] = runs
    if format == "pyperf":
        return iter([pyperf(run.id, run.provenance, trials, labels)])
    picked = pick(trials, part, every=every)
    if split is None:
        return trace(run.id, run.provenance, picked, labels)
    if len(picked) > 1:
        names = list(dict.fromkeys(name(trial.case) for trial in trials))
        raise ValueError(
            f"--split writes one case, but {len(picked)} match: choose one with --case; the run has {numbered(names)}"
        )
    return (f"{path}\n" for path in split_ranks(run.id, run.provenance, picked[0], labels, split))


def write(text: Iterable[str], output: Path | None) -> None:
    """Write text piece by piece to a file, or to stdout if `output` is None."""
    if output is None:
        sys.stdout.writelines(text)
        sys.stdout.flush()
        return
    with output.open("w") as out:
        out.writelines(text)
