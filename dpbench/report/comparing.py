"""Comparing: the comparison of two runs as text, as Markdown, and as an HTML page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from markupsafe import Markup

from dpbench.analysis import caveats
from dpbench.analysis.comparison import ORDER, SURE, Comparison, Comparisons
from dpbench.analysis.report import Report
from dpbench.records import Case, Source, words
from dpbench.records.trial import Estimate
from dpbench.report import check_drawings, markdown, naming, table

if TYPE_CHECKING:
    from dpbench.report.page import PageSection, Styles

COLUMNS = ("verdict", "case", "ratio", "99 %", "before, ms", "after, ms", "labels", "why")
TEXT_COLUMNS = ("verdict", "case", "labels", "why")
NOTE = (
    "A ratio above 1 means that the second run (after) is faster. The intervals of all ratios"
    f" contain the true values with {SURE:.0%}; a verdict needs the whole interval."
)
PANELS = 40
"""The largest number of cases that a section of the page draws."""


def heading(report: Report) -> str:
    """Return a line on a run: its id, name, time, commits of dpbench and project, and machine."""
    facts = dict(naming.facts(report))
    name = report.provenance.get("name", "")
    code = [
        f"dpbench {facts['dpbench']}",
        *([f"project {facts['project']}"] if "project" in facts else []),
    ]
    gpus = [] if facts["GPUs"] == "none" else [facts["GPUs"]]
    return "  ".join(
        [
            report.run_id[:8],
            *([f"@{name}"] if name else []),
            facts["date"],
            *code,
            ", ".join([facts["host"], *gpus]),
        ]
    )


def cells(comparisons: Comparisons) -> list[tuple[str, ...]]:
    """Return the cells of each case in the order of `COLUMNS`; cases without a ratio are last."""
    lost = [
        ("undecided", case.label, *[""] * 5, reason) for case, reason in comparisons.lost.items()
    ]
    return [*map(_cells, comparisons.lines), *lost]


def _cells(line: Comparison) -> tuple[str, ...]:
    ratio = ("", "")
    if not line.ratio.doubt:
        ratio = (
            f"{_number(line.ratio.value)}x",
            f"{_number(line.ratio.low)}-{_number(line.ratio.high)}",
        )
    return (
        line.verdict,
        line.name,
        *ratio,
        _ms(line.before),
        _ms(line.after),
        " ".join(line.labels),
        why(line),
    )


def _number(value: float) -> str:
    """Return a ratio with four digits, because two runs are compared with a margin of about 1 %."""
    return words.number(value, 4)


def _ms(step: Estimate) -> str:
    return "" if step.doubt else words.number(step.value * 1e3)


def why(line: Comparison) -> str:
    """Return the reason for a verdict; if the case changed, after the phase that changed most."""
    phase = (
        f"{line.phase} {words.signed_time(line.phase_s)} ({words.percent(line.share)} of the"
        " changes of all phases)"
    )
    return "; ".join([*([phase] if line.decided else []), line.reason])


def summary(comparisons: Comparisons) -> str:
    """Return the number of cases by verdict as text, such as "1 case slower, 2 cases undecided"."""
    counts = comparisons.verdicts
    return ", ".join(
        f"{words.count(counts[verdict], 'case')} {verdict}" for verdict in ORDER if counts[verdict]
    )


def facts(before: Report, after: Report, comparisons: Comparisons) -> list[tuple[str, str]]:
    """Return lines on both runs and on each fact in which their machines differ, with their names.

    The names are "before" and "after" for the runs, and "UNLIKE" for each fact.
    """
    return [
        ("before", heading(before)),
        ("after", heading(after)),
        *(("UNLIKE", str(one)) for one in comparisons.unlike),
    ]


def note(comparisons: Comparisons) -> str:
    """Return the note on how to read a ratio, and on what intervals of observed loops leave out."""
    observed = any(line.case.traits.observed for line in comparisons.lines)
    return f"{NOTE} {caveats.PARTS[0].upper()}{caveats.PARTS[1:]}." if observed else NOTE


def text(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the comparison as plain text: a line on each run, and a table with a line per case."""
    aligned = words.aligned(
        [COLUMNS, *cells(comparisons)], left=[COLUMNS.index(name) for name in TEXT_COLUMNS]
    )
    head = [f"{name:<7} {value}" for name, value in facts(before, after, comparisons)]
    return "\n".join([*head, "", *aligned, "", f"{summary(comparisons)}. {note(comparisons)}"])


