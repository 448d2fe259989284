"""Trace: one training step on one device as lists of ops, with work, allocations and releases.

The step runs on fake tensors, which have shapes but no values. A model is therefore traced at any
batch size within about a second, without its device. A model whose shapes depend on values (packed
sequences) is traced on real tensors instead.

Steps on several devices can be assembled from the parts: forward, loss, the backward of the loss,
the backward of the module, the optimizer's first step (which creates its state), and a later
optimizer step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpbench.engine.train_step import OptimizerFactory
from dpbench.models import Model
from dpbench.predict.recorder import Op, OpRecorder
from dpbench.records import Phase
from dpbench.records.arguments import call

Build = Callable[[], Model]
Context = Callable[[], AbstractContextManager[Any]]

FEW = 3
"""The number of samples in the batch from which shapes are taken.

A tensor with this number of rows is assumed to have one row per sample.
"""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of one model on `rows` samples on one device.

    `forward` to `optimizer` are the ops of the parts of the step; the optimizer's first step
    creates its state. The fields `*_bytes` have the size of each of these tensors;
    `parameter_bytes` and `trainable` are in the order of `module.parameters()`.
    `ready` lists the indices of the parameters in the order in which backward completes their
    gradients, and `ready_at` the number of backward ops after which each is complete. `outputs`,
    `output_gradients`, `gradients` and `losses` are the numbers of these tensors' storages; a
    missing gradient is None. `fake` is False if the model was traced on real tensors.
    """

    model: str
    rows: int
    forward: tuple[Op, ...]
    loss: tuple[Op, ...]
    loss_backward: tuple[Op, ...]
    backward: tuple[Op, ...]
    optimizer_first: tuple[Op, ...]
    optimizer: tuple[Op, ...]
    modules: int
    parameter_bytes: tuple[int, ...]
    trainable: tuple[bool, ...]
    ready: tuple[int, ...]
    ready_at: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    input_bytes: tuple[int, ...]
    target_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]
    outputs: tuple[int, ...]
    output_gradients: tuple[int | None, ...]
    gradients: tuple[int | None, ...]
    losses: tuple[int, ...]
    released_at: tuple[int, ...]
    """After how many backward ops the graph releases each parameter, buffer, input and output."""
    optimizer_name: str
    fake: bool

    @property
    def ops(self) -> tuple[Op, ...]:
        """Return the ops of one complete later step, in the order of execution."""
        return (*self.forward, *self.loss, *self.loss_backward, *self.backward, *self.optimizer)

    def during(self, *phases: Phase) -> list[Op]:
        """Return the ops of one complete later step in the given phases."""
        return [op for op in self.ops if op.phase in phases]


def trace(
    build: Build,
    rows: int,
    optimizer_fn: OptimizerFactory,
    *,
    device: str = "cpu",
    precision: Context = nullcontext,
    mode: Context = nullcontext,
    fake_only: bool = False,
) -> Trace:
    """Return the trace of one training step of the model `build()` on `rows` samples.

    The `device` of the fake tensors determines the operators that torch selects: "cpu" works
    everywhere, "lazy:0" selects those of emulated devices (unfused attention), and "cuda:0" needs a
    CUDA build of torch and a GPU. Forward and loss run in the context `precision()`; forward, loss
    and the backward of the module in `mode()`. A model that fails on fake tensors, because it reads
    values or hides tensors from torch, is traced on real tensors on the CPU, unless `fake_only`. An
    error on real tensors always propagates.
    """
    place = torch.device(device)
    try:
        model = shapes_of(build)
        inputs, target = model.batch(FEW, 0)
        with FakeTensorMode():
            _place(model.module, place)
            batch = [_rows_of(value, rows, place) for value in (inputs, target)]
            step = _TracedStep(model, batch, place, optimizer_fn, precision, mode)
            return step.trace(rows, fake=True)
    except Exception:  # a limit of fake tensors; an error of the model itself occurs again below
        if fake_only:
            raise
        model = build()
        inputs, target = model.batch(rows, 0)
        batch = [inputs, target]
        step = _TracedStep(model, batch, torch.device("cpu"), optimizer_fn, precision, mode)
        return step.trace(rows, fake=False)


