"""Users' models: batches and outputs of any structure, own losses, dropout, and mistakes."""

from __future__ import annotations

import random
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor, nn

from dpbench import models, strategies
from dpbench.analysis import summary
from dpbench.cli import cli
from dpbench.engine import gather
from dpbench.hardware.devices import open_devices
from dpbench.measure import checks, reference, verification
from dpbench.measure.failures import of_error
from dpbench.measure.verification import Verification
from dpbench.measure.worker import model_check
from dpbench.models import _own
from dpbench.records import Case, Trial, Verified, plan, registry
from dpbench.records.arguments import call
from dpbench.records.options import Options
from dpbench.strategies import Updates

EXAMPLES = Path(__file__).parents[2] / "benchmarks" / "models"


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that makes a model object known as `mine:net`, and returns this name."""

    def give(build: Any = None, batch: Any = None, loss: Any = F.cross_entropy, **more: Any) -> str:
        made = SimpleNamespace(
            build=build or (lambda size: Net()), batch=batch or rows, loss=loss, **more
        )
        monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(net=made))  # type: ignore[misc]
        return "mine:net"

    return give


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to an empty folder, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.startswith(("user_", "dpbench_outside_")):
            del sys.modules[name]


def rows(n: int, seed: int, size: str) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=generator), torch.randint(4, (n,), generator=generator)


def named_rows(n: int, seed: int, size: str) -> dict[str, Any]:
    features, labels = rows(n, seed, size)
    return {"features": features, "more": {"mask": [torch.ones(n, 16)]}, "labels": labels}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x).relu())


@dataclass
class Answer:
    logits: Tensor
    loss: Tensor | None = None


class Cache:
    """An object that yields its parts, and is built from them, as a cache of transformers."""

    def __init__(self, parts: Any = ()) -> None:
        self.parts = [tuple(pair) for pair in parts]

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return iter(self.parts)


class OwnLoss(Net):
    """A net with keyword inputs, a dict as output, its own loss, every kind of dropout, a cache."""

    def __init__(self, wrap: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.wrap, self.drop = wrap, nn.Dropout(0.2)

    def forward(self, features: Tensor, labels: Tensor, more: Any) -> Any:
        x = F.dropout(self.drop(self.first(features)), 0.3, self.training) * more["mask"][0]
        heads = x.view(len(x), 1, 4, 4)
        x = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2).reshape(len(x), 16)
        logits = self.last(x)
        return self.wrap(F.cross_entropy(logits, labels), logits, x)


WRAPS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a scalar": lambda loss, logits, x: loss,
    "a dict": lambda loss, logits, x: {"loss": loss, "logits": logits, "none": None},
    "a dataclass": lambda loss, logits, x: Answer(logits, loss),
    "a cache": lambda loss, logits, x: {"loss": loss, "cache": Cache([(x, logits), (logits, x)])},
}


def verified(name: str, strategy: str, devices: int, **more: Any) -> Verification:
    """Return the verdict on a step of a strategy with five rows."""
    schedule = "reference" if strategy == "dp" else ""
    case = Case(
        model=name, strategy=strategy, devices=devices, batch_size=5, schedule=schedule, **more
    )
    plug = strategies.load(strategy)
    return verification.check(
        plug.start,
        case,
        models.load(name, "small", 0),
        open_devices("cpu", devices),
        split=plug.split,
    )


# -- structures, own losses, dropout


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2)])
def test_a_dict_batch_with_its_own_loss_and_dropout_of_every_kind_is_verified_bitwise(
    offer: Any, wrap: str, strategy: str, devices: int
) -> None:
    name = offer(lambda size: OwnLoss(WRAPS[wrap]), named_rows, None)
    assert verified(name, strategy, devices).verified is Verified.BITWISE


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_lower_precision_works_for_a_dict_batch(offer: Any, precision: str) -> None:
    name = offer(lambda size: OwnLoss(WRAPS["a dict"]), named_rows, None)
    assert verified(name, "single", 1, precision=precision).verified is not Verified.NO


def test_replicas_that_draw_other_numbers_than_the_reference_are_found(
    offer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = offer(lambda size: nn.Sequential(Net(), nn.Dropout(0.5)))
    assert verified(name, "dp", 2).verified is Verified.BITWISE
    monkeypatch.setattr(verification, "replay", lambda module: True)
    assert verified(name, "dp", 2).verified is Verified.NO


def test_a_forward_that_draws_from_another_generator_is_told_so(offer: Any) -> None:
    class Other(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) * random.random()

    found = verified(offer(lambda size: Other()), "single", 1)
    assert found.verified is Verified.NO
    assert "also differ" in str(found)


def test_the_own_loss_of_replicas_is_their_mean() -> None:
    assert _own.own_loss({"loss": torch.tensor([1.0, 3.0])}, None) == 2
    assert _own.own_loss(Answer(torch.zeros(1), torch.tensor(4.0)), None) == 4
    with pytest.raises(
        TypeError, match="must return its loss, but it returned an object of type Answer"
    ):
        _own.own_loss(Answer(torch.zeros(2)), None)


def test_a_cache_is_gathered_from_its_parts_as_in_torch() -> None:
    parts = [(torch.zeros(2, 3), torch.ones(2, 1))]
    found = gather([Cache(parts), Cache(parts)], "cpu")
    assert isinstance(found, Cache)
    assert [[tuple(one.shape) for one in pair] for pair in found.parts] == [[(4, 3), (4, 1)]]


@pytest.mark.parametrize("outputs", [[1, 1], ["ab", "ab"], [{1}, {1}], [iter([]), iter([])]])
def test_a_value_without_parts_is_not_gathered(outputs: Any) -> None:
    with pytest.raises(TypeError, match="cannot gather the output of type"):
        gather(outputs, "cpu", ["cpu", "cpu"])


def test_caches_of_different_lengths_are_refused() -> None:
    pair = (torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="Cache has length 1 on replica 0, but 2 on replica 1"):
        gather([Cache([pair]), Cache([pair, pair])], "cpu")


class Whole(Net):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        return super().forward(batch["x"])


def whole_rows(*a: Any) -> tuple[Any, Any]:
    return {"x": rows(*a)[0]}, rows(*a)[1]


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2)])
def test_a_dict_in_a_tuple_is_the_argument_itself(offer: Any, strategy: str, devices: int) -> None:
    name = offer(lambda size: Whole(), lambda *a: ((whole_rows(*a)[0],), whole_rows(*a)[1]))
    assert verified(name, strategy, devices).verified is Verified.BITWISE


def test_a_forward_of_the_instance_takes_keyword_arguments(offer: Any) -> None:
    name = offer(lambda size: patched(OwnLoss(WRAPS["a dict"])), named_rows, None)
    model = models.load(name, "small", 0)
    assert call(model.module, model.batch(3, 0)[0])["loss"].isfinite()


# -- the user's loop


def test_the_models_own_optimizer_scheduler_and_clipping_update_the_weights(offer: Any) -> None:
    name = offer(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
    )
    after = {}
    for strategy, devices in (("single", 1), ("dp", 1), ("dp", 2)):
        model = models.load(name, "small", 0)
        start = [one.detach().clone() for one in model.module.parameters()]
        case = Case(
            model=name,
            strategy=strategy,
            devices=devices,
            batch_size=4,
            optimizer="own",
            schedule="reference" if strategy == "dp" else "",
        )
        with strategies.load(strategy).start(
            case, model, open_devices("cpu", devices), lambda *_: _nothing()
        ) as step:
            moved = []
            for _ in range(2):
                step(*model.batch(4, 0))
                now = [one.detach().clone() for one in model.module.parameters()]
                moved.append(
                    sum((a - b).square().sum() for a, b in zip(start, now, strict=True))
                    .sqrt()
                    .item()
                )
                start = now
        assert moved == [
            pytest.approx(0.5, rel=1e-3),
            pytest.approx(0.05, rel=1e-2),
        ], "lr times the clipped norm"
        after[strategy, devices] = now
    for one in after.values():
        torch.testing.assert_close(one, after["single", 1])


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def test_own_without_an_optimizer_says_what_to_add(offer: Any) -> None:
    model = models.load(offer(), "small", 0)
    with pytest.raises(
        LookupError, match=r"no function optimizer\(parameters\): add it to the model.s object"
    ):
        Updates(Case(model="mine:net", strategy="single", batch_size=4, optimizer="own"), model, [])
    with pytest.raises(
        ValueError, match="optimizer='own' takes the optimizer of your model's file"
    ):
        Options(optimizer="own")


def test_an_unverified_case_labels_every_figure() -> None:
    case = Case(model="mlp", strategy="single", batch_size=4, unverified=True)
    assert "UNVERIFIED" in summary.labels(Trial(case=case))
    assert case.label.endswith("unverified")
    assert "--unverified" in Options(unverified=True).command()


# -- mistakes


def checked(name: str, devices: int = 2) -> Trial:
    """Return the trial of the check of a model in this process; its reason is that of a worker."""
    case = plan.model_check(Case(model=name, strategy="", batch_size=6))
    try:
        return model_check.check(Case(**{**case.to_dict(), "devices": devices, "batch_size": 6}))
    except Exception as error:  # as the worker
        found = of_error(error)
        return Trial(case=case, status=found.status, reason=found.reason)


class Odd(Net):
    """A net whose forward does something else."""

    def __init__(self, do: Callable[[Net, Tensor], Any]) -> None:
        super().__init__()
        self.do = do

    def forward(self, x: Tensor) -> Any:
        return self.do(super().forward, x)  # type: ignore[arg-type]


def patched(module: nn.Module) -> nn.Module:
    """Return the module with its forward set on the instance, as some wrappers do."""
    module.forward = types.MethodType(type(module).forward, module)  # type: ignore[method-assign]
    return module


def frozen(size: str) -> nn.Module:
    return Net().requires_grad_(False)


def doubled(n: int, seed: int, size: str) -> Any:
    return rows(n, seed, size)[0], rows(2 * n, seed, size)[1]


def holding(value: Any) -> nn.Module:
    """Return a net with a value, which was computed before its weights."""
    net = Net()
    net.value = value
    return net


def odd(do: Callable[..., Any]) -> dict[str, Any]:
    return {"build": lambda size: Odd(do)}


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "build returns no module": (
        {"build": lambda size: "net"},
        "build('small') must return a torch.nn.Module, not str",
    ),
    "build raises": ({"build": lambda size: {}[size]}, "KeyError: 'small'"),
    "no parameters": (
        {"build": lambda size: nn.Flatten()},
        "build() returned a module without parameters",
    ),
    "all parameters frozen": (
        {"build": frozen},
        "build() returned a module whose parameters all have requires_grad",
    ),
    "huge model": (
        {"build": lambda size: nn.Linear(1 << 20, 1 << 20, device="meta")},
        "build() returned a module that needs at",
    ),
    "batch returns one tensor": (
        {"batch": lambda *a: rows(*a)[0]},
        "must return (inputs, target), or a dict of",
    ),
    "batch returns three values": (
        {"batch": lambda *a: (*rows(*a), 1)},
        "but it returned a tuple of length 3",
    ),
    "rows of inputs and target differ": (
        {"batch": doubled},
        "must return 6 rows, but target has 12",
    ),
    "inputs are an array": (
        {"batch": lambda *a: (rows(*a)[0].numpy(), rows(*a)[1])},
        "returned a ndarray, whose rows cannot be split",
    ),
    "inputs without a tensor": (
        {"batch": lambda *a: (3, rows(*a)[1])},
        "returned contain no tensor",
    ),
    "target on a device": (
        {"batch": lambda *a: (rows(*a)[0], rows(*a)[1].to("meta"))},
        "batch() returned target on meta: return tensors",
    ),
    "inputs require gradients": (
        {"batch": lambda *a: (rows(*a)[0].requires_grad_(), rows(*a)[1])},
        "which requires gradients: detach it",
    ),
    "wrong dtype": (
        {"batch": lambda *a: (rows(*a)[0].double(), rows(*a)[1])},
        "raised in the forward of the module from build() of mine:net: given float64 (2, 8)",
    ),
    "forward raises": (
        odd(lambda forward, x: 1 / 0),
        "ZeroDivisionError: division by zero; raised in the forward",
    ),
    "forward needs CUDA": (
        odd(lambda forward, x: forward(x.cuda())),
        "raised in the forward of the module from build()",
    ),
    "forward changes its inputs": (
        odd(lambda forward, x: forward(x.mul_(2))),
        "forward modifies its inputs in place",
    ),
    "forward returns no tensor": (odd(lambda forward, x: 3), "but an object of type int"),
    "loss is a number": (
        {"loss": lambda out, y: F.cross_entropy(out, y).item()},
        "loss() returned a float: return a",
    ),
    "loss is a vector": (
        {"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")},
        "loss() returned a tensor of shape (2,)",
    ),
    "loss without history": (
        {"loss": lambda out, y: F.cross_entropy(out.detach(), y)},
        "loss() returned a tensor without an autograd",
    ),
    "loss is NaN": (
        {"loss": lambda out, y: out.sum() * float("nan")},
        "loss() returned nan for a batch of 2",
    ),
    "loss of no parameter": (
        {"loss": lambda out, y: out.detach().requires_grad_().sum()},
        "gives no parameter a gradient",
    ),
    "keyword arguments that forward does not have": (
        {"build": lambda size: Whole(), "batch": whole_rows},
        "give a tuple with the dict",
    ),
    "loss raises": ({"loss": F.mse_loss}, "raised in loss() of mine:net: given float32 (2, 4)"),
    "own loss is missing": (
        {"loss": None},
        "must return its loss, but it returned a tensor of shape (2, 4)",
    ),
    "optimizer is no function": ({"optimizer": 3}, "optimizer must be a function"),
    "clip_norm is no number": ({"clip_norm": "1"}, "clip_norm must be a number above 0, got '1'"),
    "build takes no size": (
        {"build": lambda: None},
        "was given; raised in build('small') of mine:net",
    ),
    "batch takes no size": (
        {"batch": lambda n, seed: 0},
        "were given; raised in batch(2, 0, 'small') of mine:net",
    ),
    "lazy layers": (
        {"build": lambda size: nn.LazyLinear(4)},
        "build() returned a module with lazy parameters",
    ),
    "no values": (
        {"build": lambda size: Net().to("meta")},
        "build() left parameters on the meta device",
    ),
    "wrapped": (
        {"build": lambda size: nn.DataParallel(Net())},
        "build() returned a DataParallel: return the module",
    ),
    "cannot be copied": (
        {"build": lambda size: holding(i for i in range(3))},
        (
            "build() returned a module that copy.deepcopy cannot copy, which verification needs:"
            " TypeError"
        ),
    ),
    "inputs are NaN": (
        {"batch": lambda *a: (rows(*a)[0] * float("nan"), rows(*a)[1])},
        "loss() returned nan for a batch of 2 samples: check the inputs of batch()",
    ),
    "loss is a class": (
        {"loss": nn.CrossEntropyLoss},
        "loss is the class CrossEntropyLoss: give an instance",
    ),
    "optimizer returns nothing": (
        {"optimizer": lambda p: None},
        "optimizer() returned a NoneType: return a torch",
    ),
    "optimizer raises": (
        {"optimizer": lambda p: torch.optim.SGD(p, lr=-1)},
        "raised in optimizer() of mine:net",
    ),
    "optimizer of other parameters": (
        {"optimizer": lambda p: torch.optim.SGD(Net().parameters(), lr=0.1)},
        "optimizer() returned an optimizer of other parameters",
    ),
    "scheduler returns nothing": (
        {"optimizer": torch.optim.SGD, "scheduler": lambda optimizer: None},
        "scheduler() returned a NoneType, which has no step()",
    ),
    "accumulate": (
        {"accumulate": 4},
        "accumulate is not measured, because a step is one batch and one update",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gives_one_message_that_names_the_function(offer: Any, mistake: str) -> None:
    given, told = MISTAKES[mistake]
    if mistake == "forward needs CUDA" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    lines = checks.model_words(checked(offer(**given)))
    assert len(lines) == 1
    assert told in lines[0]


FILES = {
    "syntax error": ("def build(:\n", "SyntaxError"),
    "missing import": ("import no_such_module\n", "No module named 'no_such_module'"),
    "no such object": ("other = 3\n", "has no object 'net'"),
    "a class instead of an object": (
        "from torch import nn\nnet = nn.Linear\n",
        "is not a model object",
    ),
    "a missing function": (
        "class net:\n    def build(size): ...\n",
        "functions that are missing: batch, loss",
    ),
    "raises at import": ("raise OSError('no data')\n", "OSError: no data"),
}


@pytest.mark.parametrize("mistake", FILES)
def test_a_file_that_cannot_be_used_gives_one_message(here: Path, mistake: str) -> None:
    text, told = FILES[mistake]
    file = f"user_{mistake.replace(' ', '_')}.py"
    (here / file).write_text(text)
    lines = checks.model_words(checked(f"{file}:net"))
    assert len(lines) == 1
    assert told in lines[0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("no_file.py:net", "there is no file no_file.py"),
        ("no_module:net", "cannot find the module"),
        ("timm:vit_base_patch16_224", "pip install 'torch-dpbench[vision]'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_before_any_process_starts(
    here: Path, name: str, told: str
) -> None:
    if registry.importlib.util.find_spec("timm") and name.startswith("timm"):
        pytest.skip("timm is installed")
    done = CliRunner().invoke(cli, ["check", "--models", name])
    assert isinstance(done.exception, LookupError)
    assert told in str(done.exception)


def with_ignored(n: int, seed: int, size: str) -> tuple[Any, Any]:
    features, labels = rows(n, seed, size)
    labels[0] = -100
    return features, labels


NOTES: dict[str, tuple[dict[str, Any], str]] = {
    "draws from numpy": (
        odd(lambda forward, x: forward(x) * float(np.random.rand())),
        "draws from numpy.random",
    ),
    "a sum over samples": (
        odd(lambda forward, x: forward(x).square().sum()) | {"loss": lambda out, y: out.mean()},
        "differs from that on one device (by 0.5 of its norm)",
    ),
    "samples depend on each other": (
        odd(lambda forward, x: forward(x - x.mean(0))),
        "differs from that on one device",
    ),
    "draws from Python": (
        odd(lambda forward, x: forward(x) * random.random()),
        "draws from Python's random",
    ),
    "another batch for one seed": (
        {"batch": lambda n, *_: (torch.randn(n, 8), torch.zeros(n).long())},
        "same seed",
    ),
    "other weights for one seed": (
        {"build": lambda size: holding(torch.seed())},
        "the same seed gave other weights",
    ),
    "one row for all": (
        odd(lambda forward, x: (forward(x), x.sum(0, keepdim=True))),
        "one row per sample",
    ),
    "unused parameters": (
        {"build": lambda size: Unused()},
        "no gradient for 2 of 6 parameters (first: idle.weight)",
    ),
    "replicas return numbers": (
        odd(lambda forward, x: (forward(x), 3)),
        "a step on two devices failed: TypeError",
    ),
    "a hook of forward": ({"build": lambda size: Hooking()}, "forward adds a hook to"),
    "an average that forward assigns": (
        {"build": lambda size: Averaging()},
        "forward assigns average",
    ),
    "a list that forward fills": ({"build": lambda size: Filling()}, "forward writes into seen"),
    "layers in a list": (
        {"build": lambda size: Listed()},
        "not registered in the module (2; shape of the first: ",
    ),
    "a sum over samples in the loss": (
        {"loss": nn.CrossEntropyLoss(reduction="sum")},
        "ddp and fsdp, whose ranks have a loss each",
    ),
    "a mean over the valid items": (
        {"batch": with_ignored, "loss": F.cross_entropy},
        "ddp and fsdp, whose ranks have a loss each",
    ),
    "a replica raises": (
        odd(lambda forward, x: forward(x) * torch.ones(2, 1)),
        "The size of tensor a (3) must match",
    ),
    "registered twice": ({"build": lambda size: Twice()}, "names of parameters are registered for"),
}


class Hooking(Net):
    def forward(self, x: Tensor) -> Any:
        self.last.register_forward_hook(lambda *_: None)
        return super().forward(x)


class Averaging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.average = self.average * 0.9 + x.detach().mean() * 0.1
        return super().forward(x)


class Filling(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Any:
        self.seen.append(len(x))
        return super().forward(x)


class Unused(Net):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class Listed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4)]

    def forward(self, x: Tensor) -> Any:
        return self.layers[0](super().forward(x))


class Twice(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.last


def first(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output[0] if isinstance(output, tuple) else output, target)


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize("note", NOTES)
def test_a_property_that_some_strategies_cannot_use_is_noted_once(offer: Any, note: str) -> None:
    given, told = NOTES[note]
    lines = checks.model_words(checked(offer(**{"loss": first, **given})))
    assert sum(told in line for line in lines) == 1
    assert lines[0] == "mine:net (small) can be measured"


class Some(Net):
    """Trains only its last layer, in its own way."""

    def parameters(self, recurse: bool = True) -> Any:
        return self.last.parameters(recurse)


def in_bf16(n: int, seed: int, size: str) -> tuple[Any, Any]:
    features, labels = rows(n, seed, size)
    return features.bfloat16(), labels


def normed(size: str) -> nn.Module:
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 6)), nn.Tanh(), nn.Linear(6, 4))


class Tapped(Net):
    """Reads in forward what a hook of its own layer has stored in this very module."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.first.register_forward_hook(lambda *a: self.seen.__setitem__("first", a[2]))

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return output + self.seen["first"].sum(1, keepdim=True)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning")
def test_the_check_verifies_a_module_that_holds_results_of_autograd(offer: Any) -> None:
    lines = checks.model_words(checked(offer(normed)))
    assert not [line for line in lines if line.startswith("note")]
    assert any("two devices" in line and "bitwise" in line for line in lines)


