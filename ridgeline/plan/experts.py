"""What tokens cost on their way to experts on other ranks and back: bytes, kernels, and what moves them.

`parallel/expert/stacked.py` is what is counted here; `tests/dist/test_expert_planned.py` holds the two to
each other. Called by `general.py` and `general_memory.py`.
"""

from __future__ import annotations

from typing import Final

from ridgeline.plan.kernels import moved_s
from ridgeline.plan.layer import Cost
from ridgeline.plan.machine import Machine
from ridgeline.plan.module import Experts
from ridgeline.plan.network import Group, collective_s

INDEX_BYTES: Final = 8
WEIGHT_BYTES: Final = 4
"""Bytes of a number that says where a row goes, and of an expert's weight for a token."""
ROUTE_KERNELS: Final = (36, 22)
"""Kernels, forward and backward, that finding the way of tokens and moving them takes."""


def travel_bytes(
    experts: Experts, samples: int, mode: str, ranks: int
) -> tuple[float, float, float]:
    """Of a microbatch of one rank, what it sends to all ranks, itself among them: the tokens, their errands
    (which token, which expert, with which weight), and what comes back."""
    tokens = experts.tokens.at(samples)
    visits = tokens * experts.visits(ranks)
    errands = (2 * INDEX_BYTES + WEIGHT_BYTES) * experts.chosen * tokens
    return visits * experts.sent[mode], errands, visits * experts.returned[mode]


def travel_cost(
    machine: Machine, experts: Experts, samples: int, mode: str, group: Group
) -> tuple[Cost, Cost]:
    """Tokens to the ranks of their experts and back, forward and backward: `parallel/expert/stacked.py`."""
    sent, errands, returned = travel_bytes(experts, samples, mode, group.size)
    pairs = experts.tokens.at(samples) * experts.chosen * experts.sent[mode]
    results = experts.tokens.at(samples) * experts.chosen * experts.returned[mode]
    weights = errands * WEIGHT_BYTES / (2 * INDEX_BYTES + WEIGHT_BYTES)

    def all_to_all(*sizes: float) -> float:
        return sum(collective_s(machine, "all_to_all", size, group) for size in sizes)

    # Rows are put in order, spread out to pairs of a token and an expert, summed for each token on the rank
    # that had it, and added up where they came from; backward undoes the same.
    moved = 2.0 * sent + 2.0 * pairs + (results + returned) + 2.0 * returned
    counts = 2.0 * INDEX_BYTES * group.size
    there = all_to_all(counts, errands - weights, weights, sent, returned)
    back = all_to_all(returned, sent, weights)
    forward, backward = ROUTE_KERNELS
    return (
        Cost(0.0, 0.0, moved_s(machine.device, moved, forward), there, forward),
        Cost(0.0, 0.0, moved_s(machine.device, moved, backward), back, backward),
    )
