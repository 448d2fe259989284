"""A tiny GPT-2 of transformers with a dict batch, its own loss and dropout.

Use it with --models benchmarks/models/gpt2.py:net.
"""

from types import SimpleNamespace

import torch
from transformers import GPT2Config, GPT2LMHeadModel

config = GPT2Config(
    vocab_size=1000, n_layer=2, n_head=2, n_embd=64, n_positions=64, bos_token_id=0, eos_token_id=0
)


def batch(n: int, seed: int, size: str) -> dict[str, torch.Tensor]:
    """Return token ids of shape (n, 32), which are the labels too."""
    ids = torch.randint(1000, (n, 32), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


net = SimpleNamespace(build=lambda size: GPT2LMHeadModel(config), batch=batch, loss=None)
