"""A data set of the user's own that fails: which sample, and where in their code."""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.data.build import build_sources
from ridgeline.data.loader import Loader
from ridgeline.errors import UserCodeFailed
from ridgeline.launch.failures import write_failure


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Any:
        if index == 200:
            raise KeyError("label")
        return torch.zeros(4), torch.tensor(index % 3)


def make(split: str) -> Broken:
    return Broken()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_sample_is_named_and_the_traceback_kept(threads: int, tmp_path: Path) -> None:
    source, _ = build_sources(f"{__name__}:make", {}, 0)
    loader = Loader(source, batch=64, threads=threads)
    with pytest.raises(
        UserCodeFailed, match=r"KeyError: 'label' at sample 200 .while reading"
    ) as told:
        for _ in loader.epoch(0):
            pass
    trace = "".join(traceback.format_exception(told.value))
    write_failure(tmp_path, 0, 1.0, told.value, trace)
    kept = json.loads((tmp_path / "failure-0.json").read_text())["traceback"]
    assert 'raise KeyError("label")' in kept
