"""`ridgeline doctor` on a recipe, a script and a finished run; what it leaves alone."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.config import dump_config, find_recipe, load_config
from ridgeline.doctor import model_look
from ridgeline.doctor.finished import measure_run
from ridgeline.doctor.interface import surely_lacks_interface
from ridgeline.doctor.measure import Facts, Options, measure, measure_training
from ridgeline.doctor.measured import measured_from_dict
from ridgeline.doctor.recommend import list_remedies
from ridgeline.doctor.script import measure_script
from ridgeline.doctor.verdict import judge
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.machine.record import add_compute
from ridgeline.machine.roofline import ComputeFacts
from ridgeline.rundir import CONFIG, EVENTS, FACTS, LAYOUT, RankRecord, RunDir, StepRecord
from ridgeline.train.setup import build_training

SMALL = ["train.batch=16", "threads=1", "device=cpu"]


def _config(*overrides: str):
    return load_config(find_recipe("digits"), [*SMALL, *overrides]).config


def _run(path: Path, steps: int = 20, **parts: float) -> RunDir:
    run = RunDir.at(path)
    run.write_text(CONFIG, dump_config(_config()))
    run.write_text(LAYOUT, "dp=1\n")
    machine = {
        "device_kind": "cuda",
        "device_name": "Some GPU",
        "device_memory_bytes": 80e9,
        "peak_flops": {"fp32": 60e12},
    }
    run.write_json(FACTS, {"machine": machine, "model": {"train_flops_per_sample": 1e9}})
    for step in range(1, steps + 1):
        run.append(StepRecord(step, 0, 0.0, 1.0, 0.1, 64, 0.1, memory_bytes=int(10e9), **parts))
    return run


def test_a_finished_run_is_judged_by_its_records(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", data_s=0.07, forward_s=0.01, backward_s=0.015, optimizer_s=0.002)
    measured = measure_run(run)
    assert measured.step_s == pytest.approx(0.1)
    assert (measured.host_s, measured.other_s) == (0.0, pytest.approx(0.003))
    assert judge(measured).limit == "data"
    done = CliRunner().invoke(app, ["doctor", str(run.path)])
    assert done.exit_code == 0, done.output
    assert "held back by data: 70%" in done.stdout
    written = json.loads((run.path / "doctor.json").read_text())
    assert written["verdict"]["limit"] == "data"
    assert (run.path / "step.svg").is_file()


def test_a_finished_run_that_computes(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", forward_s=0.03, backward_s=0.06)
    verdict = judge(measure_run(run))
    assert verdict.limit == "compute"
    assert "at 1% of what the device reaches" in verdict.sentence
    run.write_json(
        FACTS,
        {
            "machine": {"device_kind": "cpu", "peak_flops": {"fp32": 1e11}},
            "model": {"train_flops_per_sample": 1e9},
        },
    )
    assert any(
        "7.1 times the peak that was measured, so that was measured too low" in text
        for text in judge(measure_run(run)).evidence
    )


def test_what_records_do_not_show_is_not_called_the_host(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", data_s=0.01, forward_s=0.01, backward_s=0.02)
    verdict = judge(measure_run(run))
    assert (verdict.limit, verdict.unexplained) == ("not explained", pytest.approx(0.6))
    assert "60% of the step is not explained by what was measured" in verdict.sentence
    assert "with its recipe" in verdict.evidence[1]
    assert [f.share for f in verdict.findings if f.limit == "host"] == [0.0]


def test_a_finished_run_with_a_slow_rank(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", forward_s=0.01, backward_s=0.01, comm_s=0.08)
    for rank, comm in ((0, 0.08), (1, 0.001)):
        run.append(RankRecord(rank, "h", "cpu", 20, 0.1, 0.1, {"comm_s": comm, "data_s": 0.0}))
    run.add_event("straggler", step=9, rank=1, part="compute", excess=0.8)
    measured = measure_run(run)
    assert judge(measured).within == "rank 1"
    assert any("rank 1 cost 80%" in note for note in measured.notes)


def test_a_finished_pipeline_waits_for_its_stages(tmp_path: Path) -> None:
    """The bubble is no arithmetic; what it would be with even stages, or more microbatches, is said."""
    run = _run(tmp_path / "run", forward_s=0.018, backward_s=0.03, bubble_s=0.05)
    run.write_text(LAYOUT, "pp=4,microbatches=4\n")
    for rank, bubble in enumerate((0.048, 0.04, 0.042, 0.05)):
        run.append(RankRecord(rank, "h", "cpu", 20, 0.1, 0.1, {"bubble_s": bubble}))
    measured = measure_run(run)
    verdict = judge(measured)
    assert (verdict.limit, verdict.share) == ("communication", pytest.approx(0.5))
    said = (
        "50% of the step is waiting for other stages of the pipeline (microbatches=32 would leave "
    )
    said += "even ranks 9%)"
    assert said in verdict.sentence
    assert verdict.evidence[0].startswith("50 ms of a step of 100 ms go by between microbatches")
    assert verdict.evidence[1] == (
        "4 even ranks with microbatches=4 are idle for 43% of a step, with microbatches=32 for 9%"
    )
    assert verdict.evidence[2].startswith(
        "their own work is 50 ms (rank 3) to 60 ms (rank 1) a step"
    )
    done = CliRunner().invoke(app, ["doctor", str(run.path)])
    assert said in done.stdout
    (written,) = json.loads((run.path / "doctor.json").read_text())["measured"]
    assert measured_from_dict(written) == measured


def test_stages_of_different_work_are_no_slow_rank(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", forward_s=0.01, backward_s=0.03, bubble_s=0.05)
    run.write_text(LAYOUT, "pp=2,microbatches=16\n")
    for rank, bubble in enumerate((0.05, 0.008)):
        run.append(RankRecord(rank, "h", "cpu", 20, 0.1, 0.1, {"bubble_s": bubble}))
    verdict = judge(measure_run(run))
    assert verdict.limit == "communication"
    assert verdict.within == "rank 1 has 92 ms of work a step, rank 0 50 ms"


@pytest.mark.parametrize(
    ("batch", "microbatches", "schedule", "more"),
    [(0, 4, "1f1b", 10), (16, 4, "1f1b", 16), (30, 4, "1f1b", 10), (6, 4, "1f1b", 6), (5, 5, "1f1b", 0),
     (30, 2, "interleaved", 10), (64, 16, "1f1b", 0)],
)  # fmt: skip
def test_microbatches_are_recommended_that_the_batch_divides_into(
    batch: int, microbatches: int, schedule: str, more: int
) -> None:
    from ridgeline.doctor.measured import Pipelined
    from ridgeline.doctor.verdict import _more_microbatches

    pipe = Pipelined(2, microbatches, 1, schedule, 0.1)
    assert _more_microbatches(pipe, batch) == more


def test_a_finished_run_is_judged_by_the_ranks_that_it_has_now(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", steps=0)
    for begin, num_ranks, step_s in ((0.0, 4, 0.1), (100.0, 2, 0.3)):
        details = {"layout": f"dp={num_ranks}", "num_ranks": num_ranks}
        event = {"event": "start", "time": begin, "details": details}
        run.append_line(EVENTS, event)
        for step in range(20):
            run.append(
                StepRecord(
                    int(begin) + step + 1, 0, begin + step, 1.0, 0.1, 64, step_s, forward_s=step_s
                )
            )
        for rank in range(num_ranks):
            run.append(RankRecord(rank, "h", "cpu", 20, step_s, step_s))
    run.write_text(LAYOUT, "dp=2\n")
    measured = measure_run(run)
    assert (measured.step_s, measured.num_ranks, len(measured.ranks)) == (0.3, 2, 2)
    assert measured.num_steps == 15


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs two or more"):
        measure_run(_run(tmp_path / "run", steps=1))


def test_a_run_of_two_steps_is_judged(tmp_path: Path) -> None:
    measured = measure_run(_run(tmp_path / "run", steps=2, forward_s=0.09))
    assert (measured.num_steps, measured.spread) == (1, 0.0)


def test_a_run_does_not_claim_to_know_what_fills_its_memory(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", steps=0)
    for step in range(1, 21):
        run.append(
            StepRecord(step, 0, 0.0, 1.0, 0.1, 64, 0.1, memory_bytes=int(79e9), optimizer_s=0.09)
        )
    verdict = judge(measure_run(run))
    assert (verdict.limit, verdict.cause) == ("memory size", "a full device")
    assert verdict.evidence[0] == "79 GB of 80 GB are in use at the peak (99%)"


@pytest.mark.parametrize(
    "option", [["-n", "2"], ["--steps", "9"], ["--machine", "m.json"], ["--trace"], ["--nvtx"]]
)
def test_what_a_finished_run_cannot_do_is_refused(tmp_path: Path, option: list[str]) -> None:
    run = _run(tmp_path / "run", forward_s=0.09)
    done = CliRunner().invoke(app, ["doctor", str(run.path), *option])
    assert isinstance(done.exception, UsageError), done.output
    assert str(done.exception).startswith(f"{option[0]} is for a training that runs")
    assert not run.file("doctor.json").exists()


def test_remedies_are_those_of_the_layout_that_ran(tmp_path: Path) -> None:
    """A recipe leaves the number of replicas to whoever starts it; the run's own layout has it."""
    run = _run(tmp_path / "run", forward_s=0.07, comm_s=0.02)
    alone = CliRunner().invoke(app, ["doctor", str(run.path)])
    run.write_text(LAYOUT, "dp=2\n")
    two = CliRunner().invoke(app, ["doctor", str(run.path)])
    assert "gradients in bf16" not in alone.stdout
    assert "gradients in bf16 (up to x1.09): 20% of the step is communication" in two.stdout


