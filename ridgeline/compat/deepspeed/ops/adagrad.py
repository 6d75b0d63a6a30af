"""`deepspeed.ops.adagrad`: kernels of DeepSpeed's own."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "ops.adagrad",
    "use torch.optim.Adagrad; where it is computed is for the layout to say (offload)",
)