def trace_optimizer(
    optimizer_fn: OptimizerFactory, sizes_bytes: Sequence[int], *, device: str
) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """Return the ops of the first and of a later step for fp32 vectors of these sizes in bytes.

    `device` is that of the fake tensors, as in `trace`.
    """
    with FakeTensorMode():
        parameters = [nn.Parameter(torch.empty(size // 4, device=device)) for size in sizes_bytes]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer = optimizer_fn(parameters)
        recorder = OpRecorder(torch.device(device))
        with recorder:
            for name in ("first", "later"):
                with recorder.part(name, Phase.OPTIMIZER):
                    optimizer.step()
                recorder.forget(_host_state(optimizer))
    ops = recorder.ops("first", "later")
    return ops["first"], ops["later"]


def shapes_of(build: Build) -> Model:
    """Return the model on the meta device, or on the CPU if its construction needs values."""
    try:
        with torch.device("meta"):
            return build()
    except (RuntimeError, NotImplementedError):
        return build()


class _TracedStep:
    def __init__(
        self,
        model: Model,
        batch: Sequence[Any],
        device: torch.device,
        optimizer_fn: OptimizerFactory,
        precision: Context,
        mode: Context,
    ) -> None:
        self._precision = precision
        self._mode = mode
        self._model = model
        self._module = model.module
        self._inputs, self._target = batch
        self._optimizer = optimizer_fn(self._module.parameters())
        self._parameters = list(self._module.parameters())
        self._ready: list[tuple[int, int]] = []
        self._recorder = OpRecorder(device)

    def trace(self, rows: int, *, fake: bool) -> Trace:
        """The first step provides the optimizer's first step and the releases of saved tensors."""
        number = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        hooks = [
            p.register_post_accumulate_grad_hook(
                lambda p: self._ready.append((number[id(p)], self._recorder.at))
            )
            for p in self._parameters
            if p.requires_grad
        ]
        with self._recorder:
            released = self._step("first")["released_at"]
            roles = {**self._step(""), "released_at": released}
        for hook in hooks:
            hook.remove()
        parts: dict[str, Any] = {**self._recorder.ops(*PARTS)}
        return Trace(
            model=self._model.name,
            rows=rows,
            modules=sum(1 for _ in self._module.modules()),
            parameter_bytes=_sizes(self._parameters),
            trainable=tuple(p.requires_grad for p in self._parameters),
            ready=tuple(n for n, _ in self._ready),
            ready_at=tuple(at for _, at in self._ready),
            buffer_bytes=_sizes(self._module.buffers()),
            input_bytes=_sizes(tree_flatten(self._inputs)[0]),
            target_bytes=_sizes(tree_flatten(self._target)[0]),
            optimizer_name=type(self._optimizer).__name__,
            fake=fake,
            **parts,
            **roles,
        )

    def _step(self, name: str) -> dict[str, Any]:
        """Return the fields of `Trace` that describe the step's storages, by name.

        In the step "first", the releases of saved tensors are recorded; a later step is "".
        """
        record = self._recorder
        self._optimizer.zero_grad(set_to_none=True)
        self._ready.clear()
        saved = _Saved(record)
        hooks = (
            torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack)
            if name
            else nullcontext()
        )
        with record.part(f"{name}forward", Phase.FORWARD), hooks, self._mode(), self._precision():
            output = call(self._module, self._inputs)
        leaves, form = tree_flatten(output)
        cut = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in leaves
        ]
        tensors = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        ends = [x for x in cut if isinstance(x, torch.Tensor) and x.requires_grad]
        with record.part(f"{name}loss", Phase.LOSS), self._mode(), self._precision():
            loss = self._model.loss(tree_unflatten(cut, form), self._target)
        with record.part(f"{name}loss_backward", Phase.BACKWARD):
            seed = torch.ones_like(loss)
            loss.backward(seed)
        gradients = [x.grad for x in ends]
        names = tuple(None if g is None else record.storage(g) for g in gradients)
        for x in ends:
            x.grad = None
        begin = record.part(f"{name}backward", Phase.BACKWARD)
        edge = _Edge.apply(gradients, begin, *tensors)  # type: ignore[no-untyped-call]
        with self._mode():  # a checkpointed module runs parts of its forward again
            _run_backward(edge)
        del seed  # not earlier: torch keeps the seed until the whole backward has ended
        begin.__exit__(None, None, None)
        inputs = tree_flatten(self._inputs)[0]
        tracked = [*self._parameters, *self._module.buffers(), *inputs, *leaves]
        roles = {
            "released_at": tuple(saved.at(x) for x in tracked if isinstance(x, torch.Tensor)),
            "output_bytes": _sizes(leaves),
            "outputs": tuple(record.storage(x) for x in leaves if isinstance(x, torch.Tensor)),
            "output_gradients": names,
            "gradients": tuple(
                None if p.grad is None else record.storage(p.grad) for p in self._parameters
            ),
            "losses": (record.storage(loss),),
        }
        with record.part(f"optimizer{'_first' if name else ''}", Phase.OPTIMIZER):
            self._optimizer.step()
        record.forget(_host_state(self._optimizer))
        return roles


PARTS = ("forward", "loss", "loss_backward", "backward", "optimizer_first", "optimizer")
"""The parts of the two traced steps of which `Trace` has the ops, in fields of these names."""


def _run_backward(end: torch.Tensor) -> None:
    """Keep TorchFunctionModes active, which `end.backward()` would deactivate."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (end,),
        (torch.ones_like(end),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class _Edge(Function):
    """The boundary between the module and the loss.

    Backward passes the gradients of the loss to the module and keeps no references to them.
    """

    @staticmethod
    def forward(
        ctx: Any, given: list[Any], begin: AbstractContextManager[None], *outputs: torch.Tensor
    ) -> Any:
        ctx.given = given
        ctx.begin = begin
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[Any, ...]:
        ctx.begin.__enter__()
        gradients = tuple(ctx.given)
        ctx.given.clear()
        return None, None, *gradients


class _Saved:
    """Hooks that record when the tensors that forward saves for backward are released."""

    def __init__(self, recorder: OpRecorder) -> None:
        self._recorder = recorder
        self._at: dict[int, int] = {}

    def pack(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor)
        weakref.finalize(held, self._released, self._recorder.storage(tensor)).atexit = False
        return held

    def unpack(self, held: _Held) -> torch.Tensor:
        return held.tensor

    def _released(self, storage: int) -> None:
        self._at[storage] = self._recorder.at

    def at(self, tensor: torch.Tensor) -> int:
        """Return after how many backward ops the last reference is released; 0 if never saved."""
        return self._at.get(self._recorder.storage(tensor), 0)


class _Held:
    """A separate object for each saved tensor, whose finalizer records the release."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _sizes(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(value.nbytes for value in values if isinstance(value, torch.Tensor))


def _rows_of(value: Any, rows: int, device: torch.device) -> Any:
    """Make fake tensors with `rows` rows instead of `FEW`, under the active FakeTensorMode."""
    leaves, form = tree_flatten(value)
    made = [
        (
            torch.empty(
                (rows, *x.shape[1:]) if x.dim() and x.shape[0] == FEW else x.shape,
                dtype=x.dtype,
                device=device,
            )
            if isinstance(x, torch.Tensor)
            else x
        )
        for x in leaves
    ]
    return tree_unflatten(made, form)


def _place(module: nn.Module, device: torch.device) -> None:
    """Replace all parameters and buffers by fake tensors; tied parameters stay tied."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake = torch.empty_strided(
                        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
                    )
                    wants = tensor.requires_grad
                    made[id(tensor)] = (
                        nn.Parameter(fake, wants) if isinstance(tensor, nn.Parameter) else fake
                    )
                held[name] = made[id(tensor)]
        if isinstance(part, nn.RNNBase):  # RNNs keep a second list of their weights
            part._flat_weights = [getattr(part, name, None) for name in part._flat_weights_names]


def _host_state(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the step counters that torch keeps in host memory, unless capturable or fused."""
    capturable = any(
        group.get("capturable") or group.get("fused") for group in optimizer.param_groups
    )
    if capturable:
        return []
    state = [v for values in optimizer.state.values() for v in values.values()]
    return [v for v in state if isinstance(v, torch.Tensor) and v.dim() == 0]
