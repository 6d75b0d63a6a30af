"""DeepSpeed's optimizers by the modules they are imported from: torch's own, in one kernel."""

from ridgeline.compat.deepspeed.missing import HERE
from ridgeline.compat.deepspeed.ops import adam
from ridgeline.compat.missing import tell_names

_TORCHS = "torch's own kernels are used, and compile=true in the layout makes more"
__getattr__ = tell_names(
    "deepspeed",
    f"{HERE}.ops",
    dict.fromkeys(("op_builder", "sparse_attention", "transformer", "quantizer", "aio"), _TORCHS),
)
__all__ = ["adam"]
