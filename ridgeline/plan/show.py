"""What a plan looks like as text: the table, its parts, curves, one layout, a module's facts.

Plain lines; `cli_plan.py` prints them, and `why.py` says why the best is the best.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.plan.machine import Machine
from ridgeline.plan.memory import StepMemory, fits, host_room
from ridgeline.plan.module import ModuleFacts
from ridgeline.plan.search import Found, Planned
from ridgeline.plan.software import RIDGELINE
from ridgeline.plan.time import StepTime

TIME_PARTS = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "element-wise work",
    "tensor_parallel": "communication inside layers (tp, cp, ep)",
    "host": "waiting for the host",
    "gathers": "gathering and scattering shards",
    "bubble": "pipeline bubble and sends",
    "gradients": "reducing gradients",
    "optimizer": "optimizer",
    "other": "once a step",
    "pressure": "nearly full memory",
    "stragglers": "waiting for the slowest device",
    "host_link": "state on the host",
    "storage": "waiting for samples",
}
MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "working", "buffers",
                "rounding", "context")  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def show_best(found: Found, tokens: float | None) -> list[str]:
    """The table of the best layouts."""
    rate = f"{found.best[0].job.unit}/s"
    head = ["layout", "samples", "step s", rate, "MFU %", "bubble %", "GB", "state", "activ."]
    if tokens:
        head += ["days", "cost"]
    rows = []
    for p in found.best:
        m = p.memory
        row = [
            str(p.layout), str(p.job.samples), f"{p.seconds:.3f}", f"{p.tokens_per_s:,.0f}",
            f"{100 * p.mfu:.1f}", f"{100 * p.time.bubble / p.seconds:.1f}", f"{m.device / 1e9:.1f}",
            f"{(m.weights + m.gradients + m.optimizer) / 1e9:.1f}",
            f"{(m.activations + m.logits + m.working) / 1e9:.1f}",
        ]  # fmt: skip
        if tokens:
            row += [_days(p.days(tokens)), f"{p.cost(tokens):,.0f}" if p.cost(tokens) else "-"]
        rows.append(row)
    lines = table(head, rows)
    lines.append(
        f"\n{found.looked_at} layouts, {found.too_large} too large for the device, "
        f"{found.played} played in full"
    )
    return lines


def _days(days: float) -> str:
    return f"{days:,.1f}" if days >= 10 else f"{days:.3g}"


def show_parts(time: StepTime, memory: StepMemory) -> list[str]:
    """One layout's step and memory, part by part."""
    lines = [f"step {time.seconds:.4f} s"]
    for name, words in TIME_PARTS.items():
        value = float(getattr(time, name))
        if abs(value) > 1e-9:
            lines.append(f"  {words:<40} {value:9.4f} s  {100 * value / time.seconds:5.1f} %")
    lines.append(
        f"memory {memory.device / 1e9:.2f} GB on the device "
        f"({memory.allocated / 1e9:.2f} allocated, {memory.reserved / 1e9:.2f} reserved)"
    )
    for name in MEMORY_PARTS:
        value = float(getattr(memory, name))
        if value > 0:
            lines.append(f"  {name:<40} {value / 1e9:9.3f} GB {100 * value / memory.device:5.1f} %")
    if memory.host > 0:
        lines.append(f"and {memory.host / 1e9:.2f} GB of the host's memory, a device")
    return lines


def why_not(planned: Planned) -> str:
    """Why a layout does not fit, in a sentence; empty where it does."""
    memory, device = planned.memory, planned.job.machine.device
    if fits(planned.job, memory):
        return ""
    if memory.host > (room := host_room(planned.job.machine)):
        return (
            f"does not fit: {memory.host / 1e9:.1f} GB of the host's memory are needed a device, and "
            f"there are {room / 1e9:.1f} (host_memory_bytes of the machine)"
        )
    parts = {name: float(getattr(memory, name)) for name in MEMORY_PARTS}
    most = sorted(parts, key=lambda name: -parts[name])[:2]
    shown = " and ".join(f"{name} {parts[name] / 1e9:.1f} GB" for name in most)
    return (
        f"does not fit: {memory.device / 1e9:.1f} GB are needed (mostly {shown}) and {device.name} has "
        f"{device.memory_bytes / 1e9:.1f}, of which 4 % are kept free"
    )


