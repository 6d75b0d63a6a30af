"""Job scripts: the texts are the kept ones, and nothing of the user's turns into shell or a directive."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.errors import UsageError
from ridgeline.launch.containers import RUNTIMES, wrap
from ridgeline.launch.job import Container, Job
from ridgeline.launch.schedulers.table import SCHEDULERS
from ridgeline.launch.script import (
    ENDS_AT,
    Array,
    job_ids,
    quote,
    read_array,
    read_memory,
    write_script,
)

ROOT = Path(__file__).resolve().parents[3]
MAKE = runpy.run_path(str(ROOT / "tests" / "golden" / "launch" / "make.py"))

HOSTILE = [
    "a b",
    "",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "$HOME",
    "a;b|c&d>e<f",
    "*",
    "~",
    "--dash",
    "back\\slash",
    "two\nlines",
    "x\n#SBATCH --partition=other\n#BSUB -q other\n#PBS -q other\n#flux: --queue=other",
    "tab\tbell\x07f",
    "\x01\x7f9",
    "é 日本 \U0001f600",
    "line\u2028sep",
    "!history",
    "'\n'",
    "%j %% {{id}}",
]


def a_job(folder: Path, *body: str, **more: object) -> Job:
    return replace(Job("name", body or ("true",), folder, folder), **more)  # type: ignore[arg-type]


def run_script(job: Job, scheduler: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = job.folder / "job.sh"
    write_script(path, SCHEDULERS[scheduler].render(job))
    env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **variables}
    return subprocess.run([str(path)], env=env, capture_output=True, text=True, cwd="/")


@pytest.mark.parametrize("name", sorted(MAKE["JOBS"]))
def test_script_is_the_golden_one(name: str) -> None:
    kept = (MAKE["GOLDEN"] / f"{name}.sh").read_text(encoding="utf-8")
    assert MAKE["render"](name) == kept, (
        "the script changed; if that is intended, run `python tests/golden/launch/make.py` and commit"
    )


def test_every_scheduler_has_a_golden_script() -> None:
    assert {scheduler for scheduler, _ in MAKE["JOBS"].values()} == set(SCHEDULERS)


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_words_arrive_as_they_were(scheduler: str, tmp_path: Path) -> None:
    folder = tmp_path / "a folder's %j"
    if scheduler in (
        "lsf",
        "flux",
        "pbs",
        "slurm",
    ):  # a quote or % may be refused; that has its own test
        folder = tmp_path / "a folder"
    folder.mkdir()
    code = (
        "import json,os,sys;"
        "json.dump([sys.argv[2:],os.environ['NOTE'],os.getcwd(),sys.stdin.read()],open(sys.argv[1],'w'))"
    )
    body = (sys.executable, "-c", code, str(folder / "said.json"), *HOSTILE)
    note = "".join(HOSTILE)
    done = run_script(a_job(folder, *body, variables={"NOTE": note}), scheduler)
    assert done.returncode == 0, done.stderr
    words, variable, cwd, stdin = json.loads((folder / "said.json").read_text())
    assert words == HOSTILE
    assert variable == note
    assert (cwd, stdin) == (str(folder), "")
    assert not (folder / "pwned").exists()


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_no_word_becomes_a_line_of_its_own(scheduler: str, tmp_path: Path) -> None:
    text = SCHEDULERS[scheduler].render(
        a_job(tmp_path, "echo", *HOSTILE, variables={"A": HOSTILE[13]})
    )
    told = [line for line in text.split("\n") if "other" in line]
    assert all(line.startswith(("exec ", "export A=")) for line in told)


def test_words_that_are_no_utf8_arrive(tmp_path: Path) -> None:
    odd = b"\xff\xfe".decode("utf-8", "surrogateescape")
    code = "import os,sys;print(os.fsencode(sys.argv[1]).hex())"
    done = run_script(a_job(tmp_path, sys.executable, "-c", code, odd), "slurm")
    assert done.stdout.strip() == "fffe"


def test_program_with_a_dash(tmp_path: Path) -> None:
    (tmp_path / "-x").write_text("#!/bin/sh\necho ran $1\n")
    (tmp_path / "-x").chmod(0o755)
    done = run_script(a_job(tmp_path, "-x", "-y"), "slurm", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.stdout == "ran -y\n"


def test_zero_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="zero byte"):
        quote("a\0b")


def test_set_up_that_fails_ends_the_job(tmp_path: Path) -> None:
    job = a_job(tmp_path, "echo", "body", setup=("echo first", "module load nothing-here"))
    done = run_script(job, "slurm")
    assert done.returncode != 0
    assert "first" in done.stdout
    assert "body" not in done.stdout


def test_set_up_may_read_variables_that_are_not_set(tmp_path: Path) -> None:
    done = run_script(a_job(tmp_path, "echo", "body", setup=("echo [$NOT_SET]",)), "slurm")
    assert done.stdout == "[]\nbody\n"


def test_said_variables_win_over_the_set_up(tmp_path: Path) -> None:
    job = a_job(tmp_path, "printenv", "A", setup=("export A=module",), variables={"A": "mine"})
    assert run_script(job, "slurm").stdout == "mine\n"


@pytest.mark.parametrize(
    "line", ["#SBATCH -p x", "echo a\n#BSUB -q x", " # PBS -q x", "# flux: -q x"]
)
def test_directives_in_the_set_up_are_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directive"):
        SCHEDULERS["slurm"].render(a_job(tmp_path, setup=(line,)))


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_script_says_when_it_ends(scheduler: str, tmp_path: Path) -> None:
    import time

    job = a_job(tmp_path, "sh", "-c", f"printenv {ENDS_AT} >{tmp_path}/ends", time_s=300)
    assert run_script(job, scheduler, **{ENDS_AT: "1"}).returncode == 0
    assert abs(int((tmp_path / "ends").read_text()) - time.time() - 300) < 30
    job = a_job(tmp_path, "sh", "-c", f"echo ${{{ENDS_AT}-unset}} >{tmp_path}/ends")
    run_script(job, scheduler, **{ENDS_AT: "1"})
    assert (tmp_path / "ends").read_text() == "unset\n"


def test_the_body_takes_the_place_of_the_shell(tmp_path: Path) -> None:
    """So that a signal to the batch shell is the body's."""
    script = a_job(tmp_path, "sh", "-c", "echo $$", setup=("echo $$",))
    first, second = run_script(script, "slurm").stdout.split()
    assert first == second


