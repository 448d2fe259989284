"""Counts: what a model is made of, and what its ops take on a described GPU.

dpbench's own models and a user's are traced op by op, which loads torch; well-known ones are known by name. One that
cannot be traced, as where shapes depend on numbers, is counted as a whole on a real step of two samples.
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
"""The two batch sizes that are traced: seconds are lines through them."""


Key = tuple[str, str, str]
"""What a profile goes by: model, size and precision."""


def key(case: Case) -> Key:
    """Return what a case's profile goes by."""
    return case.model, case.size, case.precision


def named(model: str) -> bool:
    """Tell whether a model is known by its name alone: nobody here can build it."""
    return ":" not in model and model not in registry.names("models")


def of(case: Case) -> Profile:
    """Return a case's model without seconds; raises LookupError for a name that nobody knows."""
    if named(case.model):
        found = features.find(case.model, None, case.precision)
        if found.known == "estimated" or not features.exact(case.model):
            known = sorted({*registry.names("models"), *features.names()})
            raise LookupError(
                f"{registry.unknown('model', case.model, known)}; your own is --model package.module:name"
            )
        return found.profile
    from dpbench.predict import roofline

    traces = _traces(case.model, case.size, case.precision, case.optimizer)
    return roofline.counted(traces[1]) if traces else _counted(case.model, case.size)


def priced(case: Case, machine: Machine, constants: Constants = DEFAULT) -> Profile:
    """Return a case's model with its seconds on a machine's GPU: op by op where there is a trace, else as a whole."""
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
    """Return a model's traces on shapes alone; None where that does not do, as with shapes that depend on numbers."""
    from dpbench.predict.memory import traces_of

    case = plan.baseline(
        model=model, size=size, batch_size=1, precision=precision, optimizer=optimizer,
        device_kind="cuda",
    )  # fmt: skip
    traces = traces_of(case, fake_only=True)
    try:
        few, many = (traces.of(rows) for rows in ROWS)
    except Exception as error:  # a user's model may do anything that fake tensors do not know
        log.info("%s is counted as a whole: its ops cannot be traced: %s", model, error)
        return None
    return few, many


@lru_cache(maxsize=64)
def _counted(model: str, size: str) -> Profile:
    """Return the counts of a model that has to be run; its kernels are taken to be two a layer."""
    from dpbench import models

    loaded = models.load(model, size, 0)
    modules = list(loaded.module.modules())
    launches = 2 * sum(1 for module in modules if not list(module.children()))
    return replace(
        models.profile(loaded), modules=len(modules), buffer_tensors=sum(1 for _ in loaded.module.buffers()),
        forward_launches=launches, backward_launches=launches,
        gradient_bytes=tuple(p.nbytes for p in reversed(list(loaded.module.parameters()))),
    )  # fmt: skip
