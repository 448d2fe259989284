"""The race detector of tests/races on small programs: known races, and programs that have none.

The modules of tests/races cite the rules of CUDA and of torch. tests/test_races_engine.py runs the
engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.cuda import nccl

from dpbench.engine.scatter import scatter
from dpbench.hardware.devices.cuda import CudaDevice
from tests.races.machine import detect

PROGRAMS: list[tuple[Callable[[], Any], str]] = []


def program(expected: str = "") -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a program.

    Its only race must contain the text `expected`, or it must have none if this is empty.
    """

    def register(run: Callable[[], Any]) -> Callable[[], Any]:
        PROGRAMS.append((run, expected))
        return run

    return register


def streams() -> tuple[Any, Any]:
    return torch.cuda.Stream(0), torch.cuda.Stream(0)


def ones(n: int = 8, device: str = "cuda:0") -> Tensor:
    return torch.ones(n, device=device)


def written_on(stream: Any) -> Tensor:
    with torch.cuda.stream(stream):
        return ones()


def doubled_on(stream: Any, tensor: Tensor) -> Tensor:
    with torch.cuda.stream(stream):
        return tensor * 2


@program("ones writes it on stream 1 of cuda:0")
def missing_wait() -> None:
    first, second = streams()
    doubled_on(second, written_on(first))


@program()
def wait_stream() -> None:
    first, second = streams()
    tensor = written_on(first)
    second.wait_stream(first)
    doubled_on(second, tensor)


@program("mul reads it")
def event_recorded_too_early() -> None:
    first, second = streams()
    tensor, event = written_on(first), torch.cuda.Event()
    second.wait_stream(first)
    event.record(first)
    with torch.cuda.stream(first):
        tensor.add_(1)
    second.wait_event(event)
    doubled_on(second, tensor)


@program()
def event_recorded_after_the_work() -> None:
    first, second = streams()
    tensor, event = written_on(first), torch.cuda.Event()
    event.record(first)
    second.wait_event(event)
    doubled_on(second, tensor)


@program("mul reads it")
def event_that_was_never_recorded() -> None:
    first, second = streams()
    tensor, event = written_on(first), torch.cuda.Event()
    second.wait_event(event)
    doubled_on(second, tensor)


@program("mul reads it")
def event_recorded_again_after_the_wait() -> None:
    first, second = streams()
    event = first.record_event()
    second.wait_event(event)
    tensor = written_on(first)
    event.record(first)
    doubled_on(second, tensor)


@program()
def waits_are_transitive() -> None:
    first, second = streams()
    third = torch.cuda.Stream(1)
    tensor = written_on(first)
    third.wait_stream(first)
    second.wait_stream(third)
    doubled_on(second, tensor)


@program("on the default stream of cuda:0")
def the_default_stream_waits_for_no_other() -> Tensor:
    return written_on(torch.cuda.Stream(0)) + 1


@program()
def reads_do_not_conflict() -> None:
    first, second = streams()
    tensor = ones()
    first.wait_stream(torch.cuda.current_stream())
    second.wait_stream(torch.cuda.current_stream())
    doubled_on(first, tensor)
    doubled_on(second, tensor)


@program("mul reads it")
def write_after_read() -> None:
    first, _ = streams()
    tensor = ones()
    first.wait_stream(torch.cuda.current_stream())
    doubled_on(first, tensor)
    tensor.zero_()


@program()
def the_host_waits_for_the_device() -> None:
    first, second = streams()
    tensor = written_on(first)
    torch.cuda.synchronize(0)
    doubled_on(second, tensor)


@program("mul reads it")
def the_host_waits_for_another_device() -> None:
    first, second = streams()
    tensor = written_on(first)
    torch.cuda.synchronize(1)
    doubled_on(second, tensor)


@program()
def the_host_reads_a_value() -> None:
    first, second = streams()
    tensor = written_on(first)
    with torch.cuda.stream(first):
        tensor.sum().item()
    doubled_on(second, tensor)


