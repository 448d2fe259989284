"""Two ranks train with DistributedDataParallel, and rank 1 is late at each step.

torchrun --nproc-per-node 2 -m dpbench watch examples/late_rank.py            names the fault
torchrun --nproc-per-node 2 -m dpbench watch examples/late_rank.py --fixed    equal work
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    model = DistributedDataParallel(net.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(60):
        inputs = torch.randn(64, 512, device=device)
        if dist.get_rank() == 1 and "--fixed" not in sys.argv:
            time.sleep(0.02)  # a slow augmentation that only this rank's shard needs
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
