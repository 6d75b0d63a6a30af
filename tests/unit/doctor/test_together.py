"""Many small remedies are tried as one: which, when, and what becomes of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.config import RunConfig, load_config
from ridgeline.doctor import climb as climb_file
from ridgeline.doctor.choice import Promise, Waiting, foresee
from ridgeline.doctor.climb import climb
from ridgeline.doctor.ladder import Rung
from ridgeline.doctor.remedies.contract import Parts, Remedy
from ridgeline.doctor.remedies.table import REMEDIES
from ridgeline.doctor.states import Effort
from ridgeline.errors import RunError, UsageError

CONFIG = load_config(
    None,
    [
        "model.name=mlp",
        "model.args={in_features: 16, hidden: 32, out_features: 4}",
        "data.source=synthetic",
        "data.args={shape: [16], classes: 4}",
        "train.batch=8",
        "train.steps=500",
        "device=cpu",
    ],
).config
STEP = Parts(step_s=0.1)


def remedy(name: str, gain: float, override: str, **more: object) -> Remedy:
    """One that does not apply any more where it is in place."""
    key, value = override.split("=")
    section, field = key.split(".")

    def applies(step: Parts, config: RunConfig) -> str | None:
        there = str(getattr(getattr(config, section), field)) == value
        return None if there else f"{name} may help"

    made = Remedy(name, applies, lambda step, config: gain, lambda config: [override], "order")
    return dataclasses.replace(made, **more)


BIG = remedy("big", 1.5, "data.threads=2")
SMALL = [
    remedy("clip", 1.03, "train.clip=1.0"),
    remedy("prefetch", 1.02, "data.prefetch=7"),
    remedy("seed", 1.01, "train.seed=5"),
]


def names(found: list[Promise]) -> list[str]:
    return [promise.remedy.name for promise in found]


def test_what_is_small_comes_together_after_what_is_large() -> None:
    waiting = Waiting([*SMALL, BIG])
    assert names(waiting.rank(STEP, CONFIG)) == ["big", "clip", "prefetch", "seed"]
    waiting.take(BIG)
    first, *rest = waiting.rank(STEP, CONFIG)
    assert first.remedy.members == ("clip", "prefetch", "seed")
    assert first.gain == pytest.approx(1.03 * 1.02 * 1.01)
    assert first.remedy.change(CONFIG) == ["train.clip=1.0", "data.prefetch=7", "train.seed=5"]
    assert names(rest) == ["clip", "prefetch", "seed"]


@pytest.mark.parametrize(
    "other",
    [
        remedy("other", 1.04, "train.lr=0.5", risk="rounding"),
        remedy("other", 1.04, "train.lr=0.5", slow=True),
        remedy("other", 1.04, "train.lr=0.5", feeds=True),
        remedy("other", 1.04, "train.lr=0.5", repeats=True),
        remedy("other", 1.002, "train.lr=0.5"),
    ],
)
def test_what_has_risks_of_its_own_stays_by_itself(other: Remedy) -> None:
    first, *rest = Waiting([other, *SMALL]).rank(STEP, CONFIG)
    assert first.remedy.members == ("clip", "prefetch", "seed")
    assert "other" in names(rest)


def test_one_that_excludes_another_or_is_refused_is_not_with_it() -> None:
    rival = remedy("rival", 1.04, "train.clip=1.0")
    refused = remedy("refused", 1.045, "train.batch=0")
    first, *_ = Waiting([*SMALL, rival, refused]).rank(STEP, CONFIG)
    assert first.remedy.members == ("rival", "prefetch", "seed")
    assert not Waiting([SMALL[0], rival]).rank(STEP, CONFIG)[0].remedy.members  # one is not many


def test_kept_they_are_done_with_and_dropped_they_come_one_by_one() -> None:
    kept = Waiting(SMALL)
    many = kept.rank(STEP, CONFIG)[0].remedy
    kept.take(many)
    dropped = kept.copy()
    kept.note_kept(many)
    assert kept.rank(STEP, CONFIG) == []
    held_back = Rung("together", (), False, "", gain=1.0, step_s=0.1, data_share=0.4)
    assert dropped.note_dropped(many, held_back, STEP, CONFIG) is None
    assert names(dropped.rank(STEP, CONFIG)) == ["clip", "prefetch", "seed"]
    # Held back by data, each of them may still be half of a pair, and not all of them at once.
    feeding = remedy("threads", 1.2, "data.threads=4", feeds=True)
    fed = Waiting([*SMALL, feeding])
    assert fed.note_dropped(many, held_back, STEP, CONFIG) is None
    assert fed.note_dropped(SMALL[0], held_back, STEP, CONFIG).name == "clip, threads"


def test_those_that_apply_later_are_another_group() -> None:
    waiting = Waiting([*SMALL, remedy("late", 1.02, "train.lr=0.5")])
    waiting._joined.update(("clip", "prefetch", "seed"))
    assert names(waiting.rank(STEP, CONFIG)) == ["clip", "prefetch", "late", "seed"]
    more = [remedy("late", 1.02, "train.lr=0.5"), remedy("later", 1.02, "train.eval_samples=3")]
    again = Waiting([*SMALL[:2], *more])
    again.take(Waiting(SMALL[:2]).rank(STEP, CONFIG)[0].remedy)
    assert again.rank(STEP, CONFIG)[0].remedy.name == "together, 2"
    assert again.rank(STEP, CONFIG)[0].remedy.members == ("late", "later")


def test_what_comes_after_a_group_is_foreseen() -> None:
    waiting = Waiting([BIG, *SMALL])
    tried = waiting.rank(STEP, CONFIG)[0]
    waiting.take(tried.remedy)
    first = next(iter(foresee(waiting, STEP, CONFIG, tried)))
    assert first.name == "together"
    assert (first.config.data.threads, first.config.train.seed) == (2, 5)


class State:
    """Each small one brings less than the noise; the seed breaks it where `breaks` says so."""

    breaks = False

    def __init__(self, config: RunConfig, name: str, *_: object) -> None:
        self.config, self.name = config, name
        self.losses: list[float] = []
        self.turns: list[float] = []
        self.waits: list[float] = []
        self.peak_bytes, self.tenth_step_s, self.beside = 2e9, 3.0, 0
        self.last = {"unit": "samples", "samples": 8, "units_per_sample": 1, "device": "cpu"}

    @property
    def step_s(self) -> float:
        train, data = self.config.train, self.config.data
        parts = (bool(train.clip), data.prefetch == 7, train.seed == 5)
        return 0.1 * 0.992 ** sum(parts)

    def check(self, effort: Effort) -> None:
        if self.breaks and self.config.train.seed == 5:
            raise RunError("no such kernel")
        self.losses += [1.0] * effort.check_steps

    def turn(self) -> float:
        self.turns.append(self.step_s * (1.0 + 0.001 * (len(self.turns) % 3)))
        self.waits.append(0.0)
        return self.turns[-1]

    def parts(self) -> Parts:
        return Parts(step_s=self.step_s)

    def close(self, wait_s: float = 30.0) -> None:
        pass


def go(folder: Path, remedies: list[Remedy] = SMALL, **options: object) -> tuple[object, str]:
    said: list[str] = []
    effort = Effort(rounds=3, check_steps=12, ahead=0, **options)
    table = {one.name: one for one in remedies}
    return climb(CONFIG, folder, remedies=table, effort=effort, say=said.append), "\n".join(said)


def test_gains_below_the_noise_are_kept_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climb_file, "Candidate", State)
    ladder, text = go(tmp_path)
    assert [(r.name, r.kept) for r in ladder.rungs] == [("baseline", True), ("together", True)]
    assert ladder.best.gain == pytest.approx(0.992**-3, rel=0.002)
    assert ladder.overrides == ("train.clip=1.0", "data.prefetch=7", "train.seed=5")
    assert "together (clip, prefetch, seed): " in text
    assert "times the baseline with together (clip, prefetch, seed)" in text
    assert "together: clip, prefetch, seed; each promises too little" in text


def test_one_of_them_that_harms_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they bring 0.5 %, which turns as alike as these could tell from noise; what each of them
    does is worth more than that."""

    def step_s(state: State) -> float:
        train, data = state.config.train, state.config.data
        slower = 1.02 if train.seed == 5 else 1.0
        return 0.1 * slower / (1.02 if train.clip else 1.0) / (1.005 if data.prefetch == 7 else 1.0)

    monkeypatch.setattr(climb_file, "Candidate", State)
    monkeypatch.setattr(State, "turn", lambda self: self.turns.append(self.step_s) or self.step_s)
    monkeypatch.setattr(State, "step_s", property(step_s))
    ladder, _ = go(tmp_path)
    assert [(r.name, r.kept) for r in ladder.rungs] == [
        ("baseline", True),
        ("together", False),
        ("clip", True),
        ("prefetch", True),
        ("seed", False),
    ]
    assert ladder.rungs[3].why == "faster by 0.5%, noise 0.3%"


