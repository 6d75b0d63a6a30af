"""Random samples of any shape from a small pool, for runs that measure compute and not data.

Sample i is `pool[i % distinct]`, so the values cost one gather, and with `device_fetch` that gather
happens on the device: what is left of the step time is the model's. Called through `data/build.py`
by the doctor (is the job waiting for data?) and by benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.arguments import choice, shape, whole
from ridgeline.data.keyed import fold_key
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_TASKS = ("classify", "causal_lm", "forecast")


@dataclass(frozen=True)
class _Spec:
    info: SourceInfo
    num_samples: int
    distinct: int
    key: int
    grid: int | None = None
    """Points a side of the field that an input is drawn out of; None: every value by itself."""


class Synthetic:
    """A pool of `distinct` random samples, made on first use and repeated."""

    def __init__(self, spec: _Spec) -> None:
        self._spec = spec
        self.info = spec.info
        # Made when first asked for: a pool of large fields takes gigabytes, and the held-out one
        # is often never read.
        self._pools: dict[torch.device, tuple[Tensor, ...]] = {}

    def __len__(self) -> int:
        return self._spec.num_samples

    def __getstate__(self) -> dict[str, Any]:
        # A loader's worker makes the pool anew; sending it would cost more.
        return {"_spec": self._spec, "info": self.info, "_pools": {}}

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, ...]:
        return self.device_fetch(indices, torch.device("cpu"))

    def device_fetch(self, indices: np.ndarray, device: torch.device | str) -> tuple[Tensor, ...]:
        device = torch.device(device)
        if device not in self._pools:
            self._pools[device] = tuple(part.to(device) for part in self._make_pool())
        rows = torch.from_numpy(indices % self._spec.distinct)
        if device.type == "cuda":
            # From ordinary memory the copy would wait for everything the device still has to do.
            rows = rows.pin_memory()
        rows = rows.to(device, non_blocking=True)
        return tuple(part.index_select(0, rows) for part in self._pools[device])

    def _make_pool(self) -> tuple[Tensor, Tensor]:
        info, count = self.info, self._spec.distinct
        generator = torch.Generator().manual_seed(self._spec.key)
        if info.task == "causal_lm":
            assert info.num_classes is not None
            *leading, length = info.input_shape
            tokens = torch.randint(
                info.num_classes, (count, *leading, length + 1), generator=generator
            )
            return tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        inputs = self._make_inputs(count, generator).to(info.input_dtype)
        if info.num_classes is not None:
            targets = torch.randint(
                info.num_classes, (count, *info.target_shape), generator=generator
            )
        else:
            targets = torch.randn(count, *info.target_shape, generator=generator)
        return inputs, targets.to(info.target_dtype)

    def _make_inputs(self, count: int, generator: torch.Generator) -> Tensor:
        shape, grid = self.info.input_shape, self._spec.grid
        if grid is None:
            return torch.randn(count, *shape, generator=generator)
        channels, *sides = shape
        points = [min(grid, side) for side in sides]
        field = torch.randn(count, channels, *points, generator=generator)
        mode = ("linear", "bilinear", "trilinear")[len(sides) - 1]
        drawn = torch.nn.functional.interpolate(field, size=sides, mode=mode)
        return drawn / prod(_spread(num, side) for num, side in zip(points, sides, strict=True))


def build_synthetic(
    seed: int,
    *,
    task: Any = "classify",
    shape: Any = None,
    classes: Any = None,
    target_shape: Any = None,
    dtype: Any = "float32",
    vocab: Any = None,
    samples: Any = 4096,
    eval_samples: Any = None,
    distinct: Any = 64,
    grid: Any = None,
) -> tuple[Synthetic, Synthetic]:
    """`shape`: of one input, without the batch. `classes`: for classify; with `target_shape`, a
    label for each point. `vocab`: for causal_lm. `distinct`: samples in the pool. `grid`: inputs are
    smooth, as photographs and weather are: random fields of so many points a side, drawn out to `shape`.
    White noise differs from sample to sample in nothing but small sums, which few digits cannot learn."""
    info = _info(task, shape, classes, target_shape, dtype, vocab)
    samples = whole("synthetic", "samples", samples)
    if eval_samples is None:
        eval_samples = max(1, samples // 8)
    eval_samples = whole("synthetic", "eval_samples", eval_samples)
    distinct = whole("synthetic", "distinct", distinct)
    if grid is not None:
        grid = _check_grid(whole("synthetic", "grid", grid), info)
    keys = [fold_key((seed, split)) & (2**63 - 1) for split in (0, 1)]
    return (
        Synthetic(_Spec(info, samples, min(distinct, samples), keys[0], grid)),
        Synthetic(_Spec(info, eval_samples, min(distinct, eval_samples), keys[1], grid)),
    )


def _info(
    task: Any, sample_shape: Any, classes: Any, target_shape: Any, dtype: Any, vocab: Any
) -> SourceInfo:
    task = choice("synthetic", "task", task, _TASKS)
    input_dtype = _DTYPES[choice("synthetic", "dtype", dtype, tuple(_DTYPES))]
    _check_fits(task, {"classes": classes, "target_shape": target_shape, "vocab": vocab})
    if sample_shape is None:
        sample_shape = [128] if task == "causal_lm" else [3, 32, 32]
    inputs = shape("synthetic", "shape", sample_shape)
    if task == "causal_lm":
        size = whole("synthetic", "vocab", 256 if vocab is None else vocab)
        tokens = int(np.prod(inputs))
        return SourceInfo(inputs, torch.int64, inputs, torch.int64, size, task, "tokens", tokens)
    if task == "forecast":
        targets = inputs
        if target_shape is not None:
            targets = shape("synthetic", "target_shape", target_shape)
        return SourceInfo(inputs, input_dtype, targets, input_dtype, None, task)
    targets = () if target_shape is None else shape("synthetic", "target_shape", target_shape)
    num_classes = whole("synthetic", "classes", 10 if classes is None else classes)
    return SourceInfo(inputs, input_dtype, targets, torch.int64, num_classes, task)


def _spread(num: int, side: int) -> float:
    """Standard deviation of values drawn out of `num` to `side`: between two it is less than at either."""
    shares = torch.nn.functional.interpolate(torch.eye(num)[:, None], size=side, mode="linear")
    return float(shares.square().sum(0).mean().sqrt())


def _check_grid(grid: int, info: SourceInfo) -> int:
    if info.task == "causal_lm" or len(info.input_shape) not in (2, 3, 4):
        what = "tokens" if info.task == "causal_lm" else f"inputs of shape {list(info.input_shape)}"
        raise UsageError(
            f"source 'synthetic': argument grid={grid} in data.args has no meaning for {what}; it is for "
            "channels and one to three sides; leave it out"
        )
    return grid


def _check_fits(task: str, given: dict[str, Any]) -> None:
    """An argument of another task would be ignored in silence; say so instead."""
    takes = {
        "classify": ("classes", "target_shape"),
        "causal_lm": ("vocab",),
        "forecast": ("target_shape",),
    }[task]
    for key, value in given.items():
        if value is not None and key not in takes:
            raise UsageError(
                f"source 'synthetic': argument {key}={value!r} in data.args has no meaning for "
                f"task={task!r}, which takes {', '.join(takes)}"
            )
