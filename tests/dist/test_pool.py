"""The helper itself: results, failures and hangs come back as they should."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import Mesh, build_mesh, close_mesh


def say_who(word: str) -> tuple[str, int, int, int]:
    env = read_rank_env()
    return word, env.rank, env.world_size, torch.get_num_threads()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_by_rank(ranks: Any, num_ranks: int) -> None:
    expected = [("hello", rank, num_ranks, 1) for rank in range(num_ranks)]
    assert ranks(num_ranks, say_who, "hello") == expected


def sum_ranks() -> float:
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value)
    return value.item()


def test_ranks_share_a_group_and_a_call_is_quick(ranks: Any) -> None:
    ranks(4, sum_ranks)
    start = time.perf_counter()
    for _ in range(10):
        assert ranks(4, sum_ranks) == [10.0] * 4
    assert time.perf_counter() - start < 15.0


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise UsageError("the cup is full")
    dist.barrier()


def test_an_exception_names_its_rank_and_shows_its_traceback(ranks: Any) -> None:
    with pytest.raises(ranks.Failure) as caught:
        ranks(4, raise_on, 2)
    assert caught.value.rank == 2
    assert isinstance(caught.value.error, UsageError)
    text = str(caught.value)
    assert text.startswith("rank 2 raised UsageError: the cup is full")
    assert "in raise_on" in text
    assert ranks(4, sum_ranks) == [10.0] * 4


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)
    dist.barrier()


def test_a_hang_ends_with_every_stack(ranks: Any) -> None:
    before = ranks.pids(2)
    start = time.perf_counter()
    with pytest.raises(ranks.Hang, match=r"ranks \[0, 1\] did not end within 1 s") as caught:
        ranks(2, hang_on, 1, timeout=1.0)
    assert time.perf_counter() - start < 40.0
    text = str(caught.value)
    assert "--- rank 0" in text
    assert "--- rank 1" in text
    assert text.count("in hang_on") == 2
    assert "in barrier" in text
    assert ranks(2, sum_ranks) == [3.0] * 2
    assert set(before).isdisjoint(ranks.pids(2))


def die() -> None:
    if dist.get_rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_death_is_reported(ranks: Any) -> None:
    with pytest.raises(ranks.Failure, match="rank 1 died without a word") as caught:
        ranks(2, die)
    assert "last words" in str(caught.value)
    assert ranks(2, sum_ranks) == [3.0] * 2


def open_and_close() -> bool:
    mesh = build_mesh(read_rank_env(), Layout.parse("dp=2"), torch.device("cpu"))
    close_mesh(mesh)
    return dist.is_initialized() and mesh.data_size == 2


def test_closing_a_mesh_leaves_a_group_it_did_not_make(ranks: Any) -> None:
    assert ranks(2, open_and_close) == [True, True]
    assert ranks(2, sum_ranks) == [3.0] * 2


def test_closing_a_mesh_ends_the_group_it_made() -> None:
    env = read_rank_env({})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = Mesh(env, Layout(), torch.device("cpu"), {}, owns_group=True)
    close_mesh(mesh)
    assert not dist.is_initialized()
    close_mesh(mesh)  # twice does no harm
