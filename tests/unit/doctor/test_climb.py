"""A climb on a CPU: keeps what is faster, drops what is slower, wrong, refused or broken."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.config import load_config
from ridgeline.doctor.choice import LEAST_PREDICTED, Waiting, carry
from ridgeline.doctor.climb import climb
from ridgeline.doctor.combined import change_config
from ridgeline.doctor.ladder import Rung
from ridgeline.doctor.losses import difference, judge_losses
from ridgeline.doctor.measured import Measured, Memory, Stall
from ridgeline.doctor.model_look import look_at
from ridgeline.doctor.remedies.contract import Parts, Remedy, amdahl
from ridgeline.doctor.remedies.table import REMEDIES
from ridgeline.doctor.states import Effort
from ridgeline.errors import UsageError

SLOW = """
import time
import numpy as np
import torch
from ridgeline.data.source import SourceInfo

class Slow:
    info = SourceInfo(input_shape=(16,), input_dtype=torch.float32, target_shape=(),
                      target_dtype=torch.int64, num_classes=4, task="classify")

    def __len__(self):
        return 2048

    def fetch(self, indices, epoch):
        time.sleep(0.03)
        rows = [np.random.default_rng(int(i)).normal(size=16) for i in indices]
        x = torch.tensor(np.array(rows), dtype=torch.float32)
        return x, (x[:, :4].argmax(1))

def build(**_):
    return Slow()
