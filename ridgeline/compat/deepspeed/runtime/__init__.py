"""`deepspeed.runtime`: of DeepSpeed's inside what scripts import from there."""

from ridgeline.compat.deepspeed.missing import HERE
from ridgeline.compat.deepspeed.runtime import engine, lr_schedules
from ridgeline.compat.missing import tell_names

_SETTING = "it is a matter of the configuration here (docs/deepspeed.md)"
__getattr__ = tell_names(
    "deepspeed",
    f"{HERE}.runtime",
    dict.fromkeys(("config", "fp16", "bf16_optimizer"), _SETTING),
)
__all__ = ["engine", "lr_schedules"]
