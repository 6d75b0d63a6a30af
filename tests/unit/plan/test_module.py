"""Facts of a module as a file, and plans made of them: against the transformer's own path and by search."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.plan.general import ModuleJob, cost_of, module_job
from ridgeline.plan.general_memory import module_memory, module_stage_memory
from ridgeline.plan.general_time import module_bound_s, module_time, sent_bytes
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.kinds import kind_of
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine
from ridgeline.plan.memory import fits, predict_memory
from ridgeline.plan.module import ModuleFacts, facts_from_dict, load_facts, write_facts
from ridgeline.plan.predict import predict
from ridgeline.plan.search import layouts, scale, search
from ridgeline.plan.show import show_scale
from ridgeline.plan.software import RIDGELINE
from ridgeline.plan.time import predict_time

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]
H200 = load_machine("h200")
RUNS = ROOT / "benchmarks" / "results" / "plan_runs_h200.json"


def trace_llama(size: str, seq: int, depth: int = 3) -> ModuleFacts:
    """As torch 2.11 computes it, whose runs the transformer's path was checked against."""
    from ridgeline.models.build import build_model
    from ridgeline.models.trace import trace_module

    def batch(n: int) -> Any:
        ids = torch.zeros(n, seq, dtype=torch.long)
        return (ids,), ids

    def loss(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return trace_module(
        size, lambda: build_model("llama", size=size, depth=depth), batch, loss, [f"{seq}:int64"],
        "tokens", seq, wide_rms_norm=False,
    )  # fmt: skip


def deepen(facts: ModuleFacts, depth: int) -> ModuleFacts:
    """The same with more of its repeated blocks, which are all alike."""
    blocks = [
        replace(b, names=tuple(f"layers.{i}" for i in range(depth))) if b.recompute else b
        for b in facts.blocks
    ]
    return replace(facts, blocks=tuple(blocks))


@pytest.fixture(scope="module")
def llama() -> ModuleFacts:
    """1.3b at 2048 tokens, 24 layers."""
    return deepen(trace_llama("1.3b", 2048), 24)


@pytest.fixture(scope="module")
def resnet() -> ModuleFacts:
    from ridgeline.config import find_recipe, load_config
    from ridgeline.train.traced import trace_recipe

    changes = ["model.name=resnet18", "data.args.shape=[3,128,128]"]
    return trace_recipe(load_config(find_recipe("resnet50-synthetic"), changes).config)


AGREE = (
    ("precision=bf16", 4),
    ("precision=tf32", 4),
    ("recompute=selective,precision=bf16", 8),
    ("recompute=full,precision=bf16", 8),
    ("accumulate=4,precision=bf16", 16),
    ("dp=8,precision=bf16", 32),
    ("dp=8,zero=1,precision=bf16", 32),
    ("dp=8,zero=2,precision=bf16", 32),
    ("dp=8,zero=3,precision=bf16", 32),
    ("dp=2,zero=3,accumulate=4,precision=bf16", 16),
    ("dp=16,zero=3,shard=8,recompute=full,precision=bf16", 64),
    ("tp=2,precision=bf16", 4),
    ("tp=4,sp=true,precision=bf16", 8),
    ("pp=4,microbatches=8,precision=bf16", 16),
    ("pp=4,microbatches=8,schedule=interleaved,virtual=2,recompute=full,precision=bf16", 16),
    ("dp=2,zero=1,tp=2,pp=2,microbatches=8,precision=bf16", 32),
)


@pytest.mark.parametrize(("text", "batch"), AGREE)
def test_a_llama_is_planned_alike_by_sizes_and_by_trace(
    text: str, batch: int, llama: ModuleFacts
) -> None:
    layout = Layout.parse(text, "test")
    sized = job_from_layout(find_model("1.3b", 2048), H200, layout, batch)
    traced = module_job(llama, H200, layout, batch)
    assert llama.num_parameters == sized.model.num_parameters
    assert traced.devices == sized.devices
    assert traced.tokens == sized.tokens
    ours, theirs = module_memory(traced).allocated, predict_memory(sized).allocated
    assert ours == pytest.approx(theirs, rel=0.10)
    assert module_time(traced).seconds == pytest.approx(predict_time(sized).seconds, rel=0.15)
    flops = kind_of(llama).flops(traced) / kind_of(sized.model).flops(sized)
    assert flops == pytest.approx(1.0, rel=0.001)


def test_memory_of_measured_runs(llama: ModuleFacts) -> None:
    """1.3b on one H200, measured; nothing of the traced path was fitted to them."""
    runs = json.loads(RUNS.read_text())["runs"]
    checked = 0
    for run in runs:
        if (run["size"], run["seq"]) != ("1.3b", 2048) or "gpipe" in run["layout"]:
            continue
        layout = Layout.parse(run["layout"], "test")
        parts = layout.microbatches if layout.pp > 1 else layout.accumulate
        job = module_job(llama, H200, layout, run["samples"] * layout.dp * parts)
        peak = module_stage_memory(job, run["rank"]).allocated
        assert peak == pytest.approx(run["peak_step_bytes"], rel=0.02), run["layout"]
        checked += 1
    assert checked >= 7


def test_files_come_back_as_they_were(tmp_path: Path, resnet: ModuleFacts) -> None:
    path = tmp_path / "facts.json"
    write_facts(resnet, path)
    again = load_facts(path)
    assert json.dumps(again.to_dict()) == json.dumps(resnet.to_dict())
    layout = Layout.parse("dp=2,precision=bf16", "test")
    jobs = [module_job(facts, H200, layout, 64) for facts in (resnet, again)]
    assert module_time(jobs[0]) == module_time(jobs[1])
    assert module_memory(jobs[0]) == module_memory(jobs[1])


def test_other_files_are_refused(tmp_path: Path, resnet: ModuleFacts) -> None:
    values = json.loads(json.dumps(resnet.to_dict()))
    for change, words in (
        (lambda v: v.update(format="other"), "holds no module facts"),
        (lambda v: v.update(version=99), "version 99"),
        (lambda v: v["blocks"][0].pop("parameters"), "damaged"),
        (lambda v: v["blocks"][0].update(parameters="many"), "damaged"),
        (lambda v: v["blocks"][0].update(colour=1), "damaged"),
        (lambda v: v["blocks"][0]["costs"].pop("half"), "damaged"),
        (lambda v: v.update(blocks=[]), "no blocks"),
    ):
        changed = json.loads(json.dumps(values))
        change(changed)
        with pytest.raises(UsageError, match=words):
            facts_from_dict(changed, "facts.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        load_facts(bad)
    bad.write_text("[1]")
    with pytest.raises(UsageError, match="holds no module facts"):
        load_facts(bad)
    with pytest.raises(UsageError, match="cannot read"):
        load_facts(tmp_path / "none.json")


def job_of(facts: ModuleFacts, text: str, batch: int) -> ModuleJob:
    return module_job(facts, H200, Layout.parse(text, "test"), batch)


def test_parts_sum_up_and_are_not_negative(resnet: ModuleFacts, llama: ModuleFacts) -> None:
    for facts, text in (
        (resnet, "dp=4,zero=1,precision=bf16"), (resnet, "spatial=2x2,precision=bf16"),
        (resnet, "pp=3,microbatches=6,precision=bf16"), (resnet, "compile=true,precision=bf16"),
        (llama, "dp=2,tp=2,pp=2,microbatches=4,recompute=full,precision=bf16"),
    ):  # fmt: skip
        job = job_of(facts, text, 48)
        predicted = predict(job)
        time, memory = predicted.time, predicted.memory
        assert sum(getattr(time, n) for n in time.__dataclass_fields__) == pytest.approx(
            time.seconds
        )
        assert sum(getattr(memory, n) for n in memory.__dataclass_fields__) == pytest.approx(
            memory.device
        )
        for part in (time, memory):
            assert all(getattr(part, n) >= -1e-9 for n in part.__dataclass_fields__), text


def test_what_shares_out_shares_out(resnet: ModuleFacts) -> None:
    count = resnet.num_parameters
    held = [
        module_stage_memory(job_of(resnet, f"dp=8,zero={z},precision=bf16", 64), 0)
        for z in range(4)
    ]
    state = [m.weights + m.gradients + m.optimizer for m in held]
    assert state[0] == pytest.approx(8 * count)  # momentum, and gradients come and go
    assert state[1] == pytest.approx(count * (2 + 2 + 8 / 8))
    assert state[2] == pytest.approx(count * (2 + 8 / 8))
    assert state[3] == pytest.approx(count * 8 / 8)
    one, tiled = (
        module_memory(job_of(resnet, t, 64))
        for t in ("precision=bf16", "spatial=2x2,precision=bf16")
    )
    assert tiled.activations == pytest.approx(one.activations / 4, rel=0.1)
    times = [
        module_time(job_of(resnet, t, 512))
        for t in ("precision=bf16", "spatial=2x2,precision=bf16")
    ]
    assert times[1].products < times[0].products / 3
    assert times[1].tensor_parallel > 0  # edges of tiles


def test_recompute_compile_and_precision(llama: ModuleFacts, resnet: ModuleFacts) -> None:
    texts = (
        "precision=bf16",
        "recompute=selective,precision=bf16",
        "recompute=full,precision=bf16",
    )
    kept = [module_memory(job_of(llama, t, 8)).allocated for t in texts]
    assert kept == sorted(kept, reverse=True)
    full = [cost_of(job_of(llama, t, 8), 1) for t in texts]
    assert full[0] == full[2]
    again, once = (module_time(job_of(llama, t, 8)) for t in (texts[2], texts[0]))
    assert again.products == pytest.approx(once.products * 4 / 3, rel=0.1)
    eager, compiled = (
        module_time(job_of(resnet, t, 256))
        for t in ("precision=bf16", "precision=bf16,compile=true")
    )
    assert compiled.elementwise < 0.8 * eager.elementwise
    assert module_time(job_of(resnet, "precision=fp32", 256)).products > 5 * eager.products


def test_pipelines_cut_where_it_is_cheap_and_send_what_crosses(resnet: ModuleFacts) -> None:
    job = job_of(resnet, "pp=4,microbatches=8,precision=bf16", 64)
    stages = [
        [name for block, _ in job.blocks_of(rank) for name in block.names] for rank in range(4)
    ]
    everything = [name for stage in stages for name in stage]
    assert everything == [name for block in resnet.blocks for name in block.names]
    assert all(block.parameters for rank in range(4) for block, _ in job.blocks_of(rank)[:1])
    last = job.blocks_of(0)[-1][0]
    assert sent_bytes(job, 0) == last.costs["cast"].output.total.at(8)
    time = module_time(job)
    assert time.bubble > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tp=2", "none of its 1 linear layers feeds another"),
        ("cp=2", "planned at the length it was traced with"),
        ("pp=64,microbatches=64", "parts that"),
    ],
)
def test_what_a_module_has_not_is_refused(text: str, words: str, resnet: ModuleFacts) -> None:
    with pytest.raises(UsageError, match=words):
        job_of(resnet, text, 64)


