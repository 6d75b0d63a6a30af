"""Job scripts as each scheduler gets them, with everything a job can ask for, kept beside this file.

They change when the text of a script changes. Where that is what you meant, make them anew and commit the
difference:

    python tests/golden/launch/make.py

Run as a script to write them, and by `tests/unit/launch/test_scripts.py` to compare.
"""

from dataclasses import replace
from pathlib import Path

from ridgeline.launch.containers import wrap
from ridgeline.launch.job import Container, Job, read_time
from ridgeline.launch.schedulers.table import find_scheduler
from ridgeline.launch.sites import load_site

GOLDEN = Path(__file__).parent

IN_CONTAINER = wrap(
    Container("apptainer", "/images/torch 2.sif", ("/data",)),
    ["python", "-m", "supervise", "--name", "it's $HOME", "two\nlines"],
    gpus=True,
)
BASE = Job(
    name="digits, third try",
    body=tuple(IN_CONTAINER),
    folder=Path("/work/my runs/digits/job"),
    workdir=Path("/work/my runs"),
    nodes=2,
    time_s=read_time("1:30:00", "--time"),
    requeue=True,
    after=("41", "42"),
    account="m1234",
    setup=("module load cuda",),
    variables={"OMP_NUM_THREADS": "8", "NOTE": 'a "b" $c'},
)


def at_site(name: str, job: Job, **said: object) -> Job:
    """`job` with what a site's profile adds."""
    told = {"nodes": job.nodes, "setup": job.setup, "variables": job.variables, **said}
    return replace(job, **load_site(name, environ={"XDG_CONFIG_HOME": "/nowhere"}).fill(told))


JOBS = {
    "slurm": (
        "slurm",
        replace(
            at_site("engaging", BASE, gpus_per_node=2, cpus_per_rank=8),
            memory="64G",
            array="0-9%2",
            qos="normal",
            constraint="a100&nvlink",
            reservation="course",
            exclusive=True,
            directives=("--mail-type=END",),
        ),
    ),
    "lsf": (
        "lsf",
        replace(
            BASE,
            per_node=4,
            cpus_per_rank=8,
            gpus_per_node=4,
            gpu_type="NVIDIAA100",
            memory="64G",
            array="1-9%2",
            partition="gpuq",
            exclusive=True,
        ),
    ),
    "lsf-summit": (
        "lsf",
        replace(at_site("summit", BASE), directives=('-alloc_flags "gpumps smt4"',)),
    ),
    "pbs": (
        "pbs",
        replace(
            replace(at_site("finisterrae3", BASE), gpu_type=None),
            memory="64G",
            array="0-9%2",
            partition="prod",
            constraint="gpu_model=a100",
            directives=("-l filesystems=home",),
        ),
    ),
    "flux": (
        "flux",
        replace(
            BASE,
            per_node=4,
            cpus_per_rank=8,
            gpus_per_node=4,
            partition="pbatch",
            after=("fAbc1", "fAbd2"),
            constraint="mi300a",
        ),
    ),
}
"""By name of the file: the scheduler, and the job."""


def render(name: str) -> str:
    scheduler, job = JOBS[name]
    return find_scheduler(scheduler).render(job)


def main() -> None:
    for name in JOBS:
        (GOLDEN / f"{name}.sh").write_text(render(name), encoding="utf-8")
        print(f"wrote {GOLDEN / name}.sh")


if __name__ == "__main__":
    main()
