"""PBS Professional and OpenPBS: `qsub` takes the script, a launcher of MPI starts the ranks (Cray's PALS,
Open MPI or MPICH, whichever is installed).

PBS sends no warning: whoever runs as the body keeps the time by `RIDGELINE_ENDS_AT`. It hands output over
when the job ends, so that the script writes to its own file, and it does not pass on the environment of
`qsub`. Only operators may use `qrerun` at most sites. Torque is understood where it differs little: its
variables and its `qstat`. From documentation; not run on a PBS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.hostlist import read_host_lines
from ridgeline.launch.job import Job, JobState, Step
from ridgeline.launch.schedulers import mpi
from ridgeline.launch.schedulers.contract import Allocation, Scheduler, ends_at, gather, number
from ridgeline.launch.schedulers.program import ask, demand
from ridgeline.launch.script import (
    job_ids,
    quote,
    read_array,
    read_memory,
    refuse,
    render_script,
    value,
)

STATES = {
    "Q": "waiting",
    "H": "waiting",
    "W": "waiting",
    "T": "waiting",
    "S": "waiting",
    "U": "waiting",
    "M": "waiting",
    "B": "running",
    "R": "running",
    "E": "running",
    "F": "done",
    "X": "done",
    "C": "done",
}
"""PBS's letters for where a job stands; those of one that is over say nothing of how it ended."""

_NAME_LENGTH = 15
_KILLED_FOR_TIME = -29
_DELETED = "91"
_BY_SIGNAL = 256


def render(job: Job) -> str:
    path = quote(str(job.output.absolute().with_suffix("")))
    index = "" if job.array is None else '."$PBS_ARRAY_INDEX"'
    return render_script(job, "#PBS", _directives(job), [f"exec >>{path}{index}.out 2>&1"])


def _directives(job: Job) -> list[str]:
    refuse(
        job,
        "PBS",
        {
            "qos": "name a queue (--partition)",
            "gpu_type": "give it as --constraint, in the words of the site (e.g. gpu_model=a100)",
        },
    )
    lines = ["-S /bin/bash", f"-N {job.scheduler_name[:_NAME_LENGTH]}", f"-l select={_chunk(job)}"]
    lines.append("-l place=scatter:excl" if job.exclusive else "-l place=scatter")
    if job.time_s is not None:
        lines.append(f"-l walltime={job.shown_time}")
    lines += ["-r y" if job.requeue else "-r n", f"-j oe -o {_leftover(job)}"]
    if job.array is not None:
        array = read_array(job.array)
        if len(array.ranges) > 1 or array.ranges[0][0] == array.ranges[0][1]:
            raise UsageError(
                f"--array {job.array!r} is a list, and PBS takes one range; write one such as 0-9"
            )
        lines.append(f"-J {job.array}")
    if job.after:
        lines.append(f"-W depend=afterany:{':'.join(job_ids(job.after))}")
    if job.partition is not None and job.reservation is not None:
        raise UsageError("a reservation is a queue in PBS: give --partition or --reservation")
    queue = job.partition if job.reservation is None else job.reservation
    for option, said in (("-q", queue), ("-A", job.account)):
        if said is not None:
            lines.append(f"{option} {value(said, f'qsub {option}')}")
    return lines


def _chunk(job: Job) -> str:
    """A chunk is a node."""
    parts = [str(job.nodes), f"ncpus={job.per_node * (job.cpus_per_rank or 1)}"]
    parts.append(f"mpiprocs={job.per_node}")
    if job.gpus_per_node:
        parts.append(f"ngpus={job.gpus_per_node}")
    if job.memory is not None:
        amount, unit = read_memory(job.memory)
        parts.append(f"mem={amount}{unit.lower()}b")
    if job.constraint is not None:
        if value(job.constraint, "--constraint") != job.constraint:
            raise UsageError(
                f"--constraint {job.constraint!r} is no NAME=VALUE as PBS takes them, with ':' between"
            )
        parts.append(job.constraint)
    return ":".join(parts)


