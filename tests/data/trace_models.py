"""Count what well-known models are made of, without weights or a GPU.

Needs torchvision and transformers, which nothing else here does:

    python tests/data/trace_models.py > dpbench/predict/data/models.json

Each entry: modules, parameter_tensors, parameters, buffer_tensors, buffer_bytes, forward and
backward operations that launch a kernel, the bytes that these read and write for one sample
(weights shared by two), forward_flop of one sample (multiply and add count as two), input and
output values of one sample, and the bytes of the buckets in which torch's DistributedDataParallel
reduces fp32 gradients.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

VISION = [
    "alexnet",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "mnasnet0_5",
    "mnasnet0_75",
    "mnasnet1_0",
    "mnasnet1_3",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "mobilenet_v3_large",
    "shufflenet_v2_x0_5",
    "shufflenet_v2_x1_0",
    "shufflenet_v2_x1_5",
    "shufflenet_v2_x2_0",
    "squeezenet1_0",
    "squeezenet1_1",
    "googlenet",
    "inception_v3",
    "efficientnet_b0",
    "efficientnet_b1",
    "efficientnet_b2",
    "efficientnet_b3",
    "efficientnet_b4",
    "efficientnet_b5",
    "efficientnet_b6",
    "efficientnet_b7",
    "efficientnet_v2_s",
    "efficientnet_v2_m",
    "efficientnet_v2_l",
    "regnet_y_400mf",
    "regnet_y_800mf",
    "regnet_y_1_6gf",
    "regnet_y_3_2gf",
    "regnet_y_8gf",
    "regnet_y_16gf",
    "regnet_y_32gf",
    "regnet_y_128gf",
    "regnet_x_400mf",
    "regnet_x_800mf",
    "regnet_x_1_6gf",
    "regnet_x_3_2gf",
    "regnet_x_8gf",
    "regnet_x_16gf",
    "regnet_x_32gf",
    "convnext_tiny",
    "convnext_small",
    "convnext_base",
    "convnext_large",
    "vit_b_16",
    "vit_b_32",
    "vit_l_16",
    "vit_l_32",
    "vit_h_14",
    "swin_t",
    "swin_s",
    "swin_b",
    "swin_v2_t",
    "swin_v2_s",
    "swin_v2_b",
    "maxvit_t",
]


# torchvision's compiled operators may need CUDA's libraries; these models use none, but its import
# asks for two
_LIBRARY = torch.library.Library("torchvision", "DEF")
_LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_LIBRARY.define(
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt"
    " pooled_width, int sampling_ratio, bool aligned) -> Tensor"
)
sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")


VIEWS = [
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "expand",
    "permute",
    "detach",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "as_strided",
    "split",
    "alias",
    "split_with_sizes",
    "unbind",
    "_reshape_alias",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "sym_size",
    "sym_stride",
    "sym_numel",
]
"""Operations that launch no kernel."""


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel, and the bytes of their input and output tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = func.namespace != "prim" and func._overloadpacket.__name__ not in VIEWS
        result = func(*args, **(kwargs or {}))
        if kernel:
            self.count += 1
            found = {
                id(t): t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)
            }
            self.bytes += sum(t.numel() * t.element_size() for t in found.values())
        return result


def vision(name: str) -> tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]:
    import torchvision.models as tv

    extra = (
        {"init_weights": False, "aux_logits": False}
        if name in ("googlenet", "inception_v3")
        else {}
    )
    side = 299 if name == "inception_v3" else 256 if name.startswith("swin_v2") else 224
    return getattr(tv, name)(weights=None, **extra), (torch.empty(2, 3, side, side),), {}


def language() -> dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]]:
    import transformers as t

    def ids(length: int, vocabulary: int) -> torch.Tensor:
        return torch.zeros(2, length, dtype=torch.int64)

    def bert(layers: int, width: int, heads: int, length: int, kind: Any = None) -> Any:
        config = t.BertConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        return lambda: ((kind or t.BertForQuestionAnswering)(config), (ids(length, 30522),), {})

    def gpt2(layers: int, width: int, heads: int, length: int = 1024) -> Any:
        config = t.GPT2Config(n_layer=layers, n_embd=width, n_head=heads)
        return lambda: (t.GPT2LMHeadModel(config), (ids(length, 50257),), {})

    def t5(layers: int, width: int, ff: int, heads: int, kv: int = 64) -> Any:
        config = t.T5Config(
            decoder_start_token_id=0,
            num_layers=layers,
            d_model=width,
            d_ff=ff,
            num_heads=heads,
            d_kv=kv,
        )
        return lambda: (
            t.T5ForConditionalGeneration(config),
            (),
            {"input_ids": ids(512, 32128), "labels": ids(128, 32128)},
        )

    def llama(layers: int, width: int, ff: int, heads: int, kv: int, vocabulary: int) -> Any:
        config = t.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=ff,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            vocab_size=vocabulary,
        )
        return lambda: (t.LlamaForCausalLM(config), (ids(1024, vocabulary),), {})

    return {
        "bert-base": bert(12, 768, 12, 384),
        "bert-large": bert(24, 1024, 16, 384),
        "bert-tiny": bert(2, 128, 2, 128),
        "roberta-base": lambda: (
            t.RobertaForMaskedLM(t.RobertaConfig(vocab_size=50265)),
            (ids(512, 50265),),
            {},
        ),
        "roberta-large": lambda: (
            t.RobertaForMaskedLM(
                t.RobertaConfig(
                    vocab_size=50265,
                    num_hidden_layers=24,
                    hidden_size=1024,
                    num_attention_heads=16,
                    intermediate_size=4096,
                )
            ),
            (ids(512, 50265),),
            {},
        ),
        "distilbert": lambda: (
            t.DistilBertForMaskedLM(t.DistilBertConfig()),
            (ids(512, 30522),),
            {},
        ),
        "albert-base": lambda: (
            t.AlbertForMaskedLM(
                t.AlbertConfig(hidden_size=768, num_attention_heads=12, intermediate_size=3072)
            ),
            (ids(512, 30000),),
            {},
        ),
        "electra-base": lambda: (
            t.ElectraForMaskedLM(
                t.ElectraConfig(
                    embedding_size=768,
                    hidden_size=768,
                    num_attention_heads=12,
                    intermediate_size=3072,
                )
            ),
            (ids(512, 30522),),
            {},
        ),
        "gpt2": gpt2(12, 768, 12),
        "gpt2-medium": gpt2(24, 1024, 16),
        "gpt2-large": gpt2(36, 1280, 20),
        "gpt2-xl": gpt2(48, 1600, 25),
        "t5-small": t5(6, 512, 2048, 8),
        "t5-base": t5(12, 768, 3072, 12),
        "t5-large": t5(24, 1024, 4096, 16),
        "opt-125m": lambda: (t.OPTForCausalLM(t.OPTConfig()), (ids(1024, 50272),), {}),
        "opt-1.3b": lambda: (
            t.OPTForCausalLM(
                t.OPTConfig(
                    hidden_size=2048, num_hidden_layers=24, ffn_dim=8192, num_attention_heads=32
                )
            ),
            (ids(1024, 50272),),
            {},
        ),
        "llama-2-7b": llama(32, 4096, 11008, 32, 32, 32000),
        "llama-3-8b": llama(32, 4096, 14336, 32, 8, 128256),
    }


def buckets(sizes: list[int]) -> list[int]:
    """Return the bytes of DDP's buckets: each is closed once it has 25 MiB, the first 1 MiB."""
    found, full = [0], 2**20
    for size in sizes:
        if found[-1] >= full:
            found.append(0)
            full = 25 * 2**20
        found[-1] += size
    return found


