"""Slurm: `sbatch` takes the script, `srun` starts the ranks.

The warning goes to the batch shell alone (`--signal=B:`), which the body has replaced: sent to the step it
would reach the loaders of every rank as well. It may come up to a minute early. Variables of a step reach
the ranks by the environment of `srun`, which passes on all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.env import slurm_mpi
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
from ridgeline.launch.script import job_ids, read_array, read_memory, render_script, value

_MAX_WARN_S = 65_535

STATES = {
    "PENDING": "waiting",
    "CONFIGURING": "waiting",
    "REQUEUED": "waiting",
    "REQUEUE_FED": "waiting",
    "REQUEUE_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting",
    "RESV_DEL_HOLD": "waiting",
    "SUSPENDED": "waiting",
    "STOPPED": "waiting",
    "RUNNING": "running",
    "COMPLETING": "running",
    "RESIZING": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "COMPLETED": "done",
    "FAILED": "failed",
    "BOOT_FAIL": "failed",
    "NODE_FAIL": "failed",
    "LAUNCH_FAILED": "failed",
    "OUT_OF_MEMORY": "failed",
    "DEADLINE": "failed",
    "REVOKED": "failed",
    "PREEMPTED": "cancelled",
    "CANCELLED": "cancelled",
    "TIMEOUT": "timeout",
}
"""Slurm's words for where a job stands."""

_NO_REASON = ("", "None", "(null)", "N/A")


def render(job: Job) -> str:
    return render_script(job, "#SBATCH", _directives(job))


def _directives(job: Job) -> list[str]:
    lines = [
        f"--job-name={job.scheduler_name}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.per_node}",
    ]
    if job.cpus_per_rank is not None:
        lines.append(f"--cpus-per-task={job.cpus_per_rank}")
    if job.gpus_per_node:
        kind = f"{value(job.gpu_type, 'the type of GPU')}:" if job.gpu_type else ""
        lines.append(f"--gpus-per-node={kind}{job.gpus_per_node}")
    if job.memory is not None:
        lines.append("--mem={}{}".format(*read_memory(job.memory)))
    if job.time_s is not None:
        # Slurm counts in minutes and rounds up.
        lines.append(f"--time={job.shown_time}")
    if job.warn_before_s:
        lines.append(f"--signal=B:USR1@{min(job.warn_before_s, _MAX_WARN_S)}")
    lines.append("--requeue" if job.requeue else "--no-requeue")
    # A job that was started again goes on in the same file.
    lines += ["--open-mode=append", f"--output={value(_output(job), 'the folder of the job')}"]
    if job.array is not None:
        read_array(job.array)
        lines.append(f"--array={job.array}")
    if job.after:
        lines.append(f"--dependency=afterany:{':'.join(job_ids(job.after))}")
    for option in ("partition", "account", "qos", "constraint", "reservation"):
        said = getattr(job, option)
        if said is not None:
            lines.append(f"--{option}={value(said, f'--{option}')}")
    if job.exclusive:
        lines.append("--exclusive")
    return lines


def _output(job: Job) -> str:
    """A file an index; a percent sign of the folder's own is written twice."""
    path = str(job.output.absolute()).replace("%", "%%")
    return path if job.array is None else path.removesuffix(".out") + ".%a.out"


def submit(script: Path) -> str:
    return demand(["sbatch", "--parsable", str(script.absolute())]).strip().split(";")[0]


def status(job_id: str) -> JobState:
    """From the queue while the job is in it, else from the controller's memory, else from the accounts."""
    one = job_ids([job_id], "job")[0]
    queued = ask(["squeue", "--noheader", "--all", f"--jobs={one}", "--format=%T|%r|%N"])
    states = [_state(*line.split("|")) for line in queued.out.splitlines() if line.count("|") == 2]
    if states and not queued.code:
        return gather(states)
    known = ask(["scontrol", "--oneliner", "show", "job", one])
    states = [] if known.code else read_scontrol(known.out)
    if not states:
        kept = ask_accounts(one)
        states = kept if isinstance(kept, list) else []
        if not states:
            why = kept if isinstance(kept, str) else "the accounts do not have it either"
            return JobState("unknown", "", reason=f"scontrol: {known.why}; sacct: {why}")
    return gather(states)


def ask_accounts(job_id: str) -> list[JobState] | str:
    """What `sacct` has of a job, or why it has nothing."""
    try:
        answer = ask(
            ["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State,ExitCode,NodeList,Reason"]
        )
    except UsageError as error:
        return str(error)
    if answer.code:
        return answer.why
    rows = [line.split("|") for line in answer.out.splitlines() if line.count("|") == 3]
    return [_state(row[0], row[3], row[2], row[1]) for row in rows]


