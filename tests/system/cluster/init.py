"""The first process of a host: gives it its name and its own view of some files, then buries the dead.

Run by `hosts.py` inside new namespaces, as `init.py NAME HOSTS_FILE`. When it is killed, the kernel ends
every process of the host: that is the power switch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def main(name: str, hosts_file: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    socket.sethostname(name)
    subprocess.run(["mount", "--bind", hosts_file, "/etc/hosts"], check=True)
    # Daemons want to write to /run; each host has one of its own.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    os.makedirs("/run/sshd", mode=0o755)
    print("ready", flush=True)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            # Whatever is orphaned on this host becomes a child of this process, with a signal at its end.
            signal.sigtimedwait([signal.SIGCHLD], 1)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    main(*sys.argv[1:])
