"""Names of GPUs: those of NVML, torch and described machines that mean the same, and others."""

from __future__ import annotations

import pytest

from dpbench.records.gpu_names import same_gpu


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("H100-SXM5-80GB", "NVIDIA H100 80GB HBM3"),
        ("H100-PCIe-80GB", "NVIDIA H100 PCIe"),
        ("H100-NVL-94GB", "NVIDIA H100 NVL"),
        ("H200-SXM5-141GB", "NVIDIA H200"),
        ("B200-180GB", "NVIDIA B200"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe"),
        ("A10-24GB", "NVIDIA A10"),
        ("L40-48GB", "NVIDIA L40"),
        ("T4", "Tesla T4"),
        ("T4", "NVIDIA T4"),
        ("V100-SXM2-16GB", "Tesla V100-SXM2-16GB"),
        ("V100-DGXS-32GB", "Tesla V100-DGXS-32GB"),
        ("P100", "Tesla P100-SXM2-16GB"),
        ("RTX 3090", "NVIDIA GeForce RTX 3090"),
        ("RTX 3090", "geforce rtx 3090"),
        ("RTX 3090 Ti", "NVIDIA GeForce RTX 3090 Ti"),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation"),
        ("RTX A6000", "NVIDIA RTX A6000"),
        ("Quadro RTX 6000", "Quadro RTX 6000"),
        ("TITAN RTX", "NVIDIA TITAN RTX"),
        ("MI300X-192GB", "AMD Instinct MI300X"),
    ],
)
def test_names_of_the_same_gpu(one: str, other: str) -> None:
    assert same_gpu(one, other)
    assert same_gpu(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("RTX 3090", "NVIDIA GeForce RTX 3090 Ti"),
        ("RTX 6000 Ada", "Quadro RTX 6000"),
        ("RTX A6000", "NVIDIA RTX 6000 Ada Generation"),
        ("H100-SXM5-80GB", "NVIDIA H100 PCIe"),
        ("H100-SXM5-80GB", "NVIDIA H100 NVL"),
        ("H100-SXM5-80GB", "NVIDIA H200"),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB"),
        ("A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
        ("V100-SXM2-32GB", "Tesla V100-SXM2-16GB"),
        ("V100-SXM2-32GB", "Tesla V100-DGXS-32GB"),
        ("A10-24GB", "NVIDIA A100-SXM4-40GB"),
        ("A10-24GB", "NVIDIA A10G"),
        ("L40-48GB", "NVIDIA L40S"),
        ("L4-24GB", "NVIDIA L40"),
        ("T4", "NVIDIA T400"),
        ("RTX 3090", ""),
    ],
)
def test_names_of_different_gpus(one: str, other: str) -> None:
    assert not same_gpu(one, other)
    assert not same_gpu(other, one)
