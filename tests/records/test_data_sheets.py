"""Data sheets: GPUs that have one by the driver's name and their memory, and those that look alike.

The names and sizes are those that drivers report (nvidia-smi, torch.cuda.get_device_properties).
"""

from __future__ import annotations

import pytest

from dpbench.records import data_sheets

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "mib", "gpu", "tf32", "bf16"),
    [
        ("NVIDIA A100-SXM4-40GB", 40536, "A100-SXM4-40GB", 156, 312),
        ("A100-SXM4-40GB", 40536, "A100-SXM4-40GB", 156, 312),
        ("NVIDIA A100-SXM4-80GB", 81251, "A100-SXM4-80GB", 156, 312),
        ("NVIDIA A100-PCIE-40GB", 40536, "A100-PCIe-40GB", 156, 312),
        ("NVIDIA A100 80GB PCIe", 81251, "A100-PCIe-80GB", 156, 312),
        ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM5-80GB", 495, 989),
        ("NVIDIA H100 PCIe", 81559, "H100-PCIe-80GB", 378, 756),
        ("NVIDIA H100 NVL", 95830, "H100-NVL-94GB", 418, 836),
        ("NVIDIA H200", 143771, "H200-SXM5-141GB", 495, 989),
        ("NVIDIA H200 NVL", 143771, "H200-NVL-141GB", 418, 836),
        ("NVIDIA B200", 183359, "B200-180GB", 1125, 2250),
        ("NVIDIA A30", 24125, "A30-24GB", 82, 165),
        ("NVIDIA A10", 22731, "A10-24GB", 62.5, 125),
        ("NVIDIA L4", 22563, "L4-24GB", 60, 121),
        ("NVIDIA L40S", 45464, "L40S-48GB", 183, 362),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX 6000 Ada", 182.1, 364.2),
        ("NVIDIA RTX A6000", 48685, "RTX A6000", 77.4, 154.8),
        ("NVIDIA GeForce RTX 4090", 24217, "RTX 4090", 82.6, 165.2),
        ("NVIDIA GeForce RTX 3090", 24260, "RTX 3090", 35.6, 71),
        ("NVIDIA GeForce RTX 3080", 10240, "RTX 3080", 29.8, 59.5),
    ],
)
def test_a_gpu_has_the_sheet_of_its_name_and_memory(
    name: str, mib: int, gpu: str, tf32: float, bf16: float
) -> None:
    sheet = data_sheets.of_gpu(name, mib * MIB)
    assert sheet is not None
    assert sheet.gpu == gpu
    assert (sheet.flop_per_s["tf32"], sheet.flop_per_s["bf16"]) == (tf32 * 1e12, bf16 * 1e12)
    assert sheet.source


@pytest.mark.parametrize(
    ("name", "mib", "gpu", "fp16"),
    [
        ("Tesla V100-SXM2-16GB", 16144, "V100-SXM2-16GB", 125),
        ("Tesla V100-SXM2-32GB", 32494, "V100-SXM2-32GB", 125),
        ("Tesla V100-PCIE-32GB", 32494, "V100-PCIE-32GB", 112),
        ("Tesla P100-SXM2-16GB", 16276, "P100", 0),
        ("Tesla T4", 14913, "T4", 65),
        ("NVIDIA T4", 15102, "T4", 65),
        ("Quadro RTX 6000", 24220, "Quadro RTX 6000", 130.5),
        ("NVIDIA TITAN RTX", 24217, "TITAN RTX", 130.5),
        ("NVIDIA GeForce RTX 2080 Ti", 10995, "RTX 2080 Ti", 53.8),
    ],
)
def test_gpus_before_ampere_have_no_tf32(name: str, mib: int, gpu: str, fp16: float) -> None:
    sheet = data_sheets.of_gpu(name, mib * MIB)
    assert sheet is not None
    assert (sheet.gpu, sheet.flop_per_s.get("fp16", 0.0)) == (gpu, fp16 * 1e12)
    assert "tf32" not in sheet.flop_per_s
    assert "bf16" not in sheet.flop_per_s


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("Fake GPU", 40536),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864),
        ("NVIDIA A100-SXM4-40GB MIG 7g.40gb", 40326),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40326),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9984),
        ("NVIDIA H200 MIG 1g.18gb", 16384),
        ("NVIDIA A100-SXM4-40GB", 81251),
        ("NVIDIA A100-SXM4-40GB", 0),
        ("NVIDIA A100-SXM-64GB", 65000),
        ("NVIDIA A100-PG509-200", 40536),
        ("NVIDIA A100X", 81251),
        ("NVIDIA A100", 40536),
        ("GRID A100-40C", 40536),
        ("NVIDIA A10-24Q", 24000),
        ("NVIDIA A10G", 22731),
        ("NVIDIA A800-SXM4-80GB", 81251),
        ("NVIDIA H800", 81559),
        ("NVIDIA H20", 97871),
        ("NVIDIA H100", 81559),
        ("NVIDIA H100 80GB HBM2e", 81559),
        ("NVIDIA GH200 480GB", 97871),
        ("NVIDIA GB200", 189471),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376),
        ("NVIDIA GeForce RTX 4090 D", 24217),
        ("NVIDIA GeForce RTX 3080", 12288),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 10240),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16376),
        ("NVIDIA RTX 6000", 24220),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887),
        ("Tesla V100-SXM3-32GB", 32494),
        ("Tesla V100-SXM2-32GB-LS", 32494),
        ("Tesla P100-PCIE-16GB", 16276),
        ("NVIDIA T400", 1872),
        ("AMD Instinct MI300X", 196592),
        ("", 40536),
    ],
)
def test_a_gpu_that_looks_alike_has_no_sheet(name: str, mib: int) -> None:
    assert data_sheets.of_gpu(name, mib * MIB) is None


def test_no_two_entries_have_the_same_name_and_memory() -> None:
    """Of two, `of_gpu` would find neither."""
    for figures in data_sheets.table()["gpu"].values():
        for name in (figures["name"], *figures.get("driver", ())):
            found = data_sheets.of_gpu(name, figures.get("memory_gib", 0) * 2**30)
            assert (found is not None) == bool(figures.get("tflops")), name
            assert found is None or found.gpu == figures["name"]
