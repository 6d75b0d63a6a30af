"""A real Slurm on several hosts of one machine: munged and slurmctld on the head, a slurmd on each node.

The nodes are those of `hosts.py`, so each has an address, a name and a power switch of its own. Key,
sockets, state and logs lie in one folder; there is no systemd, no cgroup and no database. Waiting times are
short: a node that is silent is lost after a minute instead of five, and a requeued job starts after a few
seconds instead of two minutes.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .hosts import ROOT, Hosts, wait_until
from .packages import need_programs

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel")
PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY")
_CPUS = 4


class Slurm:
    """`num` nodes, `node1` and so on, in `main` and in `high`, which takes nodes from `main`."""

    def __init__(self, folder: Path, num: int = 2, gpus: int = 2, timeout_s: int = 60) -> None:
        self.programs = need_programs(PROGRAMS, PACKAGES)
        self.folder = folder
        self.hosts = Hosts(folder, num, "node")
        self.num = num
        self.nodes = self.hosts.names[1:]
        self.conf = folder / "slurm.conf"
        self._gpus, self._timeout_s = gpus, timeout_s
        self._daemons: dict[int, subprocess.Popen[str]] = {}

    @property
    def environ(self) -> dict[str, str]:
        """What a command needs to talk to this Slurm, from the head."""
        return self.hosts.environ

    def start(self) -> None:
        for name in ("state", "log", "dev", "munge"):
            (self.folder / name).mkdir()
        self._write_settings()
        self.hosts.start()
        self.hosts.environ["SLURM_CONF"] = str(self.conf)
        self._start_munge()
        self._daemon(0, [self.programs["slurmctld"], "-D", "-f", str(self.conf)], "slurmctld")
        for index in range(1, self.num + 1):
            self._start_slurmd(index)
        self.wait_idle()

    def close(self) -> None:
        self.hosts.close()

    # Commands.

    def run(self, argv: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """A command on the head, where users log in."""
        return self.hosts.run(0, argv, **options)

    def sbatch(self, script: str, *options: str, cwd: Path = ROOT) -> str:
        """Give a script to Slurm; the job's id."""
        command = ["sbatch", "--parsable", *options]
        return self.run(command, stdin=script, cwd=cwd, check=True).stdout.strip()

    def show(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        command = ["scontrol", "--oneliner", "show", "job", job]
        done = self.run(command)
        # A controller with too much to do hangs up on those who ask, which ends them by a signal.
        said = (done if done.returncode == 0 else self.run(command, check=True)).stdout
        # Values may have blanks in them, so each goes up to the next name.
        return dict(re.findall(r"(\S+?)=(.*?)(?= [\w/:]+=|$)", said.splitlines()[0]))

    def wait_for(self, job: str, *states: str, timeout_s: float = 480) -> dict[str, str]:
        """Wait until the job is in one of these states, or over; what Slurm says then."""
        wanted = states or OVER
        seen: dict[str, str] = {}

        def arrived() -> bool:
            seen.update(self.show(job))
            if seen["JobState"] in OVER and seen["JobState"] not in wanted:
                raise AssertionError(
                    f"job {job} is {seen['JobState']}, not {wanted}\n{self.tail(job)}"
                )
            return seen["JobState"] in wanted

        try:
            wait_until(f"job {job} to be {' or '.join(wanted)}", arrived, timeout_s, 0.25)
        except TimeoutError as error:
            raise AssertionError(f"{error}; it is {seen}\n{self.tail(job)}") from None
        return seen

    def wait_until(
        self, job: str, what: str, test: Callable[[], Any], timeout_s: float = 360
    ) -> None:
        """Wait for something that a job does; fails at once when the job is over before."""

        def happened() -> bool:
            if test():
                return True
            state = self.show(job)["JobState"]
            if state in OVER and not test():
                raise AssertionError(f"job {job} is {state} before {what}\n{self.tail(job)}")
            return False

        try:
            wait_until(what, happened, timeout_s, 0.2)
        except TimeoutError as error:
            raise AssertionError(f"{error}; {self.show(job)}\n{self.tail(job)}") from None

    def tail(self, job: str) -> str:
        """The end of what a job has printed."""
        path = Path(self.show(job).get("StdOut", ""))
        return path.read_text(errors="replace")[-4000:] if path.is_file() else f"no {path}"

    def node_states(self) -> dict[str, str]:
        """`sinfo`'s word for each node: `idle`, `mixed`, `down*`."""
        said = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"], check=True).stdout
        return dict(line.split() for line in said.splitlines())

    def wait_idle(self, timeout_s: float = 240) -> None:
        """Until every node is there and has nothing to do."""

        def idle() -> bool:
            done = self.run(["sinfo", "-h", "-N", "-p", "main", "-o", "%N %T"])
            states = dict(line.split() for line in done.stdout.splitlines())
            return len(states) == self.num and set(states.values()) == {"idle"}

        try:
            wait_until("every node to be idle", idle, timeout_s, 0.2)
        except TimeoutError as error:
            states = self.run(["sinfo", "-N", "-l"]).stdout + self.run(["squeue", "-l"]).stdout
            raise AssertionError(f"{error}\n{states}{self._logs()}") from None

    # Harm.

    def kill(self, node: str) -> None:
        """Power loss: slurmd, its helpers and every task on the node are gone at once."""
        self.hosts.kill(self.hosts.index(node))
        self._daemons.pop(self.hosts.index(node)).wait()

    def stop_daemon(self, node: str) -> None:
        """The node's slurmd alone is killed; tasks and their helpers live on."""
        index = self.hosts.index(node)
        for process in self.hosts.processes(index):
            if process.name() == "slurmd":
                process.kill()
        self._daemons.pop(index).wait()

    def up(self, node: str) -> None:
        """Switch on, or start slurmd again; comes back when Slurm sees the node."""
        index = self.hosts.index(node)
        self.hosts.up(index)
        if index not in self._daemons:
            self._start_slurmd(index)

        def seen() -> bool:
            state = self.node_states()[node]
            return not any(word in state for word in ("down", "unknown", "*"))

        wait_until(f"Slurm to see {node}", seen, 300, 0.25)

    def recover(self) -> None:
        """For the next test: no job, and every node there and idle."""
        self.run(["scancel", "--user=root"])
        for node in self.nodes:
            self.up(node)
        self.wait_idle()

    def _start_munge(self) -> None:
        munge = self.folder / "munge"
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o400)
        munge.chmod(0o700)
        files = {"key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={munge / value}" for name, value in files.items()]
        socket = self.folder / "munge.socket"
        command = [
            self.programs["munged"],
            "-F",
            "--force",
            "--num-threads=2",
            f"--socket={socket}",
        ]
        self._daemon(0, [*command, *options], "munged")
        wait_until("munged", lambda: socket.exists() and stat.S_ISSOCK(socket.stat().st_mode), 100)

    def _start_slurmd(self, index: int) -> None:
        node = self.hosts.names[index]
        for name in ("spool", "tmp"):
            (self.folder / f"{name}.{node}").mkdir(exist_ok=True)
        command = [self.programs["slurmd"], "-D", "-f", str(self.conf), "-N", node]
        self._daemons[index] = self._daemon(index, command, f"slurmd.{node}")

    def _daemon(self, index: int, command: list[str], name: str) -> subprocess.Popen[str]:
        with (self.folder / "log" / f"{name}.out").open("a") as log:
            return self.hosts.popen(
                index,
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _write_settings(self) -> None:
        folder, head = self.folder, self.hosts
        settings: dict[str, Any] = {
            "ClusterName": "ridgeline",
            "SlurmctldHost": f"{head.names[0]}({head.address(0)})",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            # How long a requeued job waits follows from how long credentials are good.
            "AuthInfo": f"socket={folder / 'munge.socket'},cred_expire=5",
            "CredType": "cred/munge",
            "StateSaveLocation": folder / "state",
            "SlurmdSpoolDir": folder / "spool.%n",
            "SlurmctldPidFile": folder / "slurmctld.pid",
            "SlurmdPidFile": folder / "slurmd.%n.pid",
            "SlurmctldLogFile": folder / "log" / "slurmctld.log",
            "SlurmdLogFile": folder / "log" / "slurmd.%n.log",
            "TmpFS": folder / "tmp.%n",
            "MailProg": "/bin/true",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/affinity",
            "TaskPluginParam": "none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=2,bf_interval=2,batch_sched_delay=0",
            "SlurmdParameters": "config_overrides",  # the cores are not really there
            "PropagateResourceLimits": "NONE",
            "ReturnToService": 2,
            "JobRequeue": 1,
            "RequeueExit": 99,
            "SlurmctldTimeout": 10,
            "SlurmdTimeout": self._timeout_s,
            "MessageTimeout": 10,
            "MinJobAge": 3600,
            "KillWait": 5,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "SlurmctldParameters": "preempt_send_user_signal",
            "GresTypes": "gpu",
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        shape = f"CPUs={_CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={_CPUS} ThreadsPerCore=1"
        for index, node in enumerate(self.nodes, 1):
            where = f"NodeHostname={node} NodeAddr={head.address(index)}"
            gpus = f"Gres=gpu:{self._gpus}" if self._gpus else ""
            lines.append(f"NodeName={node} {where} {shape} RealMemory=8000 {gpus} State=UNKNOWN")
        every = f"Nodes={','.join(self.nodes)} MaxTime=INFINITE State=UP"
        lines += [
            f"PartitionName=main {every} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=5",
            f"PartitionName=high {every} PriorityTier=10 PreemptMode=OFF",
        ]
        self.conf.write_text("\n".join(lines) + "\n", encoding="utf-8")
        # slurmd insists on device files; these are twins of /dev/null.
        devices = [folder / "dev" / f"gpu{number}" for number in range(self._gpus)]
        for path in devices:
            os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        about = [f"NodeName={','.join(self.nodes)} Name=gpu File={path}" for path in devices]
        (folder / "gres.conf").write_text("\n".join(["AutoDetect=off", *about]) + "\n")

    def _logs(self) -> str:
        time.sleep(0.2)
        paths = sorted((self.folder / "log").glob("*"))
        ends = [f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in paths]
        return "\n".join(ends)
