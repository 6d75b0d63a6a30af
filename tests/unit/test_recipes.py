"""Every recipe that ships: it says what it is, fits together, splits over two ranks, and runs."""

import math

import pytest
import torch

from ridgeline.config import RECIPES, find_recipe, load_config, recipe_names
from ridgeline.data.build import build_sources
from ridgeline.layout import Layout, check_available, require_layout
from ridgeline.models import build_model
from ridgeline.train.checks import check_batch
from ridgeline.train.run import run_recipe
from ridgeline.train.tasks import build_task, check_target

SMALL_TEXT = ["data.args.seq_len=16", "data.args.max_bytes=20000"]
SMALL_FIELDS = ["data.args.height=8", "data.args.width=16", "data.args.samples=64"]

# What makes each recipe take a second or two; a recipe without an entry fails the test below.
SHRUNK = {
    "alexnet-digits": ["data.args.size=8", "model.args.image_size=8"],
    "bert-text": [*SMALL_TEXT, "model.args.width=32", "model.args.depth=1"],
    "digits": ["model.args.width=4"],
    "llama-text": [*SMALL_TEXT, "model.args.width=32", "model.args.depth=1"],
    "mixtral-text": [
        *SMALL_TEXT,
        *(f"model.args.config.{n}=16" for n in ("hidden_size", "intermediate_size")),
        "model.args.config.num_hidden_layers=1",
    ],
    "resnet50-synthetic": ["data.args.shape=[3,32,32]", "layout="],
    "unet-fields": [*SMALL_FIELDS, "model.args.width=4", "model.args.depth=1"],
    "vit-fields": [
        *SMALL_FIELDS,
        "model.args.image_size=[8,16]",
        "model.args.width=16",
        "model.args.depth=1",
    ],
}
TINY_RUN = [
    "train.steps=2",
    "schedule.warmup_steps=1",
    "train.batch=4",
    "train.eval_samples=4",
    "device=cpu",
]
EVERY = pytest.mark.parametrize("name", recipe_names())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(name, *overrides):
    return load_config(find_recipe(name), overrides).config


def test_every_recipe_has_a_shrunk_form():
    assert set(SHRUNK) == set(recipe_names())


@EVERY
def test_first_line_describes(name):
    first = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) <= 100
    assert config_of(name).name == name


@EVERY
def test_model_takes_what_the_source_gives(name):
    config = config_of(name)
    if config.data.source == "digits":
        pytest.importorskip("sklearn")
    sources = build_sources(config.data.source, config.data.args, config.train.seed)
    info = sources[0].info
    task = build_task(config.train.task, info.task)
    check_target(config.train.target, task)
    # Products of many experts in one kernel have another opinion of types on the meta device.
    foreign = config.model.name.startswith("transformers:")
    if foreign:
        pytest.importorskip("transformers")
    with torch.device("cpu" if foreign else "meta"):
        model = build_model(config.model.name, **config.model.args)
        outputs = model(torch.zeros((2, *info.input_shape), dtype=info.input_dtype))
    outputs = getattr(outputs, "logits", outputs)
    if info.num_classes is None:
        assert outputs.shape == (2, *info.target_shape)
    else:
        assert outputs.shape == (2, *info.target_shape, info.num_classes)
    assert len(sources[0]) >= config.train.batch


@EVERY
def test_splits_over_two_ranks(name):
    config = config_of(name)
    layout = Layout.parse_for(config.layout, 2, "layout")
    require_layout(layout, "layout")
    assert not check_available(layout)
    check_batch(config, layout)


@EVERY
def test_runs_two_steps(name):
    if config_of(name).data.source == "digits":
        pytest.importorskip("sklearn")
    summary = run_recipe(name, *SHRUNK[name], *TINY_RUN)
    assert summary.num_steps == 2
    assert summary.final_loss is not None
    assert math.isfinite(summary.final_loss)


def test_the_names_that_are_checked_without_torch_are_those_there_are() -> None:
    from ridgeline import shipped
    from ridgeline.data.build import SOURCES
    from ridgeline.models.build import MODELS
    from ridgeline.train.tasks import TASKS

    assert set(shipped.MODELS) == set(MODELS)
    assert set(shipped.SOURCES) == set(SOURCES)
    assert {name: task.metrics for name, task in TASKS.items()} == shipped.METRICS


@pytest.mark.parametrize("name", ["digits", "fields", "synthetic", "text"])
def test_what_a_source_is_for_is_known_without_torch(name) -> None:
    from ridgeline.data.build import SOURCES
    from ridgeline.shipped import NATURAL

    if name == "digits":
        pytest.importorskip("sklearn")
    assert SOURCES[name](0)[0].info.task == NATURAL[name]
