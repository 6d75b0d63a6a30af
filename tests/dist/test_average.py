"""The moving average of the weights: in every layout, through checkpoints, and beside evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ridgeline import rundir
from ridgeline.checkpoint.compare import compare
from ridgeline.checkpoint.export import export_weights
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.models.llama import Llama, LlamaConfig
from ridgeline.parallel.gather import replica_states
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train.engine import Engine
from ridgeline.train.job import start
from ridgeline.train.run import run_training

STEPS, DECAY = 5, 0.6
Weights = dict[str, Tensor]


def copied(weights: Weights) -> Weights:
    return {name: value.clone() for name, value in weights.items()}


def by_hand(states: list[Weights], warmup: bool = True) -> Weights:
    """From initial weights on, as the formula has it."""
    found = states[0]
    for done, state in enumerate(states[1:]):
        stays = min(DECAY, (1 + done) / (10 + done)) if warmup else DECAY
        found = {name: stays * old + (1 - stays) * state[name] for name, old in found.items()}
    return found


def require_close(found: Weights, expected: Weights, bound: float = 1e-9) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).abs().max()) <= bound * float(value.abs().max()), name


# Each layout, by an engine


def llama() -> tuple[nn.Module, Tensor, Tensor]:
    tokens = torch.randint(0, 64, (40, 17), generator=torch.Generator().manual_seed(3))
    net = Llama(LlamaConfig(vocab=64, width=32, depth=4, heads=4, kv_heads=2, tie_embeddings=True))
    return net, tokens[:, :-1], tokens[:, 1:]


def images() -> tuple[nn.Module, Tensor, Tensor]:
    data = torch.Generator().manual_seed(3)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(8, 5),
    )
    pixels = torch.randn(40, 3, 8, 8, generator=data, dtype=torch.float64)
    return net, pixels, torch.randint(0, 5, (40,), generator=data)


class Mixture(nn.Module):
    """Each sample goes to the expert that its gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.classes = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.classes(x + out)


def mixture() -> tuple[nn.Module, Tensor, Tensor]:
    data = torch.Generator().manual_seed(3)
    inputs = torch.randn(40, 6, generator=data, dtype=torch.float64)
    return Mixture(), inputs, torch.randint(0, 5, (40,), generator=data)


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train(
    subject: Callable[[], tuple[nn.Module, Tensor, Tensor]], layout: str, warmup: bool = True
) -> tuple[list[Weights], Weights, Weights]:
    """Weights at the start and after each step (of replicas on their own their mean), the average that was
    kept, and what of it is on this rank."""
    job = start(layout, seed=0, device="cpu")
    torch.manual_seed(1)
    net, inputs, targets = subject()
    net = net.double()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    engine = job.engine(
        net,
        optimizer,
        clip=None if "local" in layout else 0.5,
        loss=mean_loss,
        example_input=inputs[:2],
        ema=DECAY,
        ema_warmup=warmup,
    )
    loader = job.loader(TensorDataset(inputs, targets), batch_size=8)
    states = [engine_state(engine)]
    batches = iter(loader)
    for _ in range(STEPS):
        engine.train_batch(batches)
        states.append(engine_state(engine))
    with engine.averaged():
        mine = {n: p.detach().clone() for n, p in engine.module.named_parameters()}
    return states, engine.weights(averaged=True), {} if engine.arranged.is_fully_sharded else mine


def engine_state(engine: Engine) -> Weights:
    replicas = replica_states(engine.arranged)
    if replicas:
        return {name: torch.stack([r[name] for r in replicas]).mean(0) for name in replicas[0]}
    return copied(engine.weights())


@pytest.fixture(scope="module")
def alone() -> Callable[..., tuple[list[Weights], Weights]]:
    """One device's, by what is trained."""
    known: dict[Any, tuple[list[Weights], Weights]] = {}

    def find(subject: Any) -> tuple[list[Weights], Weights]:
        if subject not in known:
            known[subject] = train(subject, "")[:2]
        return known[subject]

    return find


@pytest.mark.parametrize("warmup", [True, False])
def test_it_is_what_the_formula_says(warmup: bool) -> None:
    states, found, _ = train(images, "", warmup)
    require_close(found, by_hand(states, warmup), 1e-14)
    assert not torch.allclose(found["8.weight"], states[-1]["8.weight"], rtol=1e-6)


WHOLE = ("dp=2,zero=1,accumulate=2", "dp=2,zero=2", "dp=2,zero=1,offload=optimizer")


