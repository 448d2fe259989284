"""Run CUDA programs on the host and find their races.

For example: `with detect() as found: ...; assert not found.races`.

Inside the context, ordinary tensors of the host pretend to be on GPUs: `tensor.device`,
`.to("cuda:1")`, factories with `device=`, `record_stream` and `torch.cuda`'s streams and events
work as on a machine with GPUs, in all threads that get the caller's modes. Each operator is an
access of the memory that it reads and writes, by the stream that is current on its tensors' device;
an operator with tensors of several devices is an error. `clocks`, `recorder` and `backward`
describe the rules for streams, memory and autograd. The rules for copies and collectives are:

- A copy between two GPUs runs on the current stream of the source's device. Before it, this stream
  waits for the current stream of the target's device; afterwards the latter waits for the former
  (`copy_device_to_device` in aten/src/ATen/native/cuda/Copy.cu). A multi-tensor copy between
  devices is a copy of each tensor.
- A copy between the host and a GPU runs on the GPU's current stream. If it is not `non_blocking`,
  the host waits. A `non_blocking` copy to the host has pinned memory as its target (`_to_copy`,
  TensorConversions.cpp), so the host may read it too early. Sources on the host are pageable, hence
  read before the call returns (CUDA Runtime API, "API synchronization behavior").
- Reading a value on the host (`.item()`) waits for the device's current stream.
- A collective runs on one given stream per device. What a stream writes in it comes after the work
  of the streams that it gets data from: the root's for a broadcast, all for the others. A stream
  that only sends is ordered after no other.

Not verified, because neither NCCL's nor cuDNN's documentation says it: whether kernels of NCCL
order streams more than this, and whether libraries use memory other than their arguments on other
streams. Left out: sparse tensors, pinned sources, complex numbers, reentrant backward, and
torch.nn.DataParallel, which copies in C++.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import Function
from torch.autograd.graph import _engine_run_backward
from torch.cuda import nccl
from torch.nn.parallel import comm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.races.backward import Backward, annotate
from tests.races.clocks import HOST, Event, Machine, Stream
from tests.races.nccl import coalesced_broadcast, collectives
from tests.races.recorder import Race, Recorder

aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
}
"""Operators whose result the host needs, so that it waits for the device."""
UNREAD = {aten.detach.default, aten.lift_fresh.default, aten.is_set_to.default, aten.alias.default}
"""Operators that access no values, and are not marked as views."""
UNMARKED = ("running_mean", "running_var")
"""Arguments of the normalizations that are written although the operators' schemas do not mark
them.
"""


class Detector:
    """The simulated machine with its recorder; `races` are the races that were found."""

    def __init__(self, *, has_nccl: bool = True) -> None:
        self.machine = Machine()
        self.recorder = Recorder(self.machine)
        self.has_nccl = has_nccl
        self.local = threading.local()

    @property
    def races(self) -> list[Race]:
        """Return the races that were found so far."""
        return self.recorder.races

    def kernel(
        self,
        stream: Stream,
        work: str,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
    ) -> None:
        """Queue an operation on `stream` that reads and writes these tensors."""
        stream.tick()
        for tensor in reads:
            self.recorder.access(tensor, stream, writes=False, work=work)
        for tensor in writes:
            self.recorder.access(tensor, stream, writes=True, work=work)

    def transfer(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        *,
        non_blocking: bool,
        work: str = "a copy",
    ) -> None:
        """Queue the copy of one tensor into another, which may be on another device."""
        machine, at, to = (
            self.machine,
            self.recorder.ordinal_of(source),
            self.recorder.ordinal_of(target),
        )
        near, far = machine.current(at), machine.current(to)
        if at == to:
            self.kernel(near, work, [source], [target])
        elif HOST not in (at, to):
            near.wait_stream(far)
            self.kernel(near, work, [source], [target])
            far.wait_stream(near)
        elif at == HOST:
            self.kernel(machine.host, work, [source])
            self.kernel(far, work, [], [target])
            if not non_blocking:
                far.synchronize()
        else:
            self.kernel(near, work, [source], [target])
            if not non_blocking:
                near.synchronize()

    def moved(self, tensor: torch.Tensor, ordinal: int, *, non_blocking: bool) -> torch.Tensor:
        """Return a copy of a tensor on this or another device, without autograd history."""
        with _disable_current_modes(), torch.no_grad():
            copy = tensor.detach().clone()
        self.recorder.allocate(copy, self.machine.current(ordinal), "a copy")
        self.transfer(tensor, copy, non_blocking=non_blocking)
        return copy

    def collective(
        self,
        tensors: Sequence[torch.Tensor],
        streams: Sequence[Stream | None] | None,
        results: Any,
        *,
        root: int | None,
    ) -> None:
        """Queue a collective that reads `tensors[i]` and writes `results[i]` on device i.

        The streams with results get data from all streams, or with `root` only from the stream of
        device `root`.
        """
        own = [
            (streams[i] if streams else None)
            or self.machine.current(self.recorder.ordinal_of(tensor))
            for i, tensor in enumerate(tensors)
        ]
        for stream, tensor in zip(own, tensors, strict=True):
            self.kernel(stream, "a collective", [tensor])
        before = [dict(stream.clock) for stream in own]
        for i, written in enumerate(results):
            if written:
                for clock in before if root is None else [before[root]]:
                    own[i].merge(clock)
                self.kernel(own[i], "a collective", [], written)


class Moved(Function):
    """The copy of a tensor to another device; backward copies the gradient back."""

    @staticmethod
    def forward(
        ctx: Any, detector: Detector, ordinal: int, non_blocking: bool, tensor: torch.Tensor
    ) -> torch.Tensor:
        ctx.detector, ctx.home = detector, detector.recorder.ordinal_of(tensor)
        return detector.moved(tensor, ordinal, non_blocking=non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return None, None, None, ctx.detector.moved(gradient, ctx.home, non_blocking=False)


def number(device: Any) -> int | None:
    """Return the number of a GPU, HOST for the host, and None if `device` is None."""
    if device is None:
        return None
    if isinstance(device, int):
        return device
    device = torch.device(device)
    return HOST if device.type != "cuda" else device.index or 0


PLACES = ("device", "is_cuda", "is_cpu")
"""The attributes of a tensor that say where it is."""


class Pretending(TorchFunctionMode):
    """The function mode that tells tensors' devices, moves tensors and notes forward's streams."""

    def __init__(self, detector: Detector) -> None:
        self.detector = detector

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, recorder = kwargs or {}, self.detector.recorder
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            own = getattr(func.__self__, "__name__", "") if name == "__get__" else ""
            return self._place(args[0], own) if own in PLACES else func(*args, **kwargs)
        if func is torch.Tensor.get_device:
            return recorder.ordinal_of(args[0])
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is torch.autograd.grad:
            return self._grad(*args, **kwargs)
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            result = self._to(func, args, kwargs)
        else:
            before, wanted = (
                getattr(self.detector.local, "wanted", None),
                number(kwargs.get("device")),
            )
            if wanted is not None:
                kwargs = {**kwargs, "device": "cpu"}
            self.detector.local.wanted = wanted
            try:
                result = func(*args, **kwargs)
            finally:
                self.detector.local.wanted = before
        annotate(_results(result), self.detector.machine, recorder)
        return result

    def _place(self, tensor: torch.Tensor, attribute: str) -> torch.device | bool:
        """Return the value of one of the attributes `PLACES` of a tensor."""
        at = self.detector.recorder.ordinal_of(tensor)
        if attribute == "device":
            return torch.device("cpu") if at == HOST else torch.device("cuda", at)
        return (at == HOST) == (attribute == "is_cpu")

    def _to(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensor, recorder = args[0], self.detector.recorder
        if func is torch.Tensor.to:
            copy = kwargs.pop("copy", False)
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
        else:
            device, dtype, non_blocking, copy = (
                "cpu" if func is torch.Tensor.cpu else "cuda",
                None,
                False,
                False,
            )
        ordinal = number(device)
        if ordinal is not None and (ordinal != recorder.ordinal_of(tensor) or copy):
            tensor = _apply(self.detector, Moved, self.detector, ordinal, non_blocking, tensor)
        return tensor if dtype in (None, tensor.dtype) else tensor.to(dtype)

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        **_: Any,
    ) -> None:
        keep = create_graph if retain_graph is None else retain_graph
        self._run(
            loss, gradient, keep, create_graph, (), allow_unreachable=True, accumulate_grad=True
        )

    def _grad(
        self, outputs: Any, inputs: Any, *, grad_outputs: Any, allow_unused: bool, **_: Any
    ) -> tuple[torch.Tensor | None, ...]:
        (loss,), (gradient,) = outputs, grad_outputs
        return self._run(
            loss,
            gradient,
            False,
            False,
            tuple(inputs),
            allow_unreachable=allow_unused,
            accumulate_grad=False,
        )

    def _run(
        self,
        loss: torch.Tensor,
        gradient: Any,
        keep: bool,
        create: bool,
        inputs: Any,
        **options: bool,
    ) -> tuple[torch.Tensor | None, ...]:
        """Run a backward from `loss`; return the gradients of `inputs`."""
        detector, found = self.detector, list[Any]()
        with self:
            one = torch.ones_like(loss) if gradient is None else gradient
            backward = Backward(detector.machine, detector.recorder, loss)
            before, detector.local.backward = getattr(detector.local, "backward", None), backward
            try:  # torch.autograd.backward would run the nodes without this mode
                backward.run(
                    lambda: found.extend(
                        _engine_run_backward((loss,), (one,), keep, create, inputs, **options) or ()
                    )
                )
            finally:
                detector.local.backward = before
        return tuple(found)


class Accesses(TorchDispatchMode):
    """The dispatch mode that records what each operator reads and writes, on which stream."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func.namespace == "prim" or func in UNREAD:
            return result
        work = func.name().removeprefix("aten::").partition(".")[0]
        if func is aten.copy_.default:
            self.detector.transfer(
                args[1], args[0], non_blocking=len(args) > 2 and args[2], work=work
            )
        elif work == "_foreach_copy_":
            for target, source in zip(*args[:2], strict=True):
                self.detector.transfer(source, target, non_blocking=True, work=work)
        else:
            self._record(func, work, args, kwargs, result)
        return result

    def _record(self, func: Any, work: str, args: Any, kwargs: Any, result: Any) -> None:
        detector, recorder, machine = self.detector, self.detector.recorder, self.detector.machine
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written = argument.name in UNMARKED or (
                argument.alias_info is not None and argument.alias_info.is_write
            )
            for tensor in _tensors(value):
                (writes if written else reads).append(tensor)
        new = list(_tensors(result))
        wanted = getattr(detector.local, "wanted", None)
        if (
            any(argument.name == "device" for argument in func._schema.arguments)
            and work != "_to_copy"
        ):
            homes = {recorder.ordinal_of(t) for t in reads} or {HOST}
            ordinal = wanted if wanted is not None else homes.pop()
            for tensor in new:
                recorder.allocate(tensor, machine.current(ordinal), work)
            detector.kernel(machine.current(ordinal), work, [], [] if "empty" in work else new)
            return
        homes = {recorder.ordinal_of(t) for t in (*reads, *writes)}
        if len(homes) > 1 and not work.startswith("_foreach_"):
            homes = {
                recorder.ordinal_of(t)
                for t in (*reads, *writes)
                if t.dim() or recorder.ordinal_of(t) != HOST
            }
            if len(homes) > 1:
                raise RuntimeError(f"{work} has tensors on several devices: {sorted(homes)}")
        running: Backward | None = getattr(detector.local, "backward", None)
        adding = running.sum_stream(reads + writes) if running and work in ("add", "add_") else None
        for ordinal in homes:
            stream = adding[0] if adding else machine.current(ordinal)
            for tensor in new if len(homes) == 1 else ():
                recorder.allocate(tensor, stream, work)
            here = [
                [t for t in some if recorder.ordinal_of(t) == ordinal] for some in (reads, writes)
            ]
            detector.kernel(
                stream,
                work,
                here[0],
                [*here[1], *(t for t in new if len(homes) == 1 and not _in(t, writes))],
            )
            if func in WAITING and ordinal != HOST:
                stream.synchronize()
        if adding:
            adding[1].clock = dict(adding[0].clock)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _results(value: Any) -> list[torch.Tensor]:
    """Return the tensors in what a function of torch has returned.

    Most return one tensor or none, which is quick.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, bool | int):
        return []
    return [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]


def _in(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in others)


def _apply(detector: Detector, kind: Any, *args: Any) -> Any:
    """Apply an autograd function, and note its node's stream: that of the first output's device."""
    result = APPLY.__func__(kind, *args)
    outputs = [t for t in _results(result) if t.grad_fn is not None]
    annotate(outputs, detector.machine, detector.recorder)
    return result


APPLY: Any = Function.__dict__["apply"]


@contextmanager
def detect(*, has_nccl: bool = True) -> Iterator[Detector]:
    """Simulate GPUs inside the context; without `has_nccl`, torch has no NCCL."""
    detector = Detector(has_nccl=has_nccl)
    machine = detector.machine
    with ExitStack() as stack:
        for name, part in _cuda(machine).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, part))
        for name, part in collectives(detector).items():
            stack.enter_context(mock.patch.object(nccl, name, part))
        stack.enter_context(
            mock.patch.object(
                torch._C, "_broadcast_coalesced", coalesced_broadcast(detector), create=True
            )
        )
        stack.enter_context(
            mock.patch.object(
                comm, "_get_device_index", lambda device, optional=False: number(device)
            )
        )
        apply = classmethod(lambda kind, *args: _apply(detector, kind, *args))
        stack.enter_context(mock.patch.object(Function, "apply", apply))
        stack.enter_context(
            mock.patch.object(torch.Tensor, "record_stream", _record_stream(detector))
        )
        stack.enter_context(Pretending(detector))
        stack.enter_context(Accesses(detector))
        yield detector


def _record_stream(detector: Detector) -> Any:
    """Return the method `record_stream` of tensors."""

    def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
        detector.recorder.borrow(tensor, stream)

    return record_stream


def _cuda(machine: Machine) -> dict[str, Any]:
    """Return, by name, the parts of torch.cuda that work on the simulated machine."""
    return {
        "Stream": lambda device=None, priority=0: machine.new_stream(number(device) or 0),
        "Event": lambda *args, **kwargs: Event(machine=machine),
        "stream": machine.entered,
        "device": machine.on,
        "current_stream": lambda device=None: machine.current(
            machine.ordinal if device is None else number(device)
        ),
        "default_stream": lambda device=None: machine.default(
            machine.ordinal if device is None else number(device)
        ),
        "synchronize": lambda device=None: machine.synchronize(
            machine.ordinal if device is None else number(device)
        ),
        "current_device": lambda: machine.ordinal,
    }
