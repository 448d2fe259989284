"""Outlook: what several GPUs would give, for a run on a machine with one.

Replicas that share a GPU show what a schedule costs, and never a speed-up. A sibling, if it is
installed, predicts the speed-up from the measured step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpbench.analysis.decision import Basis, Decision, Question
from dpbench.analysis.summary import Row
from dpbench.records import Trial, siblings
from dpbench.records.resources import Resources

ASKED = (Basis.COLOCATED, Basis.ONE_DEVICE, Basis.FAKE_GPU)
"""The reasons for a missing choice about which a prediction says more."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The predicted rows of a model on several GPUs, and the line that describes their machine.

    `step_s` are the seconds of the step on one of them.
    """

    rows: Sequence[Row]
    machine: str
    step_s: float


def of_question(
    question: Question, decision: Decision, trials: Sequence[Trial], machine: Resources
) -> Outlook | None:
    """Return the outlook of a question that one GPU cannot answer; None for all others."""
    one_gpu = question.home.device_kind == "cuda" and len(machine.gpu_memory_bytes) == 1
    if not one_gpu or decision.basis not in ASKED:
        return None
    for outlook in siblings.added("outlook"):
        found: Outlook | None = outlook(question.home, trials, machine)
        return found
    return None
