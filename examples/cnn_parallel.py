"""The loop of `cnn_single.py` on any number of processes: five lines differ.

python examples/cnn_parallel.py
torchrun --nproc-per-node 2 examples/cnn_parallel.py

`batch_size` is that of the whole job, so the number of processes does not change the result.
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import ridgeline


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.linear = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.linear(x.flatten(1))


def load_data():
    """1797 images of 8x8 pixels, shuffled once; the last batch of 64 has only five of them."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    return torch.utils.data.TensorDataset(images, torch.tensor(digits.target)[order])


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = ridgeline.start(seed=0)
    dataset = load_data()
    model = job.parallelize(CNN())
    loader = job.loader(dataset, batch_size=64, shuffle=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for step, (images, labels) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 7 == 0 or step == len(loader):
                job.print(f"epoch {epoch} step {step}: loss {job.mean(loss):.6f}")


if __name__ == "__main__":
    main()
