"""The models that `gpu_climb.py` climbs on, and the loops that people write for them by hand.

A case is a recipe as overrides with states that were found to be good. The hand-tuned loop is bf16
autocast, torch.compile of model and loss and fused AdamW, for the ViT with 14 DataLoader workers that read
HDF5, roll and normalise; the plain one is float32 in eager mode with torch's defaults.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LR = 3e-4
GRID = (20, 360, 720)
SCALE, OFFSET = 1 / 4096, 0.5


@dataclass(frozen=True)
class Case:
    """One model: its recipe as overrides, and states that were found to be good."""

    name: str
    batch: int
    unit: str
    units_per_sample: int
    recipe: tuple[str, ...]
    states: dict[str, tuple[str, ...]]
    steps: int = 20
    clip: bool = True
    plain_parts: int = 1
    """Parts that a batch goes through in where it does not fit in float32."""
    small: tuple[str, ...] = ()
    """Overrides that let a CPU run it."""
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Further states, for `--states`; not all of them fit on a device beside each other."""


BF16 = ("layout=precision=bf16,compile=true",)
BEST_LM = (*BF16, "tune.attention=cudnn", "tune.residual=bf16")
FP8 = (
    "layout=precision=fp8,compile=true", "tune.attention=cudnn", "tune.residual=bf16",
    "tune.weights=bf16",
)  # fmt: skip
COMMON = (
    "data.source=synthetic",
    "train.steps=100000",
    f"train.lr={LR}",
    "optim.weight_decay=0.1",
    "train.eval_samples=0",
    "schedule.warmup_steps=50",
)
SMALL_LM = ("model.args={width: 64, depth: 2, heads: 2, ffn: 128, vocab: 512, max_seq: 64}",
            "data.args={task: causal_lm, shape: [64], vocab: 512}", "train.batch=4")  # fmt: skip

