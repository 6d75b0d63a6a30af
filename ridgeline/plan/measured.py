"""A machine whose device was measured: rates of kernels in place of those of the data sheet.

`ridgeline machine compute|network|storage --out machine.json` measures a machine (`own_machine.py` reads
that); `benchmarks/gpu_plan_runs.py` times a GPU's products of many shapes, attention, copies and launches.
Here the few parameters of the device model are fitted to products: nothing of a training run is used.
`load_measured` takes both kinds of files; what one device cannot tell is from the shipped profile of it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ridgeline.errors import UsageError
from ridgeline.plan.kernels import flash_s, gemm_s
from ridgeline.plan.machine import Device, Machine, load_machine
from ridgeline.plan.own_machine import PROFILES, is_machine_file, machine_from_file, profile_of

KERNELS_A_LINEAR: Final = 4.1
"""Kernels of a small linear layer's forward and backward under autocast, its share of casts included."""
_MAKE: Final = "ridgeline machine compute --out machine.json measures a machine"
_LEAST_BYTES: Final = 200e6
"""Copies smaller than this time their start and caches, not memory."""


def load_measured(path: Path) -> Machine:
    """The machine that a file of measured rates, or a `machine.json`, is of."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} of --machine ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{path} of --machine holds no JSON ({error}); {_MAKE}") from error
    try:
        if is_machine_file(content):
            return machine_from_file(content, fit_products)
        rates = content.get("rates", content)
        name = str(rates["device_name"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} of --machine has no measured rates ({error!r}); {_MAKE}"
        ) from error
    profile = profile_of(name)
    if profile is None:
        raise UsageError(
            f"{path} of --machine was measured on {name}, which has no profile; there are profiles for "
            f"{', '.join(PROFILES)}: measure it with ridgeline machine compute --out machine.json"
        )
    return machine_from_rates(load_machine(profile), rates)


def machine_from_rates(base: Machine, rates: Mapping[str, Any]) -> Machine:
    """The profile with the device's rates as measured."""
    products = [m for m in rates["matmul"] if m["precision"] == "bf16"]
    copies = [
        e["bytes"] / e["s"]
        for e in rates["elementwise"]
        if e.get("bytes", 0) >= _LEAST_BYTES and e["name"] in ("copy_fp32", "add_bf16", "to_bf16")
    ]
    changes: dict[str, Any] = {
        "device.memory_efficiency": statistics.median(copies) / base.device.memory_bandwidth,
        "device.host_kernel_s": rates["launch"]["linear_forward_backward_s"] / KERNELS_A_LINEAR,
        "device.sustained_clock": 1.0,
        "device.memory_bytes": float(rates["device_memory_bytes"]),
        "device.context_bytes": float(rates["context_bytes"]),
        "device.workspace_bytes": float(rates["workspace_allocated_bytes"]),
        "device.num_sms": int(rates["num_sms"]),
        "name": f"{base.name}, measured",
    }
    machine = base.replace(**changes)
    machine = machine.replace(
        **{
            f"device.{name}": value
            for name, value in fit_products(machine.device, products).items()
        }
    )
    share = _attention_share(machine.device, rates["attention"])
    return machine.replace(
        **{"device.flash_efficiency": min(0.95, machine.device.flash_efficiency * share)}
    )


def product_errors(device: Device, products: Sequence[Mapping[str, Any]]) -> list[float]:
    """Logarithms of predicted over measured times."""
    return [
        math.log(gemm_s(device, p["m"], p["n"], p["k"], 1, p["precision"]) / p["s"])
        for p in products
    ]


def fit_products(device: Device, products: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The efficiency and tile overhead that measured products show, by coordinate search."""
    values = {
        "gemm_efficiency": 0.8,
        "tile_overhead": device.tile_overhead,
    }
    bounds = {"gemm_efficiency": (0.3, 0.99), "tile_overhead": (8.0, 512.0)}

    def loss(trial: dict[str, float]) -> float:
        changed = dataclasses.replace(
            device, gemm_efficiency=trial["gemm_efficiency"], tile_overhead=trial["tile_overhead"]
        )
        return statistics.fmean(map(abs, product_errors(changed, products)))

    best, step = loss(values), 0.25
    while step > 0.01:
        improved = False
        for name in values:
            for factor in (1 + step, 1 / (1 + step)):
                low, high = bounds[name]
                trial = {**values, name: min(max(values[name] * factor, low), high)}
                if (found := loss(trial)) < best - 1e-9:
                    best, values, improved = found, trial, True
        if not improved:
            step /= 2
    gemm_s.cache_clear()
    return values


def _attention_share(device: Device, attentions: Sequence[Mapping[str, Any]]) -> float:
    """How fast fused attention was, compared with what the profile says."""
    ratios: list[float] = []
    for a in attentions:
        args = (device, a["batch"], a["heads"], a["seq"], a["seq"], a["head_width"], True, "bf16")
        said = flash_s(*args, False) + flash_s(*args, True)
        ratios.append(said / (a["forward_s"] + a["backward_s"]))
    return statistics.median(ratios)
