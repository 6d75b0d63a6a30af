"""What is known of a machine before anything is measured: its nodes, its modules, its scheduler.

A profile is a YAML file, shipped in `sites/` or the user's own in `~/.config/ridgeline/sites/`, which is
looked at first. It gives defaults to what was not said, and refuses more ranks than a node has room for.
What a shipped profile says stands in the guide of that site, which a comment names. Called by
`cli_jobs.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from ridgeline.errors import UsageError, unknown_word
from ridgeline.launch.containers import RUNTIMES
from ridgeline.launch.env import LOCAL_DISK
from ridgeline.typed import build_typed

SHIPPED = Path(__file__).parent / "sites"


@dataclass(frozen=True)
class NodeType:
    """One kind of node, most often a partition. None: not known."""

    named: bool = True
    """Whether the scheduler is told its name as the partition."""
    gpus: int | None = None
    gpu_type: str | None = None
    """As the scheduler wants it."""
    gpu_memory_gb: int | None = None
    cores: int | None = None
    memory_gb: int | None = None
    qos: str | None = None
    constraint: str | None = None


@dataclass(frozen=True)
class Site:
    """A profile."""

    name: str
    source: str = ""
    """Where what it says is from."""
    scheduler: str | None = None
    count_nodes: bool = False
    account: str | None = None
    default: str | None = None
    """The partition where none is said."""
    partitions: Mapping[str, NodeType] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    directives: tuple[str, ...] = ()
    container: str | None = None
    """The runtime that the site has."""
    local_disk: str | None = None
    """The variable that names a job's own folder on a fast disk."""
    notes: tuple[str, ...] = ()

    def fill(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """`said`, fields of `Job` with None for what was not said, with this site's defaults; a
        `UsageError` for more than a node has."""
        job = {name: value for name, value in said.items() if value is not None}
        partition = job.get("partition", self.default)
        node = self.partitions.get(partition, NodeType()) if partition else NodeType()
        if partition and node.named:
            job.setdefault("partition", partition)
        _fill_sizes(job, node)
        for name in ("gpu_type", "qos", "constraint"):
            if getattr(node, name) is not None and (name != "gpu_type" or job.get("gpus_per_node")):
                job.setdefault(name, getattr(node, name))
        if self.account is not None:
            job.setdefault("account", self.account)
        if self.count_nodes:
            job.setdefault("count_nodes", True)
        disk = {LOCAL_DISK: self.local_disk} if self.local_disk else {}
        job["variables"] = {**disk, **self.variables, **job.get("variables", {})}
        for name in ("setup", "directives"):
            job[name] = (*getattr(self, name), *job.get(name, ()))
        where = f"a node of {self.name}" + (f" ({partition})" if partition else "")
        _require_room(job, node, where)
        return job


def _fill_sizes(job: dict[str, Any], node: NodeType) -> None:
    """A rank a GPU, and the cores of a node shared among its GPUs, or else among its ranks."""
    if node.gpus:
        job.setdefault("gpus_per_node", min(job.get("per_node", node.gpus), node.gpus))
    elif node.gpu_type and node.gpus is None:  # how many it has is not known
        job.setdefault("gpus_per_node", job.get("per_node", 1))
    if job.get("gpus_per_node"):
        job.setdefault("per_node", job["gpus_per_node"])
    if node.cores:
        shares = node.gpus if node.gpus and job.get("gpus_per_node") else job.get("per_node", 1)
        job.setdefault("cpus_per_rank", max(node.cores // max(shares, job.get("per_node", 1)), 1))


def _require_room(job: Mapping[str, Any], node: NodeType, where: str) -> None:
    ranks, gpus = job.get("per_node", 1), job.get("gpus_per_node", 0)
    nodes = job.get("nodes", 1)
    room, what = (node.gpus, "GPUs") if gpus else (node.cores, "cores")
    if node.gpus is not None and gpus > node.gpus:
        raise UsageError(
            f"{gpus} GPUs a node are wanted, and {where} has {node.gpus}; write --gpus-per-node "
            f"{node.gpus}"
        )
    if room and ranks > room:
        more = -(-ranks * nodes // room)
        raise UsageError(
            f"{ranks} ranks a node are wanted, and {where} has {room} {what}; write --per-node {room} and "
            f"--nodes {more} for as many ranks"
        )
    cpus = job.get("cpus_per_rank", 1)
    if node.cores is not None and ranks * cpus > node.cores:
        raise UsageError(
            f"{ranks} ranks with {cpus} cores each are wanted, and {where} has {node.cores} cores; write "
            f"--cpus-per-rank {max(node.cores // ranks, 1)}"
        )


def user_sites(environ: Mapping[str, str] | None = None) -> Path:
    env = os.environ if environ is None else environ
    base = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or Path.home()) / ".config")
    return Path(base) / "ridgeline" / "sites"


def list_sites(environ: Mapping[str, str] | None = None) -> dict[str, Path]:
    """Profiles by name; the user's own hide shipped ones of the same name."""
    found = {}
    for folder in (SHIPPED, user_sites(environ)):
        found.update({path.stem: path for path in sorted(folder.glob("*.yaml"))})
    return found


def load_site(
    name_or_path: str, place: str = "--site", environ: Mapping[str, str] | None = None
) -> Site:
    """A profile by its name, or from a file."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
    else:
        known = list_sites(environ)
        if name_or_path not in known:
            raise unknown_word("site", name_or_path, known, place)
        path = known[name_or_path]
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the site {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"the site {path} is no YAML: {reason}") from error
    return read_site(values or {}, path.stem, str(path))


def read_site(values: Any, name: str, place: str) -> Site:
    """A profile from what its file holds."""
    _require_keys(values, Site, place, leave_out=("name",))
    partitions = values.get("partitions") or {}
    if not isinstance(partitions, Mapping):
        raise UsageError(
            f"partitions in {place} is {partitions!r}; write a name and its keys below"
        )
    nodes = {}
    for one, keys in partitions.items():
        inside = f"partitions.{one} of {place}"
        _require_keys(keys or {}, NodeType, inside)
        nodes[str(one)] = build_typed(NodeType, keys or {}, f"partitions.{one}.", [])
        _require_counts(nodes[str(one)], inside)
    for key in ("setup", "directives", "notes"):
        lines = values.get(key)
        if lines is not None and not (
            isinstance(lines, list) and all(isinstance(line, str) for line in lines)
        ):
            raise UsageError(f"{key} in {place} is {lines!r}; write a list with a text a line")
    variables = values.get("variables") or {}
    if not isinstance(variables, Mapping) or not all(
        isinstance(said, (str, int, float)) for said in variables.values()
    ):
        raise UsageError(f"variables in {place} is {variables!r}; write a name and a value a line")
    plain = {key: value for key, value in values.items() if key not in ("partitions", "variables")}
    site: Site = build_typed(Site, {**plain, "name": name}, "", [])
    texts = {str(key): _as_text(said) for key, said in variables.items()}
    site = Site(**{**vars(site), "partitions": nodes, "variables": texts})
    if site.default is not None and site.default not in site.partitions:
        raise unknown_word("partition", site.default, site.partitions, f"default of {place}")
    if site.container is not None and site.container not in RUNTIMES:
        raise unknown_word("container runtime", site.container, RUNTIMES, f"container of {place}")
    return site


def _as_text(said: str | int | float) -> str:
    """YAML reads yes and 1 as something else; a variable holds text."""
    return str(int(said)) if isinstance(said, bool) else str(said)


def _require_keys(
    values: Any, cls: type[Site] | type[NodeType], place: str, leave_out: tuple[str, ...] = ()
) -> None:
    if not isinstance(values, Mapping):
        raise UsageError(f"{place} holds {values!r}; write keys and values")
    known = [one.name for one in fields(cls) if one.name not in leave_out]
    for key in values:
        if key not in known:
            raise unknown_word("key", str(key), known, place)


def _require_counts(node: NodeType, place: str) -> None:
    for name in ("gpus", "gpu_memory_gb", "cores", "memory_gb"):
        number = getattr(node, name)
        if number is not None and number < (0 if name == "gpus" else 1):
            raise UsageError(
                f"{name} in {place} is {number}; write how many there are, or leave it out"
            )
