"""Train a small network on rows that the data set computes when the loop asks for them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Rows that are computed when they are read."""

    def __len__(self):
        return 6400

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        row = torch.randn(256, generator=generator)
        for _ in range(8):  # augmentation
            row = torch.fft.irfft(torch.fft.rfft(row)).sort().values
        return row, i % 10


model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_fn = nn.CrossEntropyLoss()
dataset = Rows()

for rows, labels in DataLoader(dataset, batch_size=64, shuffle=True):
    optimizer.zero_grad()
    loss_fn(model(rows), labels).backward()
    optimizer.step()
