"""The numbers of the fake GPUs: each operator gives the CPU's, or is refused by name.

Skipped except with torch's CUDA build on fake GPUs (`tests/fakegpu`).
"""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda import comm
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._pytree import tree_map

from dpbench import models

COMPUTING = (
    importlib.util.find_spec("fakecuda") is not None
    and os.environ.get("FAKECUDA_NUMERICS", "1") != "0"
)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not COMPUTING, reason="needs fake GPUs that compute numbers"),
]

MODELS = ("mlp", "resnet18", "transformer", "lstm", "embedding", "vgg16")
BITWISE = 0.0
ROUNDED = 2e-6  # sums in another order, in single precision
CONVOLVED = 1e-5  # oneDNN adds the bias within its kernel, or not, depending on the CPU
HALVED = 2e-2  # a half precision that is rounded at other places


def _differences(want: object, got: object) -> float:
    """Return the largest difference between two results of the same form."""
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (want.shape, want.dtype, want.layout) == (got.shape, got.dtype, got.layout)
        want, got = want.detach().to_dense(), got.detach().cpu().to_dense()
        if torch.equal(want, got) or want.numel() == 0:
            return 0.0
        return float((want.to(torch.complex128) - got.to(torch.complex128)).abs().max())
    assert isinstance(want, (tuple, list)), type(want)
    assert isinstance(got, (tuple, list))
    return max((_differences(w, g) for w, g in zip(want, got, strict=True)), default=0.0)


def _assert_equal(want: object, got: object, tolerance: float) -> None:
    assert _differences(want, got) <= tolerance


def _trained_once(module: nn.Module, *inputs: object) -> list[torch.Tensor]:
    """Return the outputs, then the gradients of parameters and of inputs that have some."""
    outputs = module(*inputs)
    while not isinstance(outputs, torch.Tensor):
        outputs = outputs[0]  # of a recurrent network, and of a packed sequence
    outputs.square().sum().backward()
    leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    tensors = [*module.parameters(), *leaves]
    return [outputs, *(t.grad for t in tensors if t.grad is not None), *module.buffers()]


