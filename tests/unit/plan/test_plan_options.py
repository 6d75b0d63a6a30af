"""Options of `ridgeline plan`: each does what it says, and what cannot act is refused in a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from ridgeline.cli import app
from ridgeline.config import load_config
from ridgeline.errors import RunError, UsageError
from ridgeline.plan.machine import MACHINES

SMALL = ("350m", "--machine", "h200", "--batch", "64")
RECIPE = """\
# A recipe of one's own.
name: mine
model: {name: llama, args: {size: 1m}}
layout:
  dp=1
data: {source: synthetic, args: {kind: tokens, shape: [64], classes: 128}}  # after it
train: {batch: 32, steps: 4}
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args])


def refused(*args: str) -> str:
    done = run(*args)
    assert isinstance(done.exception, UsageError), done.output
    return str(done.exception)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    load_config(path, [])
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("devices_per_node=nan", "devices_per_node in --what-if is no count"),
        ("devices_per_node=0", "devices_per_node in --what-if is no count"),
        ("inter.bandwidth=0", "inter.bandwidth in --what-if is no value"),
        ("inter.bandwidth=-5e9", "inter.bandwidth in --what-if is no value"),
        ("device.peak_flops.fp3=1e15", "changes nothing"),
        ("device.name=5", "changes nothing"),
    ],
)
def test_values_that_no_machine_has(change: str, words: str) -> None:
    assert words in refused(*SMALL, "-N", "2", "--what-if", change)


def test_what_if_reaches_the_peak_of_one_precision() -> None:
    plain = run(*SMALL, "--explain", "dp=8,accumulate=1")
    faster = run(
        *SMALL, "--explain", "dp=8,accumulate=1", "--what-if", "device.peak_flops.bf16=9e15"
    )
    other = run(
        *SMALL, "--explain", "dp=8,accumulate=1", "--what-if", "device.peak_flops.fp16=9e15"
    )
    assert plain.output == other.output != faster.output
    assert run(*SMALL, "--what-if", "inter.latency_s=0").exit_code == 0


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("spatial=8", "no model of spatial"),
        ("dp=8,sync=async", "no model of sync=async"),
    ],
)
def test_what_has_no_price_is_not_explained(layout: str, words: str) -> None:
    assert words in refused(*SMALL, "--explain", layout)


def test_a_sequence_that_ranks_cannot_share() -> None:
    text = refused(*SMALL, "--seq", "8191", "--explain", "cp=8")
    assert "cp=8" in text
    assert "8191 tokens" in text


def test_the_price_of_a_profile_counts(tmp_path: Path) -> None:
    values = yaml.safe_load((MACHINES / "h200.yaml").read_text())
    path = tmp_path / "priced.yaml"
    path.write_text(yaml.safe_dump({**values, "price_per_device_hour": 3.5}))
    common = ("350m", "--machine", str(path), "--batch", "64", "--top", "1", "--tokens", "1e12")
    own, other = run(*common), run(*common, "--price", "7")
    costs = [
        float(done.output.splitlines()[2].split()[-1].replace(",", "")) for done in (own, other)
    ]
    assert costs[1] == pytest.approx(2 * costs[0], rel=0.01)
    assert run(*common, "--by", "cost").exit_code == 0
    assert "needs a price" in refused(*SMALL, "--by", "cost")


def test_why_compares_like_with_like() -> None:
    """Nearly all of it is waiting for samples, on one node: only storage would change that."""
    slow = ("--what-if", "storage_bandwidth=1e6", "--sample-bytes", "1e5", "--why")
    text = run(*SMALL, *slow).output
    assert "with twice the rate of storage: 100 % faster" in text
    assert "between nodes" not in text
    assert "40 GB more memory a device: no change" in text
    small = run(*SMALL, "--by", "memory", "--why").output
    assert "40 GB more memory a device: no change" in small


def test_a_machine_is_asked_for_with_what_there_is() -> None:
    assert "plan needs --machine: a name that `ridgeline plan machines` lists" in refused("350m")


