"""A climb of a training on several ranks: its processes are asked and answer as one."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.config import load_config
from ridgeline.doctor.climb import climb
from ridgeline.doctor.processes import AFTER_S, merge, rank_log, start
from ridgeline.doctor.remedies.table import REMEDIES
from ridgeline.doctor.seen import of_script
from ridgeline.doctor.states import Candidate, Effort, ScriptCandidate, build_spares
from ridgeline.errors import RunError

RECIPE = [
    "model.name=mlp", "model.args={in_features: 16, hidden: 32, depth: 6, out_features: 4}",
    "data.source=synthetic", "data.args={shape: [16], classes: 4}", "train.batch=8", "train.steps=500",
    "train.lr=0.01", "data.prefetch=0", "device=cpu", "threads=1",
]  # fmt: skip

ANSWERS = """
import json, os, sys, time
rank = int(os.environ["RANK"])
for line in sys.stdin:
    asked = json.loads(line)
    what = asked["say"][rank]
    if what == "hang":
        time.sleep(600)
    if what == "die":
        os._exit(3)
    if what == "half":
        print('{"rank": ', end="", flush=True)
        os._exit(0)
    print(json.dumps({"failed": what} if what else {"rank": rank}), flush=True)
"""


def test_ranks_answer_together(tmp_path: Path) -> None:
    ranks = start([], ["-c", ANSWERS], tmp_path / "log.log", 3)
    assert ranks.ask({"say": ["", "", ""]}, 60.0) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert ranks.is_alive
    ranks.end(30.0)
    assert not any(psutil.pid_exists(process.pid) for process in ranks.processes)
    assert ranks.logs == tuple(tmp_path / n for n in ("log.log", "log.rank1.log", "log.rank2.log"))


@pytest.mark.parametrize(
    ("say", "told"),
    [
        (["hang", "no room", "hang"], "no room on rank 1"),
        # What a rank says of a peer that is gone is not the reason.
        (
            ["Connection closed by peer [127.0.0.1]:1", "die", "hang"],
            r"process ended \(3\); see .*rank1",
        ),
        (["bad", "bad", "bad"], "^bad$"),
        (["", "half", "hang"], r"process ended \(0\); see .*rank1"),
    ],
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(
    tmp_path: Path, say: list[str], told: str
) -> None:
    ranks = start([], ["-c", ANSWERS], tmp_path / "log.log", 3)
    ranks.ask({"say": ["", "", ""]}, 240.0)  # all are there
    begun = time.monotonic()
    with pytest.raises(RunError, match=told):
        ranks.ask({"say": say}, 60.0)
    assert time.monotonic() - begun < AFTER_S + 30.0
    assert not any(psutil.pid_exists(process.pid) for process in ranks.processes)


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    ranks = start([], ["-c", ANSWERS], tmp_path / "log.log", 2)
    ranks.ask({"say": ["", ""]}, 240.0)
    with pytest.raises(RunError, match="no answer within 20 s from rank 1"):
        ranks.ask({"say": ["", "hang"]}, 20.0)


def test_what_ranks_say_is_what_their_training_did() -> None:
    def answer(**changes: Any) -> dict[str, Any]:
        usual = {"step_s": 1.0, "peak_bytes": 5.0, "time": 1.0, "losses": [2.0], "samples": 8}
        return {**usual, "parts": {"data_s": 0.1, "comm_s": 0.4}, **changes}

    slow = answer(step_s=1.2, time=3.0, parts={"data_s": 0.5, "comm_s": 0.0}, losses=[4.0])
    whole = merge([answer(peak_bytes=7.0), slow])
    assert (whole["step_s"], whole["peak_bytes"], whole["time"], whole["samples"]) == (
        1.2,
        7.0,
        3.0,
        8,
    )
    assert whole["parts"] == {"data_s": 0.5, "comm_s": 0.2}  # all wait for the slow one's data
    assert whole["losses"] == [3.0]
    assert merge([answer(), answer(losses=[])])["losses"] == [2.0]  # a stage that has none
    third = 0.1 + 0.2
    assert merge([answer(losses=[third])] * 3)["losses"] == [
        third
    ]  # the same number, to the last bit
    assert merge([slow]) == slow
    assert merge([{"ended": 60}, {"ended": 60}]) == {"ended": 60}  # a script's end is no turn
    assert merge([answer(), {"ended": 60}]) == {"ended": 60}


def test_ranks_share_the_cores_that_states_start_on() -> None:
    for num_ranks, ahead in ((1, 2), (2, 2), (4, 1), (8, 0)):
        effort = Effort(num_ranks=num_ranks)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ridgeline.doctor.states.usable_cpus", lambda: set(range(16)))
            assert effort.num_ahead == ahead


def _losses(candidate: Candidate, effort: Effort) -> list[float]:
    try:
        candidate.check(effort)
        candidate.turn()
        assert candidate.parts().step_s > 0
        return candidate.losses[: effort.check_steps]
    finally:
        candidate.close()


@pytest.mark.slow
def test_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    """Also from processes that were ready before they knew what they were for."""
    one = Effort(check_steps=10, steps=2)
    two = Effort(check_steps=10, steps=2, num_ranks=2)
    alone = load_config(None, RECIPE).config
    expected = _losses(Candidate(alone, "alone", tmp_path, one), one)
    assert len({*expected}) == 10
    dp = load_config(None, [*RECIPE, "layout=dp=2"]).config
    spares = build_spares(dp, tmp_path, None, 1, 2)
    try:
        spares.prepare()
        found = _losses(Candidate(dp, "ready", tmp_path, two, None, spares), two)
    finally:
        spares.close()
    assert found == pytest.approx(expected, rel=1e-5)
    assert rank_log(tmp_path / "ready.log", 1).is_file()
    zero = load_config(None, [*RECIPE, "layout=dp=2,zero=3"]).config
    nudged = Candidate(zero, "nudged", tmp_path, two)
    nudged.nudge = 0.01
    moved = _losses(nudged, two)
    assert moved != pytest.approx(expected, rel=1e-5)
    assert moved == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
def test_buckets_are_tried_on_ranks_that_wait(tmp_path: Path) -> None:
    config = load_config(None, [*RECIPE, "layout=dp=2", "ddp.bucket_mb=0.001"]).config
    effort = Effort(rounds=2, steps=4, check_steps=12, budget_s=120.0)
    once = dataclasses.replace(REMEDIES["gradient buckets"], repeats=False)
    remedies = {once.name: once, "no recompute": REMEDIES["no recompute"]}
    ladder = climb(config, tmp_path, remedies=remedies, effort=effort, say=lambda text: None)
    assert ladder.num_ranks == 2
    baseline, first = ladder.rungs[:2]
    assert first.name == "gradient buckets"
    assert first.overrides == ("ddp.bucket_mb=0.004",)
    assert first.gain is not None
    assert first.loss_difference == pytest.approx(0.0, abs=1e-5)
    assert baseline.peak_bytes
    written = load_config(tmp_path / "recipe.yaml").config
    assert written.layout == "dp=2"
    kept = [rung for rung in ladder.rungs if rung.kept and rung is not baseline]
    assert written.ddp.bucket_mb == 0.001 * 4 ** len(kept)


OWN = """
import os
import torch
from torch.nn import functional as F
import ridgeline

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, int(x[:4].argmax())

