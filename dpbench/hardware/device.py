"""The one face of every device: CUDA, logical CPU or emulated.

The engine, the clock and the strategies speak to devices through this protocol alone, so that the same code
runs, and is tested, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:  # for the annotations; nothing on this floor loads torch
    import torch

Result = TypeVar("Result")


class Collectives(Protocol):
    """What distinct devices do together: in place, on tensors that lie alike on every device, one of each.

    Collectives run beside what the devices have queued: `follow` and `lead` say what comes first.
    """

    def follow(self, i: int) -> None:
        """Let collectives from now on wait for what this thread has queued on device i."""

    def lead(self, i: int) -> None:
        """Let device i wait for all collectives so far."""

    def reduce(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Leave the sum in `tensors[root]`; the others are as they were."""

    def all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the sum in all."""

    def reduce_scatter(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave the sum of part i, of as many equal parts as there are devices, in part i of `tensors[i]`."""

    def all_gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leave part i of `tensors[i]` in part i of all."""

    def broadcast(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Leave `tensors[root]` in all."""


class Recorder(Protocol):
    """What runs work once to record it, and gives back how to run it again on the same memory, without Python."""

    def warm_up(self, work: Callable[[], object]) -> None:
        """Run work a few times as `record` will, so that libraries set themselves up; random states stay."""

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Return the work's results, whose memory holds values after each call of the function beside them."""


@runtime_checkable
class Device(Protocol):
    """One place where a replica lives.

    `index` is its position among the replicas, and what spans and records call it; `name` is what people call
    it ("cuda:1", "cpu:1"); `torch_device` is where its tensors say they are.
    """

    index: int
    name: str
    torch_device: torch.device

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fresh copy of `tensor` that this device owns, whatever device it comes from."""

    def clone(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return fresh copies of many tensors of one source, in as few transfers as the device allows."""

    def guard(self) -> AbstractContextManager[Any]:
        """Make this device and its stream current in this thread."""

    def settle(self) -> None:
        """Keep the calling thread where this device is, if that is a place among the host's: a core."""

    def wait(self, other: Device) -> None:
        """Order what is queued here from now on after all that `other` has queued so far."""

    def borrow(self, tensors: Sequence[torch.Tensor]) -> None:
        """Declare that work queued here reads memory that other streams own."""

    def event(self) -> Any:
        """Queue a timing event behind this device's work; None where the host's clock tells the truth."""

    def synchronize(self) -> None:
        """Block the host until this device has finished its work."""

    def memory(self) -> int | None:
        """Return the peak of allocated bytes since `reset_memory`; None where the device cannot tell."""

    def take_peaks(self) -> dict[str, int]:
        """Return the peaks since the last call or reset, and begin anew; by kind: allocated, reserved.

        Empty where the device cannot tell.
        """

    def reset_memory(self) -> None:
        """Release caches and forget the peak."""

    def can_collect(self, devices: Sequence[Device]) -> bool:
        """Tell whether `devices`, this one first, have collectives of their own (distinct GPUs have)."""

    def broadcast(self, tensors: Sequence[torch.Tensor], devices: Sequence[Device]) -> list[list[torch.Tensor]]:
        """Copy `tensors` to each of `devices` by a collective; only where `can_collect`."""

    def reduce_add(self, tensors: Sequence[Sequence[torch.Tensor]], devices: Sequence[Device]) -> list[torch.Tensor]:
        """Sum the tensor lists of `devices` onto this one by a collective; only where `can_collect`."""

    def collectives(self, devices: Sequence[Device]) -> Collectives | None:
        """Return the in-place collectives of `devices`, this one first; None where they have none."""

    def recorder(self) -> Recorder | None:
        """Return what records work of this device, for one replica; None where it cannot."""
