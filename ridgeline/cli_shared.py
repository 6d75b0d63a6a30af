"""What the commands have in common: how one ends when it is asked to, and what it says without torch.

Needs no torch. Called by `cli.py` and the `cli_*.py` beside it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ridgeline.errors import UsageError

if TYPE_CHECKING:
    from ridgeline.config import RunConfig
    from ridgeline.plan.auto import Chosen
    from ridgeline.plan.machine import Machine
    from ridgeline.plan.recipe import Trace
    from ridgeline.rundir import RunDir


_GPU_DRIVERS = ("nvidiactl", "kfd", "dxg", "nvmap")
"""NVIDIA's, AMD's, that of Windows under Linux, and NVIDIA's on small boards."""
_GPU_VENDORS, _GPU_CLASSES = ("0x10de", "0x1002"), ("0x03", "0x12")
"""Of PCI: NVIDIA and AMD; what displays, and what computes."""


def has_torch() -> bool:
    """Without importing it, which takes seconds: a command that starts ranks leaves that to them."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("torch") is not None
    return False


def require_torch(what: str) -> None:
    """Most commands work without torch; `what` does not, and says so before it begins."""
    if not has_torch():
        raise UsageError(
            f"{what} needs torch, which is not installed here; pip install 'torch>=2.11,<2.14'"
        )


def may_have_gpu(dev: Path = Path("/dev"), pci: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether torch, which takes seconds to import, is to be asked for GPUs: there are files of a driver or
    a card of NVIDIA's or AMD's, whose driver may make its files when it is first used."""
    if any((dev / name).exists() for name in _GPU_DRIVERS):
        return True
    for card in pci.glob("*"):
        with suppress(OSError):
            vendor, kind = ((card / name).read_text().strip() for name in ("vendor", "class"))
            if vendor in _GPU_VENDORS and kind.startswith(_GPU_CLASSES):
                return True
    return False


def num_cores() -> int:
    """Cores this process may use, which a scheduler can have made fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_for_ranks(
    config: RunConfig, num_ranks: int, per_node: int, before: RunDir | None = None
) -> Chosen:
    """The configuration that ranks are started with, and what the planner says of it: `layout: auto` is
    chosen here and nowhere else, and said in a line or two. `before` is a run that goes on."""
    from ridgeline.layout import read_auto
    from ridgeline.plan.auto import Chosen, Place, choose_layout
    from ridgeline.plan.kept import read_plan

    plan = read_plan(before) if before is not None else None
    if read_auto(config.layout) is None and not config.plan.machine and plan is None:
        return Chosen(config, None)
    place = Place(num_ranks, per_node, num_cores(), _gpu_name(config.device))
    chosen = choose_layout(config, place, plan, tracer())
    for line in chosen.lines:
        typer.echo(line)
    return chosen


def check_before_start(config: RunConfig, num_processes: int) -> None:
    """Everything that can be known to be wrong without starting a process. A layout that is still `auto`
    is chosen in the job, on its nodes."""
    from ridgeline.layout import Layout, check_available, read_auto, require_layout
    from ridgeline.train.checks import check_batch, check_names

    if read_auto(config.layout) is not None:
        check_names(config)
        return
    said = Layout.parse(config.layout, "layout")
    # What does not compose does so on no number of processes: that comes before their count. Whether
    # shards and experts divide `dp` is known when `dp` is.
    require_layout(said.replace(dp=math.lcm(said.dp, said.shard or 1, said.ep)), "layout")
    layout = Layout.parse_for(config.layout, num_processes, "layout")
    require_layout(layout, "layout")
    for finding in check_available(layout):
        raise UsageError(str(finding))
    check_batch(config, layout)
    check_names(config)


def tracer() -> Trace | None:
    """What makes facts of a model that the planner has no sizes of; None where there is no torch."""
    if not has_torch():
        return None
    from ridgeline.train.traced import trace_recipe

    return trace_recipe


def machine_here(config: RunConfig, named: str | None, per_node: int | None) -> Machine:
    """The machine that is named, or the one that the device of this host is of; one rank has it all to
    itself, as it would in the job."""
    from ridgeline.plan.auto import Place, find_machine, load_named
    from ridgeline.plan.machine import load_machine
    from ridgeline.plan.own_machine import profile_of

    if named is not None:
        machine = load_named(named, "--machine")
        return machine.replace(devices_per_node=per_node) if per_node else machine
    name = _gpu_name(config.device)
    if config.plan.machine:
        usual = load_named(config.plan.machine, "plan.machine")
    else:
        usual = load_machine((profile_of(name) if name is not None else None) or "cpu-node")
    place = Place(1, 1, config.threads or num_cores(), name)
    machine, _ = find_machine(config, place)
    return machine.replace(devices_per_node=per_node or usual.devices_per_node)


def _gpu_name(device: str) -> str | None:
    """Of the GPU that ranks here would use; torch alone knows whether it can use one."""
    from ridgeline.plan.auto import gpu_name

    if device == "cpu":
        return None
    try:
        import torch
    except ModuleNotFoundError:
        return None
    return (gpu_name() or "an unknown GPU") if torch.cuda.device_count() else None


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Ctrl-C, a scheduler's SIGTERM and a lost terminal end the measuring, not its cleaning up: the
    first one raises, those after it are passed over."""
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # Under `nohup` a lost terminal is to be passed over, and stays so.
    known = [number for number in asked if signal.getsignal(number) is not signal.SIG_IGN]

    def end(_number: int, _frame: object) -> None:
        for number in known:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, end) for number in known]
    try:
        yield
    finally:
        for number, handler in zip(known, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def counting_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars on the terminal: what, how many are done, of how many. Nothing where there is none."""
    # Ctrl-C is to find the way out: the bar hides the cursor, and processes have to be stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=of)
            bar.update(tasks[what], completed=done)

        yield tell
