"""`ridgeline data bench`: what the step asks for, what the loader gives, where its time goes.

The machine that tests run on is busy with others, so figures are compared with each other, and with wide
margins; what follows from figures is tested on invented ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ridgeline import cli
from ridgeline.config import RunConfig, load_config
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.loader import Loader
from ridgeline.data.pack import pack
from ridgeline.data.recipe import SourceSamples
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.train import feeding_run
from ridgeline.train.feeding import (
    Demand,
    Parts,
    Supply,
    best_of,
    choose_enough,
    conclude,
    measure_demand,
    measure_parts,
    measure_supply,
)
from ridgeline.train.feeding_run import Findings, check_formats, default_workers, one_rank
from ridgeline.train.feeding_show import to_text
from ridgeline.train.setup import Training, build_training

ALONE = read_rank_env({})
BASE = (
    "model.name=mlp",
    "model.args={in_features: 64, hidden: 16, depth: 1, out_features: 10}",
    "data.source=digits",
    "train.batch=32",
    "train.steps=6",
    "log.tensorboard=no",
    "device=cpu",
    "threads=1",
)


class SleepySource:
    """Takes its time for a batch, and nobody else's: n readers give n times as much."""

    def __init__(self, sleep_s: float, num_samples: int = 4000) -> None:
        self._sleep_s, self._num_samples = sleep_s, num_samples
        self.info = SourceInfo((4,), torch.float32, (), torch.int64, 2, "classify")

    def __len__(self) -> int:
        return self._num_samples

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self._sleep_s)
        return torch.zeros(len(indices), 4), torch.zeros(len(indices), dtype=torch.int64)


def config_of(*overrides: str) -> RunConfig:
    return load_config(None, [*BASE, *overrides]).config


def training_of(*overrides: str) -> Training:
    return build_training(config_of(*overrides), ALONE)


def supply(workers: int, samples_per_s: float, threads: int = 1) -> Supply:
    return Supply(workers, threads, samples_per_s, 4 * samples_per_s, 0.1, 1.0, 100)


def parts_of(**seconds: float) -> Parts:
    return Parts(seconds, sum(seconds.values()), 100)


class OwnData(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """What users have: a class with items."""

    classes = ("a", "b")

    def __init__(self, split: str) -> None:
        self.split = split

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(64), 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("data.threads=4",), "data.threads=4 does nothing for"),
        (("data.threads=4", "data.prefetch=3"), "data.threads=4 and data.prefetch=3 do nothing"),
        (("data.threads=4", "data.workers=1"), ""),
        (("data.threads=4", "data.source=digits"), ""),
        ((), ""),
    ],
)
def test_settings_that_do_nothing_for_a_data_set_of_ones_own(
    overrides: tuple[str, ...], said: str
) -> None:
    training = training_of(f"data.source={__name__}:OwnData", *overrides)
    training.close_loaders()
    found = [note for note in training.notes if "nothing for" in note]
    assert bool(found) == bool(said)
    assert not said or (said in found[0] and "data.workers=N" in found[0])


# What follows from figures.

ROWS = [supply(0, 100), supply(0, 180, 2), supply(1, 90), supply(2, 175), supply(4, 340)]


@pytest.mark.parametrize(
    ("asked", "readers"),
    [(50, (0, 1)), (95, (0, 2)), (160, (0, 2)), (164, (4, 1)), (300, (4, 1)), (320, None)],
)
def test_the_fewest_readers_that_give_a_tenth_more_than_is_asked(
    asked: float, readers: tuple[int, int] | None
) -> None:
    for rows in (ROWS, ROWS[::-1]):
        found = choose_enough(rows, asked)
        assert (found and (found.workers, found.threads)) == readers
    assert best_of(ROWS).workers == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (50, "1 thread is enough: the step asks for 50 samples/s a rank and 1 thread gives 100"),
        (
            150,
            "2 threads are enough: the step asks for 150 samples/s a rank and 2 threads give 180",
        ),
        (
            300,
            "4 workers are enough: the step asks for 300 samples/s a rank and 4 workers give 340",
        ),
    ],
)
def test_how_many_are_enough_is_one_sentence(asked: float, said: str) -> None:
    assert conclude(ROWS, asked, parts_of(fetch=1.0, copy=5.0)) == said


@pytest.mark.parametrize(
    ("part", "remedy"),
    [
        ("open", "--shard-size"),
        ("read", "data.stage=auto"),
        ("decode", "pixels=bytes"),
        ("fetch", "recipe:NAME"),
        ("collate", "one shape"),
        ("augment", "GPU"),
    ],
)
def test_when_none_are_enough_the_remedy_follows_from_the_largest_part(
    part: str, remedy: str
) -> None:
    parts = parts_of(**{part: 7.1, "copy": 2.9})
    said = conclude(ROWS, 1000, parts)
    assert said.startswith(
        "no number of workers up to 4 is enough: the best is 4 workers with 340 samples/s, 34% of the "
        f"1,000 samples/s that the step asks for a rank; the time goes into {part} (71%): "
    )
    assert remedy in said


