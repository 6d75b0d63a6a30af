"""Who this process is among the ranks: the only file that takes variables from the environment.

Whatever started the process left its answer in environment variables, which `detect.py` understands;
`read_rank_env` makes one dataclass of them. Called once by `train/worker.py` and by `ridgeline.start` in a
user's own script.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.detect import choose_master, detect, name_job, whole_number

LAUNCHER = "RIDGELINE_LAUNCHER"
"""Holds the process id of `ridgeline train` in the ranks it starts."""

HUB, SEARCH = "RIDGELINE_HUB", "RIDGELINE_SEARCH"
"""Where a rank of a job reports to (`hub.py`), and the agent of a search (`search/nodes.py`)."""
ENDS_AT, WARN_S, REQUEUE = "RIDGELINE_ENDS_AT", "RIDGELINE_WARN_S", "RIDGELINE_REQUEUE"
"""Written into job scripts: when the time is up, how long before it the run is to end, and whether the job
is to be put back into the queue then."""
BIND, BINDING = "RIDGELINE_BIND", "RIDGELINE_BINDING"
"""How a rank is to be held to its cores, and what became of it, for `env.json`."""
ARRAY = "RIDGELINE_ARRAY"
"""Whether the job is one of an array that was asked for here."""
ARRAY_INDEX = "RIDGELINE_ARRAY_INDEX"
"""Which of the array it is, for its ranks, whatever the scheduler calls it."""
LOCAL_DISK = "RIDGELINE_LOCAL_DISK"
"""Which variable names a job's own folder on a fast disk, where the site's profile says so."""
LOST = "RIDGELINE_LOST_S"
ACCOUNT = "RIDGELINE_ACCOUNT"
"""Where the rank whose output is shown leaves why it failed, for whoever started it to say: once."""
TERMINAL = "RIDGELINE_TERMINAL"
"""Whether whoever started the job looks on at a terminal: launchers give ranks one of their own making."""

WARM = "RIDGELINE_WARM"
"""Set to 0: each rank of a host loads torch by itself (`warm.py`)."""
TRACEBACK = "RIDGELINE_TRACEBACK"
"""Set to 1: errors of ours come with where in the code they were raised."""
TUNE = "RIDGELINE_TUNE"
"""A file of settings for a script that calls `ridgeline.start`; see `train/settings.py`."""

RANK_VARIABLES = {"TORCH_FR_BUFFER_SIZE": "2000"}
"""Torch keeps the last collectives of a rank, so that a hang can name the one it waits in."""

_RECORDED_PREFIXES = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "SLURM_JOB")
_RECORDED = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CI")
# Values of variables whose names say that they hold a secret are left out even when allowed above.
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


@dataclass(frozen=True)
class RankEnv:
    """This process's place among all the processes of the job."""

    rank: int
    world_size: int
    local_rank: int
    """Place among the processes of this node; chooses the device."""
    local_world_size: int
    master_addr: str
    master_port: int
    source: str
    """What the values were read from: a key of `detect.READERS`, or `single process`."""
    attempt: int = 0
    """How often the agent has started these ranks again."""
    node_rank: int = 0
    nodes: tuple[str, ...] = ()
    """Hosts of the ranks in order; empty where the launcher does not say."""
    job: str = field(default="", compare=False)
    """What tells this job from others on the same nodes, the same on every rank."""
    said: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """For each of these, the variable it was read from."""


def read_rank_env(environ: Mapping[str, str] | None = None, needs_master: bool = True) -> RankEnv:
    """What the launcher that started this process says of it, or a job of one process. Ranks that a hub
    brings together are told there where rank 0 is met, so that it need not be known before."""
    env = os.environ if environ is None else environ
    found = detect(env)
    address, port, said = choose_master(found, env) if needs_master else ("", 0, {})
    attempts = "TORCHELASTIC_RESTART_COUNT"
    return RankEnv(
        rank=found.rank,
        world_size=found.world_size,
        local_rank=found.local_rank,
        local_world_size=found.local_world_size,
        master_addr=address,
        master_port=port,
        source=found.source,
        attempt=whole_number(env, attempts) if attempts in env else 0,
        node_rank=found.node_rank,
        nodes=found.nodes,
        job=name_job(env),
        said=tuple({**found.said, **said}.items()),
    )


