"""Schedulers: what their programs are asked, and how the answers are read.

Answers marked "recorded" were printed by a Slurm 22.05 of two nodes, with the paths shortened, by Open MPI
4.1.4 and by MPICH 4.0.2; those of LSF, PBS and Flux follow their documentation. Programs are stand-ins on
PATH that note what they were called with.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.job import STATES, JobState, Step
from ridgeline.launch.schedulers import flux, lsf, mpi, pbs, slurm
from ridgeline.launch.schedulers.contract import Allocation, gather
from ridgeline.launch.schedulers.mpi import Mpi, find_mpi, tell_kind
from ridgeline.launch.schedulers.program import Answer
from ridgeline.launch.schedulers.table import (
    SCHEDULERS,
    detect_scheduler,
    find_scheduler,
    require_installed,
)


class Bin:
    """Stand-ins for a scheduler's programs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.log.write_text("")

    def add(self, name: str, out: str = "", err: str = "", code: int = 0) -> None:
        """`name` prints this, and notes its arguments and its input."""
        (self.folder / f"{name}.out").write_text(out)
        (self.folder / f"{name}.err").write_text(err)
        path = self.folder / name
        path.write_text(
            "#!/bin/bash\nPATH=/usr/bin:/bin\nd=${0%/*}\n"
            'printf "%s\\n" "${0##*/} $*" >>"$d/log"\ncat >"$d/input"\n'
            f'cat "$0.out"; cat "$0.err" >&2; exit {code}\n'
        )
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bin:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "PBS_", "LSB_", "FLUX_")):
            monkeypatch.delenv(name)
    return Bin(folder)


# -- Slurm -------------------------------------------------------------------------------------------

SHOWN = (
    "JobId={id} JobName=a-job UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901757 Nice=0 "
    "Account=(null) QOS=(null) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=1 "
    "BatchFlag=1 Reboot=0 ExitCode={code} RunTime=00:00:00 TimeLimit=00:01:00 TimeMin=N/A "
    "Partition=main AllocNode:Sid=localhost:4921 ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList={nodes} BatchHost=node1 NumNodes=2 NumCPUs=4 NumTasks=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "Socks/Node=* NtasksPerN:B:S:C=2:0:*:* Command=/work/my runs/job.sh WorkDir=/work "
    "StdOut=/work/my runs/job.out Power= TresPerNode=gres:gpu:2 \n"
)  # recorded, without the times

SCONTROL = {  # recorded: a job that failed, that was cancelled, that ran out of time, and that is done
    ("FAILED", "NonZeroExitCode", "3:0"): JobState(
        "failed", "FAILED", "node[1-2]", 3, "NonZeroExitCode"
    ),
    ("CANCELLED", "None", "0:15"): JobState("cancelled", "CANCELLED", "node[1-2]", 143),
    ("TIMEOUT", "TimeLimit", "0:15"): JobState("timeout", "TIMEOUT", "node[1-2]", 143, "TimeLimit"),
    ("COMPLETED", "None", "0:0"): JobState("done", "COMPLETED", "node[1-2]", 0),
}


def shown(state: str, reason: str, code: str, job_id: str = "3", nodes: str = "node[1-2]") -> str:
    return SHOWN.format(id=job_id, state=state, reason=reason, code=code, nodes=nodes)


def test_slurm_submits(programs: Bin, tmp_path: Path) -> None:
    programs.add("sbatch", out="37;cluster\n")
    assert SCHEDULERS["slurm"].submit(tmp_path / "my job.sh") == "37"
    assert programs.calls == [f"sbatch --parsable {tmp_path}/my job.sh"]


def test_slurm_refuses(programs: Bin, tmp_path: Path) -> None:
    said = (
        "sbatch: error: Batch job submission failed: Invalid partition name specified"  # recorded
    )
    programs.add("sbatch", err=f"{said}\n", code=1)
    with pytest.raises(RunError, match=r"sbatch refused \(1\): .*Invalid partition name"):
        slurm.submit(tmp_path / "job.sh")