def counted(
    build: Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]],
) -> dict[str, Any]:
    """Trace one forward and backward of two samples on fake tensors.

    Weights are real where building needs numbers.
    """
    module = None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with contextlib.suppress(RuntimeError), mode:
        module, args, kwargs = build()
    if module is None:
        module, args, kwargs = build()
    module.train()
    with mode:
        forward, backward = Operations(), Operations()
        with (
            torch.no_grad(),
            FlopCounterMode(display=False) as flop,
        ):  # it takes some operations apart
            module(*args, **kwargs)
        with forward:
            out = module(*args, **kwargs)
        tensor = (
            out if isinstance(out, torch.Tensor) else next(v for v in out.values() if v.dim() > 1)
        )
        with backward:
            tensor.float().sum().backward()
    parameters, buffers = list(module.parameters()), list(module.buffers())
    inputs = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    return {
        "modules": len(list(module.modules())),
        "parameter_tensors": len(parameters),
        "parameters": sum(p.numel() for p in parameters),
        "buffer_tensors": len(buffers),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in buffers),
        "forward_launches": forward.count,
        "backward_launches": backward.count,
        "forward_bytes": forward.bytes // 2,
        "backward_bytes": backward.bytes // 2,
        "forward_flop": flop.get_total_flops() // 2,
        "inputs": sum(v.numel() for v in inputs) // 2,
        "outputs": tensor.numel() // 2,
        "bucket_bytes": buckets([4 * p.numel() for p in reversed(parameters)]),
    }


def main() -> None:
    for name in (
        "kaiming_normal_",
        "kaiming_uniform_",
        "trunc_normal_",
        "normal_",
        "uniform_",
        "xavier_uniform_",
    ):
        # numbers are not wanted
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)
    builds = {name: lambda name=name: vision(name) for name in VISION} | language()
    wanted = sys.argv[1:] or list(builds)
    opening = "{"
    for name in wanted:
        try:
            row = counted(builds[name])
        except (
            Exception
        ) as error:  # one model that this torch cannot trace must not cost the others
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            continue
        print(f"{opening}\n {json.dumps(name)}: {json.dumps(row)}", end="", flush=True)
        opening = ","
    print("\n}")


if __name__ == "__main__":
    main()
