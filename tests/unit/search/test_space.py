"""What is searched, and which points of it are tried."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from ridgeline.errors import UsageError
from ridgeline.search.draw import build_draw, count_grid
from ridgeline.search.space import fit_types, near_end, overrides_of, read_space
from ridgeline.search.trials import Trial

LR = "train.lr=1e-4..1e-1:log"


def test_a_range_on_a_log_scale_has_as_much_of_each_decade() -> None:
    [lr] = read_space([LR])
    values = [lr.at((i + 0.5) / 300) for i in range(300)]
    for low in (1e-4, 1e-3, 1e-2):
        assert sum(low <= value < 10 * low for value in values) == pytest.approx(100, abs=1)


def test_whole_numbers_include_both_ends() -> None:
    [depth] = read_space(["model.args.depth=2..5"])
    assert {depth.at(i / 100) for i in range(100)} == {2, 3, 4, 5}
    assert all(isinstance(depth.at(i / 100), int) for i in range(100))


def test_lists_keep_their_types() -> None:
    [betas, name] = read_space(["optim.betas=[[0.9, 0.95], [0.9, 0.999]]", "optim.name=sgd,adamw"])
    assert betas.choices == ([0.9, 0.95], [0.9, 0.999])
    assert overrides_of({"optim.betas": betas.at(0.0), "optim.name": name.at(0.9)}) == [
        "optim.betas=[0.9, 0.95]",
        "optim.name=adamw",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train.lr", "not KEY=VALUES"),
        ("train.lr=1e-1..1e-4", "not below"),
        ("train.lr=0..1:log", "above 0"),
        ("train.lr=1..2:sqrt", "no scale"),
        ("train.lr=a..b", "LOW..HIGH"),
        ("train.lr=1e-4...1e-1", "LOW..HIGH"),
        ("data.args.day=2020-01-01,2020-02-01", "put it in quotes"),
        ("train.batch=32", "two values or more"),
        ("train.batch=32,32", "twice"),
    ],
)
def test_what_is_no_space_is_told_with_its_text(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        read_space([text])
    assert text in str(caught.value)


def test_a_setting_given_twice_and_none_at_all_are_refused() -> None:
    with pytest.raises(UsageError, match="given twice"):
        read_space([LR, "train.lr=1,2"])
    with pytest.raises(UsageError, match="nothing to search"):
        read_space([])


def test_spread_leaves_no_gap_that_chance_would_leave() -> None:
    """Sixteen points in one dimension: the largest gap is less than two even ones."""
    space = read_space(["a=0.0..1.0"])
    spread, chance = build_draw("spread", space, 3), build_draw("random", space, 3)
    gaps = []
    for draw in (spread, chance):
        values = sorted([0.0, 1.0, *(draw(n, [], False)["a"] for n in range(16))])
        gaps.append(max(b - a for a, b in pairwise(values)))
    assert gaps[0] < 2 / 16 < gaps[1]


@pytest.mark.parametrize("name", ["spread", "random"])
def test_what_is_drawn_is_a_function_of_seed_and_number(name: str) -> None:
    space = read_space([LR, "optim.name=sgd,adamw"])
    first = [build_draw(name, space, 1)(n, [], False) for n in range(8)]
    assert first == [build_draw(name, space, 1)(n, [], True) for n in range(8)]
    assert first != [build_draw(name, space, 2)(n, [], False) for n in range(8)]


def test_grid_tries_each_point_once() -> None:
    space = read_space(["a=1,2,3", "b=x,y"])
    draw = build_draw("grid", space, 0)
    points = {tuple(draw(n, [], False).values()) for n in range(count_grid(space))}
    assert points == {(a, b) for a in (1, 2, 3) for b in "xy"}
    with pytest.raises(UsageError, match="is a range"):
        build_draw("grid", read_space([LR]), 0)


def test_a_nudged_value_stays_in_its_range_and_near() -> None:
    [lr, batch] = read_space([LR, "train.batch=16,32,64"])
    for seed in range(200):
        dice = random.Random(seed)
        assert 1e-4 <= lr.nudged(0.09, dice) <= 1e-1
        assert batch.nudged(32, dice) in (16, 32, 64)
    moves = {lr.nudged(0.01, random.Random(seed)) for seed in range(200)}
    assert {0.008, 0.012} <= moves


def test_tpe_goes_where_results_are_better() -> None:
    pytest.importorskip("optuna", reason="optuna is not installed: --draw tpe is not tried")
    space = read_space(["a=0.0..1.0"])
    draw = build_draw("tpe", space, 0)
    trials: list[Trial] = []
    for number in range(40):
        settings = draw(number, trials, False)
        trials.append(Trial(number, settings, scores={1.0: (settings["a"] - 0.7) ** 2}))
    late = [one.settings["a"] for one in trials[30:]]
    assert sum(abs(value - 0.7) < 0.15 for value in late) >= 5, "three would be chance"


def test_values_never_leave_their_range_for_want_of_digits() -> None:
    for text in ("a=0.9..0.99999", "a=1000.1..1000.4", "a=1e-7..1e-6:log"):
        [one] = read_space([text])
        values = [one.at(i / 500) for i in range(500)]
        assert all(one.low <= value <= one.high for value in values)
        assert len(set(values)) > 100


def test_a_nudge_moves_whatever_it_is_given() -> None:
    """Whole numbers, nought, and the ends of ranges and lists: a child is no copy of its parent."""
    for text, value in (
        ("a=1..9", 1),
        ("a=1..9", 2),
        ("a=0.0..1.0", 0.0),
        ("a=1,2,3", 3),
        ("a=0.1..1.0", 1.0),
    ):
        [one] = read_space([text])
        nudged = [one.nudged(value, random.Random(seed)) for seed in range(100)]
        assert sum(found == value for found in nudged) < 20, text


def test_whole_numbers_are_meant_only_where_the_setting_is_one() -> None:
    space = read_space(["optim.weight_decay=0..1", "train.batch=8..64"])
    decay, batch = fit_types(space, {"optim.weight_decay": 0.01, "train.batch": 32})
    assert decay.at(0.5) == 0.5
    assert read_space([decay.text()]) == (decay,)
    assert isinstance(batch.at(0.5), int)


def test_words_that_look_like_something_else_stay_words() -> None:
    [one] = read_space(["model.args.mode=['null', '1', plain]"])
    assert overrides_of({"k": one.choices[0]}) == ['k="null"']
    assert overrides_of({"k": one.choices[1]}) == ['k="1"']
    assert overrides_of({"k": one.choices[2]}) == ["k=plain"]


def test_the_end_of_a_range_is_told() -> None:
    [lr] = read_space([LR])
    assert near_end(lr, 0.09)
    assert near_end(lr, 1.1e-4)
    assert not near_end(lr, 3e-3)
