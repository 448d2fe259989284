"""Comparing: two runs before and after a change, as text, as Markdown, and as an HTML page without scripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dpbench.analysis.comparison import ORDER, Comparison, Comparisons
from dpbench.analysis.report import Report
from dpbench.records import words
from dpbench.records.trial import Estimate
from dpbench.report import markdown, naming

if TYPE_CHECKING:
    from dpbench.report.page import Styles

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
    phase = f"{line.phase} {words.signed_time(line.phase_s)} ({words.percent(line.share)} of the changes of all phases)"
    return "; ".join([*([phase] if line.decided else []), line.reason])


def summary(found: Comparisons) -> str:
    """Return the number of cases by verdict as text, such as "1 case slower, 2 cases undecided"."""
    counts = found.verdicts
    return ", ".join(f"{words.count(counts[verdict], 'case')} {verdict}" for verdict in ORDER if counts[verdict])


def facts(before: Report, after: Report, found: Comparisons) -> list[tuple[str, str]]:
    """Return a line on each run, and a line on each fact in which their machines differ, as pairs of a name and a text.

    The name of such a fact is "UNLIKE".
    """
    return [("before", heading(before)), ("after", heading(after)), *(("UNLIKE", str(one)) for one in found.unlike)]


def text(before: Report, after: Report, found: Comparisons) -> str:
    """Return the comparison as plain text: a line on each run, and a table with one line per case."""
    aligned = words.aligned([COLUMNS, *cells(found)], left=[COLUMNS.index(name) for name in TEXT_COLUMNS])
    head = [f"{name:<7} {said}" for name, said in facts(before, after, found)]
    return "\n".join([*head, "", *aligned, "", f"{summary(found)}. {NOTE}"])


def as_markdown(before: Report, after: Report, found: Comparisons) -> str:
    """Return the comparison in GitHub's Markdown, for a pull request."""
    head = facts(before, after, found)
    return markdown.compared(f"dpbench: {summary(found)}", head, COLUMNS, cells(found), TEXT_COLUMNS, NOTE)


@dataclass(frozen=True)
class SideAnswer:
    """The headline of an answer to a question, in one run or, if it is the same, in both (`side`), and its labels."""

    subject: str
    side: str
    headline: str = "no answer"
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """The drawing of a case, as markup, with its title and its caption."""

    title: str
    drawing: str
    caption: str


def page(before: Report, after: Report, found: Comparisons) -> str:
    """Return the comparison as one HTML page: the answers of both runs, the table, and the phases of both runs.

    The page has the style sheet of the report, and no script.
    """
    from dpbench.report import page as report_page

    styles = report_page.Styles()
    figures, left_out = _figures(before, after, found, styles)
    style = f"{report_page.text_of('page.css')}{report_page.text_of('compare.css')}{styles}"
    jinja = Environment(
        loader=FileSystemLoader(report_page.FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    rendered = jinja.get_template("compare.html").render(
        policy=Markup(f"default-src 'none'; style-src {report_page.allowed(style)}"), style=Markup(style),
        summary=summary(found), facts=facts(before, after, found), answers=answers(before, after), columns=COLUMNS,
        text_columns=TEXT_COLUMNS, lines=cells(found), figures=figures, legend=NOTE, intervals=words.INTERVALS,
        note=f"{words.count(left_out, 'more case')} not drawn." if left_out else "",
    )  # fmt: skip
    # a name that was not UTF-8 contains lone surrogates, which cannot be encoded
    return rendered.encode("utf-8", "replace").decode()


def answers(before: Report, after: Report) -> list[SideAnswer]:
    """Return the answers of both runs by question; an answer that is the same in both runs occurs once."""
    sides = [{one.subject: (one.headline, one.labels) for one in report.answers} for report in (before, after)]
    shown = []
    for subject in dict.fromkeys(subject for side in sides for subject in side):
        first, second = (side.get(subject, ()) for side in sides)
        if first == second:
            shown.append(SideAnswer(subject, "before and after", *first))
        else:
            shown += [SideAnswer(subject, "before", *first), SideAnswer(subject, "after", *second)]
    return shown


def _figures(before: Report, after: Report, found: Comparisons, styles: Styles) -> tuple[list[Figure], int]:
    """Return a drawing for each case with enough rounds, and the number of such cases that are not drawn.

    A drawing has the phases of the step before, and below them those after.
    """
    from dpbench.report import figures

    rows = [{row.case: row for row in report.rows} for report in (before, after)]
    drawable = [line for line in found.lines if not (line.before.doubt or line.after.doubt)]
    shown = []
    for number, line in enumerate(drawable[:PANELS]):
        title = f"{line.name}: {line.verdict}"
        panel = figures.compared(title, rows[0][line.case], rows[1][line.other], f"case{number}")
        caption = f"{' '.join(line.labels)}: {why(line)}."
        shown.append(Figure(naming.plain(title), styles.without(panel.svg), caption))
    return shown, len(drawable) - len(shown)
