"""Suggestion: the `dpbench predict` command that answers and findings give for a case."""

from __future__ import annotations

import shlex

from dpbench.records import Case
from dpbench.records.options import PREDICTABLE
from dpbench.records.spelling import dashed

GPUS = "rtx-3090-x8"
"""The described machine for which a prediction is suggested to a user without several GPUs."""


def command(case: Case, described: str = "", *, step_s: float = 0.0) -> str:
    """Return the `dpbench predict` command for the work of `case` on a described machine.

    `described` is the machine's name or file; if empty, predict 1, 2, 4 and 8 GPUs of `GPUS`. With
    the measured seconds of its step, each GPU processes the samples of the case.
    Return "" for a precision not in `PREDICTABLE`, a habit that is not the default, or a model that
    brings its own optimizer.
    """
    if case.precision not in PREDICTABLE or case.habits or case.optimizer == "own":
        return ""
    precision = [dashed("precision"), case.precision] if case.precision != Case.precision else []
    # a model that is known by name is "full", the default, and refuses the option
    size = [dashed("size"), case.size] if case.size != "full" else []
    return shlex.join(
        [
            "dpbench",
            "predict",
            dashed("machine"),
            described or GPUS,
            dashed("models"),
            case.model,
            *size,
            dashed("batch_per_device" if step_s else "batch_sizes"),
            str(case.batch_size),
            *([dashed("step_s"), f"{step_s:.4g}"] if step_s else []),
            *([] if described else [dashed("devices"), "1,2,4,8"]),
            *precision,
        ]
    )
