"""Text: render a diagnosis as plain text: the answer, the findings from largest to smallest, and open questions."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dpbench.analysis.findings.rule import Cure, Finding
from dpbench.analysis.ladder import label, short
from dpbench.records import Case, words
from dpbench.records.words import NOT_ENOUGH, duration, percent, time, times

if TYPE_CHECKING:
    from dpbench.analysis.findings import Diagnosis
    from dpbench.analysis.summary import Row


WIDTH = 100
CURES = 2
"""The largest number of measured cases that a finding names as remedies, the fastest first."""
NOTHING = "Nothing to explain: no case with several devices has a verified result in this run."
NOTE = (
    "Sizes are seconds per step with 95% intervals. 'Costs at most' gives the total cost of a problem: no remedy can "
    "save more. These costs overlap, so do not add them up. Findings below 2% of the step, and those whose interval "
    "includes 0, are left out."
)


def render(diagnoses: Sequence[Diagnosis], rows: Sequence[Row] = ()) -> str:
    """Return all diagnoses as text, followed by the cases in `rows` that have no result, each with the reason."""
    explained = ["\n".join(_lines(one)) for one in diagnoses] or [NOTHING]
    lost = [f"No result: {label(row.case)}: {_lost(row)}" for row in rows if row.step is None]
    return "\n\n".join([*explained, *([textwrap.fill(NOTE, WIDTH)] if diagnoses else []), *lost])


def _lost(row: Row) -> str:
    return textwrap.shorten(f"{row.outcome}: {row.reason or 'no reason given'}", 2 * WIDTH)


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    yield f"[{' '.join(diagnosis.row.labels)}]"
    yield textwrap.fill(diagnosis.answer, WIDTH)
    if not diagnosis.findings:
        yield "\nNo finding exceeds the measurement noise."
    for number, finding in enumerate(diagnosis.findings, 1):
        yield ""
        yield _filled(f"{number:>2}. ", f"{headline(finding)} [{' '.join(finding.labels)}]")
        for name, text in parts(finding):
            yield _filled(f"    {name}: ", text)
    if diagnosis.unjudged:
        yield ""
        yield _filled("Not judged, for lack of measurements: ", "; ".join(diagnosis.unjudged) + ".", hang=4)


def _filled(start: str, text: str, hang: int = 0) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=start, subsequent_indent=" " * (hang or 8))


def headline(finding: Finding) -> str:
    """Return one clause with the problem of a finding and its cost, in seconds and as a share of the step."""
    size = finding.evidence.size_s
    if size is None:
        return f"{finding.evidence.says} (costs memory, not time)"
    kind = "saves" if finding.evidence.measured else "costs at most"
    return f"{finding.evidence.says}: {kind} {duration(size)}, {percent(finding.share)} of the step"


def parts(finding: Finding) -> list[tuple[str, str]]:
    """Return pairs (title, text): the evidence, the remedy, and the remedy's measured gain or how to measure it.

    The last pair is left out if the evidence itself is a measured gain, or if the rule names no case that applies the
    remedy.
    """
    found = [("evidence", finding.evidence.numbers), ("remedy", finding.rule.remedy)]
    if finding.evidence.measured or not (finding.rule.switches or finding.rule.roles):
        return found
    if finding.cures:
        shown = [_cure(cure) for cure in finding.cures[:CURES]]
        return [*found, ("measured in this run", "; ".join(shown))]
    return [*found, ("not measured in this run", f"measure it with {finding.rule.needs}")]


def _cure(cure: Cure) -> str:
    """Return, as text, the name of a case that applies the remedy and its speed relative to the diagnosed case."""
    name = strategy(cure.row.case)
    if cure.ratio.doubt:
        return f"{name}: {NOT_ENOUGH}"
    said = {"faster": "as fast", "slower": "as fast (slower)", "same": "as fast (the same)"}
    verdict = said.get(cure.verdict, "as fast (undecided)")
    saved = f", saves {time(cure.gain_s.value)}" if cure.verdict == "faster" else ""
    return f"{name} {times(cure.ratio)} {verdict}{saved}"


def strategy(case: Case) -> str:
    """Return the name of a case's strategy, with the short name of its schedule in brackets if it has one."""
    if case.traits.all_cores:
        return "one device with all cores"
    return f"{case.strategy}[{short(case.schedule)}]" if case.schedule else case.strategy


def devices(case: Case) -> str:
    """Return the number and the kind of a case's devices as text, such as "4 GPUs"."""
    if case.placement == "colocated":
        return f"{words.count(case.devices, 'replica')} sharing one GPU"
    noun = {"cpu": "logical CPU device", "cuda": "GPU"}.get(case.device_kind, f"{case.device_kind} device")
    return words.count(case.devices, noun)