def show_programs(machine: Machine) -> list[str]:
    """Which facts of programs in a profile are used, and which are not."""
    used = ", ".join(f"{n} {v:.4g}" for n, v in machine.programs.get(RIDGELINE.name, {}).items())
    lines = [f"fitted facts of {RIDGELINE.name} in {machine.name} are used: {used}"] if used else []
    others = ", ".join(name for name in machine.programs if name != RIDGELINE.name)
    if others:
        lines.append(
            f"fitted facts of {others} in {machine.name} are not used: plans are of {RIDGELINE.name}"
        )
    return lines


def show_scale(rows: list[tuple[int, Planned | None]], weak: bool) -> list[str]:
    """A scaling curve as a table and bars; efficiency is against the first that fits."""
    first = next(((count, p) for count, p in rows if p is not None), None)
    lines = [f"{'weak' if weak else 'strong'} scaling"]
    cells = []
    for count, planned in rows:
        if planned is None or first is None:
            cells.append([str(count), "-", "-", "-", "nothing fits"])
            continue
        rate = planned.tokens_per_s / count
        efficiency = rate / (first[1].tokens_per_s / first[0])
        bar = "#" * round(40 * min(efficiency, 1.25))
        cells.append([
            str(count), f"{planned.seconds:.3f}", f"{planned.tokens_per_s:,.0f}",
            f"{100 * efficiency:.0f} % {bar}", str(planned.layout),
        ])  # fmt: skip
    unit = first[1].job.unit if first is not None else "samples"
    lines += table(("nodes", "step s", f"{unit}/s", "efficiency", "layout"), cells)
    seen = [(planned.seconds, count) for count, planned in rows if planned is not None]
    if not weak and seen and min(seen)[1] < seen[-1][1]:
        lines.append(f"more than {min(seen)[1]} nodes make this batch slower")
    return lines


def explain(planned: Planned, tokens: float | None = None) -> list[str]:
    """One layout: whether it fits, and where time and memory go; `tokens`: a goal, for days and cost."""
    lines = [f"{planned.layout} on {planned.job.devices} devices of {planned.job.machine.name}"]
    lines += [reason] if (reason := why_not(planned)) else ["fits"]
    if tokens:
        cost = f", cost {planned.cost(tokens):,.0f}" if planned.cost(tokens) else ""
        lines.append(f"{tokens:g} {planned.job.unit} in {_days(planned.days(tokens))} days{cost}")
    return lines + show_parts(planned.time, planned.memory)


def show_facts(facts: ModuleFacts) -> list[str]:
    """What was traced, block by block."""
    forward, backward = facts.flops()
    wide, cast = (facts.saved_bytes(1, mode) / 1e6 for mode in ("wide", "cast"))
    lines = [
        f"{facts.name}: {facts.num_parameters:,} parameters ({facts.num_trainable:,} trainable"
        + (f", {len(facts.tied)} tied" if facts.tied else "")
        + f"), a sample of {', '.join(facts.inputs)}",
        f"a sample: {forward / 1e9:.3f} GFLOP forward, {backward / 1e9:.3f} backward; kept for backward "
        f"{wide:.2f} MB, under bf16 autocast {cast:.2f} MB",
        "tensor parallelism: "
        + (f"tp divides {facts.splits}" if facts.splits > 1 else f"none, {facts.whole}"),
        "",
    ]
    rows = []
    for block in facts.blocks:
        name = block.names[0] + (f" .. {block.names[-1]}" if block.count > 1 else "")
        cost = block.costs["wide"]
        fused = {a.kind for a in cost.forward.attention}
        rows.append([
            name, str(block.count), block.kind or "-", f"{block.parameters:,}",
            f"{cost.forward.flops.at(1) / 1e9:.3f}", f"{cost.backward.flops.at(1) / 1e9:.3f}",
            f"{cost.saved.total.at(1) / 1e6:.2f}", f"{cost.saved_full.total.at(1) / 1e6:.2f}",
            f"{cost.output.total.at(1) / 1e6:.2f}", f"{cost.forward.kernels}+{cost.backward.kernels}",
            ", ".join(sorted(fused)) or "-",
        ])  # fmt: skip
    head = ("block", "times", "kind", "parameters", "GFLOP fwd", "bwd", "kept MB", "recomputed",
            "sent", "kernels", "attention")  # fmt: skip
    return lines + table(head, rows)
