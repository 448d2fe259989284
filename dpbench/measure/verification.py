"""Verification: compare a strategy's gradients with a reference before the strategy may be timed.

The ranks of DistributedDataParallel have a loss each, and DDP averages their gradients. If the loss
averages over the valid items of a batch only, this mean is not the gradient of the whole batch.
Verification accepts it from strategies with ranks, and records by how much the two differ; see
`check`.

If the steps of a case do not train, the outputs of a forward are compared instead; see
`check_outputs`.

The reference, called the chunked reference, does not use the engine. It splits the batch into one
chunk per forward pass of the strategy, and runs one deep copy of the module per chunk, one after
the other on the first device. It computes the loss of the concatenated outputs, and adds the
gradients of the copies in the order of the chunks.

Replicas of one process draw random numbers from one generator, in an order that depends on the
threads. Verification therefore seeds the generator before each forward with a number computed from
the forward's inputs. The strategy and the reference then draw the same numbers for the same chunk:
in modules such as nn.Dropout, in functions, and in scaled dot-product attention. Where this is not
possible, the dropout of torch's own modules is off.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dpbench.engine.settings import SAVED_RANDOM_STATES
from dpbench.hardware.device import Device
from dpbench.measure.reference import (
    all_tensors,
    averaged,
    chunked,
    in_chunks,
    joined,
    tensors_by_name,
)
from dpbench.models import Model, compile_forward, copied, load, with_forward
from dpbench.records import Case, Verified, no_mark
from dpbench.records.arguments import call
from dpbench.records.facts import Averaging
from dpbench.records.spelling import dashed
from dpbench.strategies import Split, precision_of

Start = Callable[..., AbstractContextManager[Callable[[Any, Any], torch.Tensor]]]
Splits = Callable[[Case, nn.Module], Split]
"""A function of a case and a module that returns how a step of the case splits the batch."""
Compute = Callable[..., nn.Module]
"""A function with the signature of `chunked` that returns a module with the gradients of a step."""

TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2, "fp16": 1e-2}
"""The largest permitted relative error of a tensor, by precision; errors are measured by norms.

In fp32, another order of additions causes much smaller errors. tf32 and fp16 round to 11
significant bits, bf16 to 8.
"""
_ROUNDING = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""The precision whose tolerance a step of weights of this dtype has."""
_ALONE = threading.RLock()
"""Held during a replayed forward, because the replicas' threads share the host's generator."""
SCALES = tuple(2.0**power for power in range(16, -1, -1))
"""The GradScaler's factors of the loss, in order; each overflow leads to the next."""


@dataclass(frozen=True)
class Verification:
    """The comparison of a strategy's gradients or outputs with those of the chunked reference.

    `worst` is the name of the parameter, buffer or output with the largest relative error, which is
    `error`; it is empty if all tensors are equal. `random` is True if two runs of the reference
    differ. `steps_s` is the time of the strategy's steps in seconds; the first step of a compiled
    module contains compilation. `averaging` is None unless the gradients are the mean of the
    gradients of the ranks' own losses, and not those of the whole batch; `verified`, `worst` and
    `error` then compare the gradients with this mean.
    """

    verified: Verified
    worst: str = ""
    error: float = 0.0
    random: bool = False
    steps_s: float = 0.0
    averaging: Averaging | None = None

    def __str__(self) -> str:
        if math.isnan(self.error):
            return (
                f"{self.worst} cannot be compared with the chunked reference: one of them contains"
                " NaN or infinity"
            )
        text = (
            f"{self.worst} differs from the chunked reference by {self.error:.2g} times the norm of"
            " the reference"
        )
        if not self.random:
            return text
        return (
            f"{text}, but two runs of the reference also differ from each other: the model draws"
            " random numbers that dpbench cannot repeat. Let the model draw them in forward, not"
            " in the loss, from torch's default generator, without compilation or layers spread"
            " over GPUs; or turn them off (for example dropout)"
        )


