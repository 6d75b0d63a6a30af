"""Measure a device: matrix products and convolutions in each precision, memory, the host link, launches.

Every case is timed a few times, and the repetitions of all cases are interleaved, so that a clock that
falls or a neighbour that wakes up hits all of them; the median counts. Sizes fit the device: what a GPU
does in a millisecond takes one core a second. Called by `cli_machine.py` and, shortened, by the doctor.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from ridgeline.errors import UsageError
from ridgeline.machine.describe import _cpu_name
from ridgeline.machine.power import PowerWatch, open_gauge
from ridgeline.machine.roofline import ITEM_BYTES, PRECISIONS, ComputeFacts, Product, Sustained

Tell = Callable[[str, float], None]
Work = Callable[[], object]

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_MIN_TIMED_S = {"cuda": 2e-3, "cpu": 1e-3}
"""A timing repeats a short piece of work until it is at least this long."""
_TINY_LAUNCHES = 400
SUSTAINED = ("tf32", "bf16", "fp16", "fp8")
"""What is worth to be sustained: the precisions that people train in on tensor cores."""


@dataclass(frozen=True)
class Shape:
    """A piece of arithmetic that can be made in any precision."""

    kind: str
    dims: tuple[int, ...]

    @property
    def flops(self) -> float:
        if self.kind == "matrix":
            m, n, k = self.dims
            return 2.0 * m * n * k
        if self.kind == "batched":
            b, m, n, k = self.dims
            return 2.0 * b * m * n * k
        samples, channels, size, filters, kernel = self.dims
        return 2.0 * samples * filters * size * size * channels * kernel * kernel

    @property
    def num_items(self) -> float:
        """Numbers in the operands and the result."""
        if self.kind == "matrix":
            m, n, k = self.dims
            return float(m * k + k * n + m * n)
        if self.kind == "batched":
            b, m, n, k = self.dims
            return float(b * (m * k + k * n + m * n))
        samples, channels, size, filters, kernel = self.dims
        return float(
            samples * (channels + filters) * size * size + filters * channels * kernel * kernel
        )


@dataclass(frozen=True)
class Amounts:
    """How much is measured."""

    shapes: tuple[Shape, ...]
    repeats: int
    memory_bytes: int
    """Of one array of the copy and the triad."""
    link_bytes: int
    longest_s: float = 1.0
    """A case that takes longer is left out after its first time."""
    sustained_s: float = 0.0
    """How long the best product of a precision goes on; 0: not at all."""


def _squares(*sizes: int) -> tuple[Shape, ...]:
    return tuple(Shape("matrix", (size, size, size)) for size in sizes)


_GPU_SHAPES = (
    *_squares(256, 512, 1024, 2048, 4096, 8192),
    Shape("matrix", (4095, 4095, 4095)),  # no multiple of anything: the cliff
    Shape("matrix", (8192, 3072, 768)),
    Shape("matrix", (8192, 768, 3072)),
    Shape("matrix", (8192, 50257, 768)),
    Shape("matrix", (8192, 50304, 768)),
    Shape("matrix", (16, 4096, 4096)),
    Shape("batched", (96, 1024, 1024, 64)),
    Shape("batched", (96, 1024, 64, 1024)),
    Shape("batched", (96, 1024, 1024, 128)),
    Shape("convolution", (64, 64, 56, 64, 3)),
    Shape("convolution", (64, 256, 14, 256, 3)),
    Shape("convolution", (64, 512, 28, 128, 1)),
)
_CPU_SHAPES = (
    *_squares(64, 128, 256, 512),
    Shape("matrix", (255, 255, 255)),
    Shape("matrix", (1024, 384, 96)),
    Shape("matrix", (4, 512, 512)),
    Shape("batched", (16, 128, 128, 32)),
    Shape("convolution", (4, 16, 28, 16, 3)),
)
_QUICK_GPU_SHAPES = (*_squares(1024, 4096, 8192), Shape("convolution", (64, 256, 14, 256, 3)))
_QUICK_CPU_SHAPES = (*_squares(128, 256), Shape("convolution", (2, 16, 28, 16, 3)))

AMOUNTS = {
    ("cuda", False): Amounts(_GPU_SHAPES, 7, 1 << 30, 1 << 28, sustained_s=2.0),
    ("cuda", True): Amounts(_QUICK_GPU_SHAPES, 3, 1 << 28, 1 << 26),
    ("cpu", False): Amounts(_CPU_SHAPES, 7, 1 << 27, 1 << 25, 0.25),
    ("cpu", True): Amounts(_QUICK_CPU_SHAPES, 3, 1 << 25, 1 << 24, 0.05),
}


def measure_compute(
    device: torch.device, quick: bool = False, tell: Tell | None = None
) -> ComputeFacts:
    """Everything about one device that a roofline needs."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here; use --device cpu")
    if (device.type, quick) not in AMOUNTS:
        raise UsageError(f"--device {device.type}: this measures cuda and cpu; use one of them")
    tell = tell or (lambda _what, _share: None)
    began = time.perf_counter()
    amounts = AMOUNTS[(device.type, quick)]
    launches = [_launches(device)]
    products, notes = measure_products(device, amounts, PRECISIONS, tell)
    tell("products that go on", 0.7)
    sustained = measure_sustained(device, products, amounts.sustained_s)
    launches.append(_launches(device))
    tell("memory", 0.85)
    copy, triad = _memory(device, amounts)
    tell("host link", 0.92)
    link = _link(device, amounts) if device.type == "cuda" else {}
    tell("launches", 0.97)
    launches.append(_launches(device))
    # Hosts have slow seconds: the middle one of three that lie apart.
    launch, round_trip = (statistics.median(values) for values in zip(*launches, strict=True))
    peaks: dict[str, float] = {}
    for product in products:
        peaks[product.precision] = max(peaks.get(product.precision, 0.0), product.flops_per_s)
    return ComputeFacts(
        host=socket.gethostname(),
        device_kind=device.type,
        device_name=device_name(device),
        time=time.time(),
        num_threads=torch.get_num_threads(),
        **_size(device),
        peak_flops=peaks,
        products=tuple(products),
        sustained=sustained,
        copy_bytes_per_s=copy,
        triad_bytes_per_s=triad,
        launch_s=launch,
        round_trip_s=round_trip,
        measured_s=time.perf_counter() - began,
        notes=tuple(notes),
        **link,
    )


