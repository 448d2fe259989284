"""A result of `dpbench doctor`, made by hand: a slow pair of three GPUs."""

from __future__ import annotations

from dpbench.doctor.examination import Examination, Finding, MadeCopy
from dpbench.records.boxes import Box, Link

EXAMINATION = Examination(
    started_s=1.7e9,
    labels=("MEASURED",),
    findings=(
        Finding(
            name="slow pair",
            says="GPU 0 -> GPU 2 direct: 2 GB/s",
            evidence="NVML",
            change="leave GPU 2 out",
            gpus=(0, 2),
        ),
        Finding(name="MIG", says="GPU 1 is divided (MIG)", evidence="NVML", wrong=False),
    ),
    checked=("copies",),
    unchecked=(),
    gpus=({"name": "A100", "pcie_width": 16},) * 3,
    software={"torch": "2.13.0"},
    copies=(
        MadeCopy(
            source=0,
            target=2,
            way="direct",
            bytes_per_s=2e9,
            promised_bytes_per_s=20e9,
            wrong=0,
            failure="",
        ),
    ),
    all_reduce_bytes_per_s=None,
    boxes=tuple(Box(id=f"GPU {i}", row=2, column=i, texts=(f"GPU {i}",)) for i in range(3)),
    links=(Link(ends=("GPU 0", "GPU 2"), share=0.1),),
)
