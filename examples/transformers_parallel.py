"""The loop of `transformers_single.py` on any number of processes: five lines differ.

python examples/transformers_parallel.py
torchrun --nproc-per-node 2 examples/transformers_parallel.py

`batch_size` is that of the whole job, so the number of processes does not change the result.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ridgeline

CONFIG = {"vocab_size": 32, "n_positions": 24, "n_embd": 64, "n_layer": 2, "n_head": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Counting(torch.utils.data.Dataset):
    """Sample i counts on from its first number, modulo 32, by a step of 1 to 7."""

    def __init__(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        self.start = torch.randint(32, (size, 1), generator=generator)
        self.step = torch.randint(1, 8, (size, 1), generator=generator)

    def __len__(self):
        return len(self.start)

    def __getitem__(self, index):  # one, or a slice
        return (self.start[index] + torch.arange(24) * self.step[index]) % 32


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = ridgeline.start(seed=0)
    dataset = Counting(seed=1, size=2001)
    held_out = Counting(seed=2, size=200)[:].to(device)
    model = job.parallelize(GPT2LMHeadModel(GPT2Config(**CONFIG, **NO_DROPOUT)))
    loader = job.loader(dataset, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for tokens in loader:
            tokens = tokens.to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = model(input_ids=held_out, labels=held_out).loss
        job.print(f"epoch {epoch}: held-out loss {job.mean(loss):.6f}")


if __name__ == "__main__":
    main()
