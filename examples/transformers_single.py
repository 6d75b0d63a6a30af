"""A GPT-2 of `transformers` from a config, on one device. `transformers_parallel.py`: on many.

The model computes its own loss from `labels`; it learns to count, in steps that differ by sample.

python examples/transformers_single.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

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
    torch.manual_seed(0)
    dataset = Counting(seed=1, size=2001)
    held_out = Counting(seed=2, size=200)[:].to(device)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG, **NO_DROPOUT)).to(device)
    loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)
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
        print(f"epoch {epoch}: held-out loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
