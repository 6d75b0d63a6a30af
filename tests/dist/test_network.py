"""`ridgeline machine network` on real ranks: what is measured on which group, who is named, how it ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.errors import RunError
from ridgeline.launch.env import RankEnv
from ridgeline.machine import collectives, stragglers
from ridgeline.machine.collectives import Amounts, measure_network
from ridgeline.machine.links import NetworkFacts, bus_factor, slow_ranks
from ridgeline.machine.meeting import Meeting

ROOT = Path(__file__).resolve().parents[2]
SMALL = Amounts((1024, 16384, 1 << 20), 3, 1.0, 0.05, 5e-4, 4096)


def measure(
    nodes: list[int], amounts: Amounts = SMALL, kinds: tuple[str, ...] = ()
) -> NetworkFacts:
    """As ranks of these nodes, all of them on this host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local = nodes[:rank].count(nodes[rank])
    env = RankEnv(rank, size, local, nodes.count(nodes[rank]), "", 0, "test", node_rank=nodes[rank])
    assert dist.group.WORLD is not None
    options: dict[str, Any] = {"kinds": kinds} if kinds else {}
    return measure_network(env, dist.group.WORLD, torch.device("cpu"), amounts, **options)


def test_two_ranks_have_every_collective_and_one_pair(ranks: Any) -> None:
    first, second = ranks(2, measure, [0, 0])
    assert first.timings == second.timings
    kinds = {(t.collective, t.level) for t in first.timings}
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    assert kinds == {*((name, "all") for name in names), ("pair", "inside")}
    for t in first.timings:
        assert t.seconds > 0
        assert t.num_bytes in SMALL.sizes
        assert t.bus_bytes_per_s == pytest.approx(
            bus_factor(t.collective, 2) * t.num_bytes / t.seconds
        )
        assert t.repeats == 3
    assert {(p.source, p.target) for p in first.pairs} == {(0, 1), (1, 0)}
    assert [r.local_rank for r in first.ranks] == [0, 1]
    assert all(r.work_s >= r.best_work_s > 0 for r in first.ranks)


def test_two_nodes_of_two_have_every_level_and_levels_against_flat(ranks: Any) -> None:
    facts = ranks(4, measure, [0, 0, 1, 1])[3]
    assert facts.ranks_per_node == (2, 2)
    kinds = {(t.collective, t.level): t for t in facts.timings}
    for level in ("all", "node", "across", "across_at_once"):
        assert ("all_reduce", level) in kinds
    assert kinds["all_reduce", "node"].size == 2
    assert kinds["all_reduce", "across_at_once"].num_groups == 2
    assert kinds["all_reduce", "all"].per_node == 2
    assert ("all_reduce_by_levels", "all") in kinds
    assert kinds["pair", "inside"].per_node == 2
    assert kinds["pair", "between"].per_node == 1
    assert kinds["pairs_at_once", "between"].num_groups == 2
    assert len(facts.pairs) == 12
    assert {(p.source, p.target) for p in facts.pairs if not p.crosses} == {
        (0, 1), (1, 0), (2, 3), (3, 2),
    }  # fmt: skip


def reduce_by_levels() -> list[float]:
    """What the timed function computes, on numbers that tell ranks and places apart."""
    rank = dist.get_rank()
    assert dist.group.WORLD is not None
    meeting = Meeting(rank, 4, dist.group.WORLD, torch.device("cpu"), "gloo")
    inner, outer = meeting.group(((0, 1), (2, 3))), meeting.group(((0, 2), (1, 3)))
    assert inner is not None
    assert outer is not None
    send = torch.arange(8.0) * 10**rank
    collectives._by_levels((send, torch.zeros(8)), 8, inner, outer, 2)
    return send.tolist()


def test_reducing_level_by_level_is_an_all_reduce(ranks: Any) -> None:
    for result in ranks(4, reduce_by_levels):
        assert result == [1111.0 * number for number in range(8)]


def test_uneven_nodes_and_sizes_that_do_not_divide(ranks: Any) -> None:
    amounts = Amounts((4, 1000), 3, 1.0, 0.02, 2e-4, 400)
    facts = ranks(3, measure, [0, 0, 1], amounts)[0]
    assert facts.ranks_per_node == (2, 1)
    found = {(t.collective, t.level): t for t in facts.timings if t.num_bytes > 100}
    assert found["all_gather", "all"].num_bytes == 996
    assert found["all_gather", "node"].num_bytes == 1000
    assert ("all_reduce_by_levels", "all") not in found
    smallest = [t.num_bytes for t in facts.timings if t.level == "all"]
    assert min(smallest) == 12  # one number for each rank


def test_only_what_was_asked_for(ranks: Any) -> None:
    facts = ranks(2, measure, [0, 1], SMALL, ("broadcast",))[0]
    assert {t.collective for t in facts.timings} == {"broadcast"}
    assert {t.per_node for t in facts.timings} == {1}


