"""The interface of every device: CUDA, logical CPU or emulated.

The engine, the clock and the strategies use devices through this protocol only, so that the same code runs, and is
tested, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:  # for annotations only: this module does not load torch
    import torch

Result = TypeVar("Result")


class Collectives(Protocol):
    """Collectives over distinct devices. They work in place on one tensor per device, all of the same layout.

    Collectives run concurrently with the work that the devices have queued; `follow` and `lead` define the order.
    """

    def follow(self, i: int) -> None:
        """Make later collectives wait for the work that this thread has queued on device i."""

    def lead(self, i: int) -> None:
        """Make device i wait for all collectives queued so far."""

    def reduce(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Put the sum into `tensors[root]`; the others stay unchanged."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the sum into all tensors."""

    def reduce_scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the sum of all parts i into part i of `tensors[i]`; each tensor has one equal part per device."""

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy part i of `tensors[i]` to part i of all tensors."""

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Copy `tensors[root]` to all tensors."""


class Recorder(Protocol):
    """Records the work that a function submits to a device, and replays it on the same memory without Python."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run the work a few times, so that libraries are initialised before `record`; restore the random state."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Record the work; return its results, and a function that replays the work and overwrites the results.

        The results have no valid values before the first replay.
        """


@runtime_checkable
class Device(Protocol):
    """A device on which a replica runs.

    `index` is the device's position among the replicas, which spans and records use. `name` is the device's name in
    messages ("cuda:1", "cpu:1"). `torch_device` is the value of `.device` of its tensors.
    """

    index: int
    name: str
    torch_device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new copy of `tensor`, which may be on any device, in this device's memory."""

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return new copies of many tensors from one device, in as few transfers as possible."""

    def guard(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this device and its stream current in the thread."""

    def settle(self) -> None:
        """Bind the calling thread to the core that is assigned to this device, if there is one."""

    def wait(self, other: Device) -> None:
        """Make work queued on this device from now on wait for all work that `other` has queued so far."""

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Declare that work queued on this device reads `tensors`, whose memory may belong to other streams."""

    def event(self) -> Any:
        """Queue a timing event after this device's work and return it; None if the host's clock measures that work."""

    def synchronize(self) -> None:
        """Block the host until this device has finished its work."""

    def memory(self) -> int | None:
        """Return the peak of allocated bytes since the last reset; None if the device has no such count."""

    def take_peaks(self) -> dict[str, int]:
        """Return the peaks in bytes since the last call or reset, by kind (allocated, reserved), and reset them.

        Empty if the device has no such counts.
        """

    def reset_memory(self) -> None:
        """Release caches and reset the peak."""

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Return whether `devices`, of which this is the first, have collectives, as distinct GPUs do."""

    def broadcast(self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]) -> list[list[torch.Tensor]]:
        """Return copies of `tensors` on each of `devices`, made by a collective; needs `can_collect`."""

    def reduce_add(self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]) -> list[torch.Tensor]:
        """Return the sums of the tensor lists of `devices`, on this device, by a collective; needs `can_collect`."""

    def collectives(self, devices: Sequence[Device]) -> Collectives | None:
        """Return the in-place collectives of `devices`, of which this is the first; None if they have none."""

    def recorder(self) -> Recorder | None:
        """Return a recorder of this device's work, for one replica; None if the device cannot record."""
