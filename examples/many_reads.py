"""A loop reads its loss and the norms of gradients in each step: the host waits for each of them.

dpbench watch examples/many_reads.py            names the fault on a GPU
dpbench watch examples/many_reads.py --fixed    the values stay on the GPU until the end
"""

import sys

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = 2048 if DEVICE == "cuda" else 32


def main():
    torch.set_num_threads(1)
    linear = [torch.nn.Linear(512, 512) for _ in range(12)]
    layers = [part for layer in linear for part in (layer, torch.nn.ReLU())]
    model = torch.nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, 512, device=DEVICE)
    labels = torch.randint(512, (BATCH,), device=DEVICE)
    log = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        values = [loss.detach(), *(layer.bias.grad.norm() for layer in linear)]
        log += values if "--fixed" in sys.argv else [value.item() for value in values]
    print(f"last loss {log[-len(values)]:.3f}")


if __name__ == "__main__":
    main()
