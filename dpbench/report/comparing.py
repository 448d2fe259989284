"""Comparing: two runs before and after a change, as text, as Markdown, and as an HTML page without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dpbench.analysis.comparison import ORDER, Comparison, Comparisons
from dpbench.analysis.report import Report
from dpbench.records import words
from dpbench.records.trial import Estimate
from dpbench.report import markdown, naming

if TYPE_CHECKING:
    from dpbench.report.svg import Panel

COLUMNS = ("verdict", "case", "ratio", "95 %", "before, ms", "after, ms", "labels", "why")
TEXT_COLUMNS = ("verdict", "case", "labels", "why")
NOTE = "A ratio above 1 means that the run after is faster."
PANELS = 40
"""The largest number of cases whose phases are drawn on the page."""


def heading(report: Report) -> str:
    """Return one line on a run: its id and name, time, the commits of dpbench and of the project, and its machine."""
    facts = dict(naming.facts(report))
    name = report.provenance.get("name", "")
    code = [f"dpbench {facts['dpbench']}", *([f"project {facts['project']}"] if "project" in facts else [])]
    gpus = [] if facts["GPUs"] == "none" else [facts["GPUs"]]
    return "  ".join(
        [report.run_id[:8], *([f"@{name}"] if name else []), facts["date"], *code, ", ".join([facts["host"], *gpus])]
    )


def cells(found: Comparisons) -> list[tuple[str, ...]]:
    """Return the cells of one line per case, in the order of `COLUMNS`; cases without a result come last."""
    lost = [("undecided", case.label, *[""] * 5, reason) for case, reason in found.lost.items()]
    return [*map(_cells, found.lines), *lost]


def _cells(line: Comparison) -> tuple[str, ...]:
    ratio = ("", "")
    if not line.ratio.doubt:
        ratio = f"{_number(line.ratio.value)}x", f"{_number(line.ratio.low)}-{_number(line.ratio.high)}"
    return (line.verdict, line.name, *ratio, _ms(line.before), _ms(line.after), " ".join(line.labels), why(line))


def _number(value: float) -> str:
    """Return a ratio as text with four digits, which a margin of 1 % needs."""
    return words.number(value, 4)


def _ms(step: Estimate) -> str:
    return "" if step.doubt else words.number(step.value * 1e3)


def why(line: Comparison) -> str:
    """Return the phase that changed most, with its share of all changes, if the case changed; then the reason."""
    phase = f"{line.phase} {words.signed_time(line.phase_s)} ({words.percent(line.share)} of what the phases changed)"
    return "; ".join([*([phase] if line.decided else []), line.reason])


def summary(found: Comparisons) -> str:
    """Return the number of cases by verdict as text, such as "1 case slower, 2 cases undecided"."""
    counts = found.verdicts
    return ", ".join(f"{words.count(counts[verdict], 'case')} {verdict}" for verdict in ORDER if counts[verdict])


def text(before: Report, after: Report, found: Comparisons) -> str:
    """Return the comparison as plain text: a line on each run, and a table with one line per case."""
    aligned = words.aligned([COLUMNS, *cells(found)], left=[COLUMNS.index(name) for name in TEXT_COLUMNS])
    head = [f"before  {heading(before)}", f"after   {heading(after)}", *(f"UNLIKE  {one}" for one in found.unlike)]
    return "\n".join([*head, "", *aligned, "", f"{summary(found)}. {NOTE}"])


def as_markdown(before: Report, after: Report, found: Comparisons) -> str:
    """Return the comparison in GitHub's Markdown, for a pull request."""
    facts = [("before", heading(before)), ("after", heading(after)), *(("UNLIKE", str(one)) for one in found.unlike)]
    return markdown.compared(f"dpbench: {summary(found)}", facts, COLUMNS, cells(found), TEXT_COLUMNS, NOTE)


def page(before: Report, after: Report, found: Comparisons) -> str:
    """Return the comparison as one HTML page: the answers of both runs, the table, and the phases of both runs."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    panels = _panels(before, after, found)
    left_out = sum(1 for line in found.lines if not (line.before.doubt or line.after.doubt)) - len(panels)
    rendered = jinja.get_template("compare.html").render(
        summary=summary(found), sides=(("before", heading(before)), ("after", heading(after))), unlike=found.unlike,
        answers=answers(before, after), columns=COLUMNS, text_columns=TEXT_COLUMNS, lines=cells(found),
        panels=panels, note=f"{words.count(left_out, 'more case')} not drawn." if left_out else "",
        drawing=Markup, intervals=words.INTERVALS, legend=NOTE,
    )  # fmt: skip
    # a name that was not UTF-8 contains lone surrogates, which cannot be encoded
    return rendered.encode("utf-8", "replace").decode()


def answers(before: Report, after: Report) -> list[tuple[str, str, str]]:
    """Return the subject of each answer of one of the runs, and the headlines before and after; "" if there is none."""
    first, second = ({one.subject: one.headline for one in report.answers} for report in (before, after))
    return [(subject, first.get(subject, ""), second.get(subject, "")) for subject in dict.fromkeys([*first, *second])]


def _panels(before: Report, after: Report, found: Comparisons) -> Sequence[Panel]:
    """Return a drawing for each case with enough rounds: the phases of its step before, and below them those after."""
    from dpbench.report import figures

    rows = [{row.case: row for row in report.rows} for report in (before, after)]
    drawn = [line for line in found.lines if not (line.before.doubt or line.after.doubt)][:PANELS]
    panels = []
    for number, line in enumerate(drawn):
        title = f"{line.name}: {line.verdict}"
        panel = figures.compared(title, rows[0][line.case], rows[1][line.other], f"case{number}")
        panels.append(replace(panel, caption=why(line), labels=line.labels))
    return panels
