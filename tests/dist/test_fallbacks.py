"""What had to be gathered is told after the first step: which function, where, and what it costs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from torch import nn

from ridgeline.parallel.fallbacks import (
    Fallbacks,
    Gathered,
    describe_gathered,
    group_fallbacks,
    merge_gathered,
)
from ridgeline.rundir import RunDir
from ridgeline.train.run import run_recipe


def told(layout: str, out: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        run_recipe(
            "digits", "device=cpu", "threads=1", "train.steps=3", f"layout={layout}", out=out
        )
    return " ".join(text.getvalue().split())


def test_a_run_tells_what_it_gathers(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, told, "spatial=2", str(tmp_path / "run"))
    sentence = "flatten in classifier.0 has no rule for tensors that are cut: every rank gathers"
    assert first.count(sentence) == 1, first
    assert "once a step" in first
    assert sentence not in second
    (run,) = (tmp_path / "run").iterdir()
    events = [e.details for e in RunDir(run).events() if e.event == "gathered"]
    assert len(events) == 1
    (flatten,) = events[0]["functions"]
    assert flatten["function"] == "flatten"
    assert flatten["num_bytes"] > 0


class Block(nn.Module):
    def run(self, fallbacks: Fallbacks, function: str = "roll") -> None:
        fallbacks.note(function, (2, 3), 24)


def test_calls_are_grouped_by_function() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(), Block()]), "head": Block()})
    fallbacks = Fallbacks()
    for block in (*model["blocks"], *model["blocks"], model["head"]):
        block.run(fallbacks)
    Block().run(fallbacks, "fft")
    names = {module: path for path, module in model.named_modules()}
    roll, fft = group_fallbacks([fallbacks], names)
    assert roll == Gathered("roll", ("blocks.*", "head"), 5, 120)
    assert fft.modules == ("Block itself",)
    assert "roll in blocks.*, head has no rule" in str(roll)
    assert "5 times a step" in str(roll)
    # The same on all ranks of a stage, other functions in another stage.
    assert merge_gathered([[roll], [roll], [fft]]) == [roll, fft]


def test_only_a_handful_is_told() -> None:
    found = [Gathered(f"f{i}", ("a",), 1, 100 - i) for i in range(9)]
    lines = describe_gathered(found)
    assert len(lines) == 6
    assert lines[-1] == "gathered as well, but less: f5, f6, f7, f8"
    assert describe_gathered([]) == []
