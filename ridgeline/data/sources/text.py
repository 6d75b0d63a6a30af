"""Byte-level language modelling on any files, by default the Python standard library's own sources.

No tokenizer and no download, so that a language model can be trained on any machine: the vocabulary
is the 256 bytes, and one more for [MASK] when the task is masked, or for the separator when files are
packed as documents (`data/packing.py`). Built by `data/build.py`.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ridgeline.data.arguments import choice, whole, wrong_value
from ridgeline.data.keyed import keyed_bits, keyed_uniform
from ridgeline.data.packing import IGNORED_TARGET, Packed, pack_stream, pack_whole
from ridgeline.data.source import SourceInfo
from ridgeline.errors import UsageError

MASK_TOKEN = 256
SEPARATOR_TOKEN = 256
_PACKERS = {"documents": pack_stream, "fit": pack_whole}
_MASKED_FRACTION = 0.15
_EVAL_FRACTION = 0.05
_STDLIB_MAX_BYTES = 8_000_000
# Installed packages differ from machine to machine, and tests are half of the rest.
_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


class Text:
    """Windows of `seq_len` bytes, end to end; targets are the next bytes, or the masked ones."""

    def __init__(
        self, data: np.ndarray, seq_len: int, task: str, seed: int, new_masks_each_epoch: bool
    ) -> None:
        self._data = data
        self._seq_len = seq_len
        self._task = task
        self._seed = seed
        self._new_masks_each_epoch = new_masks_each_epoch
        self.info = SourceInfo(
            input_shape=(seq_len,),
            input_dtype=torch.int64,
            target_shape=(seq_len,),
            target_dtype=torch.int64,
            num_classes=257 if task == "masked_lm" else 256,
            task=task,
            unit="tokens",
            units_per_sample=seq_len,
        )

    def __len__(self) -> int:
        return (len(self._data) - 1) // self._seq_len

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        window = np.arange(self._seq_len + 1)
        tokens = self._data[indices[:, None] * self._seq_len + window].astype(np.int64)
        if self._task == "masked_lm":
            inputs, targets = self._mask(tokens[:, :-1], indices, epoch)
        else:
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
        return (
            torch.from_numpy(np.ascontiguousarray(inputs)),
            torch.from_numpy(np.ascontiguousarray(targets)),
        )

    def _mask(
        self, tokens: np.ndarray, indices: np.ndarray, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """BERT's rule: of the chosen positions 80 % are hidden, 10 % replaced, 10 % left."""
        seq_len = self._seq_len
        num_masked = max(1, round(_MASKED_FRACTION * seq_len))
        # Held-out masks stay the same, or the held-out losses of two epochs would not compare.
        key = (self._seed, epoch if self._new_masks_each_epoch else 0)
        draws = keyed_bits(key, indices, 2 * seq_len)
        rank_bits, new_bytes = draws[:, :seq_len], draws[:, seq_len:] % np.uint64(256)
        positions = np.argsort(rank_bits, axis=1, kind="stable")[:, :num_masked]
        chosen = np.zeros(tokens.shape, dtype=bool)
        np.put_along_axis(chosen, positions, True, axis=1)
        fate = keyed_uniform((*key, 1), indices, seq_len)
        inputs = np.where(chosen & (fate < 0.8), MASK_TOKEN, tokens)
        replaced = chosen & (fate >= 0.8) & (fate < 0.9)
        inputs = np.where(replaced, new_bytes.astype(np.int64), inputs)
        return inputs, np.where(chosen, tokens, IGNORED_TARGET)