def prepare_rank() -> None:
    """What torch has to find in the environment of a rank before it is imported."""
    for name, value in RANK_VARIABLES.items():
        os.environ.setdefault(name, value)


def tune_file(environ: Mapping[str, str] | None = None) -> str:
    return (os.environ if environ is None else environ).get(TUNE, "")


def wants_warm(environ: Mapping[str, str] | None = None) -> bool:
    return (os.environ if environ is None else environ).get(WARM, "") != "0"


def wants_traceback(environ: Mapping[str, str] | None = None) -> bool:
    return (os.environ if environ is None else environ).get(TRACEBACK, "") not in ("", "0")


def tell_torchrun(text: str, when: float, environ: Mapping[str, str] | None = None) -> None:
    """Why this rank ends, into the file that torchrun looks for, whose last words then have it too: what a
    rank itself wrote stands far above them, or in a log. One that torch has written stays."""
    file = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE")
    if not file or os.path.exists(file):
        return
    extra = {"py_callstack": text, "timestamp": str(int(when))}
    with suppress(OSError), open(file, "w", encoding="utf-8") as out:
        json.dump({"message": {"message": text, "extraInfo": extra}}, out)


def own_account(environ: Mapping[str, str] | None = None) -> str:
    """The file that this process, and none that it starts, is to leave its account in; or empty."""
    env = os.environ if environ is None else environ
    return env.get(ACCOUNT, "") if under_launcher(env) else ""


