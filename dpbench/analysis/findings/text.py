"""Text: answers and diagnoses as plain text.

An answer has three bullets: the gain, the cause of lost time, and the change that helps. A
diagnosis has its case, the findings from largest to smallest, and open questions.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from dpbench.analysis.answer import Answer
from dpbench.analysis.findings import Diagnosis
from dpbench.analysis.findings.rule import Cure, Finding
from dpbench.analysis.statements import Statement
from dpbench.analysis.summary import Row
from dpbench.records import Case, fake, words
from dpbench.records.names import devices, in_words
from dpbench.records.words import about, percent, time, times, withheld

WIDTH = 100
CURES = 2
"""The largest number of measured cases that a finding names as remedies, the fastest first."""
NEXT = "command"
"""The title of a command that applies a finding's remedy."""
UNMEASURED = "not measured in this run; measure it with"
"""The title of a command that measures it."""
NO_FINDING = "no finding exceeds the measurement noise"
NOTHING = (
    "Nothing to explain: no training step on several devices has a verified result in this run."
)
NOTE = (
    "Sizes are seconds per step with 95% intervals. 'Costs at most' gives the total cost of a"
    " problem: no remedy can save more. These costs overlap, so do not add them up. Findings below"
    " 2% of the step, and those whose interval includes 0, are left out."
)


def explain(
    answers: Sequence[Answer],
    diagnoses: Sequence[Diagnosis],
    rows: Sequence[Row] = (),
    samples: int = 0,
    *,
    statements: Sequence[Statement] = (),
    full: bool = False,
) -> str:
    """Return the answers as text, followed by the cases in `rows` without a result.

    If `samples`, the number of samples in an epoch, is not 0, each answer states the time of an
    epoch. If `full`, the diagnoses follow the answers. The `statements` on the run are last.
    """
    said = ["\n".join(_bullets(one, diagnosis_of(one, diagnoses), samples)) for one in answers]
    after = [render(diagnoses, rows)] if full else _without_result(rows)
    return "\n\n".join([*(said or [NOTHING]), *after, *_stated(statements)])


def _stated(statements: Sequence[Statement]) -> Iterator[str]:
    for title, warns in (("Warnings:", True), ("Remarks:", False)):
        lines = [_filled("  - ", str(one), hang=4) for one in statements if one.warns is warns]
        if lines:
            yield "\n".join([title, *lines])


def render(diagnoses: Sequence[Diagnosis], rows: Sequence[Row] = ()) -> str:
    """Return all diagnoses as text, followed by the cases in `rows` without a result."""
    explained = ["\n".join(_lines(one)) for one in diagnoses] or [NOTHING]
    note = [textwrap.fill(NOTE, WIDTH)] if diagnoses else []
    return "\n\n".join([*explained, *note, *_without_result(rows)])


def _without_result(rows: Sequence[Row]) -> list[str]:
    return [f"No result: {row.case.label}: {_lost(row)}" for row in rows if row.step is None]


def diagnosis_of(answer: Answer, diagnoses: Sequence[Diagnosis]) -> Diagnosis | None:
    """Return the diagnosis of a case that the answer compares with the baseline, or None."""
    alike = [one for one in diagnoses if one.row.source is answer.source]
    return next((one for one in alike if one.row.case in answer.compared), None)


def _bullets(answer: Answer, diagnosis: Diagnosis | None, samples: int) -> Iterator[str]:
    first, *others = answer.verdict
    yield textwrap.fill(f"{first} [{' '.join(answer.labels)}]", WIDTH)
    yield from (_filled("  ", line, hang=2) for line in others)
    epoch = answer.epoch(samples) if samples else ""
    costly = [one for one in diagnosis.findings if one.stake] if diagnosis else []
    largest = (
        f"the most costly finding in {_named(costly[0].row.case)}: {headline(costly[0])}"
        if costly
        else ""
    )
    # the headline of a case that is judged alone names the finding
    cause = [answer.reason, "" if answer.home.traits.judged_alone else largest]
    helping = [one for one in costly if not one.in_vain]
    change = _remedy_clauses(helping[0]) if helping else []
    bullets = {
        "certainty": [answer.certainty, answer.memory, answer.energy, epoch, answer.earlier],
        "cause": cause,
        "change": change,
    }
    unexplained = no_finding(diagnosis) if diagnosis else "no case was diagnosed"
    nothing = {
        "certainty": words.MISSING,
        "cause": unexplained,
        "change": "none that these measurements support",
    }
    for name, clauses in bullets.items():
        yield _filled(f"  - {name}: ", "; ".join(filter(None, clauses)) or nothing[name], hang=4)
    # code and command are not wrapped, so that a user can paste them
    if helping and helping[0].code and helping[0].code != answer.command:
        yield f"  {_code_title(helping[0])}: {helping[0].code}"
    if answer.command:
        yield f"  next: {answer.command}"