def test_one_of_them_that_fails_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climb_file, "Candidate", State)
    monkeypatch.setattr(State, "breaks", True)
    ladder, _ = go(tmp_path)
    assert [(r.name, r.kept) for r in ladder.rungs] == [
        ("baseline", True),
        ("together", False),
        ("together, 2", True),
        ("seed", False),
    ]
    assert "no such kernel" in ladder.rungs[1].why
    assert ladder.best.members == ("clip", "prefetch")
    assert "no such kernel" in ladder.rungs[3].why


def test_halves_of_what_failed_are_tried_once_and_those_that_are_slow_one_by_one() -> None:
    more = [*SMALL, remedy("rate", 1.008, "train.lr=0.5")]
    waiting = Waiting(more)
    first = waiting.rank(STEP, CONFIG)[0].remedy
    waiting.take(first)
    slow = waiting.copy()
    failed = Rung("together", (), False, "it failed")
    waiting.note_dropped(first, failed, STEP, CONFIG)
    tried = []
    while (many := waiting.rank(STEP, CONFIG)[0].remedy).members:
        tried.append(many.members)
        waiting.take(many)
        waiting.note_dropped(many, failed, STEP, CONFIG)
    assert tried == [("clip", "prefetch"), ("seed", "rate")]
    assert len(waiting.rank(STEP, CONFIG)) == 4
    slow.note_dropped(first, Rung("together", (), False, "", gain=0.9, step_s=0.1), STEP, CONFIG)
    assert not slow.rank(STEP, CONFIG)[0].remedy.members


