"""CUDA devices: each is a GPU and a stream.

Replicas use the current stream of their GPU, as in torch.nn.DataParallel. In a `TrainStep`, which
joins the streams of its replicas, colocated replicas, which share one GPU, have separate streams,
so that their kernels may overlap.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.cuda import comm, nccl

from dpbench.hardware.device import Collectives, Device
from dpbench.hardware.devices._many import copy_all
from dpbench.records import vendors

_key_of_stream = getattr(torch._C, "_cuda_getCurrentStream", None)  # absent in CPU builds
_streams: dict[Any, torch.cuda.Stream] = {}
"""The streams that were current so far, by the key that torch's C++ code gives them."""


def current_stream(ordinal: int) -> torch.cuda.Stream:
    """Return the calling thread's current stream on a GPU.

    torch.cuda.current_stream makes a new object in each call, which takes 90 % of the time of a
    mark's event. Here, each stream has one object.
    """
    if _key_of_stream is None:
        return torch.cuda.current_stream(ordinal)
    key = _key_of_stream(ordinal)
    if key not in _streams:
        _streams[key] = torch.cuda.current_stream(ordinal)
    return _streams[key]


HEATING_CYCLES = 10_000_000
"""The GPU cycles of one kernel of `heat`: 5 to 50 ms at clocks of 2 GHz to 200 MHz.

On AMD's gfx11, torch counts ticks of 100 MHz instead (`spin_kernel` in ATen/cuda/Sleep.cu):
there, they are 100 ms.
"""


