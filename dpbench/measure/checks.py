"""Checks before the first trial: whether each model can take a step.

A model that cannot be imported, built or run would fail in every trial. Each model is therefore
checked once, in a worker that does not measure. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from dpbench.records import Case, Status, Trial, plan
from dpbench.records.facts import ModelCheck
from dpbench.records.trial import CHECK_FAILED
from dpbench.records.words import count

if TYPE_CHECKING:
    from dpbench.measure.cluster import Cluster
    from dpbench.measure.server import Server

    TrialRunner: TypeAlias = Server | Cluster
    """What runs trials: on this machine, or by the ranks of a launch."""


class Models:
    """The models checked in this session of a run, with the results."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._verdicts: dict[Case, Trial] = {}

    def check(self, cases: Sequence[Case], server: TrialRunner) -> Iterator[str]:
        """Check each unchecked model of the cases, and yield one line of text per model that fails.

        Each model is checked with the largest batch size of its cases. A check that exceeds the
        time limit fails. If a signal from outside ends a check, the model's cases are measured.
        """
        models: dict[Case, list[Case]] = {}
        for case in cases:
            models.setdefault(plan.model_check(case), []).append(case)
        for model, group in models.items():
            if model not in self._verdicts:
                largest = max(case.batch_size for case in group)
                verdict = server.check(replace(model, batch_size=largest), self._limit_s)
                if verdict.status is Status.KILLED:
                    yield (
                        f"{_named(model)} is measured without its check, which had no result"
                        f" ({_why(verdict)})"
                    )
                    continue
                self._verdicts[model] = verdict
                if verdict.status is not Status.OK:
                    yield _refusal(verdict, len(group))

    def failed(self, case: Case, number: int) -> Trial | None:
        """Return a case's failed trial in round `number` if its model failed, otherwise None."""
        verdict = self._verdicts.get(plan.model_check(case))
        if verdict is None or verdict.status is Status.OK:
            return None
        checked = "dataset" if case.traits.loads else "model"
        return replace(
            verdict,
            case=case,
            round=number,
            reason=f"{CHECK_FAILED} {checked} failed: {verdict.reason}",
        )


def _refusal(verdict: Trial, cases: int) -> str:
    """`cases` is the number of cases that use the model and will not be measured."""
    failed = f"{_named(verdict.case)} failed its check ({verdict.status})"
    return (
        f"{failed}, so its {count(cases, 'case')} will not be measured; reason:"
        f" {_first_line(verdict.reason)}"
    )


def _named(case: Case) -> str:
    return f"{case.model} ({case.size})"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def model_words(trial: Trial) -> list[str]:
    """Return the lines of a model's check: the verdict, the observed facts, then each note.

    If the check failed, return one line with the status and the reason.
    """
    if trial.status is not Status.OK:
        return [f"{trial.case.model}: {_why(trial)}"]
    facts = trial.facts.model_check or ModelCheck()
    seen = {
        name: f"{value:.2f} s" if name == "check_s" else value for name, value in facts.seen.items()
    }
    width = max(map(len, seen), default=0)
    lines = [f"{name.removesuffix('_s'):<{width}}  {value}" for name, value in seen.items()]
    verdict = f"{_named(trial.case)} can be measured"
    return [verdict, *lines, *(f"note: {note}" for note in facts.notes)]


def _why(trial: Trial) -> str:
    return f"{trial.status.value}: {_first_line(trial.reason)}"
