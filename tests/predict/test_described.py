"""Machines from a line of text: the figures of the named GPU, its links, and what is assumed."""

from __future__ import annotations

import json
import tomllib

import pytest

from dpbench.predict import described, machine, network
from dpbench.predict.constants import ASSUMED_BUS, DEFAULT, PRIORS, priors_of
from dpbench.predict.machine import UnknownMachine
from dpbench.records import Case
from tests.exported import Command

RENTED = (
    "A10",
    "A40",
    "L4",
    "L40S",
    "A6000",
    "A100 PCIe",
    "A100 SXM",
    "H100 PCIe",
    "H100 SXM",
    "H100 NVL",
    "H200",
    "B200",
    "RTX 4090",
    "RTX 5090",
)


@pytest.mark.parametrize("gpu", RENTED)
def test_gpus_that_people_rent_have_their_figures_with_a_source(gpu: str) -> None:
    data = tomllib.loads(described.toml(f"8x {gpu}"))
    found = machine.load(f"8x {gpu}")
    assert all(part.lower() in found.gpu.name.lower().replace("-", " ") for part in gpu.split())
    assert found.gpu.count == 8
    assert found.gpu.memory_bytes > 1e10
    assert found.gpu.memory_bytes_per_s > 1e11
    assert {"fp32", "tf32", "bf16"} <= set(found.gpu.flop_per_s)
    assert data["gpu"]["source"].startswith("NVIDIA")
    assert all(table["source"] for table in (data, data["host"], *data["link"]))


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("8x A100 PCIe 40GB, 2 sockets, PCIe 4", "A100-PCIe-40GB"),
        ("8x A100 PCIe 80 GB", "A100-PCIe-80GB"),
        ("8x A100 SXM, PCIe 4", "A100-SXM4-40GB"),
        ("8x A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("2x rtx3090", "RTX 3090"),
        ("2x RTX 3080Ti", "RTX 3080 Ti"),
        ("4x L40S", "L40S-48GB"),
        ("4x L4", "L4-24GB"),
        ("4x H100, PCIe, 1 node", "H100-PCIe-80GB"),
        ("4x H100 NVL", "H100-NVL-94GB"),
        ("8x H100, NVLink", "H100-SXM5-80GB"),
    ],
)
def test_the_longest_name_that_the_line_contains_counts(line: str, name: str) -> None:
    assert described.figures(line)["name"] == name


@pytest.mark.parametrize(
    ("line", "nodes", "count", "network_gb", "cpus"),
    [
        ("16x H100 SXM, 2 nodes, 8x 400 Gbit/s InfiniBand", 2, 8, 384, 2),
        ("2x A100, 4 A100 per node, one HDR card per node; 2 node(s)", 2, 1, 24, 1),
        ("4x A100 SXM, 2 nodes, one InfiniBand card (25 GB/s)", 2, 2, 24, 1),
        ("16x A100 80GB, 2 nodes", 2, 8, 12, 2),
        ("16x T4, 4 nodes, 2x 100 Gbit/s", 4, 4, 24, 1),
        ("64x H100 SXM with 400 Gbit/s InfiniBand", 8, 8, 48, 2),
        ("64x H100 SXM, 400 Gbit/s InfiniBand", 8, 8, 48, 2),
        ("64x H100 SXM with 8x 400 Gbit/s InfiniBand", 8, 8, 384, 2),
        ("64x H100, 8 nodes of 8x H100 with 400 Gbit/s InfiniBand", 8, 8, 48, 2),
        ("16x A100, 2 nodes, PCIe 4.0 x16 with 400 Gbit/s InfiniBand", 2, 8, 48, 2),
        ("16x RTX 4090, 2 nodes of 8x 4090 with 2x ConnectX-6 HDR", 2, 8, 48, 2),
        ("4x T4, 2 sockets", 1, 4, 0, 2),
        ("4x T4", 1, 4, 0, 1),
    ],
)
def test_nodes_networks_and_processors_are_read(
    line: str, nodes: int, count: int, network_gb: float, cpus: int
) -> None:
    found = machine.load(line)
    assert (found.nodes, found.gpu.count) == (nodes, count)
    rate = sum(link.bytes_per_s for link in found.links if link.kind == "network")
    assert rate / 1e9 == pytest.approx(network_gb)
    ends = {end for link in found.links for end in (link.a, link.b) if end.startswith("cpu")}
    assert len(ends) == cpus