class Documents:
    """Files as documents, packed into sequences of `seq_len` tokens; targets are the next bytes."""

    def __init__(self, packed: Packed, notes: list[str]) -> None:
        self._packed = packed
        self.notes = notes
        num_sequences, seq_len = packed.tokens_ST.shape
        self._num_sequences = num_sequences
        self.info = SourceInfo(
            input_shape=(seq_len,),
            input_dtype=torch.int64,
            target_shape=(seq_len,),
            target_dtype=torch.int64,
            num_classes=SEPARATOR_TOKEN + 1,
            task="causal_lm",
            unit="tokens",
            units_per_sample=seq_len,
        )

    def __len__(self) -> int:
        return self._num_sequences

    def fetch(self, indices: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        inputs = self._packed.tokens_ST[indices].astype(np.int64)
        targets = self._packed.targets_ST[indices].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def count_targets(self, indices: np.ndarray) -> np.ndarray:
        counts: np.ndarray = self._packed.num_targets_S[indices]
        return counts


def build_text(
    seed: int,
    *,
    path: Any = None,
    pattern: Any = "**/*",
    seq_len: Any = 128,
    max_bytes: Any = None,
    task: Any = "causal_lm",
    pack: Any = "none",
) -> tuple[Text | Documents, Text | Documents]:
    """`path`: a file, a folder (its files that match `pattern`) or a list of either.

    `max_bytes` keeps the first so many; without it the standard library is cut at 8,000,000 bytes
    and the user's own files are read whole. `pack` makes each file a document with token 256 before it
    and ignores targets in another document: `documents` puts them end to end, `fit` cuts only those
    that are longer than a sequence.
    """
    seq_len = whole("text", "seq_len", seq_len)
    task = choice("text", "task", task, ("causal_lm", "masked_lm"))
    pack = choice("text", "pack", pack, ("none", *_PACKERS))
    if pack != "none":
        seq_len = whole("text", "seq_len", seq_len, minimum=2)
        if task != "causal_lm":
            raise wrong_value("text", "pack", pack, f"none with task={task}; it is for causal_lm")
    if max_bytes is not None:
        max_bytes = whole("text", "max_bytes", max_bytes)
    elif path is None:
        max_bytes = _STDLIB_MAX_BYTES
    if not isinstance(pattern, str) or not pattern or Path(pattern).is_absolute():
        raise wrong_value("text", "pattern", pattern, "a relative pattern such as '**/*.txt'")
    files = _stdlib_files() if path is None else _user_files(path, pattern)
    documents = _read(files, max_bytes)
    num_bytes = sum(map(len, documents))
    where = "the standard library" if path is None else f"path {path!r}"
    num_eval = int(num_bytes * _EVAL_FRACTION)
    if num_eval < seq_len + 1:
        needed = int((seq_len + 1) / _EVAL_FRACTION) + 1
        raise UsageError(
            f"source 'text': {where} (data.args) gives {num_bytes} bytes, too few for one sample "
            f"of seq_len={seq_len} in the held-out 5 %; it takes about {needed} bytes, or "
            "a smaller seq_len"
        )
    if pack != "none":
        first, last = _split(documents, num_bytes - num_eval)
        return _pack(first, seq_len, pack), _pack(last, seq_len, pack)
    data = np.concatenate(documents)
    train, held_out = data[:-num_eval], data[-num_eval:]
    return (
        Text(train, seq_len, task, seed, new_masks_each_epoch=True),
        Text(held_out, seq_len, task, seed, new_masks_each_epoch=False),
    )


def _split(
    documents: list[np.ndarray], num_first: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The first so many bytes and the rest; the document they meet in is one in both."""
    first, rest = [], []
    for document in documents:
        here = min(len(document), num_first)
        num_first -= here
        first.append(document[:here])
        rest.append(document[here:])
    return [d for d in first if len(d)], [d for d in rest if len(d)]


def _pack(documents: list[np.ndarray], seq_len: int, pack: str) -> Documents:
    packed = _PACKERS[pack](documents, seq_len, SEPARATOR_TOKEN)
    note = (
        f"data.args.pack={pack}: {len(documents)} documents in {len(packed.tokens_ST)} sequences of "
        f"{seq_len}, {100 * packed.fill:.1f} % full, {packed.num_cut} cut; token {SEPARATOR_TOKEN} "
        "stands before each"
    )
    return Documents(packed, [note])


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _STDLIB_LEFT_OUT]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    if not found:
        raise UsageError(
            f"source 'text': this Python's standard library at {root} holds no .py files; give "
            "'path' in data.args"
        )
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _user_files(path: Any, pattern: str) -> list[Path]:
    entries = path if isinstance(path, list | tuple) else [path]
    if not entries or not all(isinstance(entry, str | os.PathLike) for entry in entries):
        raise wrong_value("text", "path", path, "a file, a folder or a list of them")
    files: list[Path] = []
    for entry in map(Path, entries):
        if entry.is_dir():
            found = sorted(file for file in entry.glob(pattern) if file.is_file())
            if not found:
                raise UsageError(
                    f"source 'text': no file in folder {str(entry)!r} (path in data.args) matches "
                    f"pattern {pattern!r}"
                )
            files += found
        elif entry.is_file():
            files.append(entry)
        else:
            raise UsageError(
                f"source 'text': path {str(entry)!r} in data.args does not exist; give a file, a "
                "folder or a list of them"
            )
    return files


def _read(files: list[Path], max_bytes: int | None) -> list[np.ndarray]:
    pieces = []
    left = max_bytes
    for file in files:
        if left == 0:
            break
        try:
            piece = np.fromfile(file, dtype=np.uint8, count=-1 if left is None else left)
        except OSError as error:
            raise UsageError(f"source 'text': cannot read {str(file)!r}: {error}") from error
        pieces.append(piece)
        if left is not None:
            left -= len(piece)
    return pieces
