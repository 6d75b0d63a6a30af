"""`deepspeed.ops.lion`: kernels of DeepSpeed's own."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "ops.lion", "use AdamW, or an optimizer of torch.optim with `initialize(optimizer=...)`"
)