@pytest.mark.parametrize(
    ("ranks_", "layout"),
    [
        (2, "dp=2,zero=1,accumulate=2"),
        (2, "dp=2,zero=2"),
        (2, "dp=2,zero=3"),
        (2, "dp=2,zero=1,offload=optimizer"),
        (2, "tp=2,sp=true"),
        (2, "cp=2"),
        (2, "pp=2,microbatches=4,schedule=interleaved,virtual=2"),
        (2, "pp=2,microbatches=2,schedule=zerobubble"),
        (4, "dp=4,zero=3,shard=2"),
        (4, "dp=2,zero=2,pp=2,microbatches=2"),
    ],
)
def test_every_layout_has_the_same(ranks: Any, alone: Any, ranks_: int, layout: str) -> None:
    results, expected = ranks(ranks_, train, llama, layout), alone(llama)[1]
    require_close(results[0][1], expected)
    if layout in WHOLE:  # what an evaluation computes with, on each rank
        for _, _, mine in results:
            require_close(mine, {name: expected[name] for name in mine})


@pytest.mark.parametrize(
    ("ranks_", "subject", "layout"),
    [
        (2, images, "spatial=2"),
        (2, mixture, "dp=2,zero=1,ep=2"),
        (2, mixture, "pp=2,microbatches=2"),
        (4, mixture, "pp=2,dp=2,ep=2,microbatches=2"),
    ],
)
def test_models_of_other_kinds_have_the_same(
    ranks: Any, alone: Any, ranks_: int, subject: Any, layout: str
) -> None:
    require_close(ranks(ranks_, train, subject, layout)[0][1], alone(subject)[1])


def test_replicas_on_their_own_have_that_of_the_averaged_model(ranks: Any) -> None:
    first, second = ranks(2, train, images, "dp=2,sync=local:3")
    require_close(first[1], by_hand(first[0]))
    assert all(torch.equal(value, second[2][name]) for name, value in first[2].items())


# Beside evaluations and through checkpoints


def config_of(layout: str, *overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            "model={name: mlp, args: {in_features: 12, hidden: 16, out_features: 5}}",
            "data.source=synthetic",
            "data.args={shape: [12], classes: 5, samples: 40, distinct: 40, eval_samples: 8}",
            f"train={{batch: 8, steps: {STEPS}, lr: 0.01, clip: 0.5, eval_every: 2}}",
            f"optim={{name: adamw, weight_decay: 0.1, ema: {DECAY}}}",
            "model.dtype=float64",
            "checkpoint={minutes: 0, keep: 9}",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            f"layout={layout}",
            *overrides,
        ],
    ).config


def write_run(path: Path, config: RunConfig) -> RunDir:
    path.mkdir(exist_ok=True)
    (path / rundir.LOGS).mkdir(exist_ok=True)
    run = RunDir(path)
    run.write_text(rundir.CONFIG, dump_config(config))
    return run


def run_whole(path: str, config: RunConfig) -> None:
    run_training(config, read_rank_env(), RunDir(Path(path)))


def same(one: Path, other: Path) -> None:
    """Two checkpoints, bit for bit, but for what belongs to the process."""
    found = [d.name for d in compare(one, other).differences if "random/" not in d.name]
    assert not found


