"""What the process of a simulated rank is asked for; imports without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.config import RunConfig


@dataclass(frozen=True)
class RankRequest:
    """Which rank of which job."""

    config: RunConfig
    """With the layout's `dp` as it is on the whole world."""
    world_size: int
    devices_per_node: int
    rank: int = 0
    stage: int | None = None
    """Its place in the pipeline where that is not `rank`'s own."""
    steps: int = 5
    block_costs: dict[str, float] | None = None
    """What a rank before this one has measured, so that all cut the model alike."""


def for_one_rank(config: RunConfig, layout: str, device: str) -> RunConfig:
    """The recipe as one rank alone can run it: nothing staged, nothing evaluated, data in threads."""
    return replace(
        config,
        layout=layout,
        device=device,
        data=replace(config.data, stage="", workers=0),
        train=replace(config.train, eval_samples=0, target={}),
        checkpoint=replace(config.checkpoint, keep_best=""),
    )
