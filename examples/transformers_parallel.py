"""The loop of `transformers_single.py` on any number of processes: five lines differ.

python examples/transformers_parallel.py
torchrun --nproc-per-node 2 examples/transformers_parallel.py

`batch_size` is that of the whole job, so the number of processes does not change the result.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ridgeline

CONFIG = GPT2Config(
    vocab_size=32,
    n_positions=16,
    n_embd=64,
    n_layer=2,
    n_head=4,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    bos_token_id=None,
    eos_token_id=None,
    loss_type="ForCausalLM",
)


class Counting(torch.utils.data.Dataset):
    """Each number is one, two or three past the one before: the least loss is ln 3 = 1.0986."""

    def __init__(self, seed, size):
        generator = torch.Generator().manual_seed(seed)
        steps = torch.randint(1, 4, (size, 16), generator=generator)
        steps[:, 0] = torch.randint(32, (size,), generator=generator)
        self.tokens = steps.cumsum(1) % 32

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index]


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    job = ridgeline.start(seed=0)
    dataset = Counting(seed=1, size=2001)
    held_out = Counting(seed=2, size=200).tokens.to(device)
    model = job.parallelize(GPT2LMHeadModel(CONFIG))
    loader = job.loader(dataset, batch_size=64, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(2):
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
