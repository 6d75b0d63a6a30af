"""One GPU: every algorithm that cuBLASLt offers for a model's products, at the power limit.

    python benchmarks/gpu_algorithms.py                  # about 100 s on a GPU
    python benchmarks/gpu_algorithms.py --json algorithms.json --limit 60

Each of the products of a Llama of 1.3 billion parameters with 24,576 tokens in bf16: the output, the
gradient of the input and that of the weight, alone and with layers of one input merged. The library names
up to 64 algorithms, best first; the five fastest and the first then take turns of a fifth of a second, on a
device that was busy before, so that its clock is what its power allows. Rate, and energy as the device
counts it.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, write_json

TOKENS = 24_576
LAYERS = ((2048, 5632), (5632, 2048), (2048, 2048), (2048, 32768), (2048, 11264), (2048, 6144))
"""Inputs and outputs; the last two are merged."""
FLOAT32, BFLOAT16, IN_FLOAT32 = 0, 14, 68
TURN_A, TURN_B, TILE, CLUSTER, MOST_WORKSPACE = 3, 4, 1, 8, 1
WORKSPACE = 64 << 20
MOST = 64


class Offer(ctypes.Structure):
    """An algorithm, as the library gives it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", c_size_t), ("state", c_int),
        ("waves", ctypes.c_float), ("reserved", c_int * 4),
    )  # fmt: skip


class Library:
    """cuBLASLt of this process, once torch has used it."""

    def __init__(self) -> None:
        import torch

        one = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
        torch.mm(one, one)
        maps = Path("/proc/self/maps").read_text().splitlines()
        path = next((line.split()[-1] for line in maps if "libcublasLt.so" in line), None)
        if path is None:
            raise SystemExit("torch has loaded no cuBLASLt; this needs a CUDA device")
        self.calls, self.handle = ctypes.CDLL(path), c_void_p()
        self.call("Create", byref(self.handle))
        self.workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.calls, f"cublasLt{name}")(*arguments):
            raise RuntimeError(f"cublasLt{name} says {code}")

    def make(self, name: str, *arguments: Any) -> c_void_p:
        out = c_void_p()
        self.call(f"{name}Create", byref(out), *arguments)
        return out

    def layout(self, rows: int, columns: int) -> c_void_p:
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        return self.make("MatrixLayout", BFLOAT16, *sizes)


class Product:
    """By columns, as the library has it: D (m, n) = A B, each of them turned or not."""

    def __init__(self, library: Library, m: int, n: int, k: int, turns: tuple[int, int]) -> None:
        import torch

        self.library = library
        self.how = library.make("MatmulDesc", IN_FLOAT32, FLOAT32)
        for attribute, turn in zip((TURN_A, TURN_B), turns, strict=True):
            value = ctypes.c_int32(turn)
            library.call("MatmulDescSetAttribute", self.how, attribute, byref(value), c_size_t(4))
        self.layouts = (
            library.layout(k, m) if turns[0] else library.layout(m, k),
            library.layout(n, k) if turns[1] else library.layout(k, n),
            library.layout(m, n),
        )
        a = torch.randn(m * k, device="cuda").mul_(0.05).bfloat16()
        b = torch.randn(k * n, device="cuda").bfloat16()
        self.values = a, b, torch.empty(m * n, device="cuda", dtype=torch.bfloat16)
        self.one, self.zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self.offers = self._ask()

    def _ask(self) -> list[Offer]:
        library, (a, b, d) = self.library, self.layouts
        wish, most = library.make("MatmulPreference"), ctypes.c_uint64(WORKSPACE)
        library.call("MatmulPreferenceSetAttribute", wish, MOST_WORKSPACE, byref(most), c_size_t(8))
        found, count = (Offer * MOST)(), c_int(0)
        given = (library.handle, self.how, a, b, d, d, wish, MOST, found, byref(count))
        library.call("MatmulAlgoGetHeuristic", *given)
        return [offer for offer in found[: count.value] if offer.state == 0]

    def run(self, offer: Offer) -> None:
        import torch

        a, b, d = (c_void_p(value.data_ptr()) for value in self.values)
        of_a, of_b, of_d = self.layouts
        self.library.call(
            "Matmul", self.library.handle, self.how, byref(self.one), a, of_a, b, of_b,
            byref(self.zero), d, of_d, d, of_d, byref(offer.algorithm),
            c_void_p(self.library.workspace.data_ptr()), c_size_t(WORKSPACE),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip

    def setting(self, offer: Offer, which: int) -> int:
        """Number of its tile or cluster, as the library counts them."""
        value, size = ctypes.c_uint32(0), c_size_t(0)
        width = c_size_t(2 if which == CLUSTER else 4)
        given = (byref(offer.algorithm), which, byref(value), width, byref(size))
        self.library.call("MatmulAlgoConfigGetAttribute", *given)
        return value.value


class Clock:
    """Seconds and joules of one call among many."""

    def __init__(self) -> None:
        import pynvml
        import torch

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
        self.joules = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3
        self.wait = torch.cuda.synchronize

    def time(self, call: Callable[[], None], seconds: float, guess_s: float) -> tuple[float, float]:
        count = max(3, int(seconds / guess_s))
        self.wait()
        joules, begun = self.joules(), time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - begun) / count, (self.joules() - joules) / count


