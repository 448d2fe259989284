"""Counts: the parameters, modules, FLOP and bytes of a model, and the durations of its ops on a described GPU.

dpbench's models and those of users are traced op by op, which loads torch. Well-known models are looked up by name. A
model that cannot be traced, for example because shapes depend on values, is counted as a whole on a real step of two
samples.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dpbench.predict import features, profiles
from dpbench.predict.constants import DEFAULT, Constants
from dpbench.records import Case, Profile, plan, registry
from dpbench.records.machine import Machine

if TYPE_CHECKING:
    from dpbench.predict.trace import Trace

log = logging.getLogger(__name__)

ROWS = (8, 64)
"""The two batch sizes to trace; durations at other sizes are on the line through those at these two."""


Key = tuple[str, str, str]
"""The key of a profile: model, size and precision."""


def key(case: Case) -> Key:
    """Return the key of a case's profile."""
    return case.model, case.size, case.precision


def named(model: str) -> bool:
    """Return whether a model is known by name only, so that it cannot be built and run."""
    return ":" not in model and model not in registry.names("models")


def of(case: Case) -> Profile:
    """Return the counts of a case's model, without timings. Raises LookupError for an unknown name."""
    if named(case.model):
        found = features.find(case.model, None, case.precision)
        if found.known == "estimated" or not features.exact(case.model):
            known = sorted({*registry.names("models"), *features.names()})
            raise LookupError(
                f"{registry.unknown('model', case.model, known)}; for your own model give --model package.module:name"
            )
        return found.profile
    from dpbench.predict import roofline

    traces = _traces(case.model, case.size, case.precision, case.optimizer)
    return roofline.counted(traces[1]) if traces else _counted(case.model, case.size)


def priced(case: Case, machine: Machine, constants: Constants = DEFAULT) -> Profile:
    """Return the profile of a case's model with timings on a machine's GPU: per op if traceable, else per phase.

    Raises UnknownMachine if the machine file lacks the peaks that the timings depend on.
    """
    traces = None if named(case.model) else _traces(case.model, case.size, case.precision, case.optimizer)
    if traces is None:
        return profiles.counted(of(case), machine, case.precision, constants)
    from dpbench.predict import roofline

    flop_per_s, bytes_per_s = profiles.peaks(machine, case.precision)
    tf32 = machine.gpu.flop_per_s.get("tf32", 0.0)
    speed = roofline.Speed(flop_per_s=flop_per_s, bytes_per_s=bytes_per_s, convolution_flop_per_s=tf32)
    return profiles.launched(roofline.profile(*traces, speed), machine, constants)


@lru_cache(maxsize=64)
def _traces(model: str, size: str, precision: str, optimizer: str) -> tuple[Trace, Trace] | None:
    """Return the traces of a model at both `ROWS` on fake tensors; None if its shapes depend on values."""
    from dpbench.predict.memory import traces_of

    case = plan.baseline(
        model=model, size=size, batch_size=1, precision=precision, optimizer=optimizer,
        device_kind="cuda",
    )  # fmt: skip
    traces = traces_of(case, fake_only=True)
    try:
        few, many = (traces.of(rows) for rows in ROWS)
    except Exception as error:  # a user's model may fail on fake tensors in any way
        log.info("%s: ops cannot be traced, so FLOP and bytes are counted per phase: %s", model, error)
        return None
    return few, many


@lru_cache(maxsize=64)
def _counted(model: str, size: str) -> Profile:
    """Return the counts of a model from a real step, with an assumed two kernels per layer in each direction."""
    from dpbench import models

    loaded = models.load(model, size, 0)
    modules = list(loaded.module.modules())
    launches = 2 * sum(1 for module in modules if not list(module.children()))
    return replace(
        models.profile(loaded), modules=len(modules), buffer_tensors=sum(1 for _ in loaded.module.buffers()),
        forward_launches=launches, backward_launches=launches,
        gradient_bytes=tuple(p.nbytes for p in reversed(list(loaded.module.parameters()))),
    )  # fmt: skip
