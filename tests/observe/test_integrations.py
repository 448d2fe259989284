"""The callbacks of docs/integrations.md store the steps of a training by each library."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpbench
from dpbench.integrations import needed
from tests.commands import ROOT
from tests.marked import patience

pytestmark = pytest.mark.filterwarnings("default")  # of the libraries themselves
STEPS = 12
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


def code(heading: str, **names: Any) -> dict[str, Any]:
    """Return the names that the code below a heading of the page defines."""
    block = re.search(rf"^## {heading}\n.*?^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert block
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
        def __init__(self, error: type[BaseException] | None = None) -> None:
            super().__init__()
            self.net = nn.Linear(8, 3)
            self.error = error

        def training_step(self, batch: list[torch.Tensor], at: int) -> torch.Tensor:
            if at == 8 and self.error:
                raise self.error
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def test_step(self, batch: list[torch.Tensor], at: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def trainer(callback: object) -> Any:
        return lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )

    data = torch.utils.data.TensorDataset(
        torch.randn(4 * STEPS, 8), torch.zeros(4 * STEPS, dtype=torch.int64)
    )
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    trainer(watched("test.db")).test(Module(), loader)
    assert not Path("test.db").exists(), "a test trains nothing"
    trainer(watched()).fit(Module(), loader)
    assert stored("lightning") in (STEPS - 1, STEPS)
    # Lightning ignores further interrupts, and exits
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    for error, ends, status in (
        (OSError, OSError, "finished"),
        (KeyboardInterrupt, SystemExit, "interrupted"),
    ):
        callback = watched(f"{status}.db", name="cut", script="mine")
        with pytest.raises(ends):
            trainer(callback).fit(Module(error), loader)
        cut = dpbench.load(f"{status}.db", "@cut")
        assert cut.status == status
        assert sum(len(trial.steps) for trial in cut.trials) in (7, 8)
        assert {trial.case.model for trial in cut.trials} == {"mine"}


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_missing_library_is_named_with_the_way_to_install_it(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"dpbench.integrations.{library}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'torch-dpbench\[{library}\]'"):
        importlib.import_module(f"dpbench.integrations.{library}")


def test_a_package_that_a_library_lacks_keeps_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'nowhere'"), needed("lightning"):
        importlib.import_module("nowhere")


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


@pytest.mark.slow
def test_a_model_of_a_notebook_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cloudpickle", reason="pip install '.[notebook]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPBENCH_PATIENCE", "0")
    names = code("A notebook's own model", __name__="__main__")
    run = names["run"]
    assert {(trial.case.model, trial.status.value) for trial in run.trials} == {
        ("__main__:Net", "ok")
    }
    assert {trial.case.strategy for trial in run.trials} == {"single", "dp", "ddp"}


LAUNCHED = """
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2
data = TensorDataset(torch.randn(256, 8), torch.zeros(256, dtype=torch.int64))
net = nn.Linear(8, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(data, batch_size=4))
for inputs, target in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(net(inputs), target))
    optimizer.step()
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "module"),
    [
        # without GPUs, accelerate launches several processes only if it is told that there are some
        ("accelerate launch", ["accelerate.commands.launch", "--multi_gpu"]),
        ("torchrun", ["torch.distributed.run", "--standalone"]),
    ],
    ids=["accelerate", "torchrun"],
)
def test_the_ranks_of_a_launched_script_are_one_run(
    command: str, module: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate", reason="pip install '.[transformers]'")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(LAUNCHED)
    [arguments] = re.findall(rf"^{command} (.*)", PAGE, re.M)
    subprocess.run(
        [sys.executable, "-m", *module, *arguments.split()],
        check=True,
        timeout=patience(120),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    run = dpbench.load("dpbench.db")
    assert {(trial.case.devices, trial.case.batch_size) for trial in run.trials} == {(2, 8)}
    assert sum(len(trial.steps) for trial in run.trials) in (31, 32)
