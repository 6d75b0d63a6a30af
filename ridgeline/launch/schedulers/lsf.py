"""LSF: `bsub` takes the script on its input; `jsrun` starts the ranks on machines that have it (CORAL), and
a launcher of MPI elsewhere.

The warning (`-wa`, `-wt`) counts in minutes. A job that ends with the code of `errors.Requeue` is put back
by LSF itself (`-Q`). Output is appended to by default. On CORAL machines the script runs on a node of its
own, which is listed first and runs no ranks. Variables of a step reach the ranks by the environment of
`jsrun`.
From IBM's documentation; not run on an LSF.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from ridgeline.errors import Requeue, RunError, UsageError
from ridgeline.launch.hostlist import read_host_lines, read_host_pairs
from ridgeline.launch.job import Job, JobState, Step
from ridgeline.launch.schedulers import mpi
from ridgeline.launch.schedulers.contract import (
    Allocation,
    Scheduler,
    ends_at,
    gather,
    list_hosts,
    number,
)
from ridgeline.launch.schedulers.program import ask, demand
from ridgeline.launch.script import (
    checked,
    job_ids,
    read_array,
    read_memory,
    refuse,
    render_script,
    value,
)

STATES = {
    "PEND": "waiting",
    "PSUSP": "waiting",
    "USUSP": "waiting",
    "SSUSP": "waiting",
    "WAIT": "waiting",
    "PROV": "waiting",
    "FWD_PEND": "waiting",
    "RUN": "running",
    "DONE": "done",
    "EXIT": "failed",
    "UNKWN": "unknown",
    "ZOMBI": "unknown",
}
"""LSF's words for where a job stands."""

_ENDED_BY = {
    "TERM_RUNLIMIT": "timeout",
    "TERM_DEADLINE": "timeout",
    "TERM_OWNER": "cancelled",
    "TERM_FORCE_OWNER": "cancelled",
    "TERM_BUCKET_KILL": "cancelled",
    "TERM_ADMIN": "cancelled",
    "TERM_FORCE_ADMIN": "cancelled",
    "TERM_PREEMPT": "cancelled",
}
_FIELDS = "stat exit_code exec_host exit_reason pend_reason delimiter='|'"


def render(job: Job) -> str:
    return render_script(job, "#BSUB", _directives(job))


