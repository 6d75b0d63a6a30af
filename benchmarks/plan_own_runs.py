"""How far the planner is from the runs that `gpu_plan_runs.py` measured on one GPU, run by run.

Memory is planned by sizes and by the traced module, time by sizes with the shipped profile, with a machine
made of the rates in the same file, and with the same but for launches, which are those that the run's own
process has timed. The figures of `docs/plan.md` for own runs are its last lines.

    python benchmarks/plan_own_runs.py [FILE]   # or another day's, beside it in results/
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks.table import print_table
from ridgeline.layout import Layout
from ridgeline.models.build import build_model
from ridgeline.models.trace import trace_module
from ridgeline.plan.general import module_job
from ridgeline.plan.general_memory import module_stage_memory
from ridgeline.plan.job import job_from_layout
from ridgeline.plan.known import model_of_recipe
from ridgeline.plan.machine import Machine, load_machine
from ridgeline.plan.measured import load_measured
from ridgeline.plan.memory import stage_memory
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.time import rank_alone_s

RUNS = Path(__file__).parent / "results" / "plan_runs_h200.json"
_TRACED = 3


@cache
def trace_llama(size: str, seq: int, depth: int) -> ModuleFacts:
    """Traced with a few layers, which are all alike, and made as deep as it is; with the norms of the
    release of torch that the runs were measured with."""

    def batch(n: int) -> Any:
        ids = torch.zeros(n, seq, dtype=torch.long)
        return (ids,), ids

    def loss(logits: Any, targets: Any) -> Any:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    facts = trace_module(
        size, lambda: build_model("llama", size=size, depth=_TRACED, max_seq=seq), batch, loss,
        [f"{seq}:int64"], "tokens", seq, wide_rms_norm=False,
    )  # fmt: skip
    names = tuple(f"layers.{i}" for i in range(depth))
    blocks = tuple(replace(b, names=names) if b.recompute else b for b in facts.blocks)
    return replace(facts, blocks=blocks)


def at_its_pace(machine: Machine, run: dict[str, Any], rates: dict[str, Any]) -> Machine:
    """With the launches that the run has timed itself, where it has."""
    name = "linear_forward_backward_s"
    pace = run.get("launch", rates["launch"])[name] / rates["launch"][name]
    return machine.replace(**{"device.host_kernel_s": machine.device.host_kernel_s * pace})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=RUNS)
    path = parser.parse_args().file
    shipped, measured = load_machine("h200"), load_measured(path)
    known = json.loads(path.read_text())
    heads = ["memory % by sizes", "traced", "time % profile", "rates", "own launches"]
    errors: dict[str, list[float]] = {name: [] for name in heads}
    rows = []
    for run in known["runs"]:
        layout = Layout.parse(run["layout"])
        model = model_of_recipe("llama", {"size": run["size"], **run["change"]}, run["seq"])
        batch = layout.dp * max(layout.microbatches, layout.accumulate) * run["samples"]
        job = job_from_layout(model, shipped, layout, batch)
        facts = trace_llama(run["size"], run["seq"], model.layers)
        traced = module_stage_memory(module_job(facts, shipped, layout, batch), run["rank"])
        peak, step_s = run["peak_step_bytes"], run["step_s"]
        found = (
            stage_memory(job, run["rank"]).allocated / peak - 1,
            traced.allocated / peak - 1,
            rank_alone_s(job) / step_s - 1,
            rank_alone_s(job.replace(machine=measured)) / step_s - 1,
            rank_alone_s(job.replace(machine=at_its_pace(measured, run, known["rates"]))) / step_s
            - 1,
        )
        for name, error in zip(errors, found, strict=True):
            errors[name].append(error)
        what = (run["size"], str(run["seq"]), str(run["samples"]), run["layout"])
        rows.append((*what, *(f"{100 * error:+.1f}" for error in found)))
    for words, how in (("mean", statistics.fmean), ("worst", max)):
        ends = (f"{100 * how([abs(e) for e in found]):.1f}" for found in errors.values())
        rows.append((words, "", "", f"{len(rows)} runs" if words == "mean" else "", *ends))
    print_table(("model", "seq", "samples", "layout", *heads), rows)


if __name__ == "__main__":
    main()