def test_pbs_goes_on_in_its_file(tmp_path: Path) -> None:
    job = a_job(tmp_path, "echo", "body", array="0-3")
    for _ in range(2):
        run_script(job, "pbs", PBS_ARRAY_INDEX="2")
    assert (tmp_path / "job.2.out").read_text() == "body\nbody\n"


# -- what may stand in a directive -------------------------------------------------------------------


BAD = ["a\nb", 'a"b', "a'b", "a\\b", "a`b", "a$(b)", "a#b", "", "  ", "-p", "a\rb", "a\u2028b"]
OPTIONS = {
    "slurm": ("partition", "account", "qos", "constraint", "reservation"),
    "lsf": ("partition", "account", "constraint", "reservation"),
    "pbs": ("partition", "account", "constraint", "reservation"),
    "flux": ("partition", "account", "constraint"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_values_that_no_directive_holds(scheduler: str, bad: str, tmp_path: Path) -> None:
    for option in OPTIONS[scheduler]:
        with pytest.raises(UsageError):
            SCHEDULERS[scheduler].render(a_job(tmp_path, **{option: bad}))


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
@pytest.mark.parametrize("bad", ["two\nlines", 'a "b"', "a'b", "a\\b", "$x"])
def test_folders_that_no_directive_holds(scheduler: str, bad: str) -> None:
    with pytest.raises(UsageError, match="folder of the job"):
        SCHEDULERS[scheduler].render(a_job(Path("/work") / bad))


def test_letters_that_a_scheduler_replaces_in_paths() -> None:
    job = a_job(Path("/work/50% a"))
    assert '--output="/work/50%% a/job.out"' in SCHEDULERS["slurm"].render(job)
    assert '/work/50% a/job.out"' in SCHEDULERS["flux"].render(job)
    for scheduler, folder in (("lsf", "/50%"), ("pbs", "/host:x"), ("flux", "/a{{id}}")):
        with pytest.raises(UsageError, match="choose another"):
            SCHEDULERS[scheduler].render(a_job(Path(folder)))


def test_names_are_made_harmless() -> None:
    job = a_job(Path("/w"))
    text = SCHEDULERS["slurm"].render(replace(job, name='x"\n#SBATCH --uid=0'))
    assert "--job-name=x-SBATCH---uid-0\n" in text
    assert "--job-name=ridgeline\n" in SCHEDULERS["slurm"].render(replace(job, name="../.."))


@pytest.mark.parametrize("bad", ["no dash", "--a\n--b", "", "#PBS -q x"])
def test_directives_are_options_on_one_line(bad: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not an option on one line"):
        SCHEDULERS["slurm"].render(a_job(tmp_path, directives=(bad,)))


def test_directive_may_bring_its_sentinel(tmp_path: Path) -> None:
    text = SCHEDULERS["slurm"].render(a_job(tmp_path, directives=("#SBATCH --mail-type=END",)))
    assert "\n#SBATCH --mail-type=END\n" in text


def test_arrays() -> None:
    assert read_array("0-9:3%2") == Array(((0, 9, 3),), 2)
    assert read_array("5,1-2").first == 1
    for bad in [
        "",
        "a",
        "1-",
        "3-1",
        "0-9%0",
        "0-9%",
        "0-9%²",
        "1,,2",
        "1 2",
        "0-9:0",
        "-3",
        "1-2-3",
    ]:
        with pytest.raises(UsageError, match="--array"):
            read_array(bad)


def test_arrays_that_a_scheduler_has_not(tmp_path: Path) -> None:
    for scheduler, array, why in (
        ("lsf", "0-9", "counts from 1"),
        ("pbs", "1,3", "one range"),
        ("flux", "0-9", "submit one job for each"),
    ):
        with pytest.raises(UsageError, match=why):
            SCHEDULERS[scheduler].render(a_job(tmp_path, array=array))


def test_memory() -> None:
    assert read_memory("64GiB") == (64, "G")
    assert read_memory("512m") == (512, "M")
    for bad in ["", "G", "1.5G", "64X", "-1G", "64G;rm", "١G"]:
        with pytest.raises(UsageError, match="no amount of memory"):
            read_memory(bad)


def test_ids_of_jobs() -> None:
    good = ("123", "123_4", "123[4]", "123[].server.site", "fAbC", "ƒAbC")
    assert job_ids(good) == good
    for bad in ["", "1;rm", "1 2", "$(x)", "-9", "1:2", "1\n", "a,b"]:
        with pytest.raises(UsageError, match="is no id of a job"):
            job_ids([bad])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"per_node": -1}, "--per-node -1"),
        ({"cpus_per_rank": 0}, "--cpus-per-rank 0"),
        ({"gpus_per_node": -1}, "--gpus-per-node -1"),
        ({"time_s": 0}, "--time 0"),
        ({"warn_s": -1}, "comes after it"),
        ({"body": ()}, "no command"),
        ({"variables": {"A B": "x"}}, "no name of a variable"),
        ({"variables": {"A=$(x)": "x"}}, "no name of a variable"),
    ],
)
def test_jobs_that_ask_for_nothing(wrong: dict[str, object], why: str, tmp_path: Path) -> None:
    for scheduler in SCHEDULERS.values():
        with pytest.raises(UsageError, match=why):
            scheduler.render(a_job(tmp_path, **wrong))