def test_why_says_what_each_technique_gains() -> None:
    """What takes its place is the best of all layouts without it, found by a search of its own."""
    job = ("llama3-70b", "--machine", "h200", "-N", "8", "--batch", "512")
    text = run(*job, "--top", "1", "--why").output
    assert "without tp" not in text  # the best does without
    seen = {}
    for name in ("cp", "pp", "zero"):
        line = next(line for line in text.splitlines() if line.startswith(f"  without {name}: "))
        found = re.fullmatch(r".*: (\d+) % slower \([\d.]+ s, (\S+)\)", line)
        assert found, line
        slower, layout = found.groups()
        assert not re.search(rf"(?:^|,){name}=", layout), line
        seen[name] = int(slower)
    assert seen["zero"] > seen["pp"] > seen["cp"] > 0
    small = ("--what-if", "device.memory_bytes=26e9", "--what-if", "host_memory_bytes=1e9")
    text = run(
        "llama3-8b", "--machine", "h200", "--batch", "8", *small, "--top", "1", "--why"
    ).output
    assert "without tp: nothing fits" in text
    by_memory = run(*SMALL, "--by", "memory", "--why").output
    assert "without" not in by_memory


def test_with_says_what_is_not_chosen() -> None:
    text = run(*SMALL, "--with", "compile=true", "--top", "2").output
    assert text.count("compile=true") == 2
    for field in ("tp=2", "dp=8,ep=2", "graphs=true", "precision=fp16"):
        assert "the search chooses the rest" in refused(*SMALL, "--with", field)
    assert "no model of sync=async" in refused(*SMALL, "--with", "sync=async")
    assert "compile=true" in run(*SMALL, "--with", "compile=true", "--scale", "1..2").output


def test_samples_of_its_own() -> None:
    assert "has its own samples" in refused(*SMALL, "--input", "3x4")


def test_a_recipe_is_planned_in_its_own_precision(recipe: Path) -> None:
    args = (str(recipe), "--machine", "h200", "--top", "1")
    assert "bf16" not in run(*args).output
    assert "precision=bf16" in run(*args, "--precision", "bf16").output
    recipe.write_text(RECIPE.replace("dp=1", "dp=1,precision=bf16"))
    assert "precision=bf16" in run(*args).output


def test_a_recipe_is_planned_with_its_own_optimizer(recipe: Path) -> None:
    args = (str(recipe), "--machine", "h200", "--explain", "dp=8")
    adam = run(*args).output
    recipe.write_text(RECIPE + "optim: {name: sgd, momentum: 0.0}\n")
    assert run(*args).output != adam


def test_write_replaces_a_layout_of_several_lines_and_nothing_else(recipe: Path) -> None:
    done = run(str(recipe), "--machine", "h200", "--write", str(recipe))
    assert done.exit_code == 0, done.output
    text = recipe.read_text()
    kept = [line for line in RECIPE.splitlines() if line not in ("layout:", "  dp=1")]
    assert text.splitlines()[:-1] == kept
    layout = load_config(recipe, []).config.layout
    assert layout
    assert layout in done.output
    assert not list(recipe.parent.glob(".*"))


def test_write_takes_the_layout_that_was_explained(recipe: Path) -> None:
    args = (str(recipe), "--machine", "h200", "--write", str(recipe))
    assert run(*args, "--explain", "dp=4,tp=2").exit_code == 0
    assert load_config(recipe, []).config.layout.startswith("dp=4,tp=2")
    assert "--scale has many" in refused(*args, "--scale", "1..2")


def test_write_is_of_the_recipes_batch(recipe: Path) -> None:
    before = recipe.read_text()
    text = refused("1m", "--machine", "h200", "--batch", "96", "--write", str(recipe))
    assert "--batch 96 is not the batch" in text
    assert recipe.read_text() == before


def test_write_leaves_a_file_that_is_no_recipe_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "notes.yaml"
    path.write_text("a: [1,\n")
    done = run("1m", "--machine", "h200", "--write", str(path))
    assert isinstance(done.exception, (RunError, UsageError))
    assert path.read_text() == "a: [1,\n"


