"""What the planner is checked against on one GPU: memory and time of real steps, and the device's rates.

Two parts. `rates` times matrix products over many shapes, attention, element-wise kernels, the loss, the
optimizer and the launch of small kernels: they make a measured `machine.json` for `ridgeline plan`. `runs`
trains small and middling Llamas in many layouts through the same code as `ridgeline train`, each in a
process of its own: on one rank, and as one rank of a larger job with torch's fake process group (nothing is
sent, so the time is without communication; memory and kernels are right). A host has fast minutes and slow
ones, so launches are timed between the steps of every run, too; and since a process that imports beside
one that measures slows it down, all are forked from one that has imported everything, and each is bound to
cores that are quick.

    python benchmarks/gpu_plan_runs.py [--json FILE] [--limit 235] [--only TEXT] [--tiny --device cpu]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import print_table, write_json


@dataclass(frozen=True)
class Run:
    """One measured run: a Llama, its sequence, samples a rank and microbatch, and a layout."""

    size: str
    seq: int
    samples: int
    layout: str = "precision=bf16"
    world: int = 1
    rank: int = 0
    change: dict[str, Any] = field(default_factory=dict)
    """Fields of the size that are otherwise, as in `depth`."""
    profile: bool = False
    """Whether one more step is profiled, kernel by kernel."""


BF16 = "precision=bf16"
RUNS = (
    # One rank: sizes, batch, recompute.
    Run("124m", 1024, 16, BF16, profile=True),
    Run("1.3b", 2048, 4, BF16, profile=True),
    Run("llama3-8b", 8192, 1, BF16, change={"depth": 4}, profile=True),
    Run("350m", 2048, 8, BF16),
    Run("350m", 2048, 8, f"recompute=selective,{BF16}"),
    Run("350m", 2048, 16, f"recompute=full,{BF16}"),
    Run("1.3b", 2048, 8, f"recompute=selective,{BF16}"),
    Run("1.3b", 2048, 8, f"recompute=full,{BF16}", profile=True),
    Run("3b", 2048, 2, BF16),
    Run("3b", 2048, 8, f"recompute=full,{BF16}"),
    # One rank of many: sharded, tensor-parallel, staged. Only a pipeline's first stage can run alone:
    # later ones wait to hear of the shapes they will get.
    Run("llama3-8b", 4096, 1, f"zero=3,{BF16}", world=64, change={"depth": 8}, profile=True),
    Run("llama3-8b", 8192, 1, f"zero=3,recompute=full,{BF16}", world=64, change={"depth": 16}),
    Run("llama2-7b", 4096, 2, f"zero=3,recompute=selective,{BF16}", world=8, change={"depth": 8}),
    Run("1.3b", 2048, 4, f"zero=1,{BF16}", world=8),
    Run("1.3b", 2048, 4, f"zero=2,{BF16}", world=8),
    Run("1.3b", 2048, 4, f"tp=2,{BF16}", world=2, profile=True),
    Run("3b", 2048, 4, f"tp=4,sp=true,{BF16}", world=4, change={"depth": 16}),
    Run("1.3b", 2048, 2, f"pp=4,microbatches=8,{BF16}", world=4, rank=0),
    Run("3b", 2048, 1, f"pp=8,microbatches=16,recompute=full,{BF16}", world=8),
    Run("3b", 2048, 2, f"tp=2,pp=2,zero=1,microbatches=4,{BF16}", world=16, change={"depth": 16}),
    Run("1.3b", 2048, 4, f"zero=3,{BF16}", world=8),
    Run("1.3b", 2048, 2, f"pp=2,schedule=gpipe,microbatches=4,recompute=full,{BF16}", world=2),
    # Where gradients of shards are at the peak: microbatches that add up, and the end of backward.
    Run("1.3b", 2048, 2, f"zero=3,accumulate=4,{BF16}", world=2),
    Run("1.3b", 2048, 2, f"zero=2,accumulate=4,{BF16}", world=2),
    Run("3b", 2048, 1, f"zero=3,recompute=full,{BF16}", world=2),
    # And again other sizes, in the order of how much they would be missed.
    Run("124m", 1024, 64, BF16),
    Run("124m", 1024, 64, f"recompute=full,{BF16}"),
    Run("124m", 1024, 8, "precision=fp32", profile=True),
    Run("124m", 1024, 16, "precision=tf32", profile=True),
    Run("1.3b", 4096, 2, BF16),
    Run("llama3.2-1b", 4096, 2, BF16),
    Run("1.3b", 2048, 2, f"accumulate=4,{BF16}"),
    Run("60m", 2048, 8, BF16),
    Run("llama3.2-3b", 4096, 1, f"zero=3,recompute=full,{BF16}", world=16),
    Run("1.3b", 2048, 4, f"tp=8,sp=true,recompute=full,{BF16}", world=8),
    Run("3b", 2048, 2, f"zero=2,recompute=full,{BF16}", world=32),
)
_TINY = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 4, "ffn": 192, "vocab": 512}
WARM_STEPS, TIMED_STEPS = 2, 6


def measure_run(run: Run, device: str, tiny: bool) -> dict[str, Any]:
    """Build it as `ridgeline train` would, take some steps, and say what they took."""
    import torch
    import torch.distributed as dist

    from ridgeline.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
    from ridgeline.launch.env import RankEnv
    from ridgeline.layout import Layout
    from ridgeline.train.setup import build_training

    layout = Layout.parse_for(run.layout, run.world, "--layout")
    if run.world > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=run.rank, world_size=run.world, store=FakeStore())
    seq = 64 if tiny else run.seq
    parts = max(layout.microbatches, layout.accumulate)
    batch = layout.dp * parts * run.samples
    args = {"size": run.size, "max_seq": seq, **run.change, **(_TINY if tiny else {})}
    if tiny and layout.pp * layout.virtual > 2:
        args["depth"] = layout.pp * layout.virtual
    vocab = 512 if tiny else 32_000
    config = RunConfig(
        model=ModelConfig("llama", args),
        data=DataConfig(
            "synthetic",
            {"task": "causal_lm", "shape": [seq], "vocab": vocab, "distinct": 8,
             "samples": 2 * (WARM_STEPS + TIMED_STEPS) * batch},
        ),
        train=TrainConfig(batch=batch, steps=100, lr=1e-4, clip=1.0, eval_samples=0),
        optim=OptimConfig("adamw", weight_decay=0.1),
        layout=run.layout,
        device=device,
    )  # fmt: skip
    cuda = device == "cuda"
    start = time.perf_counter()
    env = RankEnv(run.rank, run.world, 0, 1, "", 0, "fake" if run.world > 1 else "single")
    training = build_training(config, env)
    _settle(device)
    built_s = time.perf_counter() - start
    if cuda:
        torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated() if cuda else 0
    training.arranged.train()
    seconds, peaks, host, windows = [], [], [], []
    batches = iter(training.loader.epoch(0))
    for _ in range(WARM_STEPS + TIMED_STEPS):
        here = training.to_device(next(batches))
        _settle(device)
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        training.forward_backward(here, training.clock)
        backward = torch.cuda.max_memory_allocated() if cuda else 0
        training.update()
        host.append(time.perf_counter() - start)
        _settle(device)
        seconds.append(time.perf_counter() - start)
        peaks.append((backward, torch.cuda.max_memory_allocated() if cuda else 0))
        if len(seconds) > WARM_STEPS:
            windows.append(_launches(device))
    here = training.to_device(next(batches))
    kernels = _profile(training, here, device) if run.profile else None
    found = {
        **asdict(run),
        "layout": str(layout),
        "num_parameters": training.model_facts.num_parameters,
        "train_flops_per_sample": training.model_facts.train_flops_per_sample,
        "held_after_setup_bytes": held,
        "held_between_steps_bytes": torch.cuda.memory_allocated() if cuda else 0,
        "peak_forward_backward_bytes": peaks[-1][0],
        "peak_step_bytes": peaks[-1][1],
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "step_s": statistics.median(seconds[WARM_STEPS:]),
        "steps_s": seconds,
        "host_s": statistics.median(host[WARM_STEPS:]),
        "build_s": built_s,
        "profiled": kernels,
    }
    return {**found, "launch": _median_of(windows), "launch_windows": windows}


def _settle(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _profile(training: Any, batch: Any, device: str) -> dict[str, Any]:
    """Kernels of one step: how many, how long together, and the longest by name."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]
    with profile(activities=kinds) as found:
        training.forward_backward(batch, training.clock)
        training.update()
        _settle(device)
    on_device = [
        event
        for event in found.key_averages()
        if device != "cuda" or event.device_type == torch.autograd.DeviceType.CUDA
    ]

    def time_us(event: Any) -> float:
        return float(
            event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        )

    on_device.sort(key=time_us, reverse=True)
    return {
        "num_kernels": sum(event.count for event in on_device),
        "busy_s": sum(map(time_us, on_device)) / 1e6,
        "kernels": [
            {"name": event.key[:90], "count": event.count, "s": time_us(event) / 1e6}
            for event in on_device[:40]
        ],
    }


