"""What is trained next: played through with scores that a function gives, without a training."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.errors import UsageError
from ridgeline.search.draw import build_draw
from ridgeline.search.request import extended
from ridgeline.search.schedules import build_schedule
from ridgeline.search.show import state_text, way_of
from ridgeline.search.space import read_space
from ridgeline.search.trials import Journal, Request, Trial, lineage, winner

REQUEST = Request(
    space=("train.lr=0.0..1.0",),
    metric="loss",
    draw="spread",
    schedule="halving",
    trials=9,
    seed=0,
    factor=3,
    first=0.1,
    rounds=4,
    ranks=1,
)


def score(trial: Trial, share: float) -> float:
    """Less is better: near 0.5 is best, and more training helps."""
    return abs(trial.settings["train.lr"] - 0.5) + (1 - share)


def play(
    folder: Path,
    request: Request,
    at_once: int,
    order: int,
    cut_after: int | None = None,
    fails: Callable[[Trial, float], bool] = lambda trial, share: False,
    higher: bool = False,
) -> Journal:
    """A search with results in an order that chance decides; cut off after so many of them."""
    folder.mkdir(exist_ok=True)
    journal = Journal(folder)
    space = read_space(request.space)
    schedule = build_schedule(request, space, build_draw(request.draw, space, request.seed))
    dice, running, ended = random.Random(order), [], 0
    while True:
        while len(running) < at_once:
            work = schedule.next(journal.trials, higher)
            if work is None:
                break
            trial = (
                journal.begin(work.settings or {}, work.parent, work.begins)
                if work.number is None
                else journal.trials[work.number]
            )
            trial.running = work.share
            running.append((trial, work.share))
        if not running or ended == cut_after:
            return journal
        trial, share = running.pop(dice.randrange(len(running)))
        ended += 1
        if fails(trial, share):
            journal.fail(trial, "said so", 1.0)
        else:
            value = score(trial, share)
            journal.reach(trial, share, -value if higher else value, 1.0, higher)


def count(journal: Journal) -> dict[float, int]:
    return dict(Counter(round(share, 3) for one in journal.trials for share in one.scores))


def test_halving_gives_a_third_three_times_as_much(tmp_path: Path) -> None:
    journal = play(tmp_path, REQUEST, at_once=1, order=0)
    found = count(journal)
    assert found[0.111] == 9
    assert found[1.0] >= 1
    assert found[1.0] <= found[0.333] <= 5, "one by one, a rung may take some more than a third"
    best = winner(journal.trials, False)
    assert best is not None
    assert best.share == 1.0
    assert best == min(journal.trials, key=lambda t: abs(t.settings["train.lr"] - 0.5))


@pytest.mark.parametrize("at_once", [1, 2, 4])
@pytest.mark.parametrize("trials", [1, 2, 5, 9, 20])
def test_halving_always_ends_with_one_that_was_trained_to_its_end(
    tmp_path: Path, trials: int, at_once: int
) -> None:
    journal = play(tmp_path, replace(REQUEST, trials=trials), at_once, order=1)
    assert len(journal.trials) == trials
    assert any(one.share == 1.0 for one in journal.trials)
    assert not any(one.running for one in journal.trials)


@pytest.mark.parametrize("schedule", ["halving", "population"])
def test_more_may_be_better(tmp_path: Path, schedule: str) -> None:
    """The same scores turned round, and the same trials go on."""
    request = replace(REQUEST, schedule=schedule)
    less = play(tmp_path / "less", request, 1, 0)
    more = play(tmp_path / "more", request, 1, 0, higher=True)
    assert [t.scores.keys() for t in more.trials] == [t.scores.keys() for t in less.trials]
    assert [t.parent for t in more.trials] == [t.parent for t in less.trials]
    best = winner(more.trials, True)
    assert best is not None
    assert best.number == winner(less.trials, False).number  # type: ignore[union-attr]


def test_halving_passes_over_what_failed(tmp_path: Path) -> None:
    """The best ones fail on the second rung: others go on in their place."""

    def fails(trial: Trial, share: float) -> bool:
        return share > 0.2 and abs(trial.settings["train.lr"] - 0.5) < 0.1

    journal = play(tmp_path, REQUEST, 2, 0, fails=fails)
    assert any(one.failed for one in journal.trials)
    best = winner(journal.trials, False)
    assert best is not None
    assert best.share == 1.0
    assert not best.failed


@pytest.mark.parametrize("schedule", ["full", "halving", "population"])
def test_a_search_that_was_cut_off_loses_no_result(tmp_path: Path, schedule: str) -> None:
    request = replace(REQUEST, schedule=schedule, trials=8)
    whole = play(tmp_path / "whole", request, 1, 0)
    cut = tmp_path / "cut"
    for _ in range(60):
        before = {(t.number, s): v for t in Journal(cut).trials for s, v in t.scores.items()}
        after = play(cut, request, 1, 0, cut_after=2)
        kept = {(t.number, s): v for t in after.trials for s, v in t.scores.items()}
        assert before.items() <= kept.items()
        if kept == before:
            break
    assert [(t.settings, t.parent, t.scores) for t in Journal(cut).trials] == [
        (t.settings, t.parent, t.scores) for t in whole.trials
    ]


@pytest.mark.parametrize("order", range(5))
def test_a_population_does_not_depend_on_who_is_faster(tmp_path: Path, order: int) -> None:
    request = replace(REQUEST, schedule="population", trials=8)

    def story(journal: Journal) -> set[tuple[float, ...]]:
        """What every trial is, without the number that it happened to get."""
        return {
            (*(one.settings["train.lr"] for one in lineage(journal.trials, t)), t.begins, t.share)
            for t in journal.trials
        }

    alone = play(tmp_path / "alone", request, 1, 0)
    assert story(play(tmp_path / "many", request, 3, order)) == story(alone)


def test_the_worst_quarter_begins_with_the_weights_of_the_best(tmp_path: Path) -> None:
    request = replace(REQUEST, schedule="population", trials=8)
    journal = play(tmp_path, request, 2, 0)
    assert len(journal.trials) == 8 + 2 * 3, "two of eight after each round but the last"
    for one in journal.trials[8:]:
        assert one.parent is not None
        peers = [t for t in journal.trials if one.begins in t.scores]
        ranked = sorted(peers, key=lambda t: t.scores[one.begins])
        assert journal.trials[one.parent] in ranked[:2]
        left = [t for t in journal.trials if t.share == one.begins and t.scores]
        assert len(left) == 2, "as many as were replaced have ended there"
        assert min(t.scores[one.begins] for t in left) >= max(
            t.scores[one.begins] for t in peers if t not in left
        )


def test_a_member_that_failed_is_replaced_and_earlier_rounds_stay_decided(tmp_path: Path) -> None:
    request = replace(REQUEST, schedule="population", trials=4)
    journal = play(tmp_path, request, 1, 0, fails=lambda t, share: t.number == 0 and share > 0.4)
    assert journal.trials[0].failed
    ended = [t for t in journal.trials if t.share == 1.0]
    assert len(ended) == 4


def test_settings_that_cannot_change_are_no_population(tmp_path: Path) -> None:
    for key in (
        "train.batch=16,32",
        "model.args.depth=2..4",
        "optim.name=sgd,adamw",
        "layout.tp=1,2",
    ):
        request = replace(REQUEST, schedule="population", space=(key,))
        with pytest.raises(UsageError, match="cannot change in the middle"):
            play(tmp_path, request, 1, 0)


def test_a_score_that_is_no_number_is_the_worst(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for value in (float("nan"), 1.0):
        trial = journal.begin({"train.lr": 0.1})
        journal.reach(trial, 1.0, value, 1.0, False)
    best = winner(Journal(tmp_path).trials, False)
    assert best is not None
    assert best.number == 1


def test_a_search_can_be_given_more_trials_and_nothing_else(tmp_path: Path) -> None:
    first = play(tmp_path, REQUEST, 1, 0)
    more = extended(REQUEST, 20, len(first.trials))
    journal = play(tmp_path, more, 1, 0)
    assert len(journal.trials) == 20
    assert [t.settings for t in journal.trials[:9]] == [t.settings for t in first.trials]
    with pytest.raises(UsageError, match="less than the 20 that were begun"):
        extended(more, 9, 20)
    with pytest.raises(UsageError, match="stays as large as it began"):
        extended(replace(REQUEST, schedule="population"), 12, 9)
    grid = replace(REQUEST, space=("train.batch=1,2,3",), draw="grid", trials=3)
    with pytest.raises(UsageError, match="more than the 3 points"):
        extended(grid, 4, 3)


def test_the_way_of_a_child_begins_where_its_parent_was() -> None:
    parent = Trial(0, {}, scores={0.5: 0.7, 1.0: 0.9})
    child = Trial(1, {}, parent=0, begins=0.5, scores={1.0: 0.95})
    assert way_of([parent, child], child) == [(0.5, 0.7), (1.0, 0.95)]
    assert way_of([parent, child], parent) == [(0.5, 0.7), (1.0, 0.9)]
    lost = Trial(2, {}, scores={0.5: float("inf")})
    assert way_of([parent, child, lost], lost) == []


def test_trials_wait_until_the_search_is_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    request = replace(REQUEST, trials=2)
    first = journal.begin({"train.lr": 0.1})
    journal.reach(first, 1 / 9, 1.0, 1.0, False)
    assert state_text(journal, request, first) == "waits"
    second = journal.begin({"train.lr": 0.5})
    journal.reach(second, 1 / 9, 0.5, 1.0, False)
    assert state_text(journal, request, first) == "waits"  # either may still go on
    journal.reach(second, 1.0, 0.1, 1.0, False)
    assert state_text(journal, request, first) == "went no further"
    assert state_text(journal, request, second) == "trained"
