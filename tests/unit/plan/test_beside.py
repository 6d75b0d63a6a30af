"""What goes over the host's link, comes from storage, or is not sent at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.layout import Layout
from ridgeline.plan.beside import (
    ASSUMED_LINK,
    assumptions,
    gradient_bytes,
    host_bytes,
    with_offload,
)
from ridgeline.plan.job import Job, job_from_layout
from ridgeline.plan.known import find_model
from ridgeline.plan.machine import load_machine, machine_from_dict
from ridgeline.plan.memory import fits, predict_memory
from ridgeline.plan.search import search
from ridgeline.plan.time import parameters_of, predict_time

MODEL = find_model("1.3b")
MACHINE = load_machine("h200")


def job(text: str, batch: int = 64, **changes: Any) -> Job:
    layout = Layout.parse(f"precision=bf16,{text}")
    machine = MACHINE.replace(**{k: v for k, v in changes.items() if k != "sample_bytes"})
    return job_from_layout(
        MODEL, machine, layout, batch, sample_bytes=changes.get("sample_bytes", 0.0)
    )


@pytest.mark.parametrize(
    ("text", "offload", "bytes_saved"),
    [
        ("dp=8,zero=1", "optimizer", 12.0 / 8),
        ("dp=8,zero=2", "optimizer", 12.0 / 8),
        ("dp=8,zero=3", "params", 12.0 / 8),
        ("dp=8", "optimizer", 4.0),
    ],
)
def test_state_on_the_host_is_not_on_the_device(
    text: str, offload: str, bytes_saved: float
) -> None:
    here, away = job(text), job(f"{text},offload={offload}")
    count = parameters_of(here, 0)
    saved = predict_memory(here).held - predict_memory(away).held
    assert saved == pytest.approx(bytes_saved * count, rel=0.01)
    assert predict_time(away).optimizer == 0.0
    assert predict_time(away).seconds > predict_time(here).seconds
    assert host_bytes(away, count, MODEL.layers, 1) >= bytes_saved * count


def test_a_faster_link_costs_less_and_an_unknown_one_is_said() -> None:
    slow = job("dp=8,zero=1,offload=optimizer")
    same = job("dp=8,zero=1,offload=optimizer", host_link_bandwidth=ASSUMED_LINK)
    fast = job("dp=8,zero=1,offload=optimizer", host_link_bandwidth=400e9)
    assert predict_time(slow).host_link == predict_time(same).host_link
    assert predict_time(fast).host_link < predict_time(slow).host_link
    assert "25 GB/s" in assumptions(slow)[0]
    assert not assumptions(fast)
    assert not assumptions(job("dp=8,zero=1"))
    done = CliRunner().invoke(
        app, ["plan", "1.3b", "--machine", "h200", "--batch", "64", "--explain",
              "dp=8,zero=1,precision=bf16,offload=optimizer"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "not known" in done.output
    assert "state on the host" in done.output


def test_activations_on_the_host_leave_a_few_blocks() -> None:
    here, away = job("dp=8"), job("dp=8,offload=activations")
    kept = predict_memory(here).activations / MODEL.layers
    assert predict_memory(away).activations <= 3.01 * kept
    assert predict_time(away).host_link > 0.0
    quick = job("dp=8,offload=activations", host_link_bandwidth=1e15)
    assert predict_time(quick).host_link < 0.01 * predict_time(away).host_link


def test_a_step_is_no_faster_than_its_loader() -> None:
    plain = job("dp=8")
    assert predict_time(plain).storage == 0.0
    unknown = job("dp=8", sample_bytes=1e9)
    assert predict_time(unknown).storage == 0.0
    assert "storage" in assumptions(unknown)[0]
    bound = job("dp=8", sample_bytes=1e9, storage_bandwidth=1e9)
    assert predict_time(bound).seconds == pytest.approx(64.0)
    ample = job("dp=8", sample_bytes=1e3, storage_bandwidth=1e9)
    assert predict_time(ample).seconds == pytest.approx(predict_time(plain).seconds)
    # Two nodes read twice as fast.
    two = job("dp=16", sample_bytes=1e9, storage_bandwidth=1e9)
    assert predict_time(two).seconds == pytest.approx(32.0)


def test_fewer_gradients_are_sent() -> None:
    slow = {"inter.bandwidth": 1e9}
    every = job("dp=16", **slow)
    count = parameters_of(every, 0)
    assert gradient_bytes(every, count) == 4.0 * count
    half = job("dp=16,compress=bf16", **slow)
    assert gradient_bytes(half, count) == 2.0 * count
    low = [gradient_bytes(job(f"dp=16,compress=powersgd:{r}"), count) for r in (1, 4, 4096)]
    assert 0 < low[0] < low[1] < 0.02 * 4.0 * count
    assert low[2] == 4.0 * count
    times = [
        predict_time(j).gradients for j in (every, half, job("dp=16,compress=powersgd:4", **slow))
    ]
    assert times[0] > times[1] > times[2] > 0.0
    local = [predict_time(job(f"dp=16,sync=local:{k}", **slow)).gradients for k in (1, 4, 16)]
    assert local[0] == pytest.approx(4 * local[1]) == pytest.approx(16 * local[2])
    # On one replica there is nothing to send.
    assert predict_time(job("compress=bf16", 8)).gradients == 0.0
    assert predict_time(job("sync=local:4", 8)).gradients == 0.0


def test_offload_is_offered_where_nothing_fits() -> None:
    model, machine = find_model("llama3-8b", 2048), load_machine("a100-40g")
    found = search(model, machine, 2, 8)
    assert found.best
    assert all(planned.layout.offload in ("optimizer", "params") for planned in found.best)
    assert all(fits(planned.job, planned.memory) for planned in found.best)
    little = machine.replace(host_memory_bytes=64e9)
    assert not search(model, little, 2, 8).best  # sixteen bytes a parameter have no place there
    enough = search(model, machine, 16, 16)
    assert all(planned.layout.offload == "none" for planned in enough.best)
    assert [str(x.offload) for x in with_offload(Layout.parse("dp=8,zero=3"))] == ["params"]


def test_profiles_may_state_both_bandwidths() -> None:
    values = json.loads(json.dumps(machine_values()))
    machine = machine_from_dict({**values, "storage_bandwidth": "5e9", "host_link_bandwidth": 55e9})
    assert (machine.storage_bandwidth, machine.host_link_bandwidth) == (5e9, 55e9)
    assert machine_from_dict(values).storage_bandwidth == 0.0


def machine_values() -> dict[str, Any]:
    import yaml

    from ridgeline.plan.machine import MACHINES

    found: dict[str, Any] = yaml.safe_load((MACHINES / "h200.yaml").read_text())
    return found


def test_a_search_waits_for_the_loader() -> None:
    slow = MACHINE.replace(storage_bandwidth=1e9)
    fed = search(MODEL, slow, 8, 64, top=1).best[0]
    waits = search(MODEL, slow, 8, 64, top=1, sample_bytes=1e9).best[0]
    assert fed.time.storage == 0.0
    assert waits.seconds == pytest.approx(64.0)  # 64 GB at 1 GB/s