def measure_rates(device: str, tiny: bool) -> dict[str, Any]:
    """Kernel times by shape, medians of a few; the launch floor; memory of the context itself."""
    import torch

    facts: dict[str, Any] = {"device": device, "torch": torch.__version__}
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        facts |= {
            "device_name": torch.cuda.get_device_name(),
            "device_memory_bytes": total,
            "context_bytes": total - free - torch.cuda.memory_reserved(),
            "num_sms": torch.cuda.get_device_properties(0).multi_processor_count,
        }
    facts["matmul"] = _matmuls(device, tiny)
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        facts["context_with_cublas_bytes"] = total - free - torch.cuda.memory_reserved()
        facts["workspace_allocated_bytes"] = torch.cuda.memory_allocated()
    facts["attention"] = _attentions(device, tiny)
    facts["elementwise"] = _elementwise(device, tiny)
    facts["optimizer"] = _optimizers(device, tiny)
    facts["launch"] = _launches(device)
    return facts


def _time(call: Any, device: str, repeats: int = 8) -> float:
    """Seconds of one call: the median of several between device events, after two untimed ones."""
    import torch

    for _ in range(2):
        call()
    if device != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    # The host runs ahead while the device is kept busy, so that launches are not what is timed.
    torch.cuda._sleep(2_000_000)
    for index in range(repeats):
        marks[index].record()
        call()
    marks[repeats].record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