def _size(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return {"device_memory_bytes": found.total_memory, "num_sms": found.multi_processor_count}
    return {"device_memory_bytes": psutil.virtual_memory().total}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def measure_products(
    device: torch.device, amounts: Amounts, precisions: Sequence[str], tell: Tell | None = None
) -> tuple[list[Product], list[str]]:
    """Every shape in every precision that the device has; sentences on those it has not."""
    tell = tell or (lambda _what, _share: None)
    cases: list[tuple[Shape, str, Work]] = []
    notes: list[str] = []
    for precision in precisions:
        reason = ""
        for shape in amounts.shapes:
            try:
                work, reason = _build(shape, precision, device)
                if work is None:
                    continue
                with _mode(precision, device):
                    first = time_once(work, device)
                    first = (
                        min(first, time_once(work, device)) if first > amounts.longest_s else first
                    )
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0][:120]
                continue
            if first <= amounts.longest_s:
                cases.append((shape, precision, work))
            else:
                reason = f"one product of {shape.dims} takes {first:.2g} s"
        if not any(made == precision for _, made, _ in cases):
            notes.append(f"{precision} was not measured: {reason or 'the device does not have it'}")
    times: dict[int, list[float]] = {number: [] for number in range(len(cases))}
    counts = {}
    for turn in range(amounts.repeats):
        for number, (_, precision, work) in enumerate(cases):
            with _mode(precision, device):
                if number not in counts:
                    counts[number] = _enough(work, device)
                times[number].append(time_many(work, counts[number], device))
        tell("products", 0.1 + 0.6 * (turn + 1) / amounts.repeats)
    return [_product(c[0], c[1], times[i]) for i, c in enumerate(cases)], notes


def measure_sustained(
    device: torch.device, products: Sequence[Product], seconds: float
) -> dict[str, Sustained]:
    """The best matrix product of each narrow precision for so long; the second half of it counts, when
    the clock has settled."""
    gauge = open_gauge(device) if seconds else None
    found: dict[str, Sustained] = {}
    for precision in SUSTAINED if gauge is not None else ():
        rows = [p for p in products if p.precision == precision and p.kind == "matrix"]
        if not rows:
            continue
        best = max(rows, key=lambda p: p.flops_per_s)
        work, _ = _build(Shape(best.kind, best.shape), precision, device)
        assert work is not None
        count = max(1, round(seconds / 2 / best.seconds))
        watch = PowerWatch(gauge)
        with _mode(precision, device):
            time_many(work, count, device)
            watch.start()
            try:
                spent_s = time_many(work, count, device)
            finally:
                drawn = watch.stop()
        if drawn is not None:
            found[precision] = Sustained(
                best.flops / spent_s, drawn.watts, drawn.clock_mhz, best.shape
            )
    return found


def _product(shape: Shape, precision: str, times: list[float]) -> Product:
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else (median, median, median)
    return Product(
        kind=shape.kind,
        precision=precision,
        shape=shape.dims,
        flops=shape.flops,
        bytes=shape.num_items * ITEM_BYTES[precision],
        seconds=median,
        spread=(quartiles[2] - quartiles[0]) / 2 / median if median else 0.0,
    )