def test_a_layout_that_the_planner_chose_is_judged(tmp_path: Path, monkeypatch) -> None:
    """The measurement is not thrown away for it, and a program can read what comes out."""
    monkeypatch.chdir(tmp_path)
    args = ["doctor", "digits", *SMALL, "layout=auto", "-n", "2", "--steps", "6", "--json"]
    args.append("ddp.bucket_mb=0.01")
    done = CliRunner().invoke(app, [*args, "--out", "there"])
    assert done.exit_code == 0, done.output
    value = json.loads(done.stdout)
    assert value["measured"][0]["num_ranks"] == 2
    assert any(text.startswith("gradient buckets") for text in value["remedies"])
    assert "layout auto: dp=2" in done.stderr


def test_a_recipe_is_measured_and_nothing_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen = measure(_config(), read_rank_env({}), Options(steps=8))
    measured = seen.measured
    assert list(tmp_path.iterdir()) == []
    assert measured.source == "recipe digits"
    assert measured.step_s > 0
    names = {c.name for c in measured.classes}
    assert {"convolution", "optimizer", "loss", "norm and element-wise"} <= names
    convolutions = measured.of_class("convolution")
    assert convolutions.flops > 1e6
    assert measured.memory is not None
    assert measured.memory.weights_bytes > 0
    assert seen.timeline
    assert measured.roofline is not None


