"""Traces: work, parameters and kernels against torch's counter, the module and hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpbench import models
from dpbench.models import Model
from dpbench.predict.profiles import UPDATES, Speed, optimizer_s, phase_s, profile
from dpbench.predict.trace import Trace, trace
from dpbench.records import Phase, registry
from dpbench.records.arguments import call
from dpbench.strategies import OPTIMIZERS

ROWS = 6
every_model = pytest.mark.parametrize("name", registry.names("models"))


def of(name: str, rows: int = ROWS, optimizer: str = "sgd") -> Trace:
    return trace(lambda: models.load(name, "small", 0), rows, OPTIMIZERS[optimizer])


def own(module: nn.Module, features: int, rows: int = ROWS) -> Trace:
    def batch(n: int, seed: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(n, features), torch.zeros(n, dtype=torch.int64)

    return trace(lambda: Model("own", module, batch, F.cross_entropy), rows, OPTIMIZERS["sgd"])


@every_model
def test_flop_are_those_of_torchs_counter(name: str) -> None:
    traced, model = of(name), models.load(name, "small", 0)
    inputs, target = model.batch(ROWS, 0)
    with FlopCounterMode(display=False) as forward:
        output = call(model.module, inputs)
    with FlopCounterMode(display=False) as rest:
        model.loss(output, target).backward()
    for counter, phases in ((forward, (Phase.FORWARD,)), (rest, (Phase.LOSS, Phase.BACKWARD))):
        assert sum(op.flop for op in traced.during(*phases)) == counter.get_total_flops()


@every_model
def test_parameters_are_the_modules(name: str) -> None:
    traced, module = of(name), models.load(name, "small", 0).module
    assert traced.parameter_bytes == tuple(p.nbytes for p in module.parameters())
    assert traced.buffer_bytes == tuple(b.nbytes for b in module.buffers())
    assert traced.modules == len(list(module.modules()))
    assert sorted(traced.ready) == list(range(len(traced.parameter_bytes)))
    assert list(traced.ready_at) == sorted(traced.ready_at)


def test_gradients_are_ready_from_the_last_layer_to_the_first() -> None:
    traced = of("mlp")
    layers = [n // 2 for n in traced.ready]
    assert layers == sorted(layers, reverse=True)


def test_kernels_of_known_nets_are_counted() -> None:
    """Linear-ReLU-Linear: addmm, relu, addmm.

    Backward two products and a sum a layer (but one product), and relu's.
    """
    traced = own(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 4)
    names = [op.name for op in traced.forward if op.bytes]
    assert names == ["aten.addmm", "aten.relu", "aten.addmm"]
    backward = [op.name for op in traced.backward if op.bytes]
    assert sorted(backward) == sorted(
        ["aten.mm"] * 3 + ["aten.sum"] * 2 + ["aten.threshold_backward"]
    )


def test_bytes_count_what_is_read_and_written_once() -> None:
    traced = own(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3, bias=False)), 4)
    by_name = {op.name: op.bytes for op in traced.forward if op.bytes}
    x, y = ROWS * 4 * 4, ROWS * 3 * 4
    assert by_name == {"aten.relu_": 2 * x, "aten.mm": x + 4 * 3 * 4 + y}


def test_batch_norm_goes_over_its_input_twice() -> None:
    rows = 1000
    traced = own(nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)), 4, rows)
    (norm,) = [op for op in traced.forward if op.name == "aten.native_batch_norm"]
    x = rows * 4 * 4
    assert 3 * x <= norm.bytes < 3 * x + 20 * 4 * 4


def test_what_forward_leaves_is_saved() -> None:
    """The first layer's output is freed.

    Relu's is kept for the second layer, and the output is there.
    """
    traced = own(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), 4)
    saved_bytes = sum(event.size_bytes for op in traced.forward for event in op.events)
    assert saved_bytes == ROWS * (8 + 3) * 4


@pytest.mark.parametrize("name", ["mlp", "resnet18", "transformer"])
def test_a_step_leaves_gradients_the_loss_and_nothing_else(name: str) -> None:
    traced = of(name, optimizer="adam")
    left = sum(event.size_bytes for op in traced.ops for event in op.events)
    assert left == sum(traced.parameter_bytes) + sum(traced.output_bytes) + 4
    made = sum(event.size_bytes for op in traced.optimizer_first for event in op.events)
    assert made == 2 * sum(traced.parameter_bytes), (
        "Adam's two averages; its counters are the host's"
    )


def test_shapes_that_depend_on_numbers_are_traced_on_real_ones() -> None:
    traced = of("lstm")
    assert not traced.fake
    assert of("mlp").fake


@pytest.mark.slow
def test_large_models_are_traced_without_their_memory() -> None:
    traced = trace(lambda: models.load("transformer", "full", 0), 64, OPTIMIZERS["adam"])
    assert sum(traced.parameter_bytes) == 4 * 109_659_112
    assert traced.fake


def test_tied_weights_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x))
            return y

    traced = own(Tied(), 4)
    assert traced.parameter_bytes == (64,)
    assert len(traced.ready) == 1


SPEED = Speed(flop_per_s=1e13, bytes_per_s=1e12)


def test_the_roofline_is_its_longest_part() -> None:
    assert SPEED.seconds(0, 0) == 0
    assert SPEED.seconds(0, 100) == SPEED.least_s
    assert SPEED.seconds(0, 1e9) == pytest.approx(1e9 / 0.92e12, rel=0.01)
    assert SPEED.seconds(1e12, 1e6) == pytest.approx(1e12 / 0.85e13, rel=0.01)
    assert SPEED.seconds(SPEED.half_flop, 8) == pytest.approx(
        2 * SPEED.half_flop / (0.85 * 1e13)
    ), "half the rate"


def test_optimizers_are_counted_by_their_multi_tensor_kernels() -> None:
    seconds, launches = optimizer_s("SGD", [4_000_000] * 10, replace(SPEED, half_bytes=0.0))
    assert launches == 3
    assert seconds == pytest.approx(8 * 40e6 / 0.92e12), (
        "SGD with momentum goes over 8 sizes of the parameters"
    )
    assert optimizer_s("Adam", [40] * 800, SPEED)[1] == 6 * 2 + 3
    with pytest.raises(LookupError, match="Muon"):
        optimizer_s("Muon", [4], SPEED)


def test_the_analytic_optimizer_moves_what_torchs_does() -> None:
    """The host's ops, per parameter, move as many bytes as the multi-tensor kernels counted."""
    for key, name in (("sgd", "SGD"), ("adam", "Adam")):
        traced = of("mlp", optimizer=key)
        moved = sum(op.bytes for op in traced.optimizer)
        counted = sum(one.passes for one in UPDATES[name]) * sum(traced.parameter_bytes)
        assert counted == pytest.approx(moved, rel=0.02)


@pytest.mark.slow
def test_a_traced_profile_is_linear_in_the_batch() -> None:
    traces = {rows: of("resnet18", rows) for rows in (8, 16, 32)}
    found = profile(traces[8], traces[32], SPEED)
    assert found.source == "traced"
    assert found.gradient_bytes[0] == traces[8].parameter_bytes[traces[8].ready[0]]
    assert sum(found.gradient_bytes) == found.parameter_bytes
    assert found.forward is not None
    assert found.forward.at(16) == pytest.approx(
        phase_s(traces[16], Phase.FORWARD, SPEED), rel=0.05
    )
    with pytest.raises(ValueError, match="two batch sizes"):
        profile(traces[8], traces[8], SPEED)
