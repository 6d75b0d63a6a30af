"""`deepspeed.runtime.utils`: helpers of DeepSpeed's own code."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "runtime.utils",
    "memory is in the run directory's records and `ridgeline watch`, and clipping is in the configuration",
)
