"""Ranks as tasks of a Ray cluster: one `host.py` on each node that Ray gives.

Ray places a bundle of cores and GPUs on as many nodes as are asked for and runs one task in each, which
starts the ranks of that node as processes and waits. Needs the extra `[ray]`. Used by `start.py` for
`--scheduler ray`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from ridgeline.errors import RunError, UsageError
from ridgeline.launch.job import Step

_PLACE_S = 120.0


class RayTasks:
    """A task a node."""

    def __init__(self, ray: Any, tasks: list[Any], group: Any) -> None:
        self._ray, self._tasks, self._group = ray, tasks, group
        self._code: int | None = None
        self._words = ""

    def poll(self) -> int | None:
        if self._code is None:
            ended, waiting = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0.05)
            for task in ended:
                code, words = self._result(task)
                if code:
                    self._code, self._words = code, words
                    return code
            if not waiting:
                self._code = 0
        return self._code

    def _result(self, task: Any) -> tuple[int, str]:
        try:
            code, words = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return 1, " ".join(str(error).split())[:500]
        return int(code), str(words)

    def stop(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task)

    def kill(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            if self.poll() is None:
                for task in self._tasks:
                    self._ray.cancel(task, force=True)
            remove_placement_group(self._group)
            self._group = None

    def last_words(self) -> str:
        return self._words or f"a task of Ray ended with exit code {self._code}"


def start_on_ray(step: Step) -> RayTasks:
    """Start `step.command` once a rank on nodes of the Ray cluster that is running."""
    try:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    except ModuleNotFoundError as error:
        raise UsageError("--scheduler ray needs ray; pip install 'ridgeline[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init(address="auto", logging_level="ERROR", log_to_driver=True)
        except ConnectionError as error:
            raise UsageError(
                "no Ray cluster is running here; start one with `ray start --head`, or set RAY_ADDRESS"
            ) from error
    bundle = {"CPU": float(step.per_node * (step.cpus_per_rank or 1))}
    if step.gpus_per_node:
        bundle["GPU"] = float(step.gpus_per_node)
    group = _place(ray, step.nodes, bundle)
    run = ray.remote(max_retries=0)(_run_host)
    tasks = []
    for number in range(step.nodes):
        told = {
            "workdir": os.getcwd(),
            "variables": dict(step.variables),
            "command": list(step.command),
            "first_rank": number * step.per_node,
            "world_size": step.num_ranks,
            "local_world_size": step.per_node,
            "node_rank": number,
        }
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0.0)}
        tasks.append(run.options(scheduling_strategy=where, **options).remote(json.dumps(told)))
    return RayTasks(ray, tasks, group)


def _place(ray: Any, num_nodes: int, bundle: dict[str, float]) -> Any:
    """Room for the ranks of a node on each of so many nodes."""
    from ray.util.placement_group import placement_group, remove_placement_group

    alive = [node for node in ray.nodes() if node["Alive"]]
    fit = [
        node
        for node in alive
        if all(node["Resources"].get(name, 0.0) >= need for name, need in bundle.items())
    ]
    if len(fit) < num_nodes:
        need = ", ".join(f"{number:g} {name}" for name, number in bundle.items())
        raise UsageError(
            f"{num_nodes} nodes with {need} each are wanted, and of the {len(alive)} nodes of the Ray "
            f"cluster {len(fit)} have that; ask for fewer with -N and -n"
        )
    group = placement_group(
        [bundle] * num_nodes, strategy="STRICT_SPREAD" if num_nodes > 1 else "PACK"
    )
    try:
        placed = group.wait(_PLACE_S)
    except Exception as error:  # Ray raises the bare class when the cluster goes away
        raise RunError(f"Ray has given up placing the ranks: {error}") from error
    if not placed:
        remove_placement_group(group)
        raise RunError(
            f"Ray has not found {num_nodes} free nodes with {bundle} each within {_PLACE_S:.0f} s; others "
            "use them, try later or ask for fewer"
        )
    return group


def _run_host(told: str) -> tuple[int, str]:
    """In a task: the ranks of this node, until they end or the task is cancelled."""
    # Ray sets it to the cores of the task, which are for all of its ranks.
    environment = {name: said for name, said in os.environ.items() if name != "OMP_NUM_THREADS"}
    process = subprocess.Popen(
        [sys.executable, "-m", "ridgeline.launch.host"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(told.encode() + b"\n")
    process.stdin.flush()
    tail: list[str] = []
    try:
        for line in process.stderr:
            tail = [*tail[-20:], line.decode(errors="replace").rstrip()]
            print(tail[-1], file=sys.stderr, flush=True)
        return process.wait(), "\n".join(tail)
    finally:
        process.stdin.close()  # ends the ranks
        process.wait()
