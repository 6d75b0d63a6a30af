"""MPI's own launchers: Open MPI, MPICH and its kin (Hydra), and Cray's PALS. No queue, only steps.

They are called `mpirun` or `mpiexec` all of them, and differ in every option, so that the one that is
installed is asked who it is. Variables: Open MPI gets the names of a step's variables (`-x`), since it
passes nothing else to other hosts; the others pass on their whole environment. A rank that fails ends the
others under Open MPI and PALS; under Hydra a program that is not MPI may fail alone, and whoever watches
the step ends it. Called by `pbs.py`, `lsf.py`, and where hosts are named without a scheduler.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.errors import UsageError
from ridgeline.launch.job import Step
from ridgeline.launch.schedulers.contract import list_hosts
from ridgeline.launch.schedulers.program import Answer, ask

PROGRAMS = ("mpiexec", "mpirun", "mpiexec.hydra", "mpirun.openmpi")
"""In this order: on Cray machines there is only the first."""

KINDS = {
    "openmpi": r"Open ?MPI|OpenRTE|PRRTE",
    "intel": r"Intel\(R\) MPI",
    "mpich": r"HYDRA|MPICH|MVAPICH",
    "pals": r"\bPALS\b",
}
"""What tells them apart in what `--version` prints. Intel's is a Hydra with options of its own."""


@dataclass(frozen=True)
class Mpi:
    """A launcher that is installed."""

    kind: str
    """A key of `KINDS`."""
    program: str


def find_mpi(
    which: Callable[[str], str | None] = shutil.which,
    ask_version: Callable[[list[str]], Answer] = ask,
) -> Mpi:
    """The first launcher on PATH that says what it is; a `UsageError` where there is none."""
    strange = []
    for program in PROGRAMS:
        path = which(program)
        if path is None:
            continue
        answer = ask_version([path, "--version"])
        kind = tell_kind(answer.out + answer.err, path)
        if kind is not None:
            return Mpi(kind, path)
        strange.append(f"{path} says {answer.why[:60]!r}")
    if strange:
        raise UsageError(
            f"no launcher of MPI that is known here: {'; '.join(strange)}; put one of Open MPI, MPICH or "
            "PALS on PATH"
        )
    raise UsageError(
        f"no launcher of MPI is installed here, or none is on PATH (looked for {', '.join(PROGRAMS)}); "
        "load the module of one"
    )


def tell_kind(version: str, path: str = "") -> str | None:
    for kind, pattern in KINDS.items():
        if re.search(pattern, version, re.IGNORECASE):
            return kind
    return "pals" if "/pals/" in path else None


def step(step: Step, mpi: Mpi | None = None) -> list[str]:
    """The command line for these ranks, so many to a node, in a row, bound to nothing."""
    found = find_mpi() if mpi is None else mpi
    if ":" in step.command:
        raise UsageError(
            "the command has ':' as a word of its own, which launchers of MPI take for the start of "
            "another command; write it in another way"
        )
    return [found.program, *_OPTIONS[found.kind](step), *step.command]


def _open_mpi(step: Step) -> list[str]:
    words = [
        *("-n", str(step.num_ranks)),
        # Without this, ranks beyond the cores, or beyond what a scheduler calls slots, are refused.
        *("--map-by", f"ppr:{step.per_node}:node:OVERSUBSCRIBE"),
        *("--rank-by", "slot", "--bind-to", "none"),
    ]
    for name in step.variables:
        words += ["-x", name]
    if step.hosts:
        words += ["--host", ",".join(f"{host}:{step.per_node}" for host in list_hosts(step))]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    return words


def _hydra(step: Step) -> list[str]:
    words = ["-n", str(step.num_ranks), "-ppn", str(step.per_node), "-bind-to", "none"]
    return words + (["-hosts", ",".join(list_hosts(step))] if step.hosts else [])


def _intel(step: Step) -> list[str]:
    words = ["-n", str(step.num_ranks), "-ppn", str(step.per_node), "-genv", "I_MPI_PIN", "0"]
    return words + (["-hosts", ",".join(list_hosts(step))] if step.hosts else [])


def _pals(step: Step) -> list[str]:
    words = ["-n", str(step.num_ranks), "--ppn", str(step.per_node), "--cpu-bind", "none"]
    return words + (["--hosts", ",".join(list_hosts(step))] if step.hosts else [])


_OPTIONS: dict[str, Callable[[Step], list[str]]] = {
    "openmpi": _open_mpi,
    "intel": _intel,
    "mpich": _hydra,
    "pals": _pals,
}
