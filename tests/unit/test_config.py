"""From YAML, overrides and defaults to a checked configuration, and where each value came from."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.config import (
    RECIPES,
    Resolved,
    RunConfig,
    dump_config,
    find_recipe,
    load_config,
    recipe_names,
    show_config,
)
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.typed import leaves, to_plain

MINIMAL = "model: {name: mlp}\ndata: {source: digits}\ntrain: {steps: 1}\n"
NEEDED = ("model.name=mlp", "data.source=digits", "train.steps=1")


def load(path: Path, text: str, *overrides: str) -> Resolved:
    recipe = path / "recipe.yaml"
    recipe.write_text(text, encoding="utf-8")
    return load_config(recipe, overrides)


def value_of(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def refused(*overrides: str) -> str:
    """The one-line error of a sound configuration with these overrides."""
    with pytest.raises(UsageError) as error:
        load_config(None, [*NEEDED, *overrides])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.augment.crop=random", ["'random'", "data.augment.crop", "resized"]),
        ("data.augment.flip_vertical=1.5", ["flip_vertical=1.5 is too large; the most is 1"]),
        ("data.augment.hue=0.6", ["hue=0.6 is too large; the most is 0.5"]),
        ("data.augment.mixup=-1", ["mixup=-1.0 is too small"]),
        ("data.augment.size=[3]", ["size=[3]", "a height and a width"]),
        ("data.augment.area=[0.5, 0.2]", ["area=[0.5, 0.2]", "the lower first"]),
        ("data.augment.area=[0.5, 2]", ["area=[0.5, 2.0]", "at most 1"]),
        ("data.augment.std=[1, 0]", ["std=[1.0, 0.0] has a 0"]),
        ("data.augment.mean=[.nan]", ["mean=[nan]", "finite"]),
        ("data.augment.mixip=1", ["data.augment.mixip", "did you mean data.augment.mixup?"]),
    ],
)
def test_augmentation_out_of_range_is_refused(override: str, said: list[str]) -> None:
    message = refused(override)
    for part in said:
        assert part in message


# Resolving.


def test_an_override_beats_the_recipe_which_beats_the_default(tmp_path: Path) -> None:
    text = MINIMAL + "optim: {name: sgd, momentum: 0.9}\n"
    config = load(tmp_path, text, "optim.momentum=0.5", "train.steps=7").config
    assert config.optim.momentum == 0.5
    assert config.train.steps == 7
    assert config.optim.name == "sgd"
    assert config.optim.weight_decay == RunConfig().optim.weight_decay
    assert config.model.name == "mlp"


def test_of_two_overrides_of_a_key_the_last_counts() -> None:
    config = load_config(None, [*NEEDED, "train.lr=1", "train.lr=2"]).config
    assert config.train.lr == 2.0


def test_empty_sections_and_empty_files_are_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "train:\noptim:\nmodel: {args: }\n", *NEEDED).config.train.lr == 1e-3
    assert load(tmp_path, "", *NEEDED) == load(tmp_path, "# nothing\n", *NEEDED)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.lr=1e-3", 1e-3),
        ("train.lr=1", 1.0),
        ("train.lr='0.5'", 0.5),
        ("train.batch=64.0", 64),
        ("train.batch=1_024", 1024),
        ("train.batch=1e3", 1000),
        ("train.epochs=null", None),
        ("train.epochs=", None),
        ("train.clip=~", None),
        ("data.drop_last=true", True),
        ("log.tensorboard=yes", "yes"),
        ("log.tensorboard=no", "no"),
        ("name=7", "7"),
        ("name=a=b", "a=b"),
        ("optim.betas=[0.8, 1e-2]", (0.8, 0.01)),
        ("schedule.step_epochs=[30, 60, 80]", (30, 60, 80)),
        ("schedule.step_epochs=[]", ()),
        ("model.args.width=64", 64),
        ("model.args.norm_eps=1e-5", 1e-5),
        ("model.args.sizes=[1, 2e-1]", [1, 0.2]),
        ("model.args.deep.er=text", "text"),
        ("model.args.nothing=null", None),
        ("train.target.accuracy=0.9", 0.9),
        ("train.target.loss=1e-2", 0.01),
        ("data.args.path=/a/b=c", "/a/b=c"),
    ],
)
def test_values_come_out_in_their_fields_type(override: str, value: Any) -> None:
    found = value_of(
        load_config(None, [*NEEDED, override]).config, override.partition("=")[0].strip()
    )
    assert found == value
    assert type(found) is type(value)


def test_numbers_in_open_sections_of_a_file_are_numbers(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "model.args={a: 1e-5, b: '1e-5', c: 1.5e3, d: e5}").config
    assert config.model.args == {"a": 1e-5, "b": "1e-5", "c": 1500.0, "d": "e5"}
    config = load(tmp_path, MINIMAL.replace("mlp}", "mlp, args: {eps: 1e-5}}")).config
    assert config.model.args == {"eps": 1e-5}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.batch=2.5", ["train.batch=2.5", "whole number"]),
        ("train.batch=true", ["train.batch=True", "whole number"]),
        ("train.batch=many", ["train.batch='many'", "whole number"]),
        ("train.batch=", ["train.batch", "whole number"]),
        ("train.epochs=x", ["train.epochs='x'", "a whole number or null"]),
        ("train.lr=fast", ["train.lr='fast'", "a number"]),
        ("train.lr=true", ["train.lr=True", "a number"]),
        ("data.drop_last=1", ["data.drop_last=1", "true or false"]),
        ("optim.betas=[0.9]", ["optim.betas=[0.9]", "list"]),
        ("optim.betas=0.9", ["optim.betas=0.9", "list"]),
        ("optim.betas=[a, b]", ["optim.betas", "list"]),
        ("model.args=3", ["model.args=3", "mapping"]),
        ("train.target.accuracy=high", ["train.target", "'high'", "numbers"]),
        ("train.target.accuracy=", ["train.target", "numbers"]),
        ("name=[a]", ["name=['a']", "text"]),
        ("train=3", ["train", "section", "3"]),
    ],
)
def test_a_value_of_the_wrong_type_is_named(override: str, said: list[str]) -> None:
    message = refused(override)
    for part in said:
        assert part in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.bach=3", ["train.bach", "did you mean train.batch?"]),
        ("optim.ema_warmp=no", ["optim.ema_warmp", "did you mean optim.ema_warmup?"]),
        ("optim.wieght_decay=3", ["optim.wieght_decay", "did you mean optim.weight_decay?"]),
        ("optim.lr=3", ["optim.lr", "did you mean train.lr?"]),
        ("train.momentum=3", ["train.momentum", "did you mean optim.momentum?"]),
        ("training.batch=3", ["training", "did you mean train?"]),
        ("batch=3", ["batch", "did you mean train.batch?"]),
        ("train.zzzzqqqq=3", ["train.zzzzqqqq", "known here: task, batch"]),
    ],
)
def test_an_unknown_key_is_refused_with_the_likeliest(override: str, said: list[str]) -> None:
    message = refused(override)
    for part in ["unknown key", *said]:
        assert part in message


def test_an_unknown_key_that_resembles_nothing_gets_no_guess() -> None:
    assert "did you mean" not in refused("train.zzzzqqqq=3")


def test_an_unknown_key_of_a_recipe_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown key optim\.lr; did you mean train\.lr\?"):
        load(tmp_path, MINIMAL + "optim: {lr: 1}\n")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lr", ["'train.lr'", "KEY=VALUE", "train.lr=0.1"]),
        ("=3", ["'=3'", "KEY=VALUE"]),
        ("", ["KEY=VALUE"]),
        ("train.lr=[1", ["'train.lr=[1'", "not valid YAML"]),
        ("name=2024-13-45", ["'name=2024-13-45'", "not valid YAML"]),
        ("name.first=a", ["name.first", "name is a value, not a section"]),
        ("train.lr.peak=3", ["train.lr={'peak': 3}", "a number"]),
    ],
)
def test_an_override_that_cannot_be_read_is_quoted(
    tmp_path: Path, override: str, said: list[str]
) -> None:
    with pytest.raises(UsageError) as error:
        load(tmp_path, MINIMAL + "name: x\n", override)
    for part in said:
        assert part in str(error.value)


def test_an_override_changes_one_of_two_sections_that_share_an_anchor(tmp_path: Path) -> None:
    text = "model: {name: mlp, args: &a {n: 1}}\ndata: {source: digits, args: *a}\n"
    config = load(tmp_path, text, "train.steps=1", "model.args.n=2").config
    assert config.model.args == {"n": 2}
    assert config.data.args == {"n": 1}


# Layouts.


def test_a_layout_field_is_set_and_dp_stays_unsaid() -> None:
    config = load_config(None, [*NEEDED, "layout.precision=bf16"]).config
    assert config.layout == "precision=bf16"
    assert Layout.parse_for(config.layout, 4) == Layout(dp=4, precision="bf16")


def test_layout_fields_add_to_what_the_recipe_says(tmp_path: Path) -> None:
    text = MINIMAL + "layout: dp=2,compile=true\n"
    resolved = load(tmp_path, text, "layout.precision=bf16", "layout.compile=false")
    layout = Layout.parse(resolved.config.layout)
    assert layout == Layout(dp=2, precision="bf16", compile=False)
    assert resolved.origin["layout"] == "command line"
    assert load(tmp_path, text, "layout=dp=4,zero=1").config.layout == "dp=4,zero=1"


def test_a_wrong_layout_is_refused_before_anything_runs() -> None:
    assert "did you mean 'precision'" in refused("layout.precison=bf16")
    assert "precision=bf61" in refused("layout=precision=bf61")


# What types cannot say.


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.name=adamv", ["'adamv' in optim.name", "did you mean 'adam", "sgd"]),
        ("schedule.name=cosin", ["schedule.name", "'cosine'"]),
        ("train.lr_rule=squareroot", ["train.lr_rule", "sqrt"]),
        ("model.dtype=fp32", ["model.dtype", "float32"]),
        ("device=gpu", ["device", "cuda"]),
        ("log.tensorboard=maybe", ["log.tensorboard", "auto"]),
        ("train.batch=0", ["train.batch=0", "least is 1"]),
        ("train.steps=0", ["train.steps=0", "least is 1"]),
        ("train.lr=-1e-3", ["train.lr=-0.001", "least is 0"]),
        ("train.lr=.nan", ["train.lr=nan"]),
        ("train.clip=-1", ["train.clip=-1.0"]),
        ("optim.momentum=-0.9", ["optim.momentum=-0.9", "least is 0"]),
        ("optim.eps=-1", ["optim.eps=-1.0", "least is 0"]),
        ("optim.betas=[0.9, 1.5]", ["optim.betas=[0.9, 1.5]", "below 1"]),
        ("optim.betas=[-0.1, 0.9]", ["optim.betas=[-0.1, 0.9]", "below 1"]),
        ("log.every=0", ["log.every=0", "least is 1"]),
        ("threads=0", ["threads=0", "least is 1"]),
        ("data.workers=-1", ["data.workers=-1", "least is 0"]),
        ("model.name=", ["model.name"]),
        ("model.name=''", ["model.name is not set"]),
        ("data.source=''", ["data.source is not set"]),
        ("train.steps=null", ["train.epochs", "train.steps", "never end"]),
    ],
)
def test_choices_ranges_and_what_a_run_needs(override: str, said: list[str]) -> None:
    message = refused(override)
    for part in said:
        assert part in message


def test_either_limit_is_enough() -> None:
    for limit in ("train.epochs=3", "train.steps=3"):
        load_config(None, [*NEEDED[:2], limit])


# Origins.


def test_every_value_has_an_origin() -> None:
    path = find_recipe("digits")
    resolved = load_config(path, ["train.lr=0.1", "model.args.width=3", "layout.precision=bf16"])
    assert list(resolved.origin) == leaves(to_plain(resolved.config))
    said = {"train.lr", "model.args.width", "layout"}
    in_recipe = set(leaves(yaml.safe_load(path.read_text()))) - said
    for key, origin in resolved.origin.items():
        expected = "command line" if key in said else "digits.yaml"
        assert origin == (expected if key in said | in_recipe else "default"), key


def test_an_override_of_a_whole_section_is_the_origin_of_what_is_in_it(tmp_path: Path) -> None:
    text = "model: {name: mlp, args: {a: 1, b: 2}}\ndata: {source: digits}\n"
    resolved = load(tmp_path, text, "train.steps=1", "model.args={a: 5}")
    assert resolved.config.model.args == {"a": 5}
    assert resolved.origin["model.args.a"] == "command line"
    assert "model.args.b" not in resolved.origin


# Writing it down.

AWKWARD = {
    "dots": "to be continued...",
    "hash": "a # b",
    "colon": "a: b",
    "lines": "a\nb\n\n  c",
    "tab": "a\tb",
    "yes": "yes",
    "number": "1e-3",
    "digits": "12",
    "null": "null",
    "empty": "",
    "spaces": "  a ",
    "wide": "ä" * 300 + " x" * 300,
    "tiny": 1e-7,
    "huge": 1e22,
    "endless": math.inf,
    "nested": {"list": [1, [2, {"a": None}]], "no": {}, "12": "key of digits", "a: b": 1},
    7: "a number as key",
}


@pytest.mark.parametrize("show", [False, True])
@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_being_written_and_read(
    tmp_path: Path, name: str, show: bool
) -> None:
    resolved = load_config(RECIPES / f"{name}.yaml")
    text = show_config(resolved) if show else dump_config(resolved.config)
    assert load(tmp_path, text).config == resolved.config


@pytest.mark.parametrize("show", [False, True])
def test_awkward_values_survive_being_written_and_read(tmp_path: Path, show: bool) -> None:
    base = load_config(None, NEEDED)
    model = dataclasses.replace(base.config.model, args=AWKWARD)
    config = dataclasses.replace(base.config, model=model, name="a run...", device="cpu")
    text = show_config(Resolved(config, base.origin)) if show else dump_config(config)
    assert load(tmp_path, text).config == config


def test_show_says_where_each_line_came_from() -> None:
    text = show_config(load_config(find_recipe("digits"), ["train.lr=0.1"]))
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}
    assert lines["lr"].split("#")[1].strip() == "command line"
    assert lines["epochs"].split("#")[1].strip() == "digits.yaml"
    assert lines["eval_every"].split("#")[1].strip() == "default"
    assert all("#" in line or line.endswith(":") for line in text.splitlines())


# Files.


def test_broken_yaml_names_the_file_and_the_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe\.yaml, line 4"):
        load(tmp_path, "model:\n  name: mlp\ntrain: {steps: 1}\n  lr: : 2\n")


def test_a_date_that_is_none_is_an_error_of_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe\.yaml.*month"):
        load(tmp_path, MINIMAL + "name: 2024-13-45\n")


@pytest.mark.parametrize("content", [b"\x00\x01\x02\xff\xfe", b"\x89PNG\r\n", b"name: \xff"])
def test_a_binary_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    recipe = tmp_path / "weights.yaml"
    recipe.write_bytes(content)
    with pytest.raises(UsageError, match=r"weights\.yaml"):
        load_config(recipe)


@pytest.mark.parametrize("text", ["- a\n- b\n", "just text", "42"])
def test_a_recipe_is_a_mapping(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"recipe\.yaml: a recipe is a mapping"):
        load(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the recipe .*gone\.yaml"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(UsageError, match="cannot read the recipe"):
        load_config(tmp_path)


def test_recipes_are_found_by_name_and_by_path(tmp_path: Path) -> None:
    assert find_recipe("digits") == RECIPES / "digits.yaml"
    mine = tmp_path / "mine.yaml"
    mine.write_text(MINIMAL)
    assert find_recipe(str(mine)) == mine
    with pytest.raises(UsageError, match=r"'digit'.*did you mean 'digits'"):
        find_recipe("digit")
    for gone in (tmp_path / "gone.yaml", tmp_path):
        with pytest.raises(UsageError, match=f"no recipe file at {gone}.*digits"):
            find_recipe(str(gone))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(MINIMAL)
    with pytest.raises(UsageError, match=f"{run} is the directory of a run.* is {run}/config.yaml"):
        find_recipe(str(run))


def test_a_target_that_is_never_evaluated_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.target .* train\.eval_samples=0"):
        load_config(find_recipe("digits"), ["train.eval_samples=0"])


def test_a_key_that_stands_twice_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text("train: {lr: 1}\ndata: {}\ntrain: {lr: 2}\n")
    with pytest.raises(UsageError, match=r"twice\.yaml, line 3: the key 'train' stands twice"):
        load_config(recipe)


@pytest.mark.parametrize("override", ["train.lr=.inf", "train.lr=.nan", "train.clip=.inf"])
def test_numbers_are_finite(override: str) -> None:
    with pytest.raises(UsageError, match="is not a finite number"):
        load_config(find_recipe("digits"), [override])


@pytest.mark.parametrize("name", ["../evil", "a/b", ".hidden", "''"])
def test_a_name_stays_in_its_directory(name: str) -> None:
    with pytest.raises(UsageError, match="directory's name"):
        load_config(find_recipe("digits"), [f"name={name}"])


def test_settings_of_a_script_are_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "climbed.yaml"
    path.write_text("layout: precision=bf16\ntune: {fused_optimizer: true}\nchannels_last: true\n")
    with pytest.raises(UsageError, match="a script's settings and is no recipe; RIDGELINE_TUNE="):
        load_config(path)
