"""The ladder's figures agree with each other on a machine that slows down, and say what was not done."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ridgeline.config import RunConfig, load_config
from ridgeline.doctor import climb as climb_file
from ridgeline.doctor.climb import climb
from ridgeline.doctor.ladder import DISAGREE, Ladder, Rung, draw_ladder, show_ladder
from ridgeline.doctor.race import Race, race, spread_of, tell_gain
from ridgeline.doctor.remedies.contract import Parts, Remedy
from ridgeline.doctor.states import Effort
from ridgeline.errors import RunError

EFFORT = Effort(rounds=5, steps=10, check_steps=12, clear=float("inf"), ahead=0)
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
DRIFT = 1.02
"""The machine of these tests gets slower by this factor with every turn of anybody."""


class Machine:
    """A clock and a pace, for states that only pretend to run."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = 1.0
        self.open: list[str] = []
        self.broken = ""
        """The name of a state that fails."""
        self.does_not_start = ""
        self.turns_left: dict[str, int] = {}
        """Of states that fail after so many turns."""

    def state(
        self, config: RunConfig, name: str, folder: Path, effort: Effort, *_: object
    ) -> State:
        if name.endswith(self.does_not_start or "-"):
            raise RunError("a process for a state ended; see spare.log")
        return State(self, config, name)


class State:
    """Twice as fast with two threads, half as fast again with batches read ahead."""

    def __init__(self, machine: Machine, config: RunConfig, name: str) -> None:
        self.machine, self.config, self.name = machine, config, name
        self.losses: list[float] = []
        self.turns: list[float] = []
        self.waits: list[float] = []
        self.peak_bytes, self.tenth_step_s, self.beside = 2e9, None, 0
        self.last = {"unit": "samples", "samples": 8, "units_per_sample": 1, "device": "cpu"}
        machine.open.append(name)

    @property
    def step_s(self) -> float:
        data = self.config.data
        slower = 2.0 if self.config.train.seed else 1.0
        return 0.12 * slower / (2.0 if data.threads == 2 else 1.0) / (1.5 if data.prefetch else 1.0)

    def check(self, effort: Effort) -> None:
        if self.name == self.machine.broken:
            raise RunError("it does not start")
        self.machine.now += 10.0
        self.losses += [1.0] * effort.check_steps
        self.tenth_step_s = 3.0

    def turn(self) -> float:
        left = self.machine.turns_left
        left[self.name] = left.get(self.name, 1000) - 1
        if left[self.name] < 0:
            raise RunError("CUDA out of memory")
        self.machine.now += 1.0
        self.machine.pace *= DRIFT
        self.turns.append(self.step_s * self.machine.pace)
        parts = self.parts()
        self.waits.append(parts.data_s / parts.step_s)
        return self.turns[-1]

    def parts(self) -> Parts:
        return Parts(step_s=self.step_s)

    def close(self, wait_s: float = 30.0) -> None:
        self.machine.open.remove(self.name)


class Overlapping(State):
    """Computes for 100 ms, 60 with clipping, while it reads for 100, with two threads for 10."""

    @property
    def reads_s(self) -> float:
        return 0.010 if self.config.data.threads == 2 else 0.100

    @property
    def computes_s(self) -> float:
        return 0.060 if self.config.train.clip else 0.100

    @property
    def step_s(self) -> float:
        return max(self.computes_s, self.reads_s)

    def parts(self) -> Parts:
        return Parts(step_s=self.step_s, data_s=self.step_s - self.computes_s)


def remedy(name: str, gain: float, *overrides: str, on: str = "") -> Remedy:
    return Remedy(
        name,
        applies=lambda step, config: (
            None if on not in ("", step.device_kind) else f"{name} may help"
        ),
        predicted_gain=lambda step, config: gain,
        change=lambda config: list(overrides),
        risk="none",
    )


