"""`deepspeed.monitor`: what sends metrics elsewhere."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without("monitor", "`ridgeline watch` and `ridgeline track` read the run directory")
