"""`deepspeed.runtime.pipe`: the inside of DeepSpeed's pipelines."""

from ridgeline.compat.deepspeed.missing import without

__getattr__ = without(
    "runtime.pipe", "PipelineModule and LayerSpec are in ridgeline.compat.deepspeed.pipe"
)