@pytest.mark.parametrize("layout", ["dp=2,zero=1,precision=bf16", "dp=2,zero=3"])
def test_evaluation_leaves_training_alone_and_a_run_goes_on(
    ranks: Any, tmp_path: Path, layout: str
) -> None:
    """One that evaluates often, one that never does, and one that is cut in two."""
    base = ("model.dtype=float32", "checkpoint.every=2")
    config = config_of(layout, *base, "train.eval_every=1")
    whole = write_run(tmp_path / "whole", config)
    ranks(2, run_whole, str(whole.path), config)
    assert [record.averaged for record in whole.evals()] == [True] * STEPS

    never = config_of(layout, *base, "train.eval_samples=0")
    quiet = write_run(tmp_path / "quiet", never)
    ranks(2, run_whole, str(quiet.path), never)
    last = f"step-{STEPS:08d}"
    same(whole.file(CHECKPOINTS) / last, quiet.file(CHECKPOINTS) / last)

    cut = write_run(tmp_path / "cut", config)
    ranks(2, run_whole, str(cut.path), config_of(layout, *base, "train.steps=2"))
    ranks(2, run_whole, str(cut.path), config)
    same(whole.file(CHECKPOINTS) / last, cut.file(CHECKPOINTS) / last)
    for name in (rundir.WEIGHTS, rundir.LIVE_WEIGHTS):
        one, other = load_file(whole.file(name)), load_file(cut.file(name))
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_run_goes_on_in_another_layout(ranks: Any, tmp_path: Path) -> None:
    whole = write_run(tmp_path / "whole", config_of(""))
    run_whole(str(whole.path), config_of(""))
    expected, live = (load_file(whole.file(n)) for n in (rundir.WEIGHTS, rundir.LIVE_WEIGHTS))
    run = write_run(tmp_path / "run", config_of("dp=2,zero=3"))
    ranks(2, run_whole, str(run.path), config_of("dp=2,zero=3", "train.steps=2"))
    ranks(2, run_whole, str(run.path), config_of("tp=2", "train.steps=3"))
    ranks(2, run_whole, str(run.path), config_of("pp=2,microbatches=2"))
    require_close(load_file(run.file(rundir.WEIGHTS)), expected)
    require_close(load_file(run.file(rundir.LIVE_WEIGHTS)), live)
    evaluated = [{e.step: e.metrics["loss"] for e in one.evals()} for one in (run, whole)]
    assert {2, STEPS} <= evaluated[0].keys() & evaluated[1].keys()
    for step in (2, STEPS):
        assert evaluated[0][step] == pytest.approx(evaluated[1][step], rel=1e-9)
    newest, out = run.file(CHECKPOINTS) / f"step-{STEPS:08d}", tmp_path / "out.safetensors"
    for is_live, weights in ((False, expected), (True, live)):
        export_weights(newest, out, live=is_live)
        require_close(load_file(out), weights)


def test_it_can_begin_and_end_between(ranks: Any, tmp_path: Path) -> None:
    without = config_of("", "optim.ema=null", "train.steps=2")
    run = write_run(tmp_path / "run", without)
    run_whole(str(run.path), without)
    run_whole(str(run.path), config_of("", "train.steps=3"))
    before, after = (load_file_of(run, step) for step in (2, 3))
    name = next(iter(before))
    expected = 0.1 * before[name] + 0.9 * after[name]  # the first update of the warm-up
    assert torch.allclose(load_file(run.file(rundir.WEIGHTS))[name], expected, rtol=1e-14)
    run_whole(str(run.path), config_of("", "optim.ema=null", "train.steps=4"))
    assert not run.evals()[-1].averaged


def load_file_of(run: RunDir, step: int) -> Weights:
    out = run.path / f"{step}.safetensors"
    export_weights(run.file(CHECKPOINTS) / f"step-{step:08d}", out, live=True)
    return load_file(out)


# A loop of one's own


def own_loop(
    layout: str, folder: str, stop_at: int | None
) -> tuple[Weights, Weights, float] | None:
    job = start(layout, seed=0, device="cpu")
    torch.manual_seed(1)
    net, inputs, targets = images()
    net = net.double()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    engine = job.engine(net, optimizer, loss=F.cross_entropy, example_input=inputs[:2], ema=DECAY)
    loader = job.loader(TensorDataset(inputs, targets), batch_size=8)
    saves = job.checkpoints(folder, engine, optimizer, loader, every=5)
    for _ in saves.epochs(2):
        batches = iter(loader)
        for _ in range(len(loader) // engine.parts):
            if saves.num_steps == stop_at:
                saves.close()
                return None
            engine.train_batch(batches)
            saves.step()
            with engine.averaged():
                same = (inputs[:8], targets[:8])
                loss = engine.eval_batch(same for _ in range(engine.parts))
    with engine.averaged():
        with pytest.raises(UsageError, match=r"within engine.averaged"):
            engine.train_batch(iter(loader))
        with pytest.raises(UsageError, match="entered twice"), engine.averaged():
            pass
        with pytest.raises(UsageError, match=r"within engine.averaged"):
            saves.save()
    saves.close()
    return engine.weights(averaged=True), engine.weights(), float(loss)


def test_an_engine_keeps_one(ranks: Any, tmp_path: Path) -> None:
    whole, live, loss = own_loop("", str(tmp_path / "whole"), None) or ({}, {}, 0.0)
    assert not torch.allclose(whole["0.weight"], live["0.weight"], rtol=1e-6)
    ranks(2, own_loop, "dp=2,zero=2", str(tmp_path / "cut"), 5)
    layout = "pp=2,microbatches=2"
    found, others, other = ranks(2, own_loop, layout, str(tmp_path / "cut"), None)[0]
    require_close(found, whole)
    require_close(others, live)
    assert other == pytest.approx(loss, rel=1e-9)
