"""Fixtures of the system tests: a Slurm, several hosts, ssh between them, Open MPI and MPICH.

All are real programs. Where one is missing, its tests are skipped and the end of the report says what to
install; with `RIDGELINE_INSTALL=1` (`make system`) it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAME = "ridgeline_cluster"
_missing: set[str] = set()


def _load_cluster() -> None:
    """The folder `cluster` as a package: tests are none, so it is loaded by its path."""
    if _NAME in sys.modules:
        return
    folder = Path(__file__).with_name("cluster")
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)


_load_cluster()
_hosts, _jobs, _packages, _slurm, _ssh = (
    importlib.import_module(f"{_NAME}.{name}")
    for name in ("hosts", "jobs", "packages", "slurm", "ssh")
)


def _skip(reason: str) -> None:
    _missing.add(reason)
    pytest.skip(reason)


def _need(programs: list[str], packages: list[str], namespaces: bool = True) -> Any:
    try:
        if namespaces:
            _packages.need_namespaces()
        return _packages.need_programs(programs, packages)
    except _packages.Missing as error:
        return _skip(str(error))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reason in sorted(_missing):
        terminalreporter.write_line(f"system tests were skipped: {reason}", yellow=True)


@pytest.fixture(scope="session")
def slurm() -> Iterator[Any]:
    """A Slurm with two nodes of four cores; `cluster/slurm.py` says what can be done to it."""
    _need(list(_slurm.PROGRAMS), list(_slurm.PACKAGES))
    folder = _packages.new_folder("slurm")
    cluster = _slurm.Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def hosts() -> Iterator[Any]:
    """Four hosts; `cluster/hosts.py` says what can be done to them."""
    _need([], [])
    folder = _packages.new_folder("hosts")
    world = _hosts.Hosts(folder, 4)
    try:
        world.start()
        yield world
    finally:
        world.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ssh_config(hosts: Any) -> Path:
    """A real sshd on each of `hosts`; the file for `ssh -F`."""
    _need(list(_ssh.PROGRAMS), list(_ssh.PACKAGES))
    return Path(_ssh.start_sshd(hosts))


@pytest.fixture(scope="session")
def open_mpi() -> str:
    """The path of Open MPI's mpirun."""
    found = _need(["mpirun.openmpi"], ["openmpi-bin"], namespaces=False)
    return str(found["mpirun.openmpi"])


@pytest.fixture(scope="session")
def mpich() -> str:
    """The path of MPICH's mpiexec."""
    return str(_need(["mpiexec.mpich"], ["mpich"], namespaces=False)["mpiexec.mpich"])


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of four ranks on this machine alone, which every other start of them has to give."""
    run = tmp_path_factory.mktemp("reference") / "run"
    words = [*_jobs.TRAINING, f"train.steps={_jobs.LONGEST}", "-n", 4, "--run", run]
    done = subprocess.run(
        _jobs.ridgeline("train", *words),
        env=_hosts.base_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(_jobs.losses(run))
