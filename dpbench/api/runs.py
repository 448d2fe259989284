"""Runs: one run with its trials, and its results as answers, tables, text and pages."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.analysis import comparison, frames, quantities, stats
from dpbench.analysis.answer import Answers
from dpbench.analysis.comparison import Comparison, Comparisons
from dpbench.analysis.findings import text
from dpbench.analysis.frames import DataFrame
from dpbench.analysis.report import Report
from dpbench.api import STORE
from dpbench.api.reports import report_of, write_report
from dpbench.api.stored import list_unreadable, side
from dpbench.records import Trial, files, words
from dpbench.records.environment import Difference
from dpbench.report import comparing, naming
from dpbench.store import Store, StoredRun, UnreadableRow

if TYPE_CHECKING:
    from dpbench.report.sheet import Sheet


log = logging.getLogger(__name__)


class Run:
    """A run: its measurements and its results.

    A notebook shows its answers, its swim lanes and the table of its cases. The tables are tidy:
    `frame` has one row per case, `steps` per step, `phases` per phase of a step, and `samples` per
    sample. Times are seconds and sizes bytes. Each estimate has the columns value, low and high for
    its 95 % interval (80 % for predictions), and `withheld`, the reason why the estimate is in
    doubt. Such an estimate is NaN in `frame`; `raw_frame` has all numbers. Whoever shows a
    number must also show its `labels`.
    """

    def __init__(
        self,
        stored: StoredRun,
        trials: Sequence[Trial],
        store: Path | None,
        unreadable: Sequence[UnreadableRow] = (),
    ) -> None:
        """Wrap a stored run and its trials, which may lack their spans.

        `store` is the file that has the spans, None for exported trials. `unreadable` has the rows
        of this file that could not be read.
        """
        self._stored = stored
        self._trials = trials
        self._store = store
        self._unreadable = unreadable

    @property
    def id(self) -> str:
        """Return the id of the run; `load` and the command line accept its first characters."""
        return self._stored.id

    @property
    def status(self) -> str:
        """Return "finished", "open", "interrupted" or "running"; "exported" for exported trials.

        An open run used up its time before its answers were settled or its rounds measured.
        """
        return self._stored.status if self._store else "exported"

    @property
    def started(self) -> datetime | None:
        """Return the time at which the run began, in UTC; None for exported trials."""
        return datetime.fromtimestamp(self._stored.started, UTC) if self._stored.started else None

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Return the facts on host, software and code that are needed to repeat the run.

        Empty for exported trials.
        """
        return self._stored.provenance

    @cached_property
    def trials(self) -> Sequence[Trial]:
        """Return the trials with the spans of all steps; exported trials have no spans."""
        if self._store is None:
            return self._trials
        with Store.read(self._store, list_unreadable) as opened:
            return opened.trials(self.id)

    @cached_property
    def analysis(self) -> Report:
        """Return the analysis of the run, from which all other results are taken."""
        return report_of(self._stored, self._trials, self._store, self._unreadable)

    @property
    def answers(self) -> Answers:
        """Return whether to use several devices: one answer per model and setting.

        They print as `dpbench run` prints them.
        """
        return Answers(self.analysis.answers)

    @property
    def verdict(self) -> str:
        """Return the answers as text, one paragraph per answer, each with its labels."""
        paragraphs = [
            " ".join([answer.text, *(f"[{label}]" for label in answer.labels)])
            for answer in self.answers
        ]
        return "\n\n".join(paragraphs) or repr(self.answers)

    @property
    def warnings(self) -> Sequence[str]:
        """Return what may change the answers; `dpbench run` prints it to stderr."""
        return [str(one) for one in self.analysis.warnings]

    @property
    def remarks(self) -> Sequence[str]:
        """Return what explains the figures; `dpbench explain` prints it."""
        return [str(one) for one in self.analysis.remarks]

    @property
    def frame(self) -> DataFrame:
        """Return a new table with one row per case; a number in doubt is NaN.

        The columns `*_withheld` say why. The phases of a step are withheld with `step`.
        """
        return frames.cases([(self.id, self.analysis.rows, self._trials)])

    @property
    def raw_frame(self) -> DataFrame:
        """Return the table `frame` with all numbers, also those in doubt."""
        return frames.cases([(self.id, self.analysis.rows, self._trials)], raw=True)

    @property
    def steps(self) -> DataFrame:
        """Return a new table with one row per step, with its duration in seconds."""
        return frames.steps(self.id, self._trials)

    @property
    def phases(self) -> DataFrame:
        """Return a new table with one row per phase of a step; phases sum to the step's time."""
        return frames.phases(self.id, self._trials)

    @property
    def samples(self) -> DataFrame:
        """Return a new table with one row per reading of a sampler; empty for exported trials."""
        return frames.samples(self.id, self._trials)

    def summary(self) -> dict[str, float]:
        """Return the figures of all cases by keys that MLflow, TensorBoard and W&B accept.

        A key such as "mlp/dp/x2/cpu/batch_64/step_s" names the case and ends in the figure and its
        unit; it is the same in every run. Figures that `frame` withholds, and those that are not
        finite, are NaN, and a warning has their number. docs/integrations.md explains the keys.
        """
        found = quantities.figures(self.analysis.rows)
        if withheld := sum(map(math.isnan, found.values())):
            log.warning(
                "%s of the summary %s NaN, for the reasons in run.frame; more rounds, longer trials"
                " or a quieter machine would help",
                words.count(withheld, "figure"),
                words.verb(withheld, "is", "are"),
            )
        return found

    def explain(self, *, all: bool = False, samples: int = 0) -> str:
        """Return, for each model, whether to use several devices, why, and which change helps.

        With `all`, the findings with their evidence and remedies follow. `samples` is the number of
        samples of an epoch, whose time the text then states; 0 if unknown. `dpbench explain` prints
        the same text.
        """
        report = self.analysis
        return text.explain(
            report.answers,
            report.diagnoses,
            report.rows,
            samples,
            statements=report.statements,
            full=all,
        )

    def plot(self) -> Sheet:
        """Return the swim lanes of a median step and the speed-ups, as a matplotlib figure.

        A notebook shows it in its own theme; `savefig` writes a file, such as a PDF. For a run of
        `dpbench loaders`, it has the rates. Raises LookupError without matplotlib.
        """
        from dpbench.report import notebook

        return notebook.drawings(self.analysis)

    def report(self, path: str | Path) -> Path:
        """Write the report of the run as one HTML file, and return its path.

        Raises LookupError without matplotlib.
        """
        return write_report(Path(path), self.analysis)

    def compare(
        self,
        after: Run | str | Path,
        *,
        margin: float = stats.MARGIN,
        across: str | Iterable[str] = (),
        unlike: bool = False,
    ) -> Compared:
        """Return the comparison of this run with the run `after`, as `dpbench compare` makes it.

        `after` is a run, or a text that names one in the results file of this run; `dpbench compare
        --help` explains the names. Relative differences below `margin` count as equal. `across` has
        the facts in which the runs may differ, such as "torch" or "python". Raises ValueError if a
        name is unknown, or if the runs have no measured case in common. Unless `unlike` is True,
        also raises ValueError if the machines, the kinds of devices or the software differ in
        another fact.
        """
        if not isinstance(after, Run):
            after = Run(*side(self._store or STORE, str(after)), None)
        comparisons = comparison.between(
            self.analysis, after.analysis, margin=margin, across=across, unlike=unlike
        )
        return Compared(self.analysis, after.analysis, comparisons)

    def __repr__(self) -> str:
        rows = self.analysis.rows
        return (
            f"<dpbench.Run {self.id[:8]}: {words.count(len(rows), 'case')}, {self.status};"
            f" {' '.join(naming.labels(rows))}>"
        )

    def _repr_html_(self) -> str:
        from dpbench.report import notebook

        return notebook.render(self.analysis)


class Compared:
    """The comparison of two runs, with one line per case as text and as HTML in a notebook."""

    def __init__(self, before: Report, after: Report, comparisons: Comparisons) -> None:
        self._before = before
        self._after = after
        self._comparisons = comparisons

    @property
    def cases(self) -> Sequence[Comparison]:
        """Return the comparison of each case that has a result in both runs."""
        return self._comparisons.lines

    @property
    def across(self) -> Sequence[Difference]:
        """Return the facts that were asked for, and in which the runs differ."""
        return self._comparisons.across

    @property
    def unlike(self) -> Sequence[Difference]:
        """Return the other facts in which the runs differ so that only `unlike` compares them."""
        return self._comparisons.unlike

    def page(self, path: str | Path) -> Path:
        """Write the page of the comparison, with both runs in each section; return the path."""
        return files.write(Path(path), comparing.page(self._before, self._after, self._comparisons))

    def __repr__(self) -> str:
        return f"<dpbench.Compared: {comparing.summary(self._comparisons.verdicts)}>"

    def __str__(self) -> str:
        return comparing.text(self._before, self._after, self._comparisons)

    def _repr_html_(self) -> str:
        from dpbench.report import notebook

        return notebook.compared(self._before, self._after, self._comparisons)
