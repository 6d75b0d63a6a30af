"""Who a process is, what is kept of its environment, and which of many failures was the cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import RankEnv, read_rank_env, recorded_environment
from ridgeline.launch.failures import RankFailure, failure_file, first_failure, write_failure

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
}


def test_without_rank_variables_a_process_is_alone() -> None:
    for env in ({}, {"MASTER_ADDR": "node7", "LOCAL_RANK": "3"}):
        assert read_rank_env(env) == RankEnv(0, 1, 0, 1, "127.0.0.1", 0, "single process")


def test_torchruns_variables() -> None:
    assert read_rank_env(TORCHRUN) == RankEnv(5, 8, 1, 4, "node7", 29500, "torchrun")


def test_one_node_is_assumed_when_nothing_is_said_of_nodes() -> None:
    env = read_rank_env({"RANK": "1", "WORLD_SIZE": "2"})
    assert (env.local_rank, env.local_world_size, env.master_addr) == (1, 2, "127.0.0.1")


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert read_rank_env().rank == 5
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert recorded_environment()["variables"]["NCCL_DEBUG"] == "INFO"  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": None}, ["not RANK", "torchrun"]),
        ({"WORLD_SIZE": None}, ["not WORLD_SIZE", "torchrun"]),
        ({"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({"RANK": "-1"}, ["RANK=-1", "WORLD_SIZE=8"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0"]),
        ({"RANK": "one"}, ["RANK='one'", "whole number"]),
        ({"LOCAL_RANK": ""}, ["LOCAL_RANK=''", "whole number"]),
        ({"MASTER_PORT": "29500.0"}, ["MASTER_PORT='29500.0'", "whole number"]),
    ],
)
def test_wrong_rank_variables_are_named(changes: dict[str, str | None], said: list[str]) -> None:
    env = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(UsageError) as error:
        read_rank_env(env)
    for part in said:
        assert part in str(error.value)


def test_threads_that_the_user_has_said_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ridgeline.launch import local
    from ridgeline.launch.start import Local

    seen: list[int] = []
    monkeypatch.setattr(local, "run_ranks", lambda c, n, d, threads, v, t: seen.append(threads))
    for said, asked, wanted in (("3", None, 3), ("3", 5, 5), ("", None, 4), ("many", None, 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        Local(2, 8).run(["x"], 2, tmp_path, asked, {})
        assert seen.pop() == wanted
    # What a launcher has given this process for itself is not each of its ranks'.
    monkeypatch.setenv("RIDGELINE_BINDING", json.dumps({"map": [{"num_threads": 8}]}))
    for said, wanted in (("8", 4), ("3", 3)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        Local(2, 8).run(["x"], 2, tmp_path, None, {})
        assert seen.pop() == wanted


def test_only_allowed_variables_are_recorded_and_no_secret() -> None:
    kept = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "77", "RANK": "0"}
    dropped = {
        "HOME": "/home/me",
        "AWS_SECRET_ACCESS_KEY": "a",
        "HF_TOKEN": "b",
        "NCCL_AUTH_TOKEN": "c",
        "CUDA_LICENSE_KEY": "d",
        "TORCH_HUB_PASSWORD": "e",
        "SLURM_JOB_CREDENTIAL": "f",
        "TORCH_api_token": "g",
        "MY_RANK": "1",
    }
    record = recorded_environment({**dropped, **kept})
    assert record["variables"] == kept
    assert {"torch", "numpy"} <= set(record["packages"])  # type: ignore[call-overload]
    text = json.dumps(record)
    assert not any(f'"{value}"' in text for value in dropped.values())


def failures_of(directory: Path, *errors: tuple[float, BaseException]) -> list[RankFailure]:
    """What the launcher reads of ranks that each wrote down an error at a time."""
    for rank, (time, error) in enumerate(errors):
        write_failure(directory, rank, time, error, "Traceback of " + type(error).__name__)
    paths = [failure_file(directory, rank) for rank in range(len(errors))]
    return [RankFailure(**json.loads(path.read_text())) for path in paths]


ECHOES = [
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4113"),
    RuntimeError("[../third_party/gloo/pair.cc:534] Read error: Connection reset by peer"),
    BrokenPipeError(32, "Broken pipe"),
    RuntimeError("NCCL error: remote process exited or there was a network error"),
]


def test_a_failure_comes_back_as_it_was_written(tmp_path: Path) -> None:
    error = KeyError("weights – ä")
    assert failures_of(tmp_path, (12.5, error)) == [
        RankFailure(0, 12.5, "KeyError: 'weights – ä'", traceback="Traceback of KeyError")
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["failure-0.json"]


def test_our_own_errors_carry_their_kind_and_no_traceback(tmp_path: Path) -> None:
    usage, ran = failures_of(tmp_path, (1.0, UsageError("wrong gloo")), (2.0, RunError("NCCL")))
    assert usage == RankFailure(0, 1.0, "wrong gloo", usage=True)
    assert ran == RankFailure(1, 2.0, "NCCL")


@pytest.mark.parametrize("echo", ECHOES, ids=lambda error: str(error)[:24])
def test_the_cause_is_chosen_over_echoes_that_came_first(
    tmp_path: Path, echo: BaseException
) -> None:
    cause = ValueError("bad sample 7")
    failures = failures_of(tmp_path, (1.0, echo), (3.0, cause), (2.0, echo))
    assert first_failure(failures).rank == 1


def test_of_two_causes_the_earlier_is_the_cause(tmp_path: Path) -> None:
    failures = failures_of(tmp_path, (5.0, ValueError("a")), (4.0, KeyError("b")), (1.0, ECHOES[0]))
    assert first_failure(failures).message == "KeyError: 'b'"


def test_when_all_are_echoes_the_first_of_them_is_shown(tmp_path: Path) -> None:
    failures = failures_of(tmp_path, (5.0, ECHOES[0]), (4.0, ECHOES[1]))
    assert first_failure(failures).rank == 1


def test_a_killed_rank_is_a_cause(tmp_path: Path) -> None:
    killed = RankFailure(3, 9.0, "was killed by SIGKILL")
    assert first_failure([*failures_of(tmp_path, (1.0, ECHOES[0])), killed]) == killed


def test_a_type_error_is_no_echo(tmp_path: Path) -> None:
    write_failure(tmp_path, 1, 5.0, TypeError("loss() takes 1 positional argument"), "trace")
    assert json.loads(failure_file(tmp_path, 1).read_text())["echo"] is False
    write_failure(tmp_path, 0, 4.0, RuntimeError("Connection closed by peer [127.0.0.1]"), "trace")
    assert json.loads(failure_file(tmp_path, 0).read_text())["echo"] is True


def test_among_echoes_an_account_says_more_than_a_signal() -> None:
    signal = RankFailure(0, 1.0, "was killed by SIGTERM", echo=True)
    account = RankFailure(1, 2.0, "RuntimeError: gloo: timed out", echo=True, traceback="trace")
    assert first_failure([signal, account]) is account