class CudaDevice(Device):
    """A GPU, or one stream of a GPU that several replicas share.

    `ordinal` is the GPU's number in CUDA. `own_stream` gives the replica a new stream instead of
    the current stream of the GPU. `shares_memory` is True if a replica with a lower index already
    reports the memory of this GPU.
    """

    def __init__(
        self, index: int, ordinal: int, *, own_stream: bool = False, shares_memory: bool = False
    ) -> None:
        self.index = index
        self.ordinal = ordinal
        self.name = f"cuda:{ordinal}" + (f"/{index}" if own_stream or shares_memory else "")
        self.torch_device = torch.device("cuda", ordinal)
        self._own = torch.cuda.Stream(ordinal) if own_stream else None
        self._held: torch.cuda.Stream | None = None
        self._background: torch.cuda.Stream | None = None
        self._shares_memory = shares_memory

    @property
    def stream(self) -> torch.cuda.Stream:
        """Return the replica's own stream, that of `hold`, or this thread's current stream."""
        return self._own or self._held or current_stream(self.ordinal)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """In the context, all threads use the calling thread's current stream for this device.

        Outside it, each thread uses its own current stream: the default stream where autograd runs
        backward, or the stream of another replica in its guard. A replica with its own stream
        always uses its own stream.
        """
        before, self._held = self._held, self.stream
        try:
            yield
        finally:
            self._held = before

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new copy of `tensor` on this GPU, made on this device's stream.

        The copy starts after the work that is queued on the current stream of `tensor`'s GPU. A
        tensor of the host is copied in a background stream, as by torch.nn.DataParallel: this
        device's stream waits for the copy, but the copy does not wait for the work of this device.
        """
        if not tensor.is_cuda:
            return self._put_from_host(tensor)
        self._follow([tensor])
        with self.guard():
            copy = tensor.to(self.torch_device, non_blocking=True, copy=True)
        self.borrow([tensor])
        return copy

    def _put_from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self._background = self._background or torch.cuda.Stream(self.ordinal)
        with torch.cuda.stream(self._background):
            copy = tensor.to(self.torch_device, non_blocking=True, copy=True)
        self.stream.wait_stream(self._background)
        self.borrow([copy])  # its memory belongs to the background stream
        return copy

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of `tensors` on this GPU, made in one kernel launch if they are on it.

        The device of `tensors` must wait for this device before `tensors` are written or freed.
        """
        self._follow(tensors)
        with self.guard():
            copies = [torch.empty_like(tensor, device=self.torch_device) for tensor in tensors]
            copy_all(copies, tensors)
        return copies

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this GPU and this device's stream current.

        The stream is that of the thread that calls `guard`, not of the thread that enters the
        context: the current stream of a new thread is the default stream.
        """
        return torch.cuda.stream(self.stream)  # entering it makes the stream's GPU current

    def wait(self, other: Device) -> None:
        """Make this device's stream wait for a different stream of `other`."""
        stream = getattr(other, "stream", None)
        if stream is not None and stream != self.stream:
            self.stream.wait_stream(stream)

    def at_work(self, sources: Iterable[Device]) -> list[int]:
        """Return this device and the sources on other GPUs, on whose streams torch copies."""
        gpus = ((one.index, getattr(one, "ordinal", self.ordinal)) for one in sources)
        return [self.index, *(index for index, ordinal in gpus if ordinal != self.ordinal)]

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register this device's stream as a reader of `tensors`.

        torch's allocator then does not reuse their memory before the work queued on it is done.
        """
        for tensor in tensors:
            for part in _stored(tensor):
                if part.is_cuda:
                    part.record_stream(self.stream)

    def event(self, reuse: Any = None) -> Any:
        """Queue a timing event on this device's stream, new unless `reuse`, and return it."""
        event = torch.cuda.Event(enable_timing=True) if reuse is None else reuse
        event.record(self.stream)
        return event

    def synchronize(self) -> None:
        """Block the host until this GPU has finished the work on all its streams."""
        torch.cuda.synchronize(self.ordinal)

    def take_peaks(self) -> dict[str, int]:
        """Return the peaks of allocated and reserved bytes since the last reset, and reset them.

        The dict is empty if another replica already reports this GPU's memory.
        """
        if self._shares_memory:
            return {}
        stats = torch.cuda.memory_stats(self.ordinal)
        torch.cuda.reset_peak_memory_stats(self.ordinal)
        return {
            kind: int(stats.get(f"{kind}_bytes.all.peak", 0)) for kind in ("allocated", "reserved")
        }

    def reset_memory(self) -> None:
        """Wait for the GPU, empty torch's memory cache, and reset the memory peaks."""
        torch.cuda.synchronize(self.ordinal)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.ordinal)

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return whether `devices` are two or more CUDA devices, all on distinct GPUs.

        Raises RuntimeError if they are, but NCCL would hang: it launches a kernel on one GPU after
        the other, and with blocking launches waits for the first, which waits for the others.
        """
        ordinals = [getattr(device, "ordinal", None) for device in devices]
        distinct = None not in ordinals and len(set(ordinals)) == len(ordinals) > 1
        blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")
        if distinct and blocks and _has_nccl():
            library = vendors.of(torch.version.hip).collectives
            raise RuntimeError(
                f"CUDA_LAUNCH_BLOCKING is set, but {library} then hangs if one process uses several"
                " GPUs:"
                " the launch on the first GPU waits for its kernel, which waits for the kernels of"
                " the other GPUs; unset CUDA_LAUNCH_BLOCKING, or find the error with one GPU or"
                " with replicas that share a GPU, as in device_ids=[0, 0]"
            )
        return distinct

    def broadcast(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]
    ) -> list[list[torch.Tensor]]:
        """Return, for each of `devices`, the list of `tensors` on its GPU.

        As in torch.nn.DataParallel, buffers of 10 MiB are copied, by NCCL if torch has NCCL.
        """
        copies = comm.broadcast_coalesced(list(tensors), [d.torch_device.index for d in devices])
        # torch's collectives return a complex tensor as pairs of reals
        return [
            [
                torch.view_as_complex(c) if t.is_complex() and not c.is_complex() else c
                for c, t in zip(on_gpu, tensors, strict=True)
            ]
            for on_gpu in copies
        ]

    def reduce_add(
        self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]
    ) -> list[torch.Tensor]:
        """Return the sums on this GPU: item k is the sum of `tensors[i][k]` over all devices i.

        The tensors are summed in buffers of 10 MiB, by NCCL if torch has NCCL. The other devices
        first wait for this device, because autograd makes only this device's stream wait for the
        gradients.
        """
        real = [[torch.view_as_real(t) if t.is_complex() else t for t in one] for one in tensors]
        with ExitStack() as guards:
            for device in devices[1:]:
                device.wait(self)
                guards.enter_context(device.guard())
            sums = comm.reduce_add_coalesced(real, self.ordinal)
        return [
            torch.view_as_complex(s) if t.is_complex() else s
            for s, t in zip(sums, tensors[0], strict=True)
        ]

    def collectives(self, devices: Sequence[Device]) -> Collectives | None:
        """Return NCCL's collectives over `devices`.

        None if these are not distinct GPUs, or if torch has no NCCL.
        """
        if not self.can_collect(devices):
            return None
        with warnings.catch_warnings():  # is_available warns if torch is built without NCCL
            warnings.simplefilter("ignore")
            probe = [torch.empty(1, device=device.torch_device) for device in devices]
            return Nccl(devices) if nccl.is_available(probe) else None

    def _follow(self, tensors: Sequence[torch.Tensor]) -> None:
        for ordinal in {tensor.device.index for tensor in tensors if tensor.is_cuda}:
            source = torch.cuda.current_stream(ordinal)
            if source != self.stream:
                self.stream.wait_stream(source)


def heat(devices: Sequence[Device], seconds: float) -> float:
    """Keep the GPUs of `devices` busy for `seconds`, so that their clocks leave the idle state.

    The kernels only wait: they need no memory, which would count as that of the case. Return the
    seconds that it took, which are 0 for 0 seconds or less.
    """
    began_s = time.perf_counter()
    while (took_s := time.perf_counter() - began_s) < seconds:
        for device in devices:
            with device.guard():
                torch.cuda._sleep(HEATING_CYCLES)
        for device in devices:
            device.synchronize()
    return took_s if seconds > 0 else 0.0


def _has_nccl() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_nccl_available()


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
"""The methods that return the stored tensors of a sparse tensor, by its layout."""


def _stored(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the tensors that store the values of `tensor`; only these can record streams."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()  # the public methods need a coalesced tensor
    if tensor.layout in _COMPRESSED:
        return [getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]]
    if tensor.is_nested and tensor.layout is torch.strided:
        return (tensor.values(),)
    return (tensor,)


class Nccl:
    """NCCL's collectives over distinct GPUs that are used by one process.

    They run on separate streams, concurrently with backward. Every call is one NCCL group over all
    the GPUs; no two threads may make calls at the same time.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self._ordinals = [device.torch_device.index for device in devices]
        self._streams = [torch.cuda.Stream(ordinal) for ordinal in self._ordinals]

    def follow(self, i: int) -> None:
        """Make later collectives wait for this thread's current stream on the GPU of device i."""
        self._streams[i].wait_stream(torch.cuda.current_stream(self._ordinals[i]))

    def lead(self, i: int) -> None:
        """Make this thread's current stream on device i's GPU wait for all queued collectives."""
        torch.cuda.current_stream(self._ordinals[i]).wait_stream(self._streams[i])

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the sum of all tensors into every tensor."""
        nccl.all_reduce(tensors, streams=self._streams)

    def reduce_scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Collectives`; NCCL writes to a part of the input, and needs no other memory."""
        nccl.reduce_scatter(tensors, self._parts(tensors), streams=self._streams)

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """See `Collectives`; NCCL reads a part of the output, and needs no other memory."""
        nccl.all_gather(self._parts(tensors), tensors, streams=self._streams)

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Copy the values of `tensors[root]` to all other tensors."""
        nccl.broadcast(tensors, root=root, streams=self._streams)

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.view(len(tensors), -1)[i] for i, tensor in enumerate(tensors)]