job = ridgeline.start({layout!r}, device="cpu")
layers = [torch.nn.Linear(16, 16)] + [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
                                      for _ in range(4)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 4))
loader = job.loader(Data(), batch_size=8)
{loop}
"""
PLAIN = """
model = job.parallelize(model, bucket_mb=0.5)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ENGINE = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
example = torch.zeros(2, 16)
engine = job.engine(model, optimizer, loss=F.cross_entropy, example_input=example, bucket_mb=0.5)
"""
LINES = """
for x, y in loader:
    loss = F.cross_entropy(engine(x), y)
    engine.backward(loss)
    engine.step()
"""
BATCHES = """
batches = iter(loader)
while True:
    engine.train_batch(batches)
"""


def _script(
    folder: Path, layout: str, loop: str, num_ranks: int, samples: int = 4096
) -> tuple[list[float], Any]:
    """What a script as it is loses in its first ten steps, and what was seen of it."""
    script = folder / f"ranks{num_ranks}.py"
    text = OWN.format(layout=layout, loop=loop).replace("return 4096", f"return {samples}")
    script.write_text(text)
    effort = Effort(check_steps=10, steps=2, num_ranks=num_ranks)
    state = ScriptCandidate(of_script(script), script.stem, folder, effort, script, plain=True)
    return _losses(state, effort), state.config


ALONE: list[float] = []


def _alone(folder: Path) -> list[float]:
    """On one rank, with nothing of ours but the loader's order; once for all tests."""
    if not ALONE:
        ALONE.extend(_script(folder, "", PLAIN, 1)[0])
        assert ALONE[-1] < ALONE[0]
    return ALONE


