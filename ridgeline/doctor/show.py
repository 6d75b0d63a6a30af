"""A verdict as text: one sentence, the parts of the step, the evidence, and what would help.

Called by `ridgeline doctor`; imports without torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.doctor.measured import Measured
from ridgeline.doctor.pictures import step_rows
from ridgeline.doctor.verdict import DATA, HOST, Finding, Verdict, class_limit, most_of
from ridgeline.machine.picture import amount, duration
from ridgeline.plan.kept import Compared


def show_verdict(
    measured: Measured,
    verdict: Verdict,
    remedies: Sequence[str],
    compared: Sequence[Compared] = (),
    more: str = "",
) -> str:
    """`compared`: what was predicted of a run that has been measured; `more`: about its remedies."""
    lines = [verdict.sentence, "", _headline(measured), ""]
    limits = {c.name: class_limit(measured, c) for c in measured.classes}
    counts = {c.name: c for c in measured.classes}
    for name, seconds in step_rows(measured):
        text = f"  {name:<30}{duration(seconds):>10}{measured.share(seconds):7.1%}"
        row = counts.get(name)
        if row is not None and row.num:
            text += f"  {row.num:>6} {'kernels' if measured.device_kind == 'cuda' else 'ops'}"
        if row is not None and row.flops and row.seconds:
            text += f"  {amount(row.flops / row.seconds, 'FLOP/s')}"
        best = limits.get(name)
        # Less is no rate but operands that the profiler left out, as those of lists of many tensors.
        if best is not None and seconds and best / seconds >= 0.005:
            text += f"  {min(best / seconds, 1.0):.0%} of the roofline"
        lines.append(text)
    if measured.comm_hidden_s:
        lines.append(f"  communication that is hidden  {duration(measured.comm_hidden_s):>10}")
    if measured.tensor_core_share is not None:
        lines.append(f"  on tensor cores: {measured.tensor_core_share:.0%} of the products' time")
    if measured.power is not None:
        power = measured.power
        lines.append(
            f"  power: {power.watts:.0f} of {power.limit_watts:.0f} W, clock {power.clock_mhz:,.0f} of "
            f"{power.max_clock_mhz:,.0f} MHz"
        )
    lines += _memory(measured)
    lines += _predicted(compared)
    lines += [
        "",
        "evidence:",
        *(f"  {text}" for text in verdict.evidence or ("none beyond the table",)),
    ]
    others = [f for f in verdict.findings[1:] if f.share >= 0.05]
    if others:
        lines += ["", "also:"]
        lines += [
            f"  {f.limit}: {f.share:.0%}, {most_of(measured, f) or f.cause + _where(f)}"
            for f in others
        ]
    if len(measured.ranks) > 1:
        lines += ["", "ranks:"]
        lines += [
            f"  {r.rank}: own work {duration(r.own_s)}, waits {duration(r.comm_s)} for the others"
            for r in measured.ranks
        ]
    if remedies:
        lines += [
            "",
            "remedies that apply, the most promising first:",
            *(f"  {r}" for r in remedies),
            *([more] if more else []),
        ]
    lines += ["", *measured.notes] if measured.notes else []
    return "\n".join(lines)


def _predicted(compared: Sequence[Compared]) -> list[str]:
    lines = ["", "predicted and measured:"] if compared else []
    for one in compared:
        said, seen = (
            duration(v) if one.unit == "s" else amount(v, "B")
            for v in (one.predicted, one.measured)
        )
        lines.append(f"  {one.name:<30}{said:>10}{seen:>10}  {one.error:+.1%}")
    return lines


def _where(finding: Finding) -> str:
    """The line, class or layer, with what stands on the line."""
    if not finding.within or finding.within in finding.cause:
        return ""
    said = finding.evidence if finding.limit in (DATA, HOST) else ()
    return f" ({next((text for text in said if text.startswith(finding.within)), finding.within)})"


def _headline(m: Measured) -> str:
    ranks = f", {m.num_ranks} ranks" if m.num_ranks > 1 else ""
    text = f"{m.source} on {m.device_name}{ranks}: a step takes {duration(m.step_s)} "
    text += f"(median of {m.num_steps}, spread {m.spread:.0%})"
    if m.num_profiled:
        text += f"; {m.num_profiled} more were profiled, {m.overhead:.0%} slower, for the parts"
    return text


def _memory(m: Measured) -> list[str]:
    if m.memory is None:
        return []
    memory = m.memory
    # On a CPU torch's allocator keeps no count, so that it is the process with all that it has imported.
    whose = "tensors on the device" if m.device_kind == "cuda" else "the whole process"
    text = f"  memory: {amount(memory.peak_bytes, 'B')} of {amount(memory.capacity_bytes, 'B')} ({whose})"
    if memory.largest_bytes:
        text += f"; the largest tensor has {amount(memory.largest_bytes, 'B')}"
        text += f" ({memory.largest_what})" if memory.largest_what else ""
    return [text]
