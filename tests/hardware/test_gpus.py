"""The GPUs that torch can use decide what a run measures, and a run says why it uses none."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dpbench.hardware import gpus, nvml, torch_build
from dpbench.measure import selection
from dpbench.records.facts import RunFacts
from dpbench.records.options import Options
from dpbench.records.resources import Resources
from tests import exported
from tests.recorded_nvml import Recorded

T4, A100 = ("Tesla T4", 15.6), ("NVIDIA A100", 79.1)
Given = Callable[..., None]


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus.of_torch.cache_clear()
    yield
    gpus.of_torch.cache_clear()


@pytest.fixture
def torch_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Given:
    """Let the subprocess import a torch of which `torch.cuda` has the given GPUs or source."""

    def given(
        *listed: tuple[str, float],
        uuids: Any = (),
        cuda: str = "",
        capability: tuple[int, int] = (7, 5),
    ) -> None:
        package = tmp_path / "torch"
        package.mkdir()
        known = [
            {
                "name": name,
                "total_memory": int(gib * 2**30),
                "uuid": uuid,
                "major": capability[0],
                "minor": capability[1],
            }
            for (name, gib), uuid in zip(
                listed, uuids or [f"1{i}aa-bb" for i in range(len(listed))], strict=True
            )
        ]
        (package / "__init__.py").write_text("from torch import cuda\n")
        (package / "cuda.py").write_text(
            cuda
            or "import json\nfrom types import SimpleNamespace\n"
            f"GPUS = json.loads({json.dumps(json.dumps(known))})\n"
            "is_available = lambda: bool(GPUS)\n"
            "device_count = lambda: len(GPUS)\n"
            "get_device_properties = lambda index: SimpleNamespace(**GPUS[index])\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(gpus, "_build", lambda: ("torch 2.14.1+cu130", True))

    return given


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_import_library", lambda: None)


def _cases(**options: Any) -> list[tuple[str, int, tuple[int, ...], str]]:
    cases, _ = selection.cases_of(Options.of(models=("mlp",), **options))
    return [(one.device_kind, one.devices, one.device_ids, one.placement) for one in cases]


def test_the_versions_of_torchs_libraries_are_told_as_far_as_they_are_known(
    torch_with: Given, no_nvml: None, tmp_path: Path
) -> None:
    """They are known before a worker loads torch, because a run is resumed only with the same."""
    torch_with(T4)
    folder = tmp_path / "torch"
    (folder / "__init__.py").write_text("from torch import cuda, version\n")
    (folder / "version.py").write_text("cuda = '13.0'\n")
    with (folder / "cuda.py").open("a") as module:
        module.write("nccl = SimpleNamespace(version=lambda: (2, 27, 3))\n")
    found = gpus.describe()
    assert (found["cuda"], found["nccl"]) == ("13.0", "2.27.3")
    assert "cudnn" not in found


ANOTHER_DRIVER = 18
"""NVML's error where the library and the driver have different versions."""


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "nvidia-ml-py is missing"),
        (Recorded({"init_error": ANOTHER_DRIVER}), f"NVML error {ANOTHER_DRIVER}"),
    ],
)
def test_a_run_uses_the_gpus_of_torch_when_nvml_does_not_answer(
    torch_with: Given,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    library: Recorded | None,
    reason: str,
) -> None:
    monkeypatch.setattr(nvml, "_import_library", lambda: library)
    torch_with(T4, T4)
    assert {kind for kind, *_ in _cases()} == {"cuda"}
    assert {devices for _, devices, *_ in _cases()} == {1, 2}
    facts = gpus.describe()
    assert [gpu["name"] for gpu in facts["gpus"]] == ["Tesla T4", "Tesla T4"]
    assert Resources.of(RunFacts.of({"gpus": facts})).gpu_memory_bytes == (int(15.6 * 2**30),) * 2
    assert "2 of the 2 GPUs" in caplog.text
    assert reason in caplog.text


@pytest.mark.usefixtures("no_nvml")
def test_of_unequal_gpus_a_run_uses_the_largest_equal_group_and_says_so(
    torch_with: Given, caplog: pytest.LogCaptureFixture
) -> None:
    torch_with(T4, A100, T4)
    assert {ids for _, _, ids, _ in _cases()} == {(0, 2)}
    assert re.findall(r"(\d) \(Tesla T4\)", caplog.text) == ["0", "2"]
    with pytest.raises(ValueError, match=r"3 devices .* device_ids=\[0, 1, 2\]"):
        _cases(devices=(1, 3))
    assert {ids for _, _, ids, _ in _cases(device_ids=(0, 1, 2))} == {(0, 1, 2)}


@pytest.mark.usefixtures("no_nvml")
def test_one_instance_of_a_divided_gpu_is_one_device(torch_with: Given) -> None:
    torch_with(("NVIDIA A100 MIG 1g.5gb", 4.8), uuids=["MIG-3c5a"])
    found = _cases()
    assert {kind for kind, *_ in found} == {"cuda"}
    assert {placement for _, devices, _, placement in found if devices == 2} == {"colocated"}


