"""Float32: the formats of products are read and set under every order of torch's two settings."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dpbench.analysis import validity
from dpbench.hardware.devices import float32
from dpbench.records import Case, Step, Trial
from dpbench.records.facts import Products, stated

OLD = (
    "backends.cuda.matmul.allow_tf32 = True",
    "backends.cuda.matmul.allow_tf32 = False",
    "backends.cudnn.allow_tf32 = True",
    "backends.cudnn.allow_tf32 = False",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
)
NEW = (
    "backends.fp32_precision = 'tf32'",
    "backends.fp32_precision = 'ieee'",
    "backends.cuda.matmul.fp32_precision = 'tf32'",
    "backends.cuda.matmul.fp32_precision = 'ieee'",
    "backends.cudnn.fp32_precision = 'ieee'",
    "backends.cudnn.conv.fp32_precision = 'ieee'",
)
ORDERS = [*((one,) for one in (*OLD, *NEW)), *product(OLD, NEW), *product(NEW, OLD)]
IN_EVERY_ORDER = """
import json, os, sys
import torch
from torch import backends
from dpbench.hardware.devices import float32, open_devices
from dpbench.measure.worker.facts import torch_facts
from dpbench.records import Case

backends.cudnn.enabled  # loads the submodules before the first fork
case, (device,) = Case(model="mlp", strategy="single", batch_size=1), open_devices("cpu", 1)
for order in json.load(sys.stdin):
    pid = os.fork()
    if pid == 0:
        for one in order:
            exec(one)
        torch_facts(case, device)
        found = [float32.products("cuda")]
        float32.allow_tf32()
        found.append(float32.products("cuda"))
        read = backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32
        formats = [[one.matmul, one.convolution] for one in found]
        print(json.dumps([formats, read, torch.get_float32_matmul_precision()]), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, order
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has the older setting alone"
)
def test_products_are_read_and_set_in_every_order_of_both_settings() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IN_EVERY_ORDER],
        input=json.dumps(ORDERS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = dict(zip(ORDERS, map(json.loads, done.stdout.splitlines()), strict=True))
    for order, ((before, after), read, matmul_precision) in found.items():
        assert before == list(expected(order)), order
        assert after == ["tf32", "tf32"], order
        assert read == [True, True], order
        assert matmul_precision == "high", order


def expected(order: tuple[str, ...]) -> tuple[str, str]:
    """Return the formats of matrix products and convolutions after settings, the last one first.

    A setting of one kind of products outweighs one of cuDNN, and this one that of all products.
    Without any, convolutions may use TF32; `cudnn.allow_tf32 = False` takes this default back.
    """
    matmul, convolution, cudnn, every, default = "", "", "", "", "tf32"
    for one in order:
        value = "ieee" if "ieee" in one or "False" in one else "tf32"
        if "cuda.matmul" in one or "set_float32" in one:
            matmul = value
        elif "cudnn.allow" in one:
            convolution, default = ("", "ieee") if value == "ieee" else (value, default)
        elif "conv" in one:
            convolution = value
        elif "cudnn" in one:
            cudnn = value
        else:
            every = value
    return matmul or cudnn or every or "ieee", convolution or cudnn or every or default


def old_torch(**changes: Any) -> SimpleNamespace:
    """Return `torch.backends` of a torch that has the older setting alone."""
    return SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=True)),
        cudnn=SimpleNamespace(allow_tf32=False, enabled=True),
        **changes,
    )


def test_products_of_a_torch_with_the_older_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "backends", old_torch())
    assert float32.products("cuda") == Products("tf32", "ieee")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert float32.products("cpu") == Products("bf16", "ieee")


def test_tf32_is_allowed_inside_the_context_alone() -> None:
    before = float32.products("cuda")
    assert before.matmul == "ieee", "torch's default"
    with float32.tf32_allowed():
        assert float32.products("cuda") == Products("tf32", "tf32")
    assert float32.products("cuda") == before


def test_unknown_products_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "backends", SimpleNamespace())
    monkeypatch.delattr(torch, "get_float32_matmul_precision")
    assert float32.products("cuda") == Products(None, None)
    assert float32.products("cpu") == Products(None, None)


def test_products_are_not_rounded_where_the_gpu_or_the_environment_rules_it_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "backends", old_torch())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu = torch.device("cuda", 0)
    assert float32.products("cuda", gpu) == Products("ieee", "ieee")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert float32.products("cuda", gpu) == Products("tf32", "ieee")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert float32.products("cuda", gpu) == Products("ieee", "ieee")


GPU = Case(model="mlp", strategy="single", batch_size=8, device_kind="cuda")


@pytest.mark.parametrize(
    ("precision", "products", "said"),
    [
        ("fp32", Products("ieee", "ieee"), ""),
        ("fp32", Products("ieee", "tf32"), "matrix products in float32, convolutions in TF32"),
        ("fp32", Products("ieee", None), "convolutions in an unknown format"),
        ("tf32", Products("tf32", "tf32"), ""),
        ("tf32", Products("tf32", "ieee"), "convolutions in float32"),
        ("bf16", Products("ieee", "tf32"), ""),
    ],
)
def test_a_precision_says_what_the_products_really_use(
    precision: str, products: Products, said: str
) -> None:
    case = replace(GPU, precision=precision)
    trial = Trial(
        case=case,
        steps=(Step(0.1, False, 1.0),),
        provenance=stated(float32=products),
    )
    found = [
        item
        for rule, items in validity.troubles([trial], 8).items()
        if rule.key == "float32"
        for item in items.values()
    ]
    assert len(found) == bool(said)
    assert said in "".join(found)
