"""The laws of all models, whatever files there are, and the particular points of single ones."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpbench import models
from dpbench.models import lstm, resnet18, vgg16
from dpbench.predict import counts
from dpbench.records import registry
from dpbench.records.arguments import arguments_of

NAMES = registry.names("models")
COUNTS = {
    # model: small, full
    "embedding": (1_836_138, 128_129_000),
    "lstm": (131_210, 48_538_600),
    "mlp": (67_210, 71_218_152),
    "resnet18": (176_402, 11_689_512),
    "transformer": (166_794, 109_659_112),
    "vgg16": (2_706_610, 138_357_544),
}

every_model = pytest.mark.parametrize("name", NAMES)
every_size = pytest.mark.parametrize("size", models.SIZES)


def on_meta(name: str, size: str) -> nn.Module:
    """Build a model of shapes only: the full ones would fill gigabytes."""
    with torch.device("meta"):
        module: nn.Module = registry.load("models", name).build(size)
    return module


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def tensors(batch: tuple[Any, Any]) -> list[Tensor]:
    inputs, target = batch
    return [*arguments_of(inputs)[0], target]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        (name, size, n)
        for name, pair in COUNTS.items()
        for size, n in zip(models.SIZES, pair, strict=True)
    ],
)
def test_parameter_counts_are_exact(name, size, expected):
    assert count(on_meta(name, size)) == expected


@every_model
@every_size
def test_build_says_its_exact_parameter_count(name, size):
    said = registry.load("models", name).build.__doc__
    assert f"{count(on_meta(name, size)):,}" in said


@every_model
def test_small_is_smaller_than_full_and_made_of_the_same_kinds_of_layers(name):
    small, full = on_meta(name, "small"), on_meta(name, "full")
    assert count(small) * 10 < count(full)
    kinds = [
        {type(m) for m in module.modules() if list(m.parameters(recurse=False))}
        for module in (small, full)
    ]
    assert kinds[0] == kinds[1]


@every_model
@every_size
def test_no_dropout_anywhere(name, size):
    for path, module in on_meta(name, size).named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            assert module.p == 0, path
        assert not getattr(module, "dropout", 0.0) or isinstance(module.dropout, nn.Module), path


# ------------------------------------------------------------------ seeds


@every_model
def test_same_seed_same_weights_other_seed_other_weights(name):
    first, same, other = (
        list(models.load(name, "small", s).module.state_dict().values()) for s in (3, 3, 4)
    )
    assert equal(first, same)
    assert not equal(first, other)


@every_model
def test_same_seed_same_batch_other_seed_other_batch(name):
    model = models.load(name, "small", 0)
    first, same, other = (tensors(model.batch(5, seed)) for seed in (3, 3, 4))
    assert equal(first, same)
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[-1], other[-1])


@every_model
@every_size
def test_every_tensor_of_a_batch_has_a_row_for_each_sample(name, size):
    plug = registry.load("models", name)
    assert {t.size(0) for n in (1, 3) for t in tensors(plug.batch(n, 0, size))} == {1, 3}


@every_model
def test_building_and_drawing_leave_the_global_generator_alone(name):
    before = torch.get_rng_state()
    models.load(name, "small", 5).batch(2, 6)
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------ steps


@every_model
def test_one_step_gives_every_parameter_a_finite_gradient_and_moves_it(name):
    model = models.load(name, "small", 0)
    inputs, target = model.batch(8, 0)
    before = copy.deepcopy(model.module.state_dict())
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    loss = model.loss(model.module(*arguments_of(inputs)[0]), target)
    loss.backward()
    optimizer.step()
    assert loss.dim() == 0
    assert torch.isfinite(loss)
    for path, parameter in model.module.named_parameters():
        assert parameter.grad is not None, path
        assert torch.isfinite(parameter.grad).all(), path
        assert parameter.grad.any(), path
        assert not torch.equal(parameter, before[path]), path


@every_model
def test_training_forward_draws_no_random_numbers(name):
    model = models.load(name, "small", 0)
    inputs, _ = model.batch(4, 0)
    before = torch.get_rng_state()
    first, second = (model.module(*arguments_of(inputs)[0]) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)


@every_model
def test_summed_loss_over_rows_is_the_mean_loss(name):
    model = models.load(name, "small", 0)
    inputs, target = model.batch(7, 0)
    output = model.module(*arguments_of(inputs)[0]).detach()
    total, mean = (
        model.loss(output, target, reduction="sum"),
        model.loss(output, target, reduction="mean"),
    )
    torch.testing.assert_close(total / 7, mean, rtol=1e-5, atol=0)
    assert torch.equal(model.loss(output, target), mean)


@every_model
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_outputs_of_chunks_join_to_the_output_of_the_batch(name, parts, grad):
    model = models.load(name, "small", 0)
    module = model.module.eval()
    inputs = arguments_of(model.batch(7, 0)[0])[0]
    chunks = zip(*(t.chunk(parts) for t in inputs), strict=True)
    with torch.set_grad_enabled(grad):
        whole = module(*inputs)
        joined = torch.cat([copy.deepcopy(module)(*(t.clone() for t in chunk)) for chunk in chunks])
    assert joined.size(0) == 7
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)


@every_model
def test_full_size_maps_a_batch_to_a_row_for_each_sample(name):
    module, (inputs, target) = (
        on_meta(name, "full"),
        registry.load("models", name).batch(2, 0, "full"),
    )
    try:
        output = module(*(t.to("meta") for t in arguments_of(inputs)[0]))
    except NotImplementedError as error:
        pytest.skip(f"reads the values of its inputs, which a meta tensor has not: {error}")
    assert output.shape == (2, 1000)
    assert registry.load("models", name).loss(output, target.to("meta")).dim() == 0


@every_model
def test_profile_counts_bytes_and_flop(name):
    model = models.load(name, "small", 0)
    profile = counts.in_step(model)
    assert profile.model == name
    assert profile.parameter_tensors == len(list(model.module.parameters()))
    assert profile.parameter_bytes == 4 * count(model.module)
    assert profile.buffer_bytes == sum(b.nbytes for b in model.module.buffers())
    assert profile.input_bytes * 2 == sum(t.nbytes for t in arguments_of(model.batch(2, 0)[0])[0])
    assert profile.output_bytes > 0
    assert 0 < profile.forward_flop <= profile.backward_flop <= 2 * profile.forward_flop
    assert all(p.grad is None for p in model.module.parameters())


# ------------------------------------------------------------------ single models


def test_lstm_states_of_all_chunks_are_as_wide_as_the_batch():
    model = models.load("lstm", "small", 0)
    (tokens, lengths), _ = model.batch(7, 0)
    chunks = list(zip(tokens.chunk(2), lengths.chunk(2), strict=True))
    widths = [model.module.states(*chunk).size(1) for chunk in chunks]
    assert widths == [tokens.size(1)] * 2


def test_lstm_states_of_chunks_could_not_be_gathered_without_total_length(monkeypatch):
    def forgetful(packed, batch_first, total_length):
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=batch_first)

    monkeypatch.setattr(lstm, "pad_packed_sequence", forgetful)
    model = models.load("lstm", "small", 0)
    (tokens, lengths), _ = model.batch(7, 0)
    chunks = list(zip(tokens.chunk(2), lengths.chunk(2), strict=True))
    states = [model.module.states(*chunk) for chunk in chunks]
    assert [s.size(1) for s in states] == [int(length.max()) for _, length in chunks]
    assert states[0].size(1) != states[1].size(1)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat(states)


def test_lstm_ignores_what_stands_in_the_padding():
    model = models.load("lstm", "small", 0)
    (tokens, lengths), _ = model.batch(7, 0)
    padding = torch.arange(tokens.size(1)) >= lengths.unsqueeze(1)
    assert padding.any()
    assert not tokens[padding].any()
    assert not model.module.states(tokens, lengths)[padding].any()
    filled = tokens.masked_fill(padding, 1)
    assert torch.equal(model.module(filled, lengths), model.module(tokens, lengths))


@pytest.mark.parametrize("n", [1, 2, 7, 64, 1000])
def test_lstm_batches_of_all_seeds_hold_the_same_number_of_steps(n):
    longest = lstm.DIMS["small"].tokens
    first, second = (lstm.batch(n, seed, "small")[0][1] for seed in (0, 1))
    assert first.sum() == second.sum()
    assert 1 <= first.min() <= first.max() <= longest
    assert abs(first.float().mean() - longest / 2) <= 1


@every_size
def test_vgg16_keeps_most_parameters_in_its_head(size):
    module = on_meta("vgg16", size)
    assert isinstance(module, vgg16.VGG16)
    assert count(module.head) > 0.8 * count(module)


@every_size
def test_resnet18_has_the_eighteen_layers(size):
    module = on_meta("resnet18", size)
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    assert [m.kernel_size[0] for m in convolutions].count(3) == (16 if size == "full" else 17)
    assert [m.kernel_size[0] for m in convolutions].count(1) == 3  # the projection shortcuts
    assert len([m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]) == 20
    assert isinstance(module, resnet18.ResNet18)
    assert any(isinstance(m, nn.MaxPool2d) for m in module.modules()) == (size == "full")


def test_embedding_reduces_dense_gradients():
    model = models.load("embedding", "small", 0)
    inputs, target = model.batch(2, 0)
    model.loss(model.module(inputs), target).backward()
    assert not model.module.table.weight.grad.is_sparse


# ------------------------------------------------------------------ the door

OWN = """
import torch
from torch import nn

