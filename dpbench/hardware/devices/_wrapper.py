"""Emulated tensors: wrappers of tensors that report the device `lazy:i` and count their bytes.

torch has a device type for its lazy backend, but no kernels until the backend is started. This
module registers three kernels, two that allocate and one that copies. They suffice for factories,
`.to("lazy:0")` and ops that allocate, in every thread and without a context manager. All other ops
have an EmulatedTensor among their arguments. For these ops, torch calls `_dispatch`, which checks
devices as CUDA would, and runs the op on the wrapped tensors.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpbench.hardware.devices._byte_count import byte_count

LAZY = "lazy"
"""The device type that emulated tensors report.

For this type, as for the CPU, backward runs in the calling thread.
"""

aten = torch.ops.aten
ANY_DEVICE = {aten.copy_.default, aten._to_copy.default}
HOST_ARGUMENTS = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
    aten._pack_padded_sequence.default,
    aten._pack_padded_sequence_backward.default,
}
"""Ops that, as on a GPU, accept indices or lengths on the host beside tensors on a device."""


SPARSE = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)


class EmulatedTensor(torch.Tensor):
    """A tensor that reports the device `lazy:i` and wraps the tensor `held`.

    `held` is on the host, or on the device `meta`, which stores no values.
    """

    held: torch.Tensor
    # do not convert results to the subclass
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the wrapped tensors.

        In inference mode, torch passes composite ops too; they are decomposed into other ops.
        """
        if torch.is_inference_mode_enabled():
            result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        return _dispatch(func, args, kwargs or {})

    @property
    def data(self) -> torch.Tensor:
        """Return a tensor that shares the values but has no autograd history, as torch does."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Replace the shape and the wrapped tensor by those of `value`.

        Torch's setter would replace only the shape.
        """
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = _held(value)

    def __tensor_flatten__(self) -> tuple[list[str], torch.device]:
        """Return the name of the attribute with the wrapped tensor, and the device.

        torch treats a class with this method as a wrapper: `module.to` then swaps tensors, which
        keeps tied weights tied and optimizers valid.
        """
        return ["held"], self.device

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], device: Any, size: Any, stride: Any
    ) -> EmulatedTensor:
        """`size` and `stride` are unused."""
        return wrap(inner["held"], device)

    def __deepcopy__(self, memo: dict[int, Any]) -> EmulatedTensor:
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol"
            )
        if id(self) not in memo:
            twin = wrap(copy.deepcopy(self.held, memo), self.device).requires_grad_(
                self.requires_grad
            )
            memo[id(self)] = twin
            twin.__dict__.update(
                {k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k != "held"}
            )
            twin.grad = copy.deepcopy(self.grad, memo)
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        rest = {name: value for name, value in self.__dict__.items() if name != "held"}
        return _rebuild, (self.held, self.device, self.requires_grad, rest)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        history = (
            f"grad_fn=<{self.grad_fn.name()}>"
            if self.grad_fn
            else f"requires_grad={self.requires_grad}"
        )
        text = f"{repr(self.held)[:-1]}, device='{self.device}', {history})"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def type(self, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        """Return the name of the tensor's type, or the tensor converted to `dtype` if it is given.

        torch has no name for sparse tensors on this device; this method composes it.
        """
        if dtype is None and self.is_sparse:
            return self.held.type().replace("torch.", f"torch.{LAZY}.")
        return super().type(dtype, non_blocking, **kwargs)

    def numpy(self, *, force: bool = False) -> Any:
        """Return a numpy array with a copy of the values if `force` is True.

        Raises TypeError if `force` is False, as for a tensor on a GPU.
        """
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy it"
            " first."
        )

    def tolist(self) -> Any:
        """Return the values as nested lists; for a 0-dim tensor, return the number."""
        return self.detach().cpu().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)


def wrap(inner: torch.Tensor, device: torch.device) -> EmulatedTensor:
    """Return an emulated tensor that wraps `inner`, and count its bytes as bytes of `device`."""
    if inner.is_conj() or inner.is_neg():  # torch cannot see these two flags of a wrapped tensor
        inner = inner.resolve_conj().resolve_neg()
    geometry: dict[str, Any]
    if inner.layout == torch.sparse_coo:  # torch has no sparse lazy backend
        geometry = {"dispatch_layout": True, "_extra_dispatch_keys": SPARSE}
        parts = [inner._indices(), inner._values()]
    else:
        geometry = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        parts = [inner]
    tensor: Any = torch.Tensor._make_wrapper_subclass(
        EmulatedTensor, inner.size(), dtype=inner.dtype, device=device, **geometry
    )
    tensor.held = inner
    for part in parts:
        byte_count.own(part.untyped_storage(), device)
    return tensor  # type: ignore[no-any-return]


def _rebuild(
    inner: torch.Tensor, device: torch.device, requires_grad: bool, rest: dict[str, Any]
) -> EmulatedTensor:
    install()
    tensor = wrap(inner, device)
    tensor.__dict__.update(rest)
    tensor.requires_grad_(requires_grad)
    return tensor


_homes = [torch.device("cpu")]
"""The last one is the device of the tensors that are wrapped."""


