"""A real sshd on each of several hosts, with keys and settings of its own: nobody's ~/.ssh and no /etc/ssh
is read or written. `ssh -F FILE host1` from the head or from any host."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from .hosts import Hosts, wait_until
from .packages import need_programs

PROGRAMS = ("sshd", "ssh", "ssh-keygen")
PACKAGES = ("openssh-server", "openssh-client")


def start_sshd(hosts: Hosts) -> Path:
    """Start one on every host but the head; the path of the client's settings."""
    programs = need_programs(PROGRAMS, PACKAGES)
    folder = hosts.folder / "ssh"
    folder.mkdir(mode=0o700)
    for name in ("host_key", "user_key"):
        command = [
            programs["ssh-keygen"],
            "-q",
            "-t",
            "ed25519",
            "-N",
            "",
            "-f",
            str(folder / name),
        ]
        subprocess.run(command, check=True, timeout=150)
    (folder / "authorized").write_text((folder / "user_key.pub").read_text())
    key = (folder / "host_key.pub").read_text()
    known = "".join(f"{name},{hosts.address(i)} {key}" for i, name in enumerate(hosts.names))
    (folder / "known").write_text(known)
    server = {
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized",
        "PermitRootLogin": "prohibit-password",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "UsePAM": "no",
        "StrictModes": "no",  # the folder lies under /tmp, which all may write to
        "UseDNS": "no",
        "PidFile": "none",
        "MaxStartups": "100",
    }
    client = {
        "IdentityFile": folder / "user_key",
        "IdentitiesOnly": "yes",
        "UserKnownHostsFile": folder / "known",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
        "BatchMode": "yes",
        "User": "root",
        "LogLevel": "ERROR",
    }
    _write(folder / "sshd_config", server)
    _write(folder / "ssh_config", client)
    for index in range(1, hosts.num + 1):
        start_one(hosts, index)
    return folder / "ssh_config"


def start_one(hosts: Hosts, index: int) -> None:
    """The sshd of one host; again after the host has lost its power."""
    folder = hosts.folder / "ssh"
    sshd = need_programs(PROGRAMS, PACKAGES)["sshd"]
    with (folder / f"{hosts.names[index]}.log").open("a") as log:
        command = [sshd, "-D", "-e", "-f", str(folder / "sshd_config")]
        hosts.popen(index, command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    client = ["ssh", "-F", str(folder / "ssh_config"), hosts.names[index], "true"]
    wait_until(
        f"sshd on {hosts.names[index]}",
        lambda: hosts.run(0, client, timeout=100).returncode == 0,
        100,
    )


def _write(path: Path, settings: dict[str, Any]) -> None:
    path.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
