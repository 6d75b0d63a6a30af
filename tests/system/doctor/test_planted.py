"""Planted faults: each small job has one, and the verdict names it.

Those that need a GPU are skipped where there is none, and say so. A machine that does other things at the
same time may take the core away in the middle of a measurement, so a job is measured again, twice at most,
before it counts as misjudged.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.doctor.measure import Options
from ridgeline.doctor.measured import Measured
from ridgeline.doctor.script import measure_script
from ridgeline.doctor.verdict import (
    BANDWIDTH,
    COMMUNICATION,
    COMPUTE,
    DATA,
    HOST,
    LAUNCH,
    Verdict,
    judge,
)

PLANTED = Path(__file__).with_name("planted.py")
TRIES = 3

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here"),
]

# name -> what holds it back, the cause in the verdict's words, and what the place or class must contain.
HERE = {
    "slow_loader": (DATA, "waiting for the loader", "planted.py"),
    "slow_disk": (DATA, "reading files", "planted.py"),
    "preprocessing": (DATA, "preprocessing on the host", "planted.py"),
    "tiny_kernels": (LAUNCH, "tiny", ""),
    "python_in_the_loop": (HOST, "Python between the ops", "(after)"),
    "elementwise_chain": (BANDWIDTH, "element-wise work", "norm and element-wise"),
    "small_batch": (BANDWIDTH, "a batch too small", "matrix"),
    "optimizer_loop": (LAUNCH, "the optimizer's loop", "optimizer"),
    "plain_arithmetic": (COMPUTE, "arithmetic", "matrix"),
}
ON_GPU = {
    "waits_for_the_device": (HOST, "synchronisation with the device", "planted.py"),
    "fp32_products": (COMPUTE, "products that miss the tensor cores", "matrix"),
    "odd_vocabulary": (COMPUTE, "odd dimensions", "matrix"),
    "unpinned_copies": (DATA, "unpinned copies", "pinned"),
}
RANKS = {
    "throttled_network": (COMMUNICATION, "the network", ""),
    "one_slow_rank": (HOST, "one slow rank", "rank 1"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def _is_named(verdict: Verdict, wanted: tuple[str, str, str]) -> bool:
    limit, cause, within = wanted
    return verdict.limit == limit and cause in verdict.cause and within in verdict.within


def _tell(measured: Measured, verdict: Verdict) -> str:
    from ridgeline.doctor.show import show_verdict

    return show_verdict(measured, verdict, [])


def _check(name: str, wanted: tuple[str, str, str], steps: int = 18) -> tuple[Measured, Verdict]:
    said = []
    for _ in range(TRIES):
        measured = measure_script(PLANTED, [name], Options(steps=steps)).measured
        verdict = judge(measured)
        if _is_named(verdict, wanted):
            return measured, verdict
        said.append(_tell(measured, verdict))
    pytest.fail(f"{name} was misjudged {TRIES} times:\n" + "\n\n".join(said))


@pytest.mark.parametrize("name", HERE)
def test_the_fault_is_named(name: str) -> None:
    measured, verdict = _check(name, HERE[name])
    assert verdict.share > 0.3
    assert verdict.evidence
    parts = measured.data_s + measured.h2d_s + measured.compute_s + measured.comm_exposed_s
    parts += measured.host_s + measured.launch_s + measured.other_s
    assert parts == pytest.approx(measured.step_s, rel=1e-6)
    assert sum(c.seconds for c in measured.classes) == pytest.approx(measured.compute_s, rel=1e-6)


@pytest.mark.parametrize("name", [pytest.param(n, marks=needs_gpu) for n in ON_GPU])
def test_the_fault_is_named_on_a_gpu(name: str) -> None:
    _, verdict = _check(name, ON_GPU[name])
    assert verdict.share > 0.2


def _measure_rank(env: Any, path: str, name: str) -> Any:
    import torch.distributed as dist

    os.environ.update(
        RANK=str(env.rank),
        WORLD_SIZE=str(env.world_size),
        LOCAL_RANK=str(env.rank),
        LOCAL_WORLD_SIZE=str(env.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
    mine = measure_script(Path(path), [name], Options(steps=18)).measured
    everyone: list[Any] = [None] * env.world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def _measure_ranks(name: str) -> list[Measured]:
    """What two ranks on the CPU saw."""
    from ridgeline.launch.forked import Ranks

    module = _importable()  # before ranks are forked, which find it by its name
    ranks = Ranks(2)
    try:
        return ranks(module._measure_rank, str(PLANTED), name, timeout_s=240)
    finally:
        ranks.close()


def _measure_ranks_apart(name: str, out: Path) -> list[Measured]:
    """The same from a process of its own: CUDA that was used here cannot be used in forks of this one."""
    command = [sys.executable, __file__, name, str(out)]
    subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True, timeout=300)
    return pickle.loads(out.read_bytes())


@pytest.mark.parametrize("name", RANKS)
def test_the_fault_between_ranks_is_named(name: str, tmp_path: Path) -> None:
    said = []
    for _ in range(TRIES):
        apart = torch.cuda.is_initialized()
        found = _measure_ranks_apart(name, tmp_path / "out") if apart else _measure_ranks(name)
        first, *others = found
        verdict = judge(first, others)
        if _is_named(verdict, RANKS[name]):
            break
        said.append(_tell(first, verdict))
    else:
        pytest.fail(f"{name} was misjudged {TRIES} times:\n" + "\n\n".join(said))
    assert len(first.ranks) == 2
    if name == "one_slow_rank":
        assert any("time.sleep" in text for text in verdict.evidence)


def _importable() -> Any:
    """This file under a name that a forked rank finds."""
    name = "ridgeline_planted_tests"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(_measure_ranks(sys.argv[1])))
