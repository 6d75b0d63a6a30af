"""A simulated job put together: what is hidden, what a schedule makes of it, what is refused and shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.config import find_recipe, load_config
from ridgeline.errors import UsageError
from ridgeline.layout import Layout
from ridgeline.plan.machine import load_machine
from ridgeline.plan.network import Group, collective_s, point_to_point_s
from ridgeline.plan.recipe import predict_recipe
from ridgeline.plan.search import scale
from ridgeline.plan.transformer import Transformer
from ridgeline.scaling.curves import draw_scaling, efficiencies
from ridgeline.scaling.measured import RankMeasured, Traffic
from ridgeline.scaling.show import memory_rows, show_simulated, time_rows, to_dict
from ridgeline.scaling.simulate import (
    Asked,
    Simulated,
    _by_place,
    _parts,
    _play,
    _with_schedule,
    check_asked,
)

MACHINE = load_machine("h200")


def measured(**changes: Any) -> RankMeasured:
    usual = RankMeasured(
        rank=0, stage=0, asked_stage=0, device_kind="cpu", device_name="CPU", step_s=1.0,
        steps_s=(1.0,), optimizer_s=0.1, backward_s=0.5, build_s=1.0, weights_bytes=100,
        gradients_bytes=100, optimizer_bytes=200, host_bytes=0, held_bytes=300, step_bytes=500,
        allocated_bytes=None, reserved_bytes=None, device_memory_bytes=10**9,
    )  # fmt: skip
    return replace(usual, **changes)


def test_what_runs_beside_backward_is_hidden_as_far_as_there_is_room() -> None:
    size = 4 * 10**9
    seconds = collective_s(MACHINE, "all_reduce", size, Group(64, 8))
    machine = MACHINE.replace(overlap_cost=0.3)
    for beside, room, exposed in ((True, 2.0, 0.3), (True, 0.5, 0.5), (False, 2.0, 1.0)):
        traffic = Traffic("gradients", "all_reduce", size, 1, 64, 8, beside)
        rank = measured(traffic=(traffic,), backward_s=room * seconds)
        (part,) = _parts(rank, Layout(dp=64), machine)
        assert part.seconds == pytest.approx(seconds)
        assert part.exposed_s == pytest.approx(exposed * seconds)
        assert (part.num_bytes, part.num_calls) == (size, 1)


def test_calls_are_priced_by_the_links_they_go_over() -> None:
    near = Traffic("tensor", "all_reduce", 10**6, 4, 8, 8, False)
    far = Traffic("tensor", "all_reduce", 10**6, 4, 8, 1, False)
    inside, across = (
        _parts(measured(traffic=(one,)), Layout(tp=8), MACHINE)[0].seconds for one in (near, far)
    )
    assert inside == pytest.approx(4 * collective_s(MACHINE, "all_reduce", 10**6, Group(8, 8)))
    assert across > inside


def place(stage: int, forward: float, traffic: tuple[Traffic, ...] = ()) -> RankMeasured:
    kinds = ("first", "middle", "middle", "last")
    return measured(
        rank=stage, stage=stage, forward_s=(forward,), backward_chunk_s=(2 * forward,),
        step_s=8 * 3 * forward + 0.2, optimizer_s=0.1, traffic=traffic, stage_kinds=kinds,
    )  # fmt: skip


def test_stages_are_played_with_their_own_times() -> None:
    layout = Layout(pp=4, microbatches=8)
    even = _by_place([place(0, 1.0), place(1, 1.0), place(3, 1.0)], layout)
    assert [m.stage for m in even] == [0, 1, 1, 3]
    compute, bubble, inside = _play(even, layout, MACHINE)
    assert compute == pytest.approx(8 * 3 + 0.2)
    assert bubble == pytest.approx(3 * 3)  # (p - 1) (F + B)
    assert inside == 0
    slow = _by_place([place(0, 1.0), place(1, 1.0), place(3, 2.0)], layout)
    compute, bubble, _ = _play(slow, layout, MACHINE)
    assert compute == pytest.approx(8 * 6 + 0.2)
    assert bubble == pytest.approx(3 * 3)


def test_sends_and_what_stages_send_inside_have_their_own_lines() -> None:
    layout = Layout(tp=2, pp=4, microbatches=8)
    send = Traffic("stages", "send", 10**9, 8, 2, 1, False)
    tensor = Traffic("tensor", "all_reduce", 10**8, 64, 2, 2, False)
    places = _by_place([place(s, 1.0, (send, tensor)) for s in (0, 1, 3)], layout)
    _, bubble, inside = _play(places, layout, MACHINE)
    one = point_to_point_s(MACHINE, 10**9, True)
    assert bubble > 9 + 6 * one
    extra = 64 * collective_s(MACHINE, "all_reduce", 10**8, Group(2, 2))
    assert inside >= extra
    parts = {p.name: p for p in _with_schedule(_parts(places[0], layout, MACHINE), inside)}
    assert parts["tensor"].exposed_s == pytest.approx(inside)
    assert parts["stages"].exposed_s == 0.0


def test_a_zero_bubble_pipeline_waits_less() -> None:
    found = {}
    for schedule in ("1f1b", "zerobubble"):
        layout = Layout(pp=4, microbatches=8, schedule=schedule)
        places = [place(s, 1.0) for s in range(4)]
        if schedule == "zerobubble":
            places = [replace(m, backward_chunk_s=(1.0,), weight_s=(1.0,)) for m in places]
        found[schedule] = _play(places, layout, MACHINE)
    assert found["zerobubble"][0] == pytest.approx(found["1f1b"][0])
    assert found["zerobubble"][1] < found["1f1b"][1]


@pytest.mark.parametrize(
    ("layout", "world", "more", "words"),
    [
        ("tp=3", 8, {}, "needs a multiple of 3 processes"),
        ("compress=bf16", 8, {}, "leave compress out"),
        ("precision=fp16", 8, {}, "use precision=bf16"),
        ("pp=2,microbatches=2", 8, {"stage": 2}, "--stage 2 of pp=2"),
        ("dp=8", 8, {"rank": 8}, "--rank 8 of 8 ranks"),
        ("dp=8", 8, {"rank": 1, "stage": 0}, "leave one of them out"),
        ("sync=async", 8, {}, "sync"),
        ("auto", 8, {}, "chosen when"),
    ],
)
def test_what_cannot_be_simulated_is_said_first(
    layout: str, world: int, more: dict[str, int], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        check_asked(Asked(layout, world, MACHINE, **more))


def simulated(**changes: Any) -> Simulated:
    config = load_config(find_recipe("llama-text"), []).config
    layout = Layout(dp=8, zero=1)
    m = measured(traffic=(Traffic("gradients", "reduce_scatter", 10**6, 1, 8, 8, False),))
    usual = Simulated(
        layout=layout, machine=MACHINE, world_size=8, ranks=(m,), shown=m, compute_s=m.step_s,
        parts=tuple(_parts(m, layout, MACHINE)), bubble_s=0.0,
        predicted=predict_recipe(config, MACHINE, layout), why_not="",
    )  # fmt: skip
    return replace(usual, **changes)


def test_the_peak_of_compiled_code_is_not_compared_where_nobody_counts() -> None:
    for compiles in (False, True):
        found = simulated(layout=Layout(dp=8, zero=1, compile=compiles))
        said = memory_rows(found, found.shown)[-1][2]
        assert (said is None) == compiles
        assert ("of compiled code" in "\n".join(show_simulated(found))) == compiles


def test_what_is_shown() -> None:
    found = simulated()
    rows = {name: (here, said) for name, here, said in time_rows(found)}
    assert rows["step"][0] == pytest.approx(1.0 + found.parts[0].seconds)
    assert rows["step"][1] == pytest.approx(found.predicted.seconds)  # type: ignore[union-attr]
    names = [name for name, _, _ in memory_rows(found, found.shown)]
    assert names[-1] == "peak, by its tensors"
    text = "\n".join(show_simulated(found))
    assert "rank 0 of 8 in dp=8,zero=1" in text
    assert "times are not compared" in text  # a CPU here, an H200 there
    assert "reducing gradients" in text
    assert "a CPU keeps no count of its own" in text
    on_gpu = measured(
        device_kind="cuda", device_name="NVIDIA H200", allocated_bytes=700, reserved_bytes=900
    )
    text = "\n".join(show_simulated(simulated(ranks=(on_gpu,), shown=on_gpu)))
    assert "times are not compared" not in text
    assert "peak reserved" in text
    assert json.loads(json.dumps(to_dict(found)))["memory"][0]["here"] == 100
    none = show_simulated(simulated(predicted=None, why_not="it is a forest"))
    assert "no prediction: it is a forest" in none


def test_curves_are_drawn(tmp_path: Path) -> None:
    tiny = Transformer("tiny", 2, 64, 4, 256, 64, 512)
    rows = {weak: scale(tiny, MACHINE, [1, 2], 16, "bf16", weak) for weak in (True, False)}
    assert efficiencies(rows[True])[0] == (1, 1.0)
    picture = draw_scaling(rows[True], [*rows[False], (4, None)], "tiny & small")
    assert picture.count("<circle") == 2 + 2 * 4
    assert "tiny &amp; small" in picture
    assert "nothing fits" in draw_scaling([(1, None)], [(1, None)], "none")

    out = tmp_path / "curves.svg"
    call = ["plan", "1m", "--machine", "h200", "--batch", "16", "--seq", "64"]
    done = CliRunner().invoke(app, [*call, "--scale", "1..2", "--picture", str(out)])
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8").startswith("<svg")
    alone = CliRunner().invoke(app, [*call, "--picture", str(out)])
    assert isinstance(alone.exception, UsageError)
    assert "--scale" in str(alone.exception)


def test_memory_that_a_step_gives_back_is_counted_while_it_has_it() -> None:
    """FSDP2 takes storages' memory away between steps, and back without an operation."""
    torch = pytest.importorskip("torch")
    from ridgeline.scaling.watch import StepWatch

    gathered = torch.zeros(1000)
    gathered.untyped_storage().resize_(0)
    watch = StepWatch(lambda: "")
    with watch:
        gathered.untyped_storage().resize_(4000)
        gathered.zero_()
        gathered.untyped_storage().resize_(0)
        made = [torch.ones(250) for _ in range(3)]
    assert watch.peak_bytes == 4000
    with watch:
        made += [torch.ones(250) for _ in range(3)]
    assert watch.peak_bytes == 6000


def test_what_compiling_left_behind_has_no_memory() -> None:
    """Its tensors say that they are on a device, with sizes that are symbols; they hold nothing."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from ridgeline.scaling.watch import StepWatch

    def twice(x: Any) -> Any:
        return 2 * x

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    left = mode.from_tensor(torch.ones(5, 3))
    assert left.device.type == "cpu"
    assert not isinstance(left.untyped_storage().nbytes(), int)
    watch = StepWatch(lambda: "")
    with watch:
        made = twice(torch.ones(250))
    assert made.numel() == 250
    assert type(watch.peak_bytes) is int
    assert watch.peak_bytes == 2000
