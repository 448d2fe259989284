"""The basis of predictions: shared links, simulated jobs, and the speed of collectives."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpbench.predict import machine, network
from dpbench.predict.constants import DEFAULT
from dpbench.predict.events import SimulatedJob, rates, simulate
from dpbench.predict.machine import UnknownMachine

# ---------------------------------------------------------------- sharing


def test_sharing_is_max_min_fair() -> None:
    found = rates({"a": ["x"], "b": ["x", "y"], "c": ["y"]}, {"x": 10.0, "y": 4.0})
    assert found == {"a": 8.0, "b": 2.0, "c": 2.0}


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_no_link_carries_more_than_it_can_and_every_flow_meets_a_full_one(seed: int) -> None:
    draw = random.Random(seed)
    capacity = {link: draw.uniform(1, 100) for link in range(draw.randint(1, 6))}
    flows = {
        i: draw.sample(sorted(capacity), draw.randint(1, len(capacity)))
        for i in range(draw.randint(1, 8))
    }
    found = rates(flows, capacity)
    used = {link: sum(found[f] for f, way in flows.items() if link in way) for link in capacity}
    assert all(used[link] <= capacity[link] * (1 + 1e-9) for link in capacity)
    for flow, way in flows.items():  # it could get more only from flows that have no more than it
        assert any(
            used[link] >= capacity[link] * (1 - 1e-9)
            and all(
                found[other] <= found[flow] * (1 + 1e-9)
                for other, there in flows.items()
                if link in there
            )
            for link in way
        )


# ---------------------------------------------------------------- events


def test_a_resource_serves_one_at_a_time_in_order() -> None:
    found = simulate(
        [
            SimulatedJob(2.0, "gpu"),
            SimulatedJob(1.0, "gpu"),
            SimulatedJob(1.0, "gpu", after=(1,)),
            SimulatedJob(5.0),
        ],
        {},
    )
    assert found == [(0.0, 2.0), (2.0, 3.0), (3.0, 4.0), (0.0, 5.0)]


def test_a_job_beside_another_starts_with_it_and_ends_no_earlier() -> None:
    long = simulate(
        [
            SimulatedJob(1.0, "host"),
            SimulatedJob(3.0, "host"),
            SimulatedJob(1.0, "gpu", overlap=(1,)),
            SimulatedJob(1.0, after=(2,)),
        ],
        {},
    )
    assert long == [(0.0, 1.0), (1.0, 4.0), (1.0, 4.0), (4.0, 5.0)]
    short = simulate([SimulatedJob(1.0, "host"), SimulatedJob(3.0, "gpu", overlap=(0,))], {})
    assert short == [(0.0, 1.0), (0.0, 3.0)]


def test_jobs_released_while_others_are_started_start_once() -> None:
    # the second waits for nothing but the start of the first, which comes in the same round
    found = simulate(
        [
            SimulatedJob(1.0, "host"),
            SimulatedJob(1.0, "gpu", overlap=(0,)),
            SimulatedJob(1.0, "gpu", after=(1,)),
        ],
        {},
    )
    assert found == [(0.0, 1.0), (0.0, 1.0), (1.0, 2.0)]


def test_flows_share_what_they_cross_and_speed_up_when_one_ends() -> None:
    found = simulate(
        [SimulatedJob(0.0, amount=10.0, way=("x",)), SimulatedJob(0.0, amount=30.0, way=("x",))],
        {"x": 10.0},
    )
    assert [end for _, end in found] == pytest.approx([2.0, 4.0])
    late = simulate(
        [SimulatedJob(0.0, amount=20.0, way=("x",)), SimulatedJob(1.0, amount=10.0, way=("x",))],
        {"x": 10.0},
    )
    assert [end for _, end in late] == pytest.approx([3.0, 3.0])


def test_jobs_in_a_circle_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"jobs \[0, 1\] of 2 wait for each other"):
        simulate([SimulatedJob(1.0, after=(1,)), SimulatedJob(1.0, after=(0,))], {})


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_work_is_conserved(seed: int) -> None:
    draw = random.Random(seed)
    jobs = []
    for i in range(draw.randint(1, 20)):
        before = tuple(sorted(draw.sample(range(i), min(i, draw.randint(0, 2)))))
        seconds, resource = draw.uniform(0, 1), draw.choice(["", "a", "b"])
        amount = draw.choice([0.0, draw.uniform(0, 5)])
        jobs.append(SimulatedJob(seconds, resource, amount, ("x",), after=before))
    found = simulate(jobs, {"x": 2.0})
    for job, (start, end) in zip(jobs, found, strict=True):
        assert all(found[before][1] <= start + 1e-9 for before in job.after)
        assert end - start >= job.seconds + job.amount / 2.0 - 1e-9
    for resource in ("a", "b"):
        spans = sorted(found[i] for i, job in enumerate(jobs) if job.resource == resource)
        assert all(first[1] <= second[0] + 1e-9 for first, second in itertools.pairwise(spans))
    assert max(end for _, end in found) >= sum(job.amount for job in jobs) / 2.0 - 1e-9


# ---------------------------------------------------------------- links


def test_routes_prefer_nvlink_and_stage_without_peer_access() -> None:
    bridged = machine.load("rtx-3090-x8-bridge")
    assert network.route(bridged, "gpu0", "gpu1") == (("gpu0", "gpu1"),)
    over = network.route(bridged, "gpu1", "gpu2")
    assert ("switch0", "cpu0") in over
    assert over[-1] == ("switch1", "gpu2")
    assert ("switch0", "cpu0") not in network.route(machine.load("h100-pcie-x8"), "gpu0", "gpu1")
    assert ("cpu0", "cpu1") in network.route(machine.load("h100-pcie-x8"), "gpu0", "gpu7")


def test_a_way_that_is_not_there_names_the_links() -> None:
    alone = machine.read(
        {
            "peer_access": True,
            "gpu": {"name": "x", "count": 2},
            "link": [
                {"between": ["gpu0", "cpu0"], "kind": "pcie", "bytes_per_s": 1e9},
                {"between": ["gpu1", "cpu1"], "kind": "pcie", "bytes_per_s": 1e9},
            ],
        },
        "torn",
    )
    with pytest.raises(
        UnknownMachine,
        match=r"torn: no route from gpu0 to gpu1; .* the links gpu0-cpu0, gpu1-cpu1;",
    ):
        network.route(alone, "gpu0", "gpu1")


@pytest.mark.parametrize(
    ("name", "devices", "gb_per_s", "kind"),
    [
        ("dgx-a100", 8, 235, "nvlink"),  # measured 235 (ml-engineering, PyTorch-level)
        ("h100-sxm-x8", 8, 364, "nvlink"),  # measured 363-367 for rings
        ("b200-x8", 8, 707, "nvlink"),  # measured 682 for rings
        ("dgx-1-v100", 8, 118, "nvlink"),
        ("dgx-1-v100", 2, 20, "nvlink"),
        ("rtx-2080-ti-x4", 4, 6.5, "staged"),
        ("rtx-3090-x8-bridge", 2, 47, "nvlink"),
        ("rtx-3090-x8-bridge", 8, 2.25, "staged"),  # eight share 18 GB/s through host memory
        ("h100-pcie-x8", 2, 41, "peer"),
    ],
)
def test_bus_bandwidth_follows_from_the_links(
    name: str, devices: int, gb_per_s: float, kind: str
) -> None:
    found = network.bus(machine.load(name), devices, DEFAULT)
    assert (found.bytes_per_s / 1e9, found.kind) == (pytest.approx(gb_per_s, rel=0.02), kind)


def test_gpus_that_stage_share_the_way_to_memory() -> None:
    def board(share: int) -> machine.Machine:
        links = [
            {"between": [f"gpu{i}", f"switch{i // share}"], "kind": "pcie", "bytes_per_s": 12e9}
            for i in range(4)
        ]
        links += [
            {"between": [f"switch{k}", "cpu0"], "kind": "pcie", "bytes_per_s": 12e9}
            for k in range(4 // share)
        ]
        return machine.read(
            {"peer_access": False, "gpu": {"name": "x", "count": 4}, "link": links}, f"board{share}"
        )

    two, four = (network.bus(board(share), 4, DEFAULT).bytes_per_s for share in (2, 4))
    # published on two boards with eight RTX 2080 Ti: 4.5-5 and 2.3 GB/s
    assert two == pytest.approx(5.1e9)
    assert four == pytest.approx(2.55e9)


@pytest.mark.parametrize("devices", [2, 3, 8])
def test_collectives_move_as_a_ring_does(devices: int) -> None:
    """Each device passes a chunk on in n - 1 turns.

    An all-reduce does so twice, to sum and to spread the sums.
    """
    turns = sum(1 / devices for _ in range(devices - 1))
    assert network.TRAFFIC["reduce_scatter"](devices) == pytest.approx(turns)
    assert network.TRAFFIC["all_gather"](devices) == pytest.approx(turns)
    assert network.TRAFFIC["all_reduce"](devices) == pytest.approx(2 * turns)


def test_the_curve_fits_published_all_reduces() -> None:
    group = network.DeviceGroup(machine.load("dgx-a100"), 8, DEFAULT)
    # NCCL all-reduce on eight A100 of an Azure NDv4 (superbench-results v0.2.1, 7b5ea64): bytes,
    # microseconds
    for size, measured_us in ((67108864, 587.2), (268435456, 2117.8), (1073741824, 8164.5)):
        assert group.one_s("all_reduce", size) * 1e6 == pytest.approx(measured_us, rel=0.25)
    assert group.one_s("all_reduce", 0) == 0.0
