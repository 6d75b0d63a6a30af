"""What a script of the user's own is seen to do, and the remedies that follow from it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.config import RunConfig
from ridgeline.doctor.measure import Options
from ridgeline.doctor.measured import ClassTime, Measured
from ridgeline.doctor.model_look import Look
from ridgeline.doctor.recommend import list_remedies
from ridgeline.doctor.script import measure_script
from ridgeline.doctor.seen import SeenScript, as_computed, as_listed, as_seen, of_script
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.machine.roofline import ComputeFacts
from ridgeline.tuning import TuneConfig

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
    waits = replace(seen.measured, data_s=0.5 * seen.measured.step_s)
    assert "loader processes" in names_of(waits, as_listed(of_script(script), found))


STREAM = """
import torch
from torch import nn
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(64), 3
model = nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
for x, y in torch.utils.data.DataLoader(Stream(), batch_size=16):
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def test_processes_for_a_stream_come_with_a_warning(script: Path) -> None:
    for text, warns in ((STREAM, True), (PLAIN, False)):
        script.write_text(text)
        seen = measure_script(script, [], Options(steps=8))
        assert seen.script is not None
        waits = replace(seen.measured, data_s=0.5 * seen.measured.step_s)
        lines = list_remedies(waits, as_listed(of_script(script), seen.script))
        processes = next(line for line in lines if line.startswith("loader processes"))
        assert ("get_worker_info" in processes) is warns


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
    waits = replace(seen.measured, data_s=0.5 * seen.measured.step_s)
    config = replace(
        as_seen(of_script(script), found), data=replace(of_script(script).data, workers=0)
    )
    for has_job, told in (
        (True, "job.loader(..., workers="),
        (False, "DataLoader(..., num_workers=N"),
    ):
        lines = list_remedies(waits, config, has_job=has_job)
        assert told in next(line for line in lines if line.startswith("loader processes"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN, "--climb tries what can be set from outside, in a script with five lines: `import"),
        (JOB, "--climb -- --lr 3` tries what can be set from outside, and keeps what is faster"),
    ],
    ids=["plain", "job"],
)
def test_the_command_says_what_would_help_a_script(
    script: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(script.parent)
    script.write_text(text)
    args = ["doctor", str(script), "--steps", "8", "--out", "there", "--", "--lr", "3"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    listed = json.loads(Path("there", "doctor.json").read_text())["remedies"]
    assert listed
    shown = done.stdout.partition("remedies that apply, the most promising first:\n")[2]
    lines = shown.splitlines()
    assert lines[: len(listed)] == [f"  {remedy}" for remedy in listed]
    assert said in lines[len(listed)]


COMPILED = {
    "a wrapper": "model = torch.compile(model, backend='eager')",
    "the model's own": "model.compile(backend='eager')",
    "a function": "forward = torch.compile(forward, backend='eager')",
    "nothing": "",
}
BARE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    def forward(self, x):
        return self.inner(x)
def train():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def forward(x):
        return model(x).sum()
    HOW
    while True:
        forward(torch.randn(4, 8)).backward()
        optimizer.step()
train()
"""


@pytest.mark.parametrize("how", COMPILED)
def test_what_a_script_compiles_is_known_when_it_is_over(script: Path, how: str) -> None:
    """Nothing of it is left by then but what was seen at its first step."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    script.write_text(BARE.replace("HOW", COMPILED[how]))
    seen = measure_script(script, [], Options(steps=6))
    assert seen.script is not None
    assert seen.script.compiles is (how != "nothing")
    names = names_of(on_a_gpu(seen.measured), as_listed(of_script(script), seen.script))
    assert ("compile" in names) is (how == "nothing")
    assert not names & {"autotune", "tile search", "compile in one piece"}
    # A climb leaves it to the script.
    assert not Layout.parse(as_seen(of_script(script), seen.script).layout).compile


def on_a_gpu(measured: Measured) -> Measured:
    return replace(measured, device_kind="cuda")


def names_of(measured: Measured, config: RunConfig) -> set[str]:
    return {text.partition(":")[0].partition(" (")[0] for text in list_remedies(measured, config)}


def test_what_a_script_does_by_itself_is_not_recommended() -> None:
    measured = Measured(
        source="s", device_kind="cuda", device_name="g", step_s=1.0,
        classes=(
            ClassTime("matrix", 0.4, precision="fp32"), ClassTime("convolution", 0.3),
            ClassTime("norm and element-wise", 0.2), ClassTime("optimizer", 0.1),
        ),
    )  # fmt: skip
    look = asdict(Look(num_conv2d=9, num_blocks=4, num_block_linears=9, num_outputs=10))
    empty = of_script(Path("s.py"))

    def listed(**seen: Any) -> set[str]:
        return names_of(measured, as_listed(empty, SeenScript("dp=1", look, **seen)))

    assert {"tf32", "bf16", "convolution search", "compile", "fused optimizer"} <= listed()
    assert "fused optimizer" not in listed(fused=True)
    assert "convolution search" not in listed(searches=True)
    assert not listed(dtype="float64") & {"tf32", "bf16"}
    narrow = {"layout": "dp=1,precision=bf16", "look": {**look, "num_conv2d": 0}}

    def narrowed(**seen: Any) -> set[str]:
        return names_of(measured, as_listed(empty, SeenScript(**{**narrow, **seen})))

    assert "channels last" in narrowed(look=look)
    assert "channels last" not in narrowed(look=look, channels_last=True)
    assert "narrow residual" in narrowed()
    assert "narrow residual" not in narrowed(dtype="bfloat16")
    assert "narrow residual" not in narrowed(tune={"residual": "bf16"})
    assert "cuDNN attention" not in narrowed()  # it has none
    both = replace(measured, classes=(*measured.classes, ClassTime("attention", 0.1)))
    config = as_listed(empty, SeenScript(**narrow))
    assert "cuDNN attention" in names_of(both, config)


def test_settings_of_a_job_are_what_a_climb_begins_with() -> None:
    seen = SeenScript(tune={**asdict(TuneConfig()), "pad": 64, "fused_optimizer": True}, workers=3)
    config = as_seen(of_script(Path("s.py")), seen)
    assert (config.tune.pad, config.tune.fused_optimizer) == (64, True)
    assert (config.data.workers, config.data.prefetch) == (3, 2)
    assert not as_seen(of_script(Path("s.py")), SeenScript()).tune.fused_optimizer


def test_a_cpu_computes_in_16_bits_where_that_was_measured_to_be_faster() -> None:
    def listed(rate: float) -> set[str]:
        measured = Measured(
            source="s", device_kind="cpu", device_name="c", step_s=1.0,
            classes=(ClassTime("convolution", 0.9, precision="fp32"),),
            roofline=ComputeFacts("h", "cpu", "c", 1.0, 1, peak_flops={"fp32": 1e11, "bf16": rate * 1e11}),
        )  # fmt: skip
        return names_of(measured, as_listed(of_script(Path("s.py")), SeenScript("dp=1")))

    assert "bf16" in listed(2.0)
    assert "bf16" not in listed(1.1)
    assert "tf32" not in listed(2.0)


def test_what_a_job_was_told_stands_above_what_was_seen() -> None:
    measured = Measured(
        source="s", device_kind="cuda", device_name="g", step_s=1.0,
        classes=(ClassTime("matrix", 0.5, precision="fp16"), ClassTime("loss", 0.9, precision="fp32")),
    )  # fmt: skip
    assert as_computed(SeenScript("dp=1"), measured).layout == str(Layout(precision="fp16"))
    told = SeenScript(str(Layout(precision="bf16")))
    assert as_computed(told, measured) == told
    wide = replace(measured, classes=(ClassTime("matrix", 0.5, precision="tf32"),))
    assert Layout.parse(as_computed(SeenScript("dp=1"), wide).layout).precision == "tf32"


RANKS = """
import torch
import torch.distributed as dist
GROUP
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    while True:
        model(torch.randn(8, 64)).square().mean().backward()
        REDUCE
        optimizer.step()
finally:
    END
"""


@pytest.mark.parametrize("met", [True, False])
def test_ranks_that_leave_their_group_are_ranks_and_strangers_are_none(
    script: Path, monkeypatch: pytest.MonkeyPatch, met: bool
) -> None:
    monkeypatch.chdir(script.parent)
    text = RANKS.replace("GROUP", "dist.init_process_group('gloo')" if met else "")
    text = text.replace("REDUCE", "dist.all_reduce(model.weight.grad)" if met else "pass")
    script.write_text(text.replace("END", "dist.destroy_process_group()" if met else "pass"))
    args = ["doctor", str(script), "-n", "2", "--steps", "8", "--out", "there", "--json"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    ranks = json.loads(done.stdout)["measured"]
    assert [one["num_ranks"] for one in ranks] == ([2, 2] if met else [1])
    assert [one["rank"] for one in ranks[0]["ranks"]] == ([0, 1] if met else [0])
    strange = "2 processes exchanged nothing" in " ".join(ranks[0]["notes"])
    assert strange is not met


def test_where_results_go_is_looked_at_first(script: Path) -> None:
    script.write_text("raise ValueError('it ran')\n")
    (script.parent / "file").write_text("")
    done = CliRunner().invoke(
        app, ["doctor", str(script), "--out", str(script.parent / "file" / "x")]
    )
    assert isinstance(done.exception, UsageError), done.output
    assert "of --out (Not a directory); name another" in str(done.exception)
