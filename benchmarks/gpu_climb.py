"""One GPU: the climb, and the best hand-tuned loop beside what it ends with, in the same run.

    python benchmarks/gpu_climb.py --model 124m resnet50 vit --quick   # known good states beside it
    python benchmarks/gpu_climb.py --model 1.3b --quick --text 300     # and fp8's loss on real text
    python benchmarks/gpu_climb.py --model 124m                        # climb from plain fp32, compare
    python benchmarks/gpu_climb.py --model 124m --device cpu --small   # to see that it works

Every state and the hand-tuned loop have a process each and take turns on the device; the ratio is the
median of the turns' ratios. The hand-tuned loop is bf16 autocast, torch.compile of model and loss, fused
AdamW, and for the ViT 14 DataLoader workers that read HDF5, roll and normalise. `--text N` trains N steps
on real text in bf16 and in fp8 from the same weights on the same samples and compares the mean of the last
tenth of the losses; the text is Python's standard library as bytes (256 of the 32,768 tokens occur).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, spread, write_json

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
    small: tuple[str, ...] = ()
    """Overrides that let a CPU run it."""
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Further states, for `--states`; not all of them fit on a device beside each other."""


BF16 = ("layout=precision=bf16,compile=true",)
BEST_LM = (*BF16, "tune.attention=cudnn", "tune.residual=bf16")
FP8 = ("layout=precision=fp8,compile=true", "tune.attention=cudnn", "tune.residual=bf16")
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
        small=SMALL_LM,
    ),
    "1.3b": Case(
        "1.3b", 12, "tokens", 2048,
        (*COMMON, "model.name=llama", "model.args={size: 1.3b, max_seq: 2048}", "train.batch=12",
         "train.clip=1.0", "data.args={task: causal_lm, shape: [2048], vocab: 32768, distinct: 48}"),
        {
            "bf16, cuDNN, narrow residual, masters": (*BEST_LM, "tune.weights=bf16"),
            "fp8 mixed": (*FP8, "tune.weights=bf16"),
        },
        more={
            "fp8 rows": (*FP8, "tune.weights=bf16", "tune.fp8_scaling=row"),
            "fp8 tensors": (*FP8, "tune.weights=bf16", "tune.fp8_scaling=tensor"),
            "fp8 careful": (*FP8, "tune.weights=bf16", "tune.fp8_scaling=careful"),
            "fp8 e4m3": (*FP8, "tune.weights=bf16", "tune.fp8_gradients=e4m3"),
        },
        steps=6, small=SMALL_LM,
    ),
    "resnet50": Case(
        "resnet50", 256, "images", 1,
        (*COMMON, "model.name=resnet50", "model.args={}", "train.batch=256",
         "data.args={shape: [3, 224, 224], classes: 1000, distinct: 256, samples: 65536}"),
        {
            "bf16": (*BF16, "model.channels_last=true"),
            "and graphs": (*BF16, "model.channels_last=true", "layout.graphs=true"),
        },
        more={
            "masters": (*BF16, "model.channels_last=true", "tune.weights=bf16"),
            "autotune": (*BF16, "model.channels_last=true", "tune.compile_mode=autotune"),
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
        clip=False,
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


def hand_steps(case: Case, config: Any, plain: bool) -> Any:
    """The best loop that people write for one GPU; `plain` is the one they begin with."""
    import torch
    import torch.nn.functional as F

    from ridgeline.models.build import build_model

    device = torch.device(config.device)
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

    def loss_of(x: Any, y: Any) -> Any:
        out = model(x)
        if case.name == "vit":
            return F.mse_loss(out, y)
        return F.cross_entropy(out.flatten(0, -2), y.flatten())

    compiled = loss_of if plain or device.type == "cpu" else torch.compile(loss_of)
    for x, y in hand_batches(case, config, 0 if plain else 14):
        if images:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not plain):
            loss = compiled(x, y)
        loss.backward()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.detach()


def _hand_worker(case: Case, recipe: str, plain: bool, pipe: Connection) -> None:
    import torch

    from ridgeline.config import load_config

    config = load_config(Path(recipe)).config
    steps, cuda = hand_steps(case, config, plain), config.device == "cuda"
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

    def __init__(self, case: Case, recipe: Path, plain: bool, spare: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(
            target=_hand_worker, args=(case, str(recipe), plain, child), daemon=False
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


def train_flops(config: Any, units_per_sample: int) -> float:
    """Of one sample. Language models: 6N + 6LdT a token; others as counted on the meta device."""
    import torch

    from ridgeline.models.build import build_model

    with torch.device("meta"):
        model = build_model(config.model.name, **config.model.args)
    if config.model.name == "llama":
        count = sum(p.numel() for p in model.parameters())
        shape, length = model.config, units_per_sample
        return length * (6.0 * count + 6.0 * shape.depth * shape.width * length)
    return 0.0


def configure(case: Case, options: argparse.Namespace, folder: Path, *more: str) -> Any:
    from ridgeline.config import load_config

    settings = [*case.recipe, *(case.small if options.small else ()), f"device={options.device}"]
    if case.name == "vit":
        settings.append(f"data.args={{path: {folder / 'fields'}, holdout: 0}}")
    if options.small:
        settings.append("threads=1")
        more = tuple(m.replace(",compile=true", "") for m in more if "graphs" not in m)
        more = tuple(m for m in more if not m.startswith(("tune.compile_mode", "data.threads")))
    return load_config(None, [*settings, *more]).config


def compare(case: Case, options: argparse.Namespace, folder: Path, states: dict[str, Any]) -> Any:
    """States and the hand-written loops in turns; rows of figures."""
    from ridgeline.config import dump_config
    from ridgeline.doctor.states import Candidate, Effort

    effort = Effort(timeout_s=options.timeout_s, rounds=options.turns, steps=case.steps)
    recipe = folder / "hand.yaml"
    recipe.write_text(dump_config(configure(case, options, folder)))
    spare = 2 * 14 + 2 if case.name == "vit" and not options.small else 0
    loops: dict[str, Any] = {}
    turns: dict[str, list[float]] = {}
    failed: dict[str, str] = {}
    first: dict[str, float] = {}

    def begin(name: str, make: Any) -> None:
        begun = time.time()
        try:
            loops[name] = make()
            loops[name].run(10, 0)
            first[name] = time.time() - begun
            turns[name] = []
            print(
                f"{case.name}: {name}: tenth step after {first[name]:.0f} s",
                file=sys.stderr,
                flush=True,
            )
        except Exception as error:
            failed[name] = str(error)[:160]
            print(f"{case.name}: {name} FAILED: {error}", file=sys.stderr, flush=True)
            if name in loops:
                loops.pop(name).close()

    begin("hand-tuned", lambda: Hand(case, recipe, plain=False, spare=spare))
    for number, (name, config) in enumerate(states.items()):
        begin(name, lambda c=config, n=number: Candidate(c, f"{case.name}-{n}", folder, effort))
    for turn in range(options.turns):
        for name in list(loops) if turn % 2 else list(loops)[::-1]:
            try:
                turns[name].append(loops[name].run(2, case.steps))
            except Exception as error:
                failed[name] = str(error)[:160]
                loops.pop(name).close()
    figures = {}
    batch = configure(case, options, folder).train.batch
    flops = train_flops(configure(case, options, folder), case.units_per_sample) * batch
    for name, loop in loops.items():
        pairs = zip(turns.get("hand-tuned", turns[name]), turns[name], strict=False)
        median = statistics.median(turns[name])
        figures[name] = {
            "rate": batch * case.units_per_sample / median,
            "tflops": flops / median / 1e12,
            "ratio": statistics.median(a / b for a, b in pairs),
            "spread": spread(turns[name]),
            "step_ms": 1e3 * median,
            "turns_ms": [1e3 * t for t in turns[name]],
            "peak_gb": loop.peak_bytes / 1e9,
            "tenth_step_s": first[name],
            "losses": loop.losses[-3:],
        }
        loop.close()
    return {"case": case.name, "unit": case.unit, "loops": figures, "failed": failed}


def text_losses(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """bf16 and fp8 for as many steps on real text, one after the other."""
    from ridgeline.doctor.states import Candidate, Effort

    effort = Effort(timeout_s=options.timeout_s, check_steps=options.text)
    length = 64 if options.small else case.units_per_sample
    text = ("data.source=text", f"data.args={{seq_len: {length}}}")
    wanted = {
        "bf16": BF16,
        **{n: s for n, s in (case.states | case.more).items() if n == options.fp8},
    }
    found: dict[str, list[float]] = {}
    for number, (name, state) in enumerate(wanted.items()):
        begun = time.time()
        config = configure(case, options, folder, *state, *text)
        try:
            candidate = Candidate(config, f"text-{number}", folder, effort)
            candidate.run(options.text, 0)
            found[name] = candidate.losses
            candidate.close()
        except Exception as error:
            print(f"text: {name} FAILED: {error}", file=sys.stderr, flush=True)
            continue
        last = statistics.fmean(found[name][-max(1, options.text // 10) :])
        print(f"text: {name}: {options.text} steps in {time.time() - begun:.0f} s, loss {last:.4f}",
              file=sys.stderr, flush=True)  # fmt: skip
    last = max(1, options.text // 10)
    ends = {name: statistics.fmean(losses[-last:]) for name, losses in found.items()}
    for name, end in ends.items():
        apart = (end - ends["bf16"]) / ends["bf16"] if "bf16" in ends else float("nan")
        print(f"{case.name} on text, mean of the last {last} of {options.text} losses: {name} {end:.4f} "
              f"({apart:+.2%})")  # fmt: skip
    return {"losses": found, "ends": ends}


def run_climb(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """From plain fp32 eager, with nothing fused and nothing read ahead, as far as it goes."""
    from ridgeline.doctor.climb import climb
    from ridgeline.doctor.states import Effort

    # In float32 a whole batch of the largest does not fit, so it begins in two parts.
    parts = 2 if case.name == "1.3b" else 1
    layout = f"layout=precision=fp32,accumulate={parts}"
    plain = ("tune.fused_optimizer=false", "data.prefetch=0", layout)
    effort = Effort(
        rounds=options.turns, steps=case.steps, check_steps=options.check, timeout_s=options.timeout_s,
        budget_s=options.budget_s, loss_bound=0.005,
    )  # fmt: skip
    ladder = climb(configure(case, options, folder, *plain), folder / "climb", effort=effort)
    return {"ladder": dataclasses.asdict(ladder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=sorted(CASES), default=["124m"])
    parser.add_argument("--quick", action="store_true", help="known good states, no climb")
    parser.add_argument("--states", nargs="*", help="only those whose name begins so")
    parser.add_argument("--text", type=int, default=0, help="steps on real text, bf16 beside fp8")
    parser.add_argument("--fp8", default="fp8 mixed", help="the state that --text compares")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--check", type=int, default=16, help="steps of the climb's loss curve")
    parser.add_argument("--samples", type=int, default=96, help="fields in the ViT's file")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    parser.add_argument("--budget-s", type=float, default=1800.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results, rows = [], []
    with tempfile.TemporaryDirectory(prefix="ridgeline-climb-") as name:
        folder = Path(name)
        for chosen in options.model:
            case = CASES[chosen]
            if options.small:
                case = dataclasses.replace(
                    case, batch=2, units_per_sample=64 if "m" in chosen or "b" in chosen else 1
                )
            if chosen == "vit":
                shape = (4, 32, 64) if options.small else GRID
                write_fields(
                    folder / "fields" / "fields.h5", 16 if options.small else options.samples, shape
                )
            result: dict[str, Any] = {}
            if options.quick:
                chosen_states = case.states
                if options.states is not None:
                    every = (case.states | case.more).items()
                    chosen_states = {
                        n: s for n, s in every if any(n.startswith(p) for p in options.states)
                    }
                wanted = {n: configure(case, options, folder, *s) for n, s in chosen_states.items()}
            else:
                result |= run_climb(case, options, folder)
                from ridgeline.config import load_config

                wanted = {"the climb's end": load_config(folder / "climb" / "recipe.yaml").config}
            if options.text and chosen in ("124m", "1.3b"):
                result |= text_losses(case, options, folder)
            result |= compare(case, options, folder, wanted)
            results.append(result)
            for loop, f in result["loops"].items():
                rows.append(
                    (
                        chosen,
                        loop,
                        f"{f['rate']:,.1f} {case.unit}/s",
                        f"{f['tflops']:.0f}",
                        f"{f['ratio']:.3f}",
                        f"{f['step_ms']:.2f}",
                        f"{f['spread']:.1%}",
                        f"{f['peak_gb']:.1f}",
                        f"{f['tenth_step_s']:.0f} s",
                    )
                )
            for loop, why in result["failed"].items():
                rows.append((chosen, loop, "failed", why, "", "", "", "", ""))
            write_json(options.json, results)
            print(json.dumps(result["loops"]), file=sys.stderr, flush=True)
    head = (
        "model",
        "loop",
        "rate",
        "TFLOP/s",
        "x hand",
        "step ms",
        "spread",
        "peak GB",
        "10th step",
    )
    print_table(head, rows)


if __name__ == "__main__":
    main()