REMEDIES = {
    one.name: one
    for one in (
        remedy("two threads", 3.0, "data.threads=2"),
        remedy("reading ahead", 2.0, "data.prefetch=2"),
        remedy("slow", 1.5, "train.seed=1"),
        remedy("small", 1.0, "train.lr=0.5"),
        remedy("for a GPU", 9.0, "layout.compile=true", on="cuda"),
        remedy("for no device", 9.0, "layout.compile=true", on="none"),
    )
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(climb_file, "Candidate", made.state)
    monkeypatch.setattr(climb_file, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def go(folder: Path, **options: Any) -> tuple[Ladder, str]:
    said: list[str] = []
    config = load_config(None, SETTINGS).config
    effort = Effort(**{**vars(EFFORT), **options})
    ladder = climb(config, folder, remedies=REMEDIES, effort=effort, say=said.append)
    return ladder, said[-1]


def test_throughput_and_factors_agree_while_the_machine_slows_down(
    tmp_path: Path, machine: Machine
) -> None:
    ladder, text = go(tmp_path)
    rungs = {rung.name: rung for rung in ladder.rungs}
    baseline = rungs["baseline"]
    assert [r.name for r in ladder.rungs if r.kept] == ["baseline", "two threads", "reading ahead"]
    product = 1.0
    for rung in ladder.rungs[1:]:
        assert rung.times == pytest.approx(product * rung.gain)
        assert rung.rate == pytest.approx(baseline.rate * rung.times)
        ratios = [b / a for b, a in zip(rung.before_turns_s, rung.turns_s, strict=True)]
        assert rung.gain == pytest.approx(sorted(ratios)[2])
        assert rung.gain == pytest.approx(rung.before_s / rung.step_s)  # what the table shows
        product = rung.times if rung.kept else product
    # Within what two turns one after the other can differ by; their own turns alone would say 2.1.
    assert rungs["reading ahead"].times == pytest.approx(3.0, rel=2.5 * (DRIFT - 1))
    assert baseline.step_s / rungs["reading ahead"].step_s < 2.3
    assert ladder.raced.times == ladder.times == pytest.approx(3.0, rel=1.5 * (DRIFT - 1))
    assert ladder.raced.low <= ladder.raced.times <= ladder.raced.high
    assert machine.open == []
    for part in (
        f"{ladder.times:.2f} times the baseline with two threads, reading ahead",
        f"the product of the gains is {ladder.best.times:.2f}",
        "step: of the turn in the middle of 5 (or of the first that leave no doubt), of up to 10 steps",
        "x before: this over that, the middle one of the turns' ratios",
        "throughput: the baseline's, times x baseline",
        "their own turns are up to",
    ):
        assert part in text


def test_two_that_hide_each_other_are_found_together(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, the faster computing waits for data and the faster reading brings nothing."""
    monkeypatch.setattr(
        climb_file, "Candidate", lambda config, name, *_: Overlapping(machine, config, name)
    )
    threads = remedy("threads", 1.2, "data.threads=2")
    threads = dataclasses.replace(
        threads,
        applies=lambda step, c: "it waits" if step.data_s and c.data.threads != 2 else None,
        feeds=True,
    )
    clipping = remedy("clipping", 1.6, "train.clip=1.0")
    useless = remedy("useless", 1.1, "train.lr=0.1")
    remedies = {one.name: one for one in (threads, clipping, useless)}
    config = load_config(None, SETTINGS).config
    said: list[str] = []
    ladder = climb(config, tmp_path, remedies=remedies, effort=EFFORT, say=said.append)
    assert [(rung.name, rung.kept) for rung in ladder.rungs] == [
        ("baseline", True),
        ("clipping", False),
        ("clipping, threads", True),
        ("useless", False),
    ]
    assert "40% of its step waits for data" in ladder.rungs[1].why
    assert ladder.rungs[2].gain == pytest.approx(1 / 0.6, rel=0.05)
    assert ladder.overrides == ("train.clip=1.0", "data.threads=2")


def test_a_race_that_contradicts_the_product_is_said_to(tmp_path: Path, machine: Machine) -> None:
    ladder, text = go(tmp_path)
    assert DISAGREE not in text
    raced = dataclasses.replace(ladder.raced, times=4.7, low=4.5, high=5.0)
    assert DISAGREE in show_ladder(dataclasses.replace(ladder, raced=raced))


def test_a_ladder_of_a_busy_machine_calls_itself_one(tmp_path: Path, machine: Machine) -> None:
    ladder, text = go(tmp_path)
    assert "did other work" not in text
    spread = [dataclasses.replace(rung, spread=0.25) for rung in ladder.rungs]
    first = dataclasses.replace(ladder, rungs=(spread[0], *ladder.rungs[1:]))
    assert "did other work" not in show_ladder(first)  # one slow moment
    busy = show_ladder(dataclasses.replace(ladder, rungs=tuple(spread)))
    assert "did other work meanwhile: the turns of one state are ±25% apart" in busy
    for apart, is_busy in ((0.11, True), (0.09, False)):
        rungs = tuple(dataclasses.replace(rung, spread=apart) for rung in ladder.rungs)
        shown = show_ladder(dataclasses.replace(ladder, rungs=rungs))
        assert ("did other work" in shown) is is_busy


def test_memory_says_whose_it_is(tmp_path: Path, machine: Machine) -> None:
    ladder, text = go(tmp_path)
    assert "memory: the whole process, at its peak" in text
    of_device = show_ladder(dataclasses.replace(ladder, device="cuda"))
    assert "memory: tensors on the device, at its peak" in of_device


def test_every_state_has_its_spread_and_its_tenth_step(tmp_path: Path, machine: Machine) -> None:
    _, text = go(tmp_path)
    written = json.loads((tmp_path / "ladder.json").read_text())
    for rung in written["rungs"]:
        turns = rung["turns_s"]
        assert len(turns) == 5
        assert rung["spread"] == pytest.approx((max(turns) - min(turns)) / 2 / sorted(turns)[2])
        assert rung["tenth_step_s"] == 3.0
        row = next(line for line in text.splitlines() if line.startswith(rung["name"]))
        assert f"±{rung['spread']:.1%}" in row
        assert "3.0 s" in row
    assert written["raced"]["num_turns"] == 5
    assert "10th step: from the start of the state's process" in text


def test_a_budget_that_is_too_short_says_what_was_not_tried(
    tmp_path: Path, machine: Machine
) -> None:
    ladder, text = go(tmp_path, budget_s=12.0)
    assert [rung.name for rung in ladder.rungs] == ["baseline"]
    # The baseline took 10 s to start and 5 turns of 1 s; a remedy takes 10 s and 10 turns.
    assert [(u.name, u.budget_s) for u in ladder.untried] == [
        ("two threads", 40.0),
        ("reading ahead", 60.0),
        ("slow", 80.0),
        ("small", None),
        ("for a GPU", None),
        ("for no device", None),
    ]
    for part in (
        "nothing is kept: no remedy was tried",
        "not tried, since --budget 12 was over after 15 s:",
        "two threads (up to x3.00): two threads may help; about --budget 40 would reach it",
        "slow (up to x1.50): slow may help; about --budget 80 would reach it",
        "not tried, since they promise next to nothing: small",
        "not tried, since they are for GPUs: for a GPU",
        "this training has nothing that they change: for no device",
    ):
        assert part in text
    assert json.loads((tmp_path / "ladder.json").read_text())["untried"][0]["budget_s"] == 40.0


def test_what_the_time_does_not_allow_is_said(tmp_path: Path, machine: Machine) -> None:
    """Two remedies were kept when the time was over: their product stands, and is called one."""
    ladder, text = go(tmp_path, budget_s=40.0)
    assert [rung.name for rung in ladder.rungs] == ["baseline", "two threads", "reading ahead"]
    assert ladder.raced is None
    assert ladder.times == ladder.best.times
    assert "the product of the gains; the two were not run side by side once more (no time" in text
    assert "slow (up to x1.50)" in text


def test_a_baseline_that_does_not_start_again_leaves_the_product(
    tmp_path: Path, machine: Machine
) -> None:
    machine.broken = "baseline-again"
    ladder, text = go(tmp_path)
    assert ladder.raced is None
    assert machine.open == []
    assert "once more (it does not start)" in text


def test_a_ladder_without_remedies_says_so(tmp_path: Path, machine: Machine) -> None:
    said: list[str] = []
    config = load_config(None, SETTINGS).config
    climb(config, tmp_path, remedies={}, effort=EFFORT, say=said.append)
    assert "nothing is kept: no remedy promises anything for this step" in said[-1]


@pytest.mark.parametrize(
    ("gain", "says"),
    [
        (1.9, "faster by 90.0%, noise 2.0%"),
        (1.01, "+1.0% is not above the noise of 2.0%"),
        (0.52, "slower by 48.0%"),
        (0.99, "slower by 1.0%"),
        (1.0001, "as fast as before"),
    ],
)
def test_only_a_gain_can_be_within_the_noise(gain: float, says: str) -> None:
    assert tell_gain(gain, 0.02) == says


def test_noise_is_how_far_a_gain_falls() -> None:
    raced = Race((1.0, 1.0, 1.0, 1.0, 1.0), (0.5, 0.5, 0.5, 0.4, 0.25))
    assert raced.gain == 2.0
    assert raced.noise(0.01) == 0.01
    assert Race((1.0, 2.0, 3.0), (1.0, 1.0, 1.0)).noise(0.01) == pytest.approx(1.0)
    alike = Race((1.006, 1.0061, 1.006), (1.0, 1.0, 1.0))
    assert (alike.noise(0.01), alike.noise(0.01, quiet=0.01)) == (0.003, 0.01)
    assert Race((1.006, 1.008, 1.006), (1.0, 1.0, 1.0)).noise(0.01) == pytest.approx(0.006)
    two = Race((1.0, 1.2), (1.0, 1.0))
    assert (two.gain, two.middle_s) == (1.0, (1.0, 1.0))
    assert two.noise(0.01) == pytest.approx(0.2)
    assert spread_of([1.0]) is None
    assert spread_of([1.0, 2.0, 4.0]) == 0.75


def test_the_table_has_what_was_asked_for() -> None:
    rung = Rung(
        "bf16", (), True, "faster by 90.0%, noise 1.0%", 2.0, 1.9, 0.01, 0.5, 1234.0, 1.9, 2e9, 1e-4,
        3.0, (0.49, 0.5, 0.51), (0.95, 0.95, 0.95), 0.02, 0.95,
    )  # fmt: skip
    first = Rung("baseline", (), True, "as it is", times=1.0)
    text = show_ladder(Ladder("tokens", 24, 0.005, (first, rung), ()))
    for part in (
        "1,234 tokens/s", "1.90", "500 ms", "±2.0%", "950 ms", "2.0 GB", "+0.010%", "3.0 s",
        "kept: faster by 90.0%", "0.50%",
    ):  # fmt: skip
        assert part in text
    assert "bf16" in draw_ladder(Ladder("tokens", 24, 0.005, (rung,), ()))


class Paced:
    """A state whose turns take so long, one after the other."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def turn(self) -> float:
        return self.left.pop(0)


def test_three_turns_are_enough_where_they_leave_no_doubt() -> None:
    effort = Effort(rounds=5)
    slow, fast = (3.0, 3.0, 2.9), (1.0, 1.1, 1.0)
    assert len(race(Paced(*slow), Paced(*fast), effort).ratios) == 2
    assert len(race(Paced(*fast), Paced(*slow), effort).ratios) == 2
    assert len(race(Paced(*slow), Paced(*fast), effort, fewest=3).ratios) == 3
    two = race(Paced(9.0, 8.0), Paced(1.0, 1.0), effort)
    assert (two.gain, two.noise(0.01)) == (8.0, 1.0)
    unsure = race(Paced(2.2, 6.0), Paced(1.0, 1.0), effort)  # by how much, not whether
    assert unsure.gain > 1 + unsure.noise(0.01)
    slow, fast = (1.6, 1.7, 1.6), (1.0, 1.1, 1.0)
    assert len(race(Paced(*slow), Paced(*fast), effort).ratios) == 3
    assert len(race(Paced(*fast), Paced(*slow), effort).ratios) == 3
    near = (1.3, 1.2, 1.3, 1.3, 1.3), (1.0,) * 5
    assert len(race(Paced(*near[0]), Paced(*near[1]), effort).ratios) == 5
    mixed = (3.0, 1.0, 1.0, 1.0, 1.0), (1.0, 3.0, 1.0, 1.0, 1.0)
    assert len(race(Paced(*mixed[0]), Paced(*mixed[1]), effort).ratios) == 5


def test_long_steps_make_shorter_turns() -> None:
    effort = Effort(steps=10, warm_up=2, turn_s=6.0)
    assert effort.turn_of(0.0) == effort.turn_of(0.1) == (2, 10)
    assert effort.turn_of(1.0) == (2, 6)
    assert effort.turn_of(50.0) == (1, 2)


def test_a_state_that_does_not_start_is_dropped_and_the_rest_is_written(
    tmp_path: Path, machine: Machine
) -> None:
    machine.does_not_start = "reading-ahead"
    ladder, _ = go(tmp_path)
    rungs = {rung.name: rung for rung in ladder.rungs}
    assert "a process for a state ended" in rungs["reading ahead"].why
    assert rungs["two threads"].kept
    assert (tmp_path / "ladder.json").is_file()
    assert (tmp_path / "recipe.yaml").is_file()


def test_a_kept_state_that_fails_ends_the_climb_and_is_not_blamed_on_others(
    tmp_path: Path, machine: Machine
) -> None:
    machine.turns_left = {"01-two-threads": 6}  # its own race, and one turn of the next
    ladder, _ = go(tmp_path)
    assert [rung.name for rung in ladder.rungs] == ["baseline", "two threads"]
    assert not [rung for rung in ladder.rungs if "it failed" in rung.why]
    assert ladder.overrides == ("data.threads=2",)
    assert (tmp_path / "recipe.yaml").is_file()
    assert machine.open == []