def dropped(name: str, gain: float) -> Rung:
    return Rung(name, (), False, "", gain=gain, step_s=0.1)


def test_what_was_no_faster_comes_again_in_a_much_shorter_step() -> None:
    narrow = remedy("narrow", 1.09, "train.clip=1.0", risk="rounding")
    other = remedy("other", 1.01, "train.seed=5")
    slow = remedy("slow", 1.02, "data.prefetch=7", slow=True)
    waiting = Waiting([narrow, other, slow])
    waiting.take(narrow)
    waiting.note_dropped(narrow, dropped("narrow", 0.96), STEP, CONFIG)
    assert names(waiting.rank(Parts(step_s=0.092), CONFIG)) == ["other", "slow"]
    assert names(waiting.rank(Parts(step_s=0.0905), CONFIG)) == ["other", "narrow", "slow"]
    shorter = Parts(step_s=0.08)
    found = waiting.rank(shorter, CONFIG)
    assert names(found) == ["other", "narrow", "slow"]  # promised before, and not kept
    assert found[1].shorter == pytest.approx(1.25)
    assert names(waiting.copy().rank(shorter, CONFIG)) == names(found)
    assert waiting.untried(shorter, CONFIG, 0.0, 10.0)[1].name == "narrow"
    waiting.take(narrow)
    waiting.note_dropped(narrow, dropped("narrow", 0.99), shorter, CONFIG)
    assert names(waiting.rank(Parts(step_s=0.01), CONFIG)) == ["other", "slow"]  # once only


def test_what_waits_as_one_of_a_pair_does_not_come_again_by_itself() -> None:
    narrow = remedy("narrow", 1.09, "train.clip=1.0")
    feeds = remedy("feeds", 1.2, "data.prefetch=7", feeds=True)
    waiting = Waiting([narrow, feeds])
    waiting.take(narrow)
    held_back = dataclasses.replace(dropped("narrow", 0.98), step_s=0.1, data_share=0.5)
    assert waiting.note_dropped(narrow, held_back, Parts(step_s=0.1), CONFIG) is not None
    assert "narrow" not in names(waiting.rank(Parts(step_s=0.05), CONFIG))


