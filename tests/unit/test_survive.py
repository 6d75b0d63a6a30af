"""The rules by which a run is kept alive, without processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline.errors import RunError
from ridgeline.launch.failures import RankFailure, first_failure, read_failures, write_failure
from ridgeline.launch.fit import fit_layout
from ridgeline.launch.restart import Failed, bad_slot, why_elsewhere, why_give_up
from ridgeline.layout import Layout
from ridgeline.rundir import RunDir
from ridgeline.train import signals
from ridgeline.train.hang import Account, main_thread, table, tell
from ridgeline.train.pulse import RankPace
from ridgeline.train.stragglers import WINDOW, Stragglers, find_stragglers


def test_a_closed_terminal_ends_nothing() -> None:
    """`ridgeline train | head`: what is said after the pipe has ended goes nowhere."""
    code = (
        "from ridgeline.errors import say; [say('x' * 9999) for _ in range(99)]; open('done', 'w')"
    )
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(60) == 0, said
        assert (Path(folder) / "done").exists()
        assert not said


@pytest.mark.parametrize(
    ("text", "batch", "num_ranks", "fitted"),
    [
        ("dp=4", 32, 4, "dp=4"),
        ("dp=4", 32, 3, "dp=2,accumulate=2"),
        ("dp=4", 36, 3, "dp=3,accumulate=2"),  # 12 in two parts of 6: not more than 9 at a time
        ("dp=4,accumulate=3", 24, 2, "dp=2,accumulate=6"),
        ("dp=8,zero=3,shard=4", 64, 6, "dp=4,zero=3,shard=4,accumulate=2"),
        ("dp=8,zero=3,shard=4", 48, 6, "dp=6,zero=3,shard=3,accumulate=2"),
        ("dp=2,tp=2", 8, 3, "dp=1,tp=2,accumulate=2"),
        ("dp=2,pp=2,microbatches=2", 16, 3, "dp=1,pp=2,microbatches=4"),
        ("tp=4", 8, 3, None),
    ],
)
def test_a_layout_fits_fewer_ranks(text: str, batch: int, num_ranks: int, fitted: str) -> None:
    found = fit_layout(Layout.parse(text), batch, num_ranks)
    assert found == (Layout.parse(fitted) if fitted else None)


KILLED = Failed(rank=1, slot=1, step=7, checkpoint="step-5")


@pytest.mark.parametrize(
    ("history", "times", "word"),
    [
        ([KILLED], None, None),
        ([replace(KILLED, checkpoint="")], None, ""),  # nothing to go on from, nobody asked
        ([replace(KILLED, checkpoint="")], 2, None),
        ([KILLED], 0, ""),
        ([KILLED, replace(KILLED, step=9)], None, None),
        ([KILLED, KILLED], None, "twice after step 7"),
        ([KILLED, replace(KILLED, checkpoint="step-6")], None, None),
        ([replace(KILLED, step=None)], None, None),
        ([replace(KILLED, step=None)] * 2, None, "before its first step"),
        ([replace(KILLED, step=step) for step in (6, 7, 8, 9)], None, "3 times since"),
        (
            [replace(KILLED, step=6), replace(KILLED, step=7)]
            + [replace(KILLED, step=s, checkpoint="step-8") for s in (8, 9, 10)],
            None,
            None,  # the count starts anew with a checkpoint
        ),
    ],
)
def test_whether_to_start_again(history: list[Failed], times: int | None, word: str | None) -> None:
    said = why_give_up(history, times)
    assert (said is None) == (word is None)
    assert (word or "") in (said or "")


def test_a_slot_is_bad_when_it_fails_twice_or_is_lost() -> None:
    assert bad_slot([KILLED]) is None
    assert bad_slot([KILLED, replace(KILLED, slot=0)]) is None
    assert bad_slot([KILLED, replace(KILLED, step=9)]) == 1
    assert bad_slot([replace(KILLED, lost=True)]) == 1


def test_an_account_that_finds_no_room_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write)
    write_failure(tmp_path, 0, 1.0, RunError("the disk is full"), "trace of it")
    assert capsys.readouterr().err == "the disk is full\n"
    write_failure(tmp_path, 0, 1.0, ValueError("odd"), "trace of it")
    assert capsys.readouterr().err == "trace of it\n"


def test_a_decisive_account_wins_over_earlier_ones(tmp_path: Path) -> None:
    write_failure(tmp_path, 0, 1.0, ValueError("earlier"), "trace")
    write_failure(tmp_path, 2, 2.0, RunError("rank 2 stopped answering"), "", 7, decisive=True)
    cause = first_failure(read_failures(tmp_path))
    assert cause == RankFailure(2, 2.0, "rank 2 stopped answering", step=7, decisive=True)


WAITING = Account(
    0, "a", 10, 0, 14, "gradient exchange", 5.0, "gloo:all_reduce of [36], number 4 of group x"
)


def test_a_missing_rank_is_named() -> None:
    others = [replace(WAITING, rank=rank) for rank in (0, 1, 3)]
    said, culprit = tell(others, 4, 5.0)
    assert culprit == 2
    assert said == (
        "rank 2 stopped answering at step 14; ranks 0, 1, 3 wait for it in gloo:all_reduce of [36]"
    )
    assert "missing: wrote nothing" in table(others, 4)


def test_ranks_that_wait_in_different_places_are_told_apart() -> None:
    other = replace(WAITING, rank=1, collective="gloo:broadcast of [2], number 5 of group x")
    said, _ = tell([WAITING, other], 2, 5.0)
    assert said == (
        "all ranks wait for one another at step 14; rank 0 waits in gloo:all_reduce of [36]; "
        "rank 1 waits in gloo:broadcast of [2]"
    )


def test_a_rank_in_its_own_code_is_to_blame() -> None:
    stack = ['  File "/home/me/data.py", line 31, in fetch\n    read()\n']
    stuck = replace(WAITING, rank=1, phase="data", collective="", stack=stack)
    said, culprit = tell([WAITING, stuck], 2, 5.0)
    assert culprit == 1
    assert said.startswith(
        "rank 1 made no progress for 5 s at step 14 in data (data.py:31 in fetch)"
    )
    assert json.loads(json.dumps(asdict(stuck)))["stack"] == stack


def test_the_main_thread_is_taken_from_a_dump() -> None:
    dump = (
        'Thread 0x1 (most recent call first):\n  File "t.py", line 1 in wait\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "a.py", line 5 in inner\n  File "b.py", line 9 in outer\n'
    )
    assert main_thread(dump) == ['File "a.py", line 5 in inner', 'File "b.py", line 9 in outer']


def pace(rank: int, data: float, compute: float, comm: float) -> RankPace:
    return RankPace(rank, 10, data + compute + comm, data, compute, comm)


@pytest.mark.parametrize(
    ("paces", "found"),
    [
        ([pace(0, 0, 1, 1), pace(1, 0, 1, 1), pace(2, 0, 2, 0)], [(2, "compute")]),
        ([pace(0, 0, 1, 1), pace(1, 1, 1, 0)], [(1, "data")]),
        ([pace(0, 0, 1, 0.9), pace(1, 0, 1.1, 0.8)], [(-1, "network")]),
        ([pace(0, 0, 1, 0.1), pace(1, 0, 1.05, 0.05)], []),
    ],
)
def test_what_slows_a_step(paces: list[RankPace], found: list[tuple[int, str]]) -> None:
    assert [(f.rank, f.part) for f in find_stragglers([paces] * 3)] == found


def test_a_straggler_is_told_once(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "own")
    stragglers = Stragglers(2, run)
    slow = [pace(0, 0, 0.1, 0.1), pace(1, 0.1, 0.1, 0)]
    lines = [line for n in range(3 * WINDOW) for line in stragglers.after(10 + n, slow)]
    assert lines == [
        "straggler: rank 1 needs 200 ms a step of its own, the others 100 ms; it is data, and costs 50%"
    ]
    (event,) = run.events()
    assert (event.event, event.details["rank"], event.details["part"]) == ("straggler", 1, "data")


def test_waiting_for_other_stages_is_no_work_of_ones_own(tmp_path: Path) -> None:
    """Both take as long as the step; the stage with twice as much to do holds the other up."""
    run = RunDir.create(tmp_path, "own")
    stragglers = Stragglers(2, run, stage_of=lambda rank: rank)
    paces = [RankPace(0, 10, 0.3, 0.0, 0.1, 0.0, 0.2), RankPace(1, 10, 0.3, 0.0, 0.2, 0.0, 0.1)]
    lines = [line for n in range(2 * WINDOW) for line in stragglers.after(10 + n, paces)]
    assert lines == [
        "straggler: rank 1 needs 200 ms a step of its own, the others 100 ms; it is compute in stage 1 of "
        "the pipeline, and costs 33%"
    ]
    (event,) = run.events()
    assert (event.details["part"], event.details["stage"]) == ("compute", 1)


def test_in_a_pipeline_ranks_are_compared_with_those_of_their_stage() -> None:
    """Ranks 0 to 3 have a stage with less work than that of 4 to 7, which is nobody's fault."""
    paces = [
        RankPace(rank, 10, 0.3, 0.0, own, 0.0, 0.3 - own)
        for rank, own in enumerate([0.1] * 4 + [0.2] * 4)
    ]
    assert not find_stragglers([paces] * 3, lambda rank: rank // 4)
    paces[1] = RankPace(1, 10, 0.3, 0.0, 0.17, 0.0, 0.13)
    (found,) = find_stragglers([paces] * 3, lambda rank: rank // 4)
    assert (found.rank, found.others_s) == (1, 0.1)


def test_what_was_decided_about_a_rank_is_not_overwritten_by_it(tmp_path: Path) -> None:
    from ridgeline.launch.failures import read_failures, write_failure

    write_failure(tmp_path, 1, 1.0, RuntimeError("rank 1 hangs"), "", decisive=True)
    write_failure(tmp_path, 1, 2.0, ConnectionError("lost its peer"), "")
    (kept,) = read_failures(tmp_path)
    assert kept.decisive
    assert "rank 1 hangs" in kept.message


def test_only_work_that_got_on_is_worth_other_nodes() -> None:
    gone = "host n2 did not answer"
    lost = Failed(rank=2, slot=2, step=40, checkpoint="step-20", node_gone=gone)
    refused = Failed(
        rank=2, slot=2, step=None, checkpoint="step-20", node_gone="2 of 4 were started"
    )
    other = Failed(rank=1, slot=1, step=40, checkpoint="step-20")
    assert why_elsewhere([lost, refused, refused]) == gone
    assert why_elsewhere([refused, refused]) == ""
    assert why_elsewhere([other, other]) == ""


def test_a_queue_that_gives_the_same_dead_node_again_is_asked_a_few_times_more() -> None:
    """Schedulers take minutes to see that a node is gone."""
    said = "1 of 2 ranks were started (nothing was heard from node2)"
    refused = Failed(rank=1, slot=1, step=None, checkpoint="step-20", node_gone=said)
    assert [why_elsewhere([refused], times) for times in range(7)] == ["", *[said] * 4, "", ""]


def test_a_forwarded_signal_that_comes_late_is_the_same_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A busy launcher passes on what the rank has heard from the scheduler itself."""
    clock, ended = SimpleNamespace(now=100.0), []
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(signals, "os", SimpleNamespace(_exit=ended.append))
    requests = signals.Requests()
    for later, exits in ((0.0, []), (2.5, []), (2.0, []), (1.0, [75])):
        clock.now += later
        requests.hear(signal.SIGTERM, lambda: None)
        assert requests.stop == "SIGTERM"
        assert ended == exits
