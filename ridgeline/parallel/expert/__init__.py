"""Expert parallelism: the experts of a layer are spread over replicas, and tokens travel to them.

Written by hand because what there is (Megatron's, DeepSpeed's and torchtitan's layers, the plans of
`transformers`) asks for a model that is written for it. Here the model is the user's: `find.py` watches it
run and finds its experts, in one module with stacked weights (`stacked.py`) or as a list of modules that
its code calls with the rows of each (`listed.py`); `exchange.py` moves rows, and `apply.py` leaves each
rank its own experts. Called by `apply.py` of the room.
"""

from ridgeline.parallel.expert.apply import SpreadExperts, apply_experts
from ridgeline.parallel.expert.find import ExpertPlan, find_experts

__all__ = ["ExpertPlan", "SpreadExperts", "apply_experts", "find_experts"]
