"""States that start ahead of their turn: which, when, and that a ladder shows nothing of it but time."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ridgeline.config import RunConfig, load_config
from ridgeline.doctor import climb as climb_file
from ridgeline.doctor import states as states_file
from ridgeline.doctor.ahead import MORE, PROCESS_BYTES, num_beside
from ridgeline.doctor.choice import Waiting, foresee
from ridgeline.doctor.climb import climb, climb_script
from ridgeline.doctor.ladder import Ladder, Rung, show_ladder
from ridgeline.doctor.model_look import MANY_CONVOLUTIONS, Look
from ridgeline.doctor.remedies.contract import Parts, Remedy
from ridgeline.doctor.states import Candidate, Effort
from ridgeline.errors import RunError

EFFORT = Effort(rounds=3, steps=10, check_steps=12, clear=float("inf"))
SETTINGS = [
    "model.name=mlp",
    "model.args={in_features: 16, hidden: 32, out_features: 4}",
    "data.source=synthetic",
    "data.args={shape: [16], classes: 4}",
    "train.batch=8",
    "train.steps=500",
    "data.prefetch=0",
    "device=cpu",
]
STARTS_S, TURN_S = 10.0, 1.0
"""Of the machine's own clock."""


class Machine:
    """A clock, and a record of what states that only pretend to run did."""

    def __init__(self) -> None:
        self.now = 0.0
        self.starts: list[str] = []
        self.closed: dict[str, float] = {}
        self.open: list[str] = []
        self.open_at: dict[str, list[str]] = {}
        """Those that were there when a state started."""
        self.computing: set[str] = set()
        self.beside: dict[str, set[str]] = {}
        """What else computed in the turns of a state."""
        self.fails: Callable[[str], str] = lambda name: ""
        """What a state says that fails in its check; empty for one that does not."""
        self.interrupts: Callable[[str, str], bool] = lambda name, doing: False
        self.hangs: Callable[[str], bool] = lambda name: False
        """Whether a state starts until it is closed."""
        self.does_not_start: Callable[[str], bool] = lambda name: False
        self.open_in_turn: dict[str, set[str]] = {}
        """Those that were there in the first turn of a state."""
        self.memory: dict[str, float] = {}
        self.rests: Callable[[str], float] = lambda name: 0.0
        """What a state holds of it while it waits, where that is not what all do."""

    def state(self, config: RunConfig, name: str, *_: object) -> State:
        if self.does_not_start(name):
            raise RunError("a process for a state ended; see spare.log")
        return State(self, config, name)


class State:
    """Twice as fast with two threads, half as fast again with batches read ahead, slower with a seed."""

    def __init__(self, machine: Machine, config: RunConfig, name: str) -> None:
        self.machine, self.config, self.name = machine, config, name
        self.losses: list[float] = []
        self.turns: list[float] = []
        self.waits: list[float] = []
        self.peak_bytes, self.tenth_step_s, self.beside = 2e9, None, 0
        self.last = {
            "unit": "samples",
            "samples": 8,
            "units_per_sample": 1,
            "device": "cpu",
            **machine.memory,
        }
        if machine.memory and machine.rests(name):
            self.last["rest_bytes"] = machine.rests(name)
        self.ended = threading.Event()
        machine.starts.append(name)
        machine.open_at[name] = list(machine.open)
        machine.open.append(name)

    @property
    def step_s(self) -> float:
        data, train = self.config.data, self.config.train
        slower = (2.0 if train.seed else 1.0) / (1.3 if train.clip else 1.0)
        return 0.12 * slower / (2.0 if data.threads == 2 else 1.0) / (1.5 if data.prefetch else 1.0)

    def check(self, effort: Effort) -> None:
        machine = self.machine
        machine.computing.add(self.name)
        try:
            if machine.interrupts(self.name, "check"):
                raise KeyboardInterrupt
            if machine.hangs(self.name) and self.ended.wait(60):
                raise RunError("its process ended")
            if machine.fails(self.name):
                raise RunError(machine.fails(self.name))
            if threading.current_thread() is threading.main_thread():
                machine.now += STARTS_S
            else:
                time.sleep(0.4 if "-dropped-" in self.name else 0.2)  # longer than the current one
        finally:
            machine.computing.discard(self.name)
        self.losses += [1.0] * effort.check_steps
        self.tenth_step_s = 3.0

    def turn(self) -> float:
        if self.machine.interrupts(self.name, "turn"):
            raise KeyboardInterrupt
        self.machine.now += TURN_S
        self.machine.beside.setdefault(self.name, set()).update(self.machine.computing)
        self.machine.open_in_turn.setdefault(self.name, set(self.machine.open))
        self.turns.append(self.step_s * (1.0 + 0.004 * (len(self.turns) % 3)))
        self.waits.append(0.0)
        return self.turns[-1]

    def parts(self) -> Parts:
        return Parts(step_s=self.step_s)

    def close(self, wait_s: float = 30.0) -> None:
        self.machine.open.remove(self.name)
        self.machine.closed[self.name] = wait_s
        self.ended.set()


