"""AdamW on this device: how fast each update of weights is, beside torch's fused one and a copy.

    python benchmarks/gpu_update.py                        # half a minute on a GPU
    python benchmarks/gpu_update.py --device cpu --tiny    # to see that it works; times mean nothing

The weights are those of a Llama of 1.3 billion parameters; rates count what has to be read and written
once, and where the host takes longer than the device the time is the host's. The norm of the gradients,
which comes before a clipped update, is timed apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_conv import row, timed
from benchmarks.table import print_table

TILES = ((512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8))
"""Elements of a program and its warps."""
WIDTH, FFN, DEPTH, VOCAB = 2048, 5632, 24, 32768


def build(kind: str, device: str, shrink: int) -> tuple[list[Any], Any, float]:
    """Parameters with gradients, their optimizer, and the bytes of an update."""
    import torch
    from torch import nn

    from ridgeline.optim.master import MasterAdamW
    from ridgeline.optim.narrow import narrow_weights
    from ridgeline.optim.stochastic import StochasticAdamW

    width, ffn, vocab = WIDTH // shrink, FFN // shrink, VOCAB // shrink
    shapes = [(width, width)] * 4 + [(ffn, width)] * 2 + [(width, ffn)]
    with torch.device(device):
        layers = [nn.Linear(n, m, bias=False) for m, n in shapes * DEPTH]
        model = nn.ModuleList([*layers, nn.Linear(width, vocab, bias=False)])
        model.append(nn.Embedding(vocab, width))
        model.extend(nn.RMSNorm(width) for _ in range(2 * DEPTH + 1))
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    if kind == "torch, fused":
        optimizer: Any = torch.optim.AdamW(groups[0]["params"], lr=1e-4, fused=True)
        per = 28
    elif kind == "masters":
        masters = narrow_weights(model, torch.bfloat16)
        optimizer = MasterAdamW(groups, 1e-4, (0.9, 0.95), 1e-8, masters)
        per = 28
    else:
        narrow_weights(model, torch.bfloat16)
        optimizer = StochasticAdamW(groups, 1e-4, (0.9, 0.95), 1e-8, 0)
        per = 22
    parameters = groups[0]["params"]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return parameters, optimizer, sum(p.numel() for p in parameters) * per


def try_tiles(kind: str, optimizer: Any, num_bytes: float, time_one: Callable[..., None]) -> None:
    from ridgeline.optim import kernels

    shipped = kernels.TILE, kernels.WARPS
    for kernels.TILE, kernels.WARPS in (*TILES, shipped):
        optimizer._kernels._tiles.clear()
        if shipped != (kernels.TILE, kernels.WARPS):
            name = f"{kind}, tiles of {kernels.TILE}, {kernels.WARPS} warps"
            time_one(name, optimizer.step, num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiles", action="store_true", help="other sizes of the kernel too")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiles and options.device != "cuda":
        parser.error("--tiles is of a kernel for CUDA; leave it out")
    import torch

    from ridgeline.optim.update import _norm_of

    shrink, rows = 32 if options.tiny else 1, []

    def time_one(name: str, call: Callable[[], Any], num_bytes: float) -> None:
        rows.append(row(name, timed(call, options.device), num_bytes))

    source = torch.zeros((1 << 30) // shrink, dtype=torch.uint8, device=options.device)
    other = torch.empty_like(source)
    time_one("copy", lambda: other.copy_(source), 2 * source.numel())
    for kind in ("torch, fused", "masters", "stochastic"):
        parameters, optimizer, num_bytes = build(kind, options.device, shrink)
        time_one(kind, optimizer.step, num_bytes)
        if options.tiles and kind != "torch, fused":
            try_tiles(kind, optimizer, num_bytes, time_one)
        gradients = [p.grad for p in parameters]
        size = sum(g.numel() * g.element_size() for g in gradients)
        time_one(f"{kind}: norm", lambda gradients=gradients: _norm_of(gradients), size)
        del parameters, optimizer, gradients
    print_table(("update", "us", "spread", "TB/s"), rows)


if __name__ == "__main__":
    main()
