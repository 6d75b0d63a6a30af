"""`deepspeed.inference`: models that are trained no more."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without("inference", "`ridgeline export` makes a package for C++ programs")
