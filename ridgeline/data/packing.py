"""Documents of different lengths in sequences of one length, each token exactly once.

A separator token stands before every document; what is left over at the end of a sequence is filled
with separators. A target that would lie in another document is ignored, and a token is still the target
of the one before it where a document goes on in another sequence. Everything is laid out once, as a
function of the documents alone, so any sequence can be read without those before it. Called by
`sources/text.py`; models keep documents apart by the separator (`Llama(separator=)`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORED_TARGET = -100


@dataclass(frozen=True)
class Packed:
    """Sequences and the target of each position; S sequences of T tokens."""

    tokens_ST: np.ndarray
    targets_ST: np.ndarray
    num_targets_S: np.ndarray
    """Targets that are not ignored."""
    num_cut: int
    """Documents that lie in more than one sequence."""
    fill: float
    """Share of the positions that hold a document's token or its separator."""


@dataclass(frozen=True)
class _Piece:
    """A stretch [start, stop) of a document, which goes into one sequence behind a separator."""

    document: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start + 1


def pack_stream(documents: Sequence[np.ndarray], seq_len: int, separator: int) -> Packed:
    """All documents end to end, cut wherever a sequence is full; only the last one is filled up."""
    documents = [document for document in documents if len(document)]
    lengths = np.array([len(document) + 1 for document in documents], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    num_used = int(lengths.sum())
    num_sequences = -(-num_used // seq_len)
    tokens = np.full(num_sequences * seq_len + 1, separator, dtype=np.int32)
    for start, document in zip(starts.tolist(), documents, strict=True):
        tokens[start + 1 : start + 1 + len(document)] = document
    targets = np.where(tokens[1:] == separator, IGNORED_TARGET, tokens[1:]).astype(np.int32)
    last = starts + lengths - 1
    num_cut = int((starts // seq_len != last // seq_len).sum())
    shape = (num_sequences, seq_len)
    return _packed(tokens[:-1].reshape(shape), targets.reshape(shape), num_cut, num_used)


def pack_whole(documents: Sequence[np.ndarray], seq_len: int, separator: int) -> Packed:
    """Documents that fit into a sequence are never cut: each goes where the least room is left.

    Longest first (best-fit decreasing), which wastes little. A document that is longer than a sequence
    fills as many as it can, and its rest is placed like a document of its own. Sequences come in the
    order of the first documents in them, so that the first so many are not those of the longest.
    """
    pieces = [piece for index, d in enumerate(documents) for piece in _cut(index, len(d), seq_len)]
    order = sorted(range(len(pieces)), key=lambda i: (-pieces[i].size, i))
    bins = _best_fit([pieces[i].size for i in order], seq_len)
    first_in: dict[int, int] = {}
    for index, number in zip(order, bins, strict=True):
        first_in[number] = min(index, first_in.get(number, index))
    rows = {number: row for row, number in enumerate(sorted(first_in, key=first_in.__getitem__))}
    num_sequences = len(rows)
    tokens = np.full((num_sequences, seq_len), separator, dtype=np.int32)
    targets = np.full((num_sequences, seq_len), IGNORED_TARGET, dtype=np.int32)
    used = [0] * num_sequences
    for index, number in zip(order, bins, strict=True):
        row = rows[number]
        piece, at = pieces[index], used[row]
        document = documents[piece.document]
        size = piece.size - 1
        tokens[row, at + 1 : at + 1 + size] = document[piece.start : piece.stop]
        # A separator predicts the first token of a document, not one in its middle.
        first = at if piece.start == 0 else at + 1
        following = document[piece.start + (first - at) : piece.stop + 1]
        targets[row, first : first + len(following)] = following
        used[row] = at + piece.size
    ends = (piece.stop == len(documents[piece.document]) for piece in pieces if piece.start > 0)
    num_cut = sum(ends)
    return _packed(tokens, targets, num_cut, sum(used))


def _packed(tokens: np.ndarray, targets: np.ndarray, num_cut: int, num_used: int) -> Packed:
    counts = (targets != IGNORED_TARGET).sum(1)
    return Packed(tokens, targets, counts, num_cut, num_used / max(tokens.size, 1))


def _cut(document: int, length: int, seq_len: int) -> list[_Piece]:
    room = seq_len - 1
    return [_Piece(document, start, min(start + room, length)) for start in range(0, length, room)]


def _best_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """The bin of each size, given in descending order: of those it fits in, the fullest.

    Bins are kept by the room they have left, and bit r of `rooms` says that some have r; so a size
    finds its bin at once, however many there are.
    """
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms, num_bins = 0, 0
    found: list[int] = []
    for size in sizes:
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, num_bins
            num_bins += 1
        found.append(chosen)
        by_room[room - size].append(chosen)
        rooms |= 1 << (room - size)
    return found
