"""Watching finds the right steps and phases in training loops of installed libraries."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from dpbench.records import UNATTRIBUTED, Phase
from tests.observe.watched_scripts import phases_of, really_watched, run

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net.layer = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
net, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, batches(20), scheduler)
for x, y in loader:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(net(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(
    n_layer=2, n_head=2, n_embd=128, vocab_size=128, n_positions=64,
    bos_token_id=0, eos_token_id=0,
)
rows = [{"input_ids": torch.arange(64), "labels": torch.arange(64)} for _ in range(160)]
arguments = TrainingArguments(
    __file__ + ".out", per_device_train_batch_size=4, gradient_accumulation_steps=2,
    max_steps=20, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
)
net = GPT2LMHeadModel(config)
Trainer(model=net, args=arguments, train_dataset=rows).train()
"""
LIGHTNING = """
import lightning


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 3)
        )

    def training_step(self, batch, at):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, at):
        self.log("validation", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


kept = lightning.pytorch.callbacks.ModelCheckpoint(__file__ + ".out", every_n_train_steps=8)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, callbacks=[kept],
    accumulate_grad_batches=2, gradient_clip_val=1.0, val_check_interval=20,
    enable_progress_bar=False, enable_model_summary=False,
)
net = Module()
trainer.fit(net, batches(40), batches(10))
"""


@pytest.mark.filterwarnings("default")  # of the libraries themselves
@pytest.mark.parametrize(
    ("libraries", "source", "updates", "rows"),
    [
        (("accelerate",), ACCELERATE, 1, 4),
        (("accelerate", "transformers"), TRAINER, 2, 8),
        (("lightning",), LIGHTNING, 2, 8),
    ],
    ids=["accelerate", "transformers", "lightning"],
)
def test_the_loops_of_libraries_are_understood(
    libraries: tuple[str, ...], source: str, updates: int, rows: int, tmp_path: Path
) -> None:
    for library in libraries:
        pytest.importorskip(library)
    source = (
        f"torch.manual_seed(0)\n{source}torch.save([*net.parameters()], __file__ + '.weights')\n"
    )
    # other processes use the cores, too
    found, _ = really_watched(tmp_path, source, time.thread_time)
    weights = torch.load(tmp_path / "train.py.weights", weights_only=False)
    assert run(tmp_path / "train.py") == 0
    alone = torch.load(tmp_path / "train.py.weights", weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(weights, alone, strict=True))
    assert (len(found.steps), found.updates, found.rows, found.loader_workers) == (
        19,
        updates,
        rows,
        0,
    )
    # Lightning calls its callbacks and loggers between the phases, which may take more than 5 % of
    # a step
    own = "in no phase" if "lightning" in libraries else "\n"
    assert not [one for one in found.unknown if own not in one.problem]
    assert (found.evaluation_s > 0, found.checkpoint_s > 0) == ("lightning" in libraries,) * 2
    table = phases_of(found)
    assert {Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.CLIP, Phase.OPTIMIZER} <= {
        *table[-1]
    }
    assert min(row[UNATTRIBUTED] / sum(row.values()) for row in table) < 0.05
