"""The loop of `llama_single.py` on any number of processes: five lines differ.

python examples/llama_parallel.py
torchrun --nproc-per-node 2 examples/llama_parallel.py

`batch_size` is that of the whole job, so the number of processes does not change the result.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F

import ridgeline
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
    job = ridgeline.start(seed=0)
    dataset = Bytes(0, 64_000)
    held_out = Bytes(64_000, 16_000)[:]
    model = job.parallelize(Llama("1m", vocab=256, width=64, depth=2, max_seq=32))
    loader = job.loader(dataset, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    for epoch in range(2):
        for tokens, targets in loader:
            loss = lm_loss(model(tokens.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = lm_loss(model(held_out[0].to(device)), held_out[1].to(device))
        job.print(f"epoch {epoch}: held-out loss {job.mean(loss):.6f}")


if __name__ == "__main__":
    main()
