"""Overlapped reduction on simulated GPUs: the reduce phase is true, although it has no event.

Every rank has a separate CudaClock, as in its process. Backward fills buckets of gradients; each
bucket is reduced on another stream of the GPU, and the main stream waits for the last bucket before
the update.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise

import pytest

from dpbench.measure import merging
from dpbench.measure.clocks import CudaClock
from dpbench.records import Case, Phase, Sample, Status, Trial, Verified
from dpbench.records.activity import EXPOSED_REDUCTION, Activity
from tests.simulated.backend import SimulatedDevice
from tests.simulated.machine import Machine
from tests.simulated.timeline import Gpu, Stream

FORWARD_S, BUCKET_S, UPDATE_S, STEPS, RANKS = 2e-3, 2e-3, 1e-3, 6, 4


def trained(
    machine: Machine,
    reduce_s: float,
    buckets: int = 2,
    *,
    in_turn: bool = False,
    after_s: float = 0.0,
) -> Trial:
    """Return the merged trial of ranks that all-reduce each gradient bucket in `reduce_s` seconds.

    With `in_turn`, in each step another rank needs twice as long as the others. Rank 2 computes
    `after_s` seconds longer in backward, beside its last all-reduce. All steps but the first are
    profiled.
    """
    line, ranks = machine.timeline, range(RANKS)
    devices = [SimulatedDevice(rank, machine) for rank in ranks]
    main, beside = machine.streams, [Stream(rank) for rank in ranks]
    clocks = [CudaClock([device], now=line.now) for device in devices]
    with ExitStack() as blocks:
        for clock in clocks:
            blocks.enter_context(clock.block())
        begins = []
        for number in range(STEPS):
            begins.append(len(line.work))
            slower = [2 if in_turn and number % RANKS == rank else 1 for rank in ranks]
            with ExitStack() as steps:
                for clock in clocks:
                    steps.enter_context(clock.step(warmup=False))
                for rank in ranks:
                    with clocks[rank].mark(Phase.FORWARD, rank):
                        line.kernel(main[rank], FORWARD_S * slower[rank], "gemm")
                with ExitStack() as backwards:
                    for rank in ranks:
                        backwards.enter_context(clocks[rank].mark(Phase.BACKWARD, rank))
                    for _ in range(buckets):
                        for rank in ranks:
                            line.kernel(main[rank], BUCKET_S * slower[rank], "gemm")
                            line.wait(beside[rank], main[rank])
                        line.collective(beside, reduce_s, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")
                    if after_s:
                        line.kernel(main[2], after_s, "gemm")
                    for rank in ranks:
                        line.wait(main[rank], beside[rank])
                for rank in ranks:
                    with clocks[rank].mark(Phase.OPTIMIZER, rank):
                        line.kernel(main[rank], UPDATE_S, "foreach")
    case = Case(model="mlp", strategy="ddp", device_kind="cuda", devices=RANKS, batch_size=64)
    parts = []
    for rank in ranks:
        profile = [
            [
                Activity(w.device, w.name, w.start_s, w.end_s)
                for w in line.work[start:stop]
                if w.device == rank
            ]
            for start, stop in pairwise([*begins[1:], len(line.work)])
        ]
        spans = clocks[rank].spans()
        exposed = merging.exposed_reductions(case, profile)[rank]
        parts.append(
            Trial(
                case=case,
                status=Status.OK,
                verified=Verified.BITWISE,
                steps=clocks[rank].steps(),
                spans=(*spans, *merging.reductions(case, spans, profile)),
                samples=tuple(Sample(0.0, rank, EXPOSED_REDUCTION, seconds) for seconds in exposed),
            )
        )
    return merging.merge(parts)


def machine(speed: float = 1.0) -> Machine:
    """Return a machine with four GPUs, of which GPU 2 has this speed."""
    return Machine(
        [
            Gpu(i, offset_s=7.0 * i, drift=i * 1e-5, speeds=[(0.0, speed if i == 2 else 1.0)])
            for i in range(4)
        ]
    )


@pytest.mark.parametrize(
    ("speed", "reduce_s", "forward_s", "backward_s", "exposed_s", "update_s"),
    [
        (
            1.0,
            1e-3,
            2e-3,
            4e-3,
            1e-3,
            1e-3,
        ),  # the first bucket is hidden behind the second part of backward
        (
            1.0,
            3e-3,
            2e-3,
            4e-3,
            4e-3,
            1e-3,
        ),  # the second bucket waits for the first, of which 2 ms are hidden
        (
            0.5,
            1e-3,
            4e-3,
            8e-3,
            1e-3,
            2e-3,
        ),  # the fast ranks' wait for the slow one does not count as reduction
    ],
)
def test_the_reduce_phase_of_ranks_is_the_exposed_part_of_the_collectives(
    speed: float,
    reduce_s: float,
    forward_s: float,
    backward_s: float,
    exposed_s: float,
    update_s: float,
) -> None:
    check(trained(machine(speed), reduce_s), [forward_s, backward_s, exposed_s, update_s])


def test_ranks_that_are_late_in_turn_do_not_make_the_reduction_longer() -> None:
    """The late rank needs 4 ms for forward and 8 ms for backward.

    The others wait 6 ms for it, in every step.
    """
    trial = trained(machine(), 1e-3, in_turn=True)
    check(trial, [2 * FORWARD_S, 4 * BUCKET_S, 1e-3, UPDATE_S])


def test_a_rank_that_hides_its_reductions_shows_that_the_others_only_wait() -> None:
    """Rank 2 computes for 20 ms after its last bucket, beside the all-reduce of 1 ms."""
    trial = trained(machine(), 1e-3, after_s=20e-3)
    check(trial, [FORWARD_S, 2 * BUCKET_S + 20e-3, 0.0, UPDATE_S])
    reductions = [span for span in trial.spans if span.phase is Phase.REDUCE]
    assert reductions
    assert max(span.end_s - span.start_s for span in reductions) == 0.0


def check(trial: Trial, phases_s: list[float]) -> None:
    """Check the ledger's seconds of forward, backward, reduce and optimizer to 1 % of their sum."""
    expected = dict(zip(("forward", "backward", "reduce", "optimizer"), phases_s, strict=True))
    step_s = sum(expected.values())
    found = trial.ledger.typical()
    assert sum(found.values()) == pytest.approx(step_s, rel=0.01)
    for phase, seconds in expected.items():
        assert found.get(phase, 0.0) == pytest.approx(seconds, abs=0.01 * step_s), found
