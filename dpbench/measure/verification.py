"""Verification: compare a strategy's gradients with those of a reference before the strategy may be timed.

If the steps of a case do not train, the outputs of a forward are compared instead; see `check_outputs`.

The reference, called the chunked reference, does not use the engine. It splits the batch into one chunk per forward
pass of the strategy, and runs one deep copy of the module per chunk, one after the other on the first device. It
computes the loss of the concatenated outputs, and adds the gradients of the copies in the order of the chunks. If the
strategy splits the inputs of one block only, the copies are those of the block. The random numbers of each forward
are a function of its inputs (see `replay`). Where this is not possible, the dropout of torch's own modules is off.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from dpbench.hardware.device import Device
from dpbench.measure.replay import replay
from dpbench.measure.structures import all_tensors, joined, mapped, tensors_by_name
from dpbench.models import Model, compile_forward, positional
from dpbench.records import Case, Verified, no_mark
from dpbench.records.schedule import FASTEST, parse
from dpbench.strategies import Split

Start = Callable[..., AbstractContextManager[Callable[[Any, Any], torch.Tensor]]]
Splits = Callable[[Case, nn.Module], Split]
"""A function of a case and a module that returns how a step of the case splits the batch."""

TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
"""The largest permitted relative error of a tensor, by precision; errors are measured by norms.

In fp32, a different order of additions causes much smaller errors. tf32 and fp16 round to 11 bits, and bf16 to 8.
"""
SCALES = tuple(2.0**power for power in range(16, -1, -1))
"""The factors by which a torch.amp.GradScaler multiplies the loss: the first, and the next one after each overflow."""


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a strategy's gradients or outputs with those of the chunked reference.

    `worst` is the name of the parameter, buffer or output with the largest relative error, and `error` is this error.
    `worst` is empty if all tensors are equal. `random` is True if two runs of the reference differ.
    `steps_s` is the time of the strategy's steps in seconds; the first step of a compiled module contains compilation.
    """

    verified: Verified
    worst: str = ""
    error: float = 0.0
    random: bool = False
    steps_s: float = 0.0

    def __str__(self) -> str:
        text = f"{self.worst} differs from the chunked reference by {self.error:.2g} times the norm of the reference"
        if not self.random:
            return text
        return (
            f"{text}, but two runs of the reference also differ from each other; the model uses random numbers: "
            "draw them with torch from its default generator, and not in compiled code or on layers spread over GPUs, "
            "or disable the model's randomness (for example dropout)"
        )


def check(
    start: Start,
    case: Case,
    model: Model,
    devices: Sequence[Device],
    precision: Callable[[Case], AbstractContextManager[Any]],
    *,
    split: Splits = lambda case, module: Split(case.rows),
    buffers: bool = True,
) -> Verdict:
    """Take one step with a small batch, and return the comparison of its gradients with those of the reference.

    `start` and `split` are the strategy's methods, and `precision` returns the context manager for the forward of a
    case. With `buffers`, the module's buffers are compared too. The step updates the weights of `model`.

    Several steps are taken in fp16 if the gradients overflow, because a GradScaler then skips the update and halves its
    scale; the gradients of the last step are compared. Raises ValueError if the reference overflows at every scale.
    """
    small = _small(case, lambda one: split(one, model.module))
    parts = split(small, model.module)
    model = replace(model, loop=replace(model.loop, clip_norm=None))  # clipped gradients are not those of the reference
    if not _replays(case, parts):
        _without_dropout(model.module)
    else:
        _replay(model.module, parts)
    inputs, target = model.batch(small.batch_size, case.seed + 1)
    pristine = copy.deepcopy(model.module)
    trained, steps, steps_s = _trained(start, small, model, devices, (inputs, target))

    def reference() -> nn.Module:
        return _reference(replace(model, module=pristine), small, inputs, target, parts, devices[0], precision, steps)

    rounds = case.traits.rounds_gradients or (case.schedule not in ("", FASTEST) and not parse(case.schedule).exact)
    first, tolerance = reference(), TOLERANCE["bf16" if rounds else case.precision]
    verdict = replace(compare(trained, first, tolerance, buffers=buffers), steps_s=steps_s)
    if verdict.verified is Verified.NO:
        itself = compare(reference(), first, tolerance, buffers=buffers)
        return replace(verdict, random=itself.verified is Verified.NO)
    return verdict


