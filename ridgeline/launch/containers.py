"""Ranks in a container: the command line that runs a command in an image.

What a rank is started by (binding, logs) stays outside; the container gets the environment of its caller.
That is so by default for Apptainer and Shifter, and asked for of Podman. An interpreter of the host is not
in the image: the caller names the one to use. Called by `rank.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ridgeline.errors import UsageError, unknown_word
from ridgeline.launch.job import Container


def wrap(
    container: Container, command: Sequence[str], gpus: bool, workdir: Path | None = None
) -> list[str]:
    """`command` as it is run in the image, in `workdir`, with the GPUs of the node where asked."""
    if container.runtime not in RUNTIMES:
        raise unknown_word("container runtime", container.runtime, RUNTIMES, "container")
    if not container.image.strip() or container.image.startswith("-"):
        raise UsageError(
            f"the container image {container.image!r} is no image; name a file or a tag"
        )
    for bind in container.binds:
        parts = bind.split(":")
        if not all(parts[:2]) or len(parts) > 3 or bind.startswith("-") or "," in bind:
            raise UsageError(
                f"the bind {bind!r} of the container is no path; write FOLDER or FOLDER:FOLDER_INSIDE"
            )
    return [*RUNTIMES[container.runtime](container, gpus, workdir), *command]


def _apptainer(container: Container, gpus: bool, workdir: Path | None) -> list[str]:
    words = [container.runtime, "exec", *(["--nv"] if gpus else [])]
    words += ["--pwd", str(workdir)] if workdir else []
    for bind in container.binds:
        words += ["--bind", bind]
    return [*words, *container.options, container.image]


def _shifter(container: Container, gpus: bool, workdir: Path | None) -> list[str]:
    """GPUs are there without being asked for: a module of the site's brings them in."""
    words = ["shifter", f"--image={container.image}"]
    words += [f"--workdir={workdir}"] if workdir else []
    words += [f"--volume={_two(bind)}" for bind in container.binds]
    return [*words, *container.options, "--"]


def _podman_hpc(container: Container, gpus: bool, workdir: Path | None) -> list[str]:
    # The network and the processes of the host: ranks meet each other and are signalled by number. Shared
    # memory of the host: the default of 64 MB is too small for loaders and for NCCL.
    words = ["podman-hpc", "run", "--rm", "--net=host", "--pid=host", "--ipc=host", "--env-host"]
    words += ["--gpu"] if gpus else []
    if workdir:  # the others have the folder they are called in; this one has nothing of the host
        words += ["--volume", f"{workdir}:{workdir}", "--workdir", str(workdir)]
    for bind in container.binds:
        words += ["--volume", _two(bind)]
    return [*words, *container.options, container.image]


def _two(bind: str) -> str:
    """A folder that is to be the same inside is said twice."""
    return bind if ":" in bind else f"{bind}:{bind}"


RUNTIMES: Mapping[str, Callable[[Container, bool, Path | None], list[str]]] = {
    "apptainer": _apptainer,
    "singularity": _apptainer,
    "shifter": _shifter,
    "podman-hpc": _podman_hpc,
}
