"""How `ridgeline machine network` gets its ranks: it starts them here, or joins those it was started on.

With `-n` the same command is started once a rank on this machine; under torchrun, srun, mpirun or
`ridgeline launch` every process joins the others. They meet over the CPU's network first, whatever is
measured, so that what one rank cannot do is told by all, at once. Called by `cli_machine.py`; imports
without torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ridgeline.cli_shared import num_cores
from ridgeline.errors import OURS, RunError, UsageError

if TYPE_CHECKING:
    from ridgeline.launch.env import RankEnv
    from ridgeline.machine.collectives import Amounts
    from ridgeline.machine.links import NetworkFacts

Tell = Callable[[str, float], None]
Bar = Callable[[str], AbstractContextManager[Tell]]
_MEET_TIMEOUT = timedelta(minutes=5)
"""For what ranks agree on between measurements; the slowest part in between takes seconds."""


@dataclass(frozen=True)
class Asked:
    """The options of the command."""

    sizes: tuple[int, ...] | None
    collectives: tuple[str, ...]
    device: str
    quick: bool
    as_json: bool
    out: Path | None
    picture: Path | None
    accounts: Path | None = None
    """Where a rank that this command started leaves the reason of its end."""


def start_ranks(num: int, words: Sequence[str]) -> None:
    """The command on `num` ranks of this machine; the first failure of any is raised."""
    from ridgeline.launch.start import Local

    folder = Path(tempfile.mkdtemp(prefix="ridgeline-network-"))
    command = ["-m", "ridgeline.cli", "machine", "network", *words, "--accounts", str(folder)]
    done = False
    try:
        Local(num, num_cores()).run(command, num, folder, None, {})
        done = True
    except KeyboardInterrupt:
        done = True
        raise RunError("interrupted while the network was measured; it has no figures") from None
    except UsageError:
        done = True
        raise
    finally:
        if done:  # else the error names files in it
            shutil.rmtree(folder, ignore_errors=True)


def measure_here(asked: Asked, env: RankEnv, bar: Bar) -> None:
    """One rank's part, from joining to the end; rank 0 shows and keeps the figures."""
    import torch.distributed as dist

    if dist.is_initialized():  # the caller's ranks, who stay
        _measure(asked, env, bar)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if asked.accounts is not None:
        _end_with_parent()
    code = 0
    try:
        _measure(asked, env, bar)
    except Exception as error:
        code = error.exit_code if isinstance(error, (UsageError, RunError)) else 1
        _tell_failure(asked, env, error)
    # Skip the interpreter's end, where a communication thread could still wait for a peer.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _measure(asked: Asked, env: RankEnv, bar: Bar) -> None:
    import torch

    from ridgeline.layout import Layout
    from ridgeline.machine.collectives import measure_network
    from ridgeline.machine.meeting import Meeting
    from ridgeline.parallel.mesh import build_mesh, choose_device, close_mesh

    cpu = torch.device("cpu")
    mesh = build_mesh(env, Layout(dp=env.world_size), cpu, timeout=_MEET_TIMEOUT)
    control = mesh.world_group
    assert control is not None
    meeting = Meeting(env.rank, env.world_size, control, cpu, "gloo")
    device = meeting.agree("take part", lambda: _prepare(asked, env, choose_device))
    kinds = {told.type for told in meeting.gather(device)}
    if len(kinds) > 1:
        raise RunError(
            f"some ranks see {' and others '.join(sorted(kinds))}; choose one with --device cpu or cuda"
        )
    amounts = _amounts(asked, device.type)
    if env.rank == 0:
        with bar(f"{env.world_size} ranks, {device.type}") as tell:
            facts = measure_network(env, control, device, amounts, asked.collectives, tell)
    else:
        facts = measure_network(env, control, device, amounts, asked.collectives)
    meeting.agree("keep the figures", lambda: _keep(asked, facts) if env.rank == 0 else None)
    close_mesh(mesh)


def _prepare(asked: Asked, env: RankEnv, choose: Callable[..., object]) -> object:
    """This rank's device; on rank 0 also whether the figures could be kept."""
    import torch

    from ridgeline.machine.record import check_writable

    if env.rank == 0 and asked.out is not None:
        check_writable(asked.out)
    if env.rank == 0 and asked.picture is not None and not asked.picture.absolute().parent.is_dir():
        raise UsageError(
            f"{asked.picture} of --picture is in no directory that exists; make it first"
        )
    device = choose(asked.device, env)
    if isinstance(device, torch.device) and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _amounts(asked: Asked, kind: str) -> Amounts:
    from ridgeline.machine.collectives import AMOUNTS

    amounts = AMOUNTS[(kind, asked.quick)]
    return replace(amounts, sizes=asked.sizes) if asked.sizes else amounts


def _keep(asked: Asked, facts: NetworkFacts) -> None:
    from ridgeline.machine.link_show import conclusions, draw_network, show_network
    from ridgeline.machine.record import add_network

    if asked.as_json:
        typer.echo(json.dumps({**facts.to_dict(), "conclusions": conclusions(facts)}, indent=2))
    else:
        show_network(facts)
    try:
        if asked.out is not None:
            add_network(asked.out, facts)
        if asked.picture is not None:
            asked.picture.write_text(draw_network(facts), encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot write {error.filename} ({error.strerror}); name another file"
        ) from error
    for path in (asked.out, asked.picture):
        if path is not None and not asked.as_json:
            typer.echo(f"{'added to' if path is asked.out else 'drawn in'} {path}")


def _tell_failure(asked: Asked, env: RankEnv, error: Exception) -> None:
    """To the command that started this rank, or to whoever looks on."""
    from ridgeline.launch.failures import write_failure

    if asked.accounts is not None:
        with suppress(OSError):
            trace = traceback.format_exc()
            write_failure(asked.accounts, env.rank, time.time(), error, trace)
        return
    known = isinstance(error, (UsageError, RunError))
    # What all ranks have agreed on is said once.
    if known and env.rank != 0:
        return
    text = str(error) if known else f"rank {env.rank}: {type(error).__name__}: {error}"
    typer.echo(f"{OURS}{text}", err=True)


def _end_with_parent() -> None:
    """A command that is killed outright cannot end its ranks; on Linux the kernel does."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