def _directives(job: Job) -> list[str]:
    refuse(job, "LSF", {"qos": "name a queue (--partition) or give a directive such as -sla NAME"})
    name = job.scheduler_name
    if job.array is not None:
        if read_array(job.array).first < 1:
            raise UsageError(
                f"--array {job.array!r} starts at 0, and LSF counts from 1; write 1-..."
            )
        indices, _, limit = job.array.partition("%")
        name = f'"{name}[{indices}]{f"%{limit}" if limit else ""}"'
    lines = [f"-J {name}", *_size(job)]
    if job.time_s is not None:
        minutes = -(-job.time_s // 60)
        lines.append(f"-W {minutes // 60}:{minutes % 60:02d}")
        if job.warn_before_s:
            lines.append(f"-wa USR1 -wt {-(-job.warn_before_s // 60)}")
    lines += ["-r", f'-Q "{Requeue.exit_code}"'] if job.requeue else ["-rn"]
    lines.append(f"-o {value(_output(job), 'the folder of the job')}")
    if job.after:
        lines.append(f'-w "{" && ".join(f"ended({one})" for one in job_ids(job.after))}"')
    for option, said in (("-q", job.partition), ("-P", job.account), ("-U", job.reservation)):
        if said is not None:
            lines.append(f"{option} {value(said, f'bsub {option}')}")
    if job.constraint is not None:
        lines.append(f'-R "select[{checked(job.constraint, "--constraint")}]"')
    if job.exclusive and not job.count_nodes:
        lines.append("-x")
    return lines


def _size(job: Job) -> list[str]:
    if job.count_nodes:  # nodes come whole, with their GPUs and memory
        return [f"-nnodes {job.nodes}"]
    slots = job.per_node * (job.cpus_per_rank or 1)
    lines = [f"-n {job.nodes * slots}", f'-R "span[ptile={slots}]"']
    if job.gpus_per_node:
        kind = f":gmodel={checked(job.gpu_type, 'the type of GPU')}" if job.gpu_type else ""
        lines.append(f'-gpu "num={job.gpus_per_node}{kind}"')
    if job.memory is not None:
        amount, unit = read_memory(job.memory)
        lines.append(f'-R "rusage[mem={amount}{unit}B/host]"')
    return lines


def _output(job: Job) -> str:
    path = str(job.output.absolute())
    if "%" in path:
        raise UsageError(
            f"the folder of the job {str(job.folder)!r} holds '%', which LSF replaces; choose another"
        )
    return path if job.array is None else path.removesuffix(".out") + ".%I.out"


def submit(script: Path) -> str:
    said = demand(["bsub"], stdin=script)
    match = re.search(r"Job <(\d+)>", said)
    if match is None:
        raise RunError(f"bsub took the job and named no id; it said {said.strip()!r}")
    return match.group(1)


def status(job_id: str) -> JobState:
    answer = ask(["bjobs", "-a", "-noheader", "-o", _FIELDS, *job_ids([job_id], "job")])
    states = read_bjobs(answer.out)
    if not states:
        return JobState("unknown", "", reason=f"bjobs: {answer.why}")
    return gather(states)


def read_bjobs(text: str) -> list[JobState]:
    """A state for each line of `bjobs -o` with the fields above."""
    states = []
    for line in text.splitlines():
        if line.count("|") < 4:
            continue
        said, code, hosts, ended, waits = (
            "" if part.strip() == "-" else part.strip() for part in line.split("|", 4)
        )
        state = STATES.get(said, "unknown")
        for word, meaning in _ENDED_BY.items():
            if said == "EXIT" and re.search(rf"\b{word}\b", ended):
                state = meaning
        exit_code = int(code) if code.isdigit() else 0 if said == "DONE" else None
        # 6*h1:6*h2, or a name a slot
        nodes = dict.fromkeys(host.split("*")[-1] for host in hosts.split(":") if host)
        states.append(JobState(state, said, ",".join(nodes), exit_code, ended or waits))
    return states


def cancel(job_id: str) -> None:
    demand(["bkill", *job_ids([job_id], "job")])


def requeue(job_id: str) -> bool:
    """`-Q` in the script does it, once the job has ended with that code."""
    return False


def inside(environ: Mapping[str, str]) -> Allocation | None:
    if not environ.get("LSB_JOBID"):
        return None
    hosts: list[str] = []
    path = environ.get("LSB_DJOB_HOSTFILE")
    if path:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"cannot read LSB_DJOB_HOSTFILE={path!r}, the list of nodes: {error.strerror}"
            ) from error
        hosts = [host for host, _ in read_host_lines(text, "LSB_DJOB_HOSTFILE")]
    elif environ.get("LSB_MCPU_HOSTS"):
        pairs = read_host_pairs(environ["LSB_MCPU_HOSTS"], "LSB_MCPU_HOSTS")
        hosts = [host for host, _ in pairs]
    if environ.get("CSM_ALLOCATION_ID") and len(hosts) > 1:
        hosts = hosts[1:]
    nodes = tuple(host for host in hosts if not host.startswith(("batch", "login"))) or tuple(hosts)
    index = environ.get("LSB_JOBINDEX", "0")
    task = "" if index == "0" else index
    return Allocation(
        job_id=f"{environ['LSB_JOBID']}[{task}]" if task else environ["LSB_JOBID"],
        nodes=nodes,
        num_nodes=len(nodes) or number(environ, "LSB_DJOB_NUMPROC") or 1,
        restarts=int(environ.get("LSB_RESTART") == "Y"),
        array_index=task,
        ends_at=ends_at(environ),
    )


def step(step: Step) -> list[str]:
    """`jsrun` where it is installed: one resource set a node with all of its ranks, so that a rank sees
    every GPU of its node and binds itself."""
    if shutil.which("jsrun") is None:
        return mpi.step(step)
    given = inside(os.environ)
    if step.hosts and given is not None and set(given.nodes) != set(list_hosts(step)):
        raise UsageError(
            f"jsrun uses the nodes of the job as it likes, and {', '.join(step.hosts)} are wanted; ask for "
            f"all {given.num_nodes} of them"
        )
    cpus = step.cpus_per_rank
    return [
        "jsrun",
        *("-n", str(step.nodes), "-r", "1", "-a", str(step.per_node)),
        *("-c", str(cpus * step.per_node) if cpus else "ALL_CPUS"),
        *("-g", str(step.gpus_per_node or 0)),
        *("-d", "packed", "-b", "none"),
        *step.command,
    ]


LSF = Scheduler(
    "lsf", ("bsub", "bjobs", "bkill"), render, submit, status, cancel, requeue, inside, step
)