def _on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cuda().requires_grad_(tensor.requires_grad)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {
    "linear": (lambda: nn.Linear(6, 4), (5, 6), BITWISE),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 9), CONVOLVED),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 8, 8), CONVOLVED),
    "conv2d in groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 8, 8), BITWISE),
    "depthwise conv2d": (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8), BITWISE),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4), CONVOLVED),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (2, 3, 5, 5), BITWISE),
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 5), BITWISE),
    "batch norm 1d": (lambda: nn.BatchNorm1d(3), (4, 3), BITWISE),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(3).eval(), (4, 3, 5, 5), BITWISE),
    "layer norm": (lambda: nn.LayerNorm(6), (5, 6), BITWISE),
    "group norm": (lambda: nn.GroupNorm(2, 4), (3, 4, 5), BITWISE),
    "rms norm": (lambda: nn.RMSNorm(6), (5, 6), ROUNDED),
    "max pool": (lambda: nn.MaxPool2d(2), (2, 3, 8, 8), BITWISE),
    "average pool": (lambda: nn.AvgPool2d(2), (2, 3, 8, 8), BITWISE),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(1), (2, 3, 7, 7), BITWISE),
    "gelu": (nn.GELU, (5, 6), BITWISE),
    "log sigmoid": (nn.LogSigmoid, (5, 6), BITWISE),
    "softmax": (lambda: nn.Softmax(-1), (5, 6), BITWISE),
    "prelu": (nn.PReLU, (5, 6), BITWISE),
    "rnn": (lambda: nn.RNN(4, 5, 2), (6, 3, 4), ROUNDED),
    "rnn with relu": (lambda: nn.RNN(4, 5, nonlinearity="relu"), (6, 3, 4), ROUNDED),
    "gru": (lambda: nn.GRU(4, 5, 2, bidirectional=True), (6, 3, 4), ROUNDED),
    "lstm": (lambda: nn.LSTM(4, 5, 2, batch_first=True), (3, 6, 4), ROUNDED),
    "lstm in both directions": (lambda: nn.LSTM(4, 5, bidirectional=True), (6, 3, 4), ROUNDED),
    "lstm with projection": (lambda: nn.LSTM(4, 6, proj_size=3), (6, 3, 4), ROUNDED),
    "lstm without bias": (lambda: nn.LSTM(4, 5, bias=False), (6, 3, 4), ROUNDED),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), (3, 4), ROUNDED),
    "gru cell": (lambda: nn.GRUCell(4, 5), (3, 4), ROUNDED),
    "batch norm in bfloat16": (
        lambda: nn.BatchNorm2d(3).bfloat16(),
        (4, 3, 5, 5),
        BITWISE,
    ),
    "layer norm in bfloat16": (lambda: nn.LayerNorm(6).bfloat16(), (5, 6), BITWISE),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True),
        (2, 5, 8),
        ROUNDED,
    ),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_gives_the_cpus_output_and_gradients(layer: str) -> None:
    build, shape, tolerance = LAYERS[layer]
    module = build()
    on_gpu = copy.deepcopy(module).cuda()
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    want = _trained_once(module, x)
    _assert_equal(want, _trained_once(on_gpu, _on_gpu(x)), tolerance)


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_packed_sequences_give_the_cpus_numbers(kind: type[nn.RNNBase]) -> None:
    module = kind(4, 5, 2)
    on_gpu = copy.deepcopy(module).cuda()
    x, lengths = torch.randn(6, 3, 4), torch.tensor([6, 4, 1])
    want = _trained_once(module, pack_padded_sequence(x, lengths))
    got = _trained_once(on_gpu, pack_padded_sequence(x.cuda(), lengths))
    _assert_equal(want, got, ROUNDED)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_give_the_cpus_numbers(mode: str, include_last: bool) -> None:
    module = nn.EmbeddingBag(20, 4, mode=mode, include_last_offset=include_last)
    on_gpu = copy.deepcopy(module).cuda()
    rows, offsets = torch.randint(20, (25,)), torch.tensor([0, 3, 3, 10, 25])
    want = _trained_once(module, rows, offsets)
    _assert_equal(want, _trained_once(on_gpu, rows.cuda(), offsets.cuda()), ROUNDED)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_of_a_model_give_the_cpus_numbers(name: str) -> None:
    loaded = models.load(name, "small", 0)
    on_gpu = copy.deepcopy(loaded.module).cuda()
    for module, device in ((loaded.module, "cpu"), (on_gpu, "cuda")):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        for seed in range(3):
            inputs, target = tree_map(lambda t: t.to(device), loaded.batch(4, seed))  # noqa: B023
            optimizer.zero_grad()
            outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
            loaded.loss(outputs, target).backward()
            optimizer.step()
    _assert_equal(
        list(loaded.module.state_dict().values()), list(on_gpu.state_dict().values()), 2e-5
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        (SDPBackend.MATH, torch.float32, ROUNDED),
        (SDPBackend.EFFICIENT_ATTENTION, torch.float32, ROUNDED),
        (SDPBackend.FLASH_ATTENTION, torch.bfloat16, HALVED),
    ],
)
def test_attention_gives_the_cpus_numbers(
    kind: SDPBackend, dtype: torch.dtype, tolerance: float, causal: bool
) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    leaves = [torch.randn(2, 3, 8, 16, dtype=dtype, requires_grad=True) for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        want = attend(*leaves)
    with sdpa_kernel(kind):
        _assert_equal(want, attend(*map(_on_gpu, leaves)), tolerance)


def _drop_attention() -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.ones(1, 2, 16, 16, device="cuda", requires_grad=True)
    v = torch.eye(16, device="cuda").expand(1, 2, 16, 16).clone().requires_grad_()
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        out = F.scaled_dot_product_attention(q, q.detach(), v, dropout_p=0.5)
    # of out = W v with v = 1, the gradient of v is the columns' sums of the weights W, if the
    # backward drops what the forward dropped
    return out.sum(-2), torch.autograd.grad(out.sum(), v)[0][..., 0]


def _drop_lstm() -> tuple[torch.Tensor, torch.Tensor]:
    network = nn.RNN(8, 8, 2, nonlinearity="relu", dropout=0.5, bias=False).cuda()
    for weight in network.parameters():
        nn.init.eye_(weight)
    network.weight_hh_l0.data.zero_()
    network.weight_hh_l1.data.zero_()
    x = torch.ones(16, 4, 8, device="cuda", requires_grad=True)
    out = network(x)[0]
    return out, torch.autograd.grad(out.sum(), x)[0]


@pytest.mark.parametrize("drop", [_drop_attention, _drop_lstm])
def test_a_backward_drops_what_its_forward_dropped(
    drop: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    forward, backward = drop()
    assert forward.detach().unique().numel() > 1
    torch.testing.assert_close(forward, backward)


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_dropout_follows_the_gpus_generator(p: float) -> None:
    x = torch.ones(10_000, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(7)
    first, second = F.dropout(x, p), F.dropout(x, p)
    torch.cuda.manual_seed(7)
    again = F.dropout(x, p)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert first.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert (first == 0).float().mean().item() == pytest.approx(p, abs=0.03)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient, first.detach())


def test_random_numbers_of_the_host_are_left_alone() -> None:
    state = torch.get_rng_state()
    F.dropout(torch.ones(100, device="cuda")).sum().item()
    torch.randn(100, device="cuda").sum().item()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_replayed_graph_draws_what_eager_code_draws() -> None:
    x = torch.ones(64, device="cuda")
    torch.cuda.manual_seed(3)
    eager = [F.dropout(x).cpu() for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dropped = F.dropout(x)
    torch.cuda.manual_seed(3)
    for want in eager:
        graph.replay()
        assert torch.equal(dropped.cpu(), want)


OPTIMIZERS: dict[str, dict[str, object]] = {
    "ASGD": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True, "weight_decay": 0.01},
    "AdamW": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
}
FUSED = ("Adagrad", "Adam", "AdamW", "SGD")


def _optimized(
    name: str, device: str, form: dict[str, bool], capturable: bool = False
) -> list[torch.Tensor]:
    torch.default_generator.manual_seed(5)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    options = {**OPTIMIZERS[name], **form, **({"capturable": True} if capturable else {})}
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.05, **options)
    x = torch.randn(7, 6).to(device)
    for _ in range(4):
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
    return list(module.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gives_the_cpus_parameters_in_each_form(name: str) -> None:
    want = _optimized(name, "cpu", {"foreach": False})
    forms = [{}, {"foreach": True}, {"foreach": False}]
    if name in FUSED:
        forms.append({"fused": True})
    for form in forms:
        _assert_equal(want, _optimized(name, "cuda", form), 5e-6)


def test_lbfgs_and_muon_give_the_cpus_parameters() -> None:
    x, y = torch.randn(7, 6), torch.randn(7, 4)

    def optimized(kind: type[torch.optim.Optimizer], device: str) -> torch.Tensor:
        torch.default_generator.manual_seed(5)
        layer = nn.Linear(6, 4, bias=False).to(device)
        optimizer = kind(layer.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(layer(x.to(device)), y.to(device))
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return layer.weight

    _assert_equal(optimized(torch.optim.LBFGS, "cpu"), optimized(torch.optim.LBFGS, "cuda"), 1e-5)
    _assert_equal(optimized(torch.optim.Muon, "cpu"), optimized(torch.optim.Muon, "cuda"), HALVED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_the_cpus_numbers(dtype: torch.dtype) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))
    on_gpu = copy.deepcopy(module).cuda()
    x = torch.randn(2, 3, 8, 8)
    results = []
    for device, mine in (("cpu", module), ("cuda", on_gpu)):
        with torch.autocast(device, dtype):
            out = mine(x.to(device))
        assert out.dtype is dtype
        out.float().square().sum().backward()
        results.append([out, *(p.grad for p in mine.parameters())])
    scale = max(float(tensor.detach().abs().max()) for tensor in results[0])
    _assert_equal(results[0], results[1], HALVED * scale)


def test_grad_scaler_skips_the_same_steps_as_on_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        weight = nn.Parameter(torch.ones(4, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2)
        scales = []
        for factor in (1.0, float("inf"), 2.0, 3.0, 1.0):
            optimizer.zero_grad()
            scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([weight], 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(torch.tensor(scaler.get_scale()))
        results.append([weight, *scales])
    _assert_equal(results[0], results[1], ROUNDED)


def _table() -> dict[str, Callable[[torch.Tensor], object]]:
    """Operators on a (6, 5) tensor of small numbers, some equal."""
    return {
        "index": lambda x: x[torch.tensor([2, 0, 2], device=x.device)],
        "boolean index": lambda x: x[x > 0],
        "index_put": lambda x: x.clone().index_put_(
            (torch.tensor([1, 1], device=x.device),), x[:2], accumulate=True
        ),
        "boolean assignment": lambda x: x.clone().masked_fill_(x > 0, 2.5),
        "gather": lambda x: x.gather(0, (x > 0).long()),
        "scatter": lambda x: torch.zeros_like(x).scatter_add_(0, (x > 0).long(), x),
        "scatter_reduce": lambda x: x.scatter_reduce(0, (x > 0).long(), x, "amax"),
        "index_add": lambda x: x.index_add(0, torch.tensor([0, 0], device=x.device), x[:2]),
        "index_select": lambda x: x.index_select(1, torch.tensor([4, 1], device=x.device)),
        "sort": lambda x: x.flatten().sort(stable=True),
        "topk": lambda x: x.sum(1).topk(3),
        "argsort": lambda x: x.sum(1).argsort(),
        "unique": lambda x: x.unique(return_inverse=True, return_counts=True),
        "unique_consecutive": lambda x: x.flatten().sort().values.unique_consecutive(),
        "unique of rows": lambda x: torch.cat([x, x]).unique(dim=0),
        "nonzero": lambda x: x.nonzero(),
        "masked_select": lambda x: x.masked_select(x > 0),
        "bincount": lambda x: (x > 0).long().flatten().bincount(minlength=3),
        "repeat_interleave": lambda x: x.repeat_interleave(
            torch.tensor([1, 0, 2, 1, 0, 1], device=x.device), 0
        ),
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(1),
        "median": lambda x: x.median(0),
        "kthvalue": lambda x: x.sum(1).kthvalue(2),
        "std": lambda x: x.std(0),
        "where": lambda x: torch.where(x > 0, x, -1.0),
        "matmul": lambda x: x @ x.T,
        "bmm": lambda x: torch.stack([x, x]).bmm(torch.stack([x.T, x.T])),
        "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
        "tensor of another type": lambda x: x.half().float() + x.to(torch.int64),
        "number of the host": lambda x: x * torch.tensor(2.5) + torch.tensor(1.0),
        "strided": lambda x: x.T[::2, 1:] * 2,
        "resized result": lambda x: torch.mul(x, 2, out=torch.empty(0, device=x.device)),
        "complex": lambda x: torch.complex(x, x + 1).conj() * (2 + 1j),
        "complex matmul": lambda x: torch.complex(x, x) @ torch.complex(x, -x).mH,
        "view as real": lambda x: torch.view_as_real(torch.complex(x, -x).conj().resolve_conj()),
        "fft": torch.fft.fft,
        "solve": lambda x: torch.linalg.solve(x @ x.T + 9 * torch.eye(6, device=x.device), x),
        "singular values": torch.linalg.svdvals,
        "norms": lambda x: torch.stack(torch._foreach_norm([x, x + 1, 2 * x])),
        "cross entropy": lambda x: F.cross_entropy(x, (x > 0).long()[:, 0]),
        "one hot": lambda x: F.one_hot((x > 0).long()[:, 0], 3),
        "pad": lambda x: F.pad(x, (1, 2)),
        "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
        "channels last": lambda x: (
            x.view(1, 2, 3, 5).to(memory_format=torch.channels_last).contiguous()
        ),
    }


@pytest.mark.parametrize("operator", _table())
def test_an_operator_gives_the_cpus_numbers(operator: str) -> None:
    compute = _table()[operator]
    x = torch.randn(6, 5).mul(4).round().div(2)
    want = compute(x)
    got = compute(x.cuda())
    _assert_equal(want, got, 1e-4 if operator in ("solve", "singular values", "fft") else BITWISE)


@pytest.mark.parametrize("target", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("source", ["cpu", "cuda:0"])
def test_copies_change_type_and_layout_on_the_way(source: str, target: str) -> None:
    if torch.device(target).index == 1 and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(4, 6)
    for read in (x, x.T, x.to(torch.float64), x[:, ::2], x[0].expand(4, 6)):
        for written in (torch.zeros(read.shape), torch.zeros(read.shape[::-1]).T):
            to = written.to(target)
            assert torch.equal(to.copy_(read.to(source)).cpu(), written.copy_(read))


def _sparse() -> torch.Tensor:
    rows = torch.tensor([[4, 1, 4]])
    return torch.sparse_coo_tensor(rows, torch.randn(3, 2), (6, 2), check_invariants=True)


SPARSE: dict[str, Callable[[torch.Tensor], object]] = {
    "coalesce": lambda s: s.coalesce(),
    "to dense": lambda s: s.to_dense(),
    "add to dense": lambda s: torch.ones(6, 2, device=s.device).add_(s, alpha=-0.1),
    "sum": lambda s: s + s.coalesce() + s,
    "add in place": lambda s: s.clone().add_(s),
    "product": lambda s: s * s.coalesce(),
    "scaled": lambda s: s.clone().mul_(0.5) / 3,
    "norm": lambda s: torch.stack([s.coalesce().norm(), torch.linalg.vector_norm(s)]),
    "matrix product": lambda s: torch.sparse.mm(
        s.to_dense().to_sparse(), torch.ones(2, 3, device=s.device)
    ),
    "zeroed": lambda s: s.clone().zero_(),
    "masked": lambda s: torch.ones(6, 2, device=s.device).sparse_mask(s.coalesce()),
    "from dense": lambda s: s.to_dense().to_sparse(1),
    "concatenated": lambda s: torch.cat([s, s]).coalesce(),
}


@pytest.mark.parametrize("operator", SPARSE)
def test_a_sparse_operator_gives_the_cpus_numbers(operator: str) -> None:
    sparse = _sparse()
    _assert_equal(SPARSE[operator](sparse), SPARSE[operator](sparse.cuda()), ROUNDED)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", ["SGD", "SparseAdam", "Adagrad"])
def test_an_optimizer_applies_sparse_gradients_as_on_the_cpu(name: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.default_generator.manual_seed(5)
        table = nn.Embedding(10, 3, sparse=True).to(device)
        optimizer = getattr(torch.optim, name)(table.parameters(), lr=0.1)
        for rows in ([1, 1, 4], [4, 0, 9]):
            optimizer.zero_grad()
            table(torch.tensor(rows, device=device)).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
        results.append(table.weight)
    _assert_equal(results[0], results[1], ROUNDED)


@pytest.mark.multi_gpu
def test_sparse_gradients_of_two_gpus_are_added() -> None:
    dense, sparse = torch.randn(4), _sparse()
    tensors = [[dense.to(gpu), sparse.to(gpu)] for gpu in ("cuda:0", "cuda:1")]
    sums = comm.reduce_add_coalesced(tensors, 0)
    want = [dense + dense, (sparse + sparse).to_dense()]
    _assert_equal(want, [sums[0], sums[1].to_dense()], ROUNDED)


def test_the_parts_of_sync_batch_norm_are_batch_norm_on_all_rows() -> None:
    rows = torch.randn(6, 3, 4)
    on_gpu, expected = (
        [torch.zeros(3, device=device), torch.ones(3, device=device)] for device in ("cuda", "cpu")
    )
    parts = [torch.batch_norm_stats(part, 1e-5) for part in rows.cuda().split([4, 2])]
    means, deviations = (torch.stack(column) for column in zip(*parts, strict=True))
    counts = torch.tensor([16.0, 8.0], device="cuda")
    joint = torch.batch_norm_gather_stats_with_counts(
        rows.cuda(), means, deviations, *on_gpu, 0.1, 1e-5, counts
    )
    normalized = torch.batch_norm_elemt(rows.cuda(), None, None, *joint, 1e-5)
    wanted = F.batch_norm(rows, *expected, training=True)
    _assert_equal([wanted, *expected], [normalized, *on_gpu], 1e-5)


def _semi_structured() -> object:
    half = torch.ones(64, 64, device="cuda", dtype=torch.float16)
    return torch._sparse_semi_structured_tile(half)


REFUSED: dict[str, Callable[[], object]] = {
    "aten::mm.dtype": lambda: torch.mm(
        torch.ones(2, 2, device="cuda", dtype=torch.half),
        torch.ones(2, 2, device="cuda", dtype=torch.half),
        out_dtype=torch.float32,
    ),
    "aten::batch_norm_gather_stats": lambda: torch.batch_norm_gather_stats(
        torch.ones(2, 3, 4, device="cuda"),
        *[torch.ones(2, 3, device="cuda")] * 2,
        None,
        None,
        0.1,
        1e-5,
        8,
    ),
    "aten::_sparse_semi_structured_tile": _semi_structured,
    "aten::linalg_qr.out": lambda: torch.linalg.qr(
        torch.ones(2, 2, device="cuda"), out=(torch.empty(0, device="cuda"),) * 2
    ),
    "aten::quantize_per_tensor": lambda: torch.quantize_per_tensor(
        torch.ones(3, device="cuda"), 1.0, 0, torch.qint8
    ).dequantize(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operator_without_numbers_is_refused_by_name(name: str) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=name):
        REFUSED[name]()


def test_a_failed_computation_names_its_operator() -> None:
    table = torch.randn(4, 2, device="cuda")
    with pytest.raises(RuntimeError, match="aten::index_select"):
        table.index_select(0, torch.tensor([7], device="cuda"))


DEFERRED = """
import sys, torch, torch.nn.functional as F
sys.path.insert(0, {root!r})
torch.set_num_threads(1)
from dpbench import models

torch.manual_seed(1)
loaded = models.load("resnet18", "small", 0)
network = torch.nn.LSTM(4, 5, 2, dropout=0.5).cuda()
module = loaded.module.cuda()
optimizer = torch.optim.Adam(module.parameters(), lr=0.01, fused=True)
x = torch.ones(32, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    dropped = F.dropout(x)
numbers = []
for seed in range(2):
    inputs, target = loaded.batch(4, seed)
    optimizer.zero_grad()
    loss = loaded.loss(module(inputs.cuda()), target.cuda())
    loss.backward()
    optimizer.step()
    out = network(torch.ones(3, 2, 4, device="cuda"))[0]
    out.sum().backward()
    graph.replay()
    numbers += [loss.detach().double(), out.detach().double().sum()]
    numbers += [drawn.double().cumsum(0).sum() for drawn in (F.dropout(x), dropped)]
    torch.manual_seed(seed)  # of both; graphs that are queued already keep their state
for tensor in [*module.state_dict().values(), *(p.grad for p in network.parameters())]:
    numbers.append(tensor.double().sum().detach())
print([n.item() for n in numbers])
"""

FAILING = """
import torch
table = torch.randn(4, 2, device="cuda")
rows = torch.tensor([7], device="cuda")
torch.cuda.synchronize()
table.index_select(0, rows)
print("queued")
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).splitlines()[0])
number = torch.tensor(2.0)
doubled = torch.ones(4, 2, device="cuda") * number
number.fill_(9.0)  # after the launch, which has read it
print(doubled.cpu().sum().item())
"""


def _run(script: str, **settings: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


@pytest.mark.slow
def test_deferred_effects_give_the_same_numbers() -> None:
    script = DEFERRED.format(root=str(Path(__file__).parents[2]))
    plain = _run(script, FAKECUDA_DEFERRED="0")
    assert plain.startswith("[")
    assert _run(script, FAKECUDA_DEFERRED="1", FAKECUDA_SEED="3") == plain


@pytest.mark.slow
def test_a_failed_deferred_effect_is_an_error_of_the_next_synchronization() -> None:
    queued, error, later = _run(FAILING, FAKECUDA_DEFERRED="1").splitlines()
    assert queued == "queued"
    assert "aten::index_select" in error
    assert later == "16.0"
