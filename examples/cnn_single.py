"""A small CNN on handwritten digits, on one device. `cnn_parallel.py` is the same on many.

python examples/cnn_single.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


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
    torch.manual_seed(0)
    dataset = load_data()
    model = CNN().to(device)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for step, (images, labels) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 7 == 0 or step == len(loader):
                print(f"epoch {epoch} step {step}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
