"""The doctor's rules: each planted fault is named, and nothing else; healthy machines have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dpbench.doctor import faults
from dpbench.doctor.examination import DIRECT, PINNED, STAGED
from dpbench.doctor.faults import AllReduce, Examined, Steps
from dpbench.doctor.result import result
from dpbench.doctor.transfers import SILENCE, Copy
from dpbench.records import HOST
from dpbench.records.facts import NvLinks
from tests.amounts import amounts
from tests.doctor import machines

Fault = Callable[[Examined], Examined]


def with_gpu(number: int, **facts: Any) -> Fault:
    def change(machine: Examined) -> Examined:
        gpus = [
            msgspec.structs.replace(gpu, **facts) if i == number else gpu
            for i, gpu in enumerate(machine.gpus)
        ]
        return replace(machine, gpus=gpus)

    return change


def with_system(**facts: Any) -> Fault:
    return lambda machine: replace(machine, system=replace(machine.system, **facts))


def with_copy(source: int, target: int, way: str, **result: Any) -> Fault:
    copy = Copy(source, target, way)
    return lambda machine: machines.with_transfer(machine, copy, **result)


def with_acs(*ports: str) -> Fault:
    """Let these ports above the four GPUs redirect."""

    def change(machine: Examined) -> Examined:
        pci = {
            address: replace(one, acs=True) if address in ports else one
            for address, one in machine.system.pci.items()
        }
        return replace(machine, system=replace(machine.system, pci=pci))

    return change


def with_software(**versions: str) -> Fault:
    return lambda machine: replace(machine, software={**machine.software, **versions})


def chain(*changes: Fault) -> Fault:
    def change(machine: Examined) -> Examined:
        for one in changes:
            machine = one(machine)
        return machine

    return change


SWITCH = "4x behind a switch"
PORTS = [f"0000:02:0{i}.0" for i in range(4)]
"""The ports of this switch, each with a GPU."""
PLANTED: Mapping[str, tuple[str, Fault, set[str]]] = {
    "a corrupting pair": (SWITCH, with_copy(0, 2, DIRECT, wrong=4096), {"corrupt transfer"}),
    "a hanging pair": (
        SWITCH,
        with_copy(1, 3, DIRECT, bytes_per_s=0.0, failure=SILENCE),
        {"failing transfer"},
    ),
    "a pair at a tenth": (SWITCH, with_copy(0, 1, DIRECT, bytes_per_s=2.2e9), {"slow pair"}),
    "ACS in the ports of the switch": (SWITCH, with_acs(*PORTS), {"ACS"}),
    "ACS in one port of the switch": (SWITCH, with_acs(PORTS[2]), {"ACS"}),
    "no peer access": (SWITCH, lambda one: replace(one, peers=frozenset()), {"no peer access"}),
    "a hanging all-reduce": (
        SWITCH,
        lambda one: replace(one, all_reduce=AllReduce(failure="rank 2 was in it")),
        {"failing all-reduce"},
    ),
    "a slow all-reduce": (
        SWITCH,
        lambda one: replace(one, all_reduce=AllReduce(bytes_per_s=2e9)),
        {"slow all-reduce"},
    ),
    "a slow all-reduce over NVSwitch": (
        "DGX",
        chain(
            machines.with_nvswitch, lambda one: replace(one, all_reduce=AllReduce(bytes_per_s=9e9))
        ),
        {"slow all-reduce"},
    ),
    "four of sixteen lanes": ("2x3090", with_gpu(1, pcie_width_now=4), {"narrow link"}),
    "a link of an older generation": (
        "2x3090",
        with_copy(HOST, 0, PINNED, bytes_per_s=6e9),
        {"slow link to the host"},
    ),
    "mixed models": ("2x3090", with_gpu(1, name="Tesla T4"), {"mixed GPUs"}),
    "a lowered power limit": ("2x3090", with_gpu(0, power_limit_w=150.0), {"power limit"}),
    "a hot GPU": ("2x3090", lambda one: replace(one, readings={1: 0x40}), {"throttling"}),
    "a prohibited GPU": ("2x3090", with_gpu(1, compute_mode="prohibited"), {"compute mode"}),
    "no persistence": ("2x3090", with_gpu(0, persistence_mode=False), {"persistence mode"}),
    "a foreign process": (
        "2x3090",
        lambda one: replace(one, foreign={0: {4711: 2**30}, 1: {}}),
        {"other processes"},
    ),
    "busy cores": ("2x3090", lambda one: replace(one, busy="90% of the cores"), {"busy cores"}),
    "the other socket": (
        "two sockets",
        with_system(affinity=frozenset(range(32))),
        {"other socket"},
    ),
    "a small /dev/shm": ("2x3090", with_system(shm_bytes=64 * 2**20), {"small /dev/shm"}),
    "little locked memory": ("DGX", with_system(locked_bytes=2**16), {"locked memory"}),
    "a quota of cores": ("2x3090", with_system(quota=2.0), {"core quota"}),
    "a variable": (
        "2x3090",
        lambda one: replace(one, variables={"NCCL_P2P_DISABLE": "1", "HOME": "x"}),
        {"variable"},
    ),
    "a variable whose presence counts": (
        "2x3090",
        lambda one: replace(one, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}),
        {"variable"},
    ),
    "torch without CUDA": (
        "2x3090",
        lambda one: replace(one, unused="torch 2.13.0+cpu is a build for CPUs"),
        {"torch"},
    ),
    "an old driver": ("2x3090", with_software(cuda="13.0"), {"driver"}),
    "a build without NCCL": ("2x3090", with_software(nccl=""), {"torch"}),
    "a build without kernels for a GPU": (
        "2x3090",
        lambda one: replace(one, no_kernels=[1]),
        {"torch"},
    ),
    "a link at the first generation": (
        "2x3090",
        chain(
            lambda one: replace(one, generations={0: 4, 1: 1}),
            with_copy(HOST, 1, PINNED, bytes_per_s=3.2e9),
            with_copy(1, HOST, PINNED, bytes_per_s=3.3e9),
        ),
        {"old generation"},
    ),
    "memory errors": ("2x3090", with_gpu(1, ecc_errors=2), {"memory errors"}),
    "unlike ECC": ("2x3090", chain(with_gpu(0, ecc=True), with_gpu(1, ecc=False)), {"ECC"}),
    "an import that switches the interpreter lock on": (
        "2x3090",
        lambda one: replace(one, switching="numpy._core._multiarray_umath"),
        {"interpreter lock"},
    ),
    "a divided GPU": ("2x3090", with_gpu(1, mig=True), {"MIG"}),
    "an NVLink that is down": (
        "DGX",
        chain(
            machines.with_nvswitch,
            with_gpu(3, nvlinks=NvLinks(active=17, inactive=1, ends={"switch": 17})),
        ),
        {"NVLink down"},
    ),
    "a slow pair over NVSwitch": (
        "DGX",
        chain(machines.with_nvswitch, with_copy(2, 5, DIRECT, bytes_per_s=150e9)),
        {"slow pair"},
    ),
    "a bridge at a tenth": (
        "2x3090",
        chain(
            machines.with_bridges,
            with_copy(0, 1, DIRECT, bytes_per_s=5e9),
            with_copy(1, 0, DIRECT, bytes_per_s=5e9),
            lambda one: replace(one, all_reduce=AllReduce(bytes_per_s=4e9)),
        ),
        {"slow pair"},
    ),
}


@pytest.mark.parametrize("name", [name for name in machines.TREES if name != "container"])
def test_a_healthy_machine_has_no_finding(tmp_path: Path, name: str) -> None:
    assert faults.found(machines.examined(tmp_path, name)) == []


@pytest.mark.parametrize(
    ("name", "linked"),
    [("DGX", machines.with_nvswitch), ("4x behind a switch", machines.with_bridges)],
)
def test_healthy_nvlinks_have_no_finding(tmp_path: Path, name: str, linked: Fault) -> None:
    machine = linked(machines.examined(tmp_path, name))
    assert faults.found(machine) == []
    assert machine.nvlinks(0, 1) > 0
    assert machine.carried(Copy(0, 1, DIRECT)) > machine.promised(0)


def test_what_a_copy_is_promised_is_that_of_its_links(tmp_path: Path) -> None:
    machine = machines.with_bridges(machines.examined(tmp_path, SWITCH))
    pcie = machine.promised(0)
    assert machine.carried(Copy(HOST, 2, PINNED)) == pcie
    assert machine.carried(Copy(0, 1, DIRECT)) == 4 * 14e9
    assert machine.carried(Copy(1, 2, DIRECT)) == pcie, "no bridge between these"
    assert machine.carried(Copy(0, 1, STAGED)) == pytest.approx(pcie / 2)
    alone = replace(machine, peers=frozenset())
    assert alone.carried(Copy(1, 2, DIRECT)) == pytest.approx(pcie / 2)


def test_a_bridge_that_was_not_fitted_is_a_fact_of_the_hardware(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, "2x3090")
    for active, wrong in ((4, False), (8, False), (11, True)):
        nvlinks = NvLinks(active=active, inactive=12 - active)
        found = faults.found(
            chain(with_gpu(0, nvlinks=nvlinks), with_gpu(1, nvlinks=nvlinks))(machine)
        )
        assert [one.wrong for one in found] == [wrong, wrong]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named_and_nothing_else(tmp_path: Path, name: str) -> None:
    tree, plant, expected = PLANTED[name]
    found = faults.found(plant(machines.examined(tmp_path, tree)))
    assert {one.name for one in found} == expected
    for one in found:
        assert one.says
        assert one.evidence
        assert one.change


def test_a_container_is_told_how_its_limits_change(tmp_path: Path) -> None:
    found = faults.found(machines.examined(tmp_path, "container"))
    assert {one.name for one in found} == {"small /dev/shm", "core quota"}
    (shared,) = [one for one in found if one.name == "small /dev/shm"]
    assert "--shm-size" in shared.change


def test_acs_is_named_once_for_a_switch_with_its_ports(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, SWITCH)
    (found,) = faults.found(with_acs(*PORTS)(machine))
    assert "0000:01:00.0" in found.says
    assert [port for port in PORTS if f"setpci -s {port} " in found.change] == PORTS


def test_acs_above_a_switch_does_not_matter(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, SWITCH)
    above = with_acs("0000:00:01.1", "0000:01:00.0")
    assert faults.found(above(machine)) == []
    hanging = with_copy(0, 2, DIRECT, bytes_per_s=0.0, failure=SILENCE)
    (found,) = faults.found(chain(above, hanging)(machine))
    assert "Access Control" not in found.change
    found, _ = faults.found(chain(with_acs(*PORTS), hanging)(machine))
    assert "Access Control" in found.change


def test_a_pair_that_hangs_is_named_with_the_iommu_as_the_cause(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, SWITCH)
    machine = with_copy(0, 2, DIRECT, bytes_per_s=0.0, failure=SILENCE)(machine)
    (found,) = faults.found(with_system(iommu="translating")(machine))
    assert (found.name, found.gpus, found.evidence) == ("failing transfer", (0, 2), SILENCE)
    assert "iommu=pt" in found.change


@pytest.mark.parametrize("way", [PINNED, STAGED])
@pytest.mark.parametrize("result", [{"wrong": 9}, {"bytes_per_s": 0.0, "failure": SILENCE}])
def test_copies_that_are_not_direct_are_not_cured_without_peer_access(
    way: str, result: dict[str, Any], tmp_path: Path
) -> None:
    machine = machines.examined(tmp_path, SWITCH)
    source = HOST if way == PINNED else 1
    (found,) = faults.found(with_copy(source, 0, way, **result)(machine))
    assert "P2P" not in found.change + found.undo


def test_peer_access_that_is_off_for_a_reason_is_no_fault(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, SWITCH)
    machine = replace(machine, variables={"NCCL_P2P_DISABLE": "1"})
    (found,) = faults.found(with_copy(0, 2, DIRECT, wrong=9)(machine))
    assert found.name == "corrupt transfer", "the doctor itself advises to turn it off"
    (found,) = faults.found(replace(machine, peers=frozenset()))
    assert found.name == "no peer access"


def test_on_busy_cores_a_copy_that_hangs_may_only_be_slow(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, SWITCH)
    machine = with_copy(0, 2, DIRECT, bytes_per_s=0.0, failure=SILENCE)(machine)
    (alone,) = faults.found(machine)
    assert "only be slow" not in alone.evidence
    hanging, busy = faults.found(replace(machine, busy="90% of the cores"))
    assert "only be slow" in hanging.evidence
    assert (busy.name, busy.wrong) == ("busy cores", False)


def test_an_all_reduce_that_cannot_be_direct_may_be_slower_than_copies(tmp_path: Path) -> None:
    """The driver's copies through the host's memory and between sockets are faster than NCCL's."""
    slow = AllReduce(bytes_per_s=6e9)
    alone = machines.examined(tmp_path / "alone", SWITCH)
    found = faults.found(replace(alone, all_reduce=slow, peers=frozenset()))
    assert [one.name for one in found] == ["no peer access"]
    sockets = machines.examined(tmp_path / "sockets", "two sockets")
    assert faults.found(replace(sockets, all_reduce=slow)) == []