"""

SETTINGS = [
    "model.name=mlp",
    "model.args={in_features: 16, hidden: 32, out_features: 4}",
    "data.source=slow_source:build",
    "train.batch=8",
    "train.steps=500",
    "train.lr=0.01",
    "data.prefetch=0",
    "device=cpu",
    "threads=1",
]


def always(name: str, gain: float, *overrides: str) -> Remedy:
    return Remedy(
        name,
        applies=lambda step, config: "it is told to",
        predicted_gain=lambda step, config: gain,
        change=lambda config: list(overrides),
        risk="none",
    )


@pytest.mark.slow
def test_a_climb_keeps_the_faster_and_drops_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_source.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    remedies = {
        r.name: r
        for r in (
            always("threads", 9.0, "data.threads=4", "data.prefetch=2"),
            always("slower", 8.0, "data.threads=1", "data.prefetch=0"),
            always("other weights", 7.0, "train.seed=1"),
            always("other rate", 6.0, "train.lr=1.0"),
            always("refused", 5.0, "layout.graphs=true"),
            always("broken", 4.0, "device=cuda"),
            always("not promising", 1.0, "train.lr=0.5"),
        )
    }
    said: list[str] = []
    effort = Effort(rounds=3, steps=4, warm_up=1, check_steps=12, loss_bound=0.01)
    config = load_config(None, SETTINGS).config
    ladder = climb(config, tmp_path / "out", remedies=remedies, effort=effort, say=said.append)
    rungs = {rung.name: rung for rung in ladder.rungs}
    assert [name for name, rung in rungs.items() if rung.kept] == ["baseline", "threads"]
    assert rungs["threads"].gain > 1.0
    assert rungs["threads"].loss_difference == 0.0
    assert ladder.best.name == "threads"
    assert ladder.overrides == ("data.threads=4", "data.prefetch=2")
    assert rungs["slower"].why.startswith("slower by")
    assert "off" in rungs["other weights"].why
    assert "off after 12 steps" in rungs["other rate"].why
    assert "graphs" in rungs["refused"].why
    assert "it failed" in rungs["broken"].why
    assert "not promising" not in rungs
    raced = [rungs[n] for n in ("baseline", "threads", "slower")]
    assert all(rung.tenth_step_s > 0 and rung.spread is not None for rung in raced)
    # Four threads may be more than twice as fast as one, and two turns are enough then.
    assert [len(rung.turns_s) in (2, 3) for rung in raced] == [True] * 3
    assert rungs["baseline"].rate == pytest.approx(8 / rungs["baseline"].step_s)
    assert rungs["threads"].rate == pytest.approx(rungs["baseline"].rate * rungs["threads"].times)
    again = load_config(tmp_path / "out" / "recipe.yaml").config
    assert (again.data.threads, again.data.prefetch, again.train.steps) == (4, 2, 500)
    assert json.loads((tmp_path / "out" / "ladder.json").read_text())["overrides"]
    assert "<svg" in (tmp_path / "out" / "ladder.svg").read_text()
    assert "kept: the recipe as it is" in said[-1]
    assert f"{ladder.best.times:.2f} times the baseline with threads" in said[-1]
    assert "not tried, since they promise next to nothing: not promising" in said[-1]


def test_what_leaves_the_device_waiting_is_tried_again_with_what_feeds_it() -> None:
    """Both are hidden by the other alone: computing takes 100 of 100 ms, reading 95."""
    config = load_config(None, SETTINGS).config
    fast = always("fast", 1.5, "layout.compile=true")
    threads = dataclasses.replace(
        REMEDIES["reading threads"], applies=lambda step, c: "so" if step.data_s > 0.005 else None
    )
    waiting = Waiting([fast, threads])
    step = Parts(step_s=0.100, data_s=0.0, device_kind="cuda")
    assert [promise.remedy.name for promise in waiting.rank(step, config)] == ["fast"]
    waiting.take(fast)
    rung = Rung("fast", (), False, "", gain=1.05, step_s=0.095, data_share=0.035 / 0.095)
    pair = waiting.note_dropped(fast, rung, step, config)
    assert pair is not None
    assert pair.name == "fast, reading threads"
    assert pair.change(config)[0] == "layout.compile=true"
    assert pair.change(config)[1].startswith("data.threads=")
    (promise,) = waiting.rank(step, config)
    assert promise.remedy is pair
    assert promise.gain == pytest.approx(1.05 * amdahl(Parts(0.095), 0.9 * 0.035))
    # Where the kept state waits as long, the remedy's own gain was there to be seen.
    held = dataclasses.replace(step, data_s=0.035)
    assert Waiting([threads]).note_dropped(fast, rung, held, config) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gain": None}, "its losses were off"),
        ({"gain": 0.8}, "slower by itself"),
        ({"data_share": 0.01}, "it waits for nothing"),
        ({"data_share": None}, "it was never timed"),
    ],
)
def test_what_was_dropped_for_other_reasons_is_not_tried_again(
    changes: dict[str, float | None], why: str
) -> None:
    config = load_config(None, SETTINGS).config
    fast = always("fast", 1.5, "layout.compile=true")
    waiting = Waiting([REMEDIES["reading threads"]])
    step = Parts(step_s=0.100, data_s=0.0, device_kind="cuda")
    rung = Rung("fast", (), False, "", gain=1.05, step_s=0.095, data_share=0.035 / 0.095)
    assert waiting.note_dropped(fast, rung, step, config) is not None
    other = Waiting([REMEDIES["reading threads"]])
    assert other.note_dropped(fast, dataclasses.replace(rung, **changes), step, config) is None, why


def test_a_pair_is_tried_once_and_falls_apart_where_the_device_is_fed() -> None:
    config = load_config(None, SETTINGS).config
    fast = dataclasses.replace(always("fast", 1.5, "layout.compile=true"), slow=True)
    threads = dataclasses.replace(always("threads", 1.2, "data.threads=4"), feeds=True)
    step = Parts(step_s=0.100, data_s=0.0, device_kind="cuda")
    rung = Rung("fast", (), False, "", gain=1.0, step_s=0.1, data_share=0.4)
    waiting = Waiting([fast, threads])
    waiting.take(fast)
    pair = waiting.note_dropped(fast, rung, step, config)
    assert pair is not None
    assert pair.slow
    waiting.take(pair)
    assert waiting.note_dropped(pair, rung, step, config) is None
    assert [p.remedy.name for p in waiting.rank(step, config)] == ["threads"]

    again = Waiting([fast, threads])
    again.take(fast)
    assert again.note_dropped(fast, rung, step, config) is not None
    again.take(threads)
    again.note_kept(threads)
    assert [p.remedy.name for p in again.rank(step, config)] == ["fast"]

    failed = Waiting([fast, threads])
    failed.take(threads)
    failed.note_dropped(threads, dataclasses.replace(rung, gain=None), step, config)
    failed.take(fast)
    assert failed.note_dropped(fast, rung, step, config) is None  # what failed feeds nothing


def test_what_takes_minutes_to_start_comes_after_the_rest() -> None:
    config = load_config(None, SETTINGS).config
    slow = dataclasses.replace(always("slow", 1.5, "train.lr=1"), slow=True)
    waiting = Waiting(
        [slow, always("nothing", 1.0, "train.lr=2"), always("soon", 1.1, "train.lr=3")]
    )
    step = Parts(step_s=0.1, device_kind="cuda")
    assert [p.remedy.name for p in waiting.rank(step, config)] == ["soon", "slow", "nothing"]
    assert {r.name for r in REMEDIES.values() if r.slow} == {"autotune", "tile search"}


def test_graphs_come_together_with_one_piece() -> None:
    """Between blocks that were compiled one by one a graph copies; on an H200 it was slower by itself."""
    llama = [*SETTINGS[3:], "model.name=llama", "model.args={size: 124m}", "data.source=synthetic"]
    blocks = [
        "layout=precision=bf16,compile=true",
        "tune.compile_mode=regional",
        "tune.residual=bf16",
    ]
    config = load_config(None, [*llama, *blocks]).config
    step = Parts(step_s=0.1, device_kind="cuda")
    first, *_ = Waiting(REMEDIES[name] for name in REMEDIES if name != "fp8").rank(step, config)
    assert {"CUDA graphs", "compile in one piece"} <= {*first.remedy.members}


def test_fp8_waits_for_the_compiler() -> None:
    step = Parts(step_s=0.1, device_kind="cuda")
    llama = [*SETTINGS[3:], "model.name=llama", "model.args={size: 1.3b}", "data.source=synthetic"]
    plain, compiled = (
        load_config(None, [*llama, f"layout=precision=bf16,compile={c}"]).config
        for c in ("false", "true")
    )
    waiting = Waiting([REMEDIES["fp8"], REMEDIES["compile"]])
    assert [p.remedy.name for p in waiting.rank(step, plain)] == ["compile", "fp8"]
    (only,) = waiting.rank(step, compiled)
    assert only.remedy.name == "fp8"
    assert only.gain > waiting.rank(step, plain)[0].gain
    narrow = load_config(
        None, [*llama, "model.args={size: 5m}", f"layout={compiled.layout}"]
    ).config
    (little,) = waiting.rank(step, narrow)
    assert little.gain < LEAST_PREDICTED  # casts of layers so narrow take more than products save


def test_graphs_promise_something_on_every_compiled_step() -> None:
    graphs = REMEDIES["CUDA graphs"]
    config = load_config(None, [*SETTINGS, "layout=precision=bf16,compile=true"]).config
    assert graphs.predicted_gain(Parts(0.1, device_kind="cuda"), config) > LEAST_PREDICTED


def test_losses_are_judged() -> None:
    effort, base = Effort(loss_bound=0.01), [4.0, 3.0, 2.0, 2.0]
    assert judge_losses([4.0, 3.1, 1.9, 2.01], base, effort) == ""
    assert "+5.00% off after 4 steps" in judge_losses([4.0, 3.0, 2.0, 2.1], base, effort)
    assert "nan at step 2" in judge_losses([4.0, float("nan"), 2.0, 2.0], base, effort)
    assert "first loss is 25.00% off" in judge_losses([5.0, 3.0, 2.0, 2.0], base, effort)
    assert difference([1.0, 1.0, 1.0, 3.0], base) == pytest.approx(0.5)


def test_what_does_not_compose_is_refused_before_a_process_is_started() -> None:
    config = load_config(None, SETTINGS).config
    assert change_config(config, ("layout.compile=true",)).layout == "compile=true"
    with pytest.raises(UsageError, match="needs compile=true"):
        change_config(config, ("layout.graphs=true",))
    assert change_config(config, ("tune.fp8_keep=[a, b]",)).tune.fp8_keep == ("a", "b")


LLAMA = [
    "model.name=llama",
    "model.args={width: 64, depth: 2, heads: 2, ffn: 128, vocab: 32768}",
    "data.source=synthetic",
    "train.steps=1",
    "tune.fused_optimizer=false",
]
GPU = Parts(step_s=1.0, data_s=0.2, launch_s=0.1, device_kind="cuda", classes={"optimizer": 0.1})


def applying(step: Parts, *overrides: str) -> dict[str, float]:
    config = load_config(None, [*LLAMA, *overrides]).config
    return {
        name: remedy.predicted_gain(step, config)
        for name, remedy in REMEDIES.items()
        if remedy.applies(step, config) is not None
    }


def test_remedies_apply_where_they_can() -> None:
    plain = applying(GPU)
    assert {"tf32", "bf16", "compile", "fused optimizer", "reading threads"} <= set(plain)
    assert not {"fp8", "CUDA graphs", "bf16 weights", "narrow residual"} & set(plain)
    narrow = applying(GPU, "layout=precision=bf16,compile=true", "tune.fused_optimizer=true")
    assert {"fp8", "CUDA graphs", "bf16 weights", "narrow residual", "cuDNN attention"} <= set(
        narrow
    )
    assert not {"tf32", "bf16", "compile", "fused optimizer", "channels last"} & set(narrow)
    image = ["model.name=resnet18", "model.args={}", "layout=precision=bf16"]
    assert "channels last" in applying(GPU, *image)
    assert "narrow residual" not in applying(GPU, *image)
    on_cpu = applying(Parts(step_s=1.0, data_s=0.5))
    assert {"reading threads", "loader processes", "compile"} <= set(on_cpu)
    assert not {"bf16", "tf32"} & set(on_cpu)
    fast = Parts(step_s=1.0, bf16_rate=2.0)
    assert "bf16" in applying(fast)
    wide = ["model.name=resnet18", "model.args={}"]
    assert "channels last" in applying(fast, *wide)
    assert "channels last" not in applying(GPU, *wide)


def test_a_deep_model_is_compiled_block_by_block_first() -> None:
    def change(*overrides: str) -> list[str]:
        return REMEDIES["compile"].change(load_config(None, [*LLAMA, *overrides]).config)

    deep = "model.args={width: 64, depth: 8, heads: 2, ffn: 128, vocab: 512, max_seq: 64}"
    assert change(deep) == ["layout.compile=true", "tune.compile_mode=regional"]
    assert change() == ["layout.compile=true"]
    assert change("model.name=resnet50", "model.args={}") == ["layout.compile=true"]
    regional = [deep, "layout=compile=true", "tune.compile_mode=regional"]
    assert {"compile in one piece", "autotune", "tile search"} <= set(applying(GPU, *regional))
    assert "compile in one piece" not in applying(GPU, deep, "layout=compile=true")
    assert "tile search" not in applying(GPU, deep, "layout=compile=true", "tune.search_tiles=true")


def test_new_remedies_know_their_place() -> None:
    old = dataclasses.replace(GPU, has_bf16=False)
    assert "fp16" in applying(old)
    assert "bf16" not in applying(old)
    assert "fp16" not in applying(GPU)
    narrow = "layout=precision=bf16"
    assert "fp8" in applying(GPU, narrow)
    assert "fp8" not in applying(dataclasses.replace(GPU, has_fp8=False), narrow)
    assert "fused norms and rotary" in applying(GPU)
    assert "fused norms and rotary" not in applying(GPU, "layout=compile=true")
    assert "fp8 tensor scales" in applying(GPU, "layout=precision=fp8")
    assert "fp8 tensor scales" not in applying(
        GPU, "layout=precision=fp8", "tune.fp8_scaling=tensor"
    )
    assert "stochastic rounding" in applying(GPU, "layout=precision=bf16", "tune.weights=bf16")
    assert "stochastic rounding" not in applying(GPU, "layout=precision=bf16")
    assert "merged products" in applying(GPU, "layout=precision=bf16")
    for other in ("tune.merge=true", "layout=tp=2"):
        assert "merged products" not in applying(GPU, other)
    image = ["model.name=resnet18", "model.args={}"]
    assert "merged products" not in applying(GPU, *image)
    assert "convolution search" not in applying(GPU, *image)
    assert "convolution search" in applying(GPU, *image, "tune.search_convolutions=false")
    assert "folded norms" in applying(GPU, *image)
    ready = [*image, "layout=precision=bf16,compile=true", "model.channels_last=true"]
    assert "convolutional kernels" in applying(GPU, *ready)
    for lacks in (
        "layout.compile=false",
        "model.channels_last=false",
        "model.name=vit",
        "tune.conv_kernels=true",
        "layout=compile=true,spatial=2x1",
    ):
        assert "convolutional kernels" not in applying(GPU, *ready, lacks)
    ranks = [*ready, "layout.dp=2"]
    assert "convolutional kernels" in applying(GPU, *ranks)
    assert "convolutional kernels" not in applying(GPU, *ranks, "ddp.sync_batch_norm=true")


def test_synchronisations_are_named_by_file_and_line() -> None:
    stalls = (
        Stall("train.py:12 (main)", 0.2, 1.0, "aten::item", "loss.item()"),
        Stall("train.py:20 (main)", 0.3, 1.0, "Python", "slow()"),
        Stall("train.py:30 (main)", 0.001, 1.0, "aten::item", "x.item()"),
    )
    measured = Measured("recipe a", "cuda", "a GPU", 1.0, stalls=stalls)
    config = load_config(None, LLAMA).config
    reason = REMEDIES["host synchronisations"].applies(measured, config)
    assert reason == "the host waits for the device at train.py:12 (main): `loss.item()`"
    on_cpu = dataclasses.replace(measured, device_kind="cpu")
    assert REMEDIES["host synchronisations"].applies(on_cpu, config) is None


def test_predictions_are_amdahls() -> None:
    assert amdahl(GPU, 0.5) == 2.0
    assert amdahl(GPU, 5.0) == pytest.approx(20.0)  # never without end
    gains = applying(GPU)
    assert gains["bf16"] > gains["tf32"] > gains["fused optimizer"] > 1
    assert gains["reading threads"] == pytest.approx(1 / 0.82)


def test_a_search_for_convolutions_promises_what_they_take() -> None:
    step = dataclasses.replace(GPU, classes={"matrix": 0.6})
    image = ["data.source=synthetic", "tune.search_convolutions=false"]
    vit = ["model.name=vit", "model.args={image_size: 32, patch: 8, width: 64, depth: 2, heads: 2}"]
    assert applying(step, *image, *vit)["convolution search"] == 1.0
    resnet = ["model.name=resnet18", "model.args={}"]
    assert applying(step, *image, *resnet)["convolution search"] == pytest.approx(1 / 0.91)


@pytest.mark.parametrize("name", sorted(REMEDIES))
def test_every_remedy_changes_something_or_says_what_to_do(name: str) -> None:
    remedy = REMEDIES[name]
    config = load_config(None, [*LLAMA, "layout=accumulate=4,dp=2,recompute=full"]).config
    changes = remedy.change(config)
    assert bool(changes) != bool(remedy.advice)
    assert remedy.risk in ("none", "order", "rounding")
    assert remedy.predicted_gain(GPU, config) >= 1.0
    if not changes:
        return
    needs = {
        "CUDA graphs": ["layout.compile=true"],
        "compile in one piece": ["layout.compile=true", "tune.compile_mode=regional"],
        "less accumulation": ["layout.accumulate=4"],
        "no recompute": ["layout.recompute=full"],
        "augment on the device": ["data.augment.where=host"],
        "convolution search": ["tune.search_convolutions=false"],
    }
    before = load_config(None, [*LLAMA, *needs.get(name, [])]).config
    assert change_config(before, tuple(remedy.change(before))) != before


def test_padding_promises_what_the_odd_layers_take() -> None:
    """One odd layer at the end of a convolutional network is not worth a state."""
    padding, step = REMEDIES["padding"], Parts(step_s=0.1, device_kind="cuda")
    images = [*SETTINGS[3:], "data.source=synthetic", "model.name=resnet50", "model.args={}"]
    resnet = load_config(None, images).config
    assert padding.applies(step, resnet) is not None  # 1,000 classes
    assert padding.predicted_gain(step, resnet) < LEAST_PREDICTED
    text = [*SETTINGS[3:], "data.source=synthetic", "model.name=llama"]
    sides = "width: 512, depth: 2, heads: 8, vocab: 512"
    ffn = load_config(None, [*text, f"model.args={{{sides}, ffn: 1000}}"]).config
    vocab = load_config(None, [*text, "model.args={width: 512, depth: 8, heads: 8, vocab: 1000}"])
    assert 1.02 < padding.predicted_gain(step, ffn) < amdahl(step, 0.1 * 0.07)
    assert 1.0 < padding.predicted_gain(step, vocab.config) < padding.predicted_gain(step, ffn)


def test_parts_of_a_batch_are_put_together_before_the_residual_stream_in_fp8() -> None:
    """In 8 bits a part costs much, and what is worth trying after it depends on it."""
    step = Parts(step_s=0.3, device_kind="cuda")
    parts, residual = REMEDIES["less accumulation"], REMEDIES["narrow residual"]
    fp8 = load_config(None, [*LLAMA, "layout=precision=fp8,accumulate=2,compile=true"]).config
    bf16 = load_config(None, [*LLAMA, "layout=precision=bf16,accumulate=2,compile=true"]).config
    assert parts.predicted_gain(step, fp8) > residual.predicted_gain(step, fp8)
    assert parts.predicted_gain(step, bf16) < parts.predicted_gain(step, fp8)


def test_parts_of_a_batch_are_put_together_as_they_divide() -> None:
    parts = REMEDIES["less accumulation"]
    for before, after in ((2, 1), (3, 1), (6, 3), (9, 3), (5, 1)):
        config = load_config(None, [*LLAMA, f"layout=accumulate={before}"]).config
        assert parts.applies(Parts(step_s=0.3), config) is not None
        assert parts.change(config) == [f"layout.accumulate={after}"]


@pytest.mark.parametrize(("used", "applies"), [(50.0, True), (95.0, False)])
def test_activations_are_kept_where_memory_is_free(used: float, applies: bool) -> None:
    from types import SimpleNamespace

    step: Any = SimpleNamespace(**vars(Parts(step_s=0.3)), memory=Memory(100.0, used))
    config = load_config(None, [*LLAMA, "layout=recompute=full"]).config
    said = REMEDIES["no recompute"].applies(step, config)
    assert (said is not None) == applies
    assert not applies or "50% of the memory is free" in str(said)


WAITING = Parts(step_s=0.3, comm_exposed_s=0.06)
"""A fifth of it for other ranks."""


@pytest.mark.parametrize(
    ("layout", "applying"),
    [
        ("dp=1", set()),
        ("dp=2", {"gradient buckets", "smaller gradient buckets", "gradients in bf16"}),
        ("dp=2,compress=bf16", {"gradient buckets", "smaller gradient buckets"}),
        ("dp=2,zero=2", {"gradient buckets", "smaller gradient buckets"}),
        ("dp=2,zero=1", {"gradient buckets"}),  # nothing is reduced before the end of backward
        ("dp=2,pp=2,microbatches=2", {"gradient buckets"}),
        ("dp=2,sync=local:4", set()),
        ("dp=2,zero=3", {"weights not sharded"}),
        ("dp=4,zero=3,shard=2", {"weights not sharded"}),
        ("dp=2,tp=2,zero=3", {"weights not sharded"}),
    ],
)
def test_what_is_tried_where_ranks_wait_for_each_other(layout: str, applying: set[str]) -> None:
    """Of all that changes how ranks exchange, what the layout has, and nothing where nobody waits."""
    names = (
        "gradient buckets",
        "smaller gradient buckets",
        "gradients in bf16",
        "weights not sharded",
    )
    config = load_config(None, [*LLAMA, f"layout={layout}", "ddp.bucket_mb=8"]).config
    assert {n for n in names if REMEDIES[n].applies(WAITING, config)} == applying
    assert not any(
        REMEDIES[n].applies(Parts(step_s=0.3, comm_exposed_s=0.005), config) for n in names
    )
    for name in applying:  # each leads to a configuration that can be run
        assert change_config(config, tuple(REMEDIES[name].change(config))) != config


def test_a_bubble_is_nothing_that_buckets_mend() -> None:
    from types import SimpleNamespace

    step: Any = SimpleNamespace(**vars(WAITING), pipeline=SimpleNamespace(bubble_s=0.055))
    config = load_config(None, [*LLAMA, "layout=dp=2,pp=2,microbatches=2"]).config
    assert REMEDIES["gradient buckets"].applies(step, config) is None


def test_what_larger_buckets_have_gained_is_not_undone() -> None:
    config = load_config(None, [*LLAMA, "layout=dp=2", "ddp.bucket_mb=4"]).config
    both = [REMEDIES["gradient buckets"], REMEDIES["smaller gradient buckets"]]
    waiting = Waiting(both)
    assert [p.remedy.name for p in waiting.rank(WAITING, config)] == [r.name for r in both]
    waiting.take(both[0])
    waiting.note_kept(both[0])
    assert [p.remedy.name for p in waiting.rank(WAITING, config)] == ["gradient buckets"]


@pytest.mark.parametrize(("told", "comm_s"), [(0.0, 0.30), (0.25, 0.25)])
def test_what_ranks_save_is_taken_from_communication(told: float, comm_s: float) -> None:
    """Also where the step's own clock does not tell of it, as a script's."""
    step = Parts(step_s=1.0, comm_exposed_s=0.6, launch_s=0.05, classes={"matrix": 0.35})
    after = carry(step, Parts(step_s=0.7, comm_exposed_s=told), of_ranks=True)
    assert after.comm_exposed_s == pytest.approx(comm_s)
    kept = carry(step, Parts(step_s=0.8))  # by what shortens kernels
    assert kept.comm_exposed_s == pytest.approx(0.6)
    assert kept.classes["matrix"] == pytest.approx(0.35 * 0.2 / 0.4)
    if not told:
        assert after.classes["matrix"] == pytest.approx(0.35)


def test_a_full_device_has_no_room_for_what_a_layout_saves() -> None:
    """By the state's own clock, as in a climb."""
    for name, layout in (
        ("no recompute", "recompute=full"),
        ("no offload", "offload=activations"),
        ("weights not sharded", "dp=2,zero=3"),
    ):
        config = load_config(None, [*LLAMA, f"layout={layout}"]).config
        for free, applies in ((40e9, True), (2e9, False), (0.0, False)):
            step = dataclasses.replace(WAITING, capacity_bytes=80e9, free_bytes=free)
            assert (REMEDIES[name].applies(step, config) is not None) == applies
        assert REMEDIES[name].applies(WAITING, config) is not None  # of which nothing is known