def no_finding(diagnosis: Diagnosis) -> str:
    """Return why a diagnosis has no finding, as a clause."""
    row = diagnosis.row
    if row.on_fake_gpus:
        return fake.WHY
    if row.step and row.step.doubt:
        why = f"{words.withheld(row.step)} for the time of a step ({words.doubt(row.step)})"
        remedy = "more steps" if row.case.traits.in_parts else words.REMEDY
        return f"{why}; {remedy} would help"
    return NO_FINDING


def _named(case: Case) -> str:
    return f"{in_words(case)} on {devices(case)}"


def _remedy_clauses(finding: Finding) -> list[str]:
    measured = f"measured: {_cure(finding, finding.cures[0])}" if finding.cures else ""
    return [finding.rule.remedy, measured]


def _lost(row: Row) -> str:
    return textwrap.shorten(f"{row.outcome}: {row.reason or 'no reason given'}", 2 * WIDTH)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    row = diagnosis.row
    yield textwrap.fill(f"{row.label} [{' '.join(diagnosis.labels)}]", WIDTH)
    floors = [f"{name} {time(least_s)}" for name in row.phases if (least_s := row.least(name))]
    if floors:
        yield _filled(
            "By bytes over links and operations over the peak, at least: ", ", ".join(floors), 4
        )
    if not diagnosis.findings:
        why = no_finding(diagnosis)
        yield f"\n{why[0].upper()}{why[1:]}."
    for number, finding in enumerate(diagnosis.findings, 1):
        yield ""
        yield _filled(f"{number:>2}. ", f"{headline(finding)} [{' '.join(finding.labels)}]")
        for name, text in parts(finding):
            yield _filled(f"    {name}: ", text)
    if diagnosis.unjudged:
        yield ""
        yield _filled(
            "Not judged, for lack of measurements: ", "; ".join(diagnosis.unjudged) + ".", hang=4
        )


def _filled(start: str, text: str, hang: int = 0) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * (hang or 8))


def headline(finding: Finding) -> str:
    """Return a clause with the problem and its cost, in seconds and as a share of the step."""
    size = finding.evidence.size_s
    if size is None:
        return (
            finding.evidence.says
            if finding.evidence.aside
            else f"{finding.evidence.says} (costs memory, not time)"
        )
    kind = "saves" if finding.evidence.measured else "costs at most"
    if not finding.evidence.source.timed:
        kind = "is predicted to save"
    return f"{finding.evidence.says}: {kind} {about(size)}, {percent(finding.share)} of the step"


def parts(finding: Finding) -> list[tuple[str, str]]:
    """Return pairs (title, text): the evidence, the remedy, its gains, the code, and the command.

    Gains and command are left out if the evidence is a measured gain; the command also if the gains
    were measured.
    """
    pairs = [("evidence", finding.evidence.numbers), ("remedy", finding.rule.remedy)]
    if finding.cures and not finding.evidence.measured:
        pairs.append(
            (
                "measured in this run",
                "; ".join(_cure(finding, one) for one in finding.cures[:CURES]),
            )
        )
    if finding.code:
        pairs.append((_code_title(finding), finding.code))
    if finding.command and not (finding.cures or finding.evidence.measured):
        pairs.append((NEXT if finding.evidence.command else UNMEASURED, finding.command))
    return pairs


def _code_title(finding: Finding) -> str:
    return f"code for {finding.code_for}" if finding.code_for else "code"


def _cure(finding: Finding, cure: Cure) -> str:
    name = in_words(cure.row.case)
    if cure.ratio.doubt:
        return f"{name}: {withheld(cure.ratio)}"
    said = {"faster": "", "slower": " (slower)", "same": " (the same)"}
    verdict = said.get(cure.verdict, " (undecided)")
    saved = f", saves {time(cure.gain_s.value)}" if cure.verdict == "faster" else ""
    than = in_words(finding.row.case)
    return f"{name} is {times(cure.ratio)} as fast as {than}{verdict}{saved}"
