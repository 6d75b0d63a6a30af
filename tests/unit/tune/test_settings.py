"""Settings of speed for a loop of the user's own: what is read, what is refused, what it does."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ridgeline
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.train.settings import (
    LoaderSettings,
    Settings,
    _fuse,
    read_settings,
    with_settings,
    write_settings,
)
from ridgeline.tuning import TuneConfig


def written(folder: Path, text: str) -> Path:
    path = folder / "tune.yaml"
    path.write_text(text)
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    settings = Settings(
        "precision=bf16,compile=true",
        TuneConfig(attention="cudnn", fused_optimizer=False, fp8_keep=("a", "b")),
        LoaderSettings(workers=3, prefetch=4),
        channels_last=True,
    )
    write_settings(settings, tmp_path / "one.yaml", "two\nlines")
    assert read_settings(tmp_path / "one.yaml") == settings
    text = (tmp_path / "one.yaml").read_text()
    assert text.startswith("# two\n# lines\n")
    assert "fp8_scaling" not in text  # what is as usual is not said
    assert read_settings(written(tmp_path, "")) == Settings()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("layout: dp=2", "sets dp"),
        ("layout: precision=fp9", "fp9"),
        ("tune: {attention: cudn}", "did you mean 'cudnn'"),
        ("tune: {loss: chunked}", "script's own code"),
        ("tune: {weights: bf16}", "script's own code"),
        ("tune: {loss_chunk: 0}", "too small"),
        ("loader: {workers: -1}", "below 0"),
        ("worker: 3", "unknown key worker"),
        ("[a, b]", "holds no settings"),
        ("a: [", "is no YAML"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        read_settings(written(tmp_path, text))
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="cannot read the settings"):
        read_settings(tmp_path / "none.yaml")


def test_the_file_goes_over_the_scripts_layout() -> None:
    said = Layout.parse("dp=4,precision=fp32,recompute=full")
    found = with_settings(said, Settings("precision=bf16,recompute=none"), "file")
    assert found == Layout.parse("dp=4,precision=bf16")


class Pair(nn.Module):
    """Returns a structure, and says what it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen = self.conv(x)
        out = self.head(self.seen.mean((2, 3)))
        return {"logits": out, "index": out.argmax(1)}


def test_a_job_takes_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("layout: precision=fp32\n")
    path = written(
        tmp_path,
        "layout: precision=bf16\nchannels_last: true\nloader: {workers: 1, prefetch: 3}\n",
    )
    monkeypatch.setenv("RIDGELINE_TUNE", str(path))
    job = ridgeline.start(device="cpu", tune=str(other))  # the variable goes before it
    assert job.layout.precision == "bf16"
    model = job.parallelize(Pair())
    assert isinstance(model, Pair)
    assert type(model).__name__ == "Pair"
    dataset = torch.utils.data.TensorDataset(torch.randn(8, 3, 6, 6), torch.randint(4, (8,)))
    loader = job.loader(dataset, batch_size=4)
    assert (loader._loader.num_workers, loader._loader.prefetch_factor) == (1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in loader:
        assert x.is_contiguous(memory_format=torch.channels_last)
        out = model(x)
        assert model.seen.dtype is torch.bfloat16
        assert out["logits"].dtype is torch.float32  # the script's loss may know no bf16
        assert out["index"].dtype is torch.int64
        F.cross_entropy(out["logits"], y).backward()
        optimizer.step()
    assert optimizer.param_groups[0]["fused"] is True
    job.close()


class Counted(nn.Module):
    """Leaves something out when it is saved, as classes may."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.calls = nn.Linear(8, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "calls": 0}


class Rebuilt(nn.Linear):
    """Has a way of its own to be saved."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Rebuilt, (self.in_features, self.out_features), self.__dict__)


@pytest.mark.parametrize("build", [lambda: nn.Linear(8, 4), Counted, lambda: Rebuilt(8, 4)])
def test_a_whole_model_is_saved_and_computes_the_same_when_loaded(
    tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    job = ridgeline.start(device="cpu", tune=str(written(tmp_path, "layout: precision=bf16\n")))
    model = job.parallelize(build())
    job.close()
    x = torch.randn(16, 8)
    out = model(x)
    assert not torch.equal(out, type(model).__mro__[1].forward(model, x))  # it does compute in bf16
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert getattr(loaded, "calls", 0) == 0
    for other in (loaded, pickle.loads(pickle.dumps(loaded)), copy.deepcopy(model)):
        assert type(other) is type(model)
        assert torch.equal(other(x), out)
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_a_precision_that_no_forward_pass_entered_is_said_once() -> None:
    job = ridgeline.start(device="cpu", layout="precision=bf16")
    model = job.parallelize(nn.Linear(8, 4))
    with pytest.warns(
        UserWarning, match=r"precision=bf16 was asked for, .* `with job.autocast\(\):`"
    ):
        job.mean(model(torch.randn(2, 8)).sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job.mean(1.0)
        for layout in ("precision=bf16", "dp=1"):
            other = ridgeline.start(device="cpu", layout=layout)
            if layout != "dp=1":
                with other.autocast():
                    pass
            other.mean(1.0)


def test_only_an_optimizer_that_nobody_decided_on_is_fused() -> None:
    weight = nn.Parameter(torch.randn(4))
    weight.grad = torch.ones(4)
    chosen = torch.optim.Adam([weight], foreach=False)
    _fuse(chosen)
    assert not chosen.param_groups[0]["fused"]

    class Mine(torch.optim.SGD):
        pass

    mine = Mine([weight], lr=0.1)
    _fuse(mine)
    assert not mine.param_groups[0]["fused"]
    started = torch.optim.AdamW([weight], lr=0.1)
    plain = torch.optim.AdamW([nn.Parameter(weight.detach().clone())], lr=0.1)
    plain.param_groups[0]["params"][0].grad = torch.ones(4)
    for step in range(4):
        if step == 2:
            _fuse(started)  # in the middle, as after a checkpoint
        started.step()
        plain.step()
    assert started.param_groups[0]["fused"] is True
    assert torch.allclose(weight, plain.param_groups[0]["params"][0], rtol=1e-6)


def test_fused_updates_end_with_the_job(tmp_path: Path) -> None:
    path = written(tmp_path, "tune: {fused_optimizer: true}\n")

    def is_fused() -> bool:
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = torch.ones(2)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.step()
        return bool(optimizer.param_groups[0]["fused"])

    job = ridgeline.start(device="cpu", tune=str(path))
    assert is_fused()
    job.close()
    assert not is_fused()
