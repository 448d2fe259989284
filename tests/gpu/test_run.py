"""Whole commands on GPUs: a run over every strategy with its page, and a watched script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
import torch

import dpbench
from dpbench.records import HOST, Status, Trial, Verified
from dpbench.records.series import BUFFERED
from tests import commands

pytestmark = pytest.mark.multi_gpu

COUNTS = [count for count in (1, 2, 4) if count <= torch.cuda.device_count()]
STRATEGIES = ("single", "dp", "torch_dp", "ddp")
RUN = ("--models", "mlp", "--strategies", ",".join(STRATEGIES), "--rounds", "1", "--quiet")
COUNTERS = ("utilization_ratio", "power_w", "kernel_busy_s")
OF_MANY_GPUS = ("energy_j", BUFFERED)
"""Counters that older GPUs lack, and fake ones have."""
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rows = TensorDataset(torch.randn(160, 12), torch.randint(5, (160,)))
layers = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 5))
net = nn.DataParallel(layers.cuda(), [0, 1])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for inputs, target in DataLoader(rows, batch_size=8):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(inputs.cuda()), target.cuda()).backward()
    optimizer.step()
"""


def is_fake() -> bool:
    return torch.cuda.get_device_name().startswith("Fake")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[commands.Folder]:
    """The folder of a run over the strategies, with its store and its page."""
    with commands.folder(tmp_path_factory.mktemp("run")) as folder:
        devices = ",".join(map(str, COUNTS))
        done = folder.do("run", *RUN, "--devices", devices, "--report", "page.html")
        assert done.returncode == 0, done.stderr
        yield folder


@pytest.fixture(scope="module")
def trials(folder: commands.Folder) -> list[Trial]:
    return list(dpbench.load(folder.store).trials)


@pytest.fixture(scope="module")
def page(folder: commands.Folder) -> dict[str, str]:
    """The texts of the page's sections, by name."""
    text = (folder.path / "page.html").read_text(encoding="utf-8")
    found = re.findall(r'<section id="([\w-]+)"[^>]*>(.*?)</section>', text, re.DOTALL)
    return {name: unescape(re.sub(r"<[^>]+>", " ", section)) for name, section in found}


def test_every_strategy_on_every_number_of_gpus_is_verified(trials: list[Trial]) -> None:
    cases = {(trial.case.strategy, trial.case.devices) for trial in trials}
    assert cases == {
        (strategy, count)
        for strategy in STRATEGIES
        for count in COUNTS
        if strategy != "single" or count == 1
    }
    for trial in trials:
        assert trial.status is Status.OK, trial.reason
        assert trial.verified in (Verified.BITWISE, Verified.WITHIN_TOLERANCE)


def test_a_trial_has_lanes_counters_and_memory_of_each_of_its_gpus(trials: list[Trial]) -> None:
    for trial in trials:
        gpus = set(range(trial.case.devices))
        assert {span.device for span in trial.spans} - {HOST} == gpus
        for metric in (*COUNTERS, *(OF_MANY_GPUS if is_fake() else ())):
            found = {s.device for s in trial.samples if s.metric == metric}
            withheld = metric == "kernel_busy_s" and "no_profile" in trial.provenance
            assert found == gpus or withheld, metric
        held = {m.device for m in trial.memory if m.source == "allocator" and m.peak_bytes > 0}
        assert held == gpus


def test_the_page_draws_every_gpu(page: dict[str, str]) -> None:
    for count in COUNTS:
        assert f"device {count - 1}: " in page["lanes"]
    assert re.search(r"dp ×2, round 1: [\d.]+% busy", page["utilisation"])
    assert re.search(r"allocator .* MiB .*backward", page["memory-by-phase"])


def test_a_page_says_whether_its_gpus_are_fake(page: dict[str, str]) -> None:
    for name in ("answers", "cases"):
        assert ("FAKE-GPU" in page[name]) == is_fake(), name


@pytest.mark.slow
def test_a_run_on_one_gpu_ends_in_a_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake GPU that computes no values keeps time, and has the name of a known GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    if is_fake():
        monkeypatch.setenv("FAKECUDA_NAME", "NVIDIA H200")
        monkeypatch.setenv("FAKECUDA_NUMERICS", "0")
        monkeypatch.setenv("FAKECUDA_DATA", "0")
        monkeypatch.setenv("FAKECUDA_MEMORY", "64G")
    with commands.folder(tmp_path) as folder:
        done = folder.do("run", "--unverified", "--rounds", "1", timeout_s=180)
        assert done.returncode == 0, done.stderr
        answers = dpbench.load(folder.store).analysis.answers
    assert {answer.home.model for answer in answers} == {"resnet18", "transformer"}
    for answer in answers:
        assert "PREDICTED" in answer.labels
        assert "2, 4, 8 of" in answer.headline
        assert len(answer.compared) == 1, "one colocated dp beside single"


def test_a_watched_script_has_lanes_of_both_gpus(tmp_path: Path) -> None:
    with commands.folder(tmp_path) as folder:
        (tmp_path / "train.py").write_text(SCRIPT)
        done = folder.do("watch", "train.py")
        assert done.returncode == 0, done.stderr
        (trial, *_) = dpbench.load(folder.store).trials
    assert trial.status is Status.OK, trial.reason
    assert trial.case.devices == 2
    assert {span.device for span in trial.spans} - {HOST} == {0, 1}
