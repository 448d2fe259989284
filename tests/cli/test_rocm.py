"""On AMD's GPUs, under ROCm's torch, a run says nothing of NVIDIA's, and plans what they have.

No AMD GPU is here: torch is a stand-in in the process that lists GPUs, and the workers' trials are
made by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpbench.hardware import gpus, nvml, torch_build
from dpbench.measure import selection
from dpbench.records import Case, Effort, vendors
from dpbench.records.environment import Environment, differences
from dpbench.records.facts import RunFacts
from dpbench.records.options import Options
from tests import exported
from tests.standing_in import Server

BUILD = {"__version__": "2.11.0+rocm7", "cuda": None, "hip": "7.0.51831"}
THEIRS = re.compile(r"\b(?:CUDA|NVML|NCCL|NVIDIA|cuDNN|nvidia-smi)\b")
"""Words that are about NVIDIA; "cuda" is torch's name of AMD's devices, too."""
MI300X = ("AMD Instinct MI300X", 192.0, "gfx942:sramecc+:xnack-", (9, 4))
MI250X = ("AMD Instinct MI250X", 64.0, "gfx90a:sramecc+:xnack-", (9, 0))
RX7900 = ("", 24.0, "gfx1100", (11, 0))
RX6900 = ("", 16.0, "gfx1030", (10, 3))
TORCH = """
import json
from types import SimpleNamespace

__version__ = "2.11.0+rocm7"
version = SimpleNamespace(hip="7.0.51831", cuda=None)
backends = SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 3005000))
GPUS = json.loads({gpus!r})
cuda = SimpleNamespace(
    is_available=lambda: bool(GPUS),
    device_count=lambda: len(GPUS),
    get_device_properties=lambda index: SimpleNamespace(**GPUS[index]),
    nccl=SimpleNamespace(version=lambda: (2, 26, 6)),
)
"""
Given = Callable[..., None]


@pytest.fixture
def rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    """Let torch be ROCm's, with the given GPUs; pynvml is not installed."""

    def given(*listed: tuple[str, float, str, tuple[int, int]]) -> None:
        known = [
            {
                "name": name,
                "total_memory": int(gib * 2**30),
                "uuid": f"3{index}aa-bb",
                "major": capability[0],
                "minor": capability[1],
                "gcnArchName": architecture,
            }
            for index, (name, gib, architecture, capability) in enumerate(listed)
        ]
        package = tmp_path / "stand-in" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(TORCH.format(gpus=json.dumps(known)))
        monkeypatch.setenv("PYTHONPATH", str(package.parent))

    for name in vendors.AMD.hiding:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch_build, "versions", lambda: BUILD)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    gpus.of_torch.cache_clear()
    yield given
    gpus.of_torch.cache_clear()


def theirs(*texts: str) -> list[str]:
    """Return what stands in the texts around a word for something of NVIDIA's."""
    return [
        text[max(0, found.start() - 80) : found.end() + 80]
        for text in texts
        for found in THEIRS.finditer(text)
    ]


@pytest.mark.parametrize(
    ("listed", "precisions"),
    [
        ([MI300X] * 8, {"resnet18": "fp32", "transformer": "bf16"}),
        ([MI250X] * 2, {"resnet18": "fp32", "transformer": "bf16"}),
        ([RX7900], {"resnet18": "fp32", "transformer": "bf16"}),
        ([RX6900] * 2, {"resnet18": "fp32", "transformer": "fp32"}),
    ],
    ids=["8xMI300X", "2xMI250X", "RX7900", "2xRX6900"],
)
def test_the_plan_has_precisions_of_the_card(
    rocm: Given,
    dpbench: exported.Command,
    listed: list[Any],
    precisions: dict[str, str],
) -> None:
    rocm(*listed)
    cases, _ = selection.cases_of(Options())
    assert {case.model: case.precision for case in cases} == precisions
    assert {case.device_kind for case in cases} == {"cuda"}
    code, out, err = dpbench("run", "--dry-run")
    assert code == 0
    assert "cuda" in out
    assert theirs(out, err) == []


