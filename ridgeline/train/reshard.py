"""A checkpoint written anew as another layout would have written it. Called by `ridgeline checkpoint`.

A run reads any checkpoint in any layout by itself; this is for moving the work of that to another place
and time, and for seeing that it is exact. Ranks on the CPU, as many as the new layout has, build the
training of the checkpoint's own configuration, load and save; then every byte of the result is checked
and every tensor compared with the source.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from ridgeline.checkpoint.compare import compare
from ridgeline.checkpoint.damage import find_problems
from ridgeline.checkpoint.held import hold_state
from ridgeline.checkpoint.load import load_training
from ridgeline.checkpoint.manifest import (
    Damaged,
    Manifest,
    check_sizes,
    checkpoint_name,
    read_manifest,
)
from ridgeline.checkpoint.retain import Keep
from ridgeline.checkpoint.save import Saver
from ridgeline.config import RunConfig, dump_config, parse_config
from ridgeline.errors import RunError, UsageError
from ridgeline.launch.env import RankEnv
from ridgeline.launch.forked import Ranks
from ridgeline.layout import Layout, check_available, require_layout
from ridgeline.train.checks import check_batch
from ridgeline.train.setup import build_training

_LONGEST_S = 24 * 3600.0
_KEEP_ALL = Keep(last=10**9)


def reshard(source: Path, target: Path, layout: str) -> tuple[Path, int]:
    """Write the checkpoint `source` under `target` in `layout`; where it is, and how many tensors were
    compared and found the same."""
    manifest = read_manifest(source)
    for problem in check_sizes(source, manifest):
        raise Damaged(f"{source} is not whole: {problem}")
    config = replace(parse_config(manifest.config, f"the configuration in {source}"), layout=layout)
    wanted = Layout.parse(layout, "--layout")
    require_layout(wanted, "--layout")
    for finding in check_available(wanted):
        raise UsageError(str(finding))
    check_batch(config, wanted)
    path = target / checkpoint_name(manifest.step)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; DST is a directory in which step-N is made")
    if path.exists():
        raise UsageError(f"{path} exists already; choose another DST, or remove it")
    ranks = Ranks(wanted.world_size)
    try:
        ranks(_load_and_save, source, target, dump_config(config), timeout_s=_LONGEST_S)
    finally:
        ranks.close()
    return path, _prove(source, path)


def _load_and_save(env: RankEnv, source: Path, target: Path, text: str) -> None:
    """On every rank of the new layout."""
    config = parse_config(text, f"the configuration in {source}")
    manifest = read_manifest(source)
    training = build_training(_on_cpu(config), env, resumes=True)
    mesh = training.mesh
    load_training(source, manifest, training.arranged, training.optimizer)
    group = mesh.side_group("checkpoint")
    saver = Saver(target, env.rank, group, mesh.world_group, _KEEP_ALL, mesh.device, ())
    state = hold_state(training.arranged, training.optimizer)
    saver.save(state, _renewed(manifest, str(mesh.layout), env, text), wait=True)
    for outcome in saver.outcomes():
        if outcome.path is None:
            raise RunError(f"nothing could be written to {target}: {outcome.problem}")


def _on_cpu(config: RunConfig) -> RunConfig:
    data = replace(config.data, workers=0, stage="")
    return replace(config, device="cpu", threads=1, data=data)


def _renewed(manifest: Manifest, layout: str, env: RankEnv, text: str) -> Manifest:
    return replace(
        manifest,
        layout=layout,
        num_ranks=env.world_size,
        time=time.time(),
        config=text,
        files={},
        tensors={},
    )


def _prove(source: Path, path: Path) -> int:
    """Every byte is on disk as it was written, and every value is that of the source."""
    for problem in find_problems(path, read_manifest(path)):
        raise Damaged(f"{path} is not what was written: {problem}")
    found = compare(source, path)
    for difference in found.differences:
        raise RunError(
            f"{path} is not the same as {source}: {difference.name}: {difference.text}; "
            "please report this"
        )
    return found.num_equal
