"""Small trainings, each with one fault that somebody has really had; `test_planted.py` has them judged.

Every function runs steps of a job with a loop of its own until it is ended. They are also scripts:
`python planted.py NAME`, so that `ridgeline doctor planted.py NAME` sees what a user's would see.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

STEPS = 400
"""More than anybody waits for: the doctor ends a job when it has seen enough."""


class Samples(Dataset):
    """Random vectors; `work` is done for each, on the host."""

    def __init__(self, width: int, work: Callable[[Tensor], Tensor] | None = None) -> None:
        self.width, self.work = width, work

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.full((self.width,), index % 7 / 7)
        return (x if self.work is None else self.work(x)), index % 10


def mlp(width: int, depth: int, classes: int = 10) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def train(
    model: nn.Module,
    batches: DataLoader | list[tuple[Tensor, Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[Tensor], None] = lambda loss: None,
    before: Callable[[nn.Module], None] = lambda model: None,
) -> None:
    model = model.to(device())
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    done = 0
    while done < STEPS:
        for x, y in batches:
            loss = F.cross_entropy(model(x.to(device())), y.to(device()))
            optimizer.zero_grad()
            loss.backward()
            before(model)
            optimizer.step()
            after(loss)
            done += 1


def ready(batch: int, width: int, classes: int = 10) -> list[tuple[Tensor, Tensor]]:
    """One batch that is on the device already, again and again."""
    x = torch.randn(batch, width, device=device())
    return [(x, torch.arange(batch, device=device()) % classes)] * 64


def slow_loader() -> None:
    def work(x: Tensor) -> Tensor:
        time.sleep(0.002)
        return x

    train(mlp(64, 2), DataLoader(Samples(64, work), batch_size=8))


def slow_disk() -> None:
    """Files behind a disk that gives 4 KiB every 2 ms: a pipe that is filled at that rate."""
    out, into = os.pipe()

    def fill() -> None:
        with suppress(BrokenPipeError):
            while True:
                time.sleep(0.002)
                os.write(into, bytes(4096))

    threading.Thread(target=fill, daemon=True).start()
    stream = os.fdopen(out, "rb")

    def work(x: Tensor) -> Tensor:
        content = stream.read(4096)
        return x + len(content) * 0.0

    train(mlp(64, 2), DataLoader(Samples(64, work), batch_size=8))


def preprocessing() -> None:
    """Augmentation in the process that trains."""

    def work(x: Tensor) -> Tensor:
        for _ in range(12):
            x = torch.fft.ifft(torch.fft.fft(x)).real.sort().values
        return x

    model = nn.Sequential(nn.Linear(4096, 64), nn.ReLU(), nn.Linear(64, 10))
    train(model, DataLoader(Samples(4096, work), batch_size=8))


def tiny_kernels() -> None:
    """A recurrence by hand: hundreds of ops on a few numbers each."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.head = nn.Linear(8, 10)

        def forward(self, x: Tensor) -> Tensor:
            state = torch.zeros_like(x)
            for _ in range(120):
                state = torch.tanh(state * self.scale + x)
            return self.head(state)

    train(Tiny(), ready(4, 8))


def python_in_the_loop() -> None:
    """Bookkeeping in Python after each step."""

    def after(loss: Tensor) -> None:
        text = ""
        for number in range(60_000):
            text = str(number)
        assert text

    train(mlp(64, 2), ready(16, 64), after=after)


def waits_for_the_device() -> None:
    """`.item()` after each of many small pieces: the queue runs empty every time."""

    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(24))
            self.head = nn.Linear(256, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
                if x.mean().item() > 1e9:
                    raise ValueError("diverged")
            return self.head(x)

    train(Stops(), ready(512, 256))


def elementwise_chain() -> None:
    """Gates and norms by hand over large activations, between thin layers."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 512)
            self.head = nn.Linear(512, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for _ in range(12):
                x = x * torch.sigmoid(x) + 0.1 * x.square()
                x = x / (1 + x.abs())
            return self.head(x)

    rows = 1 << 16 if torch.cuda.is_available() else 768
    train(Chain(), ready(rows, 16))


def small_batch() -> None:
    """Two samples a step through wide layers: every weight is read for next to nothing."""
    width = 8192 if torch.cuda.is_available() else 1024
    train(mlp(width, 4), ready(2, width))


def optimizer_loop() -> None:
    """A table kept as a list of its rows, which are updated one after another."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ParameterList(nn.Parameter(0.1 * torch.randn(12)) for _ in range(60))
            self.head = nn.Linear(60, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x @ torch.stack(list(self.rows)).t()))

    model = Table().to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, fused=False)
    train(model, ready(4, 12), optimizer)


def plain_arithmetic() -> None:
    """No fault at all: large products."""
    width, batch = (4096, 8192) if torch.cuda.is_available() else (512, 512)
    torch.set_float32_matmul_precision("high")
    train(mlp(width, 4), ready(batch, width))


def fp32_products() -> None:
    """Large products in fp32 on hardware that has tensor cores."""
    torch.set_float32_matmul_precision("highest")
    train(mlp(4096, 4), ready(4096, 4096))


def odd_vocabulary() -> None:
    """A head of 50257 classes in bf16."""
    model = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 50257)).to(device())
    model.to(torch.bfloat16)
    x = torch.randn(4096, 768, device=device(), dtype=torch.bfloat16)
    train(model, [(x, torch.arange(4096, device=device()))] * 64)


def unpinned_copies() -> None:
    """Large batches from pageable memory, and little to do with them."""
    x = torch.randn(256, 3 * 224 * 224)
    batches = [(x, torch.arange(256) % 10)] * 64
    train(nn.Sequential(nn.Linear(3 * 224 * 224, 16), nn.ReLU(), nn.Linear(16, 10)), batches)


def throttled_network() -> None:
    """Two ranks, a gradient at a time, over a link that takes a dozen round trips for each."""
    import torch.distributed as dist

    import ridgeline

    job = ridgeline.start(device="cpu")
    model = mlp(64, 2)

    def average(model: nn.Module) -> None:
        for parameter in model.parameters():
            slow_all_reduce(parameter.grad)

    def slow_all_reduce(gradient: Tensor) -> None:
        dist.all_reduce(gradient)
        # What a link with latency does.
        for _ in range(12):
            dist.all_reduce(gradient.clone())

    assert job.world_size == 2
    train(model, ready(16, 64), before=average)


def one_slow_rank() -> None:
    """Rank 1 does something else for 25 ms in each step."""
    import ridgeline

    job = ridgeline.start(device="cpu")
    inner = mlp(64, 2)

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            if job.rank == 1:
                time.sleep(0.025)
            return self.inner(x)

    model = job.parallelize(Slow())
    train(model, ready(16, 64))


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]]()