@pytest.mark.parametrize(
    ("line", "state"),
    [  # recorded
        ("PENDING|Dependency|", JobState("waiting", "PENDING", reason="Dependency")),
        ("PENDING|BeginTime|", JobState("waiting", "PENDING", reason="BeginTime")),
        ("RUNNING|None|node[1-2]", JobState("running", "RUNNING", "node[1-2]")),
        ("COMPLETING|None|node[1-2]", JobState("running", "COMPLETING", "node[1-2]")),
    ],
)
def test_slurm_jobs_in_the_queue(programs: Bin, line: str, state: JobState) -> None:
    programs.add("squeue", out=f"{line}\n")
    assert slurm.status("3") == state
    assert [call.split()[0] for call in programs.calls] == ["squeue"]


@pytest.mark.parametrize(("said", "state"), SCONTROL.items(), ids=lambda x: str(x)[:12])
def test_slurm_jobs_that_are_over(
    programs: Bin, said: tuple[str, str, str], state: JobState
) -> None:
    programs.add("squeue")
    programs.add("scontrol", out=shown(*said))
    assert slurm.status("3") == state


def test_slurm_arrays(programs: Bin) -> None:
    programs.add(
        "squeue", out="PENDING|JobArrayTaskLimit|\nRUNNING|None|node1\nRUNNING|None|node1\n"
    )
    state = slurm.status("5")
    assert (state.state, state.said, state.nodes) == ("running", "PENDING x1, RUNNING x2", "node1")
    programs.add("squeue")
    tasks = [("FAILED", "NonZeroExitCode", "3:0"), ("COMPLETED", "None", "0:0")]
    programs.add("scontrol", out="".join(shown(*task) for task in tasks))
    state = slurm.status("5")
    assert (state.state, state.said, state.exit_code) == ("failed", "FAILED x1, COMPLETED x1", 3)


def test_slurm_jobs_that_are_gone(programs: Bin) -> None:
    gone = "slurm_load_jobs error: Invalid job id specified\n"  # recorded
    programs.add("squeue", err=gone, code=1)
    programs.add("scontrol", err=gone, code=1)
    programs.add("sacct", err="Slurm accounting storage is disabled\n", code=1)  # recorded
    state = slurm.status("9999")
    assert state.state == "unknown"
    assert "Invalid job id" in state.reason
    assert "accounting storage is disabled" in state.reason
    programs.add("sacct", out="CANCELLED by 1000|0:0|node1|None\n")
    assert slurm.status("9999") == JobState("cancelled", "CANCELLED", "node1", 0)
    programs.add("sacct", out="OUT_OF_MEMORY|0:125|node1|None\n")
    assert slurm.status("9999").state == "failed"


def test_slurm_that_does_not_answer_is_not_a_job_that_is_over(programs: Bin) -> None:
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    for program in ("squeue", "scontrol", "sacct"):
        programs.add(program, err=down, code=1)
    state = slurm.status("3")
    assert state.state == "unknown"
    assert "Unable to contact" in state.reason


def test_a_name_is_not_taken_for_a_state() -> None:
    line = shown("RUNNING", "None", "0:0").replace(
        "StdOut=/work", "StdOut=/a JobState=FAILED /work"
    )
    assert slurm.read_scontrol(line)[0].state == "running"


def test_slurm_cancels_and_requeues(programs: Bin) -> None:
    programs.add("scancel")
    programs.add("scontrol")
    slurm.cancel("5_3")
    assert slurm.requeue("5_3") is True
    assert programs.calls == ["scancel 5_3", "scontrol requeue 5_3"]
    programs.add("scontrol", err="Invalid job id specified for job 9999\n", code=1)  # recorded
    with pytest.raises(RunError, match="Invalid job id"):
        slurm.requeue("9999")


@pytest.mark.parametrize("name", sorted(SCHEDULERS))
def test_ids_are_not_options(name: str, programs: Bin) -> None:
    scheduler = SCHEDULERS[name]
    for bad in ("--help", "1 2", "$(x)"):
        for call in (scheduler.status, scheduler.cancel):
            with pytest.raises(UsageError, match="is no id of a job"):
                call(bad)
    assert programs.calls == []


SBATCH = {  # recorded: the script of a job of two nodes
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NNODES": "2",
    "RIDGELINE_ENDS_AT": "1794784632",
}


