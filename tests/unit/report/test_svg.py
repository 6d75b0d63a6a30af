"""The arithmetic behind the plots: ticks, labels, thinning, gaps."""

from __future__ import annotations

import math

import pytest

from ridgeline.report.svg import (
    Part,
    Series,
    downsample,
    line_chart,
    log_ticks,
    nice_ticks,
    number_text,
    stacked_bar,
)


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.1, 0.35), (-3, 8), (1e-6, 5e-6), (0, 12345), (2.30, 2.31)]
)
def test_ticks_are_round_few_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert len({number_text(tick) for tick in ticks}) == len(ticks)


def test_ticks_have_no_dust() -> None:
    assert nice_ticks(0, 0.5) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_log_ticks() -> None:
    assert log_ticks(0.5, 2000) == [1, 10, 100, 1000]
    assert log_ticks(0.9, 11) == [1, 2, 5, 10]
    assert len(log_ticks(1e-12, 1e12)) <= 8
    assert len(log_ticks(2.1, 2.9)) >= 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.30001, "0.3"), (1234567, "1,234,567"), (3e-5, "3e-5"), (123.456, "123.5"),
     (100, "100"), (2.5e9, "2.5e9"), (-0.05, "-0.05"), (math.nan, "nan")],
)  # fmt: skip
def test_numbers_as_people_write_them(value: float, text: str) -> None:
    assert number_text(value) == text


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    points = [(float(i), math.sin(i)) for i in range(10_000)]
    points[4321] = (4321.0, 50.0)
    points[1234] = (1234.0, -50.0)
    points[7777] = (7777.0, math.nan)
    kept = downsample(points, 300)
    assert len(kept) <= 300
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert points[4321] in kept
    assert points[1234] in kept
    assert any(math.isnan(y) for _, y in kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_short_curves_are_left_alone() -> None:
    points = [(1.0, 2.0), (2.0, math.nan)]
    assert downsample(points) == points


def test_log_axis_only_where_all_is_positive() -> None:
    chart = line_chart([Series("a", [(1, 0.001), (2, 1000.0)])], title="t", log=True)
    assert "log scale" in chart
    chart = line_chart([Series("a", [(1, 0.0), (2, 1000.0)])], title="t", log=True)
    assert "log scale" not in chart


def test_nothing_to_draw_is_said() -> None:
    assert "nothing was recorded" in line_chart([], title="t")
    assert "no finite value" in line_chart([Series("a", [(1, math.nan)])], title="t")
    assert stacked_bar([Part("a", 0.0, "0 %")], title="t") == ""


def test_a_point_alone_is_a_dot() -> None:
    assert "h0" in line_chart([Series("a", [(1, 2.0)])], title="t")