def compare(product: Product, clock: Clock, flops: float) -> list[dict[str, float]]:
    """The best and the first, fastest first."""
    guess_s, offers = flops / 6.5e14, product.offers
    clock.time(lambda: product.run(offers[0]), 1.0, guess_s)
    looks = [clock.time(lambda o=o: product.run(o), 0.04, guess_s)[0] for o in offers]
    chosen = sorted(range(len(offers)), key=looks.__getitem__)[:5]
    chosen = chosen if 0 in chosen else [*chosen, 0]
    turns: dict[int, list[tuple[float, float]]] = {place: [] for place in chosen}
    for _ in range(3):
        for place in chosen:
            turns[place].append(clock.time(lambda o=offers[place]: product.run(o), 0.2, guess_s))
    rows = []
    for place, found in turns.items():
        seconds, joules = (statistics.median(column) for column in zip(*found, strict=True))
        rows.append({
            "place": place, "tflops": flops / seconds / 1e12, "joules": joules,
            "pj_per_flop": joules / flops * 1e12,
            "tile": product.setting(offers[place], TILE),
            "cluster": product.setting(offers[place], CLUSTER),
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["tflops"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=100.0, help="nothing is begun after so long")
    options = parser.parse_args()
    library, clock, begun, found, lines = Library(), Clock(), time.monotonic(), [], []
    for k, n in LAYERS:
        shapes = {
            "output": (n, TOKENS, k, (1, 0)),
            "input's gradient": (k, TOKENS, n, (0, 0)),
            "weight's gradient": (k, n, TOKENS, (0, 1)),
        }
        for name, shape in shapes.items():
            if time.monotonic() - begun > options.limit:
                continue
            rows = compare(Product(library, *shape), clock, 2.0 * k * n * TOKENS)
            first, best = next(row for row in rows if row["place"] == 0), rows[0]
            found.append({"inputs": k, "outputs": n, "product": name, "rows": rows})
            write_json(options.json, found)
            lines.append((
                f"{k} x {n}", name, f"{first['tflops']:.0f}", f"{best['tflops']:.0f}",
                f"{best['tflops'] / first['tflops'] - 1:+.1%}", f"{first['pj_per_flop']:.2f}",
                f"{min(row['pj_per_flop'] for row in rows):.2f}",
            ))  # fmt: skip
            print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    head = ("layer", "product", "first TFLOP/s", "best", "gain", "first pJ/FLOP", "least")
    print_table(head, lines)


if __name__ == "__main__":
    main()
