"""Copies in a child process: results, a copy that hangs, one that ends the child, and the rest."""

from __future__ import annotations

import sys

import pytest

from dpbench.doctor import transfers
from dpbench.doctor.examination import DIRECT, PAGEABLE, PINNED, STAGED
from dpbench.doctor.transfers import SILENCE, Copy, copies
from dpbench.records import HOST

ERROR = "CUDA error: an illegal memory access"
CHILD = f"""
import json, sys, time
print("{{}}", flush=True)
for copy in json.load(sys.stdin):
    ends = copy["source"], copy["target"]
    if ends == (0, 1):
        time.sleep(60)
    if ends == (1, 0):
        sys.exit("{ERROR}")
    print(json.dumps({{"bytes_per_s": 1e9, "wrong": 3 * (ends == (1, 2))}}), flush=True)
"""


def test_all_pairs_are_copied_in_both_ways_and_each_gpu_from_and_to_the_host() -> None:
    found = copies(3)
    assert len(set(found)) == len(found) == 2 * 3 * 2 + 2 * 6
    assert {one.way for one in found if one.between_gpus} == {DIRECT, STAGED}
    assert {one.way for one in found if not one.between_gpus} == {PINNED, PAGEABLE}
    assert str(Copy(0, 2, DIRECT)) == "GPU 0 -> GPU 2 direct"
    assert str(Copy(HOST, 1, PINNED)) == "pinned host memory -> GPU 1"


def test_a_copy_that_hangs_or_ends_its_process_is_named_and_the_rest_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "_command", lambda: [sys.executable, "-c", CHILD])
    wanted = [Copy(*pair, DIRECT) for pair in ((0, 2), (0, 1), (1, 0), (1, 2), (2, 0))]
    said: list[str] = []
    found = transfers.measured(wanted, said.append, limit_s=3.0)
    assert [one.copy for one in found] == wanted
    assert [one.failure for one in found] == [
        "",
        SILENCE,
        ERROR,
        "",
        "",
    ]
    assert [one.wrong for one in found] == [0, 0, 0, 3, 0]
    assert [one.hangs for one in found] == [False, True, False, False, False]
    assert f"copying {wanted[1]} ..." in said


HANGING = CHILD.replace("ends == (0, 1)", "True")
SILENT = "import sys; sys.exit('CUDA error: no device')"


def test_after_two_copies_that_hang_the_others_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "_command", lambda: [sys.executable, "-c", HANGING])
    found = transfers.measured(copies(3), limit_s=0.5)
    assert [one.failure for one in found] == [SILENCE] * transfers.MOST_HANGS


def test_a_child_that_does_not_start_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_command", lambda: [sys.executable, "-c", SILENT])
    (found,) = transfers.measured(copies(3))
    assert found.failure == "CUDA error: no device"


def test_without_a_gpu_the_copy_fails_with_torchs_reason() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    (found,) = transfers.measured([Copy(HOST, 0, PINNED)], limit_s=60.0)
    assert found.failure
    assert found.bytes_per_s == 0.0


@pytest.mark.gpu
def test_copies_of_this_machine_arrive_unchanged() -> None:
    import torch

    found = transfers.measured(copies(torch.cuda.device_count()))
    assert not [one for one in found if one.failure or one.wrong]
    assert all(one.bytes_per_s > 1e8 for one in found)