def check_outputs(
    start: Start, case: Case, model: Model, devices: Sequence[Device],
    precision: Callable[[Case], AbstractContextManager[Any]], *, split: Splits, rank: int | None = None,
) -> Verdict:  # fmt: skip
    """Run the forward on a small batch, and return the comparison of its output with that of the chunked reference.

    The reference runs in eval mode, under no_grad. `start` returns the forward in the mode of the case; the other
    arguments are those of `check`. `rank` is the rank of this process, whose output has the rows of this rank only;
    None for strategies without ranks. The forward must leave weights and buffers as they are.
    """
    small = _small(case, lambda one: split(one, model.module))
    rows = split(small, model.module).rows
    inputs, target = model.batch(small.batch_size, case.seed + 1)
    pristine = copy.deepcopy(model.module).eval()
    if case.compile:
        compile_forward(model.module)
    at = time.perf_counter()
    with start(small, model, devices, no_mark) as forward:
        output = forward(inputs, target)
        steps_s = time.perf_counter() - at
    device = devices[0].torch_device

    def reference() -> Any:
        module = copy.deepcopy(pristine).to(device)
        columns = _chunk(positional(inputs), rows, device)
        with torch.no_grad(), precision(case):
            outputs = [module(*arguments) for arguments in columns]
        return joined(outputs) if rank is None else outputs[rank]

    expected, tolerance = reference(), TOLERANCE[case.precision]
    given, wanted = tensors_by_name(output), tensors_by_name(expected)
    shapes, right = ([(name, tuple(t.shape)) for name, t in one.items()] for one in (given, wanted))
    if shapes != right:
        told, expects = (" and ".join(f"{n} of shape {s}" for n, s in one) for one in (shapes, right))
        return Verdict(Verified.NO, f"{told} instead of {expects}", float("inf"))
    before, after = pristine.state_dict(), model.module.state_dict()
    kept = [(name, after[name], before[name]) for name in before]
    outputs = [(name, given[name], wanted[name]) for name in wanted]
    verdict = replace(_verdict([*outputs, *kept], tolerance), steps_s=steps_s)
    if verdict.verified is Verified.NO:
        again = tensors_by_name(reference())
        itself = _verdict([(name, again[name], wanted[name]) for name in wanted], tolerance)
        return replace(verdict, random=itself.verified is Verified.NO)
    return verdict


def _trained(
    start: Start, case: Case, model: Model, devices: Sequence[Device], batch: tuple[Any, Any]
) -> tuple[nn.Module, int, float]:
    """Take one step and return the trained module and 1; in fp16, repeat with one step more until gradients are finite.

    The number that is returned is the number of steps; all of them but the last have overflowed. The last value is the
    time of all steps in seconds. The first repetition trains `model`, and each other one a copy of it.
    """
    pristine, steps_s = copy.deepcopy(model.module), 0.0
    for steps in range(1, len(SCALES) + 1):
        if steps > 1:
            model = replace(model, module=copy.deepcopy(pristine))
        if case.compile:
            compile_forward(model.module)
        with start(case, model, devices, no_mark) as step:
            at = time.perf_counter()
            for _ in range(steps):
                step(*batch)
            steps_s += time.perf_counter() - at
        if case.precision != "fp16" or _finite(model.module):
            break
    return model.module, steps, steps_s


def _reference(
    model: Model, case: Case, inputs: Any, target: Any, parts: Split, device: Device,
    precision: Callable[[Case], AbstractContextManager[Any]], steps: int,
) -> nn.Module:  # fmt: skip
    """Return a copy of the model's module with the gradients of the chunked reference after `steps` steps.

    The steps do not change the weights, but every forward changes buffers. Raises ValueError if the gradients overflow
    fp16 at every scale of the loss.
    """
    compute = block_chunked if parts.block else chunked
    # from the scale of the strategy's last step
    for scale in SCALES[steps - 1 :] if case.precision == "fp16" else SCALES[-1:]:
        module = copy.deepcopy(model.module)
        with precision(case):
            for _ in range(steps):
                module = compute(module, model.loss, inputs, target, parts, device.torch_device, scale=scale)
        if case.precision != "fp16" or _finite(module):
            return module
    raise ValueError(
        "the gradients of the chunked reference overflow fp16 even if the loss is not scaled: give --precision "
        "bf16 or fp32"
    )