@program()
def a_copy_between_devices_waits_for_both_current_streams() -> Tensor:
    return ones().to("cuda:1") + ones(device="cuda:1")


@program("a copy reads it on the default stream of cuda:0")
def a_copy_does_not_wait_for_other_streams_of_the_source() -> Tensor:
    return written_on(torch.cuda.Stream(0)).to("cuda:1")


@program("copy_ writes it on the default stream of cuda:0")
def a_copy_does_not_wait_for_other_streams_of_the_target() -> None:
    target, other = ones(device="cuda:1"), torch.cuda.Stream(1)
    other.wait_stream(torch.cuda.current_stream(1))
    doubled_on(other, target)
    target.copy_(ones())


@program("whose memory is reused")
def memory_is_reused_before_it_is_read() -> None:
    first, second = streams()
    tensor = written_on(first)
    second.wait_stream(first)
    doubled_on(second, tensor)
    del tensor
    written_on(first)


@program()
def recorded_memory_is_not_reused() -> None:
    first, second = streams()
    tensor = written_on(first)
    second.wait_stream(first)
    doubled_on(second, tensor)
    tensor.record_stream(second)
    del tensor
    written_on(first)


@program()
def memory_is_reused_after_a_wait() -> None:
    first, second = streams()
    tensor = written_on(first)
    second.wait_stream(first)
    doubled_on(second, tensor)
    del tensor
    first.wait_stream(second)
    written_on(first)


@program("whose memory is reused")
def record_stream_does_not_cover_later_work() -> None:
    first, second = streams()
    third = torch.cuda.Stream(0)
    tensor = written_on(first)
    second.wait_stream(first)
    third.wait_stream(first)
    tensor.record_stream(second)
    doubled_on(third, tensor)
    del tensor
    written_on(first)


@program("add reads it on the host")
def the_host_reads_a_copy_too_early() -> Tensor:
    return ones().to("cpu", non_blocking=True) + 1


@program()
def the_host_reads_a_copy_that_is_done() -> Tensor:
    copy = ones().to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return copy + ones().cpu()


@program()
def halves_of_a_buffer() -> None:
    first, second = streams()
    buffer = ones()
    first.wait_stream(torch.cuda.current_stream())
    second.wait_stream(torch.cuda.current_stream())
    for stream, half in zip((first, second), buffer.chunk(2), strict=True):
        with torch.cuda.stream(stream):
            half.zero_()


@program("zero_ writes it on stream")
def overlapping_parts_of_a_buffer() -> None:
    first, second = streams()
    buffer = ones()
    first.wait_stream(torch.cuda.current_stream())
    second.wait_stream(torch.cuda.current_stream())
    for stream, part in zip((first, second), (buffer[:5], buffer[4:]), strict=True):
        with torch.cuda.stream(stream):
            part.zero_()


@program("mul reads it on the default stream of cuda:0")
def a_new_thread_has_the_default_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream(0)):
        tensor = ones()
        modes = [
            torch.overrides._get_current_function_mode(),
            torch.utils._python_dispatch._get_current_dispatch_mode(),
        ]

        def work() -> None:
            with modes[0], modes[1]:
                tensor.mul(2)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()


def learned(stream: Any) -> nn.Linear:
    layer, x = nn.Linear(3, 2).to("cuda:0"), ones(3)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = layer(layer(x)[0] * x).sum()  # two uses of each parameter, whose gradients are added
    torch.cuda.current_stream().wait_stream(stream)
    loss.backward()
    return layer


@program()
def backward_ends_before_the_caller_goes_on() -> None:
    layer = learned(torch.cuda.Stream(0))
    assert layer.weight.grad is not None
    layer.weight.grad.zero_()


