"""An error that all ranks of srun's, mpirun's and the like have, said once a node. Imports without torch.

Ranks of our own launchers leave their accounts in one folder, those of torchrun have one as well. These
have none, and each a pipe of its own: who has a sentence to say first leaves a mark among the node's
temporary files, and whoever has the same sentence soon after only ends with its exit code. What one rank
alone has to say is another sentence. Called by `uncaught.py` and `cli.py`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from pathlib import Path

from ridgeline.errors import UsageError
from ridgeline.launch.env import read_rank_env

_OTHERS = ("single process", "torchrun")
"""Where nobody says it a second time, or somebody else sees to it."""
_MARK = "ridgeline-said-"
_AS_ONE_S = 60.0
"""Within which ranks that say the same say it of one thing."""


def is_said(text: str) -> bool:
    """Whether another rank on this node has said it. Where standard error is a file: in that file."""
    try:
        env = read_rank_env(needs_master=False)
        if env.source in _OTHERS or env.local_world_size == 1:
            return False
        place = os.fstat(2)
        file = f"{place.st_dev} {place.st_ino}" if stat.S_ISREG(place.st_mode) else ""
        words = "\0".join((env.source, env.job, str(env.world_size), file, text))
        folder, mine = Path(tempfile.gettempdir()), f"{_MARK}{os.getuid()}-"
        for old in folder.glob(f"{mine}*"):
            if time.time() - old.lstat().st_mtime > _AS_ONE_S:
                old.unlink(missing_ok=True)
        mark = folder / (mine + hashlib.sha256(words.encode()).hexdigest()[:16])
        return _is_anothers(mark, env.rank)
    except (OSError, UsageError):
        return False  # said too often is better than not at all


def _is_anothers(mark: Path, rank: int) -> bool:
    """Whether `mark` is another rank's; where it is nobody's it becomes this one's."""
    try:
        descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return mark.lstat().st_uid == os.getuid() and mark.read_text() != str(rank)
    with open(descriptor, "w") as out:
        out.write(str(rank))
    return False