def test_the_copy_is_no_part_of_the_loader() -> None:
    assert parts_of(read=1.0, decode=2.0, copy=9.0).largest() == "decode"


def test_barely_what_is_asked_is_not_enough_and_says_so() -> None:
    said = conclude([supply(0, 105)], 100, parts_of(fetch=1.0, copy=0.1))
    assert "105% of the 100 samples/s" in said
    assert "it takes 110% to be sure" in said


def test_workers_double_up_to_twice_the_cores() -> None:
    assert default_workers(1) == (0, 1, 2)
    assert default_workers(4) == (0, 1, 2, 4, 8)
    assert default_workers(6) == (0, 1, 2, 4, 8, 12)


def test_one_rank_has_its_share_of_the_batch_and_what_it_can_do_alone() -> None:
    config, num_ranks = one_rank(config_of("layout=dp=4,zero=3,precision=bf16,accumulate=2"))
    assert (config.layout, config.train.batch, num_ranks) == ("precision=bf16,accumulate=2", 8, 4)
    with pytest.raises(UsageError, match="splits the model over several ranks"):
        one_rank(config_of("layout=tp=2"))
    with pytest.raises(UsageError, match=r"train\.batch=32 is not divisible by dp=3"):
        one_rank(config_of("layout=dp=3"))


def test_formats_by_name() -> None:
    assert check_formats(["tar", "hdf5", "tar"]) == ("tar", "hdf5")
    assert check_formats(["all"]) == tuple(FORMATS)
    with pytest.raises(
        UsageError, match=r"unknown format 'hdf4' in --formats; did you mean 'hdf5'"
    ):
        check_formats(["tar", "hdf4"])


# What is measured.


def test_demand_is_consistent_and_leaves_out_the_smaller_last_batch() -> None:
    found = measure_demand(training_of("train.batch=500"), 0.1)  # three batches, the last smaller
    assert found.batch == 500
    assert found.num_steps >= 3
    assert found.samples_per_s == pytest.approx(found.batch / found.step_s)
    assert found.warmup_s > 0


def test_a_larger_model_asks_for_less() -> None:
    small = measure_demand(training_of(), 0.2)
    large = measure_demand(training_of("model.args.hidden=1500", "model.args.depth=3"), 0.2)
    assert large.samples_per_s < small.samples_per_s / 2


@pytest.mark.parametrize("kind", ["threads", "workers"])
def test_readers_of_a_source_that_waits_add_up(kind: str) -> None:
    loader = Loader(SleepySource(0.03), batch=20)
    one = measure_supply(loader.varied(**{kind: 1}), 0.3)
    four = measure_supply(loader.varied(**{kind: 4}), 0.3)
    assert one.samples_per_s < 20 / 0.03 * 1.4  # no faster than it sleeps
    assert 2 < four.samples_per_s / one.samples_per_s < 6.5
    assert four.bytes_per_s == pytest.approx(four.samples_per_s * (4 * 4 + 8))
    assert four.num_samples == pytest.approx(four.samples_per_s * four.seconds)
    assert four.startup_s > 0
    asked = one.samples_per_s * 1.5
    enough = choose_enough([one, four], asked)
    assert enough is not None
    assert enough.num_readers == 4
    assert str(enough) == f"4 {kind}"


@pytest.mark.parametrize("num_samples", [7, 20, 55])
def test_short_epochs_are_repeated(num_samples: int) -> None:
    found = measure_supply(Loader(SleepySource(0.005, num_samples), batch=20), 0.6)
    assert found.num_samples > num_samples
    assert found.samples_per_s <= 20 / 0.005 * 1.5


def test_files_are_dropped_before_every_epoch() -> None:
    calls = []
    loader = Loader(SleepySource(0.005, 80), batch=20)
    found = measure_supply(loader, 0.6, lambda: calls.append(1))
    assert len(calls) > 1
    assert found.num_samples <= 40 * len(calls)


def test_parts_of_a_slow_source_are_its_fetches() -> None:
    training = training_of()
    loader = training.loader.varied(source=SleepySource(0.02))
    found = measure_parts(training, loader, 0.3)
    assert set(found.seconds) == {"fetch", "collate", "copy"}
    assert found.largest() == "fetch"
    assert found.share("fetch") > 0.6
    assert found.seconds["fetch"] >= 0.02 / 32
    assert sum(found.seconds.values()) == pytest.approx(found.total_s, rel=0.05)


def test_parts_of_a_packed_source_add_up_and_are_off_afterwards(tmp_path: Path) -> None:
    training = training_of()
    samples = SourceSamples(training.loader.source, "digits")
    pack(samples, tmp_path / "packed", FORMATS["tar"], shard_bytes=100_000)
    packed = training_of(
        "data.source=packed",
        f"data.args={{path: {tmp_path / 'packed'}, classes: 10}}",
        "data.augment.flip_horizontal=0.5",
    )
    found = measure_parts(packed, packed.loader, 0.2)
    assert list(found.seconds) == ["open", "read", "decode", "collate", "augment", "copy"]
    assert all(found.seconds[part] > 0 for part in ("open", "read", "collate", "augment", "copy"))
    assert sum(found.seconds.values()) == pytest.approx(found.total_s, rel=0.05)
    assert not packed.loader.source.dataset.spent.is_on
    assert packed.loader.change is not None  # as it was, untimed
    assert type(packed.loader.change).__name__ == "AugmentBatch"


