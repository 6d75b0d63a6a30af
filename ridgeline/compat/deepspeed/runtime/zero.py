"""`deepspeed.runtime.zero`: the inside of DeepSpeed's sharding, which is not that of `zero=n` here."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "runtime.zero",
    'say the stage in the configuration ("zero_optimization"), and make models in deepspeed.zero.Init',
)