def test_buckets_grow_until_one_has_all_gradients() -> None:
    config = load_config(None, [*LLAMA, "layout=dp=2", "ddp.bucket_mb=1"]).config
    larger, sizes = REMEDIES["gradient buckets"], [1.0]
    while larger.applies(WAITING, config):
        config = change_config(config, tuple(larger.change(config)))
        sizes.append(config.ddp.bucket_mb)
    gradients_mb = 4 * look_at(config).num_parameters / 2**20
    assert sizes == [4.0**n for n in range(len(sizes))]
    assert sizes[-2] < gradients_mb <= sizes[-1]
    assert larger.repeats


def test_weights_are_whole_again_without_their_groups() -> None:
    config = load_config(None, [*LLAMA, "layout=dp=4,zero=3,shard=2"]).config
    assert REMEDIES["weights not sharded"].change(config) == ["layout=dp=4,zero=2"]


@pytest.mark.parametrize(("used", "applies"), [(50.0, True), (95.0, False)])
@pytest.mark.parametrize("kept", ["optimizer", "params", "activations"])
def test_what_is_on_the_host_comes_back_where_memory_is_free(
    used: float, applies: bool, kept: str
) -> None:
    from types import SimpleNamespace

    step: Any = SimpleNamespace(**vars(Parts(step_s=0.3)), memory=Memory(100.0, used))
    zero = "dp=2,zero=3," if kept == "params" else ""
    config = load_config(None, [*LLAMA, f"layout={zero}offload={kept}"]).config
    assert (REMEDIES["no offload"].applies(step, config) is not None) == applies
    assert REMEDIES["no offload"].predicted_gain(step, config) > 1.3
    plain = load_config(None, LLAMA).config
    assert REMEDIES["no offload"].applies(step, plain) is None


def test_a_state_whose_loader_stalls_now_and_then_is_seen_to_wait():
    from types import SimpleNamespace

    import torch

    from ridgeline.doctor.candidate import Runner

    def steps():
        for number in range(12):
            waited = 0.6 if number % 6 == 0 else 0.0
            times = SimpleNamespace(
                read=lambda waited=waited: {"data_s": waited, "step_s": 0.1 + waited}
            )
            yield SimpleNamespace(loss_share=torch.zeros(()), times=times)

    runner = Runner.__new__(Runner)
    info = SimpleNamespace(unit="samples", units_per_sample=1)
    runner.device, runner._steps = torch.device("cpu"), steps()
    runner.training = SimpleNamespace(
        config=load_config(
            None, ["model.name=mlp", "data.source=digits", "data.prefetch=0", "train.steps=12"]
        ).config,
        loader=SimpleNamespace(source=SimpleNamespace(info=info)),
        mesh=SimpleNamespace(
            layout=SimpleNamespace(graphs=False),
            env=SimpleNamespace(world_size=1),
            sum_over_data=lambda losses: losses,
        ),
        notes=[],
    )
    assert runner.turn(0, 12)["parts"]["data_s"] == pytest.approx(0.1)
