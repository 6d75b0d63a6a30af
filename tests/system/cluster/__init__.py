"""Several hosts and a real Slurm on one machine: what the tests of `tests/system` run on.

`hosts.py` makes hosts of namespaces, `ssh.py` puts a real sshd on each, `slurm.py` a real Slurm, and
`packages.py` finds or installs the programs. Loaded by `conftest.py`, by its path: tests are no package.
"""
