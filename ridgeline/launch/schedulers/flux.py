"""Flux: `flux batch` takes the script and starts an instance of Flux in the nodes, in which `flux run`
starts the ranks.

The warning of Flux goes to that instance and not to the script, so that none is asked for: whoever runs as
the body keeps the time by `RIDGELINE_ENDS_AT`. Nodes come whole. There are no arrays of batch jobs, and a
job is not put back into the queue. Variables of a step reach the ranks by the environment of `flux run`.
From documentation and source; not run on a Flux.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.hostlist import expand_hosts
from ridgeline.launch.job import Job, JobState, Step
from ridgeline.launch.schedulers.contract import (
    Allocation,
    Scheduler,
    ends_at,
    gather,
    list_hosts,
    number,
)
from ridgeline.launch.schedulers.program import ask, demand
from ridgeline.launch.script import job_ids, refuse, render_script, value

STATES = {
    "DEPEND": "waiting",
    "PRIORITY": "waiting",
    "SCHED": "waiting",
    "NEW": "waiting",
    "RUN": "running",
    "CLEANUP": "running",
    "COMPLETED": "done",
    "FAILED": "failed",
    "CANCELED": "cancelled",
    "TIMEOUT": "timeout",
}
"""Flux's words for where a job stands, and for how it ended."""

_ASCII = {"FLUX_F58_FORCE_ASCII": "1"}
"""Ids start with f, and not with a letter that few can type."""


def render(job: Job) -> str:
    return render_script(job, "#flux:", _directives(job))


def _directives(job: Job) -> list[str]:
    refuse(
        job,
        "Flux",
        {
            "array": "submit one job for each",
            "memory": "nodes come whole, with all of theirs",
            "qos": "name a queue (--partition) or an account",
            "gpu_type": "give it as --constraint, a property of the nodes",
            "reservation": "name a queue (--partition)",
        },
    )
    lines = [f"--job-name={job.scheduler_name}", f"--nodes={job.nodes}"]
    # A slot is a node, and exclusive: what is said of cores and GPUs chooses among nodes.
    lines += [f"--nslots={job.nodes}", "--exclusive"]
    if job.cpus_per_rank is not None:
        lines.append(f"--cores-per-slot={job.per_node * job.cpus_per_rank}")
    if job.gpus_per_node:
        lines.append(f"--gpus-per-slot={job.gpus_per_node}")
    if job.time_s is not None:
        lines.append(f"--time-limit={job.time_s}s")
    output = str(job.output.absolute())
    if "{{" in output:
        raise UsageError(
            f"the folder of the job {str(job.folder)!r} holds '{{{{', which Flux replaces; choose another"
        )
    lines.append(f"--output={value(output, 'the folder of the job')}")
    lines += [f"--dependency=afterany:{one}" for one in job_ids(job.after)]
    if job.partition is not None:
        lines.append(f"--queue={value(job.partition, '--partition')}")
    if job.account is not None:
        lines.append(f"--setattr=system.bank={value(job.account, '--account')}")
    if job.constraint is not None:
        lines.append(f"--requires={value(job.constraint, '--constraint')}")
    return lines


def submit(script: Path) -> str:
    said = demand(["flux", "batch", str(script.absolute())], variables=_ASCII).split()
    if not said:
        raise RunError("flux batch took the job and named no id")
    return said[-1]


def status(job_id: str) -> JobState:
    argv = ["flux", "jobs", "--json", *job_ids([job_id], "job")]
    answer = ask(argv, variables=_ASCII)
    states = read_jobs(answer.out)
    if not states:
        return JobState("unknown", "", reason=f"flux jobs: {answer.why}")
    return gather(states)


def read_jobs(text: str) -> list[JobState]:
    """The states in `flux jobs --json`, which is a list of jobs, or one job where one was asked for."""
    try:
        said = json.loads(text)
    except ValueError:
        return []
    jobs = said.get("jobs", [said]) if isinstance(said, Mapping) else []
    return [_state(job) for job in jobs if "state" in job]


def _state(job: Mapping[str, Any]) -> JobState:
    word = (
        str(job.get("result") or job["state"]) if job["state"] == "INACTIVE" else str(job["state"])
    )
    state = STATES.get(word, "unknown")
    code = job.get("returncode")
    over = state not in ("waiting", "running", "unknown")
    exit_code = int(code) if over and isinstance(code, (int, float)) else None
    if exit_code is not None and exit_code < 0:  # ended by this signal
        exit_code = 128 - exit_code
    exception = job.get("exception")
    note = exception.get("note", "") if isinstance(exception, Mapping) else ""
    return JobState(state, word, str(job.get("nodelist") or ""), exit_code, str(note or ""))


def cancel(job_id: str) -> None:
    demand(["flux", "cancel", *job_ids([job_id], "job")], variables=_ASCII)


def requeue(job_id: str) -> bool:
    raise RunError(f"Flux does not put {job_id} back into its queue; submit the script again")


def inside(environ: Mapping[str, str]) -> Allocation | None:
    """In a batch script Flux names the job but counts nothing, so that the instance is asked."""
    job_id = environ.get("FLUX_ENCLOSING_ID") or environ.get("FLUX_JOB_ID") or ""
    if not job_id and not environ.get("FLUX_URI"):
        return None
    said = number(environ, "FLUX_JOB_NNODES")
    num_nodes, nodes = (said, ()) if said is not None else _ask_instance()
    return Allocation(job_id, nodes, num_nodes, ends_at=ends_at(environ))


def _ask_instance() -> tuple[int, tuple[str, ...]]:
    try:
        hosts = ask(["flux", "getattr", "hostlist"])
        size = ask(["flux", "getattr", "size"])
    except (UsageError, RunError):
        return 1, ()
    nodes = tuple(expand_hosts(hosts.out.strip(), "hostlist")) if hosts.out.strip() else ()
    return (int(size.out) if size.out.strip().isdigit() else len(nodes) or 1), nodes


def step(step: Step) -> list[str]:
    """`flux run` on whole nodes, so that a rank sees every GPU of its node and binds itself. A rank that
    fails ends the others; one that has finished does not, since rank 0 may still be writing."""
    words = ["flux", "run", f"--nodes={step.nodes}", f"--tasks-per-node={step.per_node}"]
    words.append("--setopt=cpu-affinity=off")
    words += ["--setopt=exit-on-error"] if step.together else []
    words.append("--setopt=exit-timeout=none")
    if step.hosts:
        words.append(f"--requires=host:{','.join(list_hosts(step))}")
    return [*words, *step.command]


FLUX = Scheduler("flux", ("flux",), render, submit, status, cancel, requeue, inside, step)
