"""Reports of synthetic run directories: the figures shown are the ones the records imply."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ridgeline import rundir
from ridgeline.errors import UsageError
from ridgeline.facts import MachineFacts, ModelFacts
from ridgeline.report.build import build_report, compare_runs
from ridgeline.report.summary import differing_keys, flatten_config, percentages, read_run
from ridgeline.rundir import EvalRecord, RankRecord, RunDir, StepRecord

MODEL = ModelFacts("gpt", 124_000_000, 124_000_000, 496_000_000, 1e12, 3e11, "counted", (64,), 64,
                   "tokens")  # fmt: skip
MACHINE = MachineFacts("node1", 16, 2**37, "cuda", "NVIDIA H200", 8, 2**37, {"bf16": 989e12},
                       "datasheet")  # fmt: skip


def make_run(path: Path, config: str = "seed: 0\noptim:\n  name: adamw\n  lr: 0.001\n") -> RunDir:
    path.mkdir(parents=True)
    run = RunDir(path)
    run.write_text(rundir.CONFIG, config)
    run.write_text(rundir.LAYOUT, "dp=4,precision=bf16\n")
    return run


def make_step(step: int, loss: float, **changes: float) -> StepRecord:
    values = {"step_s": 0.1, "data_s": 0.01, "h2d_s": 0.005, "forward_s": 0.025,
              "backward_s": 0.04, "comm_s": 0.01, "optimizer_s": 0.005, **changes}  # fmt: skip
    return StepRecord(step, 0, 1000.0 + 0.1 * step, loss, 0.001, 32, mfu=0.4,
                      memory_bytes=2**30, **values)  # fmt: skip


def full_run(path: Path, num_steps: int = 100) -> RunDir:
    run = make_run(path)
    run.write_json(rundir.FACTS, {"model": MODEL.to_dict(), "machine": MACHINE.to_dict()})
    run.write_json(rundir.ENV, {"python": "3.11.7", "variables": {"SLURM_JOB_ID": "77"}})
    run.add_event("start")
    for step in range(1, num_steps + 1):
        run.append(make_step(step, 3.0 / step**0.5))
        if step % 20 == 0:
            metrics = {"loss": 3.1 / step**0.5, "accuracy": 1 - 1 / step}
            run.append(EvalRecord(step, 0, 1000.0 + 0.1 * step, 100, 0.5, metrics))
    for rank in range(4):
        slow = rank == 2
        split = {"comm_s": 0.01 if slow else 0.04, "data_s": 0.03 if slow else 0.01}
        run.append(
            RankRecord(rank, f"node{rank // 2}", "cuda", num_steps, 0.1, 0.12, split, 3 * 2**30)
        )
    run.add_event("end", steps=num_steps)
    return run


def page_of(run: RunDir) -> str:
    target = build_report(run)
    assert target == run.file(rundir.REPORT)
    return target.read_text(encoding="utf-8")


class _Balance(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check_markup(text: str) -> None:
    parser = _Balance()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"(src|href)=|url\(|@import|https?://", text)
    assert not re.search(r'[ ,"M](nan|inf)[",L]', text)


def tile(text: str, label: str) -> str:
    found = re.search(
        rf'<div class="tile"><span>{label}</span><b>([^<]*)</b><span>([^<]*)</span>', text
    )
    assert found, label
    return f"{found[1]} | {found[2]}"


def test_headline_figures(tmp_path: Path) -> None:
    text = page_of(full_run(tmp_path / "digits-1"))
    check_markup(text)
    assert tile(text, "final training loss") == "0.3 | after step 100"
    assert tile(text, "best eval loss").startswith("0.31 | at step 100")
    assert tile(text, "best eval accuracy") == "0.99 | at step 100; last 0.99"
    assert tile(text, "throughput") == "20,480 tokens/s | median; 100 ms a step"
    assert tile(text, "MFU") == "40 % | median; of 989 TFLOP/s a device (bf16, datasheet)"
    assert tile(text, "peak memory").startswith("3 GiB")
    assert "<h1>digits-1</h1>" in text
    for said in ("finished", "layout dp=4,precision=bf16", "4 × NVIDIA H200 on 2 hosts",
                 "124 M parameters", "SLURM_JOB_ID", "lr: 0.001"):  # fmt: skip
        assert said in text
    assert len(text) < 300_000


def test_warm_up_does_not_count_in_medians(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in range(1, 4):
        run.append(make_step(step, 1.0, step_s=30.0 if step == 1 else 0.2 + 0.1 * step))
    assert read_run(run).step_s == pytest.approx(0.45)
    for step in range(4, 201):
        run.append(make_step(step, 1.0))
    assert next(s.step for s in read_run(run).steady) == 6


def test_split_adds_up_to_a_hundred(tmp_path: Path) -> None:
    text = page_of(full_run(tmp_path / "run"))
    part = text[text.index("Where a step") :]
    shares = dict(
        re.findall(r"<tr><td>([^<]+)</td><td class=n>[^<]+</td><td class=n>([\d.]+) %", part)
    )
    assert next(iter(shares)) == "waiting for data"
    assert shares["backward"] == "40.0"
    assert shares["other"] == "5.0"
    assert sum(float(share) for share in shares.values()) == pytest.approx(100.0)
    assert 'aria-label="parts of a step' in part


def test_a_pipeline_has_its_part_and_its_picture(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.write_text(rundir.LAYOUT, "pp=2,microbatches=3\n")
    for step in range(
        1, 20
    ):  # of steps of two lengths the median of shares is another than of seconds
        long = 3.0 if step % 2 else 1.0
        run.append(make_step(step, 1.0, step_s=0.1 * long, backward_s=0.01, bubble_s=0.03))
    text = page_of(run)
    shares = re.findall(
        r"waiting for other stages</td><td class=n>30 ms</td><td class=n>([\d.]+) %", text
    )
    assert len(shares) == 1
    assert f"waits for other stages, and for what they send, for {shares[0]} % of a step" in text
    assert "idle for 25% of a step with microbatches=3" in text
    assert "<svg xmlns" not in text
    (run.file(rundir.TRACES)).mkdir()
    picture = '<svg xmlns="x" viewBox="0 0 9 9"><title>F0</title></svg>'
    (run.file(rundir.TRACES) / "pipeline.svg").write_text(picture)
    assert picture in page_of(run)
    assert "waiting for other stages" not in page_of(full_run(tmp_path / "other"))


def test_a_run_on_other_ranks_before_is_not_mixed_in(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for begin, num_ranks, step_s in ((1000.0, 4, 0.1), (1002.05, 2, 0.2)):
        details = {"layout": f"dp={num_ranks}", "num_ranks": num_ranks}
        event = {"event": "start", "time": begin, "details": details}
        run.append_line(rundir.EVENTS, event)
        first = round(10 * (begin - 1000.0))
        for step in range(first + 1, first + 21):
            run.append(make_step(step, 1.0, step_s=step_s))
        for rank in range(num_ranks):
            run.append(RankRecord(rank, "node", "cpu", 20, step_s, step_s))
    summary = read_run(run)
    assert (summary.step_s, len(summary.ranks), summary.num_before) == (0.2, 2, 20)
    text = page_of(run)
    assert "The first 20 steps ran on other ranks or in another layout" in text
    assert "The ranks are even" in text


@pytest.mark.parametrize("values", [[1, 1, 1], [0.0, 3, 7, 11], [1e-9, 1, 2], [5]])
def test_percentages_are_exact(values: list[float]) -> None:
    assert sum(round(10 * share) for share in percentages(values)) == 1000


def test_slowest_rank_is_the_one_the_others_wait_for(tmp_path: Path) -> None:
    text = page_of(full_run(tmp_path / "run"))
    said = "The slowest is rank 2 on node1: 90 ms of work of its own a step, 50.0 % more"
    assert said in text
    assert "<tr class=mark><td>rank 2</td>" in text
    assert text.count('class="p95" cx=') == 4


def test_even_ranks_are_called_even(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(3):
        run.append(RankRecord(rank, "a", "cpu", 10, 0.1 + 0.001 * rank, 0.12))
    text = page_of(run)
    assert "The ranks are even: the slowest is rank 2 on a" in text


def test_stragglers_have_a_section_only_when_there_are_any(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "own")
    assert "Stragglers" not in build_report(run).read_text()
    times = {"own_s": 0.2, "others_s": 0.1, "step_s": 0.2, "excess": 0.5}
    run.add_event("straggler", step=40, rank=3, part="data", **times)
    text = build_report(run).read_text()
    assert "<h2>Stragglers</h2>" in text
    assert "<td>rank 3</td><td>data</td>" in text
    assert "50 %</td>" in text


def test_many_ranks_show_the_slowest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in range(100):
        run.append(RankRecord(rank, "a", "cpu", 10, 0.1 + 0.001 * rank, 0.3))
    text = page_of(run)
    assert "Of 100 ranks the 32 with the most work are shown" in text
    assert "<td>rank 99</td>" in text
    assert "<td>rank 5</td>" not in text


def test_empty_run(tmp_path: Path) -> None:
    text = page_of(make_run(tmp_path / "run"))
    check_markup(text)
    assert "No step has been recorded yet." in text
    assert "unknown device" in text
    assert "running" in text


def test_single_step_without_facts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.append(make_step(1, 2.5))
    text = page_of(run)
    check_markup(text)
    assert tile(text, "final training loss").startswith("2.5 ")
    assert tile(text, "throughput").startswith("320 samples/s")
    assert tile(text, "MFU") == "40 % | median; of an unknown peak"


def test_not_a_number_makes_a_gap_and_a_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step, loss in enumerate([3.0, 2.0, math.nan, math.inf, 1.5], 1):
        run.append(make_step(step, loss))
    text = page_of(run)
    check_markup(text)
    assert "The loss is not finite at step 3." in text
    assert "2 values are not finite and left out" in text
    path = re.search(r'd="([^"]*)" data-n="train"', text)
    assert path
    assert path[1].count("M") == 2
    run.append(make_step(6, math.nan))
    text = page_of(run)
    assert tile(text, "final training loss").startswith("nan ")
    assert "at step 3 and still not at the end" in text


def test_everything_is_escaped(tmp_path: Path) -> None:
    bad = '<script>alert("x")</script>&'
    run = make_run(tmp_path / "a&b<i>", config=f"name: {bad}\n")
    run.write_text(rundir.LAYOUT, bad)
    run.write_json(rundir.ENV, {bad: bad})
    model = {**MODEL.to_dict(), "name": bad, "unit": bad}
    machine = {**MACHINE.to_dict(), "device_name": bad}
    run.write_json(rundir.FACTS, {"model": model, "machine": machine})
    run.append(make_step(1, 1.0))
    run.append(EvalRecord(1, 0, 1000.0, 1, 0.1, {bad: 1.0}))
    run.append(RankRecord(0, bad, bad, 1, 0.1, 0.1))
    run.add_event("failed", error=bad)
    text = page_of(run)
    check_markup(text)
    assert "alert(" in text
    assert "<script>alert" not in text
    assert "<i>" not in text
    compared = compare_runs([run], tmp_path / "c.html").read_text()
    assert "<script>alert" not in compared


def test_failure_is_shown_at_the_top(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.add_event("failed", rank=3, error="out of memory")
    text = page_of(run)
    assert "The run failed: rank: 3, error: out of memory" in text
    assert 'class="badge failed"' in text


def test_truncated_files_are_tolerated(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    with run.file(rundir.METRICS).open("a") as file:
        file.write('{"kind": "step", "step": 101, "lo')
    run.file(rundir.FACTS).write_text('{"model": {"na')
    text = page_of(run)
    assert tile(text, "final training loss") == "0.3 | after step 100"


def test_resumed_steps_count_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (2, 1.9), (3, 1.5)):
        run.append(make_step(step, loss))
    summary = read_run(run)
    assert [(s.step, s.loss) for s in summary.steps] == [(1, 3.0), (2, 1.9), (3, 1.5)]


def test_long_run_stays_small_and_keeps_its_spike(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = []
    for step in range(1, 5001):
        run_loss = 77.0 if step == 3333 else 2.0 + math.sin(step)
        lines.append(make_step(step, run_loss))
    for record in lines:
        run.append(record)
    text = page_of(run)
    assert len(text) < 300_000
    values = re.search(r'data-n="train" data-v="([^"]*)"', text)
    assert values
    assert "3333:77" in values[1].split(" ")
    assert len(values[1].split(" ")) <= 1000


def test_compare_shows_results_and_differences(tmp_path: Path) -> None:
    first = full_run(tmp_path / "a" / "run", 50)
    second = full_run(tmp_path / "b" / "run", 40)
    second.write_text(
        rundir.CONFIG, "seed: 0\noptim:\n  name: sgd\n  lr: 0.001\n  nesterov: true\n"
    )
    target = compare_runs([first, second], tmp_path / "out" / "compare.html")
    text = target.read_text(encoding="utf-8")
    check_markup(text)
    assert "2 runs compared" in text
    assert "<th>a/run</th><th>b/run</th>" in text
    assert "<td>optim.name</td><td>adamw</td><td>sgd</td>" in text
    assert "<td>optim.nesterov</td><td>–</td><td>true</td>" in text
    assert "<td>optim.lr</td>" not in text
    assert "<td>final training loss</td><td>0.4243</td><td>0.4743</td>" in text
    assert "<td>MFU (median)</td><td>40 %</td><td>40 %</td>" in text
    loss = text[text.index("training loss by step") :]
    figure = loss[: loss.index("</figure>")]
    assert 'data-n="a/run"' in figure
    assert 'data-n="b/run"' in figure
    assert 'curve c0"' in figure
    assert 'curve c1"' in figure


def test_compare_of_the_same_says_so_and_of_none_is_refused(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run", 5)
    text = compare_runs([run, run], tmp_path / "c.html").read_text()
    assert "the resolved configurations are the same" in text
    with pytest.raises(UsageError, match="name two or more"):
        compare_runs([], tmp_path / "c.html")


def test_configuration_is_flattened_as_it_is_written() -> None:
    text = (
        "# made by train\nseed: 0\noptim:\n  name: adamw\n  betas:\n  - 0.9\n  - 0.95\n"
        "data:\n  path: /a:b/c\n  text: a long line that was\n    wrapped here\n  deep:\n    x: 1\n"
        "empty: {}\nlayout: dp=2\n"
    )
    assert flatten_config(text) == {
        "seed": "0",
        "optim.name": "adamw",
        "optim.betas": "0.9, 0.95",
        "data.path": "/a:b/c",
        "data.text": "a long line that was wrapped here",
        "data.deep.x": "1",
        "empty": "{}",
        "layout": "dp=2",
    }
    assert differing_keys([{"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}]) == ["b", "c"]