def is_told(text: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether another rank of torchrun's on this node has said the same in the same place already: torchrun
    gives its ranks a folder each, in one that is theirs alone. Whoever asks first is to say it."""
    file = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return False
    try:
        where = os.fstat(2)
        words = f"{where.st_dev} {where.st_ino} {text}".encode()
        name = f"told-{hashlib.sha256(words).hexdigest()[:16]}"
        os.close(os.open(Path(file).parent.parent / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return True
    except OSError:
        pass
    return False


def hub_address(environ: Mapping[str, str] | None = None) -> str:
    env = os.environ if environ is None else environ
    if not env.get(HUB):
        raise UsageError(
            f"{HUB} is not set: `python -m ridgeline.launch.rank` is started by `ridgeline launch` and "
            "by `ridgeline train --on`, not by hand"
        )
    return env[HUB]


def take_search_address(environ: MutableMapping[str, str] | None = None) -> str:
    """Out of the environment, since it has a secret that trials need not see."""
    address = (os.environ if environ is None else environ).pop(SEARCH, "")
    if not address:
        raise UsageError(
            f"{SEARCH} is not set: `python -m ridgeline.search.agent` is started by `ridgeline search --on "
            "nodes`, not by hand"
        )
    return address


@dataclass(frozen=True)
class Limits:
    """What a job script says of the time it has."""

    ends_at: float | None
    """Seconds since 1970."""
    warn_s: float
    requeue: bool
    requeue_asked: bool
    """Whether the job goes back only when its command asks for it, by its exit code."""
    array: bool
    lost_s: float | None
    """Silence after which a host is given up, where that is not the usual."""


def read_limits(environ: Mapping[str, str] | None = None) -> Limits:
    env = os.environ if environ is None else environ
    return Limits(
        ends_at=whole_number(env, ENDS_AT) if env.get(ENDS_AT) else None,
        warn_s=whole_number(env, WARN_S) if env.get(WARN_S) else 120,
        requeue=env.get(REQUEUE, "") == "1",
        requeue_asked=env.get(REQUEUE, "") == "asked",
        array=env.get(ARRAY, "") == "1",
        lost_s=whole_number(env, LOST) if env.get(LOST) else None,
    )


def prepare_deterministic() -> None:
    """What cuBLAS has to find before its first product, so that two runs give the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def under_launcher(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `ridgeline train` started this rank, and asks for the requeue itself."""
    env = os.environ if environ is None else environ
    return env.get(LAUNCHER) == str(os.getppid())


def meet_at(port: int) -> None:
    """Where this rank meets the others, of one that was started before anybody chose that."""
    os.environ["MASTER_PORT"] = str(port)


def visible_devices(num: int, environ: Mapping[str, str] | None = None) -> list[str]:
    """What CUDA calls the devices of ranks 0 to num - 1 of this host."""
    env = os.environ if environ is None else environ
    said = env.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in said.split(",") if name.strip()]
    return named if len(named) >= num else [str(index) for index in range(num)]


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a process that is started from here."""
    return {**os.environ, **variables}


def on_terminal(environ: Mapping[str, str] | None = None) -> bool:
    return (os.environ if environ is None else environ).get(TERMINAL) == "1"


def bind_mode(environ: Mapping[str, str] | None = None) -> str | None:
    """How this rank is to hold itself to its cores; None where somebody else has seen to that."""
    return (os.environ if environ is None else environ).get(BIND)


def keep_binding(record: Mapping[str, object]) -> None:
    """What became of it, for `env.json`."""
    os.environ[BINDING] = json.dumps(record)


def cuda_visible(environ: Mapping[str, str] | None = None) -> str | None:
    """What is said of the GPUs that this process may see; None when nothing is."""
    return (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")


def said_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """Threads of a rank where the user has said so in the environment, as torchrun has it. What a launcher
    gave this rank as its share (`bind.py`) is for this process, not for each of those that it starts."""
    env = os.environ if environ is None else environ
    said = env.get("OMP_NUM_THREADS", "")
    if not said.isdigit() or int(said) <= 0:
        return None
    shares = json.loads(env[BINDING])["map"] if env.get(BINDING) else []
    return None if int(said) in {share["num_threads"] for share in shares} else int(said)


def slurm_mpi(environ: Mapping[str, str] | None = None) -> str:
    """Which PMI Slurm is to offer to programs that call MPI, e.g. pmix."""
    return (os.environ if environ is None else environ).get("SLURM_MPI_TYPE") or "none"


def local_storage_variables(environ: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Variables in which schedulers and sites leave a folder for a job's own files, best first. Whether
    the folder is on the node's own disk is for `data/stage/where.py` to find out."""
    env = os.environ if environ is None else environ
    names = (env.get(LOCAL_DISK, ""), "SLURM_TMPDIR", "TMPDIR", "LUSTRE_SCRATCH", "PBS_JOBFS")
    return [(name, env[name]) for name in dict.fromkeys(names) if env.get(name)]


def submit_host(environ: Mapping[str, str] | None = None) -> str:
    """The host that the job around was submitted from, usually a login node; empty outside of jobs."""
    env = os.environ if environ is None else environ
    names = ("SLURM_SUBMIT_HOST", "PBS_O_HOST", "LSB_SUB_HOST")
    return next((env[name] for name in names if env.get(name)), "")


def recorded_environment(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """What `env.json` keeps: versions and an allow-list of variables, never the whole environment."""
    env = os.environ if environ is None else environ
    kept = {
        name: value
        for name, value in sorted(env.items())
        if (name in _RECORDED or name.startswith(_RECORDED_PREFIXES))
        and not any(word in name.upper() for word in _SECRET_WORDS)
    }
    binding = {"binding": json.loads(env[BINDING])} if env.get(BINDING) else {}
    return {
        **binding,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "packages": _versions("torch", "numpy", "ridgeline"),
        "variables": kept,
    }


def _versions(*packages: str) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
