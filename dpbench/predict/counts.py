"""Counts: parameters, modules, FLOP and bytes of a model, and the durations of its ops on a GPU.

dpbench's models and those of users are traced op by op, which loads torch. If tracing fails, for
example because shapes depend on values, only the totals of each phase are counted, in a real step
of two samples.

The counts of well-known models are stored by name. Those of torchvision's and Hugging Face's models
were traced without weights (tests/data/trace_models.py); the others come from public figures.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.predict import profiles
from dpbench.predict.constants import Constants
from dpbench.predict.machine import Machine
from dpbench.predict.work import Profile
from dpbench.records import Case, plan, registry
from dpbench.records.arguments import call
from dpbench.records.errors import UnknownName
from dpbench.records.work import Sizes

if TYPE_CHECKING:
    from dpbench.models import Model
    from dpbench.predict.trace import Trace

log = logging.getLogger(__name__)

DATA = Path(__file__).parent / "data"
TENSORS, MODULES, LAUNCHES, BACKWARD = 160, 1.2, 1.5, 1.0
"""Medians over the traced models.

In this order: parameter tensors, modules and forward kernels per tensor, and backward kernels per
forward kernel.
"""
NEEDED = ("parameter_tensors", "parameter_bytes", "buffer_bytes", "input_bytes", "output_bytes")
"""The sizes without which a model cannot be predicted."""
ROWS = (8, 64)
"""The two batch sizes to trace; durations at other sizes are linear in the batch size."""
SAMPLES = 2
"""The samples of a step in which totals are counted."""
Key = tuple[str, str, str]
"""The key of a profile: model, size and precision."""

_CONVOLUTIONAL = re.compile(
    "alexnet|vgg|resnet|resnext|densenet|mnasnet|mobilenet|shufflenet|squeezenet|googlenet|inception|efficientnet|"
    "regnet|nasnet|ssd300|maskrcnn|fasterrcnn|unet"
)
"""Matches the `plain` names of nets whose FLOP are almost all in convolutions."""


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, Any]]:
    """Return the stored counts by the name of their model."""
    return {
        model: row
        for name in ("models.json", "figures.json")
        for model, row in json.loads((DATA / name).read_text(encoding="utf-8")).items()
    }


def plain(name: str) -> str:
    """Return the letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def names() -> list[str]:
    """Return the names of all models whose counts are stored."""
    return [*_table()]


@lru_cache(maxsize=256)
def row_of(name: str) -> dict[str, Any] | None:
    """Return the stored counts under this name, regardless of case and punctuation, or None."""
    known = {plain(model): row for model, row in _table().items()}
    return known.get(plain(name))


