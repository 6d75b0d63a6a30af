"""Kernels and collectives: rooflines, cliffs, and what rings must cost."""

from __future__ import annotations

import pytest

from ridgeline.plan.kernels import flash_s, gemm_s, moved_s
from ridgeline.plan.machine import load_machine
from ridgeline.plan.network import (
    Group,
    collective_s,
    group_of,
    point_to_point_s,
    ring_attention_s,
)

SELENE = load_machine("selene")
DEVICE = SELENE.device


def rate(m: int, n: int, k: int) -> float:
    return 2.0 * m * n * k / gemm_s(DEVICE, m, n, k, 1, "fp16")


def test_large_products_reach_what_is_reported_of_the_a100() -> None:
    assert 220e12 < rate(8192, 8192, 8192) < 270e12


def test_no_product_beats_peak_or_memory() -> None:
    for m, n, k in ((64, 64, 64), (2048, 96, 2048), (4096, 4096, 128), (16384, 4096, 4096)):
        seconds = gemm_s(DEVICE, m, n, k, 1, "fp16")
        assert seconds >= 2.0 * m * n * k / 312e12
        assert seconds >= 2.0 * (m * k + k * n + m * n) / 2039e9


def test_a_wave_too_many_is_a_cliff() -> None:
    # 108 multiprocessors: 27 x 4 tiles of 256 x 128 fill them once.
    full, over = rate(27 * 256, 4 * 128, 8192), rate(28 * 256, 4 * 128, 8192)
    assert over < 0.95 * full


def test_small_products_cost_a_start() -> None:
    assert gemm_s(DEVICE, 16, 16, 16, 1, "fp16") >= DEVICE.kernel_s


def test_moving_bytes_is_linear_beyond_the_start() -> None:
    one, two = moved_s(DEVICE, 1e9), moved_s(DEVICE, 2e9)
    assert two - one == pytest.approx(1e9 / (2039e9 * DEVICE.memory_efficiency))


def test_fused_attention_halves_for_causal_and_likes_length() -> None:
    full = flash_s(DEVICE, 1, 32, 8192, 8192, 128, False, "bf16", False)
    causal = flash_s(DEVICE, 1, 32, 8192, 8192, 128, True, "bf16", False)
    assert causal == pytest.approx(full / 2, rel=0.05)
    short = flash_s(DEVICE, 16, 32, 512, 512, 128, True, "bf16", False)
    assert short / (16 * 512**2) > causal / 8192**2


def test_all_reduce_is_a_gather_and_a_scatter() -> None:
    group = Group(8, 8)
    both = sum(collective_s(SELENE, kind, 1e9, group) for kind in ("all_gather", "reduce_scatter"))
    assert collective_s(SELENE, "all_reduce", 1e9, group) == pytest.approx(both, rel=0.01)


def test_all_reduce_matches_reported_bus_bandwidth() -> None:
    # 1 GiB over eight A100 of a DGX: 229 GB/s are reported.
    seconds = collective_s(SELENE, "all_reduce", 2**30, Group(8, 8))
    assert 2**30 * 1.75 / seconds == pytest.approx(229e9, rel=0.03)


def test_groups_that_share_a_node_share_its_nics() -> None:
    alone = collective_s(SELENE, "all_reduce", 1e9, Group(16, 8))
    one_each = collective_s(SELENE, "all_reduce", 1e9, Group(16, 1))
    assert one_each > 3 * alone


def test_stride_decides_who_shares_a_node() -> None:
    assert group_of(SELENE, 8, 1) == Group(8, 8)
    assert group_of(SELENE, 16, 4) == Group(16, 2, 4)
    assert group_of(SELENE, 16, 8).nodes == 16


def test_nothing_is_sent_alone() -> None:
    assert collective_s(SELENE, "all_reduce", 1e9, Group(1, 1)) == 0.0
    assert ring_attention_s(SELENE, 1e6, 1, 1, 1e-3) == 0.0


def test_nodes_of_one_device() -> None:
    single = SELENE.replace(devices_per_node=1)
    seconds = collective_s(single, "all_reduce", 1e9, group_of(single, 8, 1))
    assert seconds > collective_s(SELENE, "all_reduce", 1e9, group_of(SELENE, 8, 1))


def test_between_nodes_is_slower_than_inside() -> None:
    assert point_to_point_s(SELENE, 1e8, True) > 3 * point_to_point_s(SELENE, 1e8, False)
