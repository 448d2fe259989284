"""dpbench's own engine: a thin adapter over TrainStep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpbench.devices import Device
from dpbench.engine.train_step import TrainStep
from dpbench.models import Model
from dpbench.records import HOST, Case, Mark, Phase, Profile, Task
from dpbench.schedule import FASTEST, parse
from dpbench.strategies import Graph, Step, optimizer_of, precision_of, single


def skip(case: Case) -> str:
    """Refuse flat storage on emulated devices."""
    if case.device_kind == "emulated" and case.schedule not in ("", FASTEST) and parse(case.schedule).storage == "flat":
        return "storage=flat needs CPU or CUDA devices: emulated parameters cannot be views of one buffer"
    return ""


@contextmanager
def start(case: Case, model: Model, devices: Sequence[Device], mark: Mark) -> Iterator[Step]:
    """Yield the engine's training step on the case's schedule."""
    module = model.module.to(devices[0].torch_device)
    train_step = TrainStep(
        module, model.loss, optimizer_of(case), list(devices), case.schedule or "reference", mark=mark
    )

    def step(inputs: Any, target: Any) -> torch.Tensor:
        with precision_of(case):
            return train_step(inputs, target)

    with train_step:
        yield step


def tasks(case: Case, profile: Profile) -> list[Task]:
    """Return the reference schedule: everything of device 0's passes through device 0."""
    return single.tasks(case, profile) if case.devices == 1 else chain(case, profile, threads=True)


def chain(case: Case, profile: Profile, *, threads: bool) -> list[Task]:
    """Return DataParallel's tasks on several devices, with the host's starting of threads as one if asked."""
    rows = case.rows
    graph, state = Graph(), profile.parameter_bytes + profile.buffer_bytes
    scattered = [graph.add(Phase.SCATTER, i, f"host:{i}", n * profile.input_bytes, "bytes") for i, n in enumerate(rows)]
    copied = [
        graph.add(Phase.REPLICATE, i, f"link:0:{i}", state if i else 0, "bytes", [at]) for i, at in enumerate(scattered)
    ]
    started = (
        [graph.add(Phase.FORWARD, HOST, "host", len(rows), "threads", copied)] if threads and len(rows) > 1 else []
    )
    forwards = [
        graph.add(Phase.FORWARD, i, f"device:{i}", n * profile.forward_flop, "flop", [copied[i]], overlap=started)
        for i, n in enumerate(rows)
    ]
    outputs = sum(rows) * profile.output_bytes
    gathered = graph.add(Phase.GATHER, 0, "device:0", outputs, "bytes", forwards)
    loss = graph.add(Phase.LOSS, 0, "device:0", outputs, "bytes", [gathered])
    backwards = [
        graph.add(Phase.BACKWARD, i, f"device:{i}", n * profile.backward_flop, "flop", [loss])
        for i, n in enumerate(rows)
    ]
    moved = (len(rows) - 1) * profile.parameter_bytes
    reduced = graph.add(Phase.REDUCE, 0, "device:0", moved, "bytes", backwards)
    graph.update(profile, 0, [reduced])
    return graph.tasks
