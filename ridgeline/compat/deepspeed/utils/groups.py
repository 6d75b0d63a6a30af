"""`deepspeed.utils.groups`: groups of ranks by technique."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "utils.groups",
    "engine.dp_world_size says how many replicas there are, and the layout has the rest",
)