def test_tiles_need_convolutions(llama: ModuleFacts) -> None:
    with pytest.raises(UsageError, match="no convolutions"):
        job_of(llama, "spatial=2", 2)


def test_the_search_finds_the_best_of_a_module(resnet: ModuleFacts) -> None:
    batch = 64
    found = search(resnet, H200, 8, batch, top=3)
    every, kind = [], kind_of(resnet)
    for layout, samples in layouts(resnet, H200, 8, batch, "bf16"):
        assert layout.world_size == 8
        assert layout.tp == 1
        job = kind.arrange(resnet, H200, layout, batch, RIDGELINE)
        assert job.samples == samples
        assert module_bound_s(job) <= module_time(job).seconds * (1 + 1e-9), str(layout)
        if fits(job, module_memory(job)):
            every.append(predict(job).seconds)
    # Of those that are as good the simplest comes first.
    assert sorted(p.seconds for p in found.best) == pytest.approx(sorted(every)[:3])
    assert found.played < len(every)
    assert all(0 < p.mfu < 0.8 for p in found.best)
    assert any(p.layout.spatial != (1, 1) for p in search(resnet, H200, 8, 4, top=30).best)


def test_scaling_of_a_module(resnet: ModuleFacts) -> None:
    weak = scale(resnet, H200, [1, 2], 1024, "bf16", weak=True)
    rates = [planned.tokens_per_s / count for count, planned in weak if planned is not None]
    assert rates[1] > 0.8 * rates[0]
    assert "samples/s" in show_scale(weak, True)[1]


