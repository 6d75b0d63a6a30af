"""`ridgeline checkpoint`: what it prints, what damage it finds, what it exports and reads back."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file

from ridgeline import cli, rundir
from ridgeline.checkpoint.compare import compare_values
from ridgeline.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from ridgeline.config import RunConfig, dump_config, load_config
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.models import build_model
from ridgeline.models.llama_names import check_config, transformers_config
from ridgeline.models.weights import load_weights
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train.run import run_training
from ridgeline.train.setup import build_training

ALONE = read_rank_env({})
LLAMA: dict[str, Any] = {
    "vocab": 64, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "max_seq": 32,
    "rope_theta": 5000.0,
}  # fmt: skip


def config_of(*overrides: str) -> RunConfig:
    return load_config(
        None,
        [
            "model.name=llama",
            f"model.args={json.dumps(LLAMA)}",
            "data.source=synthetic",
            "data.args={task: causal_lm, shape: [16], vocab: 64, samples: 32, eval_samples: 4}",
            "train.batch=4",
            "train.steps=6",
            "train.eval_every=2",
            "checkpoint.every=2",
            "checkpoint.keep=5",
            "checkpoint.background=false",  # a step is quicker than a save here
            "checkpoint.keep_best=loss",
            "log.tensorboard=no",
            "device=cpu",
            "threads=1",
            *overrides,
        ],
    ).config


def train(root: Path, *overrides: str) -> Path:
    run = RunDir.create(root, "test")
    config = config_of(*overrides)
    run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, ALONE, run)
    return run.path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 2, 4 and 6."""
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tied")
    return train(root, "model.args.tie_embeddings=true", "train.steps=2")