def check(
    start: Start,
    case: Case,
    model: Model,
    devices: Sequence[Device],
    *,
    split: Splits = lambda case, module: Split(case.rows),
    buffers: bool = True,
) -> Verification:
    """Take one step with a small batch, and compare its gradients with those of the reference.

    `start` and `split` are the strategy's methods. With `buffers`, the module's buffers are
    compared too. The step updates the weights of `model`.

    Several steps are taken in fp16 if the gradients overflow, because a GradScaler then skips the
    update and halves its scale; the gradients of the last step are compared. Raises ValueError if
    the reference overflows at every scale.

    Gradients of a strategy with ranks that differ from the reference are compared with the mean of
    the gradients of each rank's own loss. If they agree, within the same tolerance, they are right,
    and the result has `averaging`.
    """
    small = _small(case, lambda one: split(one, model.module))
    parts = split(small, model.module)
    # clipped gradients are not those of the reference
    model = replace(model, loop=replace(model.loop, clip_norm=None))
    # compiled code draws its own random numbers
    if case.compile or not (parts.replays and replay(model.module)):
        _without_dropout(model.module)
    inputs, target = model.batch(small.batch_size, case.seed + 1)
    pristine = copied(model.module)
    trained, steps, steps_s = _trained(start, small, model, devices, (inputs, target))

    def reference(compute: Compute = chunked) -> nn.Module:
        untrained = replace(model, module=pristine)
        return _reference(untrained, small, inputs, target, parts, devices[0], steps, compute)

    first = reference()
    tolerance = tolerance_of(case, pristine)
    _check_gradients(first)
    verdict = replace(compare(trained, first, tolerance, buffers=buffers), steps_s=steps_s)
    if verdict.verified is Verified.NO and case.traits.ranks and not model.owns_loss:
        mean = reference(averaged)
        _check_own_losses(mean, parts.rows)
        own_losses = compare(trained, mean, tolerance, buffers=buffers)
        if own_losses.verified is not Verified.NO:
            return replace(
                own_losses, steps_s=steps_s, averaging=_averaging(trained, first, small.batch_size)
            )
    if verdict.verified is Verified.NO:
        itself = compare(reference(), first, tolerance, buffers=buffers)
        return replace(verdict, random=itself.verified is Verified.NO)
    return verdict


def _check_own_losses(mean: nn.Module, rows: Sequence[int]) -> None:
    """Raise ValueError if the mean of the gradients of the chunks' own losses is not finite."""
    for name, parameter in mean.named_parameters():
        if kind := _not_finite(_gradient(parameter)):
            raise ValueError(
                f"the gradient of {name} contains {kind} if each rank or micro-batch has its own"
                f" loss (of {', '.join(map(str, rows))} samples), but not if the loss is that of"
                " the whole batch: a mean over the valid items divides by zero where no item is"
                " valid; divide by at least 1, or let each chunk have a valid item"
            )


def _averaging(module: nn.Module, whole: nn.Module, rows: int) -> Averaging:
    errors = _errors(_gradients(module, whole), ())
    trained = [
        errors[name] for name, parameter in whole.named_parameters() if parameter.requires_grad
    ]
    return Averaging(min(trained), max(trained), rows)


def _check_gradients(module: nn.Module) -> None:
    """Raise ValueError if the chunked reference has no gradient, or one that is not finite."""
    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    if not gradients:
        raise ValueError(
            "no parameter has a gradient after backward in the first step, so nothing is trained:"
            " the loss must depend on the parameters, without detach(), torch.no_grad() or a"
            " conversion to numbers in between"
        )
    for name, gradient in gradients.items():
        if kind := _not_finite(gradient):
            raise ValueError(
                f"the gradient of {name} contains {kind} in the first step, also without data"
                " parallelism: correct the model, its batch or its loss; a division by zero,"
                " log(0) or a too large input gives such numbers"
            )


UNVERIFIED = f"or give {dashed('unverified')}, which labels every figure UNVERIFIED"
"""The last remedy of a case that verification refuses."""
DIVERGES = (
    "the first step was correct, so the training diverges: correct the model or its batches, or"
    f" give {dashed('optimizer', 'own')} with a smaller learning rate in the model's optimizer;"
    f" {UNVERIFIED}"
)
"""The cause of steps that give NaN or infinity only after verification, and the remedy."""


