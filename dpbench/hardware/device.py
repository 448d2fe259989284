"""The base class of every device: CUDA, logical CPU or emulated.

The engine, the clock and the strategies use only its methods, so that the same code runs and is
tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from dpbench.hardware.processes import stay

if TYPE_CHECKING:  # for annotations only: this module does not load torch
    import torch


class Collectives(Protocol):
    """In-place collectives over distinct devices.

    `tensors[i]` is on device i, and all tensors have the same layout. Collectives run concurrently
    with other work on the devices.
    """

    def follow(self, i: int) -> None:
        """Make later collectives wait for the work that this thread has queued on device i."""

    def lead(self, i: int) -> None:
        """Make later work on device i wait for all collectives that are queued so far."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the sum of all tensors into every tensor."""

    def reduce_scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the sum of part i of all tensors into part i of `tensors[i]`, for each device i.

        Each tensor consists of one equal part per device.
        """

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy part i of `tensors[i]` into part i of every other tensor, for each device i.

        Each tensor consists of one equal part per device.
        """

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Copy the values of `tensors[root]` to all other tensors."""


class Device:
    """A device on which a replica runs; by default, one whose work is done when a call returns.

    Such a device, whose tensors are in the host's memory whatever device they report, has no
    streams, memory figures or collectives of its own; a device that has them overrides the methods
    that concern them. `index` is the number of the device's replica, by which records refer to the
    device. `name` is for messages ("cuda:1", "cpu:1"). `torch_device` is the value of `.device` of
    its tensors. `core` is the position in `processes.CORES` of the CPU core to which the device's
    threads are bound; None if they are not bound.
    """

    index: int
    name: str
    torch_device: torch.device
    core: int | None = None

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new copy of `tensor`, from any device, in this device's memory.

        By default, it is in new storage, which torch aligns to 64 bytes: with other alignments, the
        results of `linear` are rounded differently.
        """
        return tensor.to(self.torch_device, copy=True)

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of `tensors` in this device's memory, made in few transfers.

        All of `tensors` must be on one device, which may be this one. By default, they are copied
        one by one, so that each copy is aligned to 64 bytes.
        """
        return [tensor.to(self.torch_device, copy=True) for tensor in tensors]

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this device and its stream current in the thread.

        By default, it does nothing: the host is always current.
        """
        return nullcontext()

    def hold(self) -> AbstractContextManager[Any]:
        """Return a context in which all threads use the calling thread's stream for this device.

        By default, it does nothing: there are no streams.
        """
        return nullcontext()

    def settle(self) -> None:
        """Bind the calling thread to the CPU core that is assigned to this device, if any."""
        if self.core is not None:
            stay(self.core)

    def wait(self, other: Device) -> None:
        """Make later work on this device wait for all work that is queued on `other` so far.

        By default, do nothing: no work is queued.
        """

    def at_work(self, sources: Iterable[Device]) -> list[int]:
        """Return the indices of the devices that work while this one gets copies from `sources`.

        By default, it is this device alone: the one that receives a copy makes it.
        """
        return [self.index]

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Declare that work queued on this device reads `tensors`, which other streams may own.

        Their memory is then not reused before this work is done. By default, do nothing: no work is
        queued.
        """

    def event(self, reuse: Any = None) -> Any:
        """Queue a timing event after the work of this device, and return the event.

        `reuse` is an earlier event of this device whose time is no longer needed. Return None, as
        by default, if the work of this device is timed with the clock of the host.
        """
        return None

    def synchronize(self) -> None:
        """Block the host until this device has finished all queued work; by default, none is."""

    def take_peaks(self) -> dict[str, int]:
        """Return the memory peaks since the last reset, in bytes by kind, and reset them.

        The kinds are `allocated` and `reserved`; the dict is empty, as by default, if the device
        does not report its memory.
        """
        return {}

    def reset_memory(self) -> None:
        """Release cached memory, and reset the memory peaks to the bytes that are in use.

        By default, do nothing: no memory is cached or measured.
        """

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return whether collectives can run over `devices`, of which this device is the first.

        By default, they cannot. Raises RuntimeError if they would never end.
        """
        return False

    def broadcast(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]
    ) -> list[list[torch.Tensor]]:
        """Return, for each of `devices`, the list of `tensors` there, copied by a collective.

        Call this method only if `can_collect` returns True; by default, it raises
        NotImplementedError.
        """
        raise NotImplementedError(f"{self.name} has no collectives")

    def reduce_add(
        self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]
    ) -> list[torch.Tensor]:
        """Return sums over `devices` on this device: item k is the sum of all `tensors[i][k]`.

        `tensors[i]` are on device i. Call this method only if `can_collect` returns True; by
        default, it raises NotImplementedError.
        """
        raise NotImplementedError(f"{self.name} has no collectives")

    def collectives(self, devices: Sequence[Device]) -> Collectives | None:
        """Return the in-place collectives over `devices`; None, as by default, if there are none.

        This device is the first of `devices`.
        """
        return None
