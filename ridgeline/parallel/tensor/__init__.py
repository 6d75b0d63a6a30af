"""Tensor parallelism: a model's matrices cut over ranks, its own forward left as it is.

`plan_tensor` says what is cut, `cut_layers` cuts it, and `enter_view` has the model run in a
`GlobalView`. `parallel/apply.py` calls them.
"""

from ridgeline.parallel.tensor.apply import cut_layers, enter_stage, enter_view
from ridgeline.parallel.tensor.keyed import use_randomness
from ridgeline.parallel.tensor.plan import TensorPlan, plan_tensor
from ridgeline.parallel.tensor.split import Split, cut_local, gather_full
from ridgeline.parallel.tensor.view import GlobalView, Part

__all__ = [
    "GlobalView",
    "Part",
    "Split",
    "TensorPlan",
    "cut_layers",
    "cut_local",
    "enter_stage",
    "enter_view",
    "gather_full",
    "plan_tensor",
    "use_randomness",
]
