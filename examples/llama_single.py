"""A Llama on bytes of Python's standard library, on one device. `llama_parallel.py`: on many.

python examples/llama_single.py
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F

from ridgeline.models.llama import Llama


class Bytes(torch.utils.data.Dataset):
    """Windows of 32 bytes, each with the bytes that follow one place on."""

    def __init__(self, start, length):
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[start : start + length]
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.windows = tokens.unfold(0, 33, 32)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):  # one, or a slice
        return self.windows[index][..., :-1], self.windows[index][..., 1:]


def lm_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dataset = Bytes(0, 64_000)
    held_out = Bytes(64_000, 16_000)[:]
    model = Llama("1m", vocab=256, width=64, depth=2, max_seq=32).to(device)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for epoch in range(2):
        for tokens, targets in loader:
            loss = lm_loss(model(tokens.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = lm_loss(model(held_out[0].to(device)), held_out[1].to(device))
        print(f"epoch {epoch}: held-out loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