def test_values_for_programs_are_those_of_the_table() -> None:
    table = run(*SMALL, "--top", "2", "--tokens", "1e10", "--price", "3").output.splitlines()
    done = run(*SMALL, "--top", "2", "--tokens", "1e10", "--price", "3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["model"], found["devices"], found["batch"]) == ("350m", 8, 64)
    for line, one in zip(table[2:4], found["layouts"], strict=True):
        cells = line.split()
        assert cells[0] == one["layout"]
        assert cells[2] == f"{one['step_s']:.3f}"
        assert cells[3] == f"{one['tokens_per_s']:,.0f}"
        assert cells[6] == f"{one['device_bytes'] / 1e9:.1f}"
        assert cells[-1] == f"{one['cost']:,.0f}"
        assert sum(one["time_s"].values()) == pytest.approx(one["step_s"])
        assert sum(one["memory_bytes"].values()) == pytest.approx(one["device_bytes"])
        assert one["fits"] is True
    one = json.loads(run(*SMALL, "--explain", "dp=8,precision=bf16", "--json").output)
    assert one["layout"] == "dp=8,precision=bf16"
    assert one["fits"] is True
    large = ("llama3-70b", "--machine", "h200", "--batch", "8", "--explain", "dp=8,precision=bf16")
    assert json.loads(run(*large, "--json").output)["fits"] is False


def test_values_for_programs_have_no_words_between_them(recipe: Path) -> None:
    assert "--why is told in words" in refused(*SMALL, "--json", "--why")
    assert "--write is told in words" in refused(*SMALL, "--json", "--write", str(recipe))
    assert "--json is of one number" in refused(*SMALL, "--json", "--scale", "1..2")


def test_where_nothing_fits_the_nodes_that_would_do_are_named() -> None:
    words = ("llama3-405b", "--machine", "h200", "--batch", "64")
    done = run(*words, "--top", "1")
    assert isinstance(done.exception, RunError), done.output
    said = str(done.exception)
    enough = int(said.rpartition("use -N ")[2])
    assert enough in (4, 8, 16)
    assert run(*words, "-N", str(enough), "--top", "1").exit_code == 0
    half = run(*words, "-N", str(enough // 2), "--top", "1")
    assert f"use -N {enough}" in str(half.exception)


def test_one_layout_takes_no_options_of_the_search() -> None:
    one = (*SMALL, "--explain", "dp=8,precision=bf16")
    assert "--why ranks layouts, and --explain has one" in refused(*one, "--why")
    assert "--by ranks layouts" in refused(*one, "--by", "memory")
    assert "--top ranks layouts" in refused(*one, "--top", "3")
    assert "write it into the layout" in refused(*one, "--with", "compile=true")
    assert "--by is of one number of nodes" in refused(*SMALL, "--scale", "1..2", "--by", "memory")
    said = run(*one, "--tokens", "1e10").output
    found = json.loads(run(*one, "--tokens", "1e10", "--json").output)
    assert f"in {found['days']:.3g} days" in said


def test_a_recipe_is_planned_with_changes_and_beside_its_own_layout() -> None:
    def call(*args: str) -> Result:
        return CliRunner().invoke(app, ["plan", *args, "--machine", "h100", "--top", "1"])

    plain = call("llama-text")
    assert "the recipe's own layout, dp=8" in plain.output
    other = call("llama-text", "train.batch=96", "layout=tp=2", "model.args.depth=4")
    assert "batch 96" in other.output
    words = next(line for line in other.output.splitlines() if "own layout" in line)
    assert words.startswith("the recipe's own layout, dp=4,tp=2: ")
    assert float(words.partition(" s a step, ")[2].split()[0]) > 1.0
    none = call("llama-text", "layout=tp=3")
    assert "the recipe's own layout, tp=3, is none for 8 devices" in none.output
    assert none.exit_code == 0
    assert "changes a recipe, and 1.3b is none" in str(call("1.3b", "train.batch=2").exception)
    assert "own layout" not in call("1.3b", "--batch", "64").output