def test_what_was_much_slower_or_no_right_does_not_come_again() -> None:
    for one, rung in (
        (remedy("other", 1.2, "train.seed=5"), dropped("other", 0.8)),
        (remedy("other", 1.2, "train.seed=5"), Rung("other", (), False, "its loss is off")),
        (remedy("other", 1.2, "train.seed=5", feeds=True), dropped("other", 0.99)),
    ):
        waiting = Waiting([one])
        waiting.take(one)
        waiting.note_dropped(one, rung, STEP, CONFIG)
        assert waiting.rank(Parts(step_s=0.01), CONFIG) == []


def test_what_comes_again_stays_out_of_groups() -> None:
    """A group is kept as a whole, and what was dropped before is no part of its promise."""
    waiting = Waiting([*SMALL, remedy("again", 1.03, "train.lr=0.5")])
    again = waiting._remedies["again"]
    waiting.take(again)
    waiting.note_dropped(again, dropped("again", 0.98), STEP, CONFIG)
    first = waiting.rank(Parts(step_s=0.05), CONFIG)[0].remedy
    assert first.members == ("clip", "prefetch", "seed")
    waiting.take(first)
    waiting.note_kept(first)
    assert names(waiting.rank(Parts(step_s=0.05), CONFIG)) == ["again"]


def test_a_climb_tries_again_what_the_step_has_become_right_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipping costs 4 % beside one thread and gains 10 % beside two, which come later."""

    def step_s(state: State) -> float:
        threads, clips = state.config.data.threads, bool(state.config.train.clip)
        return 0.1 / threads * ((1.04 if threads == 1 else 0.9) if clips else 1.0)

    monkeypatch.setattr(climb_file, "Candidate", State)
    monkeypatch.setattr(State, "step_s", property(step_s))
    first = remedy("clip", 1.6, "train.clip=1.0")
    ladder, text = go(tmp_path, [BIG, first])
    assert [(r.name, r.kept) for r in ladder.rungs[1:]] == [
        ("clip", False),
        ("big", True),
        ("clip", True),
    ]
    assert ladder.overrides == ("data.threads=2", "train.clip=1.0")
    assert ladder.rungs[3].why.endswith("; tried again in a step 2.00 times as short")
    assert "not tried" not in text


def test_many_together_need_the_budget_of_one() -> None:
    waiting = Waiting([*SMALL, BIG])
    needed = {one.name: one.budget_s for one in waiting.untried(STEP, CONFIG, 100.0, 50.0)}
    assert needed == {"big": 150.0, "clip": 200.0, "prefetch": 200.0, "seed": 200.0}


def test_what_is_left_out_is_not_tried_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climb_file, "Candidate", State)
    ladder, text = go(tmp_path, without=("clip",))
    assert ladder.best.members == ("prefetch", "seed")
    assert "not tried, since --without names them: clip" in text


def test_a_name_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown remedy 'clop' in --without; did you mean 'clip'"):
        go(tmp_path, without=("clop",))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--climb", "--without", "fp9"], "unknown remedy 'fp9' in --without; did you mean 'fp8'"),
        (["--without", "fp8"], "--without is for a climb, and none was asked for; add --climb"),
        (["--budget", "60"], "--budget is for a climb"),
        (["--rounds", "3"], "--rounds is for a climb"),
        (["--loss-bound", "0.1"], "--loss-bound is for a climb"),
    ],
)
def test_the_command_refuses_what_means_nothing(arguments: list[str], says: str) -> None:
    done = CliRunner().invoke(app, ["doctor", "digits", *arguments])
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)


def test_a_compiled_language_model_ends_with_many_together() -> None:
    """The remedies as they are: what a step of a large model has left, after those that promise more."""
    llama = [
        "model.name=llama", "model.args={size: 124m}", "data.source=synthetic", "device=cuda",
        "train.steps=9",
        "layout=precision=bf16,compile=true", "tune.residual=bf16", "tune.compile_mode=regional",
        "tune.fused_optimizer=false",
    ]  # fmt: skip
    config = load_config(None, llama).config
    step = Parts(
        0.1, device_kind="cuda", classes={"matrix": 0.06, "attention": 0.01, "optimizer": 0.005}
    )
    plain = {name: one for name, one in REMEDIES.items() if not one.advice and "fp8" not in name}
    first = Waiting(plain.values()).rank(step, config)[0]
    assert {"fused optimizer", "cuDNN attention", "CUDA graphs"} <= set(first.remedy.members)
