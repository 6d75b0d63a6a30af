"""What is said of remedies that were not tried: those that apply, and how a script could have them tried.

Called by `cli_doctor.py` once a step has been measured; `climb.py` tries them. Imports without torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from ridgeline.config import RunConfig
from ridgeline.doctor.interface import FIVE_LINES
from ridgeline.doctor.measured import Measured
from ridgeline.doctor.model_look import SCRIPT
from ridgeline.doctor.remedies.table import REMEDIES, SCRIPT_REMEDIES

PROMISE = 1.005
"""A gain below is none to tell of."""


def list_remedies(
    measured: Measured, config: RunConfig, without: Sequence[str] = (), has_job: bool = False
) -> list[str]:
    """Remedies that apply to a recipe, or to a script in such words, the one with the largest predicted
    gain first, but for those named in `without`. The layout is that of all ranks, `dp` included. A script
    that `has_job` is told what to say to it, another what to write in plain torch."""
    is_script = config.model.name == SCRIPT
    known = SCRIPT_REMEDIES if is_script else REMEDIES
    found = []
    for name, remedy in known.items():
        reason = remedy.applies(measured, config)
        if reason is not None and name not in without:
            found.append((remedy.predicted_gain(measured, config), name, reason))
    lines = []
    for gain, name, why in sorted(found, reverse=True):
        told = known[name].advice
        if is_script and not told:
            told = _for_a_job(known[name].change(config)) if has_job else known[name].line
        if gain < PROMISE and not known[name].advice:
            continue
        promise = f" (up to x{gain:.2f})" if gain >= PROMISE else ""
        lines.append(f"{name}{promise}: {why}{f'; {told}' if told else ''}")
    return lines


def _for_a_job(changes: Sequence[str]) -> str:
    """What a script says to its job instead of these overrides; empty where a file of settings has to."""
    said = [change.partition("=")[::2] for change in changes]
    layout = [f"{k.removeprefix('layout.')}={v}" for k, v in said if k.startswith("layout.")]
    found = [f'ridgeline.start("{",".join(layout)}")'] if layout else []
    for key, value in said:
        if key == "data.workers":
            found.append(f"job.loader(..., workers={value})")
        if key == "ddp.bucket_mb":
            found.append(f"bucket_mb={value} for job.parallelize or job.engine")
    return ", ".join(found)


def how_to_try(script: str, arguments: Sequence[str], num_processes: int, has_job: bool) -> str:
    """What is said beneath the remedies of a script."""
    rest = ["--", *arguments] if arguments else []
    ranks = ["-n", str(num_processes)] if num_processes > 1 else []
    command = shlex.join(["ridgeline", "doctor", script, *ranks, "--climb", *rest])
    if has_job:
        return f"`{command}` tries what can be set from outside, and keeps what is faster and right"
    return (
        f"--climb tries what can be set from outside, in a script with five lines: {FIVE_LINES} "
        "(docs/train.md)"
    )