def check_results(results: Sequence[Any], last: int, *, trains: bool) -> None:
    """Raise ValueError if a result contains NaN or, if the steps train, infinity.

    `results` has the losses (without training, the outputs) of consecutive steps. `last` is the
    number of the last of these steps, counted from 1; the error names it if a strategy writes all
    losses to the same memory.
    """
    tensors: dict[int, tuple[int, torch.Tensor]] = {}
    for step, result in enumerate(results, start=last - len(results) + 1):
        tensors |= {tensor.data_ptr(): (step, tensor) for tensor in all_tensors(result)}
    for step, tensor in sorted(tensors.values(), key=lambda one: one[0]):
        if (has := _not_finite(tensor)) == "NaN" or (has and trains):
            raise ValueError(
                f"the {'loss' if trains else 'output'} of step {step} contains {has}; {DIVERGES}"
            )


def check_weights(module: nn.Module) -> None:
    """Raise ValueError if a trained weight is NaN or infinity: no loss shows the last update."""
    for name, parameter in module.named_parameters():
        # a device may be full
        if parameter.requires_grad and (has := _not_finite(parameter.detach().cpu())):
            raise ValueError(f"after the timed steps, the weight {name} contains {has}; {DIVERGES}")


def _not_finite(tensor: torch.Tensor) -> str:
    if bool(tensor.isfinite().all()):
        return ""
    return "NaN" if bool(tensor.isnan().any()) else "infinity"


def tolerance_of(case: Case, module: nn.Module) -> float:
    """Return the largest permitted relative error in a step of `module`, by its rounding."""
    rounding = {case.precision, *(_ROUNDING.get(one.dtype, "fp32") for one in module.parameters())}
    if case.traits.rounds_gradients:
        rounding.add("bf16")
    return max(TOLERANCE[one] for one in rounding)


def dependence(case: Case, device: Device, compute: Compute = chunked) -> float:
    """Return the relative difference between the gradients in chunks and on the whole batch.

    The norm of the difference is divided by the norm of the gradients on the whole batch. The
    result is 0, up to rounding, if the loss is a mean over samples that do not depend on each
    other. With `compute=averaged`, each chunk has its own loss, as a rank has. Dropout is off.
    """
    gradients = []
    for rows in (case.rows, (case.batch_size,)):
        model = load(case.model, case.size, case.seed)
        _without_dropout(model.module)
        inputs, target = model.batch(case.batch_size, case.seed + 1)
        module = _reference(model, case, inputs, target, Split(rows), device, 1, compute)
        gradients.append(
            torch.cat([_gradient(one).double().flatten() for one in module.parameters()])
        )
    return float((gradients[0] - gradients[1]).norm() / gradients[1].norm().clamp(min=1e-30))


