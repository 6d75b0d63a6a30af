"""`deepspeed.profiling`: what counts and times a model's modules."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without("profiling", "`ridgeline doctor train.py` says what a step is made of")