def test_a_slow_pair_between_sockets_is_a_fact_of_the_hardware(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, "two sockets")
    (found,) = faults.found(with_copy(0, 7, DIRECT, bytes_per_s=5e9)(machine))
    assert not found.wrong
    assert "nodes 0 and 1" in found.evidence
    (found,) = faults.found(with_copy(0, 3, DIRECT, bytes_per_s=5e9)(machine))
    assert found.wrong


def test_the_cost_is_a_share_of_a_step(tmp_path: Path) -> None:
    """102.2 MB of weights and of gradients at 10 instead of 20 GB/s take 10.2 ms longer."""
    machine = machines.examined(tmp_path, SWITCH)
    said = faults._cost(machine, 10e9, 20e9)
    assert "10.2 ms (10%) in DataParallel" in said
    assert "7.67 ms (7.7%) in DDP" in said
    steps = Steps(name="a step of mine", weights_bytes=204.4e6, ddp_s=0.05)
    said = faults._cost(replace(machine, steps=steps), 10e9, 20e9)
    assert "a step of mine" in said
    assert "15.3 ms (31%) in DDP" in said
    assert "DataParallel" not in said, "the run has no such step"


def test_what_was_not_checked_is_listed_with_the_reason(tmp_path: Path) -> None:
    done, undone = faults.checked(machines.healthy())
    assert "copies between GPUs" in [one.partition(", because ")[0] for one in undone]
    assert "size of /dev/shm" in done
    done, undone = faults.checked(machines.examined(tmp_path, "2x3090"))
    assert "copies between GPUs" in done
    reasons = dict(one.split(", because ") for one in undone)
    assert [*reasons] == ["locked memory", "Access Control Services"]
    assert all(reasons.values())