def test_what_a_scheduler_has_no_word_for(tmp_path: Path) -> None:
    for scheduler, fields in {
        "lsf": ["qos"],
        "pbs": ["qos", "gpu_type"],
        "flux": ["qos", "gpu_type", "reservation"],
    }.items():
        for name in fields:
            with pytest.raises(UsageError, match="has no word for"):
                SCHEDULERS[scheduler].render(a_job(tmp_path, **{name: "x"}))


def test_the_warning_leaves_time_to_work(tmp_path: Path) -> None:
    text = SCHEDULERS["slurm"].render(a_job(tmp_path, time_s=60, warn_s=120))
    assert "--signal=B:USR1@30\n" in text
    assert "--signal" not in SCHEDULERS["slurm"].render(a_job(tmp_path, warn_s=0))
    assert "@65535\n" in SCHEDULERS["slurm"].render(a_job(tmp_path, warn_s=10**6))


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no sbatch here")
def test_sbatch_reads_the_directives(tmp_path: Path) -> None:
    """Without a controller: sbatch complains of that, and not of an option."""
    path = tmp_path / "job.sh"
    write_script(path, (MAKE["GOLDEN"] / "slurm.sh").read_text())
    conf = tmp_path / "slurm.conf"
    conf.write_text(
        "ClusterName=none\nSlurmctldHost=localhost\nSlurmctldPort=1\nAuthType=auth/none\n"
        "CredType=cred/none\nMessageTimeout=1\nSelectType=select/cons_tres\nGresTypes=gpu\n"
        "NodeName=localhost\nPartitionName=p Nodes=localhost\n"
    )
    env = {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(conf)}
    done = subprocess.run(
        ["sbatch", "--test-only", str(path)], env=env, capture_output=True, text=True, timeout=240
    )
    assert "Unable to contact slurm controller" in done.stderr
    assert "option" not in done.stderr


