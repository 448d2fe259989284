"""Lines of a watched script that mislead its user: clocks and unbound ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpbench.observe import source
from tests.observe.watched_scripts import watched

LOOP = """
for x, y in loader:
    start = time.time()
    loss_fn(net(x), y).backward()
    optimizer.step()
    {after}
    print(time.time() - start)
"""


def lines_of(folder: Path, text: str, *, on_gpus: bool = True) -> list[str]:
    path = folder / "train.py"
    path.write_text(text)
    notes = source.notes(path, on_gpus=on_gpus)
    return [note.partition(" ")[0] for note in notes]


def test_a_clock_in_the_loop_without_a_synchronize_is_named(tmp_path) -> None:
    assert lines_of(tmp_path, LOOP.format(after="pass")) == ["train.py:3"]
    assert lines_of(tmp_path, LOOP.format(after="pass"), on_gpus=False) == []
    assert lines_of(tmp_path, LOOP.format(after="torch.cuda.synchronize()")) == []
    outside = LOOP.format(after="pass").replace("time.time()", "0") + "time.time()"
    assert lines_of(tmp_path, outside) == []
    assert lines_of(tmp_path, "this is no Python") == []


@pytest.mark.parametrize("read", ["item()", "cpu()", "tolist()", "detach().cpu().numpy()"])
def test_reading_a_value_in_the_loop_waits_too(tmp_path, read: str) -> None:
    assert lines_of(tmp_path, LOOP.format(after=f"total += loss.{read}")) == []
    outside = LOOP.format(after="pass") + f"loss.{read}\n"
    assert lines_of(tmp_path, outside) == ["train.py:3"]


def test_the_lines_by_which_ranks_take_memory_on_the_first_gpu_are_named(tmp_path) -> None:
    path = tmp_path / "train.py"
    path.write_text("state = torch.load(path)\nnet.cuda(rank)\n")
    loads, binds = source.missing_binding(path)
    assert loads.startswith("train.py:1 ")
    for said, name in ((loads, "torch.load"), (binds, "torch.cuda.set_device")):
        assert name in said
    path.write_text("torch.cuda.set_device(rank)\ntorch.load(path, map_location='cpu')\n")
    assert [*source.missing_binding(path)] == []


ACCUMULATED = """
import contextlib, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.parallel.DistributedDataParallel(net)
for number, (x, y) in enumerate(batches(40)):
    last = number % 4 == 3
    with contextlib.nullcontext() if last or not {held} else net.no_sync():
        nn.functional.cross_entropy(net(x), y).backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("held", [True, False])
def test_the_calls_of_backward_that_add_gradients_are_counted(tmp_path, held: bool) -> None:
    loop, recorder = watched(tmp_path, ACCUMULATED.format(held=held))
    assert loop.updates == 4
    counted = recorder.seen.synchronized
    assert counted == ({True: 10, False: 30} if held else {True: 40})
    assert recorder.seen.file == str(tmp_path / "train.py")
