"""Preflight: check each model of a run once, in a worker that does not measure, before its first trial.

A model that cannot be imported, built or stepped would fail in every trial, and each failure costs a trial's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dpbench.measure.server import Server
from dpbench.records import Case, Status, Trial, plan


class Models:
    """The models that have been checked so far, with their results."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._verdicts: dict[Case, Trial] = {}

    def check(self, cases: Sequence[Case], server: Server) -> Iterator[str]:
        """Check each model that has not been checked yet, with the largest batch of its cases.

        Yield one line of text per model that failed. A check is ended after `limit_s` seconds.
        """
        models: dict[Case, list[Case]] = {}
        for case in cases:
            models.setdefault(plan.model_check(case), []).append(case)
        for model, group in models.items():
            if model not in self._verdicts:
                largest = max(case.batch_size for case in group)
                found = server.check(replace(model, batch_size=largest), self._limit_s)
                self._verdicts[model] = found
                if found.status is not Status.OK:
                    yield _refusal(found, len(group))

    def failed(self, case: Case, number: int) -> Trial | None:
        """Return the failed trial of a case in round `number` if the check of its model failed, else None."""
        verdict = self._verdicts.get(plan.model_check(case))
        if verdict is None or verdict.status is Status.OK:
            return None
        return replace(verdict, case=case, round=number, reason=f"the check of the model failed: {verdict.reason}")


def _refusal(verdict: Trial, cases: int) -> str:
    """Return one line of text with the name of a model that failed its check, and the reason."""
    model, reason = f"{verdict.case.model} ({verdict.case.size})", verdict.reason.strip().partition(chr(10))[0]
    return f"{model} failed its check ({verdict.status}), so its {cases} case(s) will not be measured: {reason}"