def check_outputs(
    start: Start,
    case: Case,
    model: Model,
    devices: Sequence[Device],
    *,
    split: Splits,
    rank: int | None = None,
) -> Verification:
    """Run the forward on a small batch, and compare its output with the chunked reference's.

    The reference runs in eval mode, under no_grad. `start` returns a context manager that yields
    the forward in the mode of the case; the other arguments are those of `check`. `rank` is the
    rank of this process, whose output has only the rows of this rank; None for strategies without
    ranks. The forward must not change weights or buffers.
    """
    small = _small(case, lambda one: split(one, model.module))
    rows = split(small, model.module).rows
    inputs, target = model.batch(small.batch_size, case.seed + 1)
    pristine = copied(model.module).eval()
    if case.compile:
        compile_forward(model.module)
    began_s = time.perf_counter()
    with start(small, model, devices, no_mark) as forward:
        output = forward(inputs, target)
        steps_s = time.perf_counter() - began_s
    device = devices[0].torch_device

    def reference() -> Any:
        module = copied(pristine).to(device)
        columns = in_chunks(inputs, rows, device)
        with torch.no_grad(), precision_of(case):
            outputs = [call(module, chunk) for chunk in columns]
        return joined(outputs) if rank is None else outputs[rank]

    expected = reference()
    tolerance = tolerance_of(case, pristine)
    given, wanted = tensors_by_name(output), tensors_by_name(expected)
    shapes, right = ([(name, tuple(t.shape)) for name, t in one.items()] for one in (given, wanted))
    if shapes != right:
        told, expects = (
            " and ".join(f"{n} of shape {s}" for n, s in one) for one in (shapes, right)
        )
        return Verification(
            Verified.NO, f"the forward's result ({told} instead of {expects})", float("inf")
        )
    before, after = pristine.state_dict(), model.module.state_dict()
    kept = [(name, after[name], before[name]) for name in before]
    if with_nan := next((name for name, tensor in wanted.items() if tensor.isnan().any()), ""):
        raise ValueError(
            f"{with_nan} contains NaN, also without data parallelism: correct the model or its"
            " batch"
        )
    outputs = [(name, given[name], wanted[name]) for name in wanted]
    verdict = replace(_verdict(outputs, kept, tolerance), steps_s=steps_s)
    if verdict.verified is Verified.NO:
        again = tensors_by_name(reference())
        itself = _verdict([(name, again[name], wanted[name]) for name in wanted], (), tolerance)
        return replace(verdict, random=itself.verified is Verified.NO)
    return verdict


def _trained(
    start: Start, case: Case, model: Model, devices: Sequence[Device], batch: tuple[Any, Any]
) -> tuple[nn.Module, int, float]:
    """Return the trained module, the steps of the last attempt, and the seconds of all attempts.

    The first attempt takes one step of `model`. In fp16, as long as the gradients of the last step
    overflow, another attempt follows, which starts from a fresh copy of the model and takes one
    step more.
    """
    pristine = copied(model.module)
    steps_s = 0.0
    for steps in range(1, len(SCALES) + 1):
        if steps > 1:
            model = replace(model, module=copied(pristine))
        if case.compile:
            compile_forward(model.module)
        with start(case, model, devices, no_mark) as step:
            began_s = time.perf_counter()
            for _ in range(steps):
                step(*batch)
            steps_s += time.perf_counter() - began_s
        if case.precision != "fp16" or _finite(model.module):
            break
    return model.module, steps, steps_s


def _reference(
    model: Model,
    case: Case,
    inputs: Any,
    target: Any,
    parts: Split,
    device: Device,
    steps: int,
    compute: Compute = chunked,
) -> nn.Module:
    """Return a copy of the module with the chunked reference's gradients after `steps` steps.

    With `compute=averaged`, they are the mean of those of the chunks' own losses. The steps do not
    change the weights, but every forward changes buffers. Raises ValueError if the gradients
    overflow fp16 at every scale of the loss.
    """
    # begin with the scale that the strategy had in its last step
    for scale in SCALES[steps - 1 :] if case.precision == "fp16" else SCALES[-1:]:
        module = copied(model.module)
        with precision_of(case):
            for _ in range(steps):
                module = compute(
                    module, model.loss, inputs, target, parts, device.torch_device, scale=scale
                )
        if case.precision != "fp16" or _finite(module):
            return module
    raise ValueError(
        "the gradients of the chunked reference overflow fp16 even if the loss is not scaled: give"
        f" {dashed('precision', 'bf16')} or fp32"
    )


def _finite(module: nn.Module) -> bool:
    return all(bool(_gradient(parameter).isfinite().all()) for parameter in module.parameters())


def _small(case: Case, split: Callable[[Case], Split]) -> Case:
    """Return the case with a smaller batch, if possible in unequal chunks."""

    def counts(one: Case) -> tuple[int, int]:
        return len(one.rows), len(split(one).rows)

    expected = counts(case)
    most = max(4 * case.devices - 1 if case.devices > 1 else 4, 3 * expected[1] - 1)
    smaller = (
        replace(case, batch_size=rows)
        for rows in (*range(min(case.batch_size, most), 0, -1), case.batch_size)
    )
    return next(small for small in smaller if counts(small) == expected)


