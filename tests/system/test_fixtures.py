"""The hosts and schedulers that the other system tests stand on are what they say they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest


def test_hosts_have_names_addresses_and_processes_of_their_own(hosts: Any) -> None:
    for index in (1, 4):
        name = hosts.run(index, ["hostname"], check=True).stdout.strip()
        assert name == f"host{index}"
        addresses = hosts.run(index, ["hostname", "-I"], check=True).stdout.split()
        assert addresses == [hosts.address(index)]
    sleeper = hosts.popen(1, ["sleep", "1234"])
    assert "sleep 1234" in hosts.run(1, ["ps", "-eo", "args"], check=True).stdout
    assert "sleep 1234" not in hosts.run(2, ["ps", "-eo", "args"], check=True).stdout
    assert hosts.matching("sleep 1234") == {"host1": ["sleep 1234"]}
    hosts.kill(1)
    assert sleeper.wait(60) != 0
    hosts.up(1)
    assert not hosts.processes(1)


def test_a_host_is_cut_off_and_mended(hosts: Any) -> None:
    ping = ["ping", "-c1", "-W1", "host2"]
    if hosts.run(1, ["which", "ping"]).returncode:
        ping = [sys.executable, "-c", _KNOCK, "host2"]
    assert hosts.run(1, ping).returncode == 0
    hosts.cut(2)
    assert hosts.run(1, ping).returncode != 0
    hosts.mend(2)
    assert hosts.run(1, ping).returncode == 0


# Refused means that somebody is there; a host that is cut off says nothing.
_KNOCK = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except ConnectionRefusedError:
    sys.exit(0)
except OSError:
    sys.exit(1)
"""


def test_rsh_hands_a_line_to_a_shell_and_passes_stdin_on(hosts: Any) -> None:
    line = ["A='two  words';", 'echo "$A" $(hostname) ${PYTHONPATH-none}; cat']
    done = hosts.run(0, [str(hosts.rsh), "-o", "X=y", "root@host3", *line], stdin="from stdin")
    assert done.stdout == "two  words host3 none\nfrom stdin"
    assert hosts.run(0, [str(hosts.rsh), "host3", "exit 7"]).returncode == 7
    assert "Could not resolve" in hosts.run(0, [str(hosts.rsh), "nobody", "true"]).stderr


def test_a_real_ssh_reaches_every_host(hosts: Any, ssh_config: Path) -> None:
    for start in (0, 4):  # from the head, and from one host to the others
        for name in hosts.names[1:]:
            command = [
                "ssh",
                "-F",
                str(ssh_config),
                name,
                "echo $(hostname) ${PYTHONPATH-none}; cat",
            ]
            done = hosts.run(start, command, stdin="in", check=True)
            assert done.stdout == f"{name} none\nin"


def test_mpirun_reaches_every_host(hosts: Any, ssh_config: Path, open_mpi: str) -> None:
    agent = f"ssh -F {ssh_config}"
    command = [open_mpi, "--mca", "plm_rsh_agent", agent, "--host", "host1:2,host3:1"]
    root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    done = hosts.run(1, [*command, "hostname"], env=root, check=True)
    assert sorted(done.stdout.split()) == ["host1", "host1", "host3"]


def test_mpiexec_reaches_every_host(hosts: Any, ssh_config: Path, mpich: str) -> None:
    wrapper = hosts.folder / "ssh-with-settings"
    wrapper.write_text(f'#!/bin/sh\nexec ssh -F {ssh_config} "$@"\n')
    wrapper.chmod(0o755)
    command = [
        mpich,
        "-launcher",
        "ssh",
        "-launcher-exec",
        str(wrapper),
        "-hosts",
        "host1:2,host3:1",
    ]
    done = hosts.run(1, [*command, "-n", "3", "hostname"], check=True)
    assert sorted(done.stdout.split()) == ["host1", "host1", "host3"]


def test_slurm_runs_on_two_nodes(slurm: Any) -> None:
    done = slurm.run(["srun", "-N2", "--ntasks-per-node=2", "hostname"], check=True)
    assert sorted(done.stdout.split()) == ["node1", "node1", "node2", "node2"]
    gpus = ["srun", "-N1", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES"]
    assert slurm.run(gpus, check=True).stdout.strip() == "0,1"
    resolved = slurm.run(
        ["srun", "-N1", "-w", "node1", "getent", "hosts", "node2"], check=True
    ).stdout
    assert resolved.split() == [slurm.hosts.address(2), "node2"]


def test_a_node_without_its_daemon_keeps_its_tasks(slurm: Any) -> None:
    job = slurm.sbatch("#!/bin/sh\nsleep 321\n", "-w", "node2", "-o", "/dev/null")
    # RUNNING is what the controller says; the script is started after it.
    slurm.wait_until(job, "the script", lambda: slurm.hosts.matching("sleep 321"))
    slurm.stop_daemon("node2")
    assert slurm.hosts.matching("sleep 321")
    slurm.up("node2")
    slurm.run(["scancel", job], check=True)
    slurm.wait_idle()
    assert not slurm.hosts.matching("sleep 321")


def test_two_worlds_and_a_crash_do_not_collide(hosts: Any) -> None:
    """The same addresses a second time, in a process that is then killed."""
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from cluster.hosts import Hosts
from cluster.packages import new_folder
folder = new_folder("crash")
world = Hosts(folder, 2)
world.start()
world.popen(2, ["sleep", "4321"])
print(world.run(1, ["getent", "hosts", "host2"]).stdout.split()[0], folder, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address, folder = process.stdout.readline().split()
    assert address == hosts.address(2)
    assert _everywhere("sleep 4321")
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while _everywhere("sleep 4321") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _everywhere("sleep 4321")
    assert not _everywhere(folder)
    subprocess.run(["rm", "-rf", folder], check=True)


def _everywhere(word: str) -> list[str]:
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if word in line and str(os.getpid()) not in line]


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    packages = sys.modules["ridgeline_cluster.packages"]
    monkeypatch.delenv(packages.INSTALL, raising=False)
    with pytest.raises(
        packages.Missing, match="no-such-program not found; as root, `apt-get install p"
    ):
        packages.need_programs(["no-such-program"], ["p"])