def test_inside_slurm() -> None:
    assert slurm.inside({}) is None
    assert slurm.inside(SBATCH) == Allocation("3", ("node1", "node2"), 2, ends_at=1794784632.0)
    again = slurm.inside({**SBATCH, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_END_TIME": "1794784999"})
    assert again is not None
    assert (again.restarts, again.ends_at) == (2, 1794784999.0)
    with pytest.raises(UsageError, match="SLURM_RESTART_COUNT='x'"):
        slurm.inside({**SBATCH, "SLURM_RESTART_COUNT": "x"})


def test_a_task_of_an_array_is_not_the_array() -> None:
    """Its SLURM_JOB_ID may be that of the whole: `scontrol requeue` would start every task again."""
    task = slurm.inside({**SBATCH, "SLURM_ARRAY_JOB_ID": "3", "SLURM_ARRAY_TASK_ID": "7"})
    assert task is not None
    assert (task.job_id, task.array_index) == ("3_7", "7")


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    step = Step(("python", "x.py", "-n", "a b"), 2, 4, ("n1", "n2"), 8, 4)
    words = slurm.step(step)
    assert words[0] == "srun"
    assert words[-5:] == ["--", "python", "x.py", "-n", "a b"]
    assert {
        *("--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--nodelist=n1,n2", "--overlap"),
        *("--cpus-per-task=8", "--gpus-per-node=4", "--kill-on-bad-exit=1", "--wait=0"),
        *("--mpi=none", "--cpu-bind=none", "--export=ALL", "--input=none", "--distribution=block"),
    } == set(words[1:-5])


def test_srun_offers_the_pmi_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_MPI_TYPE", "pmix")
    assert "--mpi=pmix" in slurm.step(Step(("x",), 1, 1))


@pytest.mark.parametrize(
    "hosts", [("n1",), ("n1", "-n2"), ("n1", "a,b"), ("n1", ""), ("n1", "a b")]
)
def test_hosts_that_a_launcher_would_misread(hosts: tuple[str, ...]) -> None:
    step = Step(("true",), 2, 1, hosts)
    for call in (
        slurm.step,
        flux.step,
        lambda one: mpi.step(one, Mpi("openmpi", "mpirun")),
        lambda one: mpi.step(one, Mpi("mpich", "mpiexec")),
    ):
        with pytest.raises(UsageError, match=r"no name of a host|nodes are wanted"):
            call(step)


# -- LSF ---------------------------------------------------------------------------------------------


def test_lsf_submits(programs: Bin, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("#!/bin/bash\n#BSUB -n 1\n")
    programs.add("bsub", out="Job <123> is submitted to default queue <normal>.\n")
    assert lsf.submit(tmp_path / "job.sh") == "123"
    assert (programs.folder / "input").read_text() == "#!/bin/bash\n#BSUB -n 1\n"
    programs.add("bsub", out="fine\n")
    with pytest.raises(RunError, match="named no id; it said 'fine'"):
        lsf.submit(tmp_path / "job.sh")
    with pytest.raises(UsageError, match="there is no script at"):
        lsf.submit(tmp_path / "none.sh")


@pytest.mark.parametrize(
    ("line", "state"),
    [
        (
            "PEND|-|-|-|Not enough slots | or hosts;",
            JobState("waiting", "PEND", reason="Not enough slots | or hosts;"),
        ),
        ("RUN|-|42*h1:42*h2|-|-", JobState("running", "RUN", "h1,h2")),
        ("RUN|-|h1:h1:h2|-|-", JobState("running", "RUN", "h1,h2")),
        ("DONE|-|h1|-|-", JobState("done", "DONE", "h1", 0)),
        ("EXIT|3|h1|-|-", JobState("failed", "EXIT", "h1", 3)),
        (
            "EXIT|140|h1|TERM_RUNLIMIT: job killed after reaching LSF run time limit|-",
            JobState(
                "timeout",
                "EXIT",
                "h1",
                140,
                "TERM_RUNLIMIT: job killed after reaching LSF run time limit",
            ),
        ),
        (
            "EXIT|130|h1|TERM_OWNER: job killed by owner|-",
            JobState("cancelled", "EXIT", "h1", 130, "TERM_OWNER: job killed by owner"),
        ),
        ("ZOMBI|-|h1|-|-", JobState("unknown", "ZOMBI", "h1")),
    ],
)
def test_lsf_status(programs: Bin, line: str, state: JobState) -> None:
    programs.add("bjobs", out=f"{line}\n")
    assert lsf.status("123") == state


def test_lsf_jobs_that_are_gone(programs: Bin) -> None:
    programs.add("bjobs", err="Job <123> is not found\n", code=255)
    assert lsf.status("123") == JobState("unknown", "", reason="bjobs: Job <123> is not found")


def test_lsf_is_asked_to_requeue_by_the_exit_code(programs: Bin) -> None:
    programs.add("bkill")
    lsf.cancel("123[4]")
    assert lsf.requeue("123") is False
    assert programs.calls == ["bkill 123[4]"]


def test_inside_lsf(tmp_path: Path) -> None:
    assert lsf.inside({}) is None
    hosts = tmp_path / "hosts"
    hosts.write_text("batch2\nh1\nh1\nh2\nh2\n")
    found = lsf.inside({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": str(hosts), "LSB_JOBINDEX": "0"})
    assert found == Allocation("7", ("h1", "h2"), 2)
    pairs = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "launch 1 h1 42 h2 42", "LSB_JOBINDEX": "3"}
    found = lsf.inside({**pairs, "CSM_ALLOCATION_ID": "99"})
    assert found == Allocation("7[3]", ("h1", "h2"), 2, array_index="3")
    found = lsf.inside({**pairs, "LSB_MCPU_HOSTS": "h1 4"})
    assert found is not None
    assert found.nodes == ("h1",)
    with pytest.raises(UsageError, match="cannot read LSB_DJOB_HOSTFILE"):
        lsf.inside({"LSB_JOBID": "7", "LSB_DJOB_HOSTFILE": "/nowhere"})


def test_jsrun(programs: Bin, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.add("jsrun")
    words = lsf.step(Step(("python", "x.py"), 2, 6, gpus_per_node=6))
    assert words == [
        *("jsrun", "-n", "2", "-r", "1", "-a", "6", "-c", "ALL_CPUS", "-g", "6"),
        *("-d", "packed", "-b", "none", "python", "x.py"),
    ]
    assert lsf.step(Step(("x",), 1, 6, cpus_per_rank=7))[7:11] == ["-c", "42", "-g", "0"]
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "h1 42 h2 42")
    assert lsf.step(Step(("x",), 2, 6, ("h2", "h1")))[0] == "jsrun"
    with pytest.raises(UsageError, match="jsrun uses the nodes of the job as it likes"):
        lsf.step(Step(("x",), 1, 6, ("h2",)))


def test_lsf_without_jsrun_starts_by_mpi(programs: Bin) -> None:
    programs.add("mpirun", out="mpirun (Open MPI) 5.0.3\n")
    assert lsf.step(Step(("x",), 2, 6))[:3] == [f"{programs.folder}/mpirun", "-n", "12"]


# -- PBS ---------------------------------------------------------------------------------------------


def qstat(**jobs: dict[str, object]) -> str:
    return json.dumps({"timestamp": 1, "pbs_version": "22.05.11", "Jobs": jobs})


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (
            {"job_state": "Q", "comment": "Not Running: Not enough nodes"},
            JobState("waiting", "Q", reason="Not Running: Not enough nodes"),
        ),
        (
            {"job_state": "R", "exec_host": "x1/0*64+x2/0*64", "substate": 42},
            JobState("running", "R", "x1,x2"),
        ),
        ({"job_state": "F", "Exit_status": 0, "substate": 92}, JobState("done", "F", exit_code=0)),
        (
            {"job_state": "F", "Exit_status": 3, "substate": 93},
            JobState("failed", "F", exit_code=3),
        ),
        (
            {"job_state": "F", "Exit_status": -29, "substate": 93},
            JobState("timeout", "F", exit_code=-29),
        ),
        (
            {"job_state": "F", "Exit_status": 271, "substate": 91},
            JobState("cancelled", "F", exit_code=143),
        ),
        ({"job_state": "F", "substate": 91}, JobState("cancelled", "F")),
        ({"job_state": "Z"}, JobState("unknown", "Z")),
    ],
)
def test_pbs_status(programs: Bin, said: dict[str, object], state: JobState) -> None:
    programs.add("qstat", out=qstat(**{"12.srv": said}))
    assert pbs.status("12.srv") == state
    assert programs.calls == ["qstat -x -f -F json 12.srv"]


def test_pbs_arrays(programs: Bin) -> None:
    programs.add(
        "qstat",
        out=qstat(
            **{
                "12[].srv": {"job_state": "B"},
                "12[0].srv": {"job_state": "X", "Exit_status": 0},
                "12[1].srv": {"job_state": "R", "exec_host": "x1/0"},
            }
        ),
    )
    state = pbs.status("12[].srv")
    assert (state.state, state.said, state.nodes) == ("running", "X x1, R x1", "x1")
    assert programs.calls == ["qstat -x -f -t -F json 12[].srv"]


def test_torque_and_broken_json(programs: Bin) -> None:
    text = (
        "Job Id: 12.srv\n    Job_Name = x\n    job_state = C\n    exec_host = n1/0+n1/\n\t1+n2/0\n"
        "    exit_status = 0\n    Variable_List = PBS_O_HOME=/home,\n\tA=job_state = Q\n\n"
    )
    programs.add("qstat", out=text)
    assert pbs.status("12.srv") == JobState("done", "C", "n1,n2", 0)


def test_pbs_jobs_that_are_gone(programs: Bin) -> None:
    programs.add("qstat", err="qstat: Unknown Job Id 12.srv\n", code=153)
    assert pbs.status("12.srv").reason == "qstat: qstat: Unknown Job Id 12.srv"


def test_pbs_submits_cancels_and_reruns(programs: Bin, tmp_path: Path) -> None:
    for program in ("qsub", "qdel", "qrerun"):
        programs.add(program, out="12.srv\n")
    assert pbs.submit(tmp_path / "job.sh") == "12.srv"
    pbs.cancel("12.srv")
    assert pbs.requeue("12.srv") is True
    assert programs.calls[1:] == ["qdel 12.srv", "qrerun 12.srv"]
    programs.add("qrerun", err="qrerun: Unauthorized Request  12.srv\n", code=159)
    with pytest.raises(RunError, match=r"Unauthorized Request.*submit the script again"):
        pbs.requeue("12.srv")


def test_inside_pbs(tmp_path: Path) -> None:
    assert pbs.inside({}) is None
    hosts = tmp_path / "nodes"
    hosts.write_text("x1\nx1\nx2\nx2\n")
    env = {"PBS_JOBID": "12[3].srv", "PBS_NODEFILE": str(hosts), "PBS_ARRAY_INDEX": "3"}
    found = pbs.inside({**env, "RIDGELINE_ENDS_AT": "100"})
    assert found == Allocation("12[3].srv", ("x1", "x2"), 2, array_index="3", ends_at=100.0)
    assert pbs.inside({"PBS_JOBID": "1"}) == Allocation("1", (), 1)
    with pytest.raises(UsageError, match="cannot read PBS_NODEFILE"):
        pbs.inside({"PBS_JOBID": "1", "PBS_NODEFILE": "/nowhere"})


# -- Flux --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ({"state": "SCHED"}, JobState("waiting", "SCHED")),
        ({"state": "RUN", "nodelist": "n[1-2]"}, JobState("running", "RUN", "n[1-2]")),
        (
            {"state": "INACTIVE", "result": "COMPLETED", "returncode": 0, "nodelist": "n1"},
            JobState("done", "COMPLETED", "n1", 0),
        ),
        (
            {"state": "INACTIVE", "result": "FAILED", "returncode": 3},
            JobState("failed", "FAILED", exit_code=3),
        ),
        (
            {
                "state": "INACTIVE",
                "result": "TIMEOUT",
                "returncode": -14,
                "exception": {"note": "resource allocation expired"},
            },
            JobState("timeout", "TIMEOUT", "", 142, "resource allocation expired"),
        ),
        ({"state": "INACTIVE", "result": "CANCELED"}, JobState("cancelled", "CANCELED")),
    ],
)
def test_flux_status(programs: Bin, said: dict[str, object], state: JobState) -> None:
    for answer in ({"jobs": [said]}, said):
        programs.add("flux", out=json.dumps(answer))
        assert flux.status("fAb1") == state
    assert programs.calls[0] == "flux jobs --json fAb1"


