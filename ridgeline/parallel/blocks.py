"""The repeated blocks of a module: see `models/blocks.py`, which the planner's tracer uses as well.

Called by `recompute.py`, `fsdp.py`, `pipeline/` and `apply.py`.
"""

from __future__ import annotations

from ridgeline.models.blocks import find_blocks

__all__ = ["find_blocks"]