def _finite(module: nn.Module) -> bool:
    """Return whether no gradient of the module has an infinite or NaN element."""
    return all(bool(_gradient(parameter).isfinite().all()) for parameter in module.parameters())


def _small(case: Case, split: Callable[[Case], Split]) -> Case:
    """Return the case with a small batch for as many replicas and forward passes, of unequal sizes if possible."""
    counts: Callable[[Case], tuple[int, int]] = lambda one: (len(one.rows), len(split(one).rows))  # noqa: E731
    expected = counts(case)
    most = max(4 * case.devices - 1 if case.devices > 1 else 4, 3 * expected[1] - 1)
    smaller = (replace(case, batch_size=rows) for rows in (*range(min(case.batch_size, most), 0, -1), case.batch_size))
    return next(small for small in smaller if counts(small) == expected)


def _replays(case: Case, parts: Split) -> bool:
    """Return whether each forward pass of a step can draw random numbers that its inputs determine.

    Compiled code and the graphs of a GPU draw their own numbers.
    """
    graphs = case.schedule not in ("", FASTEST) and parse(case.schedule).graphs == "on"
    return parts.replays and not (case.compile or graphs)


def _replay(module: nn.Module, parts: Split) -> None:
    """Let the forward of `module` replay its random numbers, and that of the block whose inputs a step splits.

    The block's replicas run while the module's forward waits for them, which must therefore not exclude them.
    """
    if parts.block:
        replay(module.get_submodule(parts.block), alone=True)
    replay(module, alone=not parts.block)


def _without_dropout(module: nn.Module) -> None:
    """Set the dropout probability of all of torch's own modules in `module` to 0."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0


def chunked(
    module: nn.Module, loss: Callable[..., torch.Tensor], inputs: Any, target: Any, split: Split, device: torch.device,
    *, scale: float = 1.0,
) -> nn.Module:  # fmt: skip
    """Compute the chunked reference: return `module` with the gradients and buffers that a correct step produces.

    `module` is moved to `device`. `inputs` and `target` are one batch, which is split into one chunk for each number of
    samples in `split.rows`. The loss is multiplied by `scale` for backward, and the gradients are divided by it.
    """
    module = module.to(device)
    columns = _chunk(positional(inputs), split.rows, device)
    copies = [copy.deepcopy(module) for _ in columns]
    outputs = [one(*arguments) for one, arguments in zip(copies, columns, strict=True)]
    ends: list[list[torch.Tensor]] = [[] for _ in columns]
    cut = [mapped(output, partial(_cut, into=into)) for output, into in zip(outputs, ends, strict=True)]
    (loss(joined(cut), mapped(target, lambda tensor: tensor.to(device))) * scale).backward()
    for output, into in zip(outputs, ends, strict=True):
        used = [(t, end.grad.clone()) for t, end in zip(all_tensors(output), into, strict=True) if end.grad is not None]
        torch.autograd.backward([tensor for tensor, _ in used], [gradient for _, gradient in used])
    _collect(module, copies, scale)
    return module


def block_chunked(
    module: nn.Module, loss: Callable[..., torch.Tensor], inputs: Any, target: Any, split: Split, device: torch.device,
    *, scale: float = 1.0,
) -> nn.Module:  # fmt: skip
    """Return `module` with the reference's gradients and buffers, for a step that splits the inputs of one block only.

    The arguments are those of `chunked`; `split` has the name of the block and the sizes of its chunks.
    """
    block = module.get_submodule(split.block)
    block.to(device)
    copies = [copy.deepcopy(block) for _ in split.rows]
    module.set_submodule(split.block, _Chunked(copies, split.rows, device))
    module = chunked(module, loss, inputs, target, Split((sum(split.rows),)), device, scale=scale)
    module.set_submodule(split.block, block)
    _collect(block, copies)
    return module


class _Chunked(nn.Module):
    """A module that runs copies of a block, one on each chunk of its inputs, and concatenates their outputs."""

    def __init__(self, copies: Sequence[nn.Module], rows: Sequence[int], device: torch.device) -> None:
        super().__init__()
        self.copies, self._rows, self._device = nn.ModuleList(copies), rows, device

    def forward(self, *inputs: Any, **named: Any) -> torch.Tensor:
        columns = zip(*(_chunk(value, self._rows, self._device) for value in (*inputs, *named.values())), strict=True)
        count = len(inputs)
        return torch.cat([
            one(*column[:count], **dict(zip(named, column[count:], strict=True)))
            for one, column in zip(self.copies, columns, strict=True)
        ])  # fmt: skip


def _collect(module: nn.Module, copies: Sequence[nn.Module], scale: float = 1.0) -> None:
    """Give `module` the sums of the copies' gradients, divided by `scale`, and the buffers of the first copy."""
    for name, parameter in module.named_parameters():
        parts = [one.get_parameter(name).grad for one in copies]
        total = _ordered_sum([p for p in parts if p is not None])
        parameter.grad = total if total is None or scale == 1 else total / scale
    for name, buffer in module.named_buffers():
        buffer.copy_(copies[0].get_buffer(name))