@program("mul reads it on stream")
def backward_does_not_order_other_streams() -> None:
    layer, other = learned(torch.cuda.Stream(0)), torch.cuda.Stream(0)
    doubled_on(other, layer.weight.grad)  # type: ignore[arg-type]


@program("addmm reads it on stream")
def forward_reads_a_weight_too_early() -> None:
    layer, stream = nn.Linear(3, 2).to("cuda:0"), torch.cuda.Stream(0)
    with torch.no_grad():
        layer.weight.mul_(2)
    with torch.cuda.stream(stream):
        layer(ones(3))


@program()
def a_gradient_for_inputs() -> None:
    layer, x = nn.Linear(3, 2).to("cuda:0"), ones(3)
    found = torch.autograd.grad(
        [layer(x).sum()], [layer.weight], [torch.ones((), device="cuda:0")], allow_unused=True
    )
    assert torch.equal(found[0].cpu(), torch.ones(2, 3))
    layer.weight.detach().zero_()


def summed(*, follow: bool, lead: bool) -> None:
    tensors = [ones(device=f"cuda:{i}") for i in range(2)]
    streams = [torch.cuda.Stream(i) for i in range(2)]
    for i, stream in enumerate(streams) if follow else ():
        stream.wait_stream(torch.cuda.current_stream(i))
    nccl.all_reduce(tensors, streams=streams)
    for i, stream in enumerate(streams) if lead else ():
        torch.cuda.current_stream(i).wait_stream(stream)
    assert [float(t.detach()[0]) for t in tensors] == [2.0, 2.0]


@program()
def a_collective_between_waits() -> None:
    summed(follow=True, lead=True)


@pytest.mark.parametrize(("run", "expected"), PROGRAMS, ids=[run.__name__ for run, _ in PROGRAMS])
def test_known_programs(run: Callable[[], Any], expected: str) -> None:
    with detect() as found:
        run()
    assert len(found.races) == bool(expected), "; ".join(map(str, found.races))
    assert all(expected in str(race) for race in found.races)


@pytest.mark.parametrize(("follow", "lead"), [(True, False), (False, True)])
def test_a_collective_without_a_wait_is_a_race(follow: bool, lead: bool) -> None:
    with detect() as found:
        summed(follow=follow, lead=lead)
    assert found.races


def test_a_race_names_the_tensor_the_streams_and_the_lines() -> None:
    with detect() as found:
        with torch.cuda.stream(torch.cuda.Stream(0)):
            weight = torch.zeros(3, 2, device="cuda:0")
        found.recorder.name(weight, "weight")
        weight.add_(1)
    (race,) = found.races
    line = test_a_race_names_the_tensor_the_streams_and_the_lines.__code__.co_firstlineno
    assert (
        str(race) == "race on weight (3, 2): zeros writes it on stream 1 of cuda:0 at"
        f" tests/test_races.py:{line + 3}; add_ writes it on the default stream of cuda:0 at"
        f" tests/test_races.py:{line + 5}; nothing orders them"
    )


def test_an_operator_on_two_devices_is_an_error() -> None:
    with detect(), pytest.raises(RuntimeError, match="several devices"):
        ones() + ones(device="cuda:1")


def test_scatter_copies_from_the_host_in_a_background_stream_as_torch_does() -> None:
    with detect() as found:
        devices = [CudaDevice(i, i) for i in range(2)]
        # work of the main streams, for which no copy waits
        busy = [ones(device=f"cuda:{i}") for i in range(2)]
        before = [dict(torch.cuda.current_stream(i).clock) for i in range(2)]  # type: ignore[attr-defined]
        pieces = scatter(torch.zeros(4), devices)
        for i, (piece, work) in enumerate(zip(pieces, busy, strict=True)):
            owner = found.recorder.owner_of(piece)
            assert owner is not None
            assert owner is not torch.cuda.current_stream(i)
            assert all(owner.clock.get(stream, 0) < time for stream, time in before[i].items())
            work[:2] + piece
    assert not found.races
