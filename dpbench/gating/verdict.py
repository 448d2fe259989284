"""Verdict: the answer of a gate, for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.gating.judge import LOOKS, Answer, Finding, whole
from dpbench.records import words

MARKER = "<!-- dpbench gate -->"
"""The first line of the Markdown; the action adds the job, and finds its comment by the line."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer of a gate on `base`, with a finding for each work, and the notes."""

    base: str
    head: str
    limit: float
    findings: Sequence[Finding]
    notes: Sequence[str] = ()

    @property
    def answer(self) -> Answer:
        """Return the answer on all works together."""
        return whole(self.findings)

    @property
    def worse(self) -> bool:
        """Return whether a step became slower or needs more memory."""
        return any(one.worse for one in self.findings)

    def __str__(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([*map(line, self.findings), *notes, f"gate: {self._conclusion}"])

    @property
    def markdown(self) -> str:
        """Return the answer as Markdown for a pull request."""
        rows = [
            f"| {one.name} | **{one.answer}** | {_ratio(one)}{' of CPU time' * one.by_cpu} |"
            f" {'; '.join(_facts(one)[1:])} |"
            for one in self.findings
        ]
        return "\n".join(
            [
                MARKER,
                f"**dpbench gate:** {self._conclusion}",
                "",
                f"| step | answer | time, {self.head} to {self.base} | |",
                "| --- | --- | --- | --- |",
                *rows,
                *(f"\n{note}" for note in self.notes),
            ]
        )

    @property
    def _conclusion(self) -> str:
        more = any(one.more_memory for one in self.findings)
        memory = ", but it needs more memory" * more
        return (
            f"{self.answer}{memory} ({self.head} against {self.base}, limit"
            f" {words.percent(self.limit)})"
        )


def line(finding: Finding) -> str:
    """Return the finding on one step as a line of text."""
    return f"{finding.name}: {finding.answer}, {'; '.join(_facts(finding))}"


def _ratio(finding: Finding) -> str:
    return words.times(finding.cpu if finding.by_cpu else finding.wall)


def _facts(finding: Finding) -> list[str]:
    """Return the clauses on a finding, the ratio of times first."""
    what = "CPU time; its wall time is undecided" if finding.by_cpu else "time"
    known = f"{_ratio(finding)} the {what}" if finding.pairs >= LOOKS[0] else "no ratio"
    facts = [f"{known}, by {words.count(finding.pairs, 'pair')} of processes"]
    if finding.answer is Answer.SLOWER and finding.phase_s > 0:
        facts.append(
            f"most of the change in {finding.phase} ({words.signed_time(finding.phase_s)})"
        )
    if not finding.memory.doubt:
        facts.append(f"{words.times(finding.memory)} the memory")
    return [*facts, *([finding.reason] if finding.reason else [])]
