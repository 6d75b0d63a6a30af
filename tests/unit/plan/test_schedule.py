"""Schedules, event by event, against what is known of them."""

from __future__ import annotations

import pytest

from ridgeline.plan.schedule import orders, play


def even(stages: int, chunks: int, seconds: float) -> list[list[float]]:
    return [[seconds / chunks] * chunks for _ in range(stages)]


@pytest.mark.parametrize(("stages", "count"), [(2, 2), (4, 8), (8, 24), (4, 200)])
def test_bubble_law_of_1f1b_and_gpipe(stages: int, count: int) -> None:
    for schedule in ("1f1b", "gpipe"):
        played = play(schedule, count, even(stages, 1, 1.0), even(stages, 1, 2.0), [0.0] * stages)
        assert played.seconds == pytest.approx(3.0 * (count + stages - 1))
        assert played.bubble == pytest.approx((stages - 1) / (count + stages - 1))


@pytest.mark.parametrize(("stages", "count", "chunks"), [(4, 8, 2), (4, 16, 4), (8, 160, 3)])
def test_interleaving_divides_the_bubble(stages: int, count: int, chunks: int) -> None:
    played = play(
        "interleaved", count, even(stages, chunks, 1.0), even(stages, chunks, 2.0), [0.0] * stages
    )
    assert played.seconds == pytest.approx(3.0 * (count + (stages - 1) / chunks))


def test_zero_bubble_beats_1f1b_and_does_all_the_work() -> None:
    stages, count = 4, 16
    forward, half = even(stages, 1, 1.0), even(stages, 1, 1.0)
    plain = play("1f1b", count, forward, even(stages, 1, 2.0), [0.0] * stages)
    split = play("zerobubble", count, forward, half, [0.0] * stages, half)
    assert split.busy_s == pytest.approx(plain.busy_s)
    assert 3.0 * count <= split.seconds < plain.seconds


def test_slow_stage_sets_the_pace() -> None:
    forward = [[1.0], [1.0], [1.5], [1.0]]
    backward = [[2.0], [2.0], [3.0], [2.0]]
    played = play("1f1b", 40, forward, backward, [0.0] * 4)
    assert played.seconds == pytest.approx(40 * 4.5 + 2 * 3.0, rel=0.02)


def test_long_runs_are_extended_exactly() -> None:
    forward, backward = [[1.0], [1.2], [0.9]], [[2.0], [2.3], [2.2]]
    send = [0.1, 0.2, 0.0]
    times = [play("1f1b", n, forward, backward, send).seconds for n in (11, 12, 60, 61, 62)]
    period = times[3] - times[2]
    assert times[4] - times[3] == pytest.approx(period)
    assert times[1] - times[0] == pytest.approx(period)


def test_sends_cost_time_and_less_when_they_overlap() -> None:
    args = ("1f1b", 16, even(4, 1, 1.0), even(4, 1, 2.0))
    free = play(*args, [0.0] * 4).seconds
    waits = play(*args, [0.1] * 4).seconds
    overlaps = play(*args, [0.1] * 4, blocking=False).seconds
    assert free < overlaps < waits


def test_microbatches_in_flight() -> None:
    played = play("1f1b", 16, even(4, 1, 1.0), even(4, 1, 2.0), [0.0] * 4)
    assert played.in_flight == (4, 3, 2, 1)
    deep = play("interleaved", 8, even(4, 3, 1.0), even(4, 3, 2.0), [0.0] * 4)
    # (stages - rank - 1) x 2 + (chunks - 1) x stages + 1
    assert deep.in_flight == (15, 13, 11, 9)
    wider = play("interleaved", 10, even(4, 3, 1.0), even(4, 3, 2.0), [0.0] * 4, group=5)
    assert wider.in_flight[3] == 11
    # Weights' gradients read the activations too, and the later a rank the later they are made.
    halves = even(4, 1, 1.0)
    late = play("zerobubble", 16, even(4, 1, 1.0), halves, [0.0] * 4, halves)
    assert late.in_flight == (4, 4, 4, 4)


@pytest.mark.parametrize("stages", [2, 4, 5])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_never_waits_for_itself(stages: int, chunks: int) -> None:
    for count in range(1, 3 * stages + 2):
        for group in (0, stages + 1):
            played = play(
                "interleaved", count, even(stages, chunks, 1.0), even(stages, chunks, 2.0),
                [0.1] * stages, group=group,
            )  # fmt: skip
            assert played.seconds >= 3.0 * count


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zerobubble", 1), ("zerobubble", 2)],
)
def test_every_operation_once(schedule: str, chunks: int) -> None:
    for ops in orders(schedule, 3, 6, chunks):
        assert len(ops) == len(set(ops))
        kinds = ["F", "B"] + (["W"] if schedule == "zerobubble" else [])
        assert sorted(ops) == sorted(
            (k, c, m) for k in kinds for c in range(chunks) for m in range(6)
        )