CASES = {
    "124m": Case(
        "124m", 64, "tokens", 1024,
        (*COMMON, "model.name=llama", "model.args={size: 124m, max_seq: 1024}", "train.batch=64",
         "train.clip=1.0", "data.args={task: causal_lm, shape: [1024], vocab: 32768}"),
        {
            "bf16, cuDNN, narrow residual": BEST_LM,
            "and masters": (*BEST_LM, "tune.weights=bf16"),
            "and graphs": (*BEST_LM, "layout.graphs=true"),
        },
        more={
            "regional": (*BEST_LM, "tune.compile_mode=regional"),
            "fp8 tensors": (*FP8, "tune.fp8_scaling=tensor"),
            "stochastic": (*BEST_LM, "tune.weights=stochastic"),
            "merged": (*BEST_LM, "tune.weights=bf16", "tune.merge=true"),
        },
        small=SMALL_LM,
    ),
    "1.3b": Case(
        "1.3b", 12, "tokens", 2048,
        (*COMMON, "model.name=llama", "model.args={size: 1.3b, max_seq: 2048}", "train.batch=12",
         "train.clip=1.0", "data.args={task: causal_lm, shape: [2048], vocab: 32768, distinct: 48}"),
        {
            "bf16, cuDNN, narrow residual, masters": (*BEST_LM, "tune.weights=bf16"),
            "fp8 tensors": (*FP8, "tune.fp8_scaling=tensor"),
            "fp8 mixed": FP8,
        },
        more={
            "bf16, regional": (*BEST_LM, "tune.weights=bf16", "tune.compile_mode=regional"),
            "fp8 tensors, regional": (
                *FP8, "tune.fp8_scaling=tensor", "tune.compile_mode=regional"),
            "fp8 tensors, regional, graphs": (
                *FP8, "tune.fp8_scaling=tensor", "tune.compile_mode=regional", "layout.graphs=true"),
            "bf16, stochastic": (*BEST_LM, "tune.weights=stochastic"),
            "bf16, graphs, stochastic": (
                *BEST_LM, "layout.graphs=true", "tune.weights=stochastic"),
            "bf16, graphs, stochastic, not warmed up": (
                *BEST_LM, "layout.graphs=true", "tune.weights=stochastic", "schedule.warmup_steps=0"),
            "bf16, graphs, stochastic, tiles": (
                *BEST_LM, "layout.graphs=true", "tune.weights=stochastic", "tune.search_tiles=true"),
            "fp8 tensors, regional, tiles": (
                *FP8, "tune.fp8_scaling=tensor", "tune.compile_mode=regional", "tune.search_tiles=true"),
            "fp8 tensors, regional, stochastic": (
                *FP8, "tune.fp8_scaling=tensor", "tune.compile_mode=regional", "tune.weights=stochastic"),
            "fp8 tensors, ends wide": (
                *FP8, "tune.fp8_scaling=tensor", "tune.fp8_keep_first=1", "tune.fp8_keep_last=2"),
            "fp8 tensors, stochastic": (
                *FP8, "tune.fp8_scaling=tensor", "tune.weights=stochastic"),
            "fp8 tensors, e4m3": (*FP8, "tune.fp8_scaling=tensor", "tune.fp8_gradients=e4m3"),
            "bf16, merged": (*BEST_LM, "tune.weights=bf16", "tune.merge=true"),
            "bf16, regional, merged": (
                *BEST_LM, "tune.weights=bf16", "tune.merge=true", "tune.compile_mode=regional"),
            "fp8 tensors, merged, regional": (
                *FP8, "tune.fp8_scaling=tensor", "tune.merge=true", "tune.compile_mode=regional"),
            "fp8 rows": (*FP8, "tune.fp8_scaling=row"),
            "fp8 careful": (*FP8, "tune.fp8_scaling=careful"),
        },
        steps=8, small=SMALL_LM, plain_parts=2,
    ),
    "resnet50": Case(
        "resnet50", 256, "images", 1,
        (*COMMON, "model.name=resnet50", "model.args={}", "train.batch=256",
         "data.args={shape: [3, 224, 224], classes: 1000, distinct: 256, samples: 65536, grid: 7}"),
        {
            "bf16": (*BF16, "model.channels_last=true"),
            "and graphs": (*BF16, "model.channels_last=true", "layout.graphs=true"),
        },
        more={
            "masters": (*BF16, "model.channels_last=true", "tune.weights=bf16"),
            "autotune": (*BF16, "model.channels_last=true", "tune.compile_mode=autotune"),
            "conv kernels": (*BF16, "model.channels_last=true", "tune.conv_kernels=true"),
            "conv kernels, graphs": (
                *BF16, "model.channels_last=true", "tune.conv_kernels=true", "layout.graphs=true"),
        },
        clip=False,
        small=("model.name=resnet18", "train.batch=2",
               "data.args={shape: [3, 32, 32], classes: 1000, samples: 256}"),
    ),
    "vit": Case(
        "vit", 16, "samples", 1,
        (*COMMON, "model.name=vit", "data.source=packed", "train.batch=16", "data.augment.roll=1.0",
         f"data.augment.scale=[{SCALE}]", f"data.augment.offset=[{OFFSET}]",
         "model.args={task: forecast, image_size: [360, 720], in_channels: 20, patch: 8, width: 384, "
         "depth: 12, heads: 6}"),
        {
            "bf16, threads": (*BF16, "data.threads=12"),
            "and cuDNN, narrow residual": (*BEST_LM, "data.threads=12"),
        },
        clip=False, steps=10,
        small=("model.args={task: forecast, image_size: [32, 64], in_channels: 4, patch: 8, width: 64, "
               "depth: 2, heads: 2}", "train.batch=2"),
    ),
}  # fmt: skip


def write_fields(path: Path, samples: int, shape: tuple[int, int, int]) -> None:
    """Fields of 16-bit integers, as climate data are kept, in one HDF5 file."""
    import h5py
    import numpy as np

    path.parent.mkdir(parents=True)
    rng = np.random.default_rng(0)
    field = rng.integers(-8192, 8192, shape, dtype=np.int16)
    with h5py.File(path, "w") as file:
        for name in ("input", "target"):
            stored = file.create_dataset(name, (samples, *shape), dtype="int16")
            for number in range(samples):
                stored[number] = np.roll(field, int(rng.integers(1, shape[2])), axis=2)


class Fields:
    """What people write: a Dataset that opens the file in each worker, rolls and normalises."""

    def __init__(self, path: str, samples: int) -> None:
        self.path, self.samples, self.file = path, samples, None

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        import h5py
        import numpy as np
        import torch

        if self.file is None:
            self.file = h5py.File(self.path, "r")
        shift = int(np.random.default_rng().integers(GRID[2]))
        pair = []
        for name in ("input", "target"):
            values = self.file[name][index].astype(np.float32) * SCALE + OFFSET
            pair.append(torch.from_numpy(np.roll(values, shift, axis=2)))
        return tuple(pair)