def _matmuls(device: str, tiny: bool) -> list[dict[str, Any]]:
    """C = A B with A (m, k) and B (k, n), as linear layers and their two gradients call it."""
    import torch

    shapes: list[tuple[int, int, int]] = []
    for tokens in (1024, 2048, 4096, 8192, 16384):
        for width, ffn in ((768, 2048), (1024, 2816), (2048, 5632), (2560, 6912), (4096, 14336)):
            shapes += [(tokens, width, width), (tokens, ffn, width), (tokens, width, ffn)]
    for tokens in (4096, 8192, 16384):
        for width in (768, 2048, 4096):
            shapes += [(tokens, 32768, width), (tokens, width, 32768), (32768, width, tokens)]
        for width, ffn in ((768, 2048), (2048, 5632), (4096, 14336)):
            shapes += [(width, width, tokens), (ffn, width, tokens), (width, ffn, tokens)]
    shapes += [(n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192, 12288)]
    shapes += [(m, 8192, 8192) for m in (128, 256, 384, 512, 1024, 1280, 1536)]
    shapes += [(8192, n, 4096) for n in (4224, 4352, 4480, 4608, 5120, 6144)]
    found = []
    for m, n, k in dict.fromkeys(shapes[:3] if tiny else shapes):
        types = ["bf16"]
        if (m, n, k) in ((4096, 4096, 4096), (8192, 2048, 2048), (16384, 2048, 768)):
            types += ["fp16", "tf32", "fp32"]
        for name in types:
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name, torch.float32)
            a = torch.randn(m, k, device=device, dtype=dtype)
            b = torch.randn(n, k, device=device, dtype=dtype).t()
            seconds = _time(lambda a=a, b=b: a @ b, device)
            found.append({"m": m, "n": n, "k": k, "precision": name, "s": seconds})
    return found


