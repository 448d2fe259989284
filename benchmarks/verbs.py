"""Host seconds of the engine's functions, such as scatter, on logical CPU devices.

The tensors are small.

Most of the time is therefore that of Python.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from . import QUICK, names_of_the_commit, result, timing

VERBS = ("scatter", "replicate", "parallel_apply", "gather", "reduce")
DEVICES = (2, 4)
LAYERS = 80
"""The number of layers with two tensors each, so that there are about as many parameter tensors as
in ResNet-50.
"""
WIDTH = 4
WARMUP = 5
SAMPLES = 30 if QUICK else 100


def setup(verb: str, devices: int) -> None:
    with names_of_the_commit():
        import importlib

        engine = importlib.import_module("dpbench.engine")
        for name in (verb, "resolve"):
            if not hasattr(engine, name):
                raise LookupError(f"dpbench.engine has no {name}")


def _call(verb: str, count: int) -> Callable[[], Any]:
    """Return a function that calls `verb` once on `count` devices, as a training step does."""
    import torch
    from torch import nn

    from dpbench import engine

    torch.set_num_threads(1)
    devices = engine.resolve(["cpu"] * count)
    if verb == "scatter":
        batch = torch.ones(count * WIDTH, WIDTH)
        return lambda: engine.scatter(batch, devices)
    if verb == "parallel_apply":
        modules, inputs = [nn.Identity() for _ in devices], [torch.ones(WIDTH) for _ in devices]
        return lambda: engine.parallel_apply(modules, inputs, None, devices)
    if verb == "gather":
        outputs = [torch.ones(WIDTH, WIDTH, requires_grad=True) for _ in devices]
        return lambda: engine.gather(outputs, devices[0], devices)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if verb == "replicate":
        return lambda: engine.replicate(module, devices)
    gradients = [[torch.ones_like(parameter) for parameter in module.parameters()] for _ in devices]
    return torch.no_grad()(lambda: engine.reduce(gradients, devices))  # as in backward


@timing(params=(VERBS, DEVICES), param_names=("verb", "devices"))
def track_verb_seconds(verb: str, devices: int) -> dict[str, Any]:
    call = _call(verb, devices)
    for _ in range(WARMUP):
        call()
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(SAMPLES):
            began = time.perf_counter()
            returned = call()
            samples.append(time.perf_counter() - began)
            del returned  # outside the timed region
    finally:
        gc.enable()
    return result(samples)