@pytest.mark.slow
@pytest.mark.table(keep=2)
@pytest.mark.parametrize(
    ("layout", "loop"),
    [
        ("dp=2,zero=1,accumulate=2", ENGINE + LINES),
        ("dp=2", PLAIN),
        ("pp=2,microbatches=2", ENGINE + BATCHES),
    ],
)
def test_a_script_says_its_losses_whatever_drives_it(
    tmp_path: Path, layout: str, loop: str
) -> None:
    """An engine scales losses and takes them in parts; what is compared is what the loop means."""
    found, seen = _script(tmp_path, layout, loop, 2)
    assert found == pytest.approx(_alone(tmp_path), rel=1e-4)
    assert (seen.layout, seen.ddp.bucket_mb) == (layout, 0.5)
    assert seen.model.args["num_parameters"] > 0


@pytest.mark.slow
def test_a_script_that_ends_goes_on_with_settings_for_ranks(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text(OWN.format(layout="dp=2", loop=PLAIN).replace("return 4096", "return 200"))
    two = Effort(rounds=2, steps=8, check_steps=12, num_ranks=2)
    config = of_script(script)
    ddp = dataclasses.replace(config.ddp, bucket_mb=0.001)
    config = dataclasses.replace(config, layout="dp=2,compress=bf16", ddp=ddp)
    state = ScriptCandidate(config, "state", tmp_path, two, script)
    try:
        state.check(two)
        for _ in range(2):  # more steps than its 25
            assert state.turn() > 0
    finally:
        state.close()
    expected, _ = _script(tmp_path, "", PLAIN, 1, 200)
    assert state.losses[:10] != expected  # gradients were rounded on their way
    assert state.losses[:10] == pytest.approx(expected, rel=0.02)
    settings = yaml.safe_load((tmp_path / "state.yaml").read_text())
    assert settings["bucket_mb"] == 0.001
    assert "compress=bf16" in settings["layout"]


@pytest.mark.slow
def test_a_script_is_climbed_on_ranks_as_it_is_called(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "mine.py"
    script.write_text(OWN.format(layout="", loop=ENGINE + LINES))
    args = [
        "doctor",
        "mine.py",
        "-n",
        "2",
        "--climb",
        "--steps",
        "6",
        "--budget",
        "1",
        "--out",
        "out",
    ]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "every state has 2 processes of its own" in done.output
    ladder = json.loads((tmp_path / "out" / "ladder.json").read_text())
    assert (ladder["num_ranks"], len(ladder["rungs"])) == (2, 1)
    settings = yaml.safe_load((tmp_path / "out" / "climbed.yaml").read_text())
    # Of what the script says itself, what was kept: nothing.
    assert settings["layout"] == ""
    assert not {"bucket_mb", "loader", "channels_last"} & set(settings)
