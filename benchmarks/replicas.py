"""Host seconds of the parts of making replicas of a module with ResNet-50's shapes.

Three parts are measured for eight replicas: binding tensors to the replicas' modules, noticing
changes of the module, and rebuilding the replicas' modules. Their tensors are on the meta device,
so that only the time of Python is measured. The fourth part is the broadcast of all tensors to one
other device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

from . import QUICK, attribute, names_of_the_commit, result, timing

PARTS = ("bind", "notice changes", "rebuild", "broadcast")
REPLICAS = 8
WARMUP = 5
SAMPLES = 30 if QUICK else 100


def bottleneck(inputs: int, planes: int, stride: int) -> Any:
    """Return the modules of one residual block as a plain sequence: only the shapes matter here."""
    from torch import nn

    layers = [
        nn.Conv2d(inputs, planes, 1, bias=False),
        nn.BatchNorm2d(planes),
        nn.Conv2d(planes, planes, 3, stride, 1, bias=False),
        nn.BatchNorm2d(planes),
        nn.Conv2d(planes, 4 * planes, 1, bias=False),
        nn.BatchNorm2d(4 * planes),
        nn.ReLU(),
    ]
    if inputs != 4 * planes:
        layers.append(
            nn.Sequential(
                nn.Conv2d(inputs, 4 * planes, 1, stride, bias=False), nn.BatchNorm2d(4 * planes)
            )
        )
    return nn.Sequential(*layers)


def resnet50() -> Any:
    """Return a module with 161 parameters and 159 buffers that have the shapes of ResNet-50's."""
    from torch import nn

    layers, inputs = (
        [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ],
        64,
    )
    for planes, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(bottleneck(inputs, planes, stride if block == 0 else 1))
            inputs = 4 * planes
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Linear(2048, 1000))


def setup(part: str) -> None:
    with names_of_the_commit():
        attribute("engine.fast.cached", "ReplicaCache", "Trees")
        attribute("engine.replicate", "copies_of")


def _call(part: str) -> Callable[[], Any]:
    """Return a function that runs the part named `part` once, as a training step does."""
    import torch

    from dpbench import engine
    from dpbench.engine.replicate import rebuild
    from dpbench.records import no_mark

    copies_of = attribute("engine.replicate", "copies_of")
    # earlier commits call it Trees
    cache_class = attribute("engine.fast.cached", "ReplicaCache", "Trees")
    torch.set_num_threads(1)
    with torch.device("cpu" if part == "broadcast" else "meta"):
        network = resnet50()
    cache = cache_class(network)
    sources = [*cache.parameters, *cache.buffers]
    if part == "broadcast":
        # one copy of 102 MB: the cost of each additional replica
        devices = engine.resolve(["cpu"] * 2)
        return torch.no_grad()(lambda: copies_of(sources, devices, no_mark))
    copies = [[source.detach() for source in sources] for _ in range(REPLICAS)]
    if part == "rebuild":
        tables = [{id(s): t for s, t in zip(sources, one, strict=True)} for one in copies]
        return lambda: [rebuild(network, table) for table in tables]
    cache.bind(sources, copies)
    if part == "notice changes":
        return cache.refresh
    return lambda: cache.bind(sources, copies)


@timing(params=(PARTS,), param_names=("part",))
def track_replica_seconds(part: str) -> dict[str, Any]:
    call = _call(part)
    for _ in range(WARMUP):
        call()
    samples = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(SAMPLES if part != "broadcast" else SAMPLES // 5):
            began = time.perf_counter()
            returned = call()
            samples.append(time.perf_counter() - began)
            del returned
    finally:
        gc.enable()
    return result(samples)
