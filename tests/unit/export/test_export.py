"""`ridgeline export`: a package gives what the model gives, in Python and in C++, or is not there.

Compiling is what costs here: one package is made with everything (module scope) and one more of a module
with several inputs; whatever else is promised is tried without a compiler.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline import cli, rundir
from ridgeline.checkpoint.find import find_one
from ridgeline.checkpoint.manifest import read_manifest
from ridgeline.config import dump_config, load_config
from ridgeline.data.build import build_sources
from ridgeline.export import native, package
from ridgeline.export.build import load_package
from ridgeline.export.check import difference
from ridgeline.export.request import Wanted
from ridgeline.export.run import build_subject
from ridgeline.launch.env import read_rank_env
from ridgeline.rundir import CHECKPOINTS, RunDir
from ridgeline.train.reshard import reshard
from ridgeline.train.run import run_training

HAS_CPP = all(shutil.which(tool) for tool in ("cmake", "g++"))
OWN = "ridgeline_export_models"
MODELS = '''
import torch
from torch import nn

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 3)
    def forward(self, image):
        return self.head(torch.relu(self.norm(self.conv(image))).flatten(1))

class Two(nn.Module):
    """Two inputs by name, and outputs in a dictionary: one of them nested, one no tensor."""
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.mix = nn.Linear(4 + 3, 2)
    def forward(self, words, field=None):
        x = torch.cat([self.embed(words).mean(1), field], 1)
        y = self.mix(x)
        return {"rate": y, "parts": (y.sum(1), x.argmax(1)), "kind": "a name"}

def rate_loss(outputs, targets):
    return (outputs["rate"] - targets).square().mean()

class Decides(Small):
    def forward(self, image):
        if image.sum() > 0:
            image = -image
        return super().forward(image)

class Fixed(Small):
    def forward(self, image):
        samples = int(image.shape[0])
        return super().forward(image).view(samples, 3)

class Draws(Small):
    def forward(self, image):
        return super().forward(image + torch.rand_like(image))

class Pictures(torch.utils.data.Dataset):
    num_classes = 3
    def __init__(self, split):
        generator = torch.Generator().manual_seed(5)
        self.bytes = torch.randint(256, (9, 1, 8, 8), generator=generator).to(torch.uint8)
    def __len__(self):
        return len(self.bytes)
    def __getitem__(self, index):
        return self.bytes[index], index % 3

class Pairs(torch.utils.data.Dataset):
    def __init__(self, split):
        generator = torch.Generator().manual_seed(3)
        self.words = torch.randint(11, (8, 5), generator=generator)
        self.field = torch.randn(8, 3, generator=generator)
    def __len__(self):
        return len(self.words)
    def __getitem__(self, index):
        return {"words": self.words[index], "field": self.field[index]}, self.field[index, :2]
'''
IMAGES = (
    f"data.source={OWN}:Pictures",
    "data.augment={crop: centre, size: [6, 6], mean: [0.4], std: [0.2]}",
)
TWO = (f"model.name={OWN}:Two", f"data.source={OWN}:Pairs", f"train.task={OWN}:rate_loss")
LLAMA = (
    "model.name=llama",
    "model.args={vocab: 32, width: 16, depth: 2, heads: 2, ffn: 24, max_seq: 8}",
    "data.source=synthetic",
    "data.args={task: causal_lm, shape: [8], vocab: 32, samples: 16, eval_samples: 6}",
)


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A user's own file of models, where a recipe finds it."""
    folder = tmp_path_factory.mktemp("models")
    (folder / f"{OWN}.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.chdir(folder)
        yield
    sys.modules.pop(OWN, None)


def train(root: Path, *overrides: str) -> Path:
    usual = (
        "train.batch=4", "train.steps=2", "train.eval_every=2", "checkpoint.every=1", "checkpoint.keep=5",
        "checkpoint.background=false", "log.tensorboard=no", "device=cpu", "threads=1", "train.lr=0.05",
    )  # fmt: skip
    config = load_config(None, [*usual, *overrides]).config
    run = RunDir.create(root, "test")
    run.write_text(rundir.CONFIG, dump_config(config))
    run_training(config, read_rank_env({}), run)
    return run.path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("images"), f"model.name={OWN}:Small", *IMAGES)


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