def test_flux_submits_and_cancels(programs: Bin, tmp_path: Path) -> None:
    programs.add("flux", out="fAb1\n")
    assert flux.submit(tmp_path / "job.sh") == "fAb1"
    flux.cancel("fAb1")
    assert programs.calls == [f"flux batch {tmp_path}/job.sh", "flux cancel fAb1"]
    with pytest.raises(RunError, match="submit the script again"):
        flux.requeue("fAb1")
    programs.add("flux", err="flux-jobs: ERROR: JobID fAb1 unknown\n", code=1)
    assert flux.status("fAb1").reason == "flux jobs: flux-jobs: ERROR: JobID fAb1 unknown"


def test_inside_flux(programs: Bin) -> None:
    assert flux.inside({}) is None
    batch = {"FLUX_URI": "local:///x", "FLUX_ENCLOSING_ID": "fAb1"}
    assert flux.inside(batch) == Allocation("fAb1", (), 1)  # nobody to ask
    programs.add("flux", out="n[1-2]\n")
    assert flux.inside(batch) == Allocation("fAb1", ("n1", "n2"), 2)
    ranks = {"FLUX_JOB_ID": "fAb2", "FLUX_JOB_NNODES": "4"}
    assert flux.inside(ranks) == Allocation("fAb2", (), 4)


