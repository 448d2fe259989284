"""Vendors: the precisions that each maker's GPUs have, compared with what torch says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dpbench.hardware.devices import float32
from dpbench.measure.worker.facts import torch_facts
from dpbench.records import Case, vendors
from dpbench.records.facts import Products

AMD_GPUS = [
    "gfx906:sramecc+:xnack-",
    "gfx908:sramecc+:xnack-",
    "gfx90a:sramecc+:xnack-",
    "gfx942:sramecc+:xnack-",
    "gfx950:sramecc+:xnack-",
    "gfx1030",
    "gfx1100",
    "gfx1201",
    "",
]
WITH_BF16 = {"gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"}


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch):
    """Let torch see one GPU: AMD's with an architecture, or NVIDIA's with a capability."""

    def given(architecture: str | None = None, capability: tuple[int, int] = (9, 4)) -> None:
        facts = SimpleNamespace(gcnArchName=architecture, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.version, "hip", None if architecture is None else "7.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *device: facts)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)

    return given


@pytest.mark.parametrize("architecture", AMD_GPUS)
def test_amds_gpus_have_tf32_where_torch_says_so(on, architecture: str) -> None:
    on(architecture)
    gpu = torch.device("cuda", 0)
    impediment = float32.impediment(gpu)
    assert (impediment == "") is torch.cuda.is_tf32_supported()
    assert "capability" not in impediment
    facts = {"capability": (9, 4), "architecture": architecture}
    assert vendors.AMD.has("bf16", facts) is (architecture.partition(":")[0] in WITH_BF16)
    assert vendors.AMD.has("fp32", facts)
    assert not vendors.AMD.trains_in("tf32", facts), "its convolutions ignore the permission"


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (12, 0)])
def test_nvidias_gpus_have_tf32_and_bf16_where_torch_says_so(
    on, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.delenv(float32.OVERRIDE, raising=False)
    on(None, capability)
    gpu = torch.device("cuda", 0)
    assert (float32.impediment(gpu) == "") is torch.cuda.is_tf32_supported()
    facts = {"capability": capability, "architecture": ""}
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert vendors.NVIDIA.has("bf16", facts) is native


def test_the_format_of_amds_convolutions_is_not_guessed(
    on, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's default permits TF32, which MIOpen's convolutions ignore in some versions."""
    both = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision="tf32")),
        cudnn=SimpleNamespace(conv=SimpleNamespace(fp32_precision="tf32")),
    )
    monkeypatch.setattr(torch, "backends", both)
    gpu = torch.device("cuda", 0)
    on("gfx942:sramecc+:xnack-")
    assert float32.products("cuda", gpu) == Products("tf32", None)
    both.cudnn.conv.fp32_precision = "ieee"
    assert float32.products("cuda", gpu) == Products("tf32", "ieee")
    on("gfx1100")
    assert float32.products("cuda", gpu) == Products("ieee", "ieee")


def test_a_torch_without_hip_is_nvidias() -> None:
    assert vendors.of(None) is vendors.of("") is vendors.NVIDIA
    assert vendors.of("7.0.51831") is vendors.AMD


def test_a_worker_under_rocm_tells_the_version_of_hip_and_that_of_rccl_as_nccls(
    on, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record has one name per fact; texts name what it is of."""
    on("gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 6))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 3005000)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "")
    device = SimpleNamespace(torch_device=torch.device("cuda", 0))
    case = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")
    facts = torch_facts(case, device)
    assert "cuda" not in facts
    assert (facts["hip"], facts["nccl"], facts["cudnn"]) == ("7.0", "2.26.6", 3005000)
    assert facts["gpu"] == ""