def test_a_training_gets_its_state_back() -> None:
    training = build_training(_config("optim.name=adamw"), read_rank_env({}))
    before = {k: v.clone() for k, v in training.model.state_dict().items()}
    generator = torch.get_rng_state()
    measured = measure_training(training, steps=6)
    assert measured.num_profiled == 2
    after = training.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not training.optimizer.state
    assert torch.equal(generator, torch.get_rng_state())
    training.close_loaders()


SCRIPT = """
import sys
import torch
from pathlib import Path
import ridgeline

job = ridgeline.start(device="cpu")
model = job.parallelize(torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.arange(512) % 2)
loader = job.loader(data, batch_size=8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saves = job.checkpoints(Path(sys.argv[1]), model, optimizer, loader, every=5)
for epoch in saves.epochs(int(sys.argv[2])):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saves.step()
Path(sys.argv[1], "finished").write_text("")
"""


def test_a_script_is_ended_when_enough_was_seen(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    made = tmp_path / "saves"
    made.mkdir()
    measured = measure_script(script, [str(made), "100"], Options(steps=8)).measured
    assert measured.source == "script own.py"
    assert measured.data_s > 0
    assert list(made.iterdir()) == []  # no checkpoint, and not its last line


def test_a_script_that_ends_too_early_is_told(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("import torch\n")
    with pytest.raises(
        RunError, match=r"no optimizer of torch's had made a step by then; .* 15 steps"
    ):
        measure_script(script, [], Options(steps=8))
    script.write_text(AROUND + "for _ in range(5):\n    step()\n")
    with pytest.raises(
        RunError, match=r"after 5 steps .* 15 are needed, or 13 with --steps 6; let"
    ):
        measure_script(script, [], Options(steps=8))
    with pytest.raises(RunError, match=r"after 5 steps .* 13 are needed; let"):
        measure_script(script, [], Options(steps=6))


LAYERS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
model = torch.nn.Sequential(model)
other = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def test_the_layers_of_a_script_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What misses the tensor cores is told by them, in a script as in a recipe."""
    seen = []

    def explain(probe: object, watched: object, facts: Facts, roofline: object) -> None:
        seen.append(facts)

    monkeypatch.setattr("ridgeline.doctor.script.explain", explain)
    script = tmp_path / "own.py"
    script.write_text(LAYERS)
    measure_script(script, [], Options(steps=6))
    assert seen[0].model is not None
    assert [name for name, _ in seen[0].model.named_parameters()] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]


def test_a_script_that_fails_leaves_its_traceback(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "own.py"
    script.write_text("def helper():\n    raise ValueError('shapes do not fit')\nhelper()\n")
    done = CliRunner().invoke(app, ["doctor", str(script), "--out", str(tmp_path / "there")])
    assert isinstance(done.exception, RunError), done.output
    first, second = str(done.exception).splitlines()
    where = os.path.relpath(script)
    assert first.endswith(f"ValueError: shapes do not fit ({where}:2)")
    path = Path(second.partition("traceback: ")[2])
    assert f'"{script}", line 2, in helper' in path.read_text()


def test_what_was_asked_for_and_not_done_is_said(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    add_compute(other, ComputeFacts("h", "cuda", "Some GPU", 1.0, 1))
    measured = measure(_config(), read_rank_env({}), Options(6, nvtx=True, machine=other)).measured
    roofline, marks = measured.notes
    assert "has no figures of" in roofline
    assert f"`ridgeline machine compute --device cpu --out {other}` adds them" in roofline
    assert marks.startswith("--nvtx marked nothing")
    assert measure(_config(), read_rank_env({}), Options(6)).measured.notes == ()


AROUND = """
import torch
from torch.profiler import record_function
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    weight.sum().backward()
    optimizer.step()
"""


def test_annotations_of_the_script_are_no_danger(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    loop = "for _ in range(40):\n    with record_function('mine'):\n        step()\n"
    script.write_text(AROUND + loop)
    assert measure_script(script, [], Options(steps=8)).measured.num_steps == 6
    script.write_text(
        AROUND + "with record_function('mine'):\n    for _ in range(40):\n        step()\n"
    )
    with pytest.raises(RunError, match="open it inside the loop"):
        measure_script(script, [], Options(steps=8))


def test_the_command_measures_in_a_process_of_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    args = ["doctor", "digits", *SMALL, "--steps", "8", "--out", "there", "--trace"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "a step takes" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["there"]  # nothing of the ranks stays
    written = {path.name for path in (tmp_path / "there").iterdir()}
    assert written == {"doctor.json", "step.svg", "roofline.svg", "memory.svg", "trace.json"}
    assert "traceEvents" in json.loads((tmp_path / "there" / "trace.json").read_text())


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["nowhere.py"], "no script at nowhere.py"),
        (["digits", "--machine", "nowhere.json"], "no file nowhere.json"),
        (["digits", "layout=dp=3", "-n", "2"], "layout"),
        (["no-such-recipe"], "no-such-recipe"),
        (["own.py", "--epochs", "3"], "--: ridgeline doctor own.py -- --epochs ..."),
        (["own.py", "--stpes", "5"], "no option of the doctor's (but --steps is)"),
        (["own.py", "--epochs=3"], "--: ridgeline doctor own.py -- --epochs=3 ..."),
        ([str(Path(__file__).parent)], "is a directory without config.yaml, and so no run"),
    ],
)
def test_slips_are_one_sentence(args: list[str], word: str) -> None:
    done = CliRunner().invoke(app, ["doctor", *args])
    assert isinstance(done.exception, UsageError), done.output
    assert word in str(done.exception)


PLAIN = """
import sys
import torch
from pathlib import Path
{imports}
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    Path(sys.argv[1]).write_text(str(step + 1))
    model(torch.randn(4, 8)).sum().backward()
    try:
        optimizer.step()
    except Exception:
        pass
"""


def test_a_climb_of_a_script_without_a_job_is_refused_before_it_runs(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(PLAIN.format(imports=""))
    steps = tmp_path / "steps"
    done = CliRunner().invoke(app, ["doctor", str(script), "--climb", "--", str(steps)])
    assert isinstance(done.exception, UsageError), done.output
    assert done.exception.exit_code == 2
    assert "job = ridgeline.start()" in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not steps.exists()


def test_a_climb_of_a_script_that_hides_it_is_refused_after_one_step(tmp_path: Path) -> None:
    """An installed package might use Ridgeline for it: only running it can tell."""
    script, steps = tmp_path / "own.py", tmp_path / "steps"
    script.write_text(PLAIN.format(imports="import yaml, ridgeline"))
    with pytest.raises(UsageError, match=r"five lines do it: `import ridgeline`"):
        measure_script(script, [str(steps)], Options(steps=8, climbs=True))
    assert steps.read_text() == "1"
    # To be measured alone it needs no job.
    assert measure_script(script, [str(steps)], Options(steps=8)).measured.num_steps == 6


@pytest.mark.parametrize(
    ("text", "beside", "lacks"),
    [
        ("import torch, os.path\nfrom torch import nn", "", True),
        ("import torch\nimport ridgeline", "", False),
        ("def late():\n    from ridgeline import start", "", False),
        ("import helper", "import numpy as np", True),
        ("import helper", "import ridgeline", False),
        ("from helper import fit", "from ridgeline import start", False),
        ("import some_package", "", False),  # which may use it
        ("import importlib\nimportlib.import_module('ridge' + 'line')", "", False),
        ("job = __import__('ridge' + 'line').start()", "", False),
        ("import torch\nmodel = torch.nn.Linear(1, 1)\nmodel.eval()", "", True),
        ("this is no Python", "", False),  # running it says more
    ],
)
def test_a_text_tells_whether_a_script_has_the_interface(
    tmp_path: Path, text: str, beside: str, lacks: bool
) -> None:
    (tmp_path / "own.py").write_text(text)
    (tmp_path / "helper.py").write_text(beside)
    assert surely_lacks_interface(tmp_path / "own.py") is lacks


def test_remedies_that_are_left_out_are_not_recommended(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", data_s=0.07, forward_s=0.01, backward_s=0.015, optimizer_s=0.002)
    measured = measure_run(run)
    every = list_remedies(measured, _config())
    names = [line.partition(" (")[0] for line in every]
    assert len(names) > 1
    assert list_remedies(measured, _config(), names[:1]) == every[1:]


def test_a_run_on_a_gpu_is_judged_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its remedies too, though some of them ask what the model is made of."""
    run = _run(tmp_path / "run", forward_s=0.03, backward_s=0.06)
    monkeypatch.setitem(sys.modules, "torch", None)
    model_look._look.cache_clear()
    done = CliRunner().invoke(app, ["doctor", str(run.path)])
    model_look._look.cache_clear()
    assert done.exit_code == 0, done.output
    assert "compute-bound" in done.stdout


@pytest.mark.parametrize("words", [["own.py", "--steps"], ["--stpes", "5", "own.py"]])
def test_slips_in_the_doctors_own_options_are_not_taken_for_the_scripts(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["doctor", *words])
    assert done.exit_code == 2
    assert "come after --" not in f"{done.output}{done.exception}"
