"""Where ranks stand: axes, groups and sub-meshes, for every kind of layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import ORDER, Mesh, axis_sizes, build_mesh, read_order

LAYOUTS = [
    "dp=8",
    "dp=2,tp=2,pp=2",
    "dp=4,zero=3,shard=2,tp=2",
    "cp=2,tp=2,dp=2,zero=1",
    "spatial=2x2,dp=2",
    "pp=4,dp=2,zero=2,microbatches=4",
]


def test_tensor_neighbours_are_closest_and_stages_farthest() -> None:
    sizes = axis_sizes(Layout.parse("dp=4,zero=1,shard=2,tp=2,pp=2,cp=2"))
    assert list(sizes) == ["pp", "copies", "shard", "cp", "rows", "columns", "tp"]
    assert list(sizes.values()) == [2, 2, 2, 2, 1, 1, 2]


def test_the_order_can_be_set() -> None:
    order = read_order("dp, pp, cp, spatial, tp")
    assert list(axis_sizes(Layout.parse("dp=2,pp=2"), order))[:3] == ["copies", "shard", "pp"]
    assert read_order(",".join(ORDER)) == ORDER


@pytest.mark.parametrize(
    ("text", "words"), [("dp,pp", "each of"), ("dp,pp,cp,spatial,tq", "did you mean 'tp'")]
)
def test_a_wrong_order_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_order(text, "axes")


def members(mesh: Mesh, *axes: str) -> list[int]:
    group = mesh.group(*axes)
    return [mesh.env.rank] if group is None else dist.get_process_group_ranks(group)


def describe(layout: str, order: str) -> dict[str, Any]:
    mesh = build_mesh(read_rank_env(), Layout.parse(layout), torch.device("cpu"), read_order(order))
    one = torch.ones(())
    group = mesh.gradient_group
    if group is not None:
        dist.all_reduce(one, group=group)
    result = {axis: members(mesh, axis) for axis in mesh.sizes}
    result |= {"gradient": members(mesh, "copies", "shard", "cp", "rows", "columns")}
    result |= {"world": members(mesh, *mesh.sizes), "sum": one.item(), "text": str(mesh)}
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_hold_the_right_ranks(ranks: Any, layout: str) -> None:
    order = "pp,dp,cp,spatial,tp"
    found = ranks(8, describe, layout, order)
    sizes = axis_sizes(Layout.parse(layout), read_order(order))
    for axis, size in sizes.items():
        stride = math.prod(list(sizes.values())[list(sizes).index(axis) + 1 :])
        for rank, result in enumerate(found):
            first = rank - (rank // stride % size) * stride
            assert result[axis] == [first + stride * i for i in range(size)], (axis, rank)
    for result in found:
        assert result["sum"] == len(result["gradient"])
        assert result["world"] == list(range(8))


def test_another_order_puts_other_ranks_together(ranks: Any) -> None:
    found = ranks(4, describe, "dp=2,tp=2", "tp,pp,cp,spatial,dp")
    assert found[0]["tp"] == [0, 2]
    assert found[0]["text"] == "tp=2 > copies=2"


def sub_meshes() -> tuple[list[list[int]], list[list[int]], list[int]]:
    layout = Layout.parse("cp=2,tp=2,dp=2,zero=3")
    mesh = build_mesh(read_rank_env(), layout, torch.device("cpu"))
    pair = mesh.device_mesh("cp", "tp")
    both = mesh.device_mesh("copies+cp+rows+columns", "shard")
    return pair.mesh.tolist(), both.mesh.tolist(), list(pair.get_coordinate() or [])


def test_device_meshes_are_this_ranks_block(ranks: Any) -> None:
    found = ranks(8, sub_meshes)
    assert found[0][:2] == ([[0, 1], [2, 3]], [[0, 4], [2, 6]])
    assert found[7][:2] == ([[4, 5], [6, 7]], [[1, 5], [3, 7]])
    assert found[5][2] == [0, 1]