def of_row(name: str, row: Mapping[str, Any], size: int) -> Profile:
    """Return stored counts of a model as a profile without timings.

    `size` is the number of bytes per value. Counts other than `parameters` that `row` lacks are
    estimated.
    """
    count = int(row["parameters"])
    tensors = int(row.get("parameter_tensors") or TENSORS)
    launches = int(row.get("forward_launches") or LAUNCHES * tensors)
    flop = float(row.get("forward_flop", 1e9))
    return Profile(
        model=name,
        parameter_tensors=tensors,
        parameter_bytes=count * size,
        buffer_bytes=int(row.get("buffer_bytes", 0)),
        buffer_tensors=int(row.get("buffer_tensors", 0)),
        modules=int(row.get("modules") or MODULES * tensors),
        input_bytes=float(row.get("inputs", 0)) * (size if row.get("inputs", 0) > 4096 else 8),
        output_bytes=float(row.get("outputs", 0)) * size,
        forward_flop=flop,
        backward_flop=2 * flop,
        forward_bytes=float(row.get("forward_bytes", 0)) * size / 4,
        backward_bytes=float(row.get("backward_bytes", 0)) * size / 4,
        forward_launches=launches,
        backward_launches=int(row.get("backward_launches") or BACKWARD * launches),
        gradient_bytes=tuple(b * size // 4 for b in row.get("bucket_bytes", ())),
        source="given",
    )


def lacking(sizes: Sizes) -> list[str]:
    """Return the names of the `NEEDED` sizes that are unknown."""
    return [name for name in NEEDED if getattr(sizes, name) is None]


def of_sizes(name: str, sizes: Sizes) -> Profile:
    """Return a model's counts as a profile without timings, from the `NEEDED` sizes.

    The numbers of kernels are estimated from that of the parameter tensors.
    """
    tensors = int(sizes.parameter_tensors or 0)
    forward = int(LAUNCHES * tensors)
    return Profile(
        model=name,
        parameter_tensors=tensors,
        parameter_bytes=int(sizes.parameter_bytes or 0),
        buffer_bytes=int(sizes.buffer_bytes or 0),
        buffer_tensors=int(sizes.buffer_tensors or 0),
        input_bytes=sizes.input_bytes or 0.0,
        output_bytes=sizes.output_bytes or 0.0,
        modules=int(sizes.modules or MODULES * tensors),
        forward_launches=forward,
        backward_launches=int(BACKWARD * forward),
    )


def key(case: Case) -> Key:
    """Return the key of a case's profile."""
    return case.model, case.size, case.precision


def named(model: str) -> bool:
    """Return whether dpbench knows only the model's name and can neither build nor run it.

    It can build and run its own models and those given as package.module:name.
    """
    return ":" not in model and model not in registry.names("models")


def of(case: Case) -> Profile:
    """Return the counts of a case's model as a profile without timings.

    Raises LookupError for an unknown model.
    """
    if named(case.model):
        row = row_of(case.model)
        if row is None:
            known_names = sorted({*registry.names("models"), *names()})
            raise UnknownName(
                "{unknown}; to use your own model, give {models:file.py:name}",
                option="models",
                value=case.model,
                unknown=registry.unknown("model", case.model, known_names),
            )
        return of_row(case.model, row, 2 if case.precision in ("bf16", "fp16") else 4)
    traces = _traces(alone(case))
    return profiles.of_trace(traces[1]) if traces else _counted(case.model, case.size)


def priced(case: Case, machine: Machine, constants: Constants) -> Profile:
    """Return the profile of a case's model with timings on a machine's GPU.

    The timings are calculated op by op, or phase by phase if the model cannot be traced. Raises
    UnknownMachine if the machine file lacks the peak FLOP/s or the memory bandwidth.
    """
    traces = None if named(case.model) else _traces(alone(case))
    if traces is None:
        # cuDNN runs convolutions in TF32 by default, and a convolutional net computes little else
        possible = case.precision == "fp32" and "tf32" in machine.gpu.flop_per_s
        rounded = possible and named(case.model) and _CONVOLUTIONAL.search(plain(case.model))
        return profiles.counted(of(case), machine, "tf32" if rounded else case.precision, constants)
    flop_per_s, bytes_per_s = profiles.peaks(machine, case.precision)
    tf32 = machine.gpu.flop_per_s.get("tf32", 0.0)
    speed = profiles.Speed(
        flop_per_s=flop_per_s, bytes_per_s=bytes_per_s, convolution_flop_per_s=tf32
    )
    return profiles.launched(profiles.profile(*traces, speed), machine, constants)


def alone(case: Case) -> Case:
    """Return the case on one GPU whose traces are those of `case`, at any batch size."""
    return plan.baseline(
        model=case.model,
        size=case.size,
        batch_size=1,
        precision=case.precision,
        optimizer=case.optimizer,
        device_kind="cuda",
    )


@lru_cache(maxsize=64)
def _traces(case: Case) -> tuple[Trace, Trace] | None:
    """Return None if the tracing fails, for example because shapes depend on values."""
    from dpbench.predict.memory import traces_of

    traces = traces_of(case, fake_only=True)
    try:
        few, many = (traces.of(rows) for rows in ROWS)
    except Exception as error:  # a user's model may fail on fake tensors in any way
        log.info(
            "model %s cannot be traced op by op, so its FLOP and bytes are counted for each phase"
            " as a whole; the trace failed with: %s",
            case.model,
            error,
        )
        return None
    return few, many


@lru_cache(maxsize=64)
def _counted(model: str, size: str) -> Profile:
    """Count in a real step, with two kernels per layer assumed in forward, and two in backward."""
    from dpbench import models

    loaded = models.load(model, size, 0)
    modules = list(loaded.module.modules())
    launches = 2 * sum(1 for module in modules if not list(module.children()))
    return replace(
        in_step(loaded),
        modules=len(modules),
        buffer_tensors=sum(1 for _ in loaded.module.buffers()),
        forward_launches=launches,
        backward_launches=launches,
        gradient_bytes=tuple(p.nbytes for p in reversed(list(loaded.module.parameters()))),
    )


def in_step(model: Model) -> Profile:
    """Return a model's profile: the sizes of its tensors, and the FLOP of forward and backward.

    torch counts the FLOP on a batch of `SAMPLES` rows. FLOP, input bytes and output bytes are per
    sample.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from dpbench.models import bytes_in, copied

    inputs, target = model.batch(SAMPLES, 0)
    module = copied(model.module)  # a forward changes the statistics of BatchNorm
    parameters, buffers = list(module.parameters()), list(module.buffers())
    with FlopCounterMode(display=False) as forward:
        output = call(module, inputs)
    with FlopCounterMode(display=False) as backward:
        model.loss(output, target).backward()
    return Profile(
        model=model.name,
        parameter_tensors=len(parameters),
        parameter_bytes=sum(p.nbytes for p in parameters),
        buffer_bytes=sum(b.nbytes for b in buffers),
        input_bytes=bytes_in(inputs) / SAMPLES,
        output_bytes=bytes_in(output) / SAMPLES,
        forward_flop=forward.get_total_flops() / SAMPLES,
        backward_flop=backward.get_total_flops() / SAMPLES,
    )
