"""Packing: every token once, targets inside documents only, and a loss that any split adds up to."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.data.build import as_source, build_sources
from ridgeline.data.loader import Loader
from ridgeline.data.packing import IGNORED_TARGET, pack_stream, pack_whole
from ridgeline.data.subset import FirstSamples
from ridgeline.errors import UsageError
from ridgeline.models.llama import Llama, document_mask
from ridgeline.train.tasks import TASKS

SEP = 256
PACKERS = {"documents": pack_stream, "fit": pack_whole}


def some_documents(num=60, seed=0, longest=50):
    """Of every length from 1 on, with ids in the tokens, so that no two tokens are the same."""
    rng = np.random.default_rng(seed)
    lengths = np.concatenate([[1, 1, 2, 7, 8, 9, 15, 16, 17], rng.integers(1, longest, num)])
    starts = np.cumsum(lengths) - lengths + 1000
    return [np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)]


@pytest.mark.parametrize("pack", PACKERS)
@pytest.mark.parametrize("seq_len", [2, 8, 16, 64])
def test_no_token_is_lost_or_repeated(pack, seq_len):
    documents = some_documents()
    packed = PACKERS[pack](documents, seq_len, SEP)
    tokens = packed.tokens_ST.ravel()
    assert sorted(tokens[tokens != SEP]) == np.concatenate(documents).tolist()
    # Every token is a target exactly once: of the one before it, or of its document's separator.
    targets = packed.targets_ST.ravel()
    assert sorted(targets[targets != IGNORED_TARGET]) == np.concatenate(documents).tolist()
    counted = targets != IGNORED_TARGET
    first = {document[0] for document in documents}
    for token, target in zip(tokens[counted], targets[counted], strict=True):
        assert (token == SEP and target in first) or token + 1 == target
        assert token == SEP or target not in first
    assert (packed.num_targets_S == (packed.targets_ST != IGNORED_TARGET).sum(1)).all()


def test_a_stream_is_full_but_for_its_end():
    documents = some_documents()
    packed = pack_stream(documents, 16, SEP)
    num = sum(len(d) + 1 for d in documents)
    assert len(packed.tokens_ST) == -(-num // 16)
    assert packed.fill == num / packed.tokens_ST.size
    assert (packed.tokens_ST.ravel()[num:] == SEP).all()
    assert packed.num_cut > 0


def test_documents_that_fit_are_whole_and_waste_is_small():
    documents = some_documents(num=400, longest=72)
    packed = pack_whole(documents, 64, SEP)
    row_of = {t: row for row, tokens in enumerate(packed.tokens_ST) for t in tokens.tolist()}
    for document in documents:
        assert len(document) > 63 or row_of[document[0]] == row_of[document[-1]]
    assert packed.num_cut == sum(len(d) > 63 for d in documents)
    assert packed.fill > 0.95
    assert pack_whole(some_documents(num=400, longest=24), 64, SEP).fill > 0.99
    again = pack_whole(documents, 64, SEP)
    assert (again.tokens_ST == packed.tokens_ST).all()


def test_a_document_of_several_sequences_keeps_its_targets():
    packed = pack_whole([np.arange(1000, 1020)], 8, SEP)
    assert packed.tokens_ST.tolist() == [
        [SEP, *range(1000, 1007)],
        [SEP, *range(1007, 1014)],
        [SEP, *range(1014, 1020), SEP],
    ]
    ignored = IGNORED_TARGET
    assert packed.targets_ST.tolist() == [
        [*range(1000, 1008)],
        [ignored, *range(1008, 1015)],
        [ignored, *range(1015, 1020), ignored, ignored],
    ]


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(3)
    for index in range(120):
        size = int(rng.integers(1, 60)) if index else 0  # one file is empty
        data = rng.integers(0, 256, size, dtype=np.uint8)
        (tmp_path / f"{index:03}.txt").write_bytes(data.tobytes())
    return tmp_path


@pytest.mark.parametrize("pack", PACKERS)
def test_the_source(folder, pack):
    args = {"path": str(folder), "seq_len": 32, "pack": pack}
    train, held_out = build_sources("text", args, 0)
    found = []
    for source in (train, held_out):
        inputs, targets = source.fetch(np.arange(len(source)), 0)
        assert inputs.dtype == targets.dtype == torch.int64
        assert source.info.num_classes == 257
        counts = source.count_targets(np.arange(len(source)))
        assert counts.tolist() == (targets != IGNORED_TARGET).sum(1).tolist()
        found += inputs[inputs != SEP].tolist()
    data = b"".join(file.read_bytes() for file in sorted(folder.iterdir()))
    assert sorted(found) == sorted(data)
    assert "% full" in train.notes[0]
    again, _ = build_sources("text", args, 7)
    indices = np.array([5, 1])
    assert torch.equal(again.fetch(indices, 3)[0], train.fetch(indices, 0)[0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"pack": "files"}, "pack='files' .* one of none, documents, fit"),
        ({"pack": "fit", "task": "masked_lm"}, "pack='fit' .* none with task=masked_lm"),
        ({"pack": "fit", "seq_len": 1}, "seq_len=1 .* at least 2"),
    ],
)
def test_errors(args, message):
    with pytest.raises(UsageError, match=message):
        build_sources("text", args, 0)


def test_parts_of_any_split_add_up_to_the_mean_over_the_global_batch(folder):
    source, _ = build_sources("text", {"path": str(folder), "seq_len": 16, "pack": "fit"}, 0)
    source = FirstSamples(source, 13)
    torch.manual_seed(0)
    table = torch.randn(257, 257, dtype=torch.float64)
    loss = TASKS["causal_lm"].loss

    def mean_of(world, accumulate, batch_number):
        total = 0.0
        for rank in range(world):
            loader = Loader(source, batch=8, rank=rank, world=world, accumulate=accumulate, seed=5)
            batch = list(loader.epoch(0))[batch_number]
            for inputs, targets, units in zip(
                batch.inputs, batch.targets, batch.units, strict=True
            ):
                total += loss(table[inputs], targets) * units / batch.num_global_units
        return total

    for number in (0, 1):
        alone = mean_of(1, 1, number)
        for world, accumulate in ((2, 1), (3, 1), (1, 4), (2, 3), (8, 1)):
            split = mean_of(world, accumulate, number)
            torch.testing.assert_close(split, alone, rtol=1e-12, atol=0)


class Ragged:
    """A data set of one's own with ignored targets."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        targets = torch.arange(4)
        targets[index % 4 :] = IGNORED_TARGET
        return torch.arange(4), targets

    def count_targets(self, indices):
        return indices % 4


