"""An error about a setting ends with the line of the recipe that it was written in, also when it is found
by a rank, which reads a copy."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.config import load_config, telling_places
from ridgeline.errors import UsageError
from ridgeline.train.run import run_recipe

RECIPE = """\
model: {name: mlp, args: {in_features: 64, hidden: 8, depth: 1, out_features: 10}}
data:
  source: SOURCE
  args:
    # ours
    KEY: VALUE
train: {batch: 4, steps: 1}
device: cpu
"""
OWN = """
def own(split, width, path=""):
    if path:
        from ridgeline.errors import UsageError
        raise UsageError(f"{path!r} is not there")
"""


def write(folder: Path, source: str, key: str, value: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(RECIPE.replace("SOURCE", source).replace("KEY", key).replace("VALUE", value))
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "placed.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "placed", raising=False)


@pytest.mark.parametrize(
    ("source", "key", "value", "words", "line"),
    [
        ("digits", "size", "big", "argument size='big' in data.args must be", 6),
        ("digits", "sise", "8", "no argument 'sise'", 6),
        ("synthetic", "shape", "[3, 0]", "shape[1]=0", 6),
        ("images", "path", "/nowhere", "'/nowhere' in data.args is not a folder", 6),
        ("images", "size", "8", "needs 'path' in data.args", 4),
        ("placed:own", "widht", "3", "no argument 'widht'", 6),
        ("placed:own", "path", "x", "needs the argument 'width'", 4),
        ("placed:owm", "width", "3", "did you mean 'own'?", 3),
    ],
)
def test_arguments_of_a_source(
    own: None, tmp_path: Path, source: str, key: str, value: str, words: str, line: int
) -> None:
    recipe = write(tmp_path, source, key, value)
    with pytest.raises(UsageError) as told:
        run_recipe(str(recipe))
    assert words in str(told.value)
    assert str(told.value).endswith(f" ({recipe}:{line})")


def test_an_error_of_the_users_that_names_an_argument(own: None, tmp_path: Path) -> None:
    recipe = write(tmp_path, "placed:own", "path", "x")
    with pytest.raises(UsageError) as told:
        run_recipe(str(recipe), "data.args.width=3")
    assert str(told.value) == f"'x' is not there ({recipe}:6)"


def test_what_the_command_line_said(tmp_path: Path) -> None:
    recipe = write(tmp_path, "digits", "size", "8")
    for override in ("data.args.size=big", "data.args={size: big}"):
        with pytest.raises(UsageError, match=r"size='big' .* \(command line\)$"):
            run_recipe(str(recipe), override)


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [("batch: 4", "batch: 0", 7), ("batch: 4", "bach: 4", 7), ("device: cpu", "device: cpuu", 8)],
)
def test_other_settings(tmp_path: Path, before: str, after: str, line: int) -> None:
    recipe = write(tmp_path, "digits", "size", "8")
    recipe.write_text(recipe.read_text().replace(before, after))
    with pytest.raises(UsageError) as told:
        load_config(recipe)
    assert str(told.value).endswith(f" ({recipe}:{line})")


def test_where_nobody_wrote_it_nothing_is_said(tmp_path: Path) -> None:
    recipe = write(tmp_path, "digits", "size", "8")
    for key in ("", "optim.name"):
        with pytest.raises(UsageError, match=r"^wrong$"), telling_places(recipe):
            raise UsageError("wrong", key=key)


def test_an_error_keeps_its_setting_on_the_way_between_processes() -> None:
    sent = pickle.loads(pickle.dumps(UsageError("wrong", key="data.args")))
    assert (str(sent), sent.key) == ("wrong", "data.args")


def test_found_by_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    recipe = write(tmp_path, "digits", "size", "big")
    monkeypatch.setattr(
        sys, "argv", ["ridgeline", "train", str(recipe), "--out", str(tmp_path / "runs")]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f"a whole number of at least 1 ({recipe}:6)\n")
