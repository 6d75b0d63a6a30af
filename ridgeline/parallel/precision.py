"""What type the arithmetic is done in: autocast, loss scaling, TF32.

Parameters stay in their own type; this says how products are computed. Called by `train/setup.py` and
`ridgeline.start`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ridgeline.parallel.grouped import teach_autocast

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Types that products are computed in, by the name of the precision; others use the parameters' own. In
fp8 it is the type of everything that is no linear layer of a block (`float8.py`)."""


class Scaler(torch.amp.GradScaler):
    """Torch's, for optimizers of which some parameters are shards in torch's sense and others plain (its
    kernel takes no two kinds); it tells whether the last update was left out, and its scale may be
    `fixed`."""

    def __init__(self, device: str, *, fixed: float = 0.0, **options: Any) -> None:
        super().__init__(device, **({"init_scale": fixed} if fixed else options))
        self._is_fixed = bool(fixed)
        self._found: list[Tensor] = []

    def update(self, new_scale: float | Tensor | None = None) -> None:
        states = self._per_optimizer_states.values()
        self._found = [one for state in states for one in state["found_inf_per_device"].values()]
        super().update(self.get_scale() if self._is_fixed else new_scale)

    @property
    def overflowed(self) -> bool:
        """Whether a gradient of the last update was no number; the host waits for the answer."""
        return any(bool(one) for one in self._found)

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = {}
        for wanted in (True, False):
            groups = [
                {"params": [p for p in group["params"] if isinstance(p, DTensor) is wanted]}
                for group in optimizer.param_groups
            ]
            some = SimpleNamespace(param_groups=groups)
            for device, overflow in (
                super()._unscale_grads_(some, inv_scale, found_inf, allow_fp16).items()  # type: ignore[arg-type]
            ):
                found[device] = (
                    torch.maximum(found[device], overflow) if device in found else overflow
                )
        return found


@dataclass(frozen=True)
class Precision:
    """The run's precision on one kind of device."""

    name: str
    device_type: str
    scaler: Scaler | None
    """Loss scaling, which fp16 needs and the others do not."""

    def autocast(self) -> AbstractContextManager[None]:
        dtype = AUTOCAST.get(self.name)
        if dtype is None:
            return nullcontext()
        teach_autocast(
            self.device_type
        )  # here, since a model may have brought an operator of its own
        return torch.autocast(self.device_type, dtype=dtype)

    def scale(self) -> float:
        """What losses are multiplied with before backward, for those who call it themselves."""
        if self.scaler is None:
            return 1.0
        self.scaler.scale(torch.ones((), device=self.device_type))  # it makes its scale when asked
        return self.scaler.get_scale()

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale(loss) if self.scaler is not None else loss).backward()


def build_precision(name: str, device: torch.device) -> Precision:
    """Set the process's matrix-product mode and return the rest."""
    torch.set_float32_matmul_precision("highest" if name == "fp32" else "high")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = name != "fp32"
    scaler = Scaler(device.type) if name == "fp16" else None
    return Precision(name, device.type, scaler)