def test_a_data_set_of_ones_own_counts_its_targets():
    loader = Loader(as_source(Ragged(), 0, "ragged"), batch=6, rank=1, world=2, prefetch=0)
    (batch,) = loader.epoch(0)
    assert batch.units == (int((batch.targets[0] != IGNORED_TARGET).sum()),)
    assert batch.num_global_units == 0 + 1 + 2 + 3 + 0 + 1
    as_list = as_source(Ragged(), 0, "ragged")
    as_list.count_targets = lambda indices: [int(index) % 4 for index in indices]
    (other,) = Loader(as_list, batch=6, rank=1, world=2, prefetch=0).epoch(0)
    assert other.units == batch.units


def test_a_part_with_no_target_has_loss_and_gradient_zero():
    logits = torch.randn(2, 4, 9, requires_grad=True)
    loss = TASKS["causal_lm"].loss(logits, torch.full((2, 4), IGNORED_TARGET))
    loss.backward()
    assert loss.item() == 0.0
    assert (logits.grad == 0).all()


TINY = {"vocab": 48, "width": 32, "depth": 2, "heads": 4, "kv_heads": 2, "max_seq": 64}


def test_documents_packed_together_have_the_logits_they_have_alone():
    torch.manual_seed(5)
    model = Llama(**TINY, separator=40)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = model.double()
    documents = [torch.randint(40, (n,)) for n in (5, 1, 9)]
    documents = [torch.cat([torch.tensor([40]), d]) for d in documents]
    together = model(torch.cat(documents)[None])[0]
    alone = torch.cat([model(d[None])[0] for d in documents])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
    # Without the separator they do see each other, so the comparison means something.
    model.separator = None
    assert (model(torch.cat(documents)[None])[0] - alone).abs().max() > 1e-2


def test_the_mask_is_causal_and_stops_at_documents():
    tokens = torch.tensor([[7, 7, 9, 7, 9, 9]])
    wanted = [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    assert document_mask(tokens, 9)[0, 0].int().tolist() == wanted


def test_a_separator_outside_the_vocabulary_is_refused():
    with pytest.raises(UsageError, match=r"separator=256.* vocab=48; give one from 0 to 47"):
        Llama(**TINY, separator=256)
