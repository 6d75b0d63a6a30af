"""Activations that a layer keeps for backward in programs other than this library.

What this library keeps is in `own.py`. Called by `memory.py`, and by `beside.py` for what is moved to the
host.
"""

from __future__ import annotations

from ridgeline.plan.job import Job
from ridgeline.plan.kernels import element_bytes


def layer_activations(job: Job, scores: bool = True) -> float:
    """What one layer keeps for backward for one microbatch, without recompute; `scores`: also the
    attention's own where its kernel stores them."""
    model, t = job.model, job.tp
    size = element_bytes("bf16" if job.precision == "fp8" else job.precision)
    tokens = job.samples * model.seq / job.cp
    stream = tokens * model.hidden / (t if job.sp else 1)
    # What a product was given is kept as it was multiplied: where that was in 8 bits, attention's result,
    # which its own backward reads as well, is kept twice.
    narrow = job.precision == "fp8" and job.software.keeps_narrow
    given = 1.0 if narrow else size
    # Each norm's input, what it makes for the next product, and dropout's mask after it.
    gathered = tokens * model.hidden if job.software.keeps_gathered else stream
    total = 2 * (size * stream + given * gathered) + (2.0 * stream if model.dropout else 0.0)
    qkv = model.query_width + 2 * model.kv_width
    total += size * tokens * (qkv + model.query_width) / t
    total += tokens * model.query_width / t if narrow else 0.0
    inner = model.shared_ffn if model.experts else model.ffn
    total += tokens * inner * (size * (2 if model.gated else 1) + given) / t
    if model.rotary:
        total += size * tokens * job.software.rotary_kept * (model.query_width + model.kv_width) / t
    if model.experts:
        total += _routed_activations(job, size)
    if job.software.attention == "flash":
        total += 4.0 * tokens * model.heads / t  # the softmax's sums
    elif scores:
        pairs = job.samples * model.heads / t * (model.seq / job.cp) * model.seq
        total += pairs * ((2 * size + 1) if model.dropout else size)
    return total * job.software.extra_kept


def _routed_activations(job: Job, size: float) -> float:
    """What experts keep of the tokens that are sent to them, were those spread evenly: their input, both
    sides of the activation function, and their output, which is weighted after it has come back."""
    model, split = job.model, job.expert_tp or job.tp
    here = job.samples * model.seq / job.cp / (job.tp if job.sp else 1)
    routed = here * model.top_k * (split if job.sp else 1)
    inner = (model.expert_ffn or model.ffn) * (3 if model.gated else 2) / split
    scores = 8.0 * here * model.experts
    return size * routed * (2 * model.hidden + inner) + scores


def kept_activations(job: Job) -> float:
    """What one layer keeps for one microbatch with the job's recompute."""
    size = element_bytes("bf16" if job.precision == "fp8" else job.precision)
    tokens = job.samples * job.model.seq / job.cp
    stream = size * tokens * job.model.hidden / (job.tp if job.sp else 1)
    if job.recompute == "full":
        return stream
    if job.recompute == "selective":
        if job.software.attention != "flash":
            return layer_activations(job, scores=False)
        # Inputs of the block and results of products; what stands between them is made again.
        model = job.model
        results = 2 * model.query_width + 2 * model.kv_width + model.ffn_in
        if job.software.selective_products:
            # Attention's result, and every other product's: queries, values, one side of the gate.
            results = 2 * model.query_width + model.kv_width + model.ffn
        return size * tokens * results / job.tp + 2 * stream
    return layer_activations(job)
