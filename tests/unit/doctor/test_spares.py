"""Processes that are a start ahead: ready before they are needed, told what to run, and gone at the end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest

from ridgeline.config import load_config
from ridgeline.doctor.spares import Spares
from ridgeline.doctor.states import Candidate, Effort, build_spares
from ridgeline.errors import RunError

WAITS = """
import json, sys, time
time.sleep(0.5)
print(json.dumps({"ready": time.time()}), flush=True)
asked = json.loads(sys.stdin.readline())
print(json.dumps(asked), flush=True)
"""


def test_the_next_one_gets_ready_while_the_last_one_works(tmp_path: Path) -> None:
    spares = Spares([], ["-c", WAITS], tmp_path / "spare.log")
    first = spares.take()
    assert first.wait() >= 0.5
    spares.prepare()
    first.give(tmp_path / "recipe.yaml", tmp_path / "log")
    assert first.process.stdout is not None
    assert json.loads(first.process.stdout.readline())["recipe"] == str(tmp_path / "recipe.yaml")
    spares.settle()
    begun = time.monotonic()
    second = spares.take()
    assert time.monotonic() - begun < 0.4
    assert second.wait() >= 0.5  # what it took is known all the same
    for spare in (first, second):
        spare.process.communicate("{}\n" if spare is second else None, timeout=240)
    spares.prepare()
    (third,) = spares._next
    spares.close()
    assert not psutil.pid_exists(third.process.pid)


def test_one_that_cannot_start_says_where_to_look(tmp_path: Path) -> None:
    spares = Spares([], ["-c", "raise SystemExit('no torch here')"], tmp_path / "spare.log")
    with pytest.raises(RunError, match=r"ended; see .*spare\.log"):
        spares.take()
    assert "no torch here" in (tmp_path / "spare.log").read_text()


def test_one_that_dies_is_replaced(tmp_path: Path) -> None:
    spares = Spares([], ["-c", WAITS], tmp_path / "spare.log")
    for how in ("before it is ready", "when it is"):
        spares.prepare()
        (lost,) = spares._next
        if how == "when it is":
            lost.wait()
        lost.process.kill()
        lost.process.wait()
        spares.settle()  # says nothing: no state is at fault
        taken = spares.take()
        assert taken.process.pid != lost.process.pid
        assert taken.is_alive
        taken.process.kill()
        taken.process.wait()
        with pytest.raises(RunError, match=r"ended; see .*spare\.log"):
            taken.give(tmp_path / "recipe.yaml", tmp_path / "log")
        taken.close()


def test_several_are_ahead_and_are_prepared_from_several_threads(tmp_path: Path) -> None:
    spares = Spares([], ["-c", WAITS], tmp_path / "spare.log", 3)

    def work() -> None:
        spares.prepare()
        spares.settle()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [spare.ready_s is not None for spare in spares._next] == [True] * 3
    taken = [spares.take() for _ in range(3)]
    # At the same time, not one after the other.
    assert max(s.started for s in taken) < min(s.started + s.wait() for s in taken)
    assert len({spare.process.pid for spare in taken}) == 3
    spares.prepare()
    left = [spare.process.pid for spare in spares._next]
    assert len(left) == 3
    spares.close()
    spares.prepare()  # by a state that is being ended
    assert spares._next == []
    assert not any(psutil.pid_exists(pid) for pid in left)
    for spare in taken:
        spare.close()


def test_an_end_does_not_wait_for_one_that_gets_ready(tmp_path: Path) -> None:
    sleeps = "import time; time.sleep(60)"
    spares = Spares([], ["-c", sleeps], tmp_path / "spare.log", 2)
    spares.prepare()
    waits = threading.Thread(target=spares.settle)
    waits.start()
    time.sleep(0.2)
    begun = time.monotonic()
    spares.close()
    waits.join()
    assert time.monotonic() - begun < 45.0


@pytest.mark.slow
def test_a_state_from_a_spare_trains_as_one_of_its_own(tmp_path: Path) -> None:
    settings = ["model.name=mlp", "data.source=digits", "train.batch=8", "train.steps=100",
                "train.lr=0.01", "device=cpu", "threads=1"]  # fmt: skip
    config = load_config(None, settings).config
    effort = Effort(check_steps=10)
    spares = build_spares(config, tmp_path, None)
    losses, starts = [], []
    try:
        for name, given in (("own", None), ("spare", spares), ("ready spare", spares)):
            begun = time.time()
            state = Candidate(config, name, tmp_path, effort, None, given)
            starts.append(time.time() - begun)
            state.check(effort)
            losses.append(state.losses)
            assert state.tenth_step_s is not None
            # From the process's own start: what it took to get ready is in it, also where that was before.
            assert state.tenth_step_s > (0.0 if given is None else 0.3 * starts[1])
            state.close()
    finally:
        spares.close()
    assert losses[0] == losses[1] == losses[2]
    assert starts[2] < 0.5 * starts[1]
