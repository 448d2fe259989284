"""The callbacks in docs/integrations.md store the steps of a training by each library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpbench
from tests.commands import ROOT

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries themselves
STEPS = 12


def code(heading: str) -> dict[str, Any]:
    """Return the names that the code below a heading of the page defines."""
    text = (ROOT / "docs" / "integrations.md").read_text()
    block = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```", text, re.M | re.S)
    assert block
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


def stored(model: str) -> int:
    """Return the number of steps of the only run, which has this name of a model.

    The first step may be cut: it began before the watching.
    """
    run = dpbench.load("dpbench.db")
    assert {trial.case.model for trial in run.trials} == {model}
    return sum(len(trial.steps) for trial in run.trials)


@pytest.mark.slow
def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    monkeypatch.chdir(tmp_path)
    watched = code("Hugging Face Trainer")["Watched"]
    config = transformers.GPT2Config(
        n_layer=1,
        n_head=2,
        n_embd=32,
        vocab_size=64,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    rows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4 * STEPS
    arguments = transformers.TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        max_steps=STEPS,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    net = transformers.GPT2LMHeadModel(config)
    transformers.Trainer(
        model=net, args=arguments, train_dataset=rows, callbacks=[watched()]
    ).train()
    assert stored("trainer") in (STEPS - 1, STEPS)


@pytest.mark.slow
def test_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lightning = pytest.importorskip("lightning", reason="pip install '.[lightning]'")
    monkeypatch.chdir(tmp_path)
    watched = code("Lightning")["Watched"]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3)

        def training_step(self, batch: list[torch.Tensor], at: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.TensorDataset(
        torch.randn(4 * STEPS, 8), torch.zeros(4 * STEPS, dtype=torch.int64)
    )
    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watched()],
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))
    assert stored("lightning") in (STEPS - 1, STEPS)


@pytest.mark.slow
def test_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install '.[transformers]'")
    monkeypatch.chdir(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True)
    net = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(
        torch.randn(4 * STEPS, 8), torch.zeros(4 * STEPS, dtype=torch.int64)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    prepared = accelerator.prepare(net, optimizer, loader)
    code("accelerate")["train"](accelerator, *prepared, nn.functional.cross_entropy)
    assert stored("accelerate") in (STEPS - 1, STEPS)
