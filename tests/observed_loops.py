"""Observed training loops made by hand: trials as `dpbench watch` and `import` store them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from dpbench.records import HOST, Case, Memory, Phase, Sample, Source, Span, Step, Trial
from dpbench.records.activity import HOST_READS, HOST_WAITS, KERNELS
from dpbench.records.facts import stated
from dpbench.records.observed import SCRIPT, Observed, traits
from dpbench.records.registry import Parallelism, Reduction

Group = Sequence[tuple[Phase, int, float]]
"""Phases that begin together, each with its device and its seconds.

The next group begins after the longest.
"""
PLAIN: Sequence[Group] = (
    [(Phase.DATA, HOST, 0.0001)],
    [(Phase.FORWARD, 0, 0.004)],
    [(Phase.LOSS, 0, 0.0002)],
    [(Phase.BACKWARD, 0, 0.005)],
    [(Phase.OPTIMIZER, 0, 0.0005)],
)
HEALTHY_S = 0.0098
"""The seconds of a step of PLAIN."""
MODEL = {
    "modules": 3,
    "buffer_tensors": 0,
    "parameter_tensors": 4,
    "parameter_bytes": 4e6,
    "trainable_bytes": 4e6,
    "buffer_bytes": 0,
    "input_bytes": 3072.0,
    "target_bytes": 8.0,
    "output_bytes": 40.0,
}
FACTS = {
    "host": {"name": "bench-07", "cpu": "AMD EPYC 7763", "cores": 8},
    "packages": {"torch": "2.13.0"},
    "dpbench": {"version": "0.1.0"},
    "command": "dpbench watch train.py",
}
GPU_FACTS = {
    **FACTS,
    "gpus": {
        "gpus": [
            {"name": "NVIDIA GeForce RTX 3090", "index": i, "memory_bytes": 24 * 2**30}
            for i in range(4)
        ]
    },
}


def case(**changes: Any) -> Case:
    """Return the case of an observed loop on one device, with other values of some fields."""
    way = changes.pop(
        "parallelism", Parallelism.THREADS if changes.get("devices", 1) > 1 else Parallelism.NONE
    )
    declared = traits(
        way, Reduction.IN_BACKWARD if way is Parallelism.THREADS else Reduction.OVERLAPPED
    )
    return Case(
        **{
            "model": "train.py",
            "strategy": SCRIPT,
            "batch_size": 64,
            "declared": declared,
            **changes,
        }
    )


def with_part(
    phase: Phase, seconds: float, device: int = HOST, groups: Sequence[Group] = PLAIN
) -> list[Group]:
    """Return a step's groups with other seconds of one phase, appended if they lack it."""
    found = [group for group in groups if all(one is not phase for one, _, _ in group)]
    place = next(
        (i for i, group in enumerate(groups) if any(one is phase for one, _, _ in group)),
        len(found),
    )
    return [*found[:place], [(phase, device, seconds)], *found[place:]]


def loop(
    groups: Sequence[Group] = PLAIN,
    of: Case | None = None,
    *,
    rounds: int = 5,
    steps: int = 10,
    gap_s: float = 0.0,
    noise: float = 0.01,
    seed: int = 0,
    source: Source = Source.MEASURED,
    memory: Sequence[int] = (),
    busy: Mapping[int, float] | None = None,
    facts: Mapping[str, Any] | None = None,
    **about: Any,
) -> list[Trial]:
    """Return one trial for each of `rounds` consecutive parts of a loop.

    Warm-up steps precede the first part.

    `gap_s` is the unattributed time of a step, and `noise` the relative standard deviation of the
    step time. `memory` has the peak of each device in bytes, `busy` the busy seconds of each
    device. `about` are facts of `Observed`.
    """
    draw, of, now, trials = random.Random(seed), of or case(), 1000.0, []
    told = Observed(**{"command": "python train.py", "reads": {}, "loader_workers": 0, **about})
    for number in range(rounds):
        series, spans = [], []
        for index in range(steps + (2 if number == 0 else 0)):
            begun, factor = now, max(0.2, draw.gauss(1.0, noise))
            for group in groups:
                spans += [
                    Span(index, phase, d, "host", now, now + s * factor) for phase, d, s in group
                ]
                now += max(s for _, _, s in group) * factor
            now += gap_s * factor
            series.append(Step(now - begun, number == 0 and index < 2, now))
        waits = (Phase.DATA, Phase.SCATTER, Phase.READ)
        waits_s = sum(s for group in groups for phase, _, s in group if phase in waits)
        samples = [
            Sample(step.end_s, device, metric, value)
            for device, seconds in (busy or {}).items()
            for step in series
            for metric, value in ((KERNELS, seconds), (HOST_READS, 0.0), (HOST_WAITS, waits_s))
        ]
        trials.append(
            Trial(
                case=of,
                source=source,
                round=number,
                steps=tuple(series),
                spans=tuple(spans),
                samples=tuple(samples),
                memory=tuple(
                    Memory(device, peak, "allocator") for device, peak in enumerate(memory)
                ),
                provenance={
                    "torch": "2.13.0",
                    "model": MODEL,
                    **stated(loop=told),
                    **(facts or {}),
                },
            )
        )
    return trials


def parallel(devices: int = 4, first: float = 1.0) -> list[Group]:
    """Return the groups of a step of DataParallel.

    `first` is the ratio of device 0's forward to the others'.
    """
    return [
        [(Phase.DATA, HOST, 0.0001)],
        [(Phase.SCATTER, d, 0.001) for d in range(devices)],
        [(Phase.REPLICATE, 0, 0.01)],
        [(Phase.FORWARD, d, 0.01 * (first if d == 0 else 1.0)) for d in range(devices)],
        [(Phase.GATHER, 0, 0.001)],
        [(Phase.LOSS, 0, 0.001)],
        [(Phase.BACKWARD, d, 0.025) for d in range(devices)],
        [(Phase.OPTIMIZER, 0, 0.002)],
    ]