def replay(module: nn.Module) -> bool:
    """Let each forward of `module` seed the random generators from its inputs, then restore them.

    Only one thread at a time runs a forward, because all threads share the generator of the host.
    The copies and replicas of the module replay too. Return whether the module can replay; see
    `with_forward`.
    """

    def replaying(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
            tensors = all_tensors((inputs, named))
            gpus = sorted({one.device.index for one in tensors if one.device.type == "cuda"})
            with _ALONE, torch.random.fork_rng(devices=gpus):
                torch.default_generator.manual_seed(seed := _seed(tensors))
                for index in gpus:
                    torch.cuda.default_generators[index].manual_seed(seed)
                output = original(self, *inputs, **named)
                SAVED_RANDOM_STATES.forget()
                return output

        return forward

    return with_forward(module, replaying)


def _seed(tensors: list[torch.Tensor]) -> int:
    seed = 0
    for tensor in tensors:
        values = tensor.detach().cpu().contiguous().reshape(-1)
        seed = zlib.crc32(values.view(torch.uint8).numpy().tobytes(), seed)
    return seed


def _without_dropout(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
        elif isinstance(part, nn.RNNBase | nn.MultiheadAttention):
            part.dropout = 0.0


def compare(
    module: nn.Module, reference: nn.Module, tolerance: float, *, buffers: bool = True
) -> Verification:
    """Compare a module's gradients, and with `buffers` its buffers, with those of `reference`.

    The error of a tensor is the norm of its difference from the reference's tensor, divided by the
    norm of the latter. To ignore rounding errors of tiny tensors, the divisor has a lower limit:
    for a gradient, 1e-4 of the largest norm of all gradients; for a buffer, the norm of a tensor of
    its shape with all elements 1e-4. The verdict is BITWISE if all tensors are equal,
    WITHIN_TOLERANCE if no error exceeds `tolerance`, and NO otherwise.
    """
    gradients = _gradients(module, reference)
    kept = [(n, b, reference.get_buffer(n)) for n, b in module.named_buffers()] if buffers else []
    return _verdict(gradients, kept, tolerance)


def _gradients(module: nn.Module, reference: nn.Module) -> Pairs:
    return [
        (n, _gradient(p), _gradient(reference.get_parameter(n)))
        for n, p in module.named_parameters()
    ]


Pairs = Sequence[tuple[str, torch.Tensor, torch.Tensor]]
"""Tensors to compare, each as (name, tensor, the reference's tensor)."""


def _verdict(results: Pairs, kept: Pairs, tolerance: float) -> Verification:
    """Return the verdict (see `compare`) on gradients or outputs, and on what is `kept`."""
    if all(torch.equal(ours.to(theirs.device), theirs) for _, ours, theirs in (*results, *kept)):
        return Verification(Verified.BITWISE)
    errors = _errors(results, kept)
    worst = max(
        errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf")
    )
    # not (error > tolerance), so that NaN fails
    verified = Verified.WITHIN_TOLERANCE if errors[worst] <= tolerance else Verified.NO
    return Verification(verified, worst, errors[worst])


def _errors(results: Pairs, kept: Pairs) -> dict[str, float]:
    """Return the error of each tensor by its name (see `compare`)."""
    # the reference is on one device, and the module's layers may be on several
    results, kept = (
        [(name, ours.to(theirs.device), theirs) for name, ours, theirs in pairs]
        for pairs in (results, kept)
    )
    largest = max((theirs.double().norm().item() for _, _, theirs in results), default=0.0)
    floors = [1e-4 * largest] * len(results) + [
        1e-4 * theirs.numel() ** 0.5 for _, _, theirs in kept
    ]
    return {
        name: (
            (ours.double() - theirs.double()).norm().item()
            / max(theirs.double().norm().item(), floor, 1e-30)
        )
        for (name, ours, theirs), floor in zip((*results, *kept), floors, strict=True)
    }


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return the gradient, or zeros for None: replicas return zeros for unused parameters."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
