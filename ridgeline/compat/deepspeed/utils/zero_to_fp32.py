"""`deepspeed.utils.zero_to_fp32`: whole weights out of DeepSpeed's checkpoints."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "utils.zero_to_fp32",
    "`ridgeline checkpoint export` writes whole weights, and engine.save_16bit_model",
)