def test_flux_run() -> None:
    words = flux.step(Step(("python", "x.py"), 2, 4, ("n1", "n2")))
    assert words == [
        *("flux", "run", "--nodes=2", "--tasks-per-node=4", "--setopt=cpu-affinity=off"),
        *("--setopt=exit-on-error", "--setopt=exit-timeout=none", "--requires=host:n1,n2"),
        *("python", "x.py"),
    ]


# -- MPI ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "path", "kind"),
    [
        ("mpirun (Open MPI) 4.1.4\n", "", "openmpi"),  # recorded
        ("mpirun (Open MPI) 5.0.3\n", "", "openmpi"),
        ("HYDRA build details:\n    Version:    4.0.2\n", "", "mpich"),  # recorded
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 1 (id: HYDRA)\n", "", "intel"),
        ("mpiexec (PALS) 1.3.4\n", "", "pals"),
        ("version 1.3.4 revision 1\n", "/opt/cray/pals/1.3/bin/mpiexec", "pals"),
        ("slurm 22.05\n", "/usr/bin/mpiexec", None),
    ],
)
def test_kinds_of_mpi(version: str, path: str, kind: str | None) -> None:
    assert tell_kind(version, path) == kind


def test_the_mpi_that_is_installed() -> None:
    def answers(argv: list[str]) -> Answer:
        return Answer(0, {"/b/mpiexec": "who knows", "/b/mpirun": "Open MPI"}[argv[0]], "")

    assert find_mpi(lambda name: f"/b/{name}" if "." not in name else None, answers) == Mpi(
        "openmpi", "/b/mpirun"
    )
    with pytest.raises(UsageError, match="/b/mpiexec says 'who knows'"):
        find_mpi(lambda name: "/b/mpiexec" if name == "mpiexec" else None, answers)
    with pytest.raises(UsageError, match="no launcher of MPI is installed"):
        find_mpi(lambda name: None, answers)


