"""Calibration finds what rows were made with, and says no more than they do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ridgeline.plan.calibrate import PARAMETERS, changed, fit
from ridgeline.plan.design import most_telling
from ridgeline.plan.job import Job
from ridgeline.plan.kernels import alignment, gemm_s
from ridgeline.plan.machine import load_machine
from ridgeline.plan.predict import predict
from ridgeline.plan.rows import read_row
from ridgeline.plan.time import (
    Times,
    pipeline_s,
    predict_time,
    shortest_s,
    slowest_of,
)

ROWS = Path(__file__).resolve().parents[2] / "golden" / "plan" / "rows.json"


def jobs(name: str, step: int, count: int) -> list[Job]:
    rows: list[dict[str, Any]] = json.loads(ROWS.read_text())["rows"]
    return [read_row(row).job for row in rows if row["set"] == name][::step][:count]


def test_known_parameters_are_found_again() -> None:
    chosen = jobs("vtrain_single", 5, 12)
    truth = {"device.gemm_efficiency": 1.08, "device.host_kernel_s": 1.3, "step_s": 0.5}
    seconds = [predict(changed(truth)(job)).seconds for job in chosen]
    found = fit(chosen, seconds)
    assert found["recomputed"] == found["padded_vocab"] == 1.0
    assert found["device.host_kernel_s"] == pytest.approx(1.3, rel=0.05)
    again = changed(found)
    for job, was in zip(chosen, seconds, strict=True):
        assert predict(again(job)).seconds == pytest.approx(was, rel=0.02)


def test_the_most_telling_runs_tell_about_the_others() -> None:
    """Runs that are alike say the same; the odd ones are what a parameter would be unknown without."""
    every = jobs("vtrain_multi", 1, 49)
    alike = [job for job in every if job.tp == 8 and job.pp > 1][:6]
    odd = next(job for job in every if job.tp == 1 and job.dp >= 16)
    chosen = most_telling([*alike, odd], 2)
    assert 6 in chosen
    assert len(set(chosen)) == 2
    assert sorted(most_telling([*alike, odd], 99)) == list(range(7))


def test_fits_on_the_most_telling_runs_are_better_than_on_others() -> None:
    """With times that the model can explain, parameters of which are off their shipped values."""
    every = jobs("vtrain_multi", 1, 49)
    truth = {"device.host_kernel_s": 2.0, "intra.efficiency": 0.85, "inter.efficiency": 0.7}
    seconds = [predict(changed(truth)(job)).seconds for job in every]

    def error(places: list[int]) -> float:
        found = changed(fit([every[p] for p in places], [seconds[p] for p in places]))
        rest = [p for p in range(len(every)) if p not in places]
        return sum(abs(predict(found(every[p])).seconds / seconds[p] - 1) for p in rest) / len(rest)

    chosen = error(most_telling(every, 6))
    plain = error(list(range(20, 26)))
    assert chosen < 0.02
    assert chosen < plain


def test_runs_that_recomputed_nothing_are_seen_to() -> None:
    chosen = jobs("vtrain_single", 5, 12)
    assert all(job.recompute == "full" for job in chosen)
    truth = {"recomputed": 0.0, "device.host_kernel_s": 1.3}
    seconds = [predict(changed(truth)(job)).seconds for job in chosen]
    assert fit(chosen, seconds)["recomputed"] == 0.0


def test_devices_of_two_kinds_are_told_apart() -> None:
    """What is off on one of them is not put on the other."""
    first = jobs("megatron_sc21_table1", 1, 6)
    h100 = load_machine("h100")
    second = [job.replace(machine=h100) for job in first]
    truth = {"device.gemm_efficiency@H100-SXM5-80GB": 0.9}
    every = [*first, *second]
    seconds = [predict(changed(truth)(job)).seconds for job in every]
    assert seconds[:6] == [predict(job).seconds for job in first]
    found = fit(every, seconds)
    names = [name for name in found if "@" in name]
    assert names == [f"device.gemm_efficiency@{m.device.name}" for m in (first[0].machine, h100)]
    assert found[names[1]] / found[names[0]] < 0.97
    again = changed(found)
    for job, was in zip(every, seconds, strict=True):
        assert predict(again(job)).seconds == pytest.approx(was, rel=0.03)
    assert not any("@" in name for name in fit(first, seconds[:6]))
    # In whatever order: bounds are those of the product.
    both = {"device.gemm_efficiency": 1.2, "device.gemm_efficiency@H100-SXM5-80GB": 0.9}
    turned = dict(reversed(both.items()))
    was = h100.device.gemm_efficiency
    for values in (both, turned):
        assert changed(values)(second[0]).machine.device.gemm_efficiency == pytest.approx(
            1.08 * was
        )


def test_one_wild_row_does_not_bend_the_rest() -> None:
    chosen = jobs("vtrain_multi", 12, 4)
    seconds = [predict(job).seconds for job in chosen]
    seconds[1] *= 2.0
    found = changed(fit(chosen, seconds))
    for index in (0, 2, 3):
        assert predict(found(chosen[index])).seconds == pytest.approx(seconds[index], rel=0.03)


def test_factors_stay_in_bounds_however_far_the_rows_are() -> None:
    chosen = jobs("vtrain_multi", 20, 2)
    found = changed(fit(chosen, [0.01 * predict(job).seconds for job in chosen]))
    for job in map(found, chosen):
        for name, parameter in PARAMETERS.items():
            value: Any = job if name.startswith("software.") else job.machine
            for part in name.split("."):
                value = getattr(value, part)
            assert value == 0 or parameter.low <= value <= parameter.high * (1 + 1e-9), name


def test_the_quick_pipeline_follows_the_played_one() -> None:
    job = next(job for job in jobs("vtrain_multi", 1, 49) if job.pp >= 8)
    seen: list[float] = []

    def ratio(job: Job, forward: Times, backward: Times) -> float:
        seen.append(pipeline_s(job, forward, backward) / shortest_s(job, forward, backward))
        return 1.0

    for factor in (1.0, 1.05):
        predict_time(changed({"device.gemm_efficiency": factor})(job), ratio)
    assert 0.9 < seen[0] < 1.3
    assert seen[1] == pytest.approx(seen[0], rel=0.01)


def test_rows_that_do_not_start_at_16_bytes_are_slow() -> None:
    device = load_machine("selene").device
    assert alignment(2.0, 50304, 2048) == 1.0
    assert alignment(2.0, 50257, 2048) < alignment(2.0, 50258, 2048) < alignment(2.0, 50260) < 1.0
    assert alignment(4.0, 50260) == 1.0
    aligned, odd = gemm_s(device, 4096, 50304, 2048), gemm_s(device, 4096, 50257, 2048)
    assert 2.0 < odd / aligned < 4.0
    # Of a weight's gradient, the number of tokens is no row's width.
    assert gemm_s(device, 50304, 2048, 4095, 1, "bf16", True) < 1.1 * gemm_s(
        device, 50304, 2048, 4096, 1, "bf16", True
    )


def test_more_devices_wait_longer_for_the_slowest() -> None:
    assert slowest_of(1) == 0.0
    assert slowest_of(8) == pytest.approx(1.42, abs=0.02)
    assert slowest_of(1024) == pytest.approx(3.24, abs=0.03)
    job = jobs("vtrain_multi", 1, 1)[0]
    parts = [
        predict_time(job.replace(dp=n)).stragglers / predict_time(job).products for n in (2, 64)
    ]
    assert parts[0] < parts[1]
    still = job.replace(machine=job.machine.replace(skew=0.0))
    assert predict_time(still).stragglers == 0.0
    assert math.isclose(
        predict_time(job).seconds - predict_time(job).stragglers, predict_time(still).seconds
    )
