"""`ridgeline doctor --climb` as it is called: a recipe, a script, an interrupt, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from ridgeline.config import RunConfig, load_config
from ridgeline.doctor.choice import carry
from ridgeline.doctor.climb import climb, climb_script
from ridgeline.doctor.ending import told_interrupts
from ridgeline.doctor.remedies.contract import Parts, Remedy
from ridgeline.doctor.remedies.table import REMEDIES, SCRIPT_REMEDIES
from ridgeline.doctor.states import Effort, ScriptCandidate
from ridgeline.errors import RunError, UsageError

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import sys, time
import torch
from torch.nn import functional as F
{imports}

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return {samples}

    def __getitem__(self, index):
        time.sleep(0.002)
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return x, int(x.sum() > 0)

assert sys.argv[1:] == ["--name", "a b"], sys.argv
{setup}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for x, y in loader:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""
LAYER = "torch.nn.Linear(16, 2)"
OWN = f"""job = ridgeline.start(device="cpu")
model = job.parallelize({LAYER})
loader = job.loader(Slow(), batch_size=8)"""
PLAIN = f"""torch.manual_seed(0)
model = {LAYER}
loader = torch.utils.data.DataLoader(Slow(), 8)"""
TAKES = ("-m", "ridgeline.cli", "doctor")


def script(folder: Path, setup: str = OWN, samples: int = 4096) -> str:
    imports = "import ridgeline" if setup == OWN else ""
    path = folder / "mine.py"
    path.write_text(SCRIPT.format(imports=imports, samples=samples, setup=setup))
    return str(path)


def call(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *TAKES, *args], capture_output=True, text=True, cwd=folder, env=variables
    )


@pytest.mark.slow
def test_a_script_is_climbed_and_leaves_settings_that_it_runs_with(tmp_path: Path) -> None:
    mine = script(tmp_path)
    out = tmp_path / "out"
    done = call(
        tmp_path, mine, "--climb", "--steps", "6", "--rounds", "2", "--budget", "600",
        "--out", str(out), "--", "--name", "a b",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for part in ("held back by data", "baseline", "loader processes", "x baseline", "climbed.yaml"):
        assert part in done.stdout
    ladder = json.loads((out / "ladder.json").read_text())
    rungs = {rung["name"]: rung for rung in ladder["rungs"]}
    assert ladder["unit"] == "samples"
    assert rungs["loader processes"]["loss_difference"] == 0.0  # the same samples, the same weights
    settings = yaml.safe_load((out / "climbed.yaml").read_text())
    # Whether it is faster is for the clock of this machine to say; what is written follows what was kept.
    workers = settings.get("loader", {}).get("workers", 0)
    assert (workers >= 2) == rungs["loader processes"]["kept"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "RIDGELINE_TUNE": str(out / "climbed.yaml")}
    Path(mine).write_text(Path(mine).read_text().replace("4096", "64"))
    again = subprocess.run(
        [sys.executable, mine, "--name", "a b"], capture_output=True, text=True, env=variables
    )
    assert again.stdout == "done\n", again.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "samples", "says"),
    [
        (PLAIN, 4096, ("ridgeline.start()", "job.parallelize(model)")),
        (OWN, 32, ("ended after 4 steps", "let it train longer")),
        ("raise SystemExit(3)", 32, ("does not run as it is", "ended with 3")),
    ],
)
def test_scripts_that_cannot_be_climbed_say_why_in_one_sentence(
    tmp_path: Path, setup: str, samples: int, says: tuple[str, ...]
) -> None:
    mine = Path(script(tmp_path, setup, samples))
    effort = Effort(rounds=1, steps=2, warm_up=1, check_steps=4)
    kind = RunError if "SystemExit" in setup else UsageError
    with pytest.raises(kind) as error:
        climb_script(mine, ["--name", "a b"], tmp_path / "out", effort=effort)
    assert all(part in str(error.value) for part in says)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_steps", [23, 24, 30, 500])
def test_a_script_has_to_reach_the_steps_that_are_compared(num_steps: int, tmp_path: Path) -> None:
    class Short(ScriptCandidate):
        """A script of so many steps."""

        taken = 0

        def _start(self) -> Any:
            self.taken, self.started = 0, 0.0

        def _end(self, wait_s: float) -> None:
            pass

        def _ask(self, untimed: int, timed: int) -> dict[str, Any]:
            self.taken += untimed + timed
            if self.taken > num_steps:
                return {"ended": num_steps}
            parts = {
                "step_s": 0.1,
                "data_s": 0.0,
                "samples": 8,
                "units_per_sample": 1,
                "device": "cpu",
            }
            return {**parts, "losses": [1.0] * (untimed + timed), "peak_bytes": 0, "time": 0.0}

        def parts(self) -> Parts:
            return Parts(step_s=0.1)

    effort = Effort()
    state = Short(RunConfig(), "own", tmp_path, effort, tmp_path / "own.py")
    if num_steps < effort.check_steps:
        with pytest.raises(
            RunError, match="ended after 23 steps of its optimizer, and 24 are needed"
        ):
            state.check(effort)
        return
    state.check(effort)
    for _ in range(3):
        assert state.turn() == 0.1


def test_what_cannot_be_climbed_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for args, says in (
        (("digits", "layout=dp=2", "--climb"), "'dp=2' in layout needs 2 processes"),
        (("digits", "layout=dp=4", "--climb", "-n", "2"), "'dp=4' in layout needs 4 processes"),
        (("digits", "--climb", "--budget", "0"), "--budget"),
    ):
        done = call(tmp_path, *args)
        assert done.returncode == 2
        assert says in done.stderr


SETTINGS = [
    "model.name=mlp",
    "model.args={in_features: 16, hidden: 32, out_features: 4}",
    "data.source=synthetic",
    "data.args={shape: [16], classes: 4}",
    "train.batch=8",
    "train.steps=500",
    "device=cpu",
    "threads=1",
]


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_climbed(tmp_path: Path) -> None:
    """After the baseline: the ladder so far and the recipe are there, and no process is left."""

    def interrupt(step: object, config: object) -> str:
        raise KeyboardInterrupt

    remedy = Remedy("never", interrupt, lambda step, config: 2.0, lambda config: [], "none")
    said: list[str] = []
    effort = Effort(rounds=1, steps=2, warm_up=1, check_steps=4)
    config = load_config(None, SETTINGS).config
    ladder = climb(config, tmp_path, remedies={"never": remedy}, effort=effort, say=said.append)
    assert ladder.interrupted
    assert [rung.name for rung in ladder.rungs] == ["baseline"]
    assert json.loads((tmp_path / "ladder.json").read_text())["interrupted"]
    assert load_config(tmp_path / "recipe.yaml").config == config
    assert "interrupted" in " ".join(said)


@pytest.mark.table(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1],
    ids=["ctrl-c", "time-limit", "before-the-limit"],
)
def test_the_command_ends_with_1_after_an_interrupt(tmp_path: Path, number: signal.Signals) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        *TAKES,
        script(tmp_path),
        "--climb",
        "--steps",
        "6",
        "--rounds",
        "50",
    ]
    process = subprocess.Popen(
        [*command, "--out", "out", "--", "--name", "a b"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=variables,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("baseline:"):
            break
    time.sleep(1.0)
    process.send_signal(number)
    _, err = process.communicate(timeout=480)
    assert process.returncode == 1, err
    assert "interrupted; what was climbed so far is in out" in err
    assert "Traceback" not in err
    assert (tmp_path / "out" / "climbed.yaml").is_file()
    assert (tmp_path / "out" / "ladder.svg").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_what_says_that_a_job_ends_interrupts_once(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    with told_interrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        for one in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), one)  # while all is written
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)] == before


def test_a_measured_profile_is_carried_to_the_states_after_it() -> None:
    classes = {"matrix": 0.4, "norm and element-wise": 0.2, "optimizer": 0.1}
    before = Parts(step_s=1.0, data_s=0.2, launch_s=0.1, device_kind="cuda", classes=classes)
    after = carry(before, Parts(step_s=0.5, data_s=0.1, classes={"optimizer": 0.05}))
    assert after.step_s == 0.5
    assert after.data_s == 0.1
    assert after.of_class("matrix").seconds == pytest.approx(0.2)
    assert after.of_class("optimizer").seconds == 0.05
    assert after.launch_s == pytest.approx(0.05)


def test_scripts_have_remedies_that_need_no_change_of_code() -> None:
    assert set(SCRIPT_REMEDIES) - set(REMEDIES) <= {"chunked loss", "CUDA graphs"}
    for name in ("bf16 weights", "stochastic rounding", "less accumulation", "reading threads"):
        assert name not in SCRIPT_REMEDIES
    for name in ("chunked loss", "CUDA graphs"):
        assert SCRIPT_REMEDIES[name].advice
