"""`deepspeed.ops.lamb`: kernels of DeepSpeed's own."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without("ops.lamb", "use optim.name=lamb of `ridgeline train`, or AdamW")
