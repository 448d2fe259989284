"""A model waits for its DataLoader, which reads each sample from a slow disk.

dpbench watch examples/starved_loader.py            names the fault
dpbench watch examples/starved_loader.py --fixed    worker processes read while the model trains
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

WORKERS = 2 if "--fixed" in sys.argv else 0


class SlowDisk(Dataset):
    def __len__(self):
        return 32 * 40

    def __getitem__(self, index):
        time.sleep(0.002)  # the disk
        return torch.full((1024,), index / len(self)), index % 10


def main():
    torch.set_num_threads(1)  # the other cores are for the workers
    layers = [torch.nn.Linear(1024, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 1024)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in DataLoader(SlowDisk(), batch_size=32, num_workers=WORKERS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