def read_scontrol(text: str) -> list[JobState]:
    """A state for each line of `scontrol --oneliner show job`."""
    states = []
    for line in text.splitlines():
        # Values may hold blanks, so that a value ends where the next key starts; the first of a key counts,
        # since the user's own texts come late.
        said = dict(reversed(re.findall(r"(\w+)=(.*?)(?=\s+[\w/:&]+=|\s*$)", line)))
        if "JobState" in said:
            states.append(
                _state(
                    said["JobState"],
                    said.get("Reason", ""),
                    said.get("NodeList", ""),
                    said.get("ExitCode", ""),
                )
            )
    return states


def _state(said: str, reason: str = "", nodes: str = "", exit_code: str = "") -> JobState:
    word = said.split()[0].rstrip("+") if said.split() else ""  # CANCELLED by 1000, CANCELLED+
    state = STATES.get(word, "unknown")
    code = None
    if state not in ("waiting", "running", "unknown") and re.fullmatch(r"\d+:\d+", exit_code):
        status, signal = (int(part) for part in exit_code.split(":"))
        code = status or (128 + signal if signal else 0)
    return JobState(
        state,
        word,
        "" if nodes in _NO_REASON else nodes,
        code,
        "" if reason in _NO_REASON else reason,
    )


def cancel(job_id: str) -> None:
    demand(["scancel", *job_ids([job_id], "job")])


def requeue(job_id: str) -> bool:
    """A job that asks for itself is ended by this, so that it is the last thing to do."""
    demand(["scontrol", "requeue", *job_ids([job_id], "job")])
    return True


def preempted(job_id: str) -> bool:
    """A job that was cancelled, or whose time is over, is no longer said to run when it gets its SIGTERM;
    one that has some seconds left to make room for another is."""
    return status(job_id).said == "RUNNING"


def inside(environ: Mapping[str, str]) -> Allocation | None:
    if not environ.get("SLURM_JOB_ID"):
        return None
    nodes: tuple[str, ...] = ()
    for variable in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(variable):
            nodes = tuple(expand_hosts(environ[variable], variable))
            break
    task, array = environ.get("SLURM_ARRAY_TASK_ID", ""), environ.get("SLURM_ARRAY_JOB_ID", "")
    return Allocation(
        # One task has the id of the whole array; asked to start that again, Slurm would start all of them.
        job_id=f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"],
        nodes=nodes,
        num_nodes=number(environ, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or len(nodes) or 1,
        restarts=number(environ, "SLURM_RESTART_COUNT") or 0,
        array_index=task,
        ends_at=ends_at(environ, "SLURM_JOB_END_TIME"),
        cpus_per_node=_fewest_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", "")),
    )


def _fewest_cpus(said: str) -> int | None:
    """Of `4(x2),8`: so many CPUs on so many nodes.

    >>> _fewest_cpus("16(x2),8"), _fewest_cpus("")
    (8, None)
    """
    counts = [int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", said)]
    return min(counts, default=None)


def step(step: Step) -> list[str]:
    """`srun` with everything said that the environment of the job, or of the user, would otherwise decide.

    `--overlap`: a step that is being cleaned up, or a shell someone opened in the job, does not make
    this one wait. `--kill-on-bad-exit`: a rank that failed ends the others, which would wait for it;
    `--no-kill`: what needs no others goes on without a node that failed.
    `--wait=0`: one that has finished does not, since rank 0 may still be writing.
    `--distribution=block`: ranks in a row are on one node. `--cpu-bind=none`: the rank chooses its own.
    `--gpus-per-node` and no binding: a rank sees every GPU of its node, which peer-to-peer copies need
    (`--gpu-bind=none` would leave CUDA_VISIBLE_DEVICES unset, and with it the GPUs of other jobs in
    sight). `--cpus-per-task`: srun does not take it from the job since 22.05. `--mpi`: a default that
    is not installed on every node is not asked for; programs that call MPI name one in SLURM_MPI_TYPE.
    `--input=none`: srun leaves the terminal alone.
    """
    words = [
        "srun",
        f"--nodes={step.nodes}",
        f"--ntasks={step.num_ranks}",
        f"--ntasks-per-node={step.per_node}",
        "--distribution=block",
        "--overlap",
        *(("--kill-on-bad-exit=1",) if step.together else ("--kill-on-bad-exit=0", "--no-kill")),
        "--wait=0",
        "--export=ALL",
        "--input=none",
        f"--mpi={slurm_mpi()}",
        "--cpu-bind=none",
    ]
    if step.hosts:
        words.append(f"--nodelist={','.join(list_hosts(step))}")
    if step.cpus_per_rank is not None:
        words.append(f"--cpus-per-task={step.cpus_per_rank}")
    if step.gpus_per_node:
        words.append(f"--gpus-per-node={step.gpus_per_node}")
    return [*words, "--", *step.command]


SLURM = Scheduler(
    "slurm",
    ("sbatch", "srun", "squeue"),
    render,
    submit,
    status,
    cancel,
    requeue,
    inside,
    step,
    preempted,
)