def hand_batches(case: Case, config: Any, workers: int) -> Any:
    import torch

    device = torch.device(config.device)
    if case.name == "vit":
        path = next(Path(config.data.args["path"]).glob("*.h5"))
        import h5py

        with h5py.File(path) as file:
            samples = len(file["input"])
        loader = torch.utils.data.DataLoader(
            Fields(str(path), samples), case.batch, shuffle=True, num_workers=workers,
            pin_memory=device.type == "cuda", persistent_workers=workers > 0, drop_last=True,
        )  # fmt: skip
        while True:
            for x, y in loader:
                yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)
    import numpy as np

    from ridgeline.data.build import build_sources

    source, _ = build_sources("synthetic", config.data.args, 0)
    rng = np.random.default_rng(0)
    while True:
        yield source.device_fetch(rng.integers(0, 1 << 30, config.train.batch), device)


WAYS = {
    "": "hand-tuned",
    "plain": "plain fp32",
    "apart": "hand-tuned, loss apart",
    "cold": "hand-tuned, not warmed up",
}
"""Loops by hand: the best that people write for one GPU, the one that they begin with, one of which the
model alone is compiled, not the loss, and one whose learning rate is whole from its first step."""


def hand_steps(case: Case, config: Any, way: str = "") -> Any:
    """One of `WAYS`; yields losses."""
    import torch
    import torch.nn.functional as F

    from ridgeline.models.build import build_model

    device, plain = torch.device(config.device), way == "plain"
    torch.manual_seed(0)
    with device:
        model = build_model(config.model.name, **config.model.args)
    images = case.name == "resnet50" and not plain
    if images:
        model = model.to(memory_format=torch.channels_last)
    if not plain:
        torch.set_float32_matmul_precision("high")
    fused = not plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=fused)
    # As the states have it. Without it the 1.3B model stays at its first loss, and a device at its power
    # limit has another clock with the activations of such a model.
    warm = 1 if way == "cold" else max(config.schedule.warmup_steps, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warm)
    )

    def loss_of(x: Any, y: Any) -> Any:
        out = model(x)
        if case.name == "vit":
            return F.mse_loss(out, y)
        return F.cross_entropy(out.flatten(0, -2), y.flatten())

    compiled = loss_of
    if device.type != "cpu" and not plain:
        if way == "apart":
            model.compile()
        else:
            compiled = torch.compile(loss_of)
    for x, y in hand_batches(case, config, 0 if plain else 14):
        if images:
            x = x.contiguous(memory_format=torch.channels_last)
        parts = case.plain_parts if plain else 1
        loss = torch.zeros((), device=device)
        for part, of in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not plain):
                one = compiled(part, of)
            (one / parts if parts > 1 else one).backward()
            loss = loss + one.detach() / parts
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss


def _hand_worker(case: Case, recipe: str, way: str, pipe: Connection) -> None:
    import torch

    from ridgeline.config import load_config

    config = load_config(Path(recipe)).config
    steps, cuda = hand_steps(case, config, way), config.device == "cuda"
    while (turn := pipe.recv()) is not None:
        try:
            for _ in range(turn[0]):
                loss = next(steps)
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(turn[1]):
                loss = next(steps)
            value = float(loss)
            seconds = (time.perf_counter() - start) / max(turn[1], 1)
            peak = torch.cuda.max_memory_allocated() if cuda else 0
            if cuda:
                torch.cuda.empty_cache()
            pipe.send((seconds, value, peak))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {str(error)[:300]}")


class Hand:
    """The hand-written loop with the same face as a climb's candidate."""

    def __init__(self, case: Case, recipe: Path, spare: int, way: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_hand_worker, args=(case, str(recipe), way, child), daemon=False
        )
        self.started = time.time()
        self._process.start()
        child.close()
        self._spare = spare
        self.peak_bytes, self.losses, self.tenth_step_s = 0.0, [], None

    def run(self, untimed: int, timed: int) -> float:
        self._pipe.send((max(untimed, self._spare if timed else 0), timed))
        answer = self._pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        self.peak_bytes = max(self.peak_bytes, answer[2])
        self.losses.append(answer[1])
        return answer[0]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
