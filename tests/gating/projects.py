"""Projects: small git repositories of users, whose training step a change makes slower."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MODEL = """\
from types import SimpleNamespace

import torch
from torch import nn

REPEATS = 1


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(48, 48)

    def forward(self, inputs):
        for _ in range(REPEATS * 6):
            inputs = torch.tanh(self.layer(inputs))
        return inputs


def build(size="small"):
    return Net()


def batch(rows, seed=0, size="small"):
    return torch.randn(rows, 48), torch.randint(48, (rows,))


net = SimpleNamespace(build=build, batch=batch, loss=nn.functional.cross_entropy)
"""
SCRIPT = """\
import sys

import torch
from model import build, batch, net

torch.set_num_threads(1)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(int(sys.argv[1])):
    inputs, target = batch(32)
    optimizer.zero_grad()
    net.loss(model(inputs), target).backward()
    optimizer.step()
"""
LOADING = """\
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Samples(Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        time.sleep(SECONDS)
        return torch.zeros(8)


model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Samples(), batch_size=1, num_workers=4):
    optimizer.zero_grad()
    model(batch).sum().backward()
    time.sleep(0.05)
    optimizer.step()
"""
"""A script of 50 ms a step, whose loader takes a quarter of SECONDS for a batch."""
TEST = """\
import torch
from model import build, batch, net


def test_step(dpbench_gate):
    torch.set_num_threads(1)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, target = batch(32)

    def step():
        optimizer.zero_grad()
        net.loss(model(inputs), target).backward()
        optimizer.step()

    dpbench_gate(step, budget=BUDGET)
"""
BUDGET_S = 200
"""The most seconds of a gate in a test: other tests run beside it."""


def git(folder: Path, *arguments: str) -> str:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    who = [word for name in ("name", "email") for word in ("-c", f"user.{name}=dpbench@test")]
    done = subprocess.run(
        ["git", *who, "-c", "protocol.file.allow=always", *arguments],
        cwd=folder,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def commit(folder: Path, files: dict[str, str], tag: str = "") -> None:
    """Write files and commit all changes; the commit gets a tag."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--message", tag or "change")
    if tag:
        git(folder, "tag", tag)


def project(folder: Path) -> Path:
    """Return a project with the tag `base`, a model, a script and a test."""
    folder.mkdir(exist_ok=True)
    git(folder, "init", "--initial-branch", "main")
    commit(
        folder,
        {
            "model.py": MODEL,
            "train.py": SCRIPT,
            "test_step.py": TEST.replace("BUDGET", str(BUDGET_S)),
            ".gitignore": "data/\n__pycache__/\n",
        },
        tag="base",
    )
    return folder


def slow_down(folder: Path, times: int) -> None:
    """Change the model so that its layers work several times; commit nothing."""
    (folder / "model.py").write_text(MODEL.replace("REPEATS = 1", f"REPEATS = {times}"))