def _chunk(value: Any, rows: Sequence[int], device: torch.device) -> list[Any]:
    """Return one structure for each of `rows`, with copies of that number of rows of each tensor on `device`."""
    ranges = [slice(end - count, end) for count, end in zip(rows, accumulate(rows), strict=True)]
    return [mapped(value, partial(_piece, rows=one, device=device)) for one in ranges]


def _piece(tensor: torch.Tensor, rows: slice, device: torch.device) -> torch.Tensor:
    return tensor[rows].to(device, copy=True)


def _cut(tensor: torch.Tensor, into: list[torch.Tensor]) -> torch.Tensor:
    """Return the tensor without its autograd history, and append it to `into`; it requires gradients if it did before.

    An object may copy the tensors from which it is made, as a cache does, so the tensor is not found in the result.
    """
    end = tensor.detach().requires_grad_(tensor.requires_grad)
    into.append(end)
    return end


def _ordered_sum(parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the sum of the gradients in `parts`, added in this order; None if `parts` is empty."""
    if not parts:
        return None
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def compare(module: nn.Module, reference: nn.Module, tolerance: float, *, buffers: bool = True) -> Verdict:
    """Compare the gradients of two modules, and with `buffers` also their buffers; return the verdict of `_verdict`."""
    pairs = [(n, _gradient(p), _gradient(reference.get_parameter(n))) for n, p in module.named_parameters()]
    if buffers:
        pairs += [(n, b, reference.get_buffer(n)) for n, b in module.named_buffers()]
    return _verdict(pairs, tolerance)


def _verdict(pairs: Sequence[tuple[str, torch.Tensor, torch.Tensor]], tolerance: float) -> Verdict:
    """Return the verdict on tensors, each given as (name, tensor, the reference's tensor).

    The error of a tensor is the norm of its difference from the reference's tensor, divided by the norm of the
    reference's tensor. If that norm is tiny, the divisor is a fixed fraction of the largest norm of all tensors. The
    verdict is BITWISE if all tensors are equal, WITHIN_TOLERANCE if no error exceeds `tolerance`, and NO otherwise.
    """
    # the reference is on one device, and the module's layers may be on several
    pairs = [(name, ours.to(theirs.device), theirs) for name, ours, theirs in pairs]
    if all(torch.equal(ours, theirs) for _, ours, theirs in pairs):
        return Verdict(Verified.BITWISE)
    # tiny gradients are compared relative to a fraction of the largest norm, so that rounding does not decide
    floor = 1e-4 * max(theirs.double().norm().item() for _, _, theirs in pairs)
    errors = {
        name: (ours.double() - theirs.double()).norm().item() / max(theirs.double().norm().item(), floor, 1e-30)
        for name, ours, theirs in pairs
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    # not (error > tolerance), so that NaN fails
    verified = Verified.WITHIN_TOLERANCE if errors[worst] <= tolerance else Verified.NO
    return Verdict(verified, worst, errors[worst])


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient of a parameter, or zeros if it is None.

    Zeros are needed, because replicas return zeros for a parameter that they do not use.
    """
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
