"""Programs that the system tests need and pip cannot bring: found, installed where that is allowed, or
asked for by name. `RIDGELINE_INSTALL=1` allows it; `make system` and `.ci/run` set that."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

INSTALL = "RIDGELINE_INSTALL"
_INSTALL_S = 300
# Daemons live where the path of a user does not always lead.
_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


class Missing(Exception):
    """Why these tests cannot run here, and what would help: one sentence."""


def find(program: str) -> str | None:
    return shutil.which(program, path=_PATH)


def need_programs(programs: Sequence[str], packages: Sequence[str]) -> dict[str, str]:
    """The path of each program; `packages` are Debian's, in which they are."""
    missing = [name for name in programs if find(name) is None]
    if missing and os.environ.get(INSTALL) == "1":
        _install(packages)
        missing = [name for name in programs if find(name) is None]
    if missing:
        raise Missing(
            f"{', '.join(missing)} not found; as root, `apt-get install {' '.join(packages)}`, or let "
            f"`make system` do it ({INSTALL}=1)"
        )
    return {name: str(find(name)) for name in programs}


def need_namespaces() -> None:
    """Hosts on one machine take root, and a machine or container that lets it make namespaces."""
    if os.geteuid() != 0:
        raise Missing("hosts are made of namespaces, which takes root; run these tests as root")
    need_programs(["ip", "unshare", "nsenter", "setpriv"], ["iproute2", "util-linux"])
    kinds = ["--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc"]
    done = subprocess.run(["unshare", *kinds, "true"], capture_output=True, text=True, timeout=150)
    if done.returncode != 0:
        raise Missing(
            f"this machine gives root no namespaces ({done.stderr.strip()}); in a container, start it "
            "with the capability SYS_ADMIN"
        )


def _install(packages: Sequence[str]) -> None:
    if os.geteuid() != 0 or find("apt-get") is None:
        return
    command = ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "PATH": _PATH}
    said = ""
    for call in ([*command, "install", *packages], ["apt-get", "-qq", "update"]) * 2:
        try:
            done = subprocess.run(
                call, env=environment, capture_output=True, text=True, timeout=_INSTALL_S
            )
        except subprocess.TimeoutExpired:
            raise Missing(f"`{' '.join(call)}` did not end within {_INSTALL_S} s") from None
        if done.returncode == 0 and call[-1] != "update":
            return
        said = (done.stderr.strip().splitlines() or [said])[-1]
    raise Missing(f"`apt-get install {' '.join(packages)}` failed: {said}")


def new_folder(prefix: str) -> Path:
    """A folder with a short path: sockets lie in it, and their paths may have 107 letters."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix=f"ridgeline-{prefix}-", dir="/tmp"))
    folder.chmod(0o755)
    return folder
