"""The machine under a run: its devices and what they could do at best.

Peak rates of accelerators come from their data sheets (dense, no sparsity), because that is the
figure the field divides by when it says MFU; for a CPU there is no such figure that holds for the
threads a rank has, so a matrix product is timed. Called by `train/setup.py`.
"""

from __future__ import annotations

import socket
import time

import psutil
import torch

from ridgeline.facts import MachineFacts

# TFLOP/s per device, dense, by a fragment of the name that torch reports. The longest match wins.
# Source: NVIDIA's and AMD's data sheets for the SXM/OAM parts unless the name says PCIe.
DATASHEET_TFLOPS: dict[str, dict[str, float]] = {
    "V100": {"fp32": 15.7, "tf32": 15.7, "fp16": 125, "bf16": 15.7},
    "T4": {"fp32": 8.1, "tf32": 8.1, "fp16": 65, "bf16": 8.1},
    "A10": {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125},
    "A100": {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312},
    "A40": {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7},
    "L4": {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242},
    "L40S": {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513},
    "H100": {"fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9},
    "H200": {"fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9},
    "GH200": {"fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9},
    "B200": {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500},
    "GB200": {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500, "fp8": 5000},
    "MI250X": {"fp32": 47.9, "tf32": 47.9, "fp16": 191.5, "bf16": 191.5},
    "MI300X": {"fp32": 163.4, "tf32": 653.7, "fp16": 1307, "bf16": 1307, "fp8": 2615},
}


def describe_machine(device: torch.device, precision: str, num_devices: int) -> MachineFacts:
    """Facts of this node; `precision` decides which rate is measured where none is published."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = properties.name, properties.total_memory
        peaks = datasheet_flops(name)
        source = "datasheet" if peaks else "measured"
        if not peaks:
            peaks = {precision: measure_matmul_flops(device, precision)}
    else:
        name, memory_bytes = _cpu_name(), psutil.virtual_memory().total
        peaks = {precision: measure_matmul_flops(device, precision)}
        source = "measured"
    return MachineFacts(
        host=socket.gethostname(),
        num_cores=psutil.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        device_kind=device.type,
        device_name=name,
        num_devices=num_devices,
        device_memory_bytes=memory_bytes,
        peak_flops=peaks,
        peak_source=source,
    )


def datasheet_flops(device_name: str) -> dict[str, float]:
    """Published dense rates of the device torch calls `device_name`; empty when not in the table."""
    words = device_name.replace("-", " ")
    matches = [known for known in DATASHEET_TFLOPS if _stands_in(known, words)]
    if not matches:
        return {}
    best = max(matches, key=len)
    return {precision: rate * 1e12 for precision, rate in DATASHEET_TFLOPS[best].items()}


def _stands_in(known: str, name: str) -> bool:
    """Whole words in a row, so that A10 is not found in A100."""
    return f" {known} " in f" {name} "


LEAST_SIDE = 512
"""Of a product that a device may show its best rate in."""


def measure_matmul_flops(device: torch.device, precision: str, budget_s: float = 0.05) -> float:
    """FLOP/s of a square matrix product in the run's precision, the best over growing sizes.

    Sizes double until one product takes longer than the budget: a CPU without bf16 instructions
    needs minutes for a product that one with them does in a millisecond.
    """
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(precision, torch.float32)
    # A generator of its own: how many numbers are drawn depends on timing, and the run's must not.
    generator = torch.Generator(device=device).manual_seed(0)
    best_rate, size = 0.0, 64
    while True:
        a, b = (
            torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
        )
        shortest = min(_time_product(a, b, device) for _ in range(3))
        best_rate = max(best_rate, 2.0 * size**3 / shortest)
        # A small product that takes long says that the core was another's, not how fast it is.
        is_long = shortest > (budget_s / 8 if size >= LEAST_SIDE else budget_s)
        if is_long or size >= 8192:
            break
        size *= 2
    # Another job may have had the core just then: go on for as long as the budget lasts.
    until = time.perf_counter() + 4 * budget_s
    while time.perf_counter() < until:
        best_rate = max(best_rate, 2.0 * size**3 / _time_product(a, b, device))
    return best_rate


def _time_product(a: torch.Tensor, b: torch.Tensor, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    a @ b
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    """The processor's name as Linux tells it, or the architecture."""
    import platform
    from pathlib import Path

    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return f"{platform.machine()} CPU"


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory this process has held; for the CPU its resident set now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