# -- containers --------------------------------------------------------------------------------------


def test_commands_in_containers() -> None:
    command = ("python", "x.py", "a b")
    binds = ("/data", "/a b:/c")
    folder = Path("/w d")
    made = {
        runtime: wrap(Container(runtime, "img", binds, ("--opt",)), command, True, folder)
        for runtime in RUNTIMES
    }
    assert made["apptainer"] == [
        *("apptainer", "exec", "--nv", "--pwd", "/w d", "--bind", "/data", "--bind", "/a b:/c"),
        *("--opt", "img", *command),
    ]
    assert made["singularity"] == ["singularity", *made["apptainer"][1:]]
    assert made["shifter"] == [
        *("shifter", "--image=img", "--workdir=/w d", "--volume=/data:/data", "--volume=/a b:/c"),
        *("--opt", "--", *command),
    ]
    podman = made["podman-hpc"]
    assert podman[:3] == ["podman-hpc", "run", "--rm"]
    assert {"--gpu", "--env-host", "--net=host", "/data:/data", "/w d:/w d"} <= set(podman)
    assert podman[-5:] == ["--opt", "img", *command]
    assert "--nv" not in wrap(Container("apptainer", "img"), command, False)
    assert "--gpu" not in wrap(Container("podman-hpc", "img"), command, False)


@pytest.mark.parametrize(
    ("container", "why"),
    [
        (Container("aptainer", "img"), "did you mean 'apptainer'"),
        (Container("apptainer", ""), "no image"),
        (Container("apptainer", "--writable"), "no image"),
        (Container("apptainer", "img", ("",)), "is no path"),
        (Container("apptainer", "img", ("--x",)), "is no path"),
        (Container("apptainer", "img", ("/a,/b",)), "is no path"),
        (Container("apptainer", "img", ("/a:",)), "is no path"),
    ],
)
def test_containers_that_cannot_be(container: Container, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        wrap(container, ["true"], False)
