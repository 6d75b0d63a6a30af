"""`deepspeed.runtime.engine`: the engine's class, as scripts name it in annotations and `isinstance`."""

from ridgeline.compat.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