def _attentions(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Causal attention forward and backward, with and without groups."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as attend

    shapes = [
        (b, h, g, t, k)
        for b, t in ((16, 1024), (4, 2048), (8, 2048), (2, 4096), (1, 8192), (2, 8192))
        for h, g, k in ((6, 6, 128), (8, 8, 128), (16, 16, 128), (32, 8, 128), (16, 16, 64))
    ]
    found = []
    for b, h, g, t, k in shapes[:2] if tiny else shapes:
        t = 64 if tiny else t
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        q = torch.randn(b, h, t, k, device=device, dtype=dtype, requires_grad=True)
        kk = torch.randn(b, g, t, k, device=device, dtype=dtype, requires_grad=True)
        v = torch.randn(b, g, t, k, device=device, dtype=dtype, requires_grad=True)

        def forward(q: Any = q, kk: Any = kk, v: Any = v, same: bool = h == g) -> Any:
            return attend(q, kk, v, is_causal=True, enable_gqa=not same)

        out = forward()
        grad = torch.randn_like(out)

        def backward(out: Any = out, inputs: Any = (q, kk, v), grad: Any = grad) -> None:
            torch.autograd.grad(out, inputs, grad, retain_graph=True)

        found.append(
            {"batch": b, "heads": h, "kv_heads": g, "seq": t, "head_width": k,
             "forward_s": _time(forward, device, 4), "backward_s": _time(backward, device, 4)}
        )  # fmt: skip
        del out, grad
    return found


def _elementwise(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Kernels that are limited by memory: bytes they must move, and seconds."""
    import torch
    import torch.nn.functional as F

    found = []
    half = torch.bfloat16
    for tokens, width in ((256, 64),) if tiny else ((8192, 2048), (16384, 768), (8192, 8192)):
        x = torch.randn(tokens, width, device=device, dtype=half)
        y = torch.randn(tokens, width, device=device, dtype=half)
        x32 = x.float()
        weight = torch.ones(width, device=device)
        n = tokens * width
        cases: dict[str, tuple[Any, float]] = {
            "copy_bf16": (lambda x=x, y=y: y.copy_(x), 4.0 * n),
            "copy_fp32": (lambda x=x32: x.clone(), 8.0 * n),
            "to_bf16": (lambda x=x32: x.to(half), 6.0 * n),
            "to_fp32": (lambda x=x: x.float(), 6.0 * n),
            "add_bf16": (lambda x=x, y=y: x + y, 6.0 * n),
            "add_mixed": (lambda x=x32, y=y: x + y, 10.0 * n),
            "silu_bf16": (lambda x=x: F.silu(x), 4.0 * n),
            "mul_bf16": (lambda x=x, y=y: x * y, 6.0 * n),
            "rms_norm_fp32": (lambda x=x32, w=weight: F.rms_norm(x, (w.numel(),), w), 8.0 * n),
            "softmax_fp32": (lambda x=x32: F.log_softmax(x, -1), 8.0 * n),
            "sum_fp32": (lambda x=x32: x.sum(0), 4.0 * n),
        }
        for name, (call, moved) in cases.items():
            found.append(
                {"name": name, "rows": tokens, "columns": width, "bytes": moved,
                 "s": _time(call, device)}
            )  # fmt: skip
    for tokens, vocab in ((64, 512),) if tiny else ((8192, 32768), (8192, 128256)):
        logits = torch.randn(tokens, vocab, device=device, dtype=half, requires_grad=True)
        target = torch.randint(0, vocab, (tokens,), device=device)

        def loss(logits: Any = logits, target: Any = target) -> Any:
            return F.cross_entropy(logits.float(), target)

        value = loss()

        def back(value: Any = value, logits: Any = logits) -> None:
            torch.autograd.grad(value, logits, retain_graph=True)

        found.append(
            {"name": "cross_entropy", "rows": tokens, "columns": vocab,
             "forward_s": _time(loss, device, 4), "backward_s": _time(back, device, 4)}
        )  # fmt: skip
        del value, logits
    return found


def _optimizers(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Fused AdamW over float32 weights, and the norm of their gradients."""
    import torch

    found = []
    for tensors, each in ((4, 1000),) if tiny else ((16, 64_000_000), (300, 1_000_000)):
        weights = [torch.zeros(each, device=device, requires_grad=True) for _ in range(tensors)]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
        gradients = [w.grad for w in weights]
        step_s = _time(optimizer.step, device, 4)
        norm_s = _time(lambda g=gradients: torch.nn.utils.get_total_norm(g), device, 4)
        found.append({"tensors": tensors, "each": each, "step_s": step_s, "norm_s": norm_s})
        del weights, optimizer, gradients
    return found


def _launches(device: str) -> dict[str, float]:
    """What the host needs for small operations, which is the floor of a small model's step."""
    import torch
    import torch.nn.functional as F

    x = torch.zeros(64, device=device)
    small = torch.zeros(16, 64, device=device, requires_grad=True)
    weight = torch.zeros(64, 64, device=device, requires_grad=True)
    kind = "cuda" if device == "cuda" else "cpu"

    def linear() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            out = small
            for _ in range(50):
                out = F.linear(out, weight)

    def both() -> None:
        with torch.autocast(kind, dtype=torch.bfloat16):
            out = small
            for _ in range(50):
                out = F.linear(out, weight)
            out.sum().backward()

    def per_call(call: Any, count: int) -> float:
        times = []
        for _ in range(5):
            _settle(device)
            start = time.perf_counter()
            call()
            _settle(device)
            times.append((time.perf_counter() - start) / count)
        return statistics.median(times[1:])

    def adds() -> None:
        for _ in range(500):
            torch.add(x, x, out=x)

    return {
        "add_s": per_call(adds, 500),
        "linear_forward_s": per_call(linear, 50),
        "linear_forward_backward_s": per_call(both, 50),
    }


def _median_of(windows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in windows) for name in windows[0]}


def with_every_window(result: dict[str, Any]) -> dict[str, Any]:
    """The launches of all processes in one: a host has slow seconds, and a figure from one of them is off
    by a factor. The rates keep what each has measured."""
    rates = result["rates"]
    if not rates:
        return result
    windows = [rates["launch"], *(run["launch"] for run in result["runs"])]
    return {**result, "rates": {**rates, "launch": _median_of(windows), "launch_windows": windows}}


def _bind_to_quick_cores(count: int) -> None:
    """Cores of a host that others use are not alike; of those there are (one thread of each), the ones that
    were quickest just now, so that a run does not move between quick and slow ones."""
    found: dict[int, float] = {}
    first: dict[str, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        name = siblings.read_text() if siblings.is_file() else str(core)
        first.setdefault(name, core)
    every = set(first.values())
    for core in sorted(every) * 3:
        os.sched_setaffinity(0, {core})
        start, total = time.perf_counter(), 0
        for number in range(20_000):
            total += number
        found[core] = min(found.get(core, math.inf), time.perf_counter() - start)
    os.sched_setaffinity(0, sorted(every, key=found.__getitem__)[:count])


def _work(task: Run | None, pipe: Any, device: str, tiny: bool) -> None:
    """One process: does its task, answers and ends."""
    _bind_to_quick_cores(4)
    import torch

    torch.set_num_threads(1 if tiny else 4)
    if device == "cuda":
        torch.zeros(1, device=device)
    try:
        found = measure_rates(device, tiny) if task is None else measure_run(task, device, tiny)
        pipe.send(found)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        pipe.send({"error": f"{type(error).__name__}: {first}"[:300]})


def do(task: Run | None, device: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """The task's answer, or why there is none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ridgeline.train.setup"])
    pipe, theirs = context.Pipe()
    process = context.Process(target=_work, args=(task, theirs, device, tiny), daemon=True)
    process.start()
    theirs.close()
    try:
        if not pipe.poll(seconds):
            return {"error": f"took longer than {seconds:.0f} s"}
        answer: dict[str, Any] = pipe.recv()
        return answer
    except EOFError:
        return {"error": "the process ended without an answer"}
    finally:
        pipe.close()
        process.join(5)
        if process.is_alive():
            process.terminate()
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=235.0, help="seconds for everything")
    parser.add_argument("--only", default="", help="runs whose description has this text")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script itself")
    args = parser.parse_args()
    began = time.perf_counter()
    if args.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit("gpu_plan_runs: torch sees no CUDA device here; this benchmark needs one")
    tasks: list[Run | None] = [None, *(run for run in RUNS if args.only in str(run))]
    result: dict[str, Any] = {"rates": {}, "runs": [], "failed": []}
    for index, task in enumerate(tasks):
        left = args.limit - (time.perf_counter() - began)
        if left < 8:
            result["failed"] += [{"run": str(t), "error": "no time left"} for t in tasks[index:]]
            break
        answer = do(task, args.device, args.tiny, min(left, 60.0))
        name = "rates" if task is None else f"{task.size} {task.seq} x {task.samples} {task.layout}"
        took = time.perf_counter() - began
        if "error" in answer:
            result["failed"].append({"run": str(task), **answer})
            print(f"{took:6.1f} s  {name}: {answer['error']}", file=sys.stderr, flush=True)
        elif task is None:
            result["rates"] = answer
            print(f"{took:6.1f} s  {name}", file=sys.stderr, flush=True)
        else:
            result["runs"].append(answer)
            short = {k: answer[k] for k in ("peak_step_bytes", "peak_reserved_bytes", "step_s")}
            print(f"{took:6.1f} s  {name} {json.dumps(short)}", file=sys.stderr, flush=True)
        write_json(args.json, with_every_window(result))
    print_table(
        ("model", "seq", "samples", "layout", "rank", "held GB", "peak GB", "reserved GB", "s",
         "host"),
        [
            (
                r["size"], str(r["seq"]), str(r["samples"]), r["layout"], f"{r['rank']}/{r['world']}",
                f"{r['held_between_steps_bytes'] / 1e9:.2f}", f"{r['peak_step_bytes'] / 1e9:.2f}",
                f"{r['peak_reserved_bytes'] / 1e9:.2f}", f"{r['step_s']:.3f}",
                f"{r['host_s'] / r['step_s']:.0%}",
            )
            for r in result["runs"]
        ],
    )  # fmt: skip
    if result["failed"]:
        print(f"{len(result['failed'])} failed")


if __name__ == "__main__":
    main()