def test_what_would_take_too_long_or_too_much_memory_is_left_out_and_said(ranks: Any) -> None:
    amounts = Amounts((1024, 1 << 22, 1 << 45), 3, 1e-9, 0.02, 2e-4, 400)
    facts = ranks(2, measure, [0, 0], amounts, ("all_reduce",))[1]
    assert [t.num_bytes for t in facts.timings] == [1024]
    assert "4 MiB and more was left out: 1 KiB took" in facts.notes[1]
    assert "memory for a buffer" in facts.notes[0]


def with_a_slow_rank(slow: int) -> NetworkFacts:
    quick = stragglers.do_work
    if dist.get_rank() == slow:

        def work(matrix: torch.Tensor, count: int) -> None:
            began = time.perf_counter()
            quick(matrix, count)
            time.sleep(4 * (time.perf_counter() - began) + 50e-3)

        stragglers.do_work = work
    try:
        return measure([0, 0, 0], SMALL, ("broadcast",))
    finally:
        stragglers.do_work = quick


def test_a_slow_rank_is_named_and_the_others_wait_for_it(ranks: Any) -> None:
    facts = ranks(3, with_a_slow_rank, 1)[0]
    assert [rank.rank for rank, _ in slow_ranks(facts)] == [1]
    waits = {r.rank: r.wait_s for r in facts.ranks}
    assert min(waits[0], waits[2]) > waits[1]


def fails_on_one() -> str:
    if dist.get_rank() == 1:
        collectives._make_buffers = broken
    try:
        measure([0, 0])
    except RunError as error:
        return str(error)
    finally:
        collectives._make_buffers = WHOLE
    return ""


WHOLE = collectives._make_buffers


def broken(*_: Any) -> Any:
    raise MemoryError("no room for it\nand more")


def test_what_one_rank_cannot_do_ends_all_with_the_same_sentence(ranks: Any) -> None:
    said = ranks(2, fails_on_one)
    assert set(said) == {"rank 1 cannot get memory for its buffers: MemoryError: no room for it"}


def free_port() -> int:
    with socket.socket() as board:
        board.bind(("127.0.0.1", 0))
        return int(board.getsockname()[1])


def start(rank: int, port: int, *words: object) -> subprocess.Popen[str]:
    """One rank of two, each of them a node of its own, as a launcher would start it."""
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMPI", "PMI"))},
        **{"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    }
    command = [sys.executable, "-m", "ridgeline.cli", "machine", "network", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=env, text=True, cwd=ROOT, **pipes)  # type: ignore[call-overload,no-any-return]


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    found = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=900)
            found.append((process.returncode, out, error))
    finally:
        for process in processes:
            process.kill()
    return found


def test_the_command_joins_the_ranks_it_is_started_on(tmp_path: Path) -> None:
    words = [
        "--sizes",
        "1KB,64KB",
        "--quick",
        "--device",
        "cpu",
        "--json",
        "--out",
        tmp_path / "m.json",
    ]
    words += ["--picture", tmp_path / "m.svg"]
    port = free_port()
    (code, out, error), other = ended([start(rank, port, *words) for rank in range(2)])
    assert (code, other[0]) == (0, 0), error + other[2]
    assert other[1] == ""  # rank 0 speaks for all
    facts = json.loads(out)
    assert facts["ranks_per_node"] == [1, 1]
    assert facts["conclusions"]
    kept = json.loads((tmp_path / "m.json").read_text())["network"]
    assert [row["timings"] for row in kept] == [facts["timings"]]
    assert (tmp_path / "m.svg").read_text().startswith("<svg")


def test_a_rank_that_cannot_take_part_ends_the_other_at_once(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine on which --device cuda fails")
    port = free_port()
    words = ["--sizes", "1KB", "--quick"]
    told = ended([start(0, port, *words), start(1, port, *words, "--device", "cuda")])
    assert [code for code, _, _ in told] == [1, 1]
    assert "rank 1 cannot take part" in told[0][2]
    assert "sees no CUDA device" in told[0][2]


@pytest.mark.parametrize("ending", ["well", "badly"])
def test_the_command_starts_ranks_itself(tmp_path: Path, ending: str) -> None:
    words = [
        "-n",
        "2",
        "--sizes",
        "1KB,64KB",
        "--quick",
        "--device",
        "cpu",
        "--collectives",
        "all_reduce",
    ]
    picture = tmp_path / ("m.svg" if ending == "well" else "none/m.svg")
    command = [sys.executable, "-m", "ridgeline.cli", "machine", "network", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--picture", str(picture)],
        env={k: v for k, v in env.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        capture_output=True, text=True, timeout=900, cwd=ROOT,
    )  # fmt: skip
    if ending == "badly":
        assert done.returncode == 1
        assert "rank 0 cannot take part" in done.stderr
        assert "Traceback" not in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert "2 ranks on one node, gloo" in done.stdout
    assert done.stdout.count("all-reduce of all ranks") == 1
    assert picture.exists()