@pytest.fixture
def newest(trained: Path, tmp_path: Path) -> Path:
    """A copy of the newest checkpoint, to be damaged."""
    return Path(
        shutil.copytree(trained / CHECKPOINTS / "step-00000006", tmp_path / "step-00000006")
    )


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def checkpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Runs `ridgeline checkpoint ARGS` in this process, through its real entry point."""

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["ridgeline", "checkpoint", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


# Looking


def test_ls_marks_newest_best_and_what_is_not_whole(checkpoint, trained: Path, tmp_path) -> None:
    rows = json.loads(checkpoint("ls", trained, "--json").out)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["is_newest"] for row in rows] == [False, False, True]
    losses = [row["metrics"]["loss"] for row in rows]
    assert [row["is_best"] for row in rows] == [loss == min(losses) for loss in losses]
    assert not any(row["problems"] for row in rows)
    copy = shutil.copytree(trained / CHECKPOINTS, tmp_path / "copy")
    (copy / "step-00000002" / "rank-00000.safetensors").unlink()
    flip(copy / "step-00000004" / MANIFEST, 10)
    lines = checkpoint("ls", copy).out.splitlines()
    assert "rank-00000.safetensors is missing" in lines[1]
    assert lines[2].startswith("4 ")
    assert "checksum does not fit" in lines[2]
    assert lines[3].endswith("ok")
    assert "newest" in lines[3]


def test_show_tells_what_is_in_it(checkpoint, trained: Path) -> None:
    shown = checkpoint("show", trained, "--tensors").out
    assert "step 6, epoch 0, batch 6" in shown
    assert "model.name=llama" in shown
    assert any(
        line.split() == ["model/embed.weight", "F32", "[64,", "32]", "1", "8.0", "KiB"]
        for line in shown.splitlines()
    )
    value = json.loads(checkpoint("show", trained / CHECKPOINTS / "step-00000004", "--json").out)
    assert value["step"] == 4
    model = build_model("llama", **LLAMA)
    assert value["totals"]["weights"]["bytes"] == 4 * sum(p.numel() for p in model.parameters())
    count = len(list(model.parameters()))
    assert value["totals"]["optimizer"]["tensors"] == 3 * count  # two moments and a step
    assert value["config"]["train"]["batch"] == 4


@pytest.mark.parametrize("name", ["nowhere", ""])
def test_a_place_without_checkpoints_is_a_usage_error(checkpoint, tmp_path, name: str) -> None:
    for command in ("ls", "show", "verify"):
        outcome = checkpoint(command, tmp_path / name)
        assert outcome.code == 2
        assert str(tmp_path / name) in outcome.err


# Damage


def test_verify_reads_all_checkpoints_of_a_run(checkpoint, trained: Path) -> None:
    outcome = checkpoint("verify", trained)
    assert outcome.code == 0
    assert [line.split(":")[1] for line in outcome.out.splitlines()] == [" whole"] * 3


def header(path: Path) -> str:
    flip(path / "rank-00000.safetensors", 30)
    return "the header"


def data(path: Path) -> str:
    name = "optim/exp_avg/layers.1.ffn_norm.weight"
    flip(path / "rank-00000.safetensors", read_manifest(path).tensors[name].chunks[0].stop - 1)
    return name


def manifest(path: Path) -> str:
    flip(path / MANIFEST, 400)
    return MANIFEST


def missing(path: Path) -> str:
    (path / "rank-00000.safetensors").unlink()
    return "is missing"


def truncated(path: Path) -> str:
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (last,) = (
        name
        for name, stored in read_manifest(path).tensors.items()
        if stored.chunks[0].stop == read_manifest(path).num_bytes
    )
    return f"{last} is cut off"


@pytest.mark.parametrize("damage", [header, data, manifest, missing, truncated])
def test_verify_names_file_and_tensor(checkpoint, newest: Path, damage) -> None:
    expected = damage(newest)
    outcome = checkpoint("verify", newest)
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    (line,) = outcome.out.splitlines()
    assert line.startswith("step-00000006: DAMAGED: ")
    assert expected in line
    (result,) = json.loads(checkpoint("verify", newest, "--json").out)
    (problem,) = result["problems"]
    if damage is not manifest:
        assert problem["file"] == "rank-00000.safetensors"
        assert problem["tensors"]
        assert any(name in line for name in problem["tensors"])


@pytest.mark.parametrize("damage", [data, missing, truncated])
def test_damage_is_neither_exported_nor_compared(
    checkpoint, trained, newest: Path, damage, tmp_path
) -> None:
    damage(newest)
    out = tmp_path / "x.safetensors"
    assert checkpoint("export", newest, out, "--optimizer").code == 1
    assert list(tmp_path.glob("x*")) == []
    outcome = checkpoint("diff", trained, newest)
    assert outcome.code == 1
    assert "rank-00000.safetensors" in outcome.err
    assert "Traceback" not in outcome.err


# Comparing


def test_diff_of_equal_and_of_different(checkpoint, trained: Path, newest: Path) -> None:
    same = checkpoint("diff", trained, newest)
    assert same.code == 0
    assert same.out.endswith("tensors equal, 0 differences\n")
    found = json.loads(
        checkpoint("diff", trained / CHECKPOINTS / "step-00000002", trained, "--json").out
    )
    by_name = {row["name"]: row for row in found["differences"]}
    assert by_name["optim/step/norm.weight"]["max_abs"] == 4.0
    assert by_name["batch"]["text"] == "2 in A and 6 in B"
    assert by_name["model/norm.weight"]["kind"] == "values"
    assert checkpoint("diff", trained / CHECKPOINTS / "step-00000002", trained).code == 1


def test_diff_tells_what_only_one_has_and_what_has_another_shape(
    checkpoint, trained: Path, newest: Path
) -> None:
    manifest = read_manifest(newest)
    tensors = dict(manifest.tensors)
    del tensors["model/norm.weight"]
    head = tensors["model/head.weight"]
    chunk = replace(head.chunks[0], sizes=(32, 64))
    tensors["model/head.weight"] = replace(head, shape=(32, 64), chunks=(chunk,))
    write_manifest(newest, replace(manifest, tensors=tensors))
    out = checkpoint("diff", newest, trained).out
    assert "model/norm.weight: only in B" in out
    assert "model/head.weight: shape [32, 64] in A and [64, 32] in B" in out
    assert out.endswith("2 differences\n")


def test_values_are_compared_bit_by_bit() -> None:
    a = torch.tensor([1.0, float("nan"), 0.0, 4.0, float("inf")])
    assert compare_values("w", a, a.clone()) is None
    b = torch.tensor([1.0, float("nan"), -0.0, 5.0, 1.0])
    found = compare_values("w", a, b)
    assert found is not None
    assert (found.num_different, found.max_abs, found.max_rel) == (3, 1.0, 0.2)
    assert found.num_not_finite == 1
    other = compare_values("w", a[:1], a[:1].bfloat16())
    assert other is not None
    assert other.kind == "dtype"
    assert "the same values" in other.text
    big = torch.tensor([2**62], dtype=torch.int64)
    assert compare_values("n", big, big + 1) is not None  # no double tells them apart


# Exporting, and starting from a file


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / rundir.WEIGHTS)


def test_export_is_the_weights(checkpoint, trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    assert checkpoint("export", trained, out).code == 0
    exported, expected = load_file(out), weights_of(trained)
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert checkpoint("export", trained, out, "--dtype", "bf16", "--optimizer").code == 0
    exported = load_file(out)
    assert torch.equal(exported["norm.weight"], expected["norm.weight"].bfloat16())
    assert exported["optim/exp_avg/norm.weight"].dtype is torch.float32
    assert len(exported) == 4 * len(expected)


def test_a_tied_weight_is_written_once(checkpoint, tied: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    assert checkpoint("export", tied, out).code == 0
    with safe_open(out, "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata()["head.weight"] == "embed.weight"
    expected = weights_of(tied)
    model = build_model("llama", **LLAMA, tie_embeddings=True)
    assert load_model(model, out) == (set(), [])
    again = build_model("llama", **LLAMA, tie_embeddings=True)
    load_weights(again, out)
    for found in (model, again):
        assert all(torch.equal(v, expected[k]) for k, v in found.state_dict().items())


@pytest.mark.parametrize("kind", ["trained", "tied"])
def test_transformers_gives_the_same_logits(
    checkpoint, request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install 'ridgeline[models]'")
    run: Path = request.getfixturevalue(kind)
    out = tmp_path / "hf" / "model.safetensors"
    assert checkpoint("export", run, out, "--names", "transformers").code == 0
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(
        out.parent, output_loading_info=True
    )
    assert not any(report.values()), report
    ours = build_model("llama", **LLAMA, tie_embeddings=kind == "tied")
    ours.load_state_dict(weights_of(run))
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = ours(tokens), theirs(tokens).logits
    assert (a - b).abs().max() < 1e-5 * a.abs().max()

    # And back: as it was written, and as transformers itself writes it, in several files.
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    for source in (out, out.parent, tmp_path / "sharded"):
        config = config_of(
            f"model.weights={source}", f"model.args.tie_embeddings={kind == 'tied'}".lower()
        )
        training = build_training(config, ALONE)
        for name, value in training.model.state_dict().items():
            assert torch.equal(value, weights_of(run)[name]), name


def test_export_refuses_what_it_cannot_name(checkpoint, trained: Path, tmp_path: Path) -> None:
    for args, word in (
        ((tmp_path / "dir",), ".safetensors"),
        ((tmp_path / "w.safetensors", "--names", "transformers"), "model.safetensors"),
        ((tmp_path / "model.safetensors", "--names", "hf"), "known: own, transformers"),
        ((tmp_path / "w.safetensors", "--dtype", "fp8"), "known: bf16, fp16, fp32"),
        (
            (tmp_path / "model.safetensors", "--names", "transformers", "--optimizer"),
            "--optimizer",
        ),
    ):
        outcome = checkpoint("export", trained, *args)
        assert outcome.code == 2
        assert word in outcome.err
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    outcome = checkpoint("export", trained, tmp_path / "file" / "w.safetensors")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "could not be written" in outcome.err


def test_a_file_that_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    model = build_model("mlp", in_features=4, hidden=3, depth=1, out_features=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    first, *_, last = state
    wrong = {**state, "extra": torch.zeros(1), last: torch.zeros(7)}
    del wrong[first]
    save_file(wrong, tmp_path / "w.safetensors")
    with pytest.raises(UsageError) as error:
        load_weights(model, tmp_path / "w.safetensors")
    for text in (f"lacks {first}", "no extra", f"{last} ([7] where"):
        assert text in str(error.value)
    with pytest.raises(UsageError, match="no weights at"):
        load_weights(model, tmp_path / "none")
    (tmp_path / "text.safetensors").write_text("no tensors")
    with pytest.raises(UsageError, match="cannot be read"):
        load_weights(model, tmp_path / "text.safetensors")


def test_settings_that_no_shape_tells_are_compared() -> None:
    config = build_model("llama", **LLAMA).config
    same = transformers_config(config, "float32")
    assert check_config(same, config) == []
    assert check_config({"num_attention_heads": 4, "rope_theta": 5000.0}, config) == []
    (text,) = check_config({**same, "num_attention_heads": 8}, config)
    assert text == "it has heads=8 and model.args gives 4"
    stretched = {**same, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0}}
    (text,) = check_config(stretched, config)
    assert "llama3" in text


def test_a_run_that_goes_on_does_not_look_at_the_file(trained: Path, tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    shutil.copy(trained / rundir.WEIGHTS, file)
    run = RunDir(train(tmp_path, f"model.weights={file}", "train.steps=2", "train.lr=0.0"))
    expected = weights_of(trained)
    assert all(torch.equal(v, expected[k]) for k, v in weights_of(run.path).items())
    file.unlink()
    config = config_of(f"model.weights={file}", "train.steps=4", "train.lr=0.0")
    assert run_training(config, ALONE, run).num_steps == 4
    assert all(torch.equal(v, expected[k]) for k, v in weights_of(run.path).items())