def as_markdown(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the comparison in GitHub's Markdown, for a pull request."""
    head = facts(before, after, comparisons)
    return markdown.compared(
        f"dpbench: {summary(comparisons)}",
        head,
        COLUMNS,
        cells(comparisons),
        TEXT_COLUMNS,
        note(comparisons),
    )


@dataclass(frozen=True)
class SideAnswer:
    """The headline and the labels of an answer.

    `side` names the run, or both runs if they give the same answer. `cases` has the ids of the
    compared cases to which the answer applies; if empty, the page always shows the answer.
    """

    subject: str
    side: str
    headline: str = "no answer"
    labels: tuple[str, ...] = ()
    cases: str = ""


def page(before: Report, after: Report, comparisons: Comparisons) -> str:
    """Return the comparison as an HTML page: both runs' answers, the table, and both runs' steps.

    The page has the style sheet and the script of the page of a run. Raises NoDrawings without
    matplotlib.
    """
    check_drawings()
    from dpbench.report import page as report_page

    styles = report_page.Styles()
    lanes = _lanes(before, after, comparisons, styles)
    sections = [lanes] if lanes else []
    side_answers = answers(before, after, comparisons)
    style = f"{report_page.text_of('page.css')}{report_page.text_of('compare.css')}{styles}"
    script = report_page.text_of("page.js")
    allow = report_page.allowed
    cases = [*(line.case for line in comparisons.lines), *comparisons.lost]
    verdicts = [verdict for verdict in ORDER if comparisons.verdicts[verdict]]
    axes = [*naming.axes(cases), *([("verdict", "Verdict", verdicts)] if len(verdicts) > 1 else [])]
    rendered = report_page.template("compare.html").render(
        policy=Markup(
            f"default-src 'none'; style-src {allow(style)}; script-src {allow(script)}; img-src"
            " data:"
        ),
        style=Markup(style),
        script=Markup(script),
        numbers=Markup(table.embedded(numbers(comparisons))),
        summary=summary(comparisons),
        runs=f"{before.run_id[:8]}-{after.run_id[:8]}",
        facts=facts(before, after, comparisons),
        contents=[
            *([("answers", "Answers")] if side_answers else []),
            ("cases", "Cases"),
            *((section.id, section.title) for section in sections),
        ],
        axes=axes,
        answers=side_answers,
        columns=COLUMNS,
        text_columns=TEXT_COLUMNS,
        lines=list(zip(map(naming.case_id, cases), cells(comparisons), strict=True)),
        parts=sections,
        legend=note(comparisons),
        intervals=words.INTERVALS,
    )
    # a name that was not UTF-8 contains lone surrogates, which cannot be encoded
    return rendered.encode("utf-8", "replace").decode()


def numbers(comparisons: Comparisons) -> list[dict[str, object]]:
    """Return the settings, verdict and numbers of each case, in the order of the table.

    Times are in seconds. As in `frames.frame`, a key that ends in `_withheld` has the reason why
    reports do not show a number, or None.
    """
    return [
        *map(_record, comparisons.lines),
        *(_work(case, "undecided", reason) for case, reason in comparisons.lost.items()),
    ]


def _record(line: Comparison) -> dict[str, object]:
    record = _work(line.case, line.verdict, line.reason) | {"labels": " ".join(line.labels)}
    for name, estimate in (("ratio", line.ratio), ("before", line.before), ("after", line.after)):
        record |= {f"{name}_{part}": getattr(estimate, part) for part in ("value", "low", "high")}
        record[f"{name}_withheld"] = estimate.doubt or None
    return record | {"phase": line.phase, "phase_s": line.phase_s, "phase_share": line.share}


def _work(case: Case, verdict: str, reason: str) -> dict[str, object]:
    names = ("model", "strategy", "schedule", "devices", "batch_size", "size", "precision")
    settings = {name: getattr(case, name) for name in names}
    return {"id": naming.case_id(case), **settings, "verdict": verdict, "reason": reason}


def answers(before: Report, after: Report, comparisons: Comparisons) -> list[SideAnswer]:
    """Return the answers of both runs by subject; an answer of both is returned once."""
    # the page identifies a case by its id in the first run, even if the second run has other
    # devices
    ids_after = {
        naming.case_id(line.other): naming.case_id(line.case) for line in comparisons.lines
    }
    sides = []
    for report, ids in ((before, {one: one for one in ids_after.values()}), (after, ids_after)):
        side = {}
        for answer in report.answers:
            alike = naming.alike(answer, report.rows).split()
            cases = " ".join(ids[case] for case in alike if case in ids)
            side[answer.subject] = (answer.headline, answer.labels, cases)
        sides.append(side)
    grouped = []
    for subject in dict.fromkeys(subject for side in sides for subject in side):
        first, second = (side.get(subject, ()) for side in sides)
        if first == second:
            grouped.append(SideAnswer(subject, "before and after", *first))
        else:
            grouped += [
                SideAnswer(subject, "before", *first),
                SideAnswer(subject, "after", *second),
            ]
    return grouped


def _lanes(
    before: Report, after: Report, comparisons: Comparisons, styles: Styles
) -> PageSection | None:
    from dpbench.report import page as report_page
    from dpbench.report import swim_lanes

    sides = [
        {
            case: timeline
            for (case, source), timeline in report.lanes.items()
            if source is not Source.PREDICTED
        }
        for report in (before, after)
    ]
    drawable = [
        line for line in comparisons.lines if line.case in sides[0] and line.other in sides[1]
    ]
    if not drawable:
        return None
    panels = []
    for i, line in enumerate(drawable[:PANELS]):
        title = naming.plain(f"{line.name}: {line.verdict}")
        timelines = sides[0][line.case], sides[1][line.other]
        panel = swim_lanes.compared(title, *timelines, line.labels, f"lanes{i}")
        panel = replace(panel, caption=f"{why(line)}. {panel.caption}")
        # the page filters a drawing of two runs as a whole, by the case of the first run
        panels.append(report_page.figure(replace(panel, cases=[line.case]), (), styles))
    lead = (
        "One median step of each run, one above the other on the same time axis. A bar is a phase"
        " on a device; where a lane is grey, no phase is open on the device. A thick outline is the"
        " critical path."
    )
    left_out = len(drawable) - len(panels)
    note = (
        f"{words.count(left_out, 'more case')} {words.verb(left_out, 'is', 'are')} not drawn."
        if left_out
        else ""
    )
    title = "One median step before and after"
    return report_page.PageSection("lanes", title, lead, (), panels, note=note)