@contextmanager
def bytes_only() -> Iterator[None]:
    """In the context, in any thread, create emulated tensors that store no values."""
    _homes.append(torch.device("meta"))
    try:
        yield
    finally:
        _homes.pop()


@functools.cache
def install() -> torch.library.Library:
    """Register the kernels for the lazy backend until the process ends; return their library.

    Later calls return the same library.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, LAZY.capitalize())
    library.impl("empty_strided", _empty_strided, LAZY.capitalize())
    library.impl("_copy_from", _copy_from, LAZY.capitalize())
    return library


@functools.cache
def load_operators() -> None:
    """Create torch's Python object of every ATen operator; the first call takes about 0.2 s.

    torch creates this object, which `__torch_dispatch__` receives, when an operator is first
    dispatched to Python, and keeps a reference that it does not own. If two threads are the first,
    torch 2.13 frees the object that it kept, and the process crashes. Call this function before
    several threads dispatch operators to Python.
    """
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace == "aten":
            # None: an op of TorchScript
            getattr(getattr(aten, name, None), schema.overload_name or "default", None)


def _empty(
    size: Any, *, device: Any, dtype: Any = None, memory_format: Any = None, **_: Any
) -> torch.Tensor:
    kept = {} if memory_format is None else {"memory_format": memory_format}
    return wrap(torch.empty(size, dtype=dtype, device=_homes[-1], **kept), _numbered(device))


def _empty_strided(
    size: Any, stride: Any, *, device: Any, dtype: Any = None, **_: Any
) -> torch.Tensor:
    inner = torch.empty_strided(size, stride, dtype=dtype, device=_homes[-1])
    return wrap(inner, _numbered(device))


def _copy_from(
    source: torch.Tensor, target: EmulatedTensor, non_blocking: bool = False
) -> torch.Tensor:
    """Run within `torch.tensor` by torch, where tensor subclasses are disabled."""
    _held(target).copy_(_held(source))
    return target


def _numbered(device: Any) -> torch.device:
    device = torch.device(device)
    return device if device.index is not None else torch.device(device.type, 0)


def _dispatch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = list(_tensors((*args, *kwargs.values())))
    emulated = [t for t in tensors if isinstance(t, EmulatedTensor)]
    by_position = func.name().startswith("aten::_foreach_")
    if not by_position:
        _check_devices(func, tensors, emulated[0].device)
    elif not func.name().startswith("aten::_foreach_copy"):
        _check_positions(func, args)
    target = emulated[0].device
    if kwargs.get("device") is not None:
        target = _numbered(kwargs["device"])
        kwargs = {**kwargs, "device": emulated[0].held.device if target.type == LAZY else target}
    inner = {name: _map(_held, value) for name, value in kwargs.items()}
    result = func(*[_map(_held, value) for value in args], **inner)
    if result is None or target.type != LAZY:
        return result
    arguments: dict[int, torch.Tensor] = {id(t.held): t for t in emulated}
    if len(emulated) < len(tensors):
        arguments |= {id(t): t for t in tensors}
    if by_position:
        return [_outside(t, arguments, s.device) for t, s in zip(result, args[0], strict=True)]
    if func is aten._pack_padded_sequence.default:  # batch sizes stay on the host
        return _outside(result[0], arguments, target), result[1]
    # a view made in inference mode is an inference tensor only if its base is
    if torch.is_inference_mode_enabled() and func.is_view and not emulated[0].is_inference():
        with torch.inference_mode(False):
            return _map(lambda tensor: _outside(tensor, arguments, target), result)
    return _map(lambda tensor: _outside(tensor, arguments, target), result)


def _check_devices(func: Any, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """0-dim tensors on the host are allowed with any device.

    So are host tensors in the ops of `HOST_ARGUMENTS`. The ops of `ANY_DEVICE` are not checked.
    """
    for tensor in tensors:
        if tensor.device == device or func in ANY_DEVICE:
            continue
        of_host = tensor.device.type == "cpu" and (tensor.dim() == 0 or func in HOST_ARGUMENTS)
        if not of_host:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{device} and {tensor.device}! (when checking arguments of {func})"
            )


def _check_positions(func: Any, args: Sequence[Any]) -> None:
    lists = [value for value in args if isinstance(value, list | tuple)]
    for tensors in zip(*(each for each in lists if isinstance(each[0], torch.Tensor)), strict=True):
        _check_devices(func, tensors, tensors[0].device)


def _outside(
    tensor: torch.Tensor, arguments: dict[int, torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the emulated tensor for an op's result: an argument that it wrote to, or a new tensor.

    `arguments` maps the id of each wrapped argument to the argument.
    """
    argument = arguments.get(id(tensor))
    if argument is None:
        return wrap(tensor, device)
    if isinstance(argument, EmulatedTensor) and (
        argument.shape != tensor.shape or argument.stride() != tensor.stride()
    ):
        # the op changed the shape: t_(), unsqueeze_(), or a resized `out`
        argument.data = wrap(tensor, device)
    return argument


def _held(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.held if isinstance(tensor, EmulatedTensor) else tensor


def _map(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map(change, part) for part in value)
    return value


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
