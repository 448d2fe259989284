"""Measured profiles: lines that are fitted to known times, phases and ops of a real model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dpbench import models
from dpbench.predict.measured import fit_cost, measure, of_trials, op_seconds
from dpbench.records import Case, Phase, Span, Step, Trial

CASE = Case(model="mlp", strategy="single", batch_size=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_line_is_found_again() -> None:
    cost = fit_cost([8, 16, 64], [1.08, 1.16, 1.64])
    assert cost.fixed_s == pytest.approx(1.0)
    assert cost.sample_s == pytest.approx(0.01)


def test_seconds_are_never_negative() -> None:
    falling = fit_cost([8, 16], [2.0, 1.0])
    assert falling.sample_s == 0
    assert 1 < falling.fixed_s < 2
    steep = fit_cost([8, 16], [1.0, 4.0])
    assert steep.fixed_s == 0
    assert fit_cost([8], [0.0]).at(100) == 0


def test_distances_count_relative_to_the_time() -> None:
    """A small batch that is 10 % off must not be outweighed by a large one that is not."""
    cost = fit_cost([1, 1000], [1e-3, 1.0])
    assert cost.at(1) == pytest.approx(1e-3, rel=1e-6)


def test_phases_and_ops_of_a_model_are_measured() -> None:
    found = measure(CASE, (64, 128, 256))
    assert found.profile.source == "measured"
    assert found.profile.modules == 5
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
        assert all(seconds[phase] > 0 for seconds in found.phases.values()), phase
    products = {op.phase: op for op in found.ops if op.name in ("aten::addmm", "aten::mm")}
    assert products[Phase.FORWARD].count == 3
    assert products[Phase.FORWARD].host.at(256) > 0
    assert products[Phase.FORWARD].kernel.at(256) == 0, "the host has no kernels of its own"
    assert {op.phase for op in found.ops} >= {Phase.SCATTER, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER}


def test_each_op_counts_itself_alone() -> None:
    """Ops that call others would otherwise be counted twice: the ops of forward fit into its profiled time."""
    ops = op_seconds(Case(model="resnet18", strategy="single", batch_size=16))
    by_name = {(op.phase, op.name): op for op in ops}
    outer, inner = by_name[Phase.FORWARD, "aten::conv2d"], by_name[Phase.FORWARD, "aten::mkldnn_convolution"]
    assert outer.count == inner.count == 20
    assert outer.host_s < 0.5 * inner.host_s


def test_one_batch_size_is_no_line() -> None:
    with pytest.raises(ValueError, match="two batch sizes"):
        measure(CASE, (8, 8))


def stored(rows: int, forward_s: float, backward_s: float) -> Trial:
    """Return a trial of three steps, the first of them warm-up and ten times slower."""
    steps, spans, now = [], [], 100.0
    for i in range(3):
        slow = 10.0 if i == 0 else 1.0
        middle, end = now + slow * forward_s, now + slow * (forward_s + backward_s)
        spans += [Span(i, Phase.FORWARD, 0, "host", now, middle), Span(i, Phase.BACKWARD, 0, "host", middle, end)]
        steps.append(Step(end - now, i == 0, end))
        now = end
    case = Case(model="mlp", strategy="single", batch_size=rows)
    return Trial(case=case, steps=tuple(steps), spans=tuple(spans))


def test_stored_trials_make_a_profile() -> None:
    counted = models.profile(models.load("mlp", "small", 0))
    found = of_trials(counted, [stored(8, 0.3, 0.5), stored(16, 0.4, 0.9)])
    assert found.profile.forward is not None
    assert found.profile.backward is not None
    assert found.profile.forward.at(16) == pytest.approx(0.4)
    assert found.profile.backward.at(8) == pytest.approx(0.5)
    assert found.residual == pytest.approx(0.0, abs=1e-9)


@pytest.mark.gpu
def test_kernels_are_told_from_the_host() -> None:
    found = measure(Case(model="resnet18", strategy="single", batch_size=8, device_kind="cuda"), (32, 64, 128))
    forward = [op for op in found.ops if op.phase is Phase.FORWARD]
    assert sum(op.kernel.at(128) for op in forward) > 0
    assert sum(op.host.at(128) for op in forward) > 0
