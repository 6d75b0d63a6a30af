"""What a script of the user's own is seen to do, and the remedies that follow from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.cli_doctor import list_remedies
from ridgeline.doctor.measure import Options
from ridgeline.doctor.measured import ClassTime, Measured
from ridgeline.doctor.model_look import Look
from ridgeline.doctor.script import measure_script
from ridgeline.doctor.seen import SeenScript, as_computed, as_seen, look_at_script, of_script
from ridgeline.layout import Layout

PLAIN = """
import time
import torch
from torch import nn
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4096
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.zeros(64), index % 10
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
for x, y in torch.utils.data.DataLoader(Slow(), batch_size=16):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    nn.functional.cross_entropy(out.float(), y).backward()
    optimizer.step()
"""
JOB = """
import ridgeline
import torch
job = ridgeline.start(device="cpu", layout="dp=1,recompute=full")
model = job.parallelize(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 7)))
data = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.arange(1024) % 7)
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
while True:
    for x, y in job.loader(data, batch_size=16, workers=1):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "own.py"


def test_a_script_of_plain_torch_is_seen(script: Path) -> None:
    script.write_text(PLAIN)
    seen = measure_script(script, [], Options(steps=8))
    found = seen.script
    assert found is not None
    assert (found.has_job, found.workers, found.fused) == (False, 0, False)
    assert found.look["num_outputs"] == 10
    # It enters autocast itself, which only its products show.
    assert Layout.parse(found.layout) == Layout(precision="bf16")
    remedies = list_remedies(seen.measured, as_seen(of_script(script), found))
    assert remedies[0].startswith("loader processes (up to x")
    assert any(text.startswith("fused optimizer") for text in remedies)


def test_a_script_with_a_job_is_seen(script: Path) -> None:
    script.write_text(JOB)
    seen = measure_script(script, [], Options(steps=8))
    found = seen.script
    assert found is not None
    assert (found.has_job, found.workers, found.fused) == (True, 1, True)
    assert found.look["num_outputs"] == 7
    assert Layout.parse(found.layout).recompute == "full"
    names = [
        t.partition(" (")[0]
        for t in list_remedies(seen.measured, as_seen(of_script(script), found))
    ]
    assert "no recompute" in names
    assert "fused optimizer" not in names  # which the script has chosen itself


@pytest.mark.parametrize(
    ("text", "said"), [(PLAIN, "--climb tries them in a script with five lines: `import ridgeline`"),
                       (JOB, "own.py --climb` tries them, and keeps what is faster and right")],
)  # fmt: skip
def test_the_command_says_what_would_help_a_script(
    script: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(script.parent)
    script.write_text(text)
    done = CliRunner().invoke(app, ["doctor", str(script), "--steps", "8", "--out", "there"])
    assert done.exit_code == 0, done.output
    listed = json.loads(Path("there", "doctor.json").read_text())["remedies"]
    assert listed
    shown = done.stdout.partition("remedies that apply, the most promising first:\n")[2]
    lines = shown.splitlines()
    assert lines[: len(listed)] == [f"  {remedy}" for remedy in listed]
    assert said in lines[len(listed)]


def test_a_compiled_model_is_known_as_such() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    before = look_at_script(None, model, Look(), 0, optimizer)
    wrapper = torch.compile(nn.Sequential(model), backend="eager")
    after = look_at_script(None, model, Look(), 0, optimizer)
    assert wrapper is not None
    assert not Layout.parse(before.layout).compile
    assert Layout.parse(after.layout).compile
    other = nn.Linear(4, 2)
    other.compile(backend="eager")
    assert Layout.parse(look_at_script(None, other, Look(), 0, optimizer).layout).compile


def test_what_a_job_was_told_stands_above_what_was_seen() -> None:
    measured = Measured(
        source="s", device_kind="cuda", device_name="g", step_s=1.0,
        classes=(ClassTime("matrix", 0.5, precision="fp16"), ClassTime("loss", 0.9, precision="fp32")),
    )  # fmt: skip
    assert as_computed(SeenScript("dp=1"), measured).layout == str(Layout(precision="fp16"))
    told = SeenScript(str(Layout(precision="bf16")))
    assert as_computed(told, measured) == told
