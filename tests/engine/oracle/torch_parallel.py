"""The oracle: torch.nn.DataParallel on emulated devices, by the adapter of `torch_dp`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.cuda.amp.common
from torch import Tensor, nn

from dpbench.engine import DataParallel
from dpbench.strategies._torch_parallel import emulated as device
from dpbench.strategies._torch_parallel import on_emulated_devices


def oracle(count: int = 4) -> contextlib.AbstractContextManager[None]:
    """Let torch.nn.DataParallel take `lazy:0` to `lazy:<count - 1>` for its GPUs."""
    return on_emulated_devices(count)


# ---------------------------------------------------------------- both, side by side


def theirs(module: nn.Module, ids: Sequence[int], **options: Any) -> nn.Module:
    return nn.DataParallel(module, list(ids), **options)


def ours(module: nn.Module, ids: Sequence[int], **options: Any) -> nn.Module:
    if isinstance(options.get("output_device"), int):
        options["output_device"] = device(options["output_device"])
    return DataParallel(module, [device(i) for i in ids], **options)


def ours_on_the_host(module: nn.Module, ids: Sequence[int], **options: Any) -> nn.Module:
    """Wrap over logical CPU devices, for schedules that emulated devices refuse."""
    return DataParallel(module, ["cpu"] * len(ids), **options)


def place(value: Any, where: str) -> Any:
    """Return fresh leaves of a structure's tensors on a device."""
    if isinstance(value, Tensor):
        return value.detach().to(where, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: place(part, where) for key, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(place(part, where) for part in value)
    return value


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def difference(a: Any, b: Any, where: str = "") -> str:
    """Say where two structures differ, in bits or otherwise; nothing where they do not."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        facts = [(t.dtype, t.shape, t.device, t.layout, t.requires_grad) for t in (a, b)]
        if facts[0] != facts[1]:
            return f"{where}: {facts}"
        a, b = a.detach(), b.detach()
        if a.is_sparse:
            a, b = a.coalesce().to_dense(), b.coalesce().to_dense()
        return "" if torch.equal(a, b) else f"{where}: by {(a - b).abs().max().item()}"
    if type(a) is not type(b):
        return f"{where}: {type(a)} and {type(b)}"
    if not isinstance(a, dict | tuple | list):
        return "" if a == b else f"{where}: {a!r} and {b!r}"
    keys, others = [list(c) if isinstance(c, dict) else list(range(len(c))) for c in (a, b)]
    if keys != others:
        return f"{where}: parts {keys} and {others}"
    return next(filter(None, (difference(a[key], b[key], f"{where}.{key}") for key in keys)), "")


def rescale(module: nn.Module) -> None:
    """Change every parameter in place, as an optimizer does."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.75)


def observe(
    wrap: Callable[..., nn.Module],
    make: Callable[[], nn.Module],
    inputs: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    ids: Sequence[int] = (0, 1, 2),
    home: str = "cpu",
    root: torch.device | None = None,
    calls: int = 1,
    during: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **options: Any,
) -> dict[str, Any]:
    """Return all values after forward and backward passes of a wrapped module.

    The module is on `root`, or else on the first device; the inputs are on `home`. Gradients
    accumulate over the `calls`, and the weights change between them; the output is that of the
    last.
    """
    torch.manual_seed(0)
    module = make()
    if all(t.device.type == "cpu" for t in (*module.parameters(), *module.buffers())):
        module.to(root or device(ids[0]))
    wrapped = wrap(module, ids, **options)
    arguments, keywords = place(tuple(inputs), home), place(kwargs or {}, home)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in range(calls):
            if call:
                rescale(module)
            with during():
                output = wrapped(*arguments, **keywords)
            loss = sum((t.abs() ** 2).sum() for t in tensors(output) if t.requires_grad)
            if isinstance(loss, Tensor):
                loss.backward()
    return {
        "output": output,
        "gradients": {name: p.grad for name, p in module.named_parameters()},
        "input gradients": [t.grad for t in tensors([arguments, keywords])],
        "state": dict(wrapped.state_dict()),
        "wants gradients": [b.grad for b in module.buffers()],
        # torch warns of the -1 that it itself uses for inputs from the host
        "warnings": [(w.category, str(w.message)) for w in caught if "-1" not in str(w.message)],
    }


def error_of(run: Callable[[], Any]) -> tuple[type[BaseException], str] | None:
    """Return the type and the message of the error that `run` raises."""
    try:
        run()
    except BaseException as error:
        return type(error), str(error)
    return None
