"""A batch is so small that the GPU waits while the host launches the kernels of a step.

python examples/small_batch.py [--fixed]    writes small_batch.json, a trace of torch.profiler
dpbench import small_batch.json             names the fault on a GPU, without --fixed
"""

import sys

import torch
from torch.profiler import profile, schedule

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL, LARGE = (8, 32768) if DEVICE == "cuda" else (256, 512)
BATCH = LARGE if "--fixed" in sys.argv else SMALL


def main():
    torch.set_num_threads(1)
    layers = [(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(20)]
    model = torch.nn.Sequential(*(part for layer in layers for part in layer)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, 256, device=DEVICE)
    labels = torch.randint(256, (BATCH,), device=DEVICE)
    recorded = schedule(wait=1, warmup=3, active=20)
    with profile(schedule=recorded) as trace:
        for _ in range(24):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            trace.step()
    trace.export_chrome_trace("small_batch.json")


if __name__ == "__main__":
    main()
