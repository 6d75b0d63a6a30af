"""The formats there are, by the name that `--format` and `dataset.json` know them by."""

from __future__ import annotations

from pathlib import Path

from ridgeline.data.formats.contract import Format
from ridgeline.data.formats.folder import FOLDER
from ridgeline.data.formats.hdf5 import HDF5
from ridgeline.data.formats.lmdb import LMDB
from ridgeline.data.formats.npy import NPY
from ridgeline.data.formats.parquet import ARROW, PARQUET
from ridgeline.data.formats.tar import TAR
from ridgeline.data.formats.tfrecord import TFRECORD
from ridgeline.data.formats.zip import ZIP
from ridgeline.errors import UsageError

# A folder comes last: whatever is a directory is one.
FORMATS: dict[str, Format] = {
    form.name: form for form in (TAR, ZIP, LMDB, HDF5, NPY, TFRECORD, PARQUET, ARROW, FOLDER)
}


def detect(path: Path) -> tuple[Format, list[Path]]:
    """The format of files that nobody described, and the shards they are."""
    if not path.exists():
        raise UsageError(f"there is no {path}; give a data set, a file of samples or a folder")
    for form in FORMATS.values():
        shards = form.finds(path)
        if shards:
            return form, shards
    known = ", ".join(form.suffix or "a folder" for form in FORMATS.values())
    raise UsageError(f"{path} is in no format that is known by its ending ({known})")
