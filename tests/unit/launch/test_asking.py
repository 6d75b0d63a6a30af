"""What is asked of `ridgeline launch` and `train --on` before it runs: hosts, records, logs, slips."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline import cli
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.hosts import Host, place_ranks, read_hosts
from ridgeline.launch.job import JobState
from ridgeline.launch.logs import clear_failure, note_failure, show_logs
from ridgeline.launch.nodes import Place, build_spread
from ridgeline.launch.records import find_record, list_records, new_record, write_record
from ridgeline.launch.request import Wanted, make_job, submit_job
from ridgeline.launch.schedulers.table import SCHEDULERS


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs `ridgeline ARGS` here, outside of any job; its exit code, output and complaint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "FLUX_JOB_ID", "FLUX_URI"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *args])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_hosts_as_they_are_written(tmp_path: Path) -> None:
    assert read_hosts("a,b:4", "--hosts") == [Host("a"), Host("b", 4)]
    assert read_hosts("n[1-2]:2,m", "--hosts") == [Host("n1", 2), Host("n2", 2), Host("m")]
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n\n# none\nb  # the other\n")
    assert read_hosts(str(file), "--hosts") == [Host("a", 2), Host("b")]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,a", "twice"),
        ("a:0", "how many ranks"),
        ("a:x", "how many ranks"),
        ("", "no host"),
        ("-oProxyCommand=x", "no name of a host"),
        ("/no/such/file", "cannot read"),
    ],
)
def test_hosts_that_are_none(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_hosts(text, "--hosts")


def test_ranks_are_placed_where_there_is_room() -> None:
    hosts = [Host("a", 2), Host("b", 4), Host("c")]
    assert place_ranks(hosts, None, None) == [Host("a", 2), Host("b", 4), Host("c", 1)]
    assert place_ranks(hosts, 2, 2) == [Host("a", 2), Host("b", 2)]
    with pytest.raises(UsageError, match="more ranks than the 2 slots of a"):
        place_ranks(hosts, None, 3)
    with pytest.raises(UsageError, match="more nodes than the 3 hosts"):
        place_ranks(hosts, 4, 1)


def test_a_job_is_found_by_its_id_or_its_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "job"
    write_record(new_record("17", "slurm", "x", folder, 2, 4, None, ()))
    assert find_record("17").folder == str(folder)
    assert find_record("slurm:17").per_node == 4
    assert find_record(str(folder)).id == "17"
    with pytest.raises(UsageError, match="no job '18'"):
        find_record("18")
    write_record(new_record("17", "lsf", "y", tmp_path / "other", 1, 1, None, ("16",)))
    with pytest.raises(UsageError, match="lsf:17 or slurm:17"):
        find_record("17")
    assert find_record("lsf:17").after == ("16",)
    # A scheduler that was set up anew counts from one again.
    write_record(new_record("17", "slurm", "z", tmp_path / "later", 1, 1, None, ()))
    assert find_record("slurm:17").name == "z"
    assert list_records()[0].name == "z"


def test_a_part_of_an_array_is_found_as_its_scheduler_writes_it(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, number, said, wanted in (
        ("slurm", "17", "17_3", "17_3"),
        ("lsf", "18", "lsf:18[3]", "18[3]"),
        ("pbs", "19[].server", "19[3]", "19[3].server"),
        ("pbs", "19[].server", "19[3].server", "19[3].server"),
    ):
        write_record(new_record(number, name, "x", tmp_path / name, 1, 1, "0-9", ()))
        found = find_record(said)
        assert (found.id, found.folder) == (wanted, str(tmp_path / name / "3"))
    assert find_record("17").id == "17"
    write_record(new_record("20", "slurm", "x", tmp_path / "plain", 1, 1, None, ()))
    with pytest.raises(UsageError, match="job 20 is no array"):
        find_record("20_1")


def test_logs_of_an_array_begin_with_the_failures_of_its_parts(tmp_path: Path) -> None:
    for index in (2, 10):
        note_failure(tmp_path / str(index), RunError(f"boom {index}"))
    lines = show_logs(tmp_path, None, 5).splitlines()
    assert lines == ["failed, array index 2: boom 2", "failed, array index 10: boom 10"]


def test_a_folder_whose_job_still_runs_takes_no_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    submitted = []
    state = "running"
    queue = replace(
        SCHEDULERS["slurm"],
        status=lambda _: JobState(state, ""),
        submit=lambda script: submitted.append(script) or str(20 + len(submitted)),
        programs=("true",),
    )
    monkeypatch.setitem(SCHEDULERS, "slurm", queue)
    job = make_job(Wanted(), ["true"], tmp_path / "job", tmp_path, "x")
    submit_job(job, "slurm")
    with pytest.raises(UsageError, match=r"is that of job 21, which is running; .*--after 21"):
        submit_job(job, "slurm")
    submit_job(replace(job, after=("21",)), "slurm")
    state = "done"
    submit_job(job, "slurm")
    assert len(submitted) == 3


def test_slots_of_hosts_are_mpi_s_ranks() -> None:
    spread = build_spread("mpi", Place(hosts="a:4,b:4"))
    assert spread.num_ranks == 8
    with pytest.raises(UsageError, match=r"a:4, b:2 has other numbers .* write -n 2"):
        build_spread("mpi", Place(hosts="a:4,b:2"))


def test_logs_begin_with_the_failure(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "job.out").write_text("".join(f"line {number}\n" for number in range(100)))
    (logs / "rank-0.out").write_text("zero\n")
    (logs / "rank-10.out").write_text("ten\n")
    (logs / "traceback-10.txt").write_text("Traceback\nValueError: boom\n")
    note_failure(tmp_path, RunError(f"rank 10: boom\n  traceback: {logs / 'traceback-10.txt'}"))
    lines = show_logs(tmp_path, None, 5).splitlines()
    assert lines[0] == "failed: rank 10: boom"
    assert "ValueError: boom" in lines[1:5]
    assert "line 99" in lines
    assert "line 90" not in lines
    assert "ten" in show_logs(tmp_path, 10, 5)
    with pytest.raises(UsageError, match=r"rank 3 has written nothing .*ranks with logs: 0, 10"):
        show_logs(tmp_path, 3, 5)
    clear_failure(tmp_path)
    assert not show_logs(tmp_path, None, 5).startswith("failed")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("launch", "--scheduler", "slrum", "--", "true"), "did you mean 'slurm'"),
        (("launch", "--scheduler", "ssh", "--", "true"), "needs --hosts"),
        (("launch", "--scheduler", "local", "-N", "2", "--", "true"), "this machine alone"),
        (("launch", "--scheduler", "local", "--submit", "--", "true"), "has none"),
        (("launch", "--scheduler", "slurm", "--here", "--", "true"), "inside a job of slurm"),
        (("launch", "--scheduler", "local", "--dry-run", "--", "true"), "starts the ranks itself"),
        (("launch", "--scheduler", "slurm", "--time", "soon", "--", "true"), "is not a time"),
        (("launch", "--scheduler", "slurm", "--array", "a-b", "--dry-run", "--", "x"), "indices"),
        (("launch", "--scheduler", "lsf", "--site", "nowhere", "--", "true"), "unknown site"),
        (("launch", "status", "4711"), "no job '4711'"),
        (("launch", "cancel", "4711"), "no job '4711'"),
        (("train", "digits", "--partition", "gpu"), "--partition is for jobs"),
        (("train", "digits", "--bind", "core"), "did you mean 'cores'"),
        (("launch", "--scheduler", "local", "--array", "0-3", "--", "true"), "has no queue"),
        (("launch", "--scheduler", "local", "--hosts", "a", "--", "true"), "has no queue"),
        (("launch", "staus", "1"), "did you mean 'status'"),
        (("launch", "-n", "2", "python", "x.py"), "stands behind --"),
        (
            ("train", "digits", "--on", "slurm", "--array", "0-3", "--fresh", "--run", "x"),
            "every requeue",
        ),
        (("train", "digits", "-N", "2"), "--nodes is for jobs"),
        (("train", "digits", "--dry-run"), "--dry-run is for jobs"),
        (("train", "digits", "--on", "slurm", "train.batch=7", "-n", "2"), "train.batch"),
    ],
)
def test_slips_are_one_sentence(command, tmp_path: Path, args: tuple[str, ...], why: str) -> None:
    code, _, complaint = command(*args)
    assert code == 2
    assert why in complaint
    assert complaint.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if path.name != "state"]


def test_a_script_is_shown_and_nothing_is_left(command, tmp_path: Path) -> None:
    code, script, _ = command(
        "train", "digits", "train.lr=0.1", "--on", "slurm", "-N", "2", "-n", "2", "--time", "1h",
        "--dry-run",
    )  # fmt: skip
    assert code == 0
    assert "#SBATCH --nodes=2" in script
    assert "--on slurm --here -N 2 -n 2" in script.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_an_array_trains_each_index_by_its_own_words(command, tmp_path: Path) -> None:
    code, script, _ = command(
        "train", "digits", "train.seed={index}", "--on", "slurm", "--array", "0-3", "--run", "a",
        "--dry-run",
    )  # fmt: skip
    assert code == 0
    assert "train.seed={index}" in script
    asked = cli._Asked("digits", ["train.seed={index}"], Path("a"), Path("runs"), False)
    one = asked.for_index("3")
    assert (one.overrides, one.into) == (["train.seed=3"], Path("a/3"))


def test_a_record_is_plain_json(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_record(new_record("1", "pbs", "a b", tmp_path / "job", 1, 1, "0-3", ("x",)))
    value = json.loads((tmp_path / "job/job.json").read_text())
    assert (value["id"], value["array"], value["after"]) == ("1", "0-3", ["x"])
