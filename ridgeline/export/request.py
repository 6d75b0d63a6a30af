"""What `ridgeline export` was asked for, checked. Imports without torch: a wrong word is told at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import UsageError, unknown_word
from ridgeline.rundir import CHECKPOINTS

DEVICES = ("cpu", "cuda")
TYPES = ("fp32", "bf16", "fp16")
VARY = "vary"


@dataclass(frozen=True)
class Wanted:
    device: str | None = None
    """None: the run's own choice, which is a GPU where there is one."""
    dtype: str | None = None
    """None: the type that the run keeps its weights in."""
    batch: int | None = None
    """None: any number of samples."""
    bare: bool = False
    """The model alone, without what evaluation does to its inputs."""
    check: bool = True
    overrides: tuple[str, ...] = ()
    """Settings of the recipe that are others here, such as where the data is."""
    live: bool = False
    """The weights that were trained, also where the run kept a moving average of them."""


def read_wanted(
    device: str | None,
    dtype: str | None,
    batch: str,
    bare: bool,
    check: bool,
    overrides: Sequence[str],
    live: bool = False,
) -> Wanted:
    if device is not None and device not in DEVICES:
        raise unknown_word("device", device, DEVICES, "--device")
    if dtype is not None and dtype not in TYPES:
        raise unknown_word("type", dtype, TYPES, "--dtype")
    count = None
    if batch != VARY:
        if not batch.isdecimal() or int(batch) < 1:
            raise UsageError(
                f"--batch {batch} is neither a number of samples from 1 on nor `{VARY}`, any number"
            )
        count = int(batch)
    return Wanted(device, dtype, count, bare, check, tuple(overrides), live)


def split_words(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """OUT and the settings, which the command line has in one row.

    >>> split_words(["out", "data.args.path=/here"]), split_words([])
    (('out', ['data.args.path=/here']), (None, []))
    """
    outs = [word for word in words if "=" not in word]
    if len(outs) > 1:
        raise UsageError(f"export takes one OUT, and these are {len(outs)}: {', '.join(outs)}")
    return (outs[0] if outs else None), [word for word in words if "=" in word]


def default_out(checkpoint: Path) -> Path:
    """`export` in the run; beside a checkpoint that is in none."""
    folder = checkpoint.parent
    return (folder.parent if folder.name == CHECKPOINTS else folder) / "export"
