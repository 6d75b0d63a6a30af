"""`deepspeed.moe`: DeepSpeed's mixtures of experts, which are modules of its own."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without("moe", "`ridgeline.layout` with ep=n spreads the experts of any mixture")