def _leftover(job: Job) -> str:
    """Where PBS puts what was said before the script took over."""
    path = str(job.folder.absolute() / "job.pbs.out")
    if ":" in path:
        raise UsageError(
            f"the folder of the job {str(job.folder)!r} holds ':', which PBS takes for the end of a host's "
            "name; choose another"
        )
    return value(path if job.array is None else f"{path}.^array_index^", "the folder of the job")


def submit(script: Path) -> str:
    lines = demand(["qsub", str(script.absolute())]).split()
    if not lines:
        raise RunError("qsub took the job and named no id")
    return lines[-1]


def status(job_id: str) -> JobState:
    """As JSON where `qstat` can; else from its text, in which Torque answers too."""
    one = job_ids([job_id], "job")[0]
    subjobs = ["-t"] if "[]" in one else []
    answer = ask(["qstat", "-x", "-f", *subjobs, "-F", "json", one])
    states = read_qstat_json(answer.out)
    if not states:
        plain = ask(["qstat", "-f", one])
        states = read_qstat_text(plain.out)
        if not states:
            return JobState("unknown", "", reason=f"qstat: {(plain if plain.err else answer).why}")
    return gather(states)


def read_qstat_json(text: str) -> list[JobState]:
    """A state for each job in `qstat -f -F json`; of an array, for its parts where they are listed."""
    try:
        jobs = json.loads(text).get("Jobs", {})
    except (ValueError, AttributeError):
        return []
    parts = {name: said for name, said in jobs.items() if "[]" not in name}
    return [_state(said) for said in (parts or jobs).values() if "job_state" in said]


def read_qstat_text(text: str) -> list[JobState]:
    """The same of `qstat -f`, whose long values go on in lines that start with a tab."""
    states = []
    for block in re.split(r"(?m)^Job Id:", text.replace("\n\t", ""))[1:]:
        said = dict(re.findall(r"(?m)^\s+([\w.]+) = (.*)$", block))
        if "job_state" in said:
            states.append(_state(said))
    return states


def _state(said: Mapping[str, Any]) -> JobState:
    letter = str(said["job_state"])
    state = STATES.get(letter, "unknown")
    ended = said.get("Exit_status", said.get("exit_status"))
    code = None
    if state == "done":
        code = int(ended) if ended is not None and re.fullmatch(r"-?\d+", str(ended)) else None
        if str(said.get("substate")) == _DELETED:
            state = "cancelled"
        elif code == _KILLED_FOR_TIME or "walltime" in str(said.get("comment", "")).lower():
            state = "timeout"
        elif code:
            state = "failed"
        elif code is None and letter != "X":  # deleted before it ran
            state = "cancelled"
        if code is not None and code > _BY_SIGNAL:
            code = code - _BY_SIGNAL + 128
    hosts = [part.split("/")[0] for part in str(said.get("exec_host", "")).split("+")]
    nodes = ",".join(dict.fromkeys(host for host in hosts if host))
    return JobState(state, letter, nodes, code, str(said.get("comment", "")))


def cancel(job_id: str) -> None:
    demand(["qdel", *job_ids([job_id], "job")])


def requeue(job_id: str) -> bool:
    answer = ask(["qrerun", *job_ids([job_id], "job")])
    if answer.code:
        raise RunError(
            f"qrerun refused ({answer.why}); at most sites it is the operators': submit the script again"
        )
    return True


def inside(environ: Mapping[str, str]) -> Allocation | None:
    if not environ.get("PBS_JOBID"):
        return None
    nodes: tuple[str, ...] = ()
    path = environ.get("PBS_NODEFILE")
    if path:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot read PBS_NODEFILE={path!r}, the list of nodes: {error.strerror}"
            ) from error
        nodes = tuple(host for host, _ in read_host_lines(text, "PBS_NODEFILE"))
    return Allocation(
        job_id=environ["PBS_JOBID"],
        nodes=nodes,
        num_nodes=len(nodes) or number(environ, "PBS_NUM_NODES") or 1,
        array_index=environ.get("PBS_ARRAY_INDEX") or environ.get("PBS_ARRAYID") or "",
        ends_at=ends_at(environ),
    )


def step(step: Step) -> list[str]:
    return mpi.step(step)


PBS = Scheduler(
    "pbs", ("qsub", "qstat", "qdel"), render, submit, status, cancel, requeue, inside, step
)
