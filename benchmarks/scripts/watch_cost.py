"""Watch cost: how much longer a training step takes under `dpbench watch`, on this machine.

    python benchmarks/scripts/watch_cost.py [--pairs 120] [--layers 150]

The script trains one model in one process, in blocks of steps that are watched (A) and not watched (B), in the order
ABBA. The time of a block is the mean of the faster half of its steps, because other processes, which share caches and
cores, only add time. Each pair of neighbouring blocks gives the difference of their times. The script prints the median
of these differences with its 95 % interval from order statistics, in microseconds and as a share of the step. Many
short blocks give a narrower interval than few long ones, because the machine changes less between neighbours. Times are
CPU times of the thread that trains. The first steps of each block are left out, because the modules of the loop are
found in them. The number of calls of dpbench's functions in a later step, which no other process changes, is printed
beside them.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.observe import seams
from dpbench.observe.recorder import Recorder

STEPS, LEFT_OUT = 40, 12
ROOT = str(Path(seams.__file__).parents[1])
"""The folder of dpbench's modules."""


def main() -> None:
    """Print the cost of watching a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=120)
    parser.add_argument("--layers", type=int, default=150)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 96
    net = nn.Sequential(*(layer for _ in range(asked.layers // 2) for layer in (nn.Linear(width, width), nn.ReLU())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    data = TensorDataset(torch.randn(STEPS * 64, width), torch.randn(STEPS * 64, width))
    loader = DataLoader(data, batch_size=64)

    calls = 0
    until: list[int] = []  # the number of calls until the end of each step

    def block() -> float:
        times, at = [], time.thread_time()
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), target)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            loss.item()
            at, before = time.thread_time(), at
            times.append(at - before)
            until.append(calls)
        timed = sorted(times[LEFT_OUT:])
        return statistics.fmean(timed[: len(timed) // 2])

    def watched() -> float:
        recorder = Recorder()
        with seams.installed(recorder):
            seconds = block()
        recorder.stop()
        return seconds

    block(), watched()

    def called(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and ROOT in frame.f_code.co_filename

    sys.setprofile(called)
    watched()
    sys.setprofile(None)
    each = (until[-1] - until[-STEPS + LEFT_OUT]) / (STEPS - LEFT_OUT - 1)
    differences, plain = [], []
    for pair in range(asked.pairs):
        on, off = (watched(), block()) if pair % 2 == 0 else (block(), watched())[::-1]
        differences.append(on - off)
        plain.append(off)
    low, middle, high = _interval(differences)
    step = statistics.median(plain)
    print(
        f"step {step * 1e3:.2f} ms, {asked.layers} layers: watching costs {middle * 1e6:.0f} µs "
        f"({low * 1e6:.0f} to {high * 1e6:.0f}), which is {middle / step:.2%} ({low / step:.2%} to {high / step:.2%}) "
        f"of the step; {asked.pairs} pairs of blocks [MEASURED CPU-ONLY, 95 %]; {each:.0f} calls in a step"
    )


def _interval(values: list[float]) -> tuple[float, float, float]:
    """Return the low end of the median's 95 % interval, the median, and the high end, from order statistics."""
    ordered, n = sorted(values), len(values)
    low = max(0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    return ordered[low], statistics.median(ordered), ordered[n - 1 - low]


if __name__ == "__main__":
    main()
