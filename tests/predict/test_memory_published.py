"""Memory on GPUs: operators that keep other tensors there, and published figures."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpbench.predict.memory import needed, traces_of
from dpbench.predict.trace import Trace
from dpbench.records import Case

ROWS, TOKENS, WIDTH = 4, 32, 64
FIGURES = Path(__file__).parents[2] / "reports" / "public-figures" / "memory.csv"


class Layer(nn.Module):
    """Attention and dropout of one head, which may be checkpointed."""

    def __init__(self, *, checkpointed: bool = False, attends: bool = False) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.checkpointed, self.attends = checkpointed, attends

    def _inner(self, x: Tensor) -> Tensor:
        x = self.linear(self.norm(x))
        if self.attends:
            x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], None, 0.1)[:, 0]
        return F.dropout(x, 0.1, self.training)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)
        return y.mean(1)


class Twice(nn.Module):
    """A linear layer between two normalisations: the second gets 16 bits under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear, self.second = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.LayerNorm(WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.second(self.linear(self.first(x)))
        return normal.mean(1)


def own(build: object) -> SimpleNamespace:
    def batch(n: int, seed: int, size: str) -> tuple[Tensor, Tensor]:
        return torch.zeros(n, TOKENS, WIDTH), torch.zeros(n, dtype=torch.int64)

    return SimpleNamespace(
        build=build,
        batch=batch,
        loss=F.cross_entropy,
        optimizer=lambda held: torch.optim.SGD(held, lr=0.01),
    )


plain = own(lambda size: Layer())
attentive = own(lambda size: Layer(attends=True))
again = own(lambda size: Layer(checkpointed=True))
twice = own(lambda size: Twice())


def traced(name: str, precision: str = "fp32", optimizer: str = "sgd") -> Trace:
    case = Case(
        model=f"{__file__}:{name}",
        strategy="single",
        batch_size=ROWS,
        device_kind="cuda",
        precision=precision,
        optimizer=optimizer,
    )
    return traces_of(case, fake_only=True).of(ROWS)


def taken(trace: Trace) -> list[int]:
    return [event.size_bytes for op in trace.forward for event in op.events if event.size_bytes > 0]


ELEMENTS = ROWS * TOKENS * WIDTH


def test_dropout_keeps_one_byte_per_element() -> None:
    assert taken(traced("plain")).count(ELEMENTS) == 1


def test_fused_attention_with_dropout_keeps_no_matrix_of_tokens() -> None:
    sizes = taken(traced("attentive"))
    assert 4 * ROWS * TOKENS * TOKENS not in sizes
    assert 4 * ROWS * TOKENS in sizes, "one number for each row of the softmax"


def test_autocast_normalises_in_fp32() -> None:
    """The CPU's autocast returns 16 bits from a layer norm of 16 bits; a GPU's returns fp32."""
    norms = [op for op in traced("twice", "bf16").forward if op.name == "aten.native_layer_norm"]
    assert [max(event.size_bytes for event in op.events) for op in norms] == [
        4 * ELEMENTS,
        4 * ELEMENTS,
    ]


def test_a_checkpointed_module_runs_its_forward_again_with_the_same_operators() -> None:
    kept, dropped = traced("plain"), traced("again")
    assert dropped.fake, "the second forward did not match the first"
    held = [
        sum(e.size_bytes for op in trace.forward for e in op.events) for trace in (kept, dropped)
    ]
    assert held[1] < held[0] / 2


def test_the_optimizer_of_the_model_is_traced() -> None:
    trace = traced("plain", optimizer="own")
    assert trace.optimizer_name == "SGD"
    assert not [e for op in trace.optimizer_first for e in op.events if e.size_bytes > 4], (
        "SGD without momentum"
    )


@pytest.mark.slow
def test_published_figures_are_within_a_tenth() -> None:
    """Four figures committed before they were predicted: the allocator's, and a device's total."""
    rows = {
        row["id"]: row for row in csv.DictReader(FIGURES.read_text(encoding="utf-8").splitlines())
    }
    for name in ("MEM-06", "MEM-07", "MEM-33", "MEM-34"):
        row = rows[name]
        case = Case(
            model=f"benchmarks.models.published:{row['model']}",
            strategy=row["strategy"],
            size="full",
            batch_size=int(row["batch_per_gpu"]),
            device_kind="cuda",
            precision=row["precision"],
            optimizer="own",
            zero_grad="zero" if row["gradients"] == "kept" else "none",
        )
        (found,) = needed(case)
        sizes = {
            "allocated": found.peak.allocated_bytes,
            "reserved": found.peak.reserved_bytes,
            "device": found.process_bytes,
        }
        assert sizes[row["quantity"]] / 2**20 == pytest.approx(float(row["value_mib"]), rel=0.1), (
            name
        )


def test_a_rank_of_ddp_has_weights_gradients_buckets_and_momentum() -> None:
    """Weights dominate this model."""
    case = Case(
        model="mlp", strategy="ddp", batch_size=64, devices=2, device_kind="cuda", size="full"
    )
    traces = traces_of(case)
    weights = sum(traces.of(1).parameter_bytes)
    assert 4 * weights < needed(case, traces)[0].peak.allocated_bytes < 4.6 * weights


def test_the_memory_of_fsdp_is_refused() -> None:
    case = Case(model="mlp", strategy="fsdp", batch_size=64, devices=2, device_kind="cuda")
    with pytest.raises(ValueError, match="the memory of the strategy 'fsdp' is not known"):
        needed(case)


def test_adamw_needs_the_memory_of_adam() -> None:
    case = Case(
        model="mlp",
        strategy="single",
        batch_size=64,
        device_kind="cuda",
        optimizer="adam",
        size="full",
    )
    adam, adamw = (needed(replace(case, optimizer=name))[0].peak for name in ("adam", "adamw"))
    assert adamw == adam
