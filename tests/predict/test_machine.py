"""Machines: every description can be read and names its sources; a missing value is an error."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dpbench.predict import machine, network
from dpbench.predict.machine import Machine, UnknownMachine
from dpbench.records.files import UnreadableFile

PAIR: dict[str, Any] = {
    "peer_access": False,
    "gpu": {"name": "any", "count": 2},
    "link": [{"between": ["gpu0-1", "cpu0"], "kind": "pcie", "bytes_per_s": 12e9}],
}
every_machine = pytest.mark.parametrize("name", machine.names())


def changed(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in (PAIR | values).items() if value is not None}


@every_machine
def test_every_machine_reads_and_joins_all_its_gpus(name: str) -> None:
    found = machine.load(name)
    assert found.name == name
    assert found.description
    assert found.gpu.memory_bytes > 1e9
    assert found.gpu.memory_bytes_per_s > 1e11
    assert found.gpu.flop_per_s["fp32"] > 1e12
    for i in range(1, found.gpu.count):
        assert network.route(found, "gpu0", f"gpu{i}")
        assert network.route(found, "host", f"gpu{i}")


@every_machine
def test_every_figure_has_its_source(name: str) -> None:
    data = tomllib.loads(machine.text_of_machine(name))
    tables = [data, data["gpu"], data["host"], *data["link"]]
    assert all(table.get("source") for table in tables)


def test_names_stand_for_several_nodes() -> None:
    found = machine.read(changed(), "pair")
    assert [(link.a, link.b) for link in found.links] == [("gpu0", "cpu0"), ("gpu1", "cpu0")]
    assert found.devices == 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"peer_access": None},
            r"machine pair: `peer_access` is missing.*not guessed.*nvidia-smi topo -p2p r",
        ),
        ({"link": None}, r"`link` is missing.*nvidia-smi topo -m"),
        ({"gpu": None}, r"`gpu` is missing"),
        ({"links": []}, r"unknown key 'links'; known: .*link.*did you mean 'link'"),
        (
            {"gpu": {"name": "any", "count": 2, "tflops": 3}},
            r"\[gpu\].*unknown key 'tflops'; known: .*flop_per_s",
        ),
        ({"gpu": {"name": "any"}}, r"\[gpu\].*count"),
        ({"gpu": {"name": "any", "count": 3}}, r"no link leads to gpu2"),
        ({"gpu": {"name": "any", "count": 0}}, r"\[gpu\].*Expected `int` >= 1.*`count` is 0"),
        ({"peer_access": "false"}, r"Expected `bool`, got `str`.*`peer_access` is 'false'"),
        ({"nodes": "two"}, r"Expected `int`, got `str`.*nodes"),
        (
            {"gpu": {"name": "any", "count": 2, "memory_bytes": "24GB"}},
            r"\[gpu\].*Expected `float`, got `str`",
        ),
        ({"link": [{"between": ["gpu0-1"], "kind": "pcie", "bytes_per_s": 1}]}, r"length 2"),
        (
            {"link": [{"between": ["gpu0-1", "cpu0"], "kind": "pcie", "bytes_per_s": 0}]},
            r"Expected `float` > 0.*`bytes_per_s` is 0",
        ),
        ({"nodes": 0}, r"Expected `int` >= 1.*`nodes` is 0"),
        ({"gpu": {"name": "any", "count": 10**9}}, r"Expected `int` <= 256.*`count` is 1000000000"),
        (
            {"gpu": {"name": "any", "count": 2, "flop_per_s": {"fp32": float("inf")}}},
            r"Expected `float` <=.*`flop_per_s`",
        ),
        (
            {"gpu": {"name": "any", "count": 2, "memory_bytes": float("nan")}},
            r"Expected `float` >= 0.*`memory_bytes` is nan",
        ),
        ({"host": {"factor": 0}}, r"\[host\].*Expected `float` > 0.*`factor` is 0"),
        (
            {"link": [{"between": ["gpu0-99999999999", "cpu0"], "kind": "pcie", "bytes_per_s": 1}]},
            r"'gpu0-99999999999'; a range such as gpu0-3 must ascend and end below 256",
        ),
        (
            {"link": [{"between": ["gpu1-0", "cpu0"], "kind": "pcie", "bytes_per_s": 1}]},
            r"the range 'gpu1-0'",
        ),
        (
            {"link": [{"between": ["gpu0-2", "cpu0"], "kind": "pcie", "bytes_per_s": 1}]},
            r"leads to gpu2, but .*`count` 2",
        ),
        ({"nodes": 2}, r"2 nodes and no link of kind 'network'"),
        ({"host": {"speed": 2}}, r"\[host\].*unknown key 'speed'"),
        (
            {"link": [{"between": ["gpu0-1", "cpu0"], "kind": "pci", "bytes_per_s": 1}]},
            r"kind of link 'pci'.*pcie",
        ),
        (
            {"link": [{"between": ["gpu0-1", "cpu0"], "kind": "pcie"}]},
            r"missing required field `bytes_per_s`",
        ),
    ],
)
def test_what_is_missing_or_unknown_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownMachine, match=message):
        machine.read(changed(**values), "pair")


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        LookupError, match=r"unknown machine 'dgx-a10'; known: .*did you mean 'dgx-a100'.*\.toml"
    ):
        machine.load("dgx-a10")


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'peer_access = true\n[gpu]\nname = "x"\ncount = 1\n[[link]]\nbetween = ["gpu0", "cpu0"]\n'
        'kind = "pcie"\nbytes_per_s = 1e9\n'
    )
    assert machine.load(str(path)).name == "mine"
    path.write_text("peer_access = ")
    with pytest.raises(UnreadableFile, match=r"mine\.toml is not valid TOML"):
        machine.load(str(path))
    for content in (b"\xff", b"a = " + b"[" * 5000, b"nodes = " + b"9" * 5000):
        path.write_bytes(content)
        with pytest.raises(UnreadableFile, match=r"mine\.toml is not valid TOML"):
            machine.load(str(path))
    path.write_text('peer_access = "false"\n[gpu]\nname = "x"\ncount = 1\n[[link]]\n')
    with pytest.raises(
        UnknownMachine, match=r"mine\.toml: machine mine: .*`peer_access` is 'false'"
    ):
        machine.load(str(path))


def test_the_same_description_is_the_same_machine() -> None:
    first, second = (machine.read(changed(), "pair") for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert isinstance(first, Machine)
    assert hash(machine.read(changed(peer_access=True), "pair")) != hash(first)


def test_predicting_loads_no_torch() -> None:
    code = (
        "import sys; from dpbench.predict import cases, machine;p ="
        " cases.Predictor(machine.load('dgx-a100'));found = [p.predict(case) for case in"
        " cases.sweep(['resnet50'], strategies=('single', 'torch_dp', 'dp', 'ddp'), devices=(1, 2,"
        " 8), batch_per_device=(32,), schedules=('reference', 'sharded'))];assert len(found) > 8"
        " and all(one.seconds > 0 for one in found);print(*sorted({'torch', 'matplotlib', 'pandas'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


PROBED = {
    "peer_access": False,
    "gpu": {"name": "x", "count": 1},
    "link": [{"between": ["gpu0", "cpu0"], "kind": "pcie", "bytes_per_s": 1e10}],
}


def test_figures_of_the_probe_change_no_machine() -> None:
    figures = {"a_s": {"value": 3.0, "low": 2.0, "high": 4.0, "how": ""}, "a_ratio": {"value": 2.0}}
    assert machine.read(PROBED | {"probe": figures}, "here") == machine.read(PROBED, "here")


def test_logical_cpu_devices_are_refused_with_a_way_out() -> None:
    """An earlier probe wrote such files on machines without GPUs."""
    logical = PROBED | {
        "link": [{"between": ["gpu0", "cpu0"], "kind": "memory", "bytes_per_s": 1e10}]
    }
    with pytest.raises(UnknownMachine, match="dpbench run"):
        machine.read(logical, "here")