def test_mpi_command_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(("python", "x.py"), 2, 4, ("n1", "n2"), variables={"A": "1", "B": "2"})
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert mpi.step(step, Mpi("openmpi", "mpirun")) == [
        *("mpirun", "-n", "8", "--map-by", "ppr:4:node:OVERSUBSCRIBE", "--rank-by", "slot"),
        *("--bind-to", "none", "-x", "A", "-x", "B", "--host", "n1:4,n2:4", "python", "x.py"),
    ]
    assert mpi.step(step, Mpi("mpich", "mpiexec")) == [
        *("mpiexec", "-n", "8", "-ppn", "4", "-bind-to", "none", "-hosts", "n1,n2"),
        *("python", "x.py"),
    ]
    assert mpi.step(step, Mpi("pals", "mpiexec"))[:7] == [
        *("mpiexec", "-n", "8", "--ppn", "4", "--cpu-bind", "none"),
    ]
    assert "I_MPI_PIN" in mpi.step(step, Mpi("intel", "mpiexec"))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in mpi.step(step, Mpi("openmpi", "mpirun"))
    with pytest.raises(UsageError, match="':' as a word of its own"):
        mpi.step(Step(("x", ":"), 1, 1), Mpi("openmpi", "mpirun"))


REAL = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}


@pytest.mark.parametrize("kind", sorted(REAL))
def test_ranks_by_a_real_mpi(kind: str) -> None:
    program = shutil.which(REAL[kind])
    if program is None:
        pytest.skip(f"{REAL[kind]} is not installed")
    shell = 'printf "%s|%s|%s\\n" "${OMPI_COMM_WORLD_RANK-$PMI_RANK}" "$NOTE" "$1"'
    step = Step(("sh", "-c", shell, "sh", "a $b 'c'"), 1, 3, variables={"NOTE": "x y"})
    done = subprocess.run(
        mpi.step(step, Mpi(kind, program)),
        env={**os.environ, **step.variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert sorted(done.stdout.splitlines()) == [f"{rank}|x y|a $b 'c'" for rank in range(3)]


# -- the table ---------------------------------------------------------------------------------------


def test_which_scheduler_is_here() -> None:
    def only(*names: str):  # type: ignore[no-untyped-def]
        return lambda name: f"/bin/{name}" if name in names else None

    assert detect_scheduler({}, only()) == "local"
    assert detect_scheduler({}, only("sbatch", "qsub")) == "slurm"
    assert detect_scheduler({}, only("bsub")) == "lsf"
    assert detect_scheduler({}, only("qsub")) == "pbs"
    assert detect_scheduler({}, only("flux")) == "flux"
    assert detect_scheduler({"PBS_JOBID": "1"}, only("sbatch")) == "pbs"
    assert detect_scheduler({"SLURM_JOB_ID": "1"}, only()) == "slurm"
    inner = {"SLURM_JOB_ID": "1", "FLUX_JOB_ID": "f1", "FLUX_JOB_NNODES": "1"}
    assert detect_scheduler(inner, only()) == "flux"


def test_schedulers_that_are_not_there() -> None:
    assert find_scheduler("slurm").name == "slurm"
    with pytest.raises(
        UsageError, match=r"unknown scheduler 'slrum' in --scheduler; did you mean 'slurm'"
    ):
        find_scheduler("slrum")
    with pytest.raises(UsageError, match=r"lsf needs bsub, .* here is slurm"):
        require_installed(SCHEDULERS["lsf"], lambda name: name if name == "sbatch" else None)
    with pytest.raises(UsageError, match="here is no scheduler: use local"):
        require_installed(SCHEDULERS["lsf"], lambda name: None)
    with pytest.raises(UsageError, match="slurm needs srun"):
        require_installed(SCHEDULERS["slurm"], lambda name: name if name == "sbatch" else None)
    require_installed(SCHEDULERS["slurm"], lambda name: name)


def test_programs_that_are_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for scheduler in SCHEDULERS.values():
        with pytest.raises(UsageError, match="is not installed here"):
            scheduler.cancel("1")


def test_a_scheduler_that_hangs(programs: Bin, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.add("scancel")
    (programs.folder / "scancel").write_text("#!/bin/bash\nexec /bin/sleep 20\n")
    monkeypatch.setattr("ridgeline.launch.schedulers.program.LIMIT_S", 0.2)
    with pytest.raises(RunError, match="scancel has not answered"):
        slurm.cancel("1")


def test_every_word_of_a_scheduler_means_a_state() -> None:
    for module in (slurm, lsf, pbs, flux):
        assert set(module.STATES.values()) <= set(STATES)


def test_states_of_many() -> None:
    waiting, done, failed = (JobState(word, word.upper()) for word in ("waiting", "done", "failed"))
    assert gather([done]) is done
    assert gather([done, waiting, failed]).state == "waiting"
    assert gather([done, failed]).state == "failed"
    assert gather([done, done]).said == "DONE x2"
