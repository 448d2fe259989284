"""Texts: the answer of a gate for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from dpbench.analysis import stats
from dpbench.gating.judge import Finding
from dpbench.gating.pairs import Verdict
from dpbench.records import words

MARKER = "<!-- dpbench gate -->"
"""The first line of the Markdown, by which a comment is found again."""


def text(verdict: Verdict) -> str:
    """Return the answer as lines of text."""
    return "\n".join(
        [
            *map(line, verdict.findings),
            *(f"note: {note}" for note in verdict.notes),
            _conclusion(verdict),
        ]
    )


def line(finding: Finding) -> str:
    """Return the finding on one step as a line of text."""
    return f"{finding.name}: {finding.answer}, {'; '.join(_facts(finding))}"


def markdown(verdict: Verdict) -> str:
    """Return the answer as Markdown for a pull request."""
    rows = [
        f"| {one.name} | **{one.answer}** | {_ratio(one)} | {'; '.join(_facts(one)[1:]) or '—'} |"
        for one in verdict.findings
    ]
    return "\n".join(
        [
            MARKER,
            f"**dpbench gate:** {_conclusion(verdict).partition(': ')[2]}",
            "",
            f"| step | answer | time, {verdict.head} to {verdict.base} | |",
            "| --- | --- | --- | --- |",
            *rows,
            *(f"\n{note}" for note in verdict.notes),
        ]
    )


def _conclusion(verdict: Verdict) -> str:
    memory = (
        ", but it needs more memory" if any(one.more_memory for one in verdict.findings) else ""
    )
    return (
        f"gate: {verdict.answer}{memory} ({verdict.head} against {verdict.base}, limit"
        f" {words.percent(verdict.limit)})"
    )


def _ratio(finding: Finding) -> str:
    return words.times(finding.cpu if finding.by_cpu else finding.wall)


def _facts(finding: Finding) -> list[str]:
    """Return the clauses on a finding, the ratio of times first."""
    what = "CPU time; its wall time is undecided" if finding.by_cpu else "time"
    known = f"{_ratio(finding)} the {what}" if finding.pairs >= stats.LOOKS[0] else "no ratio"
    facts = [f"{known}, by {words.count(finding.pairs, 'pair')} of processes"]
    if finding.phase and finding.worse:
        facts.append(
            f"most of the change in {finding.phase} ({words.signed_time(finding.phase_s)})"
        )
    if not finding.memory.doubt:
        facts.append(f"{words.times(finding.memory)} the memory")
    return [*facts, *([finding.reason] if finding.reason else [])]
