"""Suggestion: the `dpbench predict` command that answers and findings give for a case."""

from __future__ import annotations

import shlex

from dpbench.predict import machine
from dpbench.records import Case, fake
from dpbench.records.errors import UnknownName
from dpbench.records.options import PREDICTABLE
from dpbench.records.resources import Resources
from dpbench.records.spelling import dashed

EXAMPLE = "rtx-3090-x8"
"""The described machine of a suggestion to a user without a GPU, who replaces it."""


def command(case: Case, here: Resources, *, step_s: float = 0.0) -> str:
    """Return the `dpbench predict` command for the work of `case` on a described machine.

    It is the machine that `here` describes, else eight GPUs of the model here, or `EXAMPLE` where
    there is no real GPU. With the measured seconds of its step, each GPU processes the samples of
    the case. Return "" for a GPU without a data sheet, a precision not in `PREDICTABLE`, a habit
    that is not the default, or a model that brings its own optimizer.
    """
    described = here.described or _suggested(here)
    predictable = case.precision in PREDICTABLE and case.optimizer != "own"
    if not described or not predictable or case.habits:
        return ""
    precision = [dashed("precision"), case.precision] if case.precision != Case.precision else []
    # a model that is known by name is "full", the default, and refuses the option
    size = [dashed("size"), case.size] if case.size != "full" else []
    return shlex.join(
        [
            "dpbench",
            "predict",
            dashed("machine"),
            described,
            dashed("models"),
            case.model,
            *size,
            dashed("batch_per_device" if step_s else "batch_sizes"),
            str(case.batch_size),
            *([dashed("step_s"), f"{step_s:.4g}"] if step_s else []),
            *precision,
        ]
    )


def _suggested(here: Resources) -> str:
    if not here.gpu_memory_bytes or here.gpu.startswith(fake.NAME):
        return EXAMPLE
    line = here.with_gpus(8)
    try:
        machine.load(line)
    except UnknownName:
        return ""
    return line
