"""The sampler: every sample exactly once, whatever the ranks, in one order for all."""

import itertools

import numpy as np
import pytest

from ridgeline.data.order import epoch_order, num_batches, piece_bounds, plan_epoch
from ridgeline.errors import UsageError

CASES = list(
    itertools.product((1, 7, 64, 103), (1, 5, 16, 200), (1, 2, 3, 8), (1, 3, 4))
)  # samples, batch, world, accumulate


def plans_of(n, batch, world, accumulate=1, **kwargs):
    return [
        list(plan_epoch(n, batch, rank, world, 3, 2, accumulate, **kwargs)) for rank in range(world)
    ]


@pytest.mark.parametrize("drop_last", [False, True])
def test_union_over_ranks_and_parts_is_the_global_batch(drop_last):
    for n, batch, world, accumulate in CASES:
        order = epoch_order(n, 3, 2)
        ranks = plans_of(n, batch, world, accumulate, drop_last=drop_last)
        steps = num_batches(n, batch, drop_last)
        assert all(len(plans) == steps for plans in ranks)
        seen = []
        for step in range(steps):
            members = order[step * batch : (step + 1) * batch]
            pieces, sizes = [], []
            for micro, rank in itertools.product(range(accumulate), range(world)):
                plan = ranks[rank][step]
                assert (plan.step, plan.epoch, plan.num_global) == (step, 2, len(members))
                assert len(plan.parts) == len(plan.weights) == accumulate
                part, weight = plan.parts[micro], plan.weights[micro]
                sizes.append(weight)
                if weight:
                    assert len(part) == weight
                    pieces.append(part)
                else:
                    assert part.tolist() == [members[0]]
            assert np.array_equal(np.concatenate(pieces), members)
            assert max(sizes) - min(sizes) <= 1
            assert sum(sizes) == len(members)
            seen.append(members)
        if not drop_last:
            assert sorted(np.concatenate(seen)) == list(range(n))


def test_order_depends_on_seed_and_epoch_alone():
    first = epoch_order(50, 1, 0)
    assert np.array_equal(first, epoch_order(50, 1, 0))
    assert not np.array_equal(first, epoch_order(50, 1, 1))
    assert not np.array_equal(first, epoch_order(50, 2, 0))
    assert np.array_equal(epoch_order(5, 1, 0, shuffle=False), np.arange(5))
    assert sorted(epoch_order(50, -1, 0)) == list(range(50))


def test_order_stays_what_it_was():
    # A resumed run continues an order that another machine began: it must never change.
    assert epoch_order(8, 1, 2).dtype == np.int64
    assert epoch_order(8, 1, 2).tolist() == [6, 0, 7, 5, 1, 4, 3, 2]


def test_start_gives_the_rest_of_the_epoch():
    whole = list(plan_epoch(103, 10, 1, 3, 0, 0, 2))
    for start in (0, 4, 10, 11, 50):
        rest = list(plan_epoch(103, 10, 1, 3, 0, 0, 2, start=start))
        assert len(rest) == max(0, len(whole) - start)
        for ours, theirs in zip(rest, whole[start:], strict=True):
            assert ours.step == theirs.step
            assert all(map(np.array_equal, ours.parts, theirs.parts))
            assert ours.weights == theirs.weights


def test_parts_do_not_share_memory_with_the_order():
    plan = next(plan_epoch(100, 10, 0, 2, 0, 0))
    assert all(part.base is None for part in plan.parts)


def test_pieces_are_contiguous():
    bounds = [piece_bounds(7, piece, 3) for piece in range(3)]
    assert bounds == [(0, 3), (3, 5), (5, 7)]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"world": 0}, "world is 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"num_samples": 0}, "number of samples is 0"),
        ({"rank": 2}, r"rank 2 .* 0\.\.1"),
        ({"start": -1}, "start=-1"),
    ],
)
def test_wrong_sizes_are_refused_at_once(kwargs, message):
    args = {"num_samples": 5, "batch": 2, "rank": 0, "world": 2, "seed": 0, "epoch": 0}
    with pytest.raises(UsageError, match=message):
        plan_epoch(**{**args, **kwargs})