def test_faults_stand_before_facts(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, "2x3090")
    machine = with_gpu(1, name="Tesla T4", pcie_width_now=4)(machine)
    assert [one.wrong for one in faults.found(machine)] == [True, False]


def test_what_is_wrong_with_many_links_is_one_problem_with_the_slowest_first(
    tmp_path: Path,
) -> None:
    pairs = [(i, j) for i in range(8) for j in range(8) if i != j]
    slow = [
        with_copy(*pair, DIRECT, bytes_per_s=90e9 - 1e9 * number)
        for number, pair in enumerate(pairs)
    ]
    machine = machines.examined(tmp_path, "DGX")
    machine = chain(machines.with_nvswitch, *slow)(machine)
    found = result(machine, 0.0)
    assert len(found.findings) == len(pairs)
    (problem,) = found.problems
    assert problem.first.gpus == pairs[-1]
    assert found.faults == 1
    assert [one.gpus for one in problem.others] == pairs[-2::-1]
    assert amounts(dict(problem.parts)["also"])[:4] == ["7", "5", "7", "4"]
    assert dict(problem.parts)["also"].endswith("43 more")


def test_different_problems_stay_apart(tmp_path: Path) -> None:
    machine = machines.examined(tmp_path, "2x3090")
    machine = chain(
        with_gpu(1, name="Tesla T4", pcie_width_now=4), with_gpu(0, power_limit_w=150.0)
    )(machine)
    found = result(machine, 0.0)
    assert [one.first for one in found.problems] == list(found.findings)
    assert not any(one.others for one in found.problems)
