"""Ranks act on what one of them was asked, all after the same step, and without waiting for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from ridgeline.launch.env import read_rank_env
from ridgeline.layout import Layout
from ridgeline.parallel.mesh import build_mesh
from ridgeline.train.clock import HostClock
from ridgeline.train.pulse import MOST_STEPS, Pulse
from ridgeline.train.signals import Requests, listening


@dataclass(frozen=True)
class Result:
    """What a pulse looks at of a step."""

    times: Any


def one_step(clock: HostClock, seconds: float) -> Result:
    time.sleep(seconds)
    clock.mark("forward_s")
    return Result(clock.end_step())


def steps_until_stop(asked: int, step_s: float) -> tuple[int, str, int, list[int]]:
    """Rank `asked` is sent a signal in step 3; returns the step all stopped after."""
    env = read_rank_env()
    mesh = build_mesh(env, Layout(dp=env.world_size), torch.device("cpu"))
    clock, seen = HostClock(), []
    with listening(Requests()) as requests:
        pulse = Pulse(mesh, requests)
        for step in range(1, 1000):
            if step == 3 and env.rank == asked:
                os.kill(os.getpid(), signal.SIGUSR1)
            beat = pulse.after(one_step(clock, step_s))  # type: ignore[arg-type]
            if beat.ranks:
                seen.append(len(beat.ranks))
            if beat.stop:
                pulse.close()
                return step, beat.stop, pulse._every, seen
    raise AssertionError("nobody stopped")


def test_all_ranks_stop_after_the_same_step(ranks: Any) -> None:
    told = ranks(3, steps_until_stop, 1, 0.01)
    assert len({step for step, *_ in told}) == 1
    assert {stop for _, stop, *_ in told} == {"SIGUSR1"}
    assert {counts[-1] for *_, counts in told} == {3}


def test_one_process_stops_at_once(ranks: Any) -> None:
    ((step, stop, _, _),) = ranks(1, steps_until_stop, 0, 0.01)
    assert (step, stop) == (3, "SIGUSR1")


def exchanges(num_steps: int, step_s: float) -> int:
    """How many exchanges so many steps had."""
    env = read_rank_env()
    mesh = build_mesh(env, Layout(dp=env.world_size), torch.device("cpu"))
    clock, pulse = HostClock(), Pulse(mesh, Requests())
    beats = [pulse.after(one_step(clock, step_s)) for _ in range(num_steps)]  # type: ignore[arg-type]
    pulse.close()
    return sum(bool(beat.ranks) for beat in beats)


def test_quick_steps_are_exchanged_rarely(ranks: Any) -> None:
    counts = ranks(2, exchanges, 5 * MOST_STEPS, 0.0)
    assert len(set(counts)) == 1
    assert 5 <= counts[0] < 20


def signals_in_a_thread() -> bool:
    """Elsewhere than in the main thread there is nothing to install, and nothing breaks."""
    found = []

    def enter() -> None:
        with listening(Requests()) as requests:
            found.append(requests.stop)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found == [""] and signal.getsignal(signal.SIGUSR1) != signal.SIG_IGN


def test_handlers_are_put_back(ranks: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with listening(Requests()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert ranks(1, signals_in_a_thread) == [True]
