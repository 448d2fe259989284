"""The interface of every device: CUDA, logical CPU or emulated.

The engine, the clock and the strategies use devices through this protocol only, so that the same
code can run and be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:  # for annotations only: this module does not load torch
    import torch


class Collectives(Protocol):
    """In-place collectives over distinct devices.

    `tensors[i]` is on device i, and all tensors have the same layout.

    Collectives run concurrently with other work on the devices. `follow` makes later collectives
    wait for other work, and `lead` makes later work wait for collectives.
    """

    def follow(self, i: int) -> None:
        """Make collectives that are queued from now on wait for the work that this thread has
        queued on device i.
        """

    def lead(self, i: int) -> None:
        """Make work queued on device i from now on wait for all collectives that are queued so
        far.
        """

    def reduce(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Write the sum of all tensors into `tensors[root]`; the other tensors stay unchanged."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write the sum of all tensors into every tensor."""

    def reduce_scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """For each device i, add up part i of all tensors, and write the sum into part i of
        `tensors[i]`.

        Each tensor consists of one equal part per device.
        """

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """For each device i, copy part i of `tensors[i]` into part i of every other tensor.

        Each tensor consists of one equal part per device.
        """

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Copy the values of `tensors[root]` to all other tensors."""


@runtime_checkable
class Device(Protocol):
    """A device on which a replica runs.

    `index` is the number of the device's replica, counted from 0; spans and other records refer to
    the device by this number. `name` is the device's name in messages ("cuda:1", "cpu:1").
    `torch_device` is the value of `.device` of its tensors.
    """

    index: int
    name: str
    torch_device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new copy of `tensor` in this device's memory; `tensor` may be on any device."""

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy `tensors` into this device's memory, in few transfers, and return the copies.

        All of `tensors` must be on one device, which may be this device or another one.
        """

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this device and its stream current in the thread that
        enters it.
        """

    def hold(self) -> AbstractContextManager[Any]:
        """Return a context manager in which all threads use the calling thread's current stream for
        this device.
        """

    def settle(self) -> None:
        """Bind the calling thread to the CPU core that is assigned to this device, if there is
        one.
        """

    def wait(self, other: Device) -> None:
        """Make work queued on this device from now on wait for all work that is queued on `other`
        so far.
        """

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Declare that work queued on this device reads `tensors`, whose memory may belong to other
        streams.

        The memory of `tensors` is then not reused before this work is done.
        """

    def event(self, reuse: Any = None) -> Any:
        """Queue a timing event after the work of this device, and return the event.

        `reuse` is an earlier event of this device whose time is no longer needed; None creates a
        new event. Return None if the work of this device is timed with the clock of the host.
        """

    def synchronize(self) -> None:
        """Block the host until this device has finished all queued work."""

    def take_peaks(self) -> dict[str, int]:
        """Return the memory peaks since the last reset, in bytes by kind (`allocated`, `reserved`),
        and reset them.

        The dict is empty if the device does not report its memory.
        """

    def reset_memory(self) -> None:
        """Release cached memory, and reset the memory peaks to the bytes that are in use."""

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return whether collectives can run over `devices`, for example distinct GPUs.

        This device is the first.
        """

    def broadcast(
        self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]
    ) -> list[list[torch.Tensor]]:
        """Return, for each of `devices`, the list of `tensors` on that device, copied by a
        collective.

        Call this method only if `can_collect` returns True.
        """

    def reduce_add(
        self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]
    ) -> list[torch.Tensor]:
        """Return the sums over `devices`, computed by a collective: item k is the sum of
        `tensors[i][k]` over all i.

        `tensors[i]` are on device i, and the sums are on this device. Call this method only if
        `can_collect` returns True.
        """

    def collectives(self, devices: Sequence[Device]) -> Collectives | None:
        """Return the in-place collectives over `devices`, of which this device is the first.

        None if there are none.
        """
