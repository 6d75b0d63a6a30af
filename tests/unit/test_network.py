"""`ridgeline machine network`, the parts that need no ranks: figures, groups, the file, what people see."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.cli_machine import read_sizes
from ridgeline.errors import UsageError
from ridgeline.machine.groups import is_even, number_nodes, plan_groups, rounds_of_pairs
from ridgeline.machine.link_show import conclusions, draw_network, show_network
from ridgeline.machine.links import (
    ALL,
    HIERARCHICAL,
    NetworkFacts,
    PairFacts,
    RankFacts,
    Timing,
    bucket_mb,
    bus_factor,
    contention,
    enough_bytes,
    most_lopsided,
    network_from_dict,
    slow_links,
    slow_ranks,
    slowest_pair,
    wins_from,
)
from ridgeline.machine.record import add_network, add_storage, read_machine, read_network
from ridgeline.machine.room import free_memory

SIZES = [1 << power for power in range(10, 31, 4)]


def timings(
    collective: str, level: str, size: int, alpha: float, rate: float, groups: int = 1
) -> list[Timing]:
    """What a start of `alpha` and a bus of `rate` would give."""
    factor = bus_factor(collective, size)
    per_node = 1 if level.startswith("across") else 2
    return [
        Timing(collective, level, size, per_node, groups, b, alpha + factor * b / rate, 0.01, 9)
        for b in SIZES
    ]


FACTS = NetworkFacts(
    hosts=("node1", "node2"),
    backend="nccl",
    device_kind="cuda",
    device_name="Some GPU",
    ranks_per_node=(2, 2),
    time=1.0,
    timings=(
        *timings("all_reduce", ALL, 4, 1e-4, 10e9),
        *timings(HIERARCHICAL, ALL, 4, 4e-4, 20e9),
        *timings("all_reduce", "across", 2, 1e-4, 10e9),
        *timings("all_reduce", "across_at_once", 2, 1e-4, 5e9, 2),
        Timing("pair", "inside", 2, 2, 1, 1 << 20, 1e-4),
    ),
    pairs=tuple(
        PairFacts(a, b, a // 2 != b // 2, 1 << 20, 1e-3)
        for a in range(4)
        for b in range(4)
        if a != b
    ),
    ranks=tuple(RankFacts(r, r // 2, f"node{r // 2 + 1}", r % 2, 1e-3, 1e-3) for r in range(4)),
    notes=("one thing was left out",),
)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("all_reduce", 1.75),
        ("all_gather", 0.875),
        ("reduce_scatter", 0.875),
        ("all_to_all", 0.875),
        ("broadcast", 1.0),
        ("pair", 1.0),
        ("pairs_at_once", 1.0),
    ],
)
def test_bus_bandwidth_is_what_nccl_tests_reports(collective: str, factor: float) -> None:
    timing = Timing(collective, ALL, 8, 8, 1, 1 << 30, 0.01)
    assert timing.algorithm_bytes_per_s == pytest.approx((1 << 30) / 0.01)
    assert timing.bus_bytes_per_s == pytest.approx(factor * (1 << 30) / 0.01)


def test_the_bucket_is_the_smallest_that_reaches_nine_tenths() -> None:
    rows = FACTS.of("all_reduce", ALL)
    enough = enough_bytes(rows)
    assert enough is not None
    top = max(t.bus_bytes_per_s for t in rows)
    # Of a start and a rate: 9 starts' worth of bytes, between the sizes that were measured.
    exact = 9 * 1e-4 * 10e9 / 1.5
    assert exact / 2 < enough < 2 * exact
    assert top > 9.9e9
    wanted = bucket_mb(FACTS)
    assert wanted is not None
    assert enough / 2**20 <= wanted < enough / 2**20 + 0.5  # 5.7 MiB, say: 6


def test_no_bucket_is_named_while_larger_ones_still_gain() -> None:
    rising = [Timing("all_reduce", ALL, 4, 2, 1, 1 << p, 1e-3) for p in (10, 12, 14)]
    assert enough_bytes(rising) is None
    assert enough_bytes(rising[:1]) is None
    assert "measure larger ones" in " ".join(conclusions(replace(FACTS, timings=tuple(rising))))
    even = [Timing("all_reduce", ALL, 4, 2, 1, b, b / 1e9) for b in (1000, 4000)]
    assert enough_bytes(even) == 1000


def test_one_size_that_is_out_of_line_does_not_move_the_bucket() -> None:
    rates = {1000: 1e8, 4000: 4e8, 16000: 9e9, 64000: 9e8, 256000: 1e9, 1024000: 1e9}
    rows = [Timing("broadcast", ALL, 4, 2, 1, b, b / rate) for b, rate in rates.items()]
    enough = enough_bytes(rows)
    assert enough is not None
    assert 4000 < enough < 64000
    assert enough_bytes(rows[:3]) is None  # the last one still gains


def test_levels_win_from_the_size_where_they_stay_ahead() -> None:
    # 3e-4 s more at the start, half the time a byte: from 4 MB on.
    assert wins_from(FACTS) == 1 << 22
    flat_only = replace(
        FACTS, timings=tuple(t for t in FACTS.timings if t.collective != HIERARCHICAL)
    )
    assert wins_from(flat_only) is None
    slow = replace(FACTS, timings=(*flat_only.timings, *timings(HIERARCHICAL, ALL, 4, 1, 1e9)))
    assert wins_from(slow) is None
    assert any("not faster than flat" in line for line in conclusions(slow))


def test_what_groups_at_once_take_from_each_other() -> None:
    assert contention(FACTS) == pytest.approx(2.0, rel=0.01)
    assert contention(replace(FACTS, timings=())) is None


def test_a_slow_rank_is_named_and_a_restless_one_is_not() -> None:
    ranks = list(FACTS.ranks)
    ranks[2] = replace(ranks[2], work_s=2e-3, best_work_s=1.9e-3)
    ranks[1] = replace(ranks[1], work_s=3e-3)  # sometimes slow, sometimes as fast as all
    facts = replace(FACTS, ranks=tuple(ranks))
    assert [(rank.rank, round(times, 1)) for rank, times in slow_ranks(facts)] == [(2, 1.9)]
    assert any(line.startswith("rank 2 on node2 is slow") for line in conclusions(facts))
    assert slow_ranks(FACTS) == []
    assert "no rank is slower than the others" in conclusions(FACTS)


def test_the_slowest_pair_is_compared_with_its_own_level() -> None:
    def taking(pair: PairFacts) -> PairFacts:
        slow = 3e-3 if pair.crosses else 1e-3  # between nodes all are slower, and that is usual
        return replace(pair, seconds=8e-3 if (pair.source, pair.target) == (1, 3) else slow)

    facts = replace(FACTS, pairs=tuple(map(taking, FACTS.pairs)))
    worst, lopsided = slowest_pair(facts), most_lopsided(facts)
    assert worst is not None
    assert (worst[0].source, worst[0].target, round(worst[1], 2)) == (1, 3, 2.67)
    assert lopsided is not None
    assert (lopsided[0].source, lopsided[0].target) == (1, 3)
    said = " ".join(conclusions(facts))
    assert "slowest pair: rank 1 to rank 3" in said
    assert "from rank 1 to rank 3 a message takes 2.7 times as long as back" in said
    assert slow_links(facts) == []


def test_a_rank_all_of_whose_links_are_slow_is_named() -> None:
    facts = replace(
        FACTS,
        pairs=tuple(
            replace(p, seconds=4e-3 if 3 in (p.source, p.target) else 1e-3) for p in FACTS.pairs
        ),
    )
    assert [rank for rank, _ in slow_links(facts)] == [3]
    assert any(line.startswith("rank 3 on node2 has slow links") for line in conclusions(facts))


def test_facts_survive_json_and_newer_keys() -> None:
    values = json.loads(json.dumps(FACTS.to_dict()))
    values["timings"][0]["newer"] = 1
    assert network_from_dict({**values, "newer": 1}) == FACTS


def test_machine_json_keeps_one_row_of_the_same_ranks(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    add_storage(path, [])
    add_network(path, FACTS)
    add_network(path, replace(FACTS, time=2.0))
    add_network(path, replace(FACTS, ranks_per_node=(1, 1)))
    assert [row.time for row in read_network(path)] == [2.0, 1.0]
    assert read_network(path)[0] == replace(FACTS, time=2.0)
    assert "storage" in read_machine(path)
    path.write_text('{"network": {}}')
    with pytest.raises(UsageError, match="another kind"):
        read_machine(path)


def test_what_people_see_has_every_level_and_every_note() -> None:
    console = Console(file=io.StringIO(), width=200)
    show_network(FACTS, console)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("4 ranks on 2 nodes (2, 2 ranks)", "all-reduce by levels", "groups of 2, 2 groups a",
                 "inside a node", "1 GiB", "ddp.bucket_mb=", "one thing was left out"):  # fmt: skip
        assert word in said, word


def test_the_picture_is_a_drawing_with_a_line_for_each() -> None:
    text = draw_network(FACTS)
    ElementTree.fromstring(text)
    for word in ("all-reduce 9.99 GB/s", "all-reduce by levels", "one pair", "1 MB"):
        assert word in text, word
    ElementTree.fromstring(draw_network(replace(FACTS, timings=())))


def test_groups_of_even_nodes() -> None:
    found = {kind.level: kind for kind in plan_groups([0, 0, 1, 1])}
    assert found["all"].lists == ((0, 1, 2, 3),)
    assert found["node"].lists == ((0, 1), (2, 3))
    assert found["across"].lists == ((0, 2),)
    assert found["across_at_once"].lists == ((0, 2), (1, 3))
    assert found["across_at_once"].num_groups == 2
    assert is_even([0, 0, 1, 1])


def test_groups_of_uneven_nodes_and_of_one() -> None:
    found = {kind.level: kind for kind in plan_groups([0, 0, 0, 1])}
    assert set(found) == {"all", "node", "across"}
    assert found["node"].lists == ((0, 1, 2),)
    assert found["across"].lists == ((0, 3),)
    assert not is_even([0, 0, 0, 1])
    assert [kind.level for kind in plan_groups([0, 0])] == ["all"]
    assert [kind.level for kind in plan_groups([0, 1, 2])] == ["all"]
    twos = {kind.level: kind for kind in plan_groups([0] * 5)}["twos_at_once"]
    assert twos.lists == ((0, 1), (2, 3))
    assert twos.of(4) is None


def test_nodes_are_what_the_launcher_says_but_never_two_hosts() -> None:
    assert number_nodes([(0, "a"), (0, "a"), (1, "a")]) == [0, 0, 1]
    assert number_nodes([(0, "a"), (0, "b"), (0, "a")]) == [0, 1, 0]


@pytest.mark.parametrize("num", [2, 3, 7, 8])
def test_every_pair_once_and_one_partner_a_round(num: int) -> None:
    rounds = rounds_of_pairs(num, 16)
    assert sorted(p for pairs in rounds for p in pairs) == list(combinations(range(num), 2))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)


def test_many_ranks_have_few_rounds() -> None:
    rounds = rounds_of_pairs(100, 16)
    assert len(rounds) < 20
    assert {rank for pairs in rounds for pair in pairs for rank in pair} == set(range(100))
    for pairs in rounds:
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
    assert rounds_of_pairs(1, 16) == []


@pytest.mark.parametrize(
    ("line", "top", "names"),
    [
        ("0::/job/step", "", ("memory.max", "memory.current")),
        ("4:cpu,memory:/job/step", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    ],
)
def test_a_job_has_the_memory_it_was_given(
    tmp_path: Path, line: str, top: str, names: tuple[str, str]
) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text(f"9:devices:/x\n{line}\n")
    job = tmp_path / "fs/cgroup" / top / "job"
    (job / "step").mkdir(parents=True)
    (job / "step" / names[0]).write_text("max\n")
    assert free_memory(tmp_path, tmp_path) > 1_000_000
    (job / names[0]).write_text("700000\n")
    (job / names[1]).write_text("100000\n")
    assert free_memory(tmp_path, tmp_path) == 600_000
    (job / names[1]).write_text("900000\n")
    assert free_memory(tmp_path, tmp_path) == 0


def test_sizes_are_read_as_people_write_them() -> None:
    assert read_sizes("1KB..1GB") == tuple(1 << power for power in range(10, 31, 2))
    assert read_sizes("3KB..10KB*2") == (3072, 6144, 10240)
    assert read_sizes("16MB,1KB,16MB") == (1024, 1 << 24)
    assert read_sizes("8..8") == (8,)


@pytest.mark.parametrize(
    "text", ["1MB..1KB", "1KB..", "x", "1KB..1MB*1", "1KB..1MB*x", "", "1KB,,2KB"]
)
def test_sizes_that_are_none_are_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="in --sizes"):
        read_sizes(text)


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        ([], {}, "one process has nobody to talk to"),
        (["-n", "2", "--collectives", "all_reducer"], {}, "did you mean 'all_reduce'"),
        (["-n", "2", "--collectives", ","], {}, "names none of"),
        (["-n", "2", "--device", "tpu"], {}, "is not one of cuda, cpu"),
        (["-n", "2", "--out", "/no/such/folder/m.json"], {}, "which does not exist"),
        (["-n", "2"], {"RANK": "0", "WORLD_SIZE": "4"}, "leave -n out"),
    ],
)
def test_refusals(args: list[str], env: dict[str, str], words: str) -> None:
    done = CliRunner().invoke(
        app, ["machine", "network", *args], env={"MASTER_ADDR": "127.0.0.1", **env}
    )
    assert done.exit_code != 0
    assert words in str(done.exception)
