"""Trainings as scripts for DeepSpeed have them, run with DeepSpeed itself and with our interface.

`train(deepspeed, case)` is the script, with the module of either. `benchmarks/deepspeed_beside.py` runs the
cases with both and keeps what DeepSpeed had in `deepspeed.json`; `tests/dist/test_deepspeed.py` holds ours
against that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, BATCH = 8, 24

_ADAM = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}


def _warm(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": {"warmup_num_steps": 4, **params}}}


CASES: dict[str, dict[str, Any]] = {
    "as it comes": {"optimizer": _ADAM},
    "clipped, warmed up": {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 1},
        **_warm("WarmupLR", warmup_max_lr=0.02),
    },
    "decayed": {
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "adam_w_mode": False, "weight_decay": 0.1}},
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": 2},
        **_warm("WarmupDecayLR", warmup_max_lr=0.02, total_num_steps=7, warmup_type="linear"),
    },
    "in shards": {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.95]}},
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.2,
        "zero_optimization": {"stage": 3},
        **_warm("WarmupCosineLR", total_num_steps=8),
    },
    "an optimizer of the script's": {
        "client": True,
        "gradient_clipping": 0.4,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    },
    "in 16 bits": {"optimizer": _ADAM, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
    "cycle": {
        "optimizer": _ADAM,
        "zero_optimization": {"stage": 1},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 3,
                "cycle_second_step_size": 2, "decay_step_size": 1, "decay_lr_rate": 0.5,
            },
        },
    },
    "two stages": {
        "stages": 2,
        "optimizer": _ADAM,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0,
        **_warm("WarmupLR", warmup_max_lr=0.02),
    },
}  # fmt: skip
"""Configurations but for the batch; `client` and `stages` are for the script."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.n = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.gelu(self.b(self.n(F.gelu(self.a(x))))))


def _layers() -> list[Any]:
    return [nn.Linear(6, 16), F.gelu, nn.LayerNorm(16), nn.Linear(16, 16), F.gelu, nn.Linear(16, 4)]


def train(deepspeed: Any, case: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Losses of the microbatches (in a pipeline of the steps), rates, and the norms of gradients."""
    config = {key: value for key, value in case.items() if key not in ("client", "stages")}
    stages = case.get("stages", 1)
    parts = config.get("gradient_accumulation_steps", 1)
    replicas = world // stages
    size = BATCH // parts // replicas
    config["train_micro_batch_size_per_gpu"] = size
    torch.manual_seed(1)
    if stages > 1:
        torch.manual_seed(1)  # layers are built in order, whichever rank keeps them
        model: Any = deepspeed.pipe.PipelineModule(
            layers=_layers(), num_stages=stages, loss_fn=F.cross_entropy, partition_method="uniform"
        )
    else:
        model = Net()
    optimizer = None
    schedule = None
    if case.get("client"):
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1]},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(STEPS, BATCH, 6, generator=generator)
    y = torch.randint(4, (STEPS, BATCH), generator=generator)
    ours = {"example_input": x[0, :2]} if "ridgeline" in deepspeed.__name__ else {}
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=config,
        **ours,
    )
    narrow = torch.bfloat16 if "bf16" in config else torch.float32

    def batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
        for part in range(parts):
            first = (part * replicas + rank % replicas) * size
            yield x[step, first : first + size].to(narrow), y[step, first : first + size]

    losses, rates, norms = [], [], []
    for step in range(STEPS):
        if stages > 1:
            losses.append(float(engine.train_batch(batches(step))))
        else:
            for inputs, labels in batches(step):
                loss = F.cross_entropy(engine(inputs).float(), labels)
                engine.backward(loss)
                engine.step()
                total = loss.detach().clone()
                if world > 1:
                    dist.all_reduce(total)
                losses.append(float(total) / world)
        rates.append(float(engine.get_lr()[0]))
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    return {"losses": losses, "rates": rates, "norms": norms}
