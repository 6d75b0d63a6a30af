"""The kernel that updates all weights, beside the plain arithmetic. Skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ridgeline.optim.narrow import Kernels, Numbers, Row, can_use_kernels, update_plainly
from ridgeline.optim.update import _norm_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]
WIDE, NARROW = torch.float32, torch.bfloat16
LENGTHS = (1, 2047, 2048, 2049, 70_001)
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def build_rows(kind: str, grad: torch.dtype, begin: int) -> list[Row]:
    """Every tensor starts `begin` elements into its memory."""
    torch.manual_seed(0)

    def make(length: int, dtype: torch.dtype) -> Tensor:
        return torch.rand(length + begin).to("cuda", dtype)[begin:]

    rows = []
    for number, length in enumerate(LENGTHS):
        wide = make(length, NARROW if kind == "chance" else WIDE)
        moments = make(length, WIDE), make(length, WIDE)
        narrow = wide.to(NARROW) if kind == "master" else None
        rows.append(Row(wide, make(length, grad), *moments, narrow, seed=1 + 7919 * number))
    return rows


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("grad", [WIDE, NARROW])
@pytest.mark.parametrize("kind", ["master", "chance", "plain"])
def test_the_kernel_updates_as_the_plain_arithmetic(
    kind: str, grad: torch.dtype, begin: int
) -> None:
    found, true = (build_rows(kind, grad, begin) for _ in range(2))
    assert can_use_kernels(found[0])
    numbers, divisor = Numbers.of(GROUP, 3.0), torch.tensor(2.5, device="cuda")
    Kernels().update(found, numbers, divisor)
    for row in true:
        update_plainly(row, numbers, divisor)
    for row, other in zip(found, true, strict=True):
        torch.testing.assert_close(row.mean, other.mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(row.square, other.square, rtol=1e-6, atol=1e-7)
        if kind == "chance":  # the last bit of the sum may carry into another neighbour
            assert float((row.wide != other.wide).float().mean()) < 1e-3
            torch.testing.assert_close(row.wide, other.wide, rtol=2**-7, atol=0)
        else:
            torch.testing.assert_close(row.wide, other.wide, rtol=1e-6, atol=1e-7)
        if kind == "master":
            assert row.narrow is not None
            assert torch.equal(row.narrow, row.wide.to(NARROW))


def test_norms_of_two_types_are_one_norm() -> None:
    gradients = [torch.rand(1000, device="cuda").to(dtype) for dtype in (WIDE, NARROW, WIDE)]
    true = torch.cat([g.double() for g in gradients]).norm()
    assert float(_norm_of(gradients)) == pytest.approx(float(true), rel=1e-5)