def trial(case: Case, effort: Effort) -> dict[str, Any]:
    """Return what a worker tells of a case, as far as it depends on the GPUs' maker."""
    made = exported.made(case)
    facts = {"torch": "2.11.0+rocm7", "hip": "7.0.51831", "cudnn": 3005000, "nccl": "2.26.6"}
    return {
        "steps": made.steps,
        "spans": made.spans,
        "verified": made.verified,
        "memory": made.memory,
        "provenance": {**facts, "gpu": gpus.of_torch().gpus[0]["name"]},
    }


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("gpu", [MI300X, RX7900], ids=["named", "without a name"])
def test_a_run_and_its_report_name_what_amds_gpus_run_on(
    rocm: Given,
    dpbench: exported.Command,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    gpu: Any,
) -> None:
    rocm(gpu, gpu)
    monkeypatch.setattr(Server, "act", staticmethod(trial))
    page = tmp_path / "page.html"
    code, out, err = dpbench("run", "--report", page)
    assert code == 0, err
    assert "ddp" in out
    (told,) = (one for one in caplog.messages if "counters of AMD" in one)
    (why,) = re.findall("dpbench reads no [^:;.]*", told)
    explained = dpbench("explain")[1]
    assert f"not checked, because {why}" in " ".join(explained.split())
    text = page.read_text(encoding="utf-8")
    assert "RCCL" in text
    assert "MIOpen" in text
    seen = out, err, caplog.text, explained, text, dpbench("report", "--report", "-")[1]
    assert theirs(*seen) == []
    assert "error" not in err


def test_versions_that_differ_have_amds_names(rocm: Given) -> None:
    rocm(MI300X)
    facts = {"gpus": gpus.describe()}
    other = {"gpus": {**facts["gpus"], "hip": "6.4.1", "nccl": "2.22.3", "cudnn": "3003000"}}
    before, after = (Environment.of(RunFacts.of(one)) for one in (facts, other))
    assert [one.name for one in differences(before, after)] == ["HIP", "MIOpen", "RCCL"]
    cuda = {"gpus": {"cuda": "13.0", "gpus": facts["gpus"]["gpus"]}}
    between = differences(Environment.of(RunFacts.of(cuda)), before)
    assert str(between[0]) == "CUDA: 13.0, then HIP 7.0.51831"


def test_a_card_that_torch_does_not_use_is_named(
    rocm: Given, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The build is for ROCm, but lists no GPU, because a variable hides all."""
    rocm()
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    devices = tmp_path / "dev"
    devices.mkdir()
    (devices / "kfd").touch()
    monkeypatch.setattr(gpus, "_DEVICES", devices)
    assert selection.default_kind() == "cpu"
    assert f"({devices / 'kfd'})" in caplog.text
    assert "HIP_VISIBLE_DEVICES= shows none" in caplog.text
    assert theirs(caplog.text) == []


def test_unequal_cards_without_names_are_told_apart(
    rocm: Given, caplog: pytest.LogCaptureFixture
) -> None:
    rocm(RX7900, ("", 24.0, "gfx1201", (12, 0)), RX7900)
    assert gpus.of_torch().alike() == (0, 2)
    selection.cases_of(Options())
    (told,) = (one for one in caplog.messages if "alike" in one)
    assert re.findall(r"(\d) \((gfx\d+)\)", told) == [
        ("0", "gfx1100"),
        ("2", "gfx1100"),
        ("1", "gfx1201"),
    ]


@pytest.mark.sibling("doctor")
def test_the_doctor_says_which_gpus_it_examines(rocm: Given, dpbench: exported.Command) -> None:
    rocm(MI300X)
    said = exported.is_error(*dpbench("doctor"))
    assert "those of AMD" in said


def test_nvml_is_not_asked_under_rocm(rocm: Given, caplog: pytest.LogCaptureFixture) -> None:
    rocm(MI300X)
    with nvml.open_nvml() as opened:
        assert opened is None
    assert nvml.describe() == {"physical_gpus": 0, "gpus": []}
    assert not caplog.text
