"""What the kernel says about a machine, read from trees of files made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.doctor import system
from dpbench.doctor.words import tree
from tests.doctor import machines


def test_gpus_behind_a_switch_meet_at_it_and_others_in_the_root_complex(tmp_path: Path) -> None:
    found = machines.read(tmp_path / "switch", "4x behind a switch")
    first, *others = found.of("gpu")
    assert len(others) == 3
    assert {found.common(first, other).address for other in others} == {"0000:01:00.0"}
    apart = machines.read(tmp_path / "apart", "2x3090")
    assert apart.common(*apart.of("gpu")) is None


def test_sockets_lanes_and_cores_are_those_of_the_files(tmp_path: Path) -> None:
    found = machines.read(tmp_path, "two sockets")
    assert [one.node for one in found.of("gpu")] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.nodes == {0: frozenset(range(32)), 1: frozenset(range(32, 64))}
    assert {(one.width, one.max_width) for one in found.of("gpu")} == {(16, 16)}


@pytest.mark.parametrize(("name", "iommu"), [("DGX", "passthrough"), ("two sockets", "off")])
def test_the_mode_of_the_iommu_is_known(tmp_path: Path, name: str, iommu: str) -> None:
    assert machines.read(tmp_path, name).iommu == iommu


def test_a_container_has_its_limits(tmp_path: Path) -> None:
    found = machines.read(tmp_path, "container")
    assert found.container
    assert found.quota == 4
    assert found.shm_bytes == 64 * 2**20
    assert found.locked_bytes == 8 * 2**20


@pytest.mark.parametrize("option", ["iommu=pt", "iommu.passthrough=1"])
def test_either_option_lets_addresses_through(tmp_path: Path, option: str) -> None:
    tree_of = machines.Tree(slots=[], iommu=True, cmdline=f"quiet {option}")
    assert system.read(machines.made(tmp_path, tree_of), [0]).iommu == "passthrough"


@pytest.mark.parametrize(("control", "redirects"), [(0x1D, True), (0x00, False), (0x01, False)])
def test_redirection_is_read_from_the_control_register(
    tmp_path: Path, control: int, redirects: bool
) -> None:
    slots = [machines.bridge("pci0000:00", "0000:00:01.0", acs=control)]
    found = system.read(machines.made(tmp_path, machines.Tree(slots=slots)), [0])
    (bridge,) = found.of("bridge")
    assert bridge.acs is redirects


def test_without_root_redirection_is_unknown(tmp_path: Path) -> None:
    found = machines.read(tmp_path, "2x3090")
    assert {bridge.acs for bridge in found.of("bridge")} == {None}


def test_an_empty_tree_is_unknown_and_no_error(tmp_path: Path) -> None:
    found = system.read(tmp_path, [0])
    assert found.pci == {}
    assert found.nodes == {}
    assert found.iommu == "unknown"
    assert found.shm_bytes is None
    assert found.quota is None


def test_this_machine_can_be_read() -> None:
    assert system.read().affinity


@pytest.mark.parametrize(("text", "cores"), [("0-3,8", {0, 1, 2, 3, 8}), ("5", {5}), ("", set())])
def test_lists_of_the_kernel_are_sets(text: str, cores: set[int]) -> None:
    assert system.cores_in(text) == cores


def test_the_tree_shows_each_gpu_once_below_its_switch(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, "DGX")
    lines = list(tree(machine))
    assert [line.split()[:2] for line in lines if "GPU" in line] == [
        ["GPU", str(number)] for number in range(8)
    ]
    assert sum("network card" in line for line in lines) == 8
    assert [line for line in lines if line.startswith("node")] == [
        "node 0: 56 cores",
        "node 1: 56 cores",
    ]