@pytest.fixture
def resnet_file(tmp_path: Path, resnet: ModuleFacts) -> Path:
    write_facts(resnet, tmp_path / "facts.json")
    return tmp_path / "facts.json"


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["plan", *args])


def test_commands_plan_a_file_of_facts(resnet_file: Path) -> None:
    common = (str(resnet_file), "--machine", "h200", "--batch", "64")
    done = run(*common, "--top", "2", "--why")
    assert done.exit_code == 0, done.output
    assert "samples/s" in done.output
    assert "tokens" not in done.output
    assert "40 GB more memory" in done.output
    assert "between nodes" not in done.output  # there is one
    assert "twice the bandwidth between nodes" in run(*common, "-N", "2", "--why").output
    done = run(*common, "--explain", "dp=8,precision=bf16")
    assert "fits" in done.output
    assert "matrix products" in done.output
    for args, words in (
        (("--explain", "tp=8"), "feeds another"),
        (("--explain", "pp=64,microbatches=64", "-N", "8"), "stages"),
        (("--seq", "128"), "planned from a trace"),
    ):
        done = run(*common, *args)
        assert isinstance(done.exception, UsageError)
        assert words in str(done.exception)


def test_commands_trace_recipes_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("digits", "--machine", "h200", "--top", "1")
    assert done.exit_code == 0, done.output
    assert "samples/s" in done.output
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = run("facts", "mine:small", "--input", "64", "-o", "small.json")
    assert done.exit_code == 0, done.output
    assert "33,088 parameters" in done.output
    assert "tp divides 256" in done.output
    assert run("small.json", "--machine", "h200", "--batch", "64").exit_code == 0
    for args, words in (
        (("facts", "mine:small"), "needs --input"),
        (("facts", "mine:small", "--input", "6y4"), "is no shape"),
        (("facts", "mine:small", "--input", "64:int63"), "unknown type"),
        (("facts", "mine:small", "train.batch=2", "--input", "64"), "changes a recipe"),
        (("facts", "digits", "--input", "64"), "has its own samples"),
        (("facts", "mine:small", "--input", "65"), "does not run on the inputs"),
        (("facts", "mine:small", "--input", "64", "-o", "no/where.json"), "cannot write"),
    ):
        done = run(*args)
        assert isinstance(done.exception, UsageError), (args, done.output)
        assert words in str(done.exception)