class Halves:
    @staticmethod
    def build(size):
        return nn.Linear(3, {"small": 2, "full": 20}[size])
    @staticmethod
    def batch(n, seed, size):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, 3, generator=generator), torch.zeros(n, dtype=torch.long)
    @staticmethod
    def loss(output, target, reduction="mean"):
        return nn.functional.cross_entropy(output, target, reduction=reduction)

class Lossless:
    build, batch = Halves.build, Halves.batch

class NoModule(Halves):
    @staticmethod
    def build(size):
        return "a string"
"""


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A user's package `own_pkg` with a module `mod` in the current directory."""
    (tmp_path / "own_pkg").mkdir()
    (tmp_path / "own_pkg" / "mod.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for module in [m for m in sys.modules if m.partition(".")[0] == "own_pkg"]:
        del sys.modules[module]


@pytest.mark.usefixtures("own_package")
def test_a_users_own_model_is_loaded_from_the_current_directory():
    model = models.load("own_pkg.mod:Halves", "full", 0)
    inputs, target = model.batch(4, 0)
    assert model.name == "own_pkg.mod:Halves"
    assert model.module(inputs).shape == (4, 20)
    assert torch.isfinite(model.loss(model.module(inputs), target))
    assert counts.in_step(model).parameter_bytes == 4 * (3 * 20 + 20)


@pytest.mark.usefixtures("own_package")
def test_an_object_that_lacks_a_function_is_refused_by_its_name():
    with pytest.raises(TypeError, match=r"own_pkg\.mod:Lossless.* missing: loss$"):
        models.load("own_pkg.mod:Lossless", "small", 0)


@pytest.mark.usefixtures("own_package")
def test_a_build_that_gives_no_module_is_refused():
    with pytest.raises(
        TypeError, match=r"own_pkg\.mod:NoModule.* must return a torch\.nn\.Module, not str"
    ):
        models.load("own_pkg.mod:NoModule", "small", 0)


def test_an_unknown_name_lists_the_known_ones_and_suggests_the_near_one():
    with pytest.raises(LookupError, match="unknown model 'resnet81'") as error:
        models.load("resnet81", "small", 0)
    assert f"known: {', '.join(NAMES)}" in str(error.value)
    assert str(error.value).endswith("did you mean 'resnet18'?")


def test_a_new_file_is_a_new_model():
    assert set(COUNTS) <= set(NAMES)
    assert isinstance(registry.load("models", NAMES[0]), ModuleType)


# -- the rows of a batch


def drawn(inputs: Any, target: Any) -> models.Model:
    return models.Model(
        "mine:net", nn.Linear(4, 2), lambda n, seed: (inputs, target), nn.functional.cross_entropy
    )


ROWS, OTHER = torch.zeros(8, 4), torch.zeros(16, 4)
NUMBERS = torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("inputs", "target", "told"),
    [
        (OTHER, NUMBERS, "inputs has 16 (shape (16, 4))"),
        (ROWS, torch.zeros(16, dtype=torch.int64), "target has 16 (shape (16,))"),
        ((ROWS, {"mask": [OTHER]}), NUMBERS, "inputs[1]['mask'][0] has 16 (shape (16, 4))"),
        (ROWS, torch.zeros(()), "target has no dimension"),
        (torch.zeros(0, 4), NUMBERS, "inputs has 0 (shape (0, 4))"),
    ],
)
def test_a_batch_of_another_number_of_rows_than_asked_is_refused(
    inputs: Any, target: Any, told: str
) -> None:
    with pytest.raises(ValueError, match="must return 8 rows") as caught:
        drawn(inputs, target).batch(8, 0)
    assert "model mine:net: batch(8, ...)" in str(caught.value)
    assert told in str(caught.value)
    assert "first dimension" in str(caught.value), "the way out"


def test_a_batch_of_as_many_rows_as_asked_is_returned_as_it_was_drawn() -> None:
    inputs = (ROWS, 3, "words", {"mask": [ROWS.bool()], "none": None})
    got = drawn(inputs, NUMBERS).batch(8, 0)
    assert got[0] is inputs
    assert got[1] is NUMBERS