def test_the_rounding_of_bf16_is_no_other_gradient(offer: Any) -> None:
    lines = checks.model_words(checked(offer(lambda size: Net().bfloat16(), in_bf16)))
    assert not [line for line in lines if line.startswith("note")]


def test_parameters_that_the_module_leaves_out_have_no_second_name(offer: Any) -> None:
    lines = checks.model_words(checked(offer(lambda size: Some())))
    assert not [line for line in lines if "names of parameters" in line]


def test_the_check_runs_the_module_that_was_built_and_no_copy_of_it(offer: Any) -> None:
    """A copy would read what its own hook, which names the original, never stores."""
    trial = checked(offer(lambda size: Tapped()), devices=2)
    assert trial.provenance["model_check"]["seen"]["output"]


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
def test_the_check_shows_structures_parameters_loss_and_two_devices(offer: Any) -> None:
    name = offer(lambda size: OwnLoss(WRAPS["a dict"]), named_rows, None)
    text = "\n".join(checks.model_words(checked(name)))
    for part in (
        "212 in 4 tensors",
        "inputs['more']['mask'][0] float32 (6, 16)",
        "drawn in forward",
        "output['logits'] float32 (2, 4)",
        "two devices     bitwise",
    ):
        assert part in text


@pytest.mark.parametrize("wrap", [patched, torch.fx.symbolic_trace], ids=["instance", "fx"])
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2)])
def test_a_forward_that_cannot_be_replaced_is_verified_without_dropout(
    offer: Any, wrap: Callable[[nn.Module], nn.Module], strategy: str, devices: int
) -> None:
    name = offer(lambda size: wrap(nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 4))))
    assert verified(name, strategy, devices).verified is Verified.BITWISE


