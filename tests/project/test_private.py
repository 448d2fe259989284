"""Private parts of torch that dpbench needs, each in one file: a torch without them fails here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

TESTED = "2.13"
ROOT = Path(__file__).parents[2] / "dpbench"
PRIVATE = {
    r"\._replicate_for_data_parallel\(": "engine/replicate.py",
    r"_set_ddp_runtime_logging_sample_rate|_get_ddp_logging_data|set_runtime_stats_and_log": (
        "strategies/ddp.py"
    ),
    r"_cuda_getCurrentStream": "hardware/devices/cuda.py",
    r"_foreach_copy_|_foreach_add_": "hardware/devices/_many.py",
    r"cuda\._sleep": "hardware/devices/cuda.py",
    r"dropout\._DropoutNd": "measure/verification.py",
    r"torch\._C\._autograd import|_ExperimentalConfig|kineto_results": (
        "measure/worker/profiling.py"
    ),
    r"_(?:function|dispatch)_mode_stack|_saved_tensors_|_autocast_supported|_is_any_autocast": (
        "engine/settings.py"
    ),
    r"_is_multithreading|parametrize\._cache": "engine/settings.py",
    r"_post_accumulate_grad_hooks": "engine/fast/parameter_gradients.py",
    r"_flatten_dense_tensors": "doctor/probe/host.py",
    r"_dump_nccl_trace|_dump_fr_trace": "doctor/probe/all_reduce.py",
    r"torch\._dynamo\.(?:utils|pgo)": "models/__init__.py",
    r"FakeTensorMode": "predict/trace.py",
    r"_make_wrapper_subclass|_disabled_torch_function_impl|DispatchKeySet": (
        "hardware/devices/_wrapper.py"
    ),
}


@pytest.mark.parametrize(("pattern", "home"), PRIVATE.items())
def test_each_private_part_is_used_in_one_file(pattern: str, home: str) -> None:
    users = [str(f.relative_to(ROOT)) for f in ROOT.rglob("*.py") if re.search(pattern, _code(f))]
    assert users == [home]


def _code(path: Path) -> str:
    """Return a file without its docstrings' mentions."""
    return re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)


def test_private_parts_exist_in_this_torch() -> None:
    where = f"dpbench is tested with torch {TESTED}, this is {torch.__version__}"
    assert hasattr(nn.Module, "_replicate_for_data_parallel"), where
    assert hasattr(nn.RNNBase, "_replicate_for_data_parallel"), where
    ddp = nn.parallel.DistributedDataParallel
    assert hasattr(ddp, "_set_ddp_runtime_logging_sample_rate"), where
    assert hasattr(ddp, "_get_ddp_logging_data"), where
    assert hasattr(torch, "_foreach_copy_"), where
    assert hasattr(torch.cuda, "_sleep"), where
    assert not torch.nn.Linear(1, 1)._forward_hooks, where
    assert not torch.nn.Linear(1, 1)._backward_pre_hooks, where
    assert hasattr(torch._utils, "_flatten_dense_tensors"), where
    assert hasattr(parametrize, "_cache_enabled"), where
    assert hasattr(torch._subclasses.fake_tensor, "FakeTensorMode"), where
    assert importlib.util.find_spec("torch._dynamo.utils"), where
    assert importlib.util.find_spec("torch._dynamo.pgo"), where
    leaf = torch.zeros(1, requires_grad=True)
    assert leaf._post_accumulate_grad_hooks is None, where
    assert hasattr(torch.Tensor, "_make_wrapper_subclass"), where
    assert hasattr(torch._C, "_disabled_torch_function_impl"), where
    assert hasattr(torch._C.DispatchKey, "SparseCPU"), where
    assert issubclass(nn.Dropout2d, nn.modules.dropout._DropoutNd), where
    assert hasattr(torch._C._autograd.DeviceType, "CUDA"), where
    assert hasattr(torch._C._autograd._KinetoEvent, "linked_correlation_id"), where
    assert hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"), where
    assert torch._C._profiler._ExperimentalConfig(profile_all_threads=True), where
    for modes in (torch.overrides, torch.utils._python_dispatch):
        assert hasattr(modes, "_push_mode"), where
        assert hasattr(modes, "_pop_mode"), where
    assert hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), where
    assert hasattr(torch._C._autograd, "_saved_tensors_hooks_get_disabled_error_message"), where
    assert "cpu" in torch._C._autocast_supported_devices(), where
    assert hasattr(torch._C, "_is_any_autocast_enabled"), where
    assert hasattr(torch._C, "_is_multithreading_enabled"), where