def remedy(name: str, gain: float, *overrides: str, slow: bool = False) -> Remedy:
    return Remedy(
        name,
        applies=lambda step, config: f"{name} may help",
        predicted_gain=lambda step, config: gain,
        change=lambda config: list(overrides),
        risk="none",
        slow=slow,
    )


def table(*remedies: Remedy) -> dict[str, Remedy]:
    return {one.name: one for one in remedies}


THREADS = remedy("two threads", 3.0, "data.threads=2")
READING = remedy("reading ahead", 2.0, "data.prefetch=2")
SEED = remedy("seed", 1.5, "train.seed=1")
CLIP = remedy("clip", 1.2, "train.clip=1.0")
REMEDIES = table(THREADS, READING, SEED, CLIP)
FIRST, IF_KEPT, IF_DROPPED = (
    "01-two-threads",
    "01-two-threads-kept-reading-ahead",
    "01-two-threads-dropped-reading-ahead",
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(climb_file, "Candidate", made.state)
    monkeypatch.setattr(climb_file, "ScriptCandidate", made.state)
    monkeypatch.setattr(climb_file, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def go(
    folder: Path, ahead: int, remedies: dict[str, Remedy] = REMEDIES, **options: Any
) -> tuple[Ladder, str]:
    said: list[str] = []
    config = load_config(None, SETTINGS).config
    effort = dataclasses.replace(EFFORT, ahead=ahead, **options)
    ladder = climb(config, folder, remedies=remedies, effort=effort, say=said.append)
    return ladder, said[-1]


def outcome(ladder: Ladder) -> tuple[object, ...]:
    """All that does not say what started beside what, or how long it took."""
    rungs = [dataclasses.replace(rung, beside=0) for rung in ladder.rungs]
    return rungs, ladder.overrides, ladder.raced, [(one.name, one.why) for one in ladder.untried]


def test_states_start_beside_the_one_whose_turn_it_is_and_are_used(
    tmp_path: Path, machine: Machine
) -> None:
    ladder, _ = go(tmp_path, 2)
    assert machine.starts == [
        "baseline",
        FIRST,
        IF_KEPT,  # used
        IF_DROPPED,
        "03-seed",
        "03-seed-kept-clip",
        "03-seed-dropped-clip",  # used
        "baseline-again",
    ]
    assert [(r.name, r.kept, r.beside) for r in ladder.rungs] == [
        ("baseline", True, 0),
        ("two threads", True, 2),
        ("reading ahead", True, 2),
        ("seed", False, 2),
        ("clip", True, 2),
    ]
    assert len(machine.beside[IF_KEPT]) == len(machine.beside["03-seed-dropped-clip"]) == 0
    for unused in (IF_DROPPED, "03-seed-kept-clip"):
        assert unused not in machine.beside  # it never had a turn
    # What cannot be used any more is closed as soon as that is known.
    assert machine.open_in_turn[IF_KEPT] == {FIRST, IF_KEPT}
    assert machine.open_at["03-seed"] == [IF_KEPT]
    assert machine.open == []


def test_nothing_computes_while_a_race_is_timed(tmp_path: Path, machine: Machine) -> None:
    go(tmp_path, 2)
    assert {FIRST, IF_KEPT, "03-seed", "baseline-again"} <= set(machine.beside)
    assert not any(machine.beside.values())


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_the_ladder_is_the_one_of_states_that_start_alone(
    tmp_path: Path, machine: Machine, ahead: int
) -> None:
    alone, _ = go(tmp_path / "alone", 0)
    assert not any(rung.beside for rung in alone.rungs)
    spent_s, machine.now = machine.now, 0.0
    ladder, _ = go(tmp_path / "ahead", ahead)
    assert outcome(ladder) == outcome(alone)
    assert len(ladder.rungs) == 5
    assert ladder.raced is not None
    assert any(rung.beside for rung in ladder.rungs)
    assert machine.now < spent_s  # starts beside one another take the time of one


def test_several_turns_can_be_thought_ahead(tmp_path: Path, machine: Machine) -> None:
    go(tmp_path, 6)
    used = [name for name in machine.beside if name.startswith("01-")]
    assert used == [FIRST, IF_KEPT, "01-two-threads-kept-kept-seed"]
    assert len(machine.starts) == 1 + 7 + 2
    assert machine.starts[-2:] == ["04-clip", "baseline-again"]
    assert machine.open == []


def test_a_state_for_another_configuration_is_closed(tmp_path: Path, machine: Machine) -> None:
    """Two threads promise 3 and bring 2, and only at that pace does clipping promise the most."""
    clip = dataclasses.replace(
        CLIP, predicted_gain=lambda step, config: 5.0 if 0.05 < step.step_s < 0.07 else 1.2
    )
    ladder, _ = go(tmp_path, 2, table(THREADS, READING, clip))
    assert [rung.name for rung in ladder.rungs] == [
        "baseline",
        "two threads",
        "clip",
        "reading ahead",
    ]
    assert machine.starts[1:5] == [FIRST, IF_KEPT, IF_DROPPED, "02-clip"]
    assert machine.open_at["02-clip"] == [FIRST]
    assert IF_KEPT not in machine.beside
    assert ladder.overrides == ("data.threads=2", "train.clip=1.0", "data.prefetch=2")


def test_a_refused_remedy_leaves_what_is_ahead_where_it_is(
    tmp_path: Path, machine: Machine
) -> None:
    """It is refused without a state, so nothing has gone this way or that."""
    graphs = dataclasses.replace(
        remedy("graphs", 1.0, "layout.graphs=true"),
        predicted_gain=lambda step, config: 5.0 if 0.05 < step.step_s < 0.07 else 1.0,
    )
    ladder, _ = go(tmp_path, 2, table(THREADS, READING, graphs))
    assert [rung.name for rung in ladder.rungs][2] == "graphs"
    assert machine.starts[1:4] == [FIRST, IF_KEPT, IF_DROPPED]
    assert IF_KEPT in machine.beside


@pytest.mark.parametrize("why", ["CUDA out of memory", "its process ended (1); see its log"])
def test_what_fails_ahead_starts_alone_in_its_turn(
    tmp_path: Path, machine: Machine, why: str
) -> None:
    alone, _ = go(tmp_path / "alone", 0)
    machine.starts.clear()
    machine.fails = lambda name: why if "-kept-" in name or "-dropped-" in name else ""
    ladder, _ = go(tmp_path / "ahead", 2)
    assert outcome(ladder) == outcome(alone)
    assert machine.starts[1:5] == [FIRST, IF_KEPT, IF_DROPPED, "02-reading-ahead"]
    assert machine.open_at["02-reading-ahead"] == [FIRST]
    assert {r.name: r.beside for r in ladder.rungs}["reading ahead"] == 0
    assert machine.open == []


def test_what_does_not_even_start_ahead_is_no_loss(tmp_path: Path, machine: Machine) -> None:
    alone, _ = go(tmp_path / "alone", 0)
    machine.does_not_start = lambda name: name == IF_KEPT
    ladder, _ = go(tmp_path / "ahead", 2)
    assert outcome(ladder) == outcome(alone)
    assert [rung.beside for rung in ladder.rungs[:3]] == [0, 1, 0]


def test_what_fails_after_it_waited_is_tried_again(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(state: State) -> float:
        if "-kept-" in state.name:
            raise RunError("its process ended (1); see its log")
        return turns(state)

    turns = State.turn
    monkeypatch.setattr(State, "turn", turn)
    ladder, _ = go(tmp_path, 2)
    assert {r.name: r.kept for r in ladder.rungs}["reading ahead"]
    assert "02-reading-ahead" in machine.starts


@pytest.mark.parametrize(
    ("why", "is_retried"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED", True),
        ("its process ended (-9); see its log", True),
        ("ValueError: it cannot work", False),
    ],
)
def test_one_that_had_no_memory_beside_others_is_tried_once_more_alone(
    tmp_path: Path, machine: Machine, why: str, is_retried: bool
) -> None:
    machine.fails = lambda name: why if name == FIRST and machine.starts.count(FIRST) == 1 else ""
    ladder, _ = go(tmp_path, 2)
    rungs = {rung.name: rung for rung in ladder.rungs}
    assert machine.starts.count(FIRST) == (2 if is_retried else 1)
    assert rungs["two threads"].kept == is_retried
    if is_retried:
        assert machine.starts[1:5] == [FIRST, IF_KEPT, IF_DROPPED, FIRST]
        assert machine.open_at[FIRST] == ["baseline"]  # the second time
        assert rungs["two threads"].beside == 0
    else:
        assert "it cannot work" in rungs["two threads"].why
        assert IF_DROPPED in machine.beside  # which is what comes next now


def test_the_others_are_not_waited_for_where_they_took_the_memory(
    tmp_path: Path, machine: Machine
) -> None:
    machine.hangs = lambda name: name in (IF_KEPT, IF_DROPPED)
    machine.fails = lambda name: (
        "CUDA out of memory" if name == FIRST and machine.starts.count(FIRST) == 1 else ""
    )
    begun = time.monotonic()
    ladder, _ = go(tmp_path, 2)
    assert time.monotonic() - begun < 45.0
    assert ladder.rungs[1].kept


def test_one_that_has_no_memory_alone_is_tried_once(tmp_path: Path, machine: Machine) -> None:
    machine.fails = lambda name: "CUDA out of memory" if name == FIRST else ""
    for ahead in (0, 2):
        machine.starts.clear()
        ladder, _ = go(tmp_path / str(ahead), ahead)
        assert machine.starts.count(FIRST) == (2 if ahead else 1)
        assert "CUDA out of memory" in ladder.rungs[1].why


def test_no_more_start_than_the_device_has_room_for(tmp_path: Path, machine: Machine) -> None:
    peak = MORE * 2e9 + PROCESS_BYTES  # of the pretended states
    kept = SimpleNamespace(peak_bytes=2e9, last={})
    effort = dataclasses.replace(EFFORT, ahead=2)
    assert num_beside(kept, effort) == 2  # a device that does not say
    for states, number in ((1.0, 0), (1.9, 0), (2.1, 1), (3.1, 2), (50.0, 2)):
        capacity = (PROCESS_BYTES + 1e9 + states * peak) / 0.95
        kept.last = {"capacity_bytes": capacity, "rest_bytes": 1e9}
        assert num_beside(kept, effort) == number, states
    machine.memory = {"capacity_bytes": 2.2 * peak / 0.95 + 3e9, "rest_bytes": 0.5e9}
    ladder, _ = go(tmp_path / "one", 2)
    assert [rung.beside for rung in ladder.rungs[1:3]] == [1, 1]
    machine.memory = {"capacity_bytes": 1.5 * peak, "rest_bytes": 0.5e9}
    ladder, _ = go(tmp_path / "none", 2)
    assert not any(rung.beside for rung in ladder.rungs)


def test_those_that_rest_at_their_peak_make_room_for_the_race(
    tmp_path: Path, machine: Machine
) -> None:
    """As captured graphs do: all could start, but not wait while others are at their peaks."""
    machine.memory = {"capacity_bytes": 15e9, "rest_bytes": 0.0}
    assert go(tmp_path / "light", 2)[0].rungs[2].beside == 2
    waited = machine.open_in_turn["01-two-threads"]
    assert len(waited) == 4
    machine.starts.clear()
    machine.open_in_turn.clear()
    machine.rests = lambda name: 4e9 if "-dropped-" in name or "-kept-" in name else 0.0
    go(tmp_path / "heavy", 2)
    assert len(machine.open_in_turn["01-two-threads"]) == 3


def test_a_remedy_that_started_ahead_does_not_count_for_what_one_takes(
    tmp_path: Path, machine: Machine
) -> None:
    """Its start was in another's turn: the budgets of those that are left would be too small."""
    left = dataclasses.replace(CLIP, slow=True)
    ladder, _ = go(tmp_path, 2, table(THREADS, READING, left), rounds=5, budget_s=4 * STARTS_S)
    (untried,) = [one for one in ladder.untried if one.name == "clip"]
    assert untried.budget_s is not None
    assert untried.budget_s - ladder.spent_s >= STARTS_S + 2 * 5 * TURN_S


def test_what_searches_for_convolutions_starts_alone(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climb_file, "look_at", lambda config: Look(num_conv2d=MANY_CONVOLUTIONS))
    ladder, _ = go(tmp_path / "many", 2)
    assert not any(rung.beside for rung in ladder.rungs)
    monkeypatch.setattr(climb_file, "look_at", lambda config: Look(num_conv2d=1))
    ladder, _ = go(tmp_path / "patches", 2)
    assert any(rung.beside for rung in ladder.rungs)


def test_what_takes_minutes_starts_alone_and_in_its_turn(tmp_path: Path, machine: Machine) -> None:
    slow = dataclasses.replace(READING, slow=True)
    ladder, _ = go(tmp_path, 2, table(THREADS, slow, CLIP))
    assert [rung.name for rung in ladder.rungs][1:] == ["two threads", "clip", "reading ahead"]
    assert machine.starts[1:] == [
        FIRST, "01-two-threads-kept-clip", "01-two-threads-dropped-clip", "03-reading-ahead",
        "baseline-again",
    ]  # fmt: skip
    machine.starts.clear()
    go(tmp_path / "next", 2, table(THREADS, slow))
    assert machine.starts[:3] == ["baseline", FIRST, "02-reading-ahead"]
    # Nor does anything start beside one, though it would come next.
    first = dataclasses.replace(THREADS, slow=True)
    then = dataclasses.replace(CLIP, applies=lambda step, c: "so" if c.data.threads == 2 else None)
    machine.starts.clear()
    go(tmp_path / "beside", 2, table(first, then))
    assert machine.starts[:3] == ["baseline", FIRST, "02-clip"]
    slows = [dataclasses.replace(one, slow=True) for one in (THREADS, READING)]
    machine.starts.clear()
    go(tmp_path / "slow", 2, table(*slows))
    assert machine.starts[:3] == ["baseline", FIRST, "02-reading-ahead"]


def test_what_takes_minutes_is_not_begun_where_they_are_not_left(
    tmp_path: Path, machine: Machine
) -> None:
    """It would end long after the budget; `--budget` as the ladder names it reaches it."""
    table_ = table(THREADS, dataclasses.replace(READING, slow=True))
    whole, _ = go(tmp_path / "whole", 0, table_)
    one_s = machine.now / 3  # the baseline, the one remedy, and the other
    machine.now = 0.0
    ladder, text = go(tmp_path / "short", 0, table_, budget_s=3.0 * one_s)
    assert "since they take longer than the " in text
    assert "was over" not in text
    assert [rung.name for rung in whole.rungs[1:]] == ["two threads", "reading ahead"]
    assert [rung.name for rung in ladder.rungs[1:]] == ["two threads"]
    assert ladder.spent_s < 3.0 * one_s
    (left,) = [one for one in ladder.untried if one.name == "reading ahead"]
    machine.now = 0.0
    again, _ = go(tmp_path / "again", 0, table_, budget_s=left.budget_s)
    assert [rung.name for rung in again.rungs[1:]] == ["two threads", "reading ahead"]


def test_nothing_starts_ahead_that_the_budget_does_not_reach(
    tmp_path: Path, machine: Machine
) -> None:
    """The baseline takes 13 s and the first remedy 16 of what is left."""
    ladder, _ = go(tmp_path, 2, budget_s=25.0)
    assert machine.starts == ["baseline", FIRST]
    assert [rung.name for rung in ladder.rungs] == ["baseline", "two threads"]
    machine.now = 0.0
    go(tmp_path / "longer", 2, budget_s=31.0)
    assert IF_KEPT in machine.starts


def test_nobody_waits_for_what_the_budget_has_overtaken(tmp_path: Path, machine: Machine) -> None:
    machine.hangs = lambda name: name in (IF_KEPT, IF_DROPPED)

    def fails(name: str) -> str:
        if name == FIRST:
            machine.now += 100.0
        return ""

    machine.fails = fails
    begun = time.monotonic()
    ladder, _ = go(tmp_path, 2, budget_s=60.0)
    assert time.monotonic() - begun < 45.0
    assert ladder.rungs[1].kept
    assert machine.closed[IF_KEPT] == machine.closed[IF_DROPPED] == 0.0
    assert machine.open == []


@pytest.mark.parametrize("doing", ["check", "turn"])
def test_an_interrupt_ends_every_state_at_once(
    tmp_path: Path, machine: Machine, doing: str
) -> None:
    machine.interrupts = lambda name, what: name == FIRST and what == doing
    machine.hangs = lambda name: doing == "check" and name == IF_KEPT
    ladder, _ = go(tmp_path, 2)
    assert ladder.interrupted
    assert {FIRST, IF_KEPT, IF_DROPPED} <= set(machine.starts)
    assert machine.open == []
    assert max(machine.closed.values()) <= 0.5


def test_scripts_start_one_at_a_time(tmp_path: Path, machine: Machine) -> None:
    effort = dataclasses.replace(EFFORT, ahead=2)
    script = tmp_path / "mine.py"
    remedies = table(THREADS, SEED, CLIP)
    ladder = climb_script(
        script, (), tmp_path / "out", remedies=remedies, effort=effort, say=lambda text: None
    )
    assert machine.starts == ["baseline", FIRST, "02-seed", "03-clip", "baseline-again"]
    assert not any(rung.beside for rung in ladder.rungs)


def test_a_refused_remedy_is_not_started_ahead(tmp_path: Path, machine: Machine) -> None:
    graphs = remedy("graphs", 2.5, "layout.graphs=true")
    ladder, _ = go(tmp_path, 2, table(THREADS, graphs, CLIP))
    assert "needs compile=true" in ladder.rungs[2].why
    assert machine.starts[:3] == ["baseline", FIRST, "03-clip"]


def test_as_many_interpreters_are_ready_as_states_start(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def build(
        config: RunConfig, folder: Path, cache: Path | None, number: int, num_ranks: int
    ) -> Any:
        numbers.append(number)
        assert num_ranks == 1
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr(climb_file, "build_spares", build)
    for ahead in (0, 2):
        go(tmp_path / str(ahead), ahead, table(THREADS))
    assert numbers == [1, 3]


def test_few_cores_start_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, number in ((1, 0), (3, 0), (4, 1), (7, 1), (8, 2), (64, 2)):
        monkeypatch.setattr(states_file, "usable_cpus", lambda cores=cores: set(range(cores)))
        assert Effort().num_ahead == number
        assert Effort(ahead=5).num_ahead == 5


def test_what_comes_next_is_foreseen_with_the_gain_that_is_promised() -> None:
    config = load_config(None, SETTINGS).config
    step = Parts(step_s=0.12, data_s=0.03)
    needs_threads = dataclasses.replace(
        READING, applies=lambda step, c: "so" if c.data.threads == 2 and step.data_s else None
    )
    at_pace = dataclasses.replace(
        SEED, predicted_gain=lambda step, c: 9.0 if step.step_s == pytest.approx(0.04) else 1.1
    )
    waiting = Waiting([THREADS, needs_threads, at_pace, CLIP])
    (first,) = [p for p in waiting.rank(step, config) if p.remedy is THREADS]
    waiting.take(THREADS)
    found = list(foresee(waiting, step, config, first))
    assert [(one.name, one.history) for one in found[:4]] == [
        ("seed", (True,)),
        ("clip", (False,)),
        ("reading ahead", (True, True)),
        ("reading ahead", (True, False)),
    ]
    assert (found[0].config.data.threads, found[0].config.train.seed) == (2, 1)
    assert (found[1].config.data.threads, found[1].config.train.clip) == (1, 1.0)
    names = [promise.remedy.name for promise in waiting.rank(step, config)]
    assert names == ["clip", "seed"]  # which thinking ahead took nothing from
    again = dataclasses.replace(first, remedy=dataclasses.replace(THREADS, repeats=True))
    ahead = list(islice(foresee(Waiting([CLIP]), step, config, again), 2))
    assert [(one.name, one.history) for one in ahead] == [
        ("two threads", (True,)),
        ("clip", (False,)),
    ]
    # One that feeds brings the data sooner; what waits for data then has nothing to do.
    feeding = dataclasses.replace(first, remedy=dataclasses.replace(THREADS, feeds=True))
    ahead = list(foresee(Waiting([needs_threads]), step, config, feeding))
    assert ahead == []


class Asked(Candidate):
    """Remembers what it was asked for."""

    def _start(self) -> Any:
        self.asked: list[tuple[int, int]] = []
        return None

    def _ask(self, untimed: int, timed: int) -> dict[str, Any]:
        self.asked.append((untimed, timed))
        return {
            "losses": [1.0] * (untimed + timed), "peak_bytes": 1.0, "step_s": 0.01 * timed,
            "parts": {}, "device": "cpu", "time": 0.0,
        }  # fmt: skip


def test_a_state_times_nothing_while_others_start(tmp_path: Path) -> None:
    state = Asked(load_config(None, SETTINGS).config, "one", tmp_path, EFFORT)
    state.check(EFFORT)
    assert state.asked == [(10, 0), (2, 0)]
    state.turn()
    state.turn()
    assert state.asked[2:] == [(0, 1), (2, 10), (2, 10)]


def test_the_table_says_how_many_started_at_once() -> None:
    rung = Rung("bf16", (), True, "faster", tenth_step_s=40.0, beside=2)
    first = Rung("baseline", (), True, "as it is", tenth_step_s=20.0)
    text = show_ladder(Ladder("tokens", 24, 0.005, (first, rung), ()))
    row, other = (
        next(line for line in text.splitlines() if line.startswith(name))
        for name in ("bf16", "baseline")
    )
    assert "40.0 s, 3 at once" in row
    assert "at once" not in other
    assert "where several started at once, each took longer than it does alone" in text
    assert "at once" not in show_ladder(Ladder("tokens", 24, 0.005, (first,), ()))


SLOW = """
import time
import torch
from ridgeline.data.source import SourceInfo

class Slow:
    info = SourceInfo(input_shape=(16,), input_dtype=torch.float32, target_shape=(),
                      target_dtype=torch.int64, num_classes=4, task="classify")

    def __len__(self):
        return 2048

    def fetch(self, indices, epoch):
        time.sleep(0.04)
        rows = [torch.randn(16, generator=torch.Generator().manual_seed(int(i))) for i in indices]
        x = torch.stack(rows)
        return x, x[:, :4].argmax(1)

def build(**_):
    return Slow()
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_real_climb_uses_what_started_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_ahead.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(None, [*SETTINGS, "data.source=slow_ahead:build", "data.args={}",
                                "threads=1"]).config  # fmt: skip
    remedies = table(
        remedy("threads", 9.0, "data.threads=4", "data.prefetch=2"),
        remedy("other weights", 8.0, "train.seed=1"),
        remedy("other rate", 7.0, "train.lr=0.5"),
    )
    effort = Effort(rounds=2, steps=4, warm_up=1, check_steps=12, ahead=1)
    ladder = climb(
        config, tmp_path / "out", remedies=remedies, effort=effort, say=lambda text: None
    )
    assert [(rung.name, rung.kept, rung.beside) for rung in ladder.rungs] == [
        ("baseline", True, 0),
        ("threads", True, 1),
        ("other weights", False, 1),
        ("other rate", False, 0),  # none is left that could start beside it
    ]
    assert ladder.rungs[1].loss_difference == 0.0
    assert "off" in ladder.rungs[2].why
    assert all(rung.tenth_step_s is not None for rung in ladder.rungs)
    states = {path.stem for path in (tmp_path / "out" / "states").glob("*.yaml")}
    assert states == {"baseline", "01-threads", "01-threads-kept-other-weights", "03-other-rate"}
    assert not [
        p for p in psutil.Process().children(recursive=True) if "candidate" in command_of(p)
    ]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # one that has ended, of another test
        return ""