@pytest.mark.parametrize(
    ("line", "link"),
    [
        ("4x V100 PCIe 16GB, P2P, 2 sockets", "PCIe 3 x16"),
        ("4x V100 PCIe 16 GB, P2P, 2 sockets", "PCIe 3 x16"),
        ("2x H100 PCIe 80GB", "PCIe 5 x16"),
        ("2x K20 PCIe 5 GB", "PCIe 2 x16"),
        ("8x A100 PCIe 40GB, 2 sockets, PCIe 3", "PCIe 3 x16"),
        ("8x A100 PCIe 40GB, gen 3", "PCIe 3 x16"),
        ("4x RTX 4090, PCIe 3.0 x16", "PCIe 3 x16"),
        ("4x RTX 4090, PCIe 3.0 x8", "PCIe 3 x8"),
        ("4x RTX 4090, PCIe4 x8", "PCIe 4 x8"),
        ("4x RTX 4090, PCIe Gen4, 8 lanes", "PCIe 4 x8"),
        ("4x RTX 4090, x8 PCIe", "PCIe 4 x8"),
        ("4x RTX 4090, 48 lanes", "PCIe 4 x16"),
        ("16x A100, 2 nodes x8 GPUs", "PCIe 4 x16"),
    ],
)
def test_the_generation_and_the_lanes_of_pcie_are_read(line: str, link: str) -> None:
    sources = {one["source"] for one in tomllib.loads(described.toml(line))["link"]}
    assert any(source.startswith(f"{link},") for source in sources), sources


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "12x A100 SXM, InfiniBand",
            "12 GPUs cannot be divided into nodes of 8: state a number of",
        ),
        ("6x A100, 4 A100 per node", "6 GPUs cannot be divided into nodes of 4"),
        ("16x A100, 5 nodes", "16 GPUs cannot be shared equally by 5 nodes: state a number of"),
        ("2x A100, 4 nodes", "2 GPUs cannot be shared equally by 4 nodes"),
    ],
)
def test_gpus_that_the_nodes_do_not_share_equally_are_refused(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        machine.load(line)
    assert machine.load("12x A100 SXM, InfiniBand, 3 nodes").nodes == 3
    assert machine.load("12x A100 SXM, InfiniBand, 1 node").nodes == 1


@pytest.mark.parametrize("each", ["4 GPUs", "4x H100", "4 H100", "4"])
def test_a_number_in_the_name_of_a_gpu_is_no_number_per_node(each: str) -> None:
    found = machine.load(f"64x H100 SXM, {each} per node, 400 Gbit/s InfiniBand")
    assert (found.gpu.count, found.nodes) == (4, 16)


def test_what_the_line_does_not_state_is_listed_and_widens_the_bus() -> None:
    sure, unsure = (machine.load(f"8x A100 PCIe{more}") for more in (", P2P", ""))
    assert sure.assumed == ()
    (assumed,) = unsure.assumed
    assert assumed.startswith("peer access ")
    case = Case(model="mlp", strategy="ddp", devices=8, batch_size=8, device_kind="cuda")
    assert priors_of(case, sure)["bus_scale"] == PRIORS["bus_scale"].deviation
    assert priors_of(case, unsure)["bus_scale"] == ASSUMED_BUS
    assert "delivered" in priors_of(case, sure)


def test_eight_without_peer_access_share_the_copies_through_host_memory() -> None:
    two, eight = (machine.load(f"{n}x RTX 3090, no P2P, 2 sockets") for n in (2, 8))
    assert network.bus(two, 2, DEFAULT).bytes_per_s > 2 * network.bus(eight, 8, DEFAULT).bytes_per_s


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("8x H300 SXM", "'8x H300 SXM' names no known GPU; the nearest known ones: h200, h800"),
        ("8x RTX 2080 Super", "the nearest known ones: 2080"),
    ],
)
def test_an_unknown_gpu_is_refused_with_the_nearest(line: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        machine.load(line)


def test_more_gpus_than_a_node_may_have_are_refused() -> None:
    with pytest.raises(UnknownMachine, match=r"`count` is 999"):
        machine.load("999x H100 PCIe, 1 node")


def test_the_command_says_what_it_assumes_and_json_has_the_machine_file(dpbench: Command) -> None:
    line = "8x A100 PCIe 40GB, 2 sockets, PCIe 4"
    usual = ("predict", "--machine", line, "--models", "resnet50", "--devices", "2")
    code, out, err = dpbench(*usual)
    assert code == 0, err
    assumed = [line.removeprefix("assumed: ") for line in out.splitlines() if "assumed: " in line]
    assert assumed == [*machine.load(line).assumed]
    assert assumed
    found = json.loads(dpbench(*usual, "--json")[1])
    assert machine.read(tomllib.loads(found["machine_file"]), line) == machine.load(line)
    assert (
        json.loads(dpbench(*usual[:2], "dgx-a100", *usual[3:], "--json")[1])["machine_file"] == ""
    )


def test_every_listed_machine_can_be_loaded(dpbench: Command) -> None:
    code, out, _ = dpbench("list", "machines", "--json")
    assert code == 0
    named = [one["name"] for one in json.loads(out)["names"]]
    assert {*machine.names()} < {*named}
    assert all(machine.load(name).gpu.flop_per_s for name in named)


@pytest.mark.parametrize(
    ("line", "gil"),
    [
        ("8x A100 SXM, NVSwitch", True),
        ("8x A100 SXM, NVSwitch, no GIL", False),
        ("8x A100 SXM, NVSwitch, without the GIL", False),
        ("8x A100 SXM, NVSwitch, free-threaded Python", False),
        ("8x A100 SXM no GIL, NVSwitch", False),
        ("8x A100 SXM, Free-threaded Python 3.14t, NVSwitch", False),
        ("8x A100 SXM, NVSwitch, with the GIL", True),
    ],
)
def test_a_line_may_say_that_python_has_no_interpreter_lock(line: str, gil: bool) -> None:
    assert machine.load(line).host.gil is gil
    assert tomllib.loads(described.toml(line))["host"]["gil"] is gil


@pytest.mark.parametrize(
    "words",
    [
        "not free-threaded",
        "free-threading off",
        "not without the GIL",
        "nogil",
        "GIL off",
        "GIL disabled",
        "PYTHON_GIL=0",
        "-Xgil=0",
        "python3.14t",
        "without the interpreter lock",
        "no GIL, with the GIL",
    ],
)
def test_a_line_that_is_unclear_about_the_interpreter_lock_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"unclear whether .* has Python's interpreter lock"):
        machine.load(f"8x A100 SXM, NVSwitch, {words}")


def test_a_prediction_says_what_it_assumes_of_a_python_without_the_lock(dpbench: Command) -> None:
    line = ("predict", "--models", "resnet50", "--devices", "1,2", "--machine")
    for machine_line, assumed in (("2x A100 SXM, NVSwitch", 0), ("2x A100 SXM, no GIL", 1)):
        code, out, _ = dpbench(*line, machine_line)
        assert code == 0
        assert out.count(machine.UNMEASURED_WITHOUT_GIL) == assumed
        assert ("NO-GIL" in out) is bool(assumed)
        plain = json.loads(dpbench(*line, machine_line, "--json")[1])
        assert plain["assumed"].count(machine.UNMEASURED_WITHOUT_GIL) == assumed