class _mode:
    """The process's setting for products of fp32 numbers, for as long as a case runs."""

    def __init__(self, precision: str, device: torch.device) -> None:
        self._wanted = "high" if precision == "tf32" else "highest"
        self._cuda = device.type == "cuda"

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._wanted)
        if self._cuda:
            self._convolutions = torch.backends.cudnn.allow_tf32
            torch.backends.cudnn.allow_tf32 = self._wanted == "high"

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self._before)
        if self._cuda:
            torch.backends.cudnn.allow_tf32 = self._convolutions


def _build(shape: Shape, precision: str, device: torch.device) -> tuple[Work | None, str]:
    """A function that does the work once, or why there is none."""
    if precision == "tf32" and (device.type != "cuda" or _capability(device) < (8, 0)):
        return None, "only CUDA devices from compute capability 8.0 on have it"
    if precision == "fp8":
        return _build_fp8(shape, device)
    generator = torch.Generator(device=device).manual_seed(0)

    def numbers(*size: int) -> Tensor:
        made = torch.randn(size, device=device, generator=generator, dtype=torch.float32)
        return made.to(DTYPES[precision])

    if shape.kind == "matrix":
        m, n, k = shape.dims
        a, b = numbers(m, k), numbers(k, n)
        return (lambda: a @ b), ""
    if shape.kind == "batched":
        batch, m, n, k = shape.dims
        a, b = numbers(batch, m, k), numbers(batch, k, n)
        return (lambda: torch.bmm(a, b)), ""
    samples, channels, size, filters, kernel = shape.dims
    x, w = numbers(samples, channels, size, size), numbers(filters, channels, kernel, kernel)
    if device.type == "cuda":
        x, w = (t.contiguous(memory_format=torch.channels_last) for t in (x, w))
    return (lambda: F.conv2d(x, w, padding=kernel // 2)), ""


def _build_fp8(shape: Shape, device: torch.device) -> tuple[Work | None, str]:
    if device.type != "cuda" or _capability(device) < (8, 9):
        return None, "only CUDA devices from compute capability 8.9 on have it"
    if shape.kind != "matrix" or any(size % 16 for size in shape.dims):
        return None, "it multiplies matrices whose sizes are multiples of 16"
    m, n, k = shape.dims
    a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    return (lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)), ""


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _enough(work: Work, device: torch.device) -> int:
    once = max(min(time_once(work, device) for _ in range(2)), 1e-7)
    return max(1, min(1000, round(_MIN_TIMED_S[device.type] / once)))


def time_once(work: Work, device: torch.device) -> float:
    return time_many(work, 1, device)


def time_many(work: Work, count: int, device: torch.device) -> float:
    """Seconds of one; on CUDA by events, so that the host's part is not in it."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            work()
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _median_time(work: Work, repeats: int, device: torch.device) -> float:
    work()
    count = _enough(work, device)
    return statistics.median(time_many(work, count, device) for _ in range(repeats))


def _memory(device: torch.device, amounts: Amounts) -> tuple[float, float]:
    num = amounts.memory_bytes // 4
    a, b, c = (torch.ones(num, device=device) for _ in range(3))
    copy = _median_time(lambda: a.copy_(b), amounts.repeats, device)
    triad = _median_time(lambda: torch.add(b, c, alpha=3.0, out=a), amounts.repeats, device)
    return 2 * 4 * num / copy, 3 * 4 * num / triad


def _link(device: torch.device, amounts: Amounts) -> dict[str, float]:
    """Copies between host and device, each way, from memory that is pinned and from memory that is not."""
    num = amounts.link_bytes
    there = torch.empty(num, dtype=torch.uint8, device=device)
    found = {}
    for name, pinned in (("pinned", True), ("pageable", False)):
        here = torch.ones(num, dtype=torch.uint8, pin_memory=pinned)

        def down(here: Tensor = here) -> object:
            return there.copy_(here, non_blocking=True)

        def up(here: Tensor = here) -> object:
            return here.copy_(there, non_blocking=True)

        for word, work in (("h2d", down), ("d2h", up)):
            seconds = _median_wall(work, amounts.repeats, device)
            found[f"{word}_{name}_bytes_per_s"] = num / seconds
    return found


def _median_wall(work: Work, repeats: int, device: torch.device) -> float:
    """By the host's clock: what is not pinned is copied twice, and the host does the first."""
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _launches(device: torch.device) -> tuple[float, float]:
    """Seconds from one tiny kernel to the next, and of one with the wait for it."""
    x = torch.zeros(1, device=device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    rows, single = [], []
    for _ in range(7):
        wait()
        start = time.perf_counter()
        for _ in range(_TINY_LAUNCHES):
            x.add_(1.0)
        wait()
        rows.append((time.perf_counter() - start) / _TINY_LAUNCHES)
        start = time.perf_counter()
        x.add_(1.0)
        wait()
        single.append(time.perf_counter() - start)
    return statistics.median(rows), statistics.median(single)