def run_export(capture: Any, *args: object) -> Outcome:
    """`ridgeline export ARGS` in this process, through its real entry point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ridgeline", "export", *map(str, args)])
        capture.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capture.readouterr()
    return Outcome(code, captured.out, captured.err)


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    return lambda *args: run_export(capsys, *args)


class Quiet:
    def readouterr(self) -> Any:
        return type("Nothing", (), {"out": "", "err": ""})


@pytest.fixture(scope="module")
def made(images: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder that was exported, and the one its C++ program was built in."""
    build = tmp_path_factory.mktemp("build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package, "try_native", lambda folder, _: native.try_native(folder, build))
        assert run_export(Quiet(), images).code == 0
    return images / "export", build


# What the package gives


def by_hand(run: Path, images: torch.Tensor) -> torch.Tensor:
    """The run's last weights and its evaluation, written out."""
    module = sys.modules[OWN].Small()
    module.load_state_dict(load_file(run / "weights.safetensors"))
    cropped = images[:, :, 1:7, 1:7].float() / 255
    with torch.no_grad():
        return module.eval()((cropped - 0.4) / 0.2)


def test_package_takes_what_the_data_holds_in_any_number(images: Path, made: Any) -> None:
    folder, _ = made
    call = load_package(folder / "model.pt2")
    stored = torch.cat([sys.modules[OWN].Pictures("eval").bytes] * 2)
    assert stored.dtype == torch.uint8
    for count in (1, 2, 7, 18):
        expected = by_hand(images, stored[:count])
        assert difference(call([stored[:count]])[0], expected) < 1e-5 * expected.abs().max()


def test_about_says_what_it_is_and_how_it_was_checked(images: Path, made: Any) -> None:
    about = json.loads((made[0] / "model.json").read_text())
    assert about["inputs"] == [
        {"name": "image", "dtype": "uint8", "shape": ["batch", 1, 8, 8], "varying_dims": [0]}
    ]
    assert about["outputs"][0]["shape"] == ["batch", 3]
    assert (about["step"], about["device"], about["dtype"]) == (2, "cpu", "float32")
    assert about["torch"] == torch.__version__
    assert about["check"]["batches"] == [1, 2, 5]
    bound = about["check"]["bounds"]["output"]
    assert about["check"]["python"]["output"] <= bound["bound"] < 1e-4 * bound["largest_value"]
    assert bool(about["check"]["cpp"]) == HAS_CPP
    assert about["prepares"]["mean"] == [0.4]
    assert about["averaged"] is False
    names = {path.name for path in made[0].iterdir()}
    assert names >= {
        "model.pt2",
        "README.md",
        "CMakeLists.txt",
        "main.cpp",
        "ridgeline_model.h",
        "check",
    }
    assert not list(images.glob(".*part"))


@pytest.mark.skipif(not HAS_CPP, reason="NO cmake OR g++ HERE: the C++ side is not tested")
def test_cpp_program_compares_and_tells_a_difference(made: Any, tmp_path: Path) -> None:
    folder, build = made
    command = [str(build / "check"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "ms a call of 5 samples" in done.stdout
    copied = shutil.copytree(folder, tmp_path / "copied")
    values = bytearray((copied / "check" / "output-0.bin").read_bytes())
    values[3] ^= 1  # the exponent of the first
    (copied / "check" / "output-0.bin").write_bytes(values)
    done = subprocess.run([command[0], str(copied)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "output: largest difference" in done.stdout
    assert "DIFFERS" in done.stdout
    (copied / "check" / "check.txt").write_text("input image uint8 5,1,8,8\n")
    assert subprocess.run([command[0], str(copied)], capture_output=True).returncode == 2


def test_other_weights_are_found_and_nothing_is_left(
    images: Path, made: Any, export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real package, of the weights one step later."""
    monkeypatch.setattr(
        package, "compile_package", lambda _, path, __: shutil.copy(made[0] / "model.pt2", path)
    )
    out = tmp_path / "there"
    done = export(images / CHECKPOINTS / "step-00000001", out)
    assert done.code == 1
    assert "output output of the package differs from the model's by up to" in done.err
    assert "where rounding allows" in done.err
    assert list(tmp_path.iterdir()) == []


# Several inputs and outputs


def test_two_inputs_and_a_dictionary_of_outputs(
    export: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path, *TWO)
    monkeypatch.setattr(native.shutil, "which", lambda tool: None if tool == "cmake" else tool)
    done = export(run, tmp_path / "out", "--dtype", "bf16", "--batch", "3")
    assert done.code == 0, done.err
    assert "takes words int64 [3, 5]; field float32 [3, 3]" in done.out
    assert "not exported: kind (str) is no tensor" in done.out
    assert "rate: bfloat16 differs from the run's float32 by at most" in done.out
    assert "no cmake on this machine: the C++ program was not built" in done.out
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert [port["name"] for port in about["outputs"]] == ["rate", "parts.0", "parts.1"]
    # Inputs stay what the data holds, and outputs what C++ can read.
    assert [port["dtype"] for port in about["outputs"]] == ["float32", "float32", "int64"]
    assert about["check"]["not_checked"] == [
        "no cmake on this machine: the C++ program was not built"
    ]
    assert about["dtype"] == "bfloat16"


# Layouts


def test_every_layout_gives_the_model_of_one_device(tmp_path: Path) -> None:
    run = train(tmp_path, *LLAMA)
    one = find_one(run)
    paths = [one]
    for layout in ("dp=2,zero=3", "tp=2"):
        paths.append(reshard(one, tmp_path / layout, layout)[0])
        assert read_manifest(paths[-1]).num_ranks == 2
    outputs = []
    for path in paths:
        with torch.no_grad():
            subject = build_subject(path, read_manifest(path), Wanted(), package_bar)
            outputs.append(subject.model(subject.inputs))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    # And it is the model that was evaluated.
    source = build_sources("synthetic", subject.config.data.args, subject.config.train.seed)[1]
    tokens, targets = source.fetch(torch.arange(6).numpy(), 0)
    with torch.no_grad():
        logits = subject.model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert float(loss) == pytest.approx(read_manifest(one).metrics["loss"], rel=1e-5)


def package_bar(_: str, __: int) -> Any:
    from contextlib import nullcontext

    return nullcontext(lambda _: None)


# What cannot be had


@pytest.mark.parametrize(
    ("model", "line", "words"),
    [
        ("Decides", "if image.sum() > 0:", ("decides by the values", "torch.where")),
        ("Fixed", "", ("batches of one size", "use --batch 5")),
        ("Draws", "", ("when it is asked twice", "--no-check")),
    ],
)
def test_not_exportable_is_one_sentence(
    model: str, line: str, words: tuple[str, ...], export: Any, tmp_path: Path
) -> None:
    run = train(tmp_path, f"model.name={OWN}:{model}", *IMAGES)
    done = export(run, tmp_path / "out")
    assert done.code == 1
    assert len(done.err.strip().splitlines()) == 1, done.err
    for word in words:
        assert word in done.err
    if line:
        number = MODELS.splitlines().index(f"        {line}") + 1
        assert f"{OWN}.py:{number}" in done.err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--batch", "0"], "--batch 0"),
        (["--batch", "many"], "--batch many"),
        (["--dtype", "fp8"], "unknown type 'fp8' in --dtype"),
        (["--device", "gpu"], "unknown device 'gpu' in --device"),
        (["one", "two"], "one OUT"),
        (["."], "exists already"),
        (["out", "data.source=nowhere"], "unknown source 'nowhere'"),
    ],
)
def test_usage_errors(args: list[str], word: str, images: Path, export: Any) -> None:
    done = export(images, *args)
    assert done.code == 2, done.err
    assert word in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_no_run_there(export: Any, tmp_path: Path) -> None:
    assert export(tmp_path / "none").code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none(images: Path, export: Any, tmp_path: Path) -> None:
    done = export(images, tmp_path / "out", "--device", "cuda")
    assert done.code == 2
    assert "no CUDA device" in done.err
