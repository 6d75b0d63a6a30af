"""`deepspeed.ops.adam`: torch's Adam and AdamW; where the work is done is for the layout to say
(offload)."""

from __future__ import annotations

from typing import Any

import torch

from ridgeline.errors import UsageError


def FusedAdam(
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
    adamw_mode: bool | None = None,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """AdamW unless told otherwise, as DeepSpeed has it."""
    if not bias_correction:
        raise UsageError("Adam without bias_correction is not here; leave bias_correction out")
    decouples = adam_w_mode if adamw_mode is None else adamw_mode
    kind = torch.optim.AdamW if decouples else torch.optim.Adam
    return kind(
        params, lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad
    )


DeepSpeedCPUAdam = FusedAdam
