"""fp8 linear layers on this device, compiled and not: whether they are right, and how fast each is.

    python benchmarks/gpu_float8.py                          # about a minute on a GPU
    python benchmarks/gpu_float8.py --budget 90 --json f8.json
    python benchmarks/gpu_float8.py --device cpu --tiny      # to see that it works; times mean nothing

Part one runs one layer of 2048 x 2048 in every way and compares output, input gradient and weight
gradient with float64: relative error (about 0.03 with e4m3, 0.05 with e5m2), share of zeros, and whether
it is right. Part two times the pieces around the products. Part three times the right ways on the layers of
a 1.3B model, forward and backward, beside bf16. Every line is printed when it is known, and nothing is
begun after the budget. A way that fails says so in its line.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, write_json

SHAPES = {"wq": (2048, 2048), "w1": (2048, 5504), "w2": (5504, 2048)}
"""Inputs and outputs of the layers of a 1.3B model."""
BOUND = 0.12
"""Relative error of the norm above which a product is wrong and not rounded."""
IN_A_ROW = 10


@dataclass(frozen=True)
class Way:
    """One way to run the layer."""

    name: str
    scaling: str = "tensor"
    compiled: bool = True
    fast: bool = True
    gradients: str = "e5m2"
    turned_weight: bool = False
    """A weight that is a view of its transpose."""


WAYS = (
    Way("tensor"),
    Way("mixed", "mixed"),
    Way("row", "row"),
    Way("careful", "careful"),
    Way("tensor, eager", compiled=False),
    Way("mixed, eager", "mixed", compiled=False),
    Way("tensor, e4m3 gradients", gradients="e4m3"),
    Way("tensor, slow sums", fast=False),
    Way("tensor, turned weight", turned_weight=True),
)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def build(way: Way, weight: Any, native: bool) -> Callable[[Any], Any]:
    import torch

    from ridgeline.parallel.float8 import build_scaling, linear
    from ridgeline.tuning import TuneConfig

    tune = TuneConfig(
        fp8_scaling=way.scaling,
        fp8_gradients=way.gradients,
        fp8_fast_accumulate=way.fast,
    )
    scaling = dataclasses.replace(build_scaling(tune, weight.device), native=native)

    def layer(x: Any) -> Any:
        # As in a model: something before it to fuse with, and a residual after it.
        return x + linear(torch.nn.functional.silu(x), weight, None, scaling)

    return torch.compile(layer, dynamic=False) if way.compiled else layer


def errors(way: Way, tokens: int, width: int, device: str, native: bool) -> dict[str, Any]:
    """Output, input gradient and weight gradient beside float64."""
    import torch

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    x, weight, grad = (
        draw(tokens, width),
        draw(width, width) / width**0.5,
        draw(tokens, width) * 1e-4,
    )
    x, weight, grad = (value.to(device).bfloat16() for value in (x, weight, grad))
    matrix = weight.t().contiguous().t() if way.turned_weight else weight
    matrix = matrix.detach().requires_grad_()
    leaf = x.clone().requires_grad_()
    out = build(way, matrix, native)(leaf)
    out.backward(grad)
    exact_x = x.double().requires_grad_()
    exact_w = weight.double().requires_grad_()
    exact = exact_x + torch.nn.functional.silu(exact_x) @ exact_w.t()
    exact.backward(grad.double())
    # Without the residual, which would hide a product of zeros.
    pairs = {
        "output": (out.detach().double() - x.double(), exact.detach() - x.double()),
        "dx": (leaf.grad.double() - grad.double(), exact_x.grad - grad.double()),
        "dw": (matrix.grad.double(), exact_w.grad),
    }
    found: dict[str, Any] = {}
    for name, (mine, true) in pairs.items():
        found[name] = {
            "error": float((mine - true).norm() / true.norm()),
            "largest": float((mine - true).abs().max() / true.abs().max()),
            "zeros": float((mine == 0).double().mean()),
        }
    found["right"] = all(value["error"] < BOUND for value in found.values())
    return found


def timed(call: Callable[[], Any], cuda: bool, repeats: int) -> float:
    """Median seconds; on a GPU of some calls in a row, so that launching them is not what is timed."""
    import torch

    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        if cuda:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            for _ in range(IN_A_ROW):
                call()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e3 / IN_A_ROW)
        else:
            begun = time.perf_counter()
            call()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def speed(
    way: Way | None, tokens: int, shape: tuple[int, int], options: Any, native: bool
) -> float:
    """TFLOP/s of forward and backward of one layer after a gate, None being bf16."""
    import torch

    torch._dynamo.reset()
    device, (inputs, outputs) = options.device, shape
    x = torch.randn(tokens, inputs, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(outputs, inputs, device=device) / inputs**0.5).bfloat16()
    weight.requires_grad_()
    grad = torch.randn(tokens, outputs, device=device).bfloat16()
    if way is None:
        functional = torch.nn.functional

        def layer(x: Any) -> Any:
            return functional.linear(functional.silu(x), weight)

        call = torch.compile(layer, dynamic=False)
    else:
        from ridgeline.parallel.float8 import build_scaling, linear
        from ridgeline.tuning import TuneConfig

        tune = TuneConfig(
            fp8_scaling=way.scaling,
            fp8_gradients=way.gradients,
            fp8_fast_accumulate=way.fast,
        )
        scaling = dataclasses.replace(build_scaling(tune, weight.device), native=native)

        def layer(x: Any) -> Any:
            return linear(torch.nn.functional.silu(x), weight, None, scaling)

        call = torch.compile(layer, dynamic=False) if way.compiled else layer

    def both() -> None:
        x.grad = weight.grad = None
        call(x).backward(grad)

    seconds = timed(both, device == "cuda", options.repeats)
    return 6.0 * tokens * inputs * outputs / seconds / 1e12


TILES = tuple(itertools.product(((64, 64), (64, 128), (128, 64), (128, 128), (32, 256)), (4, 8)))
"""Of the kernel that casts, to see which is the fastest on a device."""


def _cast_with(x: Any, top: Any, block: tuple[int, int], warps: int) -> None:
    from unittest import mock

    from ridgeline.parallel import float8_kernels, float8_ops

    with mock.patch.multiple(float8_kernels, BLOCK=block, WARPS=warps):
        float8_ops.cast_both(x, top, top, float8_ops.E4M3)


def pieces(tokens: int, width: int, options: Any, native: bool) -> dict[str, float]:
    """Milliseconds of what stands around a product, compiled, and of the product alone."""
    import torch

    from ridgeline.parallel import float8_ops as ops

    device, cuda = options.device, options.device == "cuda"
    x = torch.randn(tokens, width, device=device).bfloat16()
    top = ops.largest(x, False)
    made, turned = ops.cast_both(x, top, top, ops.E4M3)
    weight = ops.cast(x[:width], top, ops.E4M3)
    scale = ops.scale_of(top, ops.E4M3)
    rows = ops.largest(x, True)
    rows_x, rows_w = ops.scale_of(rows, ops.E4M3), ops.scale_of(rows[:width], ops.E4M3)
    find = torch.compile(lambda v: ops.largest(v, False), dynamic=False)
    gain = torch.randn(tokens, width, device=device).bfloat16()
    of_gain = ops.cast_turned(gain, top, ops.E4M3)
    bf16 = torch.bfloat16
    wanted: dict[str, Callable[[], Any]] = {
        "bf16 product": lambda: x @ x[:width].t(),
        "fp8 product, fast sums": lambda: ops.product(
            made, weight, scale, scale, bf16, True, native
        ),
        "fp8 product": lambda: ops.product(made, weight, scale, scale, bf16, False, native),
        "fp8 product, rows": lambda: ops.product(made, weight, rows_x, rows_w, bf16, True, native),
        "bf16 weight gradient": lambda: x.t() @ gain,
        "fp8 weight gradient": lambda: ops.product(
            turned, of_gain, scale, scale, bf16, False, native
        ),
        "largest value": lambda: find(x),
        "cast": lambda: ops.cast(x, top, ops.E4M3),
        "cast, turned over": lambda: ops.cast_turned(x, top, ops.E4M3),
        "cast, both ways": lambda: ops.cast_both(x, top, top, ops.E4M3),
        "cast, both ways, rows": lambda: ops.cast_both(x, rows, top, ops.E4M3),
        "turning bytes over by torch": lambda: made.t().contiguous(),
        "copy, for comparison": lambda: x.clone(),
    }
    for block, warps in TILES if cuda else ():
        wanted[f"cast, both ways, {block[0]} x {block[1]}, {warps} warps"] = partial(
            _cast_with, x, top, block, warps
        )
    found = {}
    for name, call in wanted.items():
        try:
            found[name] = 1e3 * timed(call, cuda, options.repeats)
        except Exception as error:
            say(f"{name} FAILED: {first_line(error)}")
    return found


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:140]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--budget", type=float, default=85.0, help="seconds; nothing is begun after"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--only", nargs="*", help="ways whose names begin so")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun = time.monotonic()
    import torch

    from ridgeline.parallel.float8 import has_fp8_products

    device = torch.device(options.device)
    # A CPU has the product too, slowly, so that the same calls are made.
    native = device.type == "cpu" or has_fp8_products(device)
    shapes, checked = SHAPES, (1024, 2048)
    if options.tiny:
        shapes, checked, options.tokens, options.repeats = {"wq": (64, 96)}, (64, 64), [64], 2
    say(f"torch {torch.__version__} on {options.device}, fp8 products: {native}")
    results: dict[str, Any] = {"torch": torch.__version__, "right": {}, "tflops": {}, "ms": {}}

    def is_late() -> bool:
        return time.monotonic() - begun > options.budget

    ways = [w for w in WAYS if not options.only or any(w.name.startswith(o) for o in options.only)]
    rows = []
    for way in ways:
        # The first third of the list decides; the rest may take half of the time.
        if time.monotonic() - begun > 0.55 * options.budget:
            say(f"no time for {way.name}")
            continue
        try:
            found = errors(way, *checked, options.device, native)
        except Exception as error:
            say(f"{way.name}: FAILED: {first_line(error)}")
            results["right"][way.name] = {"failed": first_line(error)}
            rows.append((way.name, "failed", *[""] * 6))
            continue
        results["right"][way.name] = found
        parts = [found[name] for name in ("output", "dx", "dw")]
        rows.append(
            (
                way.name,
                "right" if found["right"] else "WRONG",
                *(f"{p['error']:.4f}" for p in parts),
                *(f"{p['zeros']:.1%}" for p in parts),
            )
        )
        say("  ".join(rows[-1]))
        write_json(options.json, results)
    right = {name: f.get("right", False) for name, f in results["right"].items()}
    tokens, first = options.tokens[-1], next(iter(shapes.values()))
    results["ms"] = pieces(tokens, first[0], options, native)
    for name, ms in results["ms"].items():
        say(f"{name}: {ms:.3f} ms ({tokens} x {first[0]})")
    write_json(options.json, results)
    speeds = []
    racing: list[Way | None] = [None, *(way for way in ways if right.get(way.name))]
    cases = [(tokens, name) for tokens in options.tokens[::-1] for name in list(shapes)[::-1]]
    # Layer by layer, so that what there is time for is comparable.
    for tokens, shape_name in cases:
        shape = shapes[shape_name]
        key = f"{shape_name} {tokens} x {shape[0]} x {shape[1]}"
        for way in racing:
            name = "bf16, compiled" if way is None else way.name
            if is_late():
                continue
            try:
                rate = speed(way, tokens, shape, options, native)
            except Exception as error:
                say(f"{name}: {key} FAILED: {first_line(error)}")
                continue
            results["tflops"].setdefault(key, {})[name] = rate
            base = results["tflops"][key].get("bf16, compiled", rate)
            speeds.append((key, name, f"{rate:.0f}", f"{rate / base:.2f}"))
            say(f"{name}: {key}: {rate:.2f} TFLOP/s, {rate / base:.2f} of bf16")
            write_json(options.json, results)
    print_table(("way", "", "output", "dx", "dw", "zeros", "dx", "dw"), rows)
    print_table(("layer", "way", "TFLOP/s", "x bf16"), speeds)
    say(f"{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
