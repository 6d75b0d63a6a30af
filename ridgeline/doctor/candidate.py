"""One state of a climb in a process of its own: `python -m ridgeline.doctor.candidate RECIPE`, or with
`--ready DEVICE` one that imports everything, says so, and waits to be told the recipe. With `--ranks` it is
one of several, and the environment says which.

It builds the training, and then runs steps when a line of JSON on its standard input says so, answering
with one line: seconds a step, losses, parts, memory. Between two turns it holds nothing of the device that
it can give back, so that others measure undisturbed. Nothing of a state (flags, caches, compiled code in
memory) leaks into another. Started by `climb.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from ridgeline.launch.env import RankEnv

READY, RANKS = "--ready", "--ranks"


class Runner:
    """A training that goes on in turns."""

    def __init__(self, recipe: Path, nudge: float = 0.0, env: RankEnv | None = None) -> None:
        from ridgeline.config import load_config
        from ridgeline.launch.env import read_rank_env
        from ridgeline.train.loop import train_loop
        from ridgeline.train.setup import build_training

        env = env or read_rank_env({})
        self.training = build_training(load_config(recipe).config, env)
        self.device = self.training.mesh.device
        if nudge:
            nudge_weights(self.training.arranged.model, nudge)
            _nudge_masters(self.training.optimizer)
        self._steps = train_loop(self.training)

    def turn(self, untimed: int, timed: int) -> dict[str, Any]:
        if timed:
            # Batches that were read while others had their turn would come for nothing.
            untimed = max(untimed, self._num_ready())
        losses = [next(self._steps).loss_share for _ in range(untimed)]
        self._wait()
        self._meet()
        self._reset_peak()
        pending = []
        start = time.perf_counter()
        for _ in range(timed):
            result = next(self._steps)
            losses.append(result.loss_share)
            pending.append(result.times)
        self._wait()
        spent = time.perf_counter() - start
        parts = [times.read() for times in pending]
        names = sorted({name for part in parts for name in part})
        answer = {
            "step_s": spent / max(timed, 1),
            "losses": self._whole(losses),
            # Of all steps, as the step's time is: a loader that stalls one step in six is seen.
            "parts": {n: statistics.fmean(part.get(n, 0.0) for part in parts) for n in names},
            "peak_bytes": self._peak(),
            "device": self.device.type,
            **device_facts(self.device),
            "samples": self.training.config.train.batch,
            "unit": self.training.loader.source.info.unit,
            "units_per_sample": self.training.loader.source.info.units_per_sample,
            "time": time.time(),
            "notes": self.training.notes,
        }
        self._give_back()
        return {**answer, "rest_bytes": self._rest()}

    def _whole(self, shares: list[Any]) -> list[float]:
        """The losses of the global batch: each rank has its part of them."""
        import torch

        if not shares:
            return []
        stacked = torch.stack([share.double() for share in shares])
        return self.training.mesh.sum_over_data(stacked).tolist()

    def _num_ready(self) -> int:
        """Batches that the loader may have ready before anybody asks, and one on its way."""
        data = self.training.config.data
        return data.prefetch * max(data.workers, data.threads) + 1 if data.prefetch else 0

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _meet(self) -> None:
        """Ranks begin together, so that none is timed as it waits for one that was told later."""
        import torch.distributed as dist

        if self.training.mesh.env.world_size > 1:
            dist.barrier()

    def _reset_peak(self) -> None:
        """Not with captured graphs: what they hold was counted when they were captured, and never again."""
        import torch

        if self.device.type == "cuda" and not self.training.mesh.layout.graphs:
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> int:
        from ridgeline.machine.describe import peak_memory_bytes

        return peak_memory_bytes(self.device)

    def _give_back(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _rest(self) -> int:
        """What it goes on holding of the device between two turns."""
        import torch

        return torch.cuda.memory_reserved() if self.device.type == "cuda" else 0

    def close(self) -> None:
        from ridgeline.parallel.mesh import close_mesh

        self.training.close_loaders()
        close_mesh(self.training.mesh)


def nudge_weights(model: Any, share: float) -> None:
    """Move each weight by up to this share of it, or by a last digit where that is more, up or down by
    chance, the same for every state; what ranks have copies of, alike on all of them."""
    import torch
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            here = weight.to_local() if isinstance(weight, DTensor) else weight
            if here.is_floating_point() and here.numel():
                # One of its own for each: ranks may have shards of another size before it.
                generator = torch.Generator(here.device).manual_seed(number)
                chance = torch.rand(here.shape, generator=generator, device=here.device)
                most = max(share, torch.finfo(here.dtype).eps)
                here.copy_(here.float() * (1 + most * (2 * chance - 1)))


def _nudge_masters(optimizer: Any) -> None:
    """Have the float32 masters of narrow weights follow them, or the first update would take them back."""
    import torch

    with torch.no_grad():
        for weight, state in optimizer.state.items():
            if "master" in state:
                state["master"].copy_(weight)


def device_facts(device: Any) -> dict[str, Any]:
    """What remedies ask of a device."""
    import torch

    if device.type == "cpu":
        return {"bf16_rate": _bf16_rate()}
    if device.type != "cuda":
        return {}
    return {
        "capacity_bytes": torch.cuda.get_device_properties(device).total_memory,
        "has_bf16": torch.cuda.get_device_capability(device) >= (8, 0),
        "has_fp8": torch.cuda.get_device_capability(device) >= (8, 9),
    }


SIDE, TIMES, LONG_S = 512, 6, 0.5


@functools.cache
def _bf16_rate() -> float:
    """How many times as fast a product is in bf16 as in float32, on the threads of this process."""
    import torch

    taken = {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(SIDE, SIDE, dtype=dtype)
        spent = []
        for _ in range(TIMES):  # the first makes its kernel
            begun = time.perf_counter()
            a @ a
            spent.append(time.perf_counter() - begun)
            if spent[-1] > LONG_S:
                break  # there is no unit for it
        taken[dtype] = min(spent)
    return taken[torch.float32] / taken[torch.bfloat16]


def _get_ready(device: str, place: int, answers: TextIO) -> Path:
    """Import, wait for the recipe, and write to its log from there on."""
    import torch

    import ridgeline.train.loop
    import ridgeline.train.setup  # noqa: F401

    if device != "cpu" and torch.cuda.device_count() > place:
        with contextlib.suppress(RuntimeError):  # a full device is the state's own to report
            torch.zeros(1, device=f"cuda:{place}")
    print(json.dumps({"ready": time.time()}), file=answers, flush=True)
    line = sys.stdin.readline()
    if not line:
        os._exit(0)  # nobody needed it
    asked = json.loads(line)
    if asked["port"]:
        from ridgeline.launch.env import meet_at

        meet_at(asked["port"])
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return Path(asked["recipe"])


def main(argv: list[str]) -> None:
    # Answers go out on a copy of standard output; whatever else is printed goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from ridgeline.launch.env import read_rank_env

    env = read_rank_env(None if RANKS in argv else {})
    if RANKS in argv:
        from ridgeline.launch.bind import bind_as_told

        bind_as_told(env)
    if argv[0] == READY:
        recipe = _get_ready(argv[1], env.local_rank, answers)
        env = read_rank_env(None if RANKS in argv else {})  # where they meet was not known before
    else:
        recipe = Path(argv[0])
    runner: Runner | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if runner is None:
                runner = Runner(recipe, asked["nudge"], env)
            answer = runner.turn(asked["untimed"], asked["timed"])
        except Exception as error:
            import traceback

            traceback.print_exc()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            answer = {"failed": f"{type(error).__name__}: {first}"}
        print(json.dumps(answer), file=answers, flush=True)
    if runner is not None:
        runner.close()
    sys.stdout.flush()
    os._exit(0)  # a loader's thread may still wait for room


if __name__ == "__main__":
    main(sys.argv[1:])
