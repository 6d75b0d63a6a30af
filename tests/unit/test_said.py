"""Ranks of mpirun with the same error: one of them says it."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.train.said import is_said

Become = Callable[..., None]


@pytest.fixture
def become(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Become:
    """A rank of those that Open MPI has started."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def become(rank: int, job: str = "one", local_size: int = 3) -> None:
        place = {"RANK": rank, "SIZE": 3, "LOCAL_RANK": rank % local_size, "LOCAL_SIZE": local_size}
        for name, value in place.items():
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)
        monkeypatch.setenv("PMIX_NAMESPACE", job)

    return become


def test_one_of_several_says_it(become: Become) -> None:
    for rank, expected in ((1, False), (0, True), (2, True), (1, False)):
        become(rank)
        assert is_said("all have it") is expected
    become(0)
    assert not is_said("one has it")
    become(0, job="another")
    assert not is_said("all have it")
    become(2, local_size=1)
    assert not is_said("all have it")


def test_what_was_said_long_ago_is_said_again(become: Become, tmp_path: Path) -> None:
    become(0)
    assert not is_said("x")
    (mark,) = tmp_path.iterdir()
    os.utime(mark, (time.time() - 100,) * 2)
    become(1)
    assert not is_said("x")
    become(0)
    assert is_said("x")
    assert len(list(tmp_path.iterdir())) == 1


def test_whoever_cannot_look_says_it(
    become: Become, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    for rank in (0, 1):
        become(rank)
        assert not is_said("x")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))  # torchrun's, or nobody's
        assert not is_said("x")


def test_a_command_of_all_ranks(
    become: Become, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["ridgeline", "config", "show", "digits", "train.bach=3"])
    said = []
    for rank in (0, 1):
        become(rank)
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith("ridgeline: unknown key train.bach")
    assert said[1] == ""