def test_a_dict_with_another_constructor_is_taken_apart_and_made_again() -> None:
    made = reference.joined([defaultdict(list, {"a": torch.ones(n, 2)}) for n in (1, 2)])
    assert isinstance(made, defaultdict)
    assert made["a"].shape == (3, 2)


class Output(dict[str, Tensor]):
    """A dict that takes single items only, as a ModelOutput of transformers 5."""

    def update(self, *_: Any, **__: Any) -> None:
        raise TypeError("You cannot use update")


def test_a_dict_that_refuses_update_is_taken_apart_and_made_again() -> None:
    made = reference.joined([Output(a=torch.ones(n, 2)) for n in (1, 2)])
    assert isinstance(made, Output)
    assert made["a"].shape == (3, 2)


# -- the template, the examples and the libraries


def test_init_writes_a_model_that_verifies_and_never_overwrites(here: Path) -> None:
    done = CliRunner().invoke(cli, ["init", "user_model.py"])
    assert done.exit_code == 0
    text = (here / "user_model.py").read_text()
    assert "dpbench check --models user_model.py:model" in text
    assert CliRunner().invoke(cli, ["init", "user_model.py"]).exit_code == 2
    assert (here / "user_model.py").read_text() == text
    found = checked("user_model.py:model").provenance["model_check"]
    assert (found["seen"]["two devices"], found["notes"]) == ("bitwise", [])
    assert models.load("user_model.py:model", "small", 0).loop.optimizer is not None


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0")
@pytest.mark.parametrize(
    "name",
    ["gpt2.py:net", "resnet50.py:net", "transformers:gpt2", "transformers:bert-base-uncased"],
)
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("dp", 2)])
def test_the_examples_and_the_libraries_verify(name: str, strategy: str, devices: int) -> None:
    if "resnet" not in name:
        pytest.importorskip("transformers")
    name = str(EXAMPLES / name) if ".py" in name else name
    assert verified(name, strategy, devices).verified is not Verified.NO


def test_the_full_resnet50_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        module = models._own.plug(f"{EXAMPLES / 'resnet50.py'}:net").build("full")
    assert sum(one.numel() for one in module.parameters()) == 25_557_032
