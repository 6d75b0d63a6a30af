"""Packing that goes on: not with a source that has changed since, wherever in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ridgeline.data.dataset import Dataset, open_dataset
from ridgeline.data.formats.contract import Sample
from ridgeline.data.formats.table import FORMATS
from ridgeline.data.pack import Samples, Shuffled, pack
from ridgeline.errors import RunError, UsageError

NUM = 200


class Ends(Shuffled):
    """Stops at the last sample, once it is not looked at but packed."""

    def __init__(self, samples: Samples, target: Path) -> None:
        super().__init__(samples, 0)
        self._target = target

    def read(self, index: int) -> Sample:
        if index == NUM - 1 and any(self._target.glob("*.idx")):
            raise RunError("enough")
        return super().read(index)


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Path, Path]:
    """A folder, and a pack of it that was interrupted."""
    source, target = tmp_path / "source", tmp_path / "packed"
    source.mkdir()
    for number in range(NUM):
        (source / f"{number:04d}.bin").write_bytes(bytes([number]) * 100)
    with pytest.raises(RunError, match="enough"):
        pack(Ends(open_dataset(source), target), target, FORMATS["tar"], shard_bytes=2000)
    return source, target


def unread(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is not among those looked at when packing begins."""
    seen: list[int] = []
    read = Dataset.read
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "read", lambda self, index: seen.append(index) or read(self, index))
        with pytest.raises(UsageError, match="another place"):
            pack(Shuffled(open_dataset(source), 0), source, FORMATS["npy"])
    return next(source / f"{index:04d}.bin" for index in range(NUM) if index not in seen)


def test_a_file_that_was_not_looked_at_has_changed(
    begun: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = begun
    changed = unread(source, monkeypatch)
    before = changed.stat()
    changed.write_bytes(b"n" * 100)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000))
    with pytest.raises(UsageError, match="was begun with crc="):
        pack(Shuffled(open_dataset(source), 0), target, FORMATS["tar"], shard_bytes=2000)
    # As it was: goes on.
    changed.write_bytes(bytes([int(changed.stem)]) * 100)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))
    (source / ".hidden").write_bytes(b"no sample")
    done = pack(Shuffled(open_dataset(source), 0), target, FORMATS["tar"], shard_bytes=2000)
    assert 0 < done.num_written < NUM


def test_a_data_set_of_ours_may_be_copied_meanwhile(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "packed"
    source.mkdir()
    for number in range(NUM):
        (source / f"{number:04d}.bin").write_bytes(bytes([number]) * 100)
    first = pack(open_dataset(source), tmp_path / "first", FORMATS["npy"]).dataset
    with pytest.raises(RunError, match="enough"):
        pack(Ends(first, target), target, FORMATS["tar"], shard_bytes=2000)
    for file in (tmp_path / "first").rglob("*"):
        os.utime(file)
    again = Shuffled(open_dataset(tmp_path / "first"), 0)
    assert pack(again, target, FORMATS["tar"], shard_bytes=2000).num_written < NUM
