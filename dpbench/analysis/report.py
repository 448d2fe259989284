"""Report: everything that the page, Markdown, the terminal and `dpbench explain` show of a run, built once.

It is built from trials without spans (`Trial.summary`), so that a run with many trials fits in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from dpbench.analysis import diagnosis, findings, imbalance, ladder, memory, summary, transfers
from dpbench.hardware import foreign_load
from dpbench.records import Case, Trial

FINISHED = "finished"
"""The status of a run that has measured everything that it was asked for."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run, analysed. `self_check` holds the lines of text that the run's self-check resulted in."""

    run_id: str
    started_s: float
    """Seconds since the epoch."""
    provenance: Mapping[str, Any]
    trials: Sequence[Trial]
    rows: Sequence[summary.Row]
    ladders: Sequence[ladder.Ladder]
    verdict: str
    tiles: Sequence[diagnosis.Tile]
    warnings: Sequence[str]
    diagnoses: Sequence[findings.Diagnosis]
    self_check: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        trials: Sequence[Trial],
        *,
        run_id: str,
        started_s: float,
        provenance: Mapping[str, Any],
        status: str = FINISHED,
        self_check: Sequence[str] = (),
    ) -> Self:
        """Analyse the trials of one run; `provenance` and `status` are the run's."""
        rows = summary.rows(trials)
        ladders = ladder.ladders(rows)
        cores = provenance.get("host", {}).get("cores", 0)
        return cls(
            run_id=run_id, started_s=started_s, provenance=provenance, trials=trials, rows=rows, ladders=ladders,
            verdict=diagnosis.verdict(rows, ladders) + _noisy(provenance), tiles=diagnosis.tiles(rows, ladders),
            warnings=[*_of_run(status, provenance), *diagnosis.warnings(rows, trials, provenance)],
            diagnoses=findings.diagnose(rows, trials, cores), self_check=self_check,
        )  # fmt: skip

    @property
    def labels(self) -> Mapping[Case, tuple[str, ...]]:
        """Return the labels of each case."""
        return {row.case: row.labels for row in self.rows}

    @property
    def imbalance(self) -> Sequence[imbalance.Index]:
        """Return the indexes of device 0 against the others."""
        return imbalance.indexes(self.trials)

    @property
    def memory(self) -> Sequence[memory.Footprint]:
        """Return the peaks of memory by phase."""
        return memory.footprints(self.trials)

    @property
    def flows(self) -> Sequence[transfers.Flow]:
        """Return the bytes that each phase moves between devices."""
        return transfers.flows(self.trials)

    @property
    def counted(self) -> Sequence[transfers.Counted]:
        """Return the bytes that the devices' counters saw."""
        return transfers.counted(self.trials)


def _of_run(status: str, provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield warnings of a run that is incomplete, and of one during which the foreign load is unknown."""
    if status != FINISHED:
        yield f"incomplete: this run is {status}; the same `dpbench run` command continues it"
    if reason := provenance.get(foreign_load.FACT, {}).get("unknown"):
        yield f"it is unknown whether other processes used the cores: {reason}"


def _noisy(provenance: Mapping[str, Any]) -> str:
    """Return the label NOISY with its reasons, for a run during or before which other processes used the cores."""
    reasons = provenance.get("noisy")
    return f" {foreign_load.NOISY}: {'; '.join(reasons.values())}." if reasons else ""
