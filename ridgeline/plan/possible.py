"""Which jobs of published rows can have been run as stated, and can be predicted in a few seconds.

A row whose numbers do not divide, or whose time and rate are of other work than its batch, was written down
wrongly or is read wrongly; neither is a figure to compare with. Called by `rows.py`.
"""

from __future__ import annotations

from typing import Final

from ridgeline.plan.figures import Measured
from ridgeline.plan.job import Job
from ridgeline.plan.words import Row, Unreadable, whole

MOST_OPERATIONS: Final = 5_000_000
"""Of a schedule that is played out: about three seconds."""


SAME_WORK: Final = 2.0
"""Counts of FLOPs of one step differ by less: with recompute or without, attention or not."""


def require_possible(row: Row, job: Job) -> None:
    """Numbers that nothing can be divided by, or into, are said to be wrong by name."""
    model, machine = job.model, job.machine
    numbers = {
        "dp": job.dp, "microbatch": job.samples, "num_microbatches": job.microbatches,
        "layers": model.layers, "hidden": model.hidden, "heads": model.heads, "kv_heads": model.kv_heads,
        "kv-channels": model.head_width, "ffn": model.ffn, "seq": model.seq, "vocab": model.vocab,
        "top_k": model.top_k, "gpus_per_node": machine.devices_per_node,
        "vocabulary's multiple": job.vocab_multiple,
        "bandwidth": min(machine.inter.bandwidth, machine.intra.bandwidth),
    }  # fmt: skip
    for name, size in numbers.items():
        if size <= 0:
            raise Unreadable(f"{name} is {size:g}")
    rest = {
        "experts": model.experts, "an expert's width": model.expert_ffn,
        "the shared expert's width": model.shared_ffn, "expert-tensor-parallel-size": job.expert_tp,
        "microbatch-group-size": job.group,
    }  # fmt: skip
    for name, size in rest.items():
        if size < 0:
            raise Unreadable(f"{name} is {size:g}")
    most = {
        "dp": (job.dp, 10**7), "pp": (job.pp, 4096), "layers": (model.layers, 100_000),
        "tp": (job.tp, 65_536), "num_microbatches": (job.microbatches, 10**7),
        "seq": (model.seq, 10**9), "hidden": (model.hidden, 10**7), "ffn": (model.ffn, 10**9),
        "vocab": (model.vocab, 10**9), "microbatch": (job.samples, 10**6),
        "experts": (model.experts, 100_000), "an expert's width": (model.expert_ffn, 10**9),
        "the shared expert's width": (model.shared_ffn, 10**9), "kv-channels": (model.head_width, 10**7),
        "vocabulary's multiple": (job.vocab_multiple, 10**7), "microbatch-group-size": (job.group, 10**7),
        "bandwidth": (max(machine.inter.bandwidth, machine.intra.bandwidth), 10**18),
        "gpus_per_node": (machine.devices_per_node, 100_000),
    }  # fmt: skip
    for name, (size, limit) in most.items():
        if size > limit:
            raise Unreadable(f"{name} is {size:g}, more than the {limit:g} that are predicted")
    _require_divisible(row, job)
    if (operations := played_operations(job)) > MOST_OPERATIONS:
        raise Unreadable(
            f"its schedule is some {operations:.1e} operations to play, more than {MOST_OPERATIONS:.0e}"
        )


def _require_divisible(row: Row, job: Job) -> None:
    """Heads over ranks, groups of heads and experts come out even. Heads that were left out are a guess,
    and need not."""
    model = job.model
    if model.heads < job.tp or model.hidden < model.heads or model.seq < job.cp:
        raise Unreadable(
            f"{model.heads} heads of a width of {model.hidden} do not split over tp={job.tp}"
        )
    if whole(row["model"], "heads"):
        if model.heads % job.tp:
            raise Unreadable(f"{model.heads} heads do not divide over tp={job.tp}")
        if model.hidden % model.heads and not (row["layout"].get("args") or {}).get(
            "--kv-channels"
        ):
            raise Unreadable(f"hidden={model.hidden} does not divide into {model.heads} heads")
    if model.heads % model.kv_heads:
        raise Unreadable(f"{model.heads} heads do not divide into kv_heads={model.kv_heads}")
    if model.experts % job.ep:
        raise Unreadable(f"{model.experts} experts do not divide over ep={job.ep}")
    if model.experts and model.top_k > model.experts:
        raise Unreadable(f"top_k={model.top_k} is more than there are experts, {model.experts}")
    if model.experts and (job.dp * job.tp * job.cp) % (job.ep * (job.expert_tp or job.tp)):
        raise Unreadable(
            f"the {job.dp * job.tp * job.cp} ranks of a stage do not divide over ep={job.ep}"
        )


def require_one_work(job: Job, measured: Measured) -> None:
    """A time and a rate are of the same work, the batch's; counts of it differ, but not so much."""
    if not measured.seconds or not measured.tflops:
        return
    said = measured.seconds * measured.tflops * 1e12 * job.devices
    ratio = said / job.model.step_flops(job.tokens, measured.flops_kind)
    if not 1 / SAME_WORK < ratio < SAME_WORK:
        raise Unreadable(
            f"its time and its rate are of {ratio:.2g} times the work that its batch is"
        )


def played_operations(job: Job) -> float:
    """About how many operations `schedule._play` goes through, each look at one that waits as a part."""
    if job.pp == 1:
        return 0.0
    count = job.microbatches
    if job.schedule != "gpipe" and job.group <= job.pp:
        count = min(count, 4 * job.pp)
    operations = 2.0 * job.pp * job.virtual * count
    turns = job.pp if job.schedule == "gpipe" else job.virtual * count
    return operations + operations * turns / 60.0