@pytest.mark.usefixtures("no_nvml")
def test_a_uuid_is_the_number_that_torch_gives_its_gpu(torch_with: Given) -> None:
    torch_with(T4, T4, T4, uuids=["9b03", "9bff", "e1"])
    assert {ids for _, _, ids, _ in _cases(device_ids=("GPU-e", "GPU-9b03"))} == {(2, 0)}
    for matches, uuid in ((2, "GPU-9b"), (0, "GPU-7"), (3, "GPU-")):
        with pytest.raises(LookupError, match=f"device_ids='{uuid}' matches {matches} GPUs"):
            _cases(device_ids=(uuid,))


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (
            "import warnings\ndef is_available():\n"
            "    warnings.warn('CUDA initialization: the driver is too old (found 11040)')\n"
            "    return False\n",
            "the driver is too old (found 11040)",
        ),
        (
            "is_available = lambda: True\ndevice_count = lambda: 1\n"
            "def get_device_properties(index):\n    raise RuntimeError('device is lost')\n",
            "device is lost",
        ),
        ("raise ImportError('libcudart.so.13 is missing')\n", "libcudart.so.13 is missing"),
        ("is_available = lambda: False\n", "no driver, or no device"),
    ],
)
def test_cuda_without_a_usable_gpu_ends_with_the_reason(
    torch_with: Given,
    dpbench: exported.Command,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cuda: str,
    reason: str,
) -> None:
    torch_with(cuda=cuda)
    code, _, err = dpbench("run", "--device-kind", "cuda", "--dry-run")
    assert code == 64
    assert reason in err
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert {kind for kind, *_ in _cases()} == {"cpu"}
    assert reason in caplog.text


def test_a_build_for_cpus_does_not_measure_a_machine_with_gpus_silently(
    monkeypatch: pytest.MonkeyPatch,
    dpbench: exported.Command,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(gpus, "_build", lambda: ("torch 2.13.0+cpu", False))
    code, _, err = dpbench("run", "--device-kind", "cuda", "--dry-run")
    assert code == 64
    assert "torch 2.13.0+cpu is a build" in err
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    with caplog.at_level(logging.WARNING):
        assert {kind for kind, *_ in _cases()} == {"cpu"}
    assert "nvidia0" in caplog.text
    assert "torch 2.13.0+cpu" in caplog.text


def test_without_a_sign_of_a_gpu_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "_build", lambda: ("torch 2.13.0+cpu", False))
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.setattr(nvml, "describe", lambda: {"physical_gpus": 0, "gpus": []})
    assert {kind for kind, *_ in _cases()} == {"cpu"}
    assert not caplog.text


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize(
    ("gpu", "capability", "batch", "precisions"),
    [
        (("NVIDIA GeForce RTX 3090", 23.7), (8, 6), 64, {"tf32", "bf16"}),
        (("Quadro P2000", 4.9), (6, 1), 16, {"fp32"}),
    ],
)
def test_by_default_gpus_train_full_models_in_the_precision_of_their_generation(
    torch_with: Given,
    gpu: tuple[str, float],
    capability: tuple[int, int],
    batch: int,
    precisions: set[str],
) -> None:
    torch_with(gpu, gpu, capability=capability)
    cases, budget_s = selection.cases_of(Options())
    assert {case.size for case in cases} == {"full"}
    assert {case.batch_size // case.devices for case in cases} == {batch}
    assert {case.precision for case in cases} == precisions
    assert {case.model for case in cases} == {"resnet18", "transformer"}
    assert budget_s == 600.0
    assert {case.strategy for case in cases if case.devices == 1} == {"single"}
    assert {case.strategy for case in cases if case.devices == 2} == {"dp", "torch_dp", "ddp"}
    chosen, _ = selection.cases_of(Options(models=("mlp",)))
    assert {(case.size, case.precision, case.batch_size) for case in chosen} == {
        ("small", "fp32", 64)
    }


@pytest.mark.usefixtures("no_nvml")
@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_dpbench_does_not_support_is_named(
    torch_with: Given,
    dpbench: exported.Command,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    device: str,
) -> None:
    torch_with()
    (tmp_path / "torch" / "__init__.py").write_text(
        "from types import SimpleNamespace\n"
        "from torch import cuda\n"
        f"found = SimpleNamespace(type={device!r})\n"
        "accelerator = SimpleNamespace(current_accelerator=lambda check_available: found)\n"
    )
    with caplog.at_level(logging.WARNING):
        assert {kind for kind, *_ in _cases()} == {"cpu"}
    (said,) = caplog.messages
    assert "this run measures the CPU" in said
    assert f"finds the device {device}" in said
    assert "CUDA and ROCm only" in said
    code, _, err = dpbench("run", "--device-kind", "cuda", "--dry-run")
    assert code == 64
    assert f"finds the device {device}" in err


@pytest.mark.parametrize(
    ("versions", "system", "asked"),
    [
        (None, "Linux", False),
        ({"cuda": None, "hip": None, "xpu": None}, "Linux", False),
        ({"cuda": None, "hip": None, "xpu": "20250302"}, "Linux", True),
        ({"cuda": None, "hip": None}, "Darwin", True),
        ({"cuda": "13.0", "hip": None}, "Linux", True),
        ({"cuda": None, "hip": "7.0"}, "Linux", True),
        ({}, "Linux", True),
    ],
    ids=["none", "CPU", "XPU", "macOS", "CUDA", "ROCm", "from sources"],
)
def test_torch_is_asked_where_its_build_may_find_a_device(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, Any] | None, system: str, asked: bool
) -> None:
    """Asking loads torch, which takes seconds that a run on the CPU does not need."""
    named = None if versions is None else {"__version__": "2.13.0", **versions}
    monkeypatch.setattr(torch_build, "versions", lambda: named)
    monkeypatch.setattr(gpus.platform, "system", lambda: system)
    name, may = gpus._build()
    assert may is asked
    assert name == ("no installed torch" if versions is None else "torch 2.13.0")


def test_a_gpu_of_amd_is_not_left_unused_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpus, "_build", lambda: ("torch 2.13.0+cpu", False))
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    assert {kind for kind, *_ in _cases()} == {"cpu"}
    assert "kfd" in caplog.text
    assert "install a build of torch" in caplog.text
