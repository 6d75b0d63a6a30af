"""Statistics of batch norms and max pooling on this device: how fast each kernel is, beside torch's.

    python benchmarks/gpu_conv.py                          # about a minute on a GPU
    python benchmarks/gpu_conv.py --json conv.json
    python benchmarks/gpu_conv.py --device cpu --tiny      # to see that it works; times mean nothing

Part one times the pieces at sizes of ResNet-50 with 256 images in bf16: the statistics, in several tiles,
beside what the compiler makes of `torch.var_mean` and beside a copy; and the pooling forward and backward.
Rates count what has to be read and written once. Part two trains ResNet-50 compiled, with
`tune.conv_kernels` and without in turns, and says the median step of each.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, spread, write_json

NORMS = ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7), (64, 56))
"""Channels and side of the images."""
TILES = ((2048, 3, 4), (4096, 1, 4), (4096, 2, 4), (4096, 3, 4), (4096, 4, 4), (8192, 3, 8))
"""Values of a tile, tiles read ahead, warps."""
POOL_TILES = ((1024, 64, 4), (2048, 64, 4), (2048, 32, 4), (4096, 64, 4), (4096, 64, 8))
"""Values of a tile, channels of it at most, warps."""


def timed(call: Callable[[], Any], device: str, repeats: int = 20) -> list[float]:
    """Seconds of each call, without the first few."""
    import torch

    found = []
    for index in range(repeats + 3):
        if device == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            seconds = first.elapsed_time(last) / 1e3
        else:
            begun = time.perf_counter()
            call()
            seconds = time.perf_counter() - begun
        if index >= 3:
            found.append(seconds)
    return found


def row(name: str, seconds: list[float], num_bytes: float) -> tuple[str, ...]:
    middle = statistics.median(seconds)
    line = (
        name,
        f"{middle * 1e6:.0f}",
        f"{spread(seconds):.1%}",
        f"{num_bytes / middle / 1e12:.2f}",
    )
    print("  ".join(line), file=sys.stderr, flush=True)
    return line


def norms(num: int, shrink: int, device: str) -> list[tuple[str, ...]]:
    import torch

    from ridgeline.parallel import conv_ops

    rows = []
    compiled = torch.compile(
        lambda x: torch.var_mean(x.float(), (0, 2, 3), correction=0), dynamic=False
    )
    ours = torch.compile(conv_ops.channel_moments, dynamic=False)
    for channels, side in NORMS:
        shape = (num, channels // shrink, max(side // shrink, 1), max(side // shrink, 1))
        x = torch.randn(shape, device=device).bfloat16()
        x = x.contiguous(memory_format=torch.channels_last)
        name, num_bytes = f"{channels} x {side} x {side}", x.numel() * 2
        rows.append(row(f"{name} copy", timed(x.clone, device), 2 * num_bytes))
        rows.append(row(f"{name} compiler", timed(lambda x=x: compiled(x), device), num_bytes))
        rows.append(row(f"{name} ours", timed(lambda x=x: ours(x), device), num_bytes))
        if device != "cuda":
            continue
        from ridgeline.parallel import conv_kernels

        kept = conv_kernels.MOMENTS_TILE, conv_kernels.MOMENTS_STAGES, conv_kernels.MOMENTS_WARPS
        for tile, stages, warps in TILES:
            conv_kernels.MOMENTS_TILE, conv_kernels.MOMENTS_STAGES = tile, stages
            conv_kernels.MOMENTS_WARPS = warps
            seconds = timed(lambda x=x: conv_ops.channel_parts(x), device)
            rows.append(row(f"{name} parts {tile}/{stages}/{warps}", seconds, num_bytes))
        conv_kernels.MOMENTS_TILE, conv_kernels.MOMENTS_STAGES, conv_kernels.MOMENTS_WARPS = kept
    return rows


def pools(num: int, shrink: int, device: str) -> list[tuple[str, ...]]:
    import torch
    import torch.nn.functional as F

    from ridgeline.parallel import conv_ops

    side, window = 112 // shrink, ([3, 3], [2, 2], [1, 1])
    x = torch.randn((num, 64, side, side), device=device).bfloat16()
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    theirs = torch.compile(lambda x: F.max_pool2d(x, *window), dynamic=False)
    made = theirs(x)
    grad = torch.randn_like(made)
    out, offsets = conv_ops.max_pool(x.detach(), *window)
    forward = 2 * x.numel() + 3 * out.numel()
    rows = [row("pool compiler", timed(lambda: theirs(x), device), forward)]
    again = timed(lambda: torch.autograd.grad(made, x, grad, retain_graph=True), device)
    rows.append(row("pool backward compiler", again, forward))

    def ours(name: str) -> None:
        still = x.detach()
        there = timed(lambda: conv_ops.max_pool(still, *window), device)
        rows.append(row(f"pool {name}", there, forward))
        size = [side, side]
        back = timed(lambda: conv_ops.max_pool_backward(grad, offsets, size, *window), device)
        rows.append(row(f"pool backward {name}", back, forward))

    ours("ours")
    if device == "cuda":
        from ridgeline.parallel import conv_kernels

        kept = conv_kernels.POOL_TILE, conv_kernels.POOL_COLUMNS, conv_kernels.POOL_WARPS
        for tiles in POOL_TILES:
            conv_kernels.POOL_TILE, conv_kernels.POOL_COLUMNS, conv_kernels.POOL_WARPS = tiles
            ours("/".join(map(str, tiles)))
        conv_kernels.POOL_TILE, conv_kernels.POOL_COLUMNS, conv_kernels.POOL_WARPS = kept
    return rows


def steps(num: int, shrink: int, device: str, rounds: int) -> list[tuple[str, ...]]:
    """Both models in turns, so that a device that grows warm slows both."""
    import torch
    import torch.nn.functional as F

    from ridgeline.layout import Layout
    from ridgeline.models.build import build_model
    from ridgeline.parallel.conv_layers import apply_conv_kernels

    torch.backends.cudnn.benchmark = True
    plain = build_model("resnet50").to(device=device, memory_format=torch.channels_last)
    ours = copy.deepcopy(plain)
    apply_conv_kernels(ours, Layout.parse("compile=true"))
    side = 224 // shrink
    x = torch.randn((num, 3, side, side), device=device).contiguous(
        memory_format=torch.channels_last
    )
    targets = torch.randint(0, 1000, (num,), device=device)
    calls = {}
    for name, model in (("step without", plain), ("step with", ours)):
        model.compile(dynamic=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(x), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        calls[name] = step
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            found[name] += timed(call, device, 10 if device == "cuda" else 1)
    return [row(name, seconds, 0.0) for name, seconds in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=("all", "pieces", "steps"), default="all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    num, shrink = (2, 4) if options.tiny else (options.batch, 1)
    rows: list[tuple[str, ...]] = []
    if options.part != "steps":
        rows += norms(num, shrink, options.device) + pools(num, shrink, options.device)
        write_json(options.json, rows)
    if options.part != "pieces":
        rows += steps(num, shrink, options.device, 1 if options.tiny else options.rounds)
        write_json(options.json, rows)
    print_table(("piece", "us", "spread", "TB/s"), rows)


if __name__ == "__main__":
    main()