NO_TORCH = """
import sys
class _NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, _NoTorch())
from ridgeline.cli import main
main()
"""


def test_a_file_of_facts_needs_no_torch(resnet_file: Path) -> None:
    def call(*args: str) -> Any:
        return subprocess.run(
            [sys.executable, "-c", NO_TORCH, "plan", *args],
            capture_output=True,
            text=True,
            cwd=ROOT,
        )

    done = call(str(resnet_file), "--machine", "h200", "--batch", "64", "--top", "1")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    done = call("vit-fields", "--machine", "h200")
    assert done.returncode == 2
    assert "needs torch, which is not installed here" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_waits_for_its_samples_and_for_the_slowest(resnet: ModuleFacts) -> None:
    machine = load_machine("h200").replace(storage_bandwidth=1e9)
    job = replace(module_job(resnet, machine, Layout.parse("dp=8"), 64), sample_bytes=1e9)
    time = module_time(job)
    assert time.seconds == pytest.approx(64.0)
    assert time.stragglers > 0.0
    with pytest.raises(UsageError, match=r"offload=optimizer .* by their sizes only"):
        module_job(resnet, machine, Layout.parse("dp=8,offload=optimizer"), 64)


def test_memory_is_of_the_worst_stage_wherever_it_is(resnet: ModuleFacts) -> None:
    """Stages of a traced module are not alike, also where there are many."""
    deep = deepen(trace_llama("1m", 64), 16)
    for facts, most in ((resnet, resnet.most_stages), (deep, 8)):
        for pp in range(2, min(most, 8) + 1):
            layout = Layout.parse(f"pp={pp},microbatches={pp}")
            job = module_job(facts, load_machine("h200"), layout, 8 * pp)
            worst = max(module_stage_memory(job, rank).allocated for rank in range(pp))
            assert module_memory(job).allocated == pytest.approx(worst)


def test_what_no_layout_can_do_without_is_less_than_what_it_needs(resnet: ModuleFacts) -> None:
    from ridgeline.config import find_recipe, load_config
    from ridgeline.train.traced import trace_recipe

    half = trace_recipe(load_config(find_recipe("digits"), ["model.dtype=bfloat16"]).config)
    assert half.parameter_bytes == 2 * half.num_parameters
    for facts in (resnet, half):
        for zero in range(4):
            layout = Layout.parse(f"dp=8,zero={zero},precision=bf16")
            job = module_job(facts, load_machine("h200"), layout, 64)
            held = module_memory(job)
            assert kind_of(facts).least_bytes(job) <= (held.weights + held.optimizer) * 1.0001
