"""The suggested prediction is for the GPUs of this machine, or an example where it has none."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from dpbench.predict import machine, suggestion
from dpbench.records import Case
from dpbench.records.resources import Resources

CASE = Case(model="resnet18", strategy="dp", devices=1, batch_size=64)


def suggested(here: Resources) -> str:
    """Return the machine of the suggested command; "" without a command."""
    words = shlex.split(suggestion.command(CASE, here))
    return words[words.index("--machine") + 1] if words else ""


@pytest.mark.parametrize("gpu", ["NVIDIA GeForce RTX 4090", "AMD Instinct MI300X"])
def test_the_suggested_machine_has_the_gpus_that_are_here(gpu: str) -> None:
    found = machine.load(suggested(Resources(gpu_memory_bytes=(2**34,), gpu=gpu)))
    assert found.gpu == replace(machine.load(f"1x {gpu}").gpu, count=8)


@pytest.mark.parametrize(
    "here", [Resources(cores=8), Resources(gpu_memory_bytes=(2**34,), gpu="Fake GPU")]
)
def test_without_a_real_gpu_an_example_is_suggested(here: Resources) -> None:
    assert machine.load(suggested(here)).name == suggestion.EXAMPLE


@pytest.mark.parametrize("gpu", ["AMD Radeon RX 7900 XTX", Resources.gpu])
def test_for_a_gpu_without_a_data_sheet_no_machine_is_suggested(gpu: str) -> None:
    assert not suggested(Resources(gpu_memory_bytes=(2**34,), gpu=gpu))


def test_a_described_machine_is_suggested_by_its_name() -> None:
    assert suggested(Resources(described="mine.toml", gpu_memory_bytes=(2**34,))) == "mine.toml"