# The command.


@pytest.fixture
def command(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ridgeline", "data", "bench", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run


QUICK = ("--seconds", "0.05", "--samples", "200", "device=cpu", "threads=1")


def test_the_whole_of_it_for_programs(command, monkeypatch, tmp_path: Path) -> None:
    def missing(*_: object) -> None:
        raise UsageError("the format 'zip' needs a library, which is not installed here")

    monkeypatch.setitem(FORMATS, "zip", replace(FORMATS["zip"], write=missing))
    options = ["--workers", "0", "--formats", "tar,zip,npy", "--where", str(tmp_path), "--cold"]
    code, out, _ = command("digits", *options, "--json", *QUICK)
    assert code == 0
    found = json.loads(out)
    assert found["source"] == "digits"
    assert found["demand"]["samples_per_s"] > 0
    assert found["supply"][0]["threads"] == 1
    assert all(row["samples_per_s"] > 0 and row["workers"] == 0 for row in found["supply"])
    assert found["enough"] is None or found["enough"]["workers"] == 0
    assert [row["name"] for row in found["formats"]] == ["tar", "npy"]
    for row in found["formats"]:
        assert row["num_samples"] == 200
        assert row["supply"]["samples_per_s"] > 0
        assert sum(row["parts"]["seconds"].values()) == pytest.approx(
            row["parts"]["total_s"], rel=0.1
        )
        # A digit is 64 float32 and its label.
        rates = row["supply"]["bytes_per_s"] / row["supply"]["samples_per_s"]
        assert rates == pytest.approx(64 * 4 + 8)
    assert found["skipped"] == {
        "zip": "the format 'zip' needs a library, which is not installed here"
    }
    assert any(note.startswith("--cold: data.args.path names no files") for note in found["notes"])
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_the_whole_of_it_for_people(command) -> None:
    code, out, _ = command("digits", "--workers", "0,1", *QUICK)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("digits: source digits, device cpu, ")
    assert any(line.startswith("1              -") for line in lines)
    assert "enough: " in out
    assert "of the loader alone" in out


def test_a_source_on_the_device_needs_no_workers(command) -> None:
    code, out, _ = command(
        "digits",
        "data.source=synthetic",
        "data.args={task: classify, shape: [1, 8, 8], classes: 10, samples: 256}",
        *QUICK,
    )
    assert code == 0
    assert "makes its batches on the device, where workers have no part" in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["digits", "--formats", "tarr"], "unknown format 'tarr' in --formats; did you mean 'tar'"),
        (["digits", "--workers", "1,two"], "'1,two' in --workers is no list of numbers"),
        (["digits", "--where", "nowhere"], "'nowhere' in --where is not a directory"),
        (["digits", "layout=tp=2"], "splits the model over several ranks"),
        (["digits", "data.source=digit"], "did you mean 'digits'"),
        (["digitz"], "digitz"),
    ],
)
def test_slips_are_one_sentence(command, args: list[str], said: str) -> None:
    code, out, err = command(*args)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_images_are_packed_as_their_files(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(20):
            pixels = np.full((24, 24, 3), number, dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    training = training_of(
        "data.source=images",
        f"data.args={{path: {tmp_path}, size: 8}}",
        "model.args.in_features=192",
    )
    samples, args, notes = feeding_run._samples_of(training, 10)
    assert notes == []
    assert args == {"path": str(tmp_path), "size": 8}
    assert len(samples) == 10
    assert {samples.key(i).partition("/")[0] for i in range(10)} == {"cat", "dog"}
    assert samples.read(0)["png"][:4] == b"\x89PNG"
    parts = measure_parts(training, training.loader, 0.1)
    assert list(parts.seconds) == ["open", "read", "decode", "collate", "copy"]
    assert parts.largest() in ("open", "decode")
    assert sum(parts.seconds.values()) == pytest.approx(parts.total_s, rel=0.05)


def test_text_says_what_was_not_measured() -> None:
    found = Findings(
        "mine",
        "packed",
        "cuda",
        8,
        2,
        Demand(1000.0, 0.032, 32, 10, 0.5),
        parts_of(open=1e-6, read=2e-6, decode=7e-6, collate=1e-6, copy=1e-6),
        [supply(0, 500.0), supply(2, 1500.0)],
        skipped={"lmdb": "no library"},
        verdict="so it is",
        notes=["and more"],
    )
    text = to_text(found)
    assert "lmdb: not measured, no library" in text
    assert text.endswith("so it is\nand more")
    assert "150%" in text
    assert "58%" in text  # of decode
